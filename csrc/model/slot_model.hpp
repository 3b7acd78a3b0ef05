// Model 1, "slot": the control word, the process table and the payload, one memory access at a time.
//
// Modelled, as csrc/ does it: registration (byte lock, then one CAS), dispatch (claim, clear uid, write,
// last_commit_seq, uid, fate, commit), generation in segments, the reward, training with its log, hand-backs, drops by
// owner and by anybody, completion of drops, orderly leaving, and reaping (read entry, prove death, read it again; read
// word, read entry, decide, CAS; retire entry). Every process may do all of it, reap any other, stop for ever so long
// and be killed between any two steps, any number of times; entries of the table are used again by new processes. One
// process at a time dispatches and one trains (their locks), and a dispatcher begins by reaping its predecessor. Slot
// words are moved by next_word() and kTransitions of word.hpp, the same that the ring uses.
//
// Left out: memory weaker than sequential consistency (ThreadSanitizer and aarch64 runs look at that), priorities,
// offers, attempts, and wake-ups (they decide who works when, never what is right), groups, credit and checkpoints
// (model 2). The log is one bit per sample here. A claim reads and swaps in one step: a swap that fails changes
// nothing.
//
// Exact reductions: seq and epoch only grow and are only compared for equality, so a copy is kept as "current" or
// "old"; entries, slots and samples are interchangeable, so states that differ by their numbering are one.
#pragma once

#include "slot_work.hpp"

namespace model {

class SlotModel : public SlotWork {
  public:
    using SlotWork::SlotWork;

    // ------------------------------------------------------------------------------------------------ the rules

    const char* wrong(const State& s) const {
        for (int j = 0; j < c.slots; ++j) {
            const Slot& slot = s.slot[j];
            const busrl::State state = busrl::State(slot.word.state);
            if (state == busrl::State::FREE || state == busrl::State::RESERVED) continue;
            for (int k = 0; k < slot.word.segs; ++k)
                if (slot.segment[k] != WHOLE) return "torn: a committed segment is not whole";
            const bool rewarded = state == busrl::State::REWARDED || state == busrl::State::TRAINING;
            if (rewarded && slot.reward != WHOLE) return "torn: a committed reward is not whole";
        }
        for (int j = 0; j < c.slots; ++j) {
            const Word& w = s.slot[j].word;
            if (busrl::is_working(busrl::State(w.state)) && !s.process[w.owner - 1].live)
                return "leaked: a slot names an entry that is free";
        }
        for (int u = 0; u < c.uids; ++u) {
            const int homes = homes_of(s, u);
            if (homes > 1) return "doubled: one sample in two slots";
            if (s.fate[u] == DISPATCHED && homes == 0) return "lost: a dispatched sample is in no slot";
            if (s.fate[u] == TRAINED && !s.logged[u]) return "a sample is called trained that is not in the log";
            if (s.fate[u] == REASON && s.logged[u]) return "a trained sample has an untrained fate";
        }
        return nullptr;
    }

    bool ended(const State& s) const {
        for (int u = 0; u < c.uids; ++u)
            if (s.fate[u] != TRAINED && s.fate[u] != REASON) return false;
        for (int j = 0; j < c.slots; ++j)
            if (s.slot[j].word.state != uint8_t(busrl::State::FREE)) return false;
        for (int i = 0; i < c.entries; ++i)
            if (s.process[i].live && !s.process[i].alive) return false;  // a leaked entry
        return true;
    }

    // ------------------------------------------------------------------------------------------------ the steps

    template <class Out>
    void next(const State& s, Out&& out) const {
        for (int i = 0; i < c.entries; ++i) {
            const Process& p = s.process[i];
            if (!p.alive) {
                without_process(s, i, out);
                continue;
            }
            die(s, i, out);
            if (p.pc == IDLE)
                choose(s, i, out);
            else
                go_on(s, i, out);
        }
        if (s.process[outsider].alive) {
            die(s, outsider, out);
            go_on(s, outsider, out);
        } else {
            reap_from_outside(s, out);
        }
    }

  private:
    // -- life ----------------------------------------------------------------------------------------------------

    template <class Out>
    void without_process(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        State n = s;
        if (p.live) {  // a newcomer tries this lock, sees that the entry is not free and lets go
            n.process[i].probed = !p.probed;
            return out(
                n, {p.probed ? "the newcomer lets go of the lock of entry %d" : "a newcomer tries the lock of entry %d",
                    i + 1});
        }
        n.process[i].alive = 1;
        n.process[i].pc = LOCKED;
        out(n, {"a new process takes the lock of entry %d", i + 1});
    }

    // The crash point of csrc at which a process stands whose last deed is `pc`.
    static constexpr size_t step_before(uint8_t pc) {
        switch (pc) {
            case LOCKED:
                return step_of("register.lock");
            case D_CLAIMED:
                return step_of("dispatch.claimed");
            case D_RESERVED:
                return step_of("dispatch.reserved");
            case D_WRITTEN:
                return step_of("dispatch.written");
            case D_UID:
                return step_of("dispatch.uid");
            case D_FATE:
                return step_of("dispatch.fate");
            case G_CLAIMED:
                return step_of("claim.cas");
            case G_COPIED:
                return step_of("put.copied");
            case G_STORED:
                return step_of("put.stored");
            case G_COMMITTING:
                return step_of("commit.before");
            case R_STORED:
                return step_of("release.before");
            case T_FATE:
                return step_of("finish.fate");
            case P_DROPPED:
                return step_of("drop.cas");
            case P_FATE:
                return step_of("drop.fate");
            case Q_DECIDED:
                return step_of("reap.before");
            case Q_SCANNED:
                return step_of("reap.entry");
            default:
                return kStepCount;
        }
    }
    template <class Out>
    void die(const State& s, int i, Out&& out) const {
        coverage().killed_after[step_before(s.process[i].pc)] = true;
        State n = s;
        Process& p = n.process[i];
        rest(p);
        p.alive = 0;
        out(n, {"process %d is killed", i + 1, 0, true});
    }

    // -- what an idle process may begin --------------------------------------------------------------------------

    template <class Out>
    void choose(const State& s, int i, Out&& out) const {
        for (int j = 0; j < c.slots; ++j) begin_on_slot(s, i, j, out);
        for (int t = 0; t < c.entries; ++t) {
            if (t == i || !s.process[t].live) continue;
            State n = at(s, i, Q_IDENT);
            n.process[i].target = uint8_t(t);
            out(n, {"process %d reads entry %d to reap it", i + 1, t + 1});
        }
        State n = at(s, i, RETIRED);
        n.process[i].live = 0;
        ident_changed(n, i);
        out(n, {"process %d frees its entry to leave", i + 1});
    }

    template <class Out>
    void begin_on_slot(const State& s, int i, int j, Out&& out) const {
        const S state = S(s.slot[j].word.state);
        const bool learner = !another(s, i, trains);
        if (state == S::FREE) begin_dispatch(s, i, j, out);
        if (state == S::QUEUED) claim(s, i, j, S::GENERATING, G_CLAIMED, "process %d claims slot %d to generate", out);
        if (state == S::GENERATED) claim(s, i, j, S::REWARDING, R_CLAIMED, "process %d claims slot %d to reward", out);
        if (state == S::REWARDED && learner)
            claim(s, i, j, S::TRAINING, T_CLAIMED, "process %d claims slot %d to train", out);
        const bool mine = state != S::REWARDED || (learner && !s.logged[index_of(s.slot[j].uid)]);
        const bool droppable = state == S::QUEUED || state == S::GENERATED || state == S::REWARDED;
        if (c.drops && droppable && mine) drop(s, i, j, out);
        if (state == S::DROPPED) {
            State n = at(s, i, P_DROPPED);
            n.process[i].slot = uint8_t(j);
            n.process[i].word = s.slot[j].word;
            out(n, {"process %d sees slot %d DROPPED", i + 1, j});
        }
    }

    template <class Out>
    void begin_dispatch(const State& s, int i, int j, Out&& out) const {
        if (another(s, i, dispatches)) return;
        if (c.mutant != SlotMutant::SUCCESSOR_RUSHES)
            for (int k = 0; k < c.slots; ++k)
                if (s.slot[k].word.state == uint8_t(S::RESERVED)) return;
        for (int u = 0; u < c.uids; ++u) {
            if (s.fate[u] != NONE) continue;
            State n = at(s, i, D_CLAIMED);
            n.process[i].slot = uint8_t(j);
            n.process[i].reg = uint8_t(u + 1);
            move(n, j, s.slot[j].word, S::RESERVED, uint8_t(i + 1));
            n.process[i].word = n.slot[j].word;
            out(n, {"process %d claims slot %d to dispatch", i + 1, j});
        }
    }

    // Registration found every entry taken: before it gives up it reaps, without an entry and without the fates.
    template <class Out>
    void reap_from_outside(const State& s, Out&& out) const {
        for (int t = 0; t < c.entries; ++t)
            if (!s.process[t].live) return;
        if (c.mutant == SlotMutant::GIVES_UP) return;
        for (int t = 0; t < c.entries; ++t) {
            State n = at(s, outsider, Q_IDENT);
            n.process[outsider].alive = 1;
            n.process[outsider].target = uint8_t(t);
            out(n, {"process %d finds the table full and reads entry %d to reap it", outsider + 1, t + 1});
        }
    }

    void ident_changed(State& s, int t) const {
        for (int k = 0; k <= outsider; ++k)
            if (s.process[k].pc >= Q_IDENT && s.process[k].target == t) s.process[k].changed = 1;
    }

    template <class Out>
    void go_on(const State& s, int i, Out&& out) const {
        const uint8_t pc = s.process[i].pc;
        if (pc <= RETIRED) return register_or_leave(s, i, out);
        if (pc <= D_FATE) return go_on_dispatch(s, i, out);
        if (pc <= G_COMMITTING) return go_on_generate(s, i, out);
        if (pc <= R_STORED) return go_on_reward(s, i, out);
        if (pc <= T_FREED_EARLY) return go_on_train(s, i, out);
        if (pc <= P_FREED_EARLY) return go_on_drop(s, i, out);
        go_on_reap(s, i, out);
    }

    template <class Out>
    void register_or_leave(const State& s, int i, Out&& out) const {
        State n = idle(s, i);
        if (s.process[i].pc == LOCKED) {
            n.process[i].live = 1;
            ident_changed(n, i);
            reached(step_of("register.cas"));  // an idle process is one that has just registered
            return out(n, {"process %d publishes its entry", i + 1});
        }
        n.process[i].alive = 0;
        out(n, {"process %d lets go of its lock and is gone", i + 1});
    }

    // -- reaping -------------------------------------------------------------------------------------------------

    template <class Out>
    void go_on_reap(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot, t = p.target;
        State n = at(s, i, uint8_t(p.pc + 1));
        switch (p.pc) {
            case Q_IDENT:
                if ((s.process[t].alive || s.process[t].probed) && c.mutant != SlotMutant::TIMEOUT)
                    return out(idle(s, i), {"process %d finds no proof that process %d is dead", i + 1, t + 1});
                return out(n, {"process %d finds the lock of entry %d free", i + 1, t + 1});
            case Q_FREE_LOCK:
                if (p.changed) return out(idle(s, i), {"process %d sees that entry %d has changed", i + 1, t + 1});
                if (c.mutant == SlotMutant::ENTRY_FIRST) n.process[t].live = 0;
                return out(n, {"process %d has proof that process %d is dead", i + 1, t + 1});
            case Q_SCAN:
                return read_word(s, i, out);
            case Q_WORD:
                if (p.changed && c.mutant != SlotMutant::NO_REREAD)
                    return out(idle(s, i), {"process %d sees that entry %d has changed", i + 1, t + 1});
                return out(n, {"process %d sees entry %d unchanged", i + 1, t + 1});
            case Q_SAME_ENTRY:
                if (i == outsider && needs_fates(s, i))
                    return out(idle(s, i), {"process %d leaves slot %d to one that has the fates", i + 1, j});
                if (goes_forward(s, i)) n.process[i].reg |= 2;
                return out(n, {"process %d decides where slot %d belongs", i + 1, j});
            case Q_DECIDED:
                return reap_cas(s, i, out);
            default:
                n = idle(s, i);
                if (!p.changed) {
                    n.process[t].live = 0;
                    ident_changed(n, t);
                }
                return out(n, {p.changed ? "process %d finds entry %d freed already" : "process %d frees entry %d",
                               i + 1, t + 1});
        }
    }

    // The slots are scanned in any order, so that they remain interchangeable.
    template <class Out>
    void read_word(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        for (int j = 0; j < c.slots; ++j) {
            if (p.reg == 1 && j != p.slot) continue;
            State n = s;
            n.process[i].slot = uint8_t(j);
            if (c.slots == 1) n.process[i].reg = 1;
            const Word& w = s.slot[j].word;
            if (busrl::is_working(S(w.state)) && w.owner == p.target + 1) {
                n.process[i].pc = Q_WORD;
                n.process[i].word = w;
                out(n, {"process %d reads the word of slot %d", i + 1, j});
            } else {
                next_slot(n, i);
                out(n, {"process %d finds slot %d not to be reaped", i + 1, j});
            }
        }
    }

    void next_slot(State& n, int i) const {
        Process& p = n.process[i];
        p.word = {};
        const bool last = p.reg & 1;
        p.pc = last ? Q_SCANNED : Q_SCAN;
        p.slot = last ? 0 : uint8_t(1 - p.slot);
        p.reg = last ? 0 : 1;
    }

    // resting_state() of reap.hpp, for RESERVED: forward to QUEUED or back to FREE.
    bool goes_forward(const State& s, int i) const {
        const Process& p = s.process[i];
        const Slot& slot = s.slot[p.slot];
        if (p.word.old || S(p.word.state) != S::RESERVED) return false;
        if (slot.uid == 0 || c.mutant == SlotMutant::NO_ROLL_FORWARD) return false;
        if (!slot.stamped && c.mutant != SlotMutant::NO_UID_CHECK) return false;
        return s.fate[slot.uid - 1] == DISPATCHED;
    }

    bool needs_fates(const State& s, int i) const {
        const Process& p = s.process[i];
        const Slot& slot = s.slot[p.slot];
        return !p.word.old && S(p.word.state) == S::RESERVED && slot.uid != 0 && slot.stamped;
    }

    template <class Out>
    void reap_cas(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        const int j = p.slot, t = p.target;
        State n = s;
        const S to = p.reg & 2 ? S::QUEUED : busrl::rest_of(S(p.word.state));  // of RESERVED: FREE
        const bool moved = !p.word.old && move(n, j, p.word, to, 0);
        const Process& owner = s.process[t];
        const bool living = moved && owner.alive && owns(owner.pc) && owner.slot == j;
        reached(step_of("reap.cas"));
        next_slot(n, i);
        const char* wrong = living ? "a slot is taken from a living process" : nullptr;
        out(n, {moved ? "process %d rests slot %d" : "process %d finds slot %d moved", i + 1, j, false, wrong});
    }
};

}  // namespace model
