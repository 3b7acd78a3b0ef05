// What a process of the slot model does with a slot that it holds: dispatch, generation, reward, training, drops. One
// step is one access to shared memory that others can tell from the one before.
#pragma once

#include "slot_state.hpp"

namespace model {

class SlotWork : public SlotState {
  public:
    using SlotState::SlotState;

  protected:
    template <class Out>
    void claim(const State& s, int i, int j, S to, Pc pc, const char* text, Out&& out) const {
        State n = s;
        move(n, j, s.slot[j].word, to, uint8_t(i + 1));
        n.process[i].pc = pc;
        n.process[i].slot = uint8_t(j);
        n.process[i].word = n.slot[j].word;
        reached(step_of("take.claimed"));  // the same state as after claim.cas
        reached(step_of("move.cas"));      // and after these: a hint decides nothing, so the model has none
        reached(step_of("move.hinted"));
        out(n, {text, i + 1, j});
    }

    template <class Out>
    void drop(const State& s, int i, int j, Out&& out) const {
        State n = s;
        if (!move(n, j, s.slot[j].word, S::DROPPED, 1)) return;
        n.process[i].pc = P_DROPPED;
        n.process[i].slot = uint8_t(j);
        n.process[i].reg = 0;
        n.process[i].word = n.slot[j].word;
        out(n, {"process %d drops slot %d", i + 1, j});
    }

    template <class Out>
    void go_on_dispatch(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot;
        State n = at(s, i, uint8_t(p.pc + 1));
        switch (p.pc) {
            case D_CLAIMED:
                n.slot[j].uid = 0;
                return out(n, {"process %d sets the uid of slot %d to none", i + 1, j});
            case D_RESERVED:
                return out(n, {"process %d writes the task into slot %d", i + 1, j});
            case D_WRITTEN:
                n.slot[j].stamped = holds(s, i);
                return out(n, {"process %d writes last_commit_seq of slot %d", i + 1, j});
            case D_SEQ:
                n.slot[j].uid = p.reg;
                return out(n, {"process %d writes the uid of slot %d", i + 1, j});
            case D_UID:
                n.fate[p.reg - 1] = DISPATCHED;
                return out(n, {"process %d stores fate D of sample %d", i + 1, p.reg});
            default:
                n = idle(s, i);
                move(n, j, p.word, S::QUEUED, 0);
                reached(step_of("dispatch.queued"));
                return out(n, {"process %d commits slot %d: QUEUED", i + 1, j});
        }
    }

    template <class Out>
    void go_on_generate(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot;
        const int k = s.slot[j].word.segs < kSegments ? s.slot[j].word.segs : kSegments - 1;
        State n = at(s, i, uint8_t(p.pc + 1));
        switch (p.pc) {
            case G_CLAIMED:
                if (c.segments == 0) return generate_at_once(s, i, out);
                // clear_segments: what a dead generator left behind
                for (int x = k; x < c.segments; ++x)
                    if (holds(s, i)) n.slot[j].segment[x] = EMPTY;
                return out(n, {"process %d clears what was not committed in slot %d", i + 1, j});
            case G_CLEARED:
                give_back(s, i, S::QUEUED, out);
                if (!holds(s, i)) return out(idle(s, i), {"process %d sees that slot %d is not its own", i + 1, j});
                n.slot[j].segment[k] = PARTIAL;
                return out(n, {"process %d writes half a segment of slot %d", i + 1, j});
            case G_COPYING:
                // Plain memory: it is written whoever owns the slot by now, over whatever is there.
                n.slot[j].segment[k] = PARTIAL;
                return out(n, {"process %d writes the rest of the segment of slot %d", i + 1, j});
            case G_COPIED:
                n.slot[j].segment[k] = holds(s, i) ? WHOLE : PARTIAL;
                return out(n, {"process %d stores the segment's descriptor in slot %d", i + 1, j});
            case G_STORED:
                give_back(s, i, S::QUEUED, out);
                if (c.drops && holds(s, i)) drop(s, i, j, out);
                if (!holds(s, i)) return out(idle(s, i), {"process %d sees that slot %d is not its own", i + 1, j});
                n.slot[j].stamped = 1;
                return out(n, {"process %d is about to commit slot %d", i + 1, j});
            default:
                n = idle(s, i);
                reached(step_of("commit.after"));
                move(n, j, p.word, s.slot[j].word.segs + 1 >= c.segments ? S::GENERATED : S::QUEUED, 0, 1);
                return out(n, {"process %d commits a segment of slot %d", i + 1, j});
        }
    }

    template <class Out>
    void generate_at_once(const State& s, int i, Out&& out) const {
        const int j = s.process[i].slot;
        give_back(s, i, S::QUEUED, out);
        if (c.drops) drop(s, i, j, out);
        State n = at(s, i, G_COMMITTING);
        n.slot[j].segment[0] = WHOLE;
        n.slot[j].stamped = 1;
        out(n, {"process %d generates the sample of slot %d", i + 1, j});
    }

    template <class Out>
    void give_back(const State& s, int i, S to, Out&& out) const {
        State n = idle(s, i);
        if (!c.backs || !move(n, s.process[i].slot, s.process[i].word, to, 0)) return;
        out(n, {"process %d hands slot %d back", i + 1, s.process[i].slot});
    }

    template <class Out>
    void go_on_reward(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot;
        State n = at(s, i, uint8_t(p.pc + 1));
        if (p.pc != R_COPYING && !holds(s, i))
            return out(idle(s, i), {"process %d sees that slot %d is not its own", i + 1, j});
        switch (p.pc) {
            case R_CLAIMED:
                give_back(s, i, S::GENERATED, out);
                if (c.drops) drop(s, i, j, out);
                if (c.segments == 0) {
                    n.process[i].pc = R_STORED;
                    n.slot[j].reward = WHOLE;
                    return out(n, {"process %d writes the reward of slot %d", i + 1, j});
                }
                n.slot[j].reward = PARTIAL;
                return out(n, {"process %d writes half the reward of slot %d", i + 1, j});
            case R_COPYING:
                n.slot[j].reward = holds(s, i) ? WHOLE : PARTIAL;
                return out(n, {"process %d writes the rest of the reward of slot %d", i + 1, j});
            default:
                give_back(s, i, S::GENERATED, out);  // one part of several
                n = idle(s, i);
                reached(step_of("release.after"));
                move(n, j, p.word, S::REWARDED, 0);
                return out(n, {"process %d commits the reward of slot %d", i + 1, j});
        }
    }

    template <class Out>
    void go_on_train(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot, u = index_of(s.slot[j].uid);
        State n = at(s, i, uint8_t(p.pc + 1));
        if (p.pc != T_FREED_EARLY && !holds(s, i))
            return out(idle(s, i), {"process %d sees that slot %d is not its own", i + 1, j});
        switch (p.pc) {
            case T_CLAIMED:
                if (s.logged[u] && c.mutant != SlotMutant::NO_LOG_CHECK)
                    return out(n, {"process %d finds the sample of slot %d in the log", i + 1, j});
                give_back(s, i, S::REWARDED, out);
                if (c.drops) drop(s, i, j, out);
                n.logged[u] = 1;
                return out(n, {"process %d appends the record of slot %d to the log", i + 1, j, false,
                               s.logged[u] ? "trained twice" : nullptr});
            case T_LOGGED:
                if (c.mutant == SlotMutant::FREE_FIRST) {
                    move(n, j, p.word, S::FREE, 0);
                    n.process[i].pc = T_FREED_EARLY;
                    n.process[i].reg = uint8_t(u + 1);
                    return out(n, {"process %d frees slot %d before its fate is stored", i + 1, j});
                }
                n.fate[u] = TRAINED;
                return out(n, {"process %d stores fate T of the sample in slot %d", i + 1, j});
            case T_FATE:
                n = idle(s, i);
                reached(step_of("finish.free"));
                move(n, j, p.word, S::FREE, 0);
                return out(n, {"process %d frees slot %d", i + 1, j});
            default:
                n = idle(s, i);
                n.fate[p.reg - 1] = TRAINED;
                return out(n, {"process %d stores fate T of sample %d", i + 1, p.reg});
        }
    }

    // complete_drop(): by the dropper, or by anybody who sees the slot DROPPED, several at once.
    template <class Out>
    void go_on_drop(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot;
        State n = at(s, i, uint8_t(p.pc + 1));
        switch (p.pc) {
            case P_DROPPED:
                n.process[i].reg = s.slot[j].uid;
                return out(n, {"process %d reads the uid of slot %d", i + 1, j});
            case P_UID:
                if (!holds(s, i)) return out(idle(s, i), {"process %d sees that slot %d has moved on", i + 1, j});
                return out(n, {"process %d sees slot %d unchanged", i + 1, j});
            case P_SAME:
                if (c.mutant == SlotMutant::DROP_FREE_FIRST) {
                    n.process[i].pc = P_FREED_EARLY;
                    if (!move(n, j, p.word, S::FREE, 0)) n = idle(s, i);
                    return out(n, {"process %d frees slot %d before its reason is stored", i + 1, j});
                }
                if (s.fate[index_of(p.reg)] == DISPATCHED) n.fate[index_of(p.reg)] = REASON;  // a reason only over D
                return out(n, {"process %d stores the reason of sample %d", i + 1, p.reg});
            case P_FATE:
                n = idle(s, i);
                move(n, j, p.word, S::FREE, 0);
                return out(n, {"process %d frees slot %d", i + 1, j});
            default:
                n = idle(s, i);
                if (s.fate[index_of(p.reg)] == DISPATCHED) n.fate[index_of(p.reg)] = REASON;
                return out(n, {"process %d stores the reason of sample %d", i + 1, p.reg});
        }
    }
};

}  // namespace model
