// The learner of the ledger model: replay, claims of whole groups, the record, fates, freed slots, checkpoints.
#pragma once

#include "ledger_state.hpp"

namespace model {

class LedgerLearner : public LedgerState {
  public:
    using LedgerState::LedgerState;

  protected:
    template <class Out>
    void learner(const State& s, Out&& out) const {
        State n = s;
        if (s.learner != L_GONE && may_die(s)) learner_dies(s, out);
        switch (s.learner) {
            case L_GONE:
                n.learner = L_START;
                return out(n, {"a learner loads the checkpoint and replays the log", 0, 0, false, replay_is_wrong(s)});
            case L_START:
                return store_fates(s, out);
            case L_LOOK:
                return look(s, out);
            case L_CLAIM:
                return claim_group(s, out);
            case L_RECORD:
                return append(s, out);
            case L_END:
                return end_batch(s, out);
            case L_ASIDE:
                return set_aside(s, out);
            default:
                return end_checkpoint(s, out);
        }
    }

    template <class Out>
    void learner_dies(const State& s, Out&& out) const {
        State n = killed(s);
        each(n, [](Sample& x) {
            if (x.place == TRAINING) x.place = TRAINING_DEAD;
        });
        n.learner = L_GONE;
        n.at_group = 0;
        out(n, {"the learner is killed", 0, 0, true});
    }

    const char* replay_is_wrong(const State& s) const {
        if (c.mutant != LedgerMutant::REPLAY_ALL) return nullptr;
        bool twice = false;
        State copy = s;
        each(copy, [&](const Sample& x) { twice |= x.logged && x.kept; });
        return twice ? "trained twice: by the checkpoint and by the replay" : nullptr;
    }

    template <class Out>
    void store_fates(const State& s, Out&& out) const {
        State n = s;
        bool done = true;
        each(n, [&](Sample& x) {
            if (!done || c.mutant == LedgerMutant::NO_LOG_CHECK || !(x.logged || x.kept) || x.fate == TRAINED) return;
            x.fate = TRAINED;
            done = false;
        });
        if (done) n.learner = L_LOOK;
        out(n, {done ? "the learner is ready" : "the learner stores fate T of what its predecessor trained"});
    }

    // One look: free what was trained already, else take a resolved group to train or to set aside, or keep the work.
    template <class Out>
    void look(const State& s, Out&& out) const {
        State n = s;
        bool old = false;
        each(n, [&](Sample& x) {
            if (c.mutant == LedgerMutant::NO_LOG_CHECK || x.place != REWARDED || !(x.logged || x.kept)) return;
            old = true;
            move(x, TRAINING);
        });
        if (old) {
            n.learner = L_END;
            return out(n, {"the learner claims what its predecessor trained"});
        }
        for (int g = 0; g < kGroups; ++g) {
            if (!resolved(s, g) || survivors(s, g) == 0) continue;
            const bool usable = !closed(s, g) && survivors(s, g) >= kMembers;
            State chosen = s;
            chosen.at_group = uint8_t(g + 1);
            chosen.learner = L_ASIDE;
            out(chosen, {"the learner sets group %d aside", g});
            chosen.learner = L_CLAIM;
            if (usable) out(chosen, {"the learner takes group %d", g});
        }
        if (c.checkpoints) begin_checkpoint(s, out);
    }

    template <class Out>
    void claim_group(const State& s, Out&& out) const {
        const int g = s.at_group - 1;
        bool all = true;
        for (int m = 0; m < kMembers; ++m)
            for (int t = 0; t < kTries; ++t) {
                if (!survives(s.sample[g][m][t])) continue;
                all = false;
                State n = s;
                move(n.sample[g][m][t], TRAINING);
                out(n, {"the learner claims sample %d", uid(g, m, t)});
            }
        if (!all) return;
        State n = s;
        n.learner = L_RECORD;
        out(n, {"the learner has claimed all of group %d", g});
    }

    template <class Out>
    void append(const State& s, Out&& out) const {
        const int g = s.at_group - 1;
        State n = s;
        bool twice = false;
        each(n, [&](Sample& x) {
            if (x.place != TRAINING) return;
            twice |= x.logged || x.kept;
            x.logged = 1;
        });
        n.learner = L_END;
        out(n, {"the learner appends the record of group %d", g, 0, false, twice ? "trained twice" : nullptr});
        if (!c.accidents) return;
        for (int m = 0; m < kMembers; ++m)
            for (int t = 0; t < kTries; ++t) {
                if (s.sample[g][m][t].place != TRAINING) continue;
                State back = s;
                move(back.sample[g][m][t], DROPPED_ACCIDENT);
                each(back, [](Sample& x) {
                    if (x.place == TRAINING) move(x, REWARDED);
                });
                back.at_group = 0;
                back.learner = L_LOOK;
                out(back, {"the learner finds sample %d malformed, drops it and hands the rest back", uid(g, m, t)});
            }
    }

    template <class Out>
    void end_batch(const State& s, Out&& out) const {
        State n = s;
        const char* text = "the learner has ended its batch";
        bool moved = false;
        each(n, [&](Sample& x) {
            if (moved || x.place != TRAINING) return;
            moved = true;
            if (x.fate != TRAINED) {
                x.fate = TRAINED;
                text = "the learner stores fate T of a sample";
            } else {
                move(x, NOWHERE);
                text = "the learner frees the slot of a sample";
            }
        });
        if (!moved) n.learner = L_LOOK, n.at_group = 0;
        out(n, {text});
    }

    template <class Out>
    void set_aside(const State& s, Out&& out) const {
        const int g = s.at_group - 1;
        State n = s;
        bool moved = false;
        for (auto& member : n.sample[g])
            for (Sample& x : member)
                if (!moved && survives(x)) moved = move(x, DROPPED_RULE);
        if (!moved) n.learner = L_LOOK, n.at_group = 0;
        out(n, {moved ? "the learner drops a sample of group %d" : "the learner has set group %d aside", g});
    }

    template <class Out>
    void begin_checkpoint(const State& s, Out&& out) const {
        State n = s;
        bool some = false;
        each(n, [&](Sample& x) {
            some |= x.logged;
            if (c.mutant == LedgerMutant::LOG_CUT_FIRST)
                x.logged = 0;
            else
                x.kept |= x.logged;
        });
        if (!some) return;
        n.learner = L_CHECKPOINT;
        out(n, {c.mutant == LedgerMutant::LOG_CUT_FIRST ? "the learner drops the records of its log"
                                                        : "the learner's checkpoint is whole and has its name"});
    }

    template <class Out>
    void end_checkpoint(const State& s, Out&& out) const {
        State n = s;
        each(n, [&](Sample& x) {
            if (c.mutant == LedgerMutant::LOG_CUT_FIRST)
                x.kept |= x.fate == TRAINED;
            else if (x.kept)
                x.logged = 0;
        });
        n.learner = L_LOOK;
        out(n, {c.mutant == LedgerMutant::LOG_CUT_FIRST ? "the learner writes the checkpoint"
                                                        : "the learner drops the records that the checkpoint holds"});
    }
};

}  // namespace model
