// Model 3, "hint": the two-level bitmap that says where slots rest in a state, so that no search scans the ring.
//
// Modelled, one atomic access at a time: hint() (read the leaf bit, set it, read the top bit, set it) after the word
// has moved; unhint() (clear leaf bits, look at the words again, set what has come back); a search that finds words
// moved and takes their bits back, and one that finds a leaf empty, clears the top bit and looks at the leaf again; a
// rescan after a death. Everybody may be killed between any two steps, any number of times. The rule: while all live,
// or once a rescan is over that began after the last death, a slot that rests in the state has its leaf bit and the top
// bit, as soon as nobody is in the middle of something. From every state that is reached.
//
// Left out: other leaves (a search looks at one at a time) and the state machine (a slot is in the state or not).
#pragma once

#include "explorer.hpp"

namespace model {

enum class HintMutant : uint8_t {
    NONE,
    NO_RECHECK,      // bits are cleared without a second look at the words
    NO_TOP_RECHECK,  // the top bit is cleared without a second look at the leaf
    HINT_FIRST,      // the bit is set before the word has moved
    NO_RESCAN,       // nobody rescans after a death
};

class HintModel {
  public:
    static constexpr int kSlots = 2, kProcesses = 3;
    struct Config {
        HintMutant mutant = HintMutant::NONE;
    };

    enum Pc : uint8_t {
        IDLE,
        LEAF_READ,
        LEAF_SET,
        TOP_READ,
        TOP_SET,
        MOVE_LATE,
        CLEAR,
        RECHECK,
        TOP_LOOK,
        LEAF_LOOK,
        WORD_LOOK,
        TOP_CLEAR,
        LEAF_AGAIN,
        RESCAN
    };
    enum Then : uint8_t { STOP, BACK_TO_RECHECK, BACK_TO_RESCAN, MOVE };  // after a hint
    enum Damage : uint8_t { SOUND, REPAIRING, DAMAGED };

    struct Process {
        uint8_t pc, slot, todo, stale, then;  // todo, stale: slots still to be looked at, and seen elsewhere
    };
    struct State {
        uint8_t in_state, leaf, top, damage;
        Process process[kProcesses];
    };
    using Key = std::array<uint64_t, 2>;

    explicit HintModel(const Config& config) : c(config) {}
    State initial() const { return {}; }

    const char* wrong(const State& s) const {
        if (s.damage != SOUND) return nullptr;
        for (const Process& p : s.process)
            if (p.pc != IDLE) return nullptr;
        return missing(s) ? "hidden: a slot rests and no search finds it" : nullptr;
    }
    bool ended(const State& s) const {
        for (const Process& p : s.process)
            if (p.pc != IDLE) return false;
        return s.damage == SOUND && !missing(s);
    }

    template <class Out>
    void next(const State& s, Out&& out) const {
        for (int i = 0; i < kProcesses; ++i) {
            if (s.process[i].pc == IDLE) {
                begin(s, i, out);
                continue;
            }
            State dead = s;
            if (s.process[i].pc == RESCAN || s.process[i].then == BACK_TO_RESCAN || writes(s.process[i]))
                dead.damage = DAMAGED;
            dead.process[i] = {};
            out(dead, {"process %d is killed", i + 1, 0, true});
            go_on(s, i, out);
        }
    }

  private:
    const Config c;

    static bool missing(const State& s) { return (s.in_state & ~s.leaf) != 0 || (s.in_state != 0 && !s.top); }
    // Everything but looking: its death may leave a bit too few.
    static bool writes(const Process& p) { return p.pc != TOP_LOOK && p.pc != LEAF_LOOK && p.pc != WORD_LOOK; }
    static uint8_t bit(int slot) { return uint8_t(1u << slot); }
    static int lowest(uint8_t slots) { return slots & 1 ? 0 : 1; }

    static void start(Process& p, Pc pc, uint8_t slot = 0, uint8_t todo = 0, Then then = STOP) {
        p.pc = pc, p.slot = slot, p.todo = todo, p.stale = 0, p.then = then;
    }

    template <class Out>
    void begin(const State& s, int i, Out&& out) const {
        for (uint8_t j = 0; j < kSlots; ++j) {
            State n = s;
            if (!(s.in_state & bit(j))) {
                const bool first = c.mutant == HintMutant::HINT_FIRST;
                if (!first) n.in_state |= bit(j);
                start(n.process[i], LEAF_READ, j, 0, first ? MOVE : STOP);
                out(n, {first ? "process %d is about to move slot %d in" : "process %d moves slot %d in", i + 1, j});
                continue;
            }
            n.in_state &= uint8_t(~bit(j));
            out(n, {"process %d moves slot %d out and leaves its bit", i + 1, j});
            start(n.process[i], CLEAR, 0, bit(j));
            out(n, {"process %d takes slot %d", i + 1, j});
        }
        State n = s;
        start(n.process[i], TOP_LOOK);
        out(n, {"process %d begins a search", i + 1});
        if (s.damage == SOUND || c.mutant == HintMutant::NO_RESCAN) return;
        n = s;
        n.damage = REPAIRING;
        start(n.process[i], RESCAN, 0, bit(0) | bit(1));
        out(n, {"process %d has proof of a death and begins a rescan", i + 1});
    }

    template <class Out>
    void go_on(const State& s, int i, Out&& out) const {
        const Process& p = s.process[i];
        if (p.pc <= MOVE_LATE) return hint(s, i, out);
        if (p.pc == CLEAR || p.pc == RECHECK || p.pc == RESCAN) return look_again(s, i, out);
        search(s, i, out);
    }

    template <class Out>
    void hint(const State& s, int i, Out&& out) const {
        State n = s;
        Process& p = n.process[i];
        const int j = p.slot;
        switch (p.pc) {
            case LEAF_READ:
                p.pc = s.leaf & bit(j) ? TOP_READ : LEAF_SET;
                return out(n, {"process %d reads the bit of slot %d", i + 1, j});
            case LEAF_SET:
                n.leaf |= bit(j);
                p.pc = TOP_READ;
                return out(n, {"process %d sets the bit of slot %d", i + 1, j});
            case TOP_READ:
                if (s.top)
                    hinted(n, p);
                else
                    p.pc = TOP_SET;
                return out(n, {"process %d reads the top bit", i + 1});
            case TOP_SET:
                n.top = 1;
                hinted(n, p);
                return out(n, {"process %d sets the top bit", i + 1});
            default:
                n.in_state |= bit(j);
                p = {};
                return out(n, {"process %d moves slot %d in, after its hint", i + 1, j});
        }
    }
    void hinted(State& n, Process& p) const {
        if (p.then == MOVE) {
            p.pc = MOVE_LATE;
        } else if (p.then == STOP) {
            p = {};
        } else {
            start(p, p.then == BACK_TO_RECHECK ? RECHECK : RESCAN, 0, p.todo);
            rest_if_done(n, p);
        }
    }
    static void rest_if_done(State& n, Process& p) {
        if (p.todo != 0) return;
        if (p.pc == RESCAN && n.damage == REPAIRING) n.damage = SOUND;
        p = {};
    }

    template <class Out>
    void look_again(const State& s, int i, Out&& out) const {
        State n = s;
        Process& p = n.process[i];
        if (p.pc == CLEAR) {
            n.leaf &= uint8_t(~p.todo);
            p.pc = RECHECK;
            if (c.mutant == HintMutant::NO_RECHECK) p = {};
            return out(n, {"process %d clears bits", i + 1});
        }
        const int j = lowest(p.todo);
        const Then then = p.pc == RECHECK ? BACK_TO_RECHECK : BACK_TO_RESCAN;
        p.todo &= uint8_t(~bit(j));
        if (s.in_state & bit(j))
            start(p, LEAF_READ, uint8_t(j), p.todo, then);
        else
            rest_if_done(n, p);
        out(n, {"process %d looks at slot %d again", i + 1, j});
    }

    template <class Out>
    void search(const State& s, int i, Out&& out) const {
        State n = s;
        Process& p = n.process[i];
        switch (p.pc) {
            case TOP_LOOK:
                if (s.top)
                    p.pc = LEAF_LOOK;
                else
                    p = {};
                return out(n, {"process %d looks at the top bit", i + 1});
            case LEAF_LOOK:
                p.todo = s.leaf;
                p.pc = s.leaf ? WORD_LOOK : TOP_CLEAR;
                return out(n, {"process %d looks at the leaf", i + 1});
            case WORD_LOOK: {
                const int j = lowest(p.todo);
                p.todo &= uint8_t(~bit(j));
                if (!(s.in_state & bit(j))) p.stale |= bit(j);
                if (p.todo == 0) start_unhint(p);
                return out(n, {"process %d looks at the word of slot %d", i + 1, j});
            }
            case TOP_CLEAR:
                n.top = 0;
                p.pc = LEAF_AGAIN;
                if (c.mutant == HintMutant::NO_TOP_RECHECK) p = {};
                return out(n, {"process %d clears the top bit", i + 1});
            default:
                if (s.leaf)
                    start(p, TOP_READ);
                else
                    p = {};
                return out(n, {"process %d looks at the leaf again", i + 1});
        }
    }
    static void start_unhint(Process& p) {
        if (p.stale)
            start(p, CLEAR, 0, p.stale);
        else
            p = {};
    }

  public:
    // Processes in the order of what they do, and the slots in the better of their two orders.
    Key pack(const State& s) const { return std::min(pack_as(s, false), pack_as(s, true)); }
    State unpack(const Key& key) const {
        Bits<2> bits;
        bits.words = key;
        auto get = [&](uint32_t n) { return uint8_t(bits.get(n)); };
        State s{};
        s.in_state = get(2), s.leaf = get(2), s.top = get(1), s.damage = get(2);
        for (Process& p : s.process) p.pc = get(4), p.slot = get(1), p.todo = get(2), p.stale = get(2), p.then = get(2);
        return s;
    }

  private:
    static uint8_t swap(uint8_t slots, bool flip) { return flip ? uint8_t((slots & 1) << 1 | slots >> 1) : slots; }
    static Key pack_as(const State& s, bool flip) {
        uint32_t process[kProcesses];
        for (int i = 0; i < kProcesses; ++i) {
            const Process& p = s.process[i];
            const bool has_slot = p.pc >= LEAF_READ && p.pc <= MOVE_LATE;
            Bits<1> bits;
            bits.put(p.pc, 4), bits.put(has_slot ? p.slot ^ int(flip) : 0, 1), bits.put(swap(p.todo, flip), 2);
            bits.put(swap(p.stale, flip), 2), bits.put(p.then, 2);
            process[i] = uint32_t(bits.words[0]);
        }
        std::sort(process, process + kProcesses);
        Bits<2> bits;
        bits.put(swap(s.in_state, flip), 2), bits.put(swap(s.leaf, flip), 2), bits.put(s.top, 1), bits.put(s.damage, 2);
        for (uint32_t p : process) bits.put(p, 11);
        return bits.words;
    }
};

}  // namespace model
