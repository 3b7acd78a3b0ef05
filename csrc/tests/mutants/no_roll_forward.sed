# Mutant of reap.hpp: a dead dispatch is always undone, though its fate says that it has happened.
s/return table->get(FateBook::index(uid)) == kDispatched ? State::QUEUED : State::FREE;/return State::FREE;/
