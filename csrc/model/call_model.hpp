// Model 4, "calls": the machine of a ring of model calls (calls.hpp): callers put model calls into slots, engines
// answer in place, a caller frees its own, anybody frees those of the dead.
//
// Modelled: two callers with two calls each, two engines, two slots, at most two deaths. Claim, line, commit, copy and
// free are steps of their own; so are the two looks of whoever reaps. A word never comes back: what remembers a word is
// marked stale when its slot moves. A dead process starts again under the same index and the next epoch once no word
// names it as owner, while a line may still name it as caller: for that the line holds the epoch. CALL_CANCEL may be
// lost, or come late. The rules: a taken answer is whole and the caller's own; no call goes from under a living caller
// that did not cancel it; from every state all slots come to FREE without another death.
//
// Left out: a second reaper at the same time, the table of processes, hints and memory order (models 1 and 3 have
// them).
#pragma once

#include "busrl/word.hpp"
#include "coverage.hpp"
#include "explorer.hpp"

namespace model {

enum class CallMutant : uint8_t {
    NONE,
    NO_PROOF,    // a slot is taken from an engine that lives
    NO_ORPHANS,  // nobody frees the calls of a dead caller
    INDEX_ONLY,  // a caller counts as living when its index is in use again
    NO_REREAD,   // a reaper does not compare the word that it judged
    NO_BELL_SEQ  // CALL_CANCEL counts for whatever the slot holds now
};

class CallModel {
    using S = busrl::State;

  public:
    static constexpr int kSlots = 2, kCallers = 2, kEngines = 2, kCalls = 2;
    static constexpr uint8_t kNothing = 7;
    struct Config {
        CallMutant mutant = CallMutant::NONE;
        uint8_t deaths = 2;
    };
    enum CallerPc : uint8_t { IDLE, CLAIMED, WAITING, COPIED, CANCELLED };
    enum EnginePc : uint8_t { FREE_ROW, READING, WRITING, WRITTEN };
    enum Verb : uint8_t { NO_VERB, TO_REST, TO_FREE };

    struct Slot {
        uint8_t state, owner, caller, epoch, call, answer;  // call, answer: caller * kCalls + number, or kNothing
    };
    struct Caller {
        uint8_t alive, epoch, left, pc, slot, copy, bell, bell_slot;  // bell: 0 none, 1 stale, 2 its word stands
    };
    struct Engine {
        uint8_t alive, pc, slot, stale, call;  // call: what it read in the line after its claim
    };
    struct Reaper {
        uint8_t verb, slot, stale;
    };
    struct State {
        Slot slot[kSlots];
        Caller caller[kCallers];
        Engine engine[kEngines];
        Reaper reaper;
        uint8_t deaths;
    };
    using Key = std::array<uint64_t, 2>;

    explicit CallModel(const Config& config) : c(config) {}
    State initial() const {
        State s{};
        for (Slot& x : s.slot) x.call = x.answer = kNothing;
        for (Caller& x : s.caller) x.alive = 1, x.left = kCalls, x.copy = kNothing;
        for (Engine& x : s.engine) x.alive = 1, x.call = kNothing;
        s.deaths = c.deaths;
        return s;
    }

    const char* wrong(const State& s) const {
        for (const Slot& x : s.slot)
            if (is(x, S::GENERATED) && x.answer != x.call) return "torn: a committed answer is not its call's";
        for (int i = 0; i < kCallers; ++i) {
            const Caller& p = s.caller[i];
            if (p.alive && (p.pc == WAITING || p.pc == COPIED) && !holds(s, i))
                return "lost: a call goes from under its caller";
        }
        return nullptr;
    }
    bool ended(const State& s) const {
        for (const Slot& x : s.slot)
            if (!is(x, S::FREE)) return false;
        for (const Caller& p : s.caller)
            if (!p.alive || p.left != 0 || p.pc != IDLE) return false;
        return s.engine[0].alive && s.engine[1].alive;
    }

    template <class Out>
    void next(const State& s, Out&& out) const {
        for (int i = 0; i < kCallers; ++i) caller(s, i, out);
        for (int i = 0; i < kEngines; ++i) engine(s, i, out);
        for (int j = 0; j < kSlots; ++j) reap(s, j, out);
        finish_reap(s, out);
    }

  private:
    const Config c;

    static bool is(const Slot& x, S state) { return x.state == uint8_t(state); }
    static uint8_t call_of(int caller, const Caller& p) { return uint8_t(caller * kCalls + p.left); }
    static bool holds(const State& s, int i) {
        const Caller& p = s.caller[i];
        const Slot& x = s.slot[p.slot];
        return !is(x, S::FREE) && !is(x, S::RESERVED) && x.call == call_of(i, p) && x.epoch == p.epoch;
    }
    // One swap of the word: everybody else's memory of it is stale from now on.
    static void move(State& s, int j, S to, int owner = 0) {
        Slot& x = s.slot[j];
        coverage().call_arrow(S(x.state), to);
        x.state = uint8_t(to), x.owner = uint8_t(owner);
        if (to == S::FREE) x = {0, 0, 0, 0, kNothing, kNothing};
        for (Engine& e : s.engine)
            if (e.pc != FREE_ROW && e.slot == j) e.stale = 1;
        for (Caller& p : s.caller)
            if (p.bell == 2 && p.bell_slot == j) p.bell = 1;
        if (s.reaper.verb != NO_VERB && s.reaper.slot == j) s.reaper.stale = 1;
    }
    static void end_call(Caller& p) { p.pc = IDLE, p.slot = 0, p.copy = kNothing; }

    template <class Out>
    void caller(const State& s, int i, Out&& out) const {
        const Caller& p = s.caller[i];
        State n = s;
        Caller& q = n.caller[i];
        if (!p.alive) {
            for (const Slot& x : s.slot)
                if (is(x, S::RESERVED) && x.owner == i) return;
            q.alive = 1, ++q.epoch;
            return out(n, {"caller %d starts again", i + 1});
        }
        if (s.deaths > 0) {
            State dead = s;
            dead.caller[i] = {0, p.epoch, p.left, IDLE, 0, kNothing, p.bell, p.bell_slot};
            --dead.deaths;
            out(dead, {"caller %d is killed", i + 1, 0, true});
        }
        if (p.bell) lose_bell(s, i, out);
        if (p.pc == IDLE) return begin_call(s, i, out);
        const int j = p.slot;
        const Slot& x = s.slot[j];
        if (p.pc == CLAIMED) {
            Slot& y = n.slot[j];
            y.caller = uint8_t(i), y.epoch = p.epoch, y.call = call_of(i, p);
            move(n, j, S::QUEUED);
            q.pc = WAITING;
            return out(n, {"caller %d queues its call in slot %d", i + 1, j});
        }
        if (p.pc == COPIED) {
            const bool whole = p.copy == call_of(i, p);
            move(n, j, S::FREE);
            end_call(q);
            return out(n, {"caller %d takes the answer in slot %d", i + 1, j, false,
                           whole ? nullptr : "torn: a caller takes what is not its answer"});
        }
        waiting(s, i, x, out);
    }

    template <class Out>
    void begin_call(const State& s, int i, Out&& out) const {
        if (s.caller[i].left == 0) return;
        for (int j = 0; j < kSlots; ++j) {
            if (!is(s.slot[j], S::FREE)) continue;
            State n = s;
            move(n, j, S::RESERVED, i);
            Caller& q = n.caller[i];
            q.pc = CLAIMED, q.slot = uint8_t(j), --q.left;
            out(n, {"caller %d claims slot %d", i + 1, j});
        }
    }

    template <class Out>
    void waiting(const State& s, int i, const Slot& x, Out&& out) const {
        const Caller& p = s.caller[i];
        const int j = p.slot;
        State n = s;
        Caller& q = n.caller[i];
        if (p.pc == CANCELLED && !holds(s, i)) {
            end_call(q);
            return out(n, {"caller %d sees that slot %d is no longer its own", i + 1, j});
        }
        if (is(x, S::QUEUED)) {
            move(n, j, S::FREE);
            end_call(q);
            return out(n, {"caller %d cancels its call in slot %d", i + 1, j});
        }
        if (is(x, S::GENERATING)) {
            if (p.pc == CANCELLED || p.bell) return;
            q.pc = CANCELLED, q.bell = 2, q.bell_slot = uint8_t(j);
            return out(n, {"caller %d sends CALL_CANCEL for slot %d", i + 1, j});
        }
        if (p.pc == CANCELLED) {
            move(n, j, S::FREE);
            end_call(q);
            return out(n, {"caller %d frees the late answer in slot %d", i + 1, j});
        }
        q.pc = COPIED, q.copy = x.answer;
        out(n, {"caller %d copies the answer in slot %d", i + 1, j});
    }

    template <class Out>
    void lose_bell(const State& s, int i, Out&& out) const {
        State n = s;
        n.caller[i].bell = n.caller[i].bell_slot = 0;
        out(n, {"a CALL_CANCEL of caller %d is lost", i + 1});
    }

    template <class Out>
    void engine(const State& s, int i, Out&& out) const {
        const Engine& p = s.engine[i];
        State n = s;
        Engine& q = n.engine[i];
        if (!p.alive) {
            for (const Slot& x : s.slot)
                if (is(x, S::GENERATING) && x.owner == i) return;
            q.alive = 1;
            return out(n, {"engine %d starts again", i + 1});
        }
        if (s.deaths > 0) {
            State dead = s;
            dead.engine[i] = {0, FREE_ROW, 0, 0, kNothing};
            --dead.deaths;
            out(dead, {"engine %d is killed", i + 1, 0, true});
        }
        if (p.pc == FREE_ROW) return claim(s, i, out);
        const int j = p.slot;
        if (p.pc == WRITTEN) {
            if (!p.stale) move(n, j, S::GENERATED);
            q = {1, FREE_ROW, 0, 0, kNothing};
            return out(n, {"engine %d commits its answer in slot %d", i + 1, j});
        }
        if (p.pc == READING) q.call = s.slot[j].call;
        n.slot[j].answer = p.pc == READING ? kNothing : p.call;
        q.pc = uint8_t(p.pc + 1);
        out(n,
            {p.pc == READING ? "engine %d begins to write in slot %d" : "engine %d has written in slot %d", i + 1, j});
        if (p.stale) return;
        n = s;
        move(n, j, S::QUEUED);
        n.engine[i] = {1, FREE_ROW, 0, 0, kNothing};
        out(n, {"engine %d hands slot %d back", i + 1, j});
        for (int k = 0; k < kCallers; ++k) {
            const Caller& asks = s.caller[k];
            if (!asks.bell || asks.bell_slot != j || (asks.bell == 1 && c.mutant != CallMutant::NO_BELL_SEQ)) continue;
            n = s;
            n.caller[k].bell = n.caller[k].bell_slot = 0;
            move(n, j, S::FREE);
            n.engine[i] = {1, FREE_ROW, 0, 0, kNothing};
            out(n, {"engine %d cancels slot %d as it was asked", i + 1, j});
        }
    }

    template <class Out>
    void claim(const State& s, int i, Out&& out) const {
        for (int j = 0; j < kSlots; ++j) {
            if (!is(s.slot[j], S::QUEUED)) continue;
            State n = s;
            move(n, j, S::GENERATING, i);
            n.engine[i] = {1, READING, uint8_t(j), 0, kNothing};
            out(n, {"engine %d claims slot %d", i + 1, j});
        }
    }

    // The first look: what the word and the line call for. Whoever does it may as well be killed: it forgets.
    template <class Out>
    void reap(const State& s, int j, Out&& out) const {
        if (s.reaper.verb != NO_VERB) return;
        const Slot& x = s.slot[j];
        Verb verb = NO_VERB;
        if (is(x, S::RESERVED) && !s.caller[x.owner].alive) verb = TO_FREE;
        if (is(x, S::GENERATING) && (!s.engine[x.owner].alive || c.mutant == CallMutant::NO_PROOF)) verb = TO_REST;
        if ((is(x, S::QUEUED) || is(x, S::GENERATED)) && orphan(s, x)) verb = TO_FREE;
        if (verb == NO_VERB) return;
        State n = s;
        n.reaper = {verb, uint8_t(j), 0};
        out(n, {"a reaper sees that the process of slot %d is dead", j});
    }
    bool orphan(const State& s, const Slot& x) const {
        if (c.mutant == CallMutant::NO_ORPHANS) return false;
        const Caller& p = s.caller[x.caller];
        return !p.alive || (p.epoch != x.epoch && c.mutant != CallMutant::INDEX_ONLY);
    }
    template <class Out>
    void finish_reap(const State& s, Out&& out) const {
        if (s.reaper.verb == NO_VERB) return;
        State n = s;
        const int j = s.reaper.slot;
        if (!s.reaper.stale || c.mutant == CallMutant::NO_REREAD)
            move(n, j, s.reaper.verb == TO_REST ? S::QUEUED : S::FREE);
        n.reaper = {};
        out(n, {"the reaper moves slot %d if it is as it was", j});
    }

  public:
    Key pack(const State& s) const {
        Bits<2> b;
        for (const Slot& x : s.slot)
            b.put(x.state, 3), b.put(x.owner, 1), b.put(x.caller, 1), b.put(x.epoch, 2), b.put(x.call, 3),
                b.put(x.answer, 3);
        for (const Caller& p : s.caller)
            b.put(p.alive, 1), b.put(p.epoch, 2), b.put(p.left, 2), b.put(p.pc, 3), b.put(p.slot, 1), b.put(p.copy, 3),
                b.put(p.bell, 2), b.put(p.bell_slot, 1);
        for (const Engine& p : s.engine)
            b.put(p.alive, 1), b.put(p.pc, 2), b.put(p.slot, 1), b.put(p.stale, 1), b.put(p.call, 3);
        b.put(s.reaper.verb, 2), b.put(s.reaper.slot, 1), b.put(s.reaper.stale, 1), b.put(s.deaths, 2);
        return b.words;
    }
    State unpack(const Key& key) const {
        Bits<2> b;
        b.words = key;
        auto get = [&](uint32_t n) { return uint8_t(b.get(n)); };
        State s{};
        for (Slot& x : s.slot)
            x.state = get(3), x.owner = get(1), x.caller = get(1), x.epoch = get(2), x.call = get(3), x.answer = get(3);
        for (Caller& p : s.caller)
            p.alive = get(1), p.epoch = get(2), p.left = get(2), p.pc = get(3), p.slot = get(1), p.copy = get(3),
            p.bell = get(2), p.bell_slot = get(1);
        for (Engine& p : s.engine) p.alive = get(1), p.pc = get(2), p.slot = get(1), p.stale = get(1), p.call = get(3);
        s.reaper.verb = get(2), s.reaper.slot = get(1), s.reaper.stale = get(1), s.deaths = get(2);
        return s;
    }
};

}  // namespace model
