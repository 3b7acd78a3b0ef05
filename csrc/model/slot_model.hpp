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

#include "coverage.hpp"
#include "explorer.hpp"

namespace model {

using busrl::State;

enum class SlotMutant : uint8_t {
    NONE,
    TIMEOUT,           // reaps without proof of death
    NO_SEQ,            // a claim does not raise seq
    NO_REREAD,         // the reaper does not read the entry again after the word
    NO_UID_CHECK,      // RESERVED goes forward by its uid alone, without last_commit_seq
    NO_ROLL_FORWARD,   // a dead dispatch is always undone
    NO_LOG_CHECK,      // the learner does not look whether a claimed sample is in the log
    FREE_FIRST,        // the slot is freed before the fate is stored
    DROP_FREE_FIRST,   // the same at a drop
    ENTRY_FIRST,       // the entry is freed before its slots are at rest
    SUCCESSOR_RUSHES,  // a dispatcher begins while its predecessor's slot is still RESERVED
    GIVES_UP,          // who finds the table full of dead entries does not reap
};

class SlotModel {
  public:
    static constexpr int kMaxSlots = 2, kMaxEntries = 3, kMaxUids = 2, kSegments = 2;

    struct Config {
        int slots, entries, uids;
        bool drops;    // processes also drop samples, for no reason at all
        bool backs;    // and hand slots back
        int segments;  // of a sample; 0 = one, generated in one step, and a reward given in one step
        SlotMutant mutant = SlotMutant::NONE;
    };

    // Where a process is. Each name is the last thing that it did; those in main.cpp's list are crash points of csrc.
    enum Pc : uint8_t {
        IDLE,
        LOCKED,
        RETIRED,
        D_CLAIMED,
        D_RESERVED,
        D_WRITTEN,
        D_SEQ,
        D_UID,
        D_FATE,
        G_CLAIMED,
        G_CLEARED,
        G_COPYING,
        G_COPIED,
        G_STORED,
        G_COMMITTING,
        R_CLAIMED,
        R_COPYING,
        R_STORED,
        T_CLAIMED,
        T_LOGGED,
        T_FATE,
        T_FREED_EARLY,
        P_DROPPED,
        P_UID,
        P_SAME,
        P_FATE,
        P_FREED_EARLY,
        Q_IDENT,
        Q_FREE_LOCK,
        Q_SCAN,
        Q_WORD,
        Q_SAME_ENTRY,
        Q_DECIDED,
        Q_SCANNED,
        PCS
    };
    enum Payload : uint8_t { EMPTY, PARTIAL, WHOLE };
    enum Fate : uint8_t { NONE, DISPATCHED, TRAINED, REASON };

    struct Word {  // a copy of a control word; `old` means that seq has moved on since
        uint8_t state, owner, segs, old;
        bool operator==(const Word& o) const {
            return state == o.state && owner == o.owner && segs == o.segs && old == o.old;
        }
    };
    struct Slot {
        Word word;
        uint8_t uid;      // 0 = none
        uint8_t stamped;  // last_commit_seq is the seq of the word
        uint8_t segment[kSegments];
        uint8_t reward;
    };
    struct Process {     // an entry of the table (live, probed) and the process that holds its byte lock, if any
        uint8_t live;    // the entry names a process
        uint8_t probed;  // the lock of a dead process's entry is held for a moment by one that looks for a free entry
        uint8_t alive;
        uint8_t pc;
        uint8_t target;   // the entry being reaped
        uint8_t changed;  // the ident read from it is not its ident any more
        uint8_t slot;
        uint8_t reg;  // D, P: a uid; Q: bit 0 = this is the last slot of the scan, bit 1 = RESERVED goes forward
        Word word;
    };
    struct State {
        Slot slot[kMaxSlots];
        Process process[kMaxEntries + 1];  // the last one, `outsider`, has no entry: it found the table full and reaps
        uint8_t fate[kMaxUids];
        uint8_t logged[kMaxUids];
    };
    using Key = std::array<uint64_t, 2>;

    explicit SlotModel(const Config& config) : c(config), outsider(config.entries) {}

    State initial() const {
        State s{};
        return s;
    }

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
    using S = busrl::State;
    const Config c;
    const int outsider;

    // -- the slot word -------------------------------------------------------------------------------------------

    // The one CAS: by next_word() of word.hpp on the exact word `expected`. The copies of all others grow old.
    bool move(State& s, int j, const Word& expected, S to, uint8_t who, uint8_t segments = 0) const {
        Slot& slot = s.slot[j];
        if (!(slot.word == expected)) return false;
        const S from = S(slot.word.state);
        if (!busrl::is_allowed(from, to)) return false;
        coverage().arrow(from, to);
        constexpr uint64_t kSeq = 1;
        const uint64_t word =
            busrl::next_word(busrl::make_word(from, slot.word.owner, slot.word.segs, kSeq), to, who, segments);
        const bool grown = busrl::seq_of(word) != kSeq && !(c.mutant == SlotMutant::NO_SEQ && busrl::is_working(to));
        slot.word = {uint8_t(busrl::state_of(word)), uint8_t(busrl::owner_of(word)), uint8_t(busrl::segs_of(word)), 0};
        if (grown) {
            slot.stamped = 0;
            for (int i = 0; i <= outsider; ++i)
                if (has_word(s.process[i].pc) && s.process[i].slot == j) s.process[i].word = {0, 0, 0, 1};
        }
        if (to == S::FREE) {  // what lies in a free slot is garbage, but its uid is still there
            for (uint8_t& segment : slot.segment) segment = EMPTY;
            slot.reward = EMPTY;
        }
        return true;
    }

    static bool has_word(uint8_t pc) {
        return (pc >= D_CLAIMED && pc <= P_FREED_EARLY) || pc == Q_WORD || pc == Q_SAME_ENTRY || pc == Q_DECIDED;
    }
    static bool owns(uint8_t pc) { return pc >= D_CLAIMED && pc <= T_FATE; }
    static bool dispatches(uint8_t pc) { return pc >= D_CLAIMED && pc <= D_FATE; }
    static bool trains(uint8_t pc) { return pc >= T_CLAIMED && pc <= T_FREED_EARLY; }

    int homes_of(const State& s, int u) const {
        int homes = 0;
        for (int j = 0; j < c.slots; ++j) {
            const Slot& slot = s.slot[j];
            const S state = S(slot.word.state);
            if (slot.uid != u + 1 || state == S::FREE) continue;
            homes += state != S::RESERVED || (slot.stamped && s.fate[u] == DISPATCHED);
        }
        return homes;
    }

    // -- small helpers -------------------------------------------------------------------------------------------

    static State at(const State& s, int i, uint8_t pc) {
        State n = s;
        n.process[i].pc = pc;
        return n;
    }
    static void rest(Process& p) {
        p.pc = IDLE;
        p.target = p.changed = p.slot = p.reg = 0;
        p.word = {};
    }
    State idle(const State& s, int i) const {
        State n = s;
        rest(n.process[i]);
        if (i == outsider) n.process[i].alive = 0;
        return n;
    }
    static int index_of(uint8_t uid) { return uid == 0 ? 0 : uid - 1; }  // 0 only where a mutant has been at work
    bool holds(const State& s, int i) const { return s.slot[s.process[i].slot].word == s.process[i].word; }
    template <class Test>
    bool another(const State& s, int i, Test&& test) const {
        for (int k = 0; k < c.entries; ++k)
            if (k != i && s.process[k].alive && test(s.process[k].pc)) return true;
        return false;
    }

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
    // Steps after which a process is idle again, or as after another step: death comes in the state that follows.
    static void reached(size_t step) { coverage().killed_after[step] = true; }

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

    template <class Out>
    void claim(const State& s, int i, int j, S to, Pc pc, const char* text, Out&& out) const {
        State n = s;
        move(n, j, s.slot[j].word, to, uint8_t(i + 1));
        n.process[i].pc = pc;
        n.process[i].slot = uint8_t(j);
        n.process[i].word = n.slot[j].word;
        reached(step_of("take.claimed"));  // the same state as after claim.cas
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

    // -- what a busy process does next ---------------------------------------------------------------------------

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

    // ------------------------------------------------------------------------------------------------ packing

  public:
    // The smallest of all the packings that differ by numbering. What is in order already by fields that do not depend
    // on the numbering need not be tried in another.
    Key pack(const State& s) const {
        static constexpr int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
        uint32_t process[kMaxEntries] = {}, slot[kMaxSlots] = {}, uid[kMaxUids] = {};
        for (int k = 0; k < c.entries; ++k) process[k] = plain(s.process[k]);
        for (int j = 0; j < c.slots; ++j) slot[j] = plain(s.slot[j]);
        for (int u = 0; u < c.uids; ++u) uid[u] = uint32_t(s.fate[u]) << 1 | s.logged[u];
        Key best{};
        bool first = true;
        for (const auto& entry : orders) {
            if ((c.entries < 3 && entry[2] != 2) || (c.entries < 2 && entry[1] != 1)) continue;
            if (process[entry[0]] > process[entry[1]] && c.entries > 1) continue;
            if (process[entry[1]] > process[entry[2]] && c.entries > 2) continue;
            for (int flip_slots = 0; flip_slots < c.slots; ++flip_slots)
                for (int flip_uids = 0; flip_uids < c.uids; ++flip_uids) {
                    if (c.slots > 1 && slot[flip_slots] > slot[1 - flip_slots]) continue;
                    if (c.uids > 1 && uid[flip_uids] > uid[1 - flip_uids]) continue;
                    const Key key = pack_as(s, entry, flip_slots, flip_uids);
                    if (first || key < best) best = key;
                    first = false;
                }
        }
        return best;
    }

    State unpack(const Key& key) const {
        Bits<2> bits;
        bits.words = key;
        State s{};
        auto get = [&](uint32_t n) { return uint8_t(bits.get(n)); };
        for (int j = 0; j < c.slots; ++j) {
            Slot& slot = s.slot[j];
            slot.word = {get(4), get(2), get(2), 0};
            slot.uid = get(2);
            slot.stamped = get(1);
            const uint8_t payload = get(5);
            slot.segment[0] = payload % 3, slot.segment[1] = payload / 3 % 3, slot.reward = payload / 9;
        }
        for (int i = 0; i <= outsider; ++i) {
            Process& p = s.process[i];
            if (i != outsider) p.live = get(1), p.probed = get(1);
            p.alive = get(1), p.pc = get(6), p.target = get(2), p.changed = get(1), p.slot = get(1), p.reg = get(2);
            p.word = {get(4), get(2), get(2), 0};
            if (p.word.state == kOld) p.word = {0, 0, 0, 1};
        }
        for (int u = 0; u < c.uids; ++u) s.fate[u] = get(2), s.logged[u] = get(1);
        return s;
    }

  private:
    static uint32_t plain(const Process& p) {
        return uint32_t(p.pc) << 16 | uint32_t(p.word.state) << 12 | uint32_t(p.word.segs) << 8 | p.word.old << 4 |
               p.live << 3 | p.probed << 2 | p.alive << 1 | p.changed;
    }
    static uint32_t plain(const Slot& slot) {
        return uint32_t(slot.word.state) << 12 | uint32_t(slot.word.segs) << 8 | uint32_t(slot.reward) << 6 |
               uint32_t(slot.segment[0]) << 4 | uint32_t(slot.segment[1]) << 2 | slot.stamped << 1 | (slot.uid != 0);
    }

    static constexpr uint8_t kOld = 15;  // in the place of a state: a copy whose seq is old

    // entry[k] = the old number of what is now entry k; slots and uids are at most two, so a flip renames them.
    Key pack_as(const State& s, const int (&entry)[3], int flip_slots, int flip_uids) const {
        uint8_t now[kMaxEntries + 1] = {};  // old owner number -> new one
        for (int k = 0; k < c.entries; ++k) now[entry[k] + 1] = uint8_t(k + 1);
        auto uid = [&](uint8_t old) -> uint64_t { return old == 0 ? 0 : ((old - 1) ^ flip_uids) + 1; };
        auto owner = [&](const Word& w) -> uint64_t { return busrl::is_working(S(w.state)) ? now[w.owner] : w.owner; };
        Bits<2> bits;
        for (int j = 0; j < c.slots; ++j) {
            const Slot& slot = s.slot[j ^ flip_slots];
            bits.put(slot.word.state, 4), bits.put(owner(slot.word), 2), bits.put(slot.word.segs, 2);
            bits.put(uid(slot.uid), 2), bits.put(slot.stamped, 1);
            bits.put(slot.segment[0] + 3 * slot.segment[1] + 9 * slot.reward, 5);
        }
        for (int k = 0; k <= outsider; ++k) {
            const Process& p = s.process[k == outsider ? k : entry[k]];
            if (k != outsider) bits.put(p.live, 1), bits.put(p.probed, 1);
            bits.put(p.alive, 1), bits.put(p.pc, 6);
            bits.put(p.pc >= Q_IDENT ? now[p.target + 1] - 1 : 0, 2), bits.put(p.changed, 1);
            bits.put(has_slot(p) ? p.slot ^ flip_slots : 0, 1);
            bits.put(p.pc >= Q_IDENT ? p.reg : uid(p.reg), 2);
            bits.put(p.word.old ? kOld : p.word.state, 4), bits.put(owner(p.word), 2), bits.put(p.word.segs, 2);
        }
        for (int u = 0; u < c.uids; ++u) bits.put(s.fate[u ^ flip_uids], 2), bits.put(s.logged[u ^ flip_uids], 1);
        return bits.words;
    }
    static bool has_slot(const Process& p) { return has_word(p.pc) || (p.pc == Q_SCAN && p.reg == 1); }
};

}  // namespace model
