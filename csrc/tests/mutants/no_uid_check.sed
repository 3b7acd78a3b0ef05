# Mutant of reap.hpp: RESERVED goes forward by the uid that stands in the line, whoever wrote it.
/last_commit_seq\.load.*seq_of(word)) return State::FREE;/d
