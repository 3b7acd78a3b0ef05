// Model 6, "pairs": episodes of several seats, each with a sample in a ledger of its own (docs/several-models.md). The
// ledgers share nothing but numbers; the scheduler opens a draw in all of them, and a holder claims the sides of an
// episode, plays it and commits them one by one. Sound, whoever dies?
//
// Modelled: two or three ledgers (the first one is the lead), two episodes, two holders, two reapers. A sample moves in
// each ledger as in model 2, so here it is one value: nothing, queued, held, left by a dead holder, committed, trained,
// dropped, or set aside by rule with its group. Claims, plays and commits are steps of their own; a holder may stop for
// ever so long or be killed between any two. Its sides go back one by one, in each ring by that ring's proof: a reaper
// sees one, and moves it later if it is as it was. Whole runs start again without a ring, whose samples are put back
// where they have no end; ledgers finish, and go on at a later start.
//
// The rules: no side goes from under a living holder; without death, accident and finish each episode is played once,
// with all its sides, and so is its second try after an accident of the whole of it; each death or accident costs at
// most one more play for each side (a start or a finish: for each episode); from every state all samples end, without
// another death or accident.
//
// Left out: rings and fates in detail (models 1, 2 and 4), a seat that was not used (an end like any other), memory of
// scheduler and learners (they have none). A dispatch reads and acts in one step: what it reads stays true until a
// start, but for a finish, which a scheduler and a holder may see as late as they like.
#pragma once

#include "explorer.hpp"

namespace model {

enum class PairMutant : uint8_t {
    NONE,
    LEAD_FIRST,       // a lead sample is dispatched before its siblings
    NOT_QUEUED,       // a lead sample counts as past when it is not queued
    CLOSED_UNKNOWN,   // nobody knows that a closed group has no more samples
    BY_ITSELF,        // a scheduler for each ledger
    WAITS,            // and a holder that waits for the sides that it lacks
    NO_PROOF,         // a side is taken from a living holder
    NO_REREAD,        // a reaper does not compare what it saw
    SECOND_APART,     // a second try of a lead sample counts as past wherever there is none yet
    FINISHED_COUNTS,  // a ledger that is finished still has to have room
};

class PairModel {
  public:
    static constexpr int kSides = 3, kEpisodes = 2, kHolders = 2, kReapers = 2, kTries = 2;
    struct Config {
        uint8_t sides = 2, episodes = 2, holders = 2, deaths = 0, accidents = 0, starts = 0, finishes = 0;
        uint8_t closes = 0;  // ledgers (bits) in which all episodes are one group, which the learner sets aside
        uint8_t room[kSides] = {9, 9, 9};
        uint8_t whole = 0;                  // an accident is one of an episode, never of a side
        uint8_t first[kSides] = {0, 0, 0};  // where each ledger begins; they differ in controls alone
        PairMutant mutant = PairMutant::NONE;
    };
    enum Sample : uint8_t { NOTHING, QUEUED, LEFT, COMMITTED, TRAINED, DROPPED, ASIDE, HELD };  // HELD + holder
    enum Pc : uint8_t { IDLE, LOOKS, ORPHAN, PLAYS, ENDS, DROPS };

    struct Holder {
        uint8_t pc, episode, attempt, mine, side;  // mine: bits of the sides that it holds; side: the next to look at
    };
    struct Reaper {
        uint8_t armed, side, episode, attempt, stale;
    };
    struct State {
        uint8_t sample[kSides][kEpisodes][kTries];
        Holder holder[kHolders];
        Reaper reaper[kReapers];
        uint8_t deaths, accidents, starts, finishes;  // what is left of each
        uint8_t finished, plays, alone;
    };
    using Key = std::array<uint64_t, 2>;

    explicit PairModel(const Config& config) : c(config) {}
    State initial() const {
        State s{};
        s.deaths = c.deaths, s.accidents = c.accidents, s.starts = c.starts, s.finishes = c.finishes;
        return s;
    }

    const char* wrong(const State& s) const {
        for (int h = 0; h < c.holders; ++h)
            for (int x = 0; x < c.sides; ++x) {
                const Holder& p = s.holder[h];
                if ((p.mine >> x & 1) && s.sample[x][p.episode][p.attempt] != HELD + h)
                    return "taken: a side goes from under a living holder";
            }
        const int each = (c.starts - s.starts) + (c.finishes - s.finishes);
        const int spent = (c.deaths - s.deaths) + (c.accidents - s.accidents) + each * c.episodes;
        const int apart = spent - c.whole * (c.accidents - s.accidents);
        if (apart == 0 && s.alone) return "an episode is played without all of its sides";
        if (s.plays > c.episodes + c.sides * spent) return "an episode is played more often than deaths explain";
        return nullptr;
    }
    bool ended(const State& s) const {
        for (int x = 0; x < c.sides; ++x)
            for (int e = 0; e < c.episodes; ++e)
                if (!(s.finished >> x & 1) && !over(s, x, e)) return false;
        for (const Holder& p : s.holder)
            if (p.pc != IDLE) return false;
        return true;
    }

    template <class Out>
    void next(const State& s, Out&& out) const {
        for (int view = s.finished;; view = (view - 1) & s.finished) {  // who has not seen a finish acts as before it
            for (int x = 0; x < c.sides; ++x)
                if (!(view >> x & 1)) dispatch(s, x, view, out);
            for (int h = 0; h < c.holders; ++h)
                if (s.holder[h].pc == IDLE) choose(s, h, view, out);
            if (view == 0) break;
        }
        for (int x = 0; x < c.sides; ++x) learn(s, x, out);
        for (int h = 0; h < c.holders; ++h)
            if (s.holder[h].pc != IDLE) go_on(s, h, out), die(s, h, out);
        for (int r = 0; r < kReapers; ++r) reap(s, r, out);
        if (s.starts) start(s, out);
    }

  private:
    const Config c;

    // -- what follows from the samples

    static bool is_end(uint8_t x) { return x == NOTHING || x == TRAINED || x == DROPPED || x == ASIDE; }
    bool closed(const State& s, int x) const {
        for (const auto& row : s.sample[x])
            if (row[0] == ASIDE || row[1] == ASIDE) return true;
        return false;
    }
    bool known_closed(const State& s, int x) const { return c.mutant != PairMutant::CLOSED_UNKNOWN && closed(s, x); }
    bool over(const State& s, int x, int e) const {
        const auto& row = s.sample[x][e];
        if (closed(s, x)) return is_end(row[0]) && is_end(row[1]);
        return row[0] == TRAINED || row[1] == TRAINED || row[1] == DROPPED;
    }
    bool has_room(const State& s, int x) const {
        int busy = 0;
        for (const auto& row : s.sample[x])
            for (uint8_t one : row) busy += !is_end(one);
        return busy < c.room[x];
    }
    static int lead_of(int finished) {
        int x = 0;
        while (finished >> x & 1) ++x;
        return x;
    }
    // The lead sample of this episode will never be claimed any more (of a second try: not with its siblings).
    bool past(const State& s, int lead, int e, int t) const {
        const uint8_t x = s.sample[lead][e][t];
        if (c.mutant == PairMutant::NOT_QUEUED) return x != QUEUED && x != NOTHING;
        if (x != NOTHING) return is_past(x) || x == DROPPED;
        return known_closed(s, lead) || (t == 1 && (is_past(s.sample[lead][e][0]) || old_rule()));
    }
    static bool is_past(uint8_t x) { return x == COMMITTED || x == TRAINED || x == ASIDE; }
    bool old_rule() const { return c.mutant == PairMutant::SECOND_APART; }
    // A reaper's memory of what has moved is stale.
    static void put(State& s, int x, int e, int t, uint8_t value) {
        s.sample[x][e][t] = value;
        for (Reaper& r : s.reaper)
            if (r.armed && r.side == x && r.episode == e && r.attempt == t) r.stale = 1;
    }

    // -- the scheduler

    template <class Out>
    void dispatch(const State& s, int x, int view, Out&& out) const {
        const bool late = view != s.finished;
        for (int e = 0; e < c.episodes; ++e)
            if (due_again(s, x, e) && !before_again(s, x, e, view)) {
                State n = s;
                put(n, x, e, 1, QUEUED);
                out(n, {"the scheduler dispatches a second try of %d in ledger %d", e, x, late});
            }
        const int e = due(s, x, view);
        if (e < 0 || !has_room(s, x) || !may_open(s, x, e, view)) return;
        State n = s;
        put(n, x, e, 0, QUEUED);
        out(n, {"the scheduler dispatches %d in ledger %d", e, x, late});
    }
    bool due_again(const State& s, int x, int e) const {
        return s.sample[x][e][0] == DROPPED && s.sample[x][e][1] == NOTHING && !closed(s, x);
    }
    // The lead's second try waits for those of the other sides that are due.
    bool before_again(const State& s, int x, int e, int view) const {
        if (by_itself() || x != lead_of(view)) return false;
        for (int y = x + 1; y < c.sides; ++y)
            if (!(view >> y & 1) && due_again(s, y, e)) return true;
        return false;
    }
    // Draws in their order; what another ledger has already goes first (it was put back here).
    int due(const State& s, int x, int view) const {
        if (closed(s, x)) return -1;
        int found = -1;
        for (int k = c.episodes - 1; k >= 0; --k) {
            const int e = (k + c.first[x]) % c.episodes;
            if (s.sample[x][e][0] != NOTHING) continue;
            if (found < 0 || !elsewhere(s, found, view) || elsewhere(s, e, view)) found = e;
        }
        return found;
    }
    bool by_itself() const { return c.mutant == PairMutant::BY_ITSELF || c.mutant == PairMutant::WAITS; }
    bool elsewhere(const State& s, int e, int view) const {
        if (by_itself()) return false;
        for (int x = 0; x < c.sides; ++x)
            if (!(view >> x & 1) && s.sample[x][e][0] != NOTHING) return true;
        return false;
    }
    // From the last side to the first, and a draw only where all ledgers that lack it have room.
    bool may_open(const State& s, int x, int e, int view) const {
        if (by_itself()) return true;
        for (int y = 0; y < c.sides; ++y) {
            const bool lacks = s.sample[y][e][0] == NOTHING && !known_closed(s, y);
            const bool counts = !(view >> y & 1);
            const bool before = c.mutant == PairMutant::LEAD_FIRST ? y < x : y > x;
            if (before && counts && lacks) return false;
            if ((counts || c.mutant == PairMutant::FINISHED_COUNTS) && lacks && !has_room(s, y)) return false;
        }
        return true;
    }

    // -- the learners

    template <class Out>
    void learn(const State& s, int x, Out&& out) const {
        if (s.finished >> x & 1) return;
        for (int e = 0; e < c.episodes; ++e)
            for (int t = 0; t < kTries; ++t) {
                if (s.sample[x][e][t] != COMMITTED) continue;
                const bool closes = c.closes >> x & 1;
                if (closes && !resolved(s, x)) continue;
                State n = s;
                put(n, x, e, t, closes ? ASIDE : TRAINED);
                out(n, {closes ? "learner %d sets %d aside" : "learner %d trains %d", x, e});
                if (s.accidents == 0 || c.whole) continue;
                n = s, --n.accidents;
                put(n, x, e, t, DROPPED);
                out(n, {"learner %d finds %d malformed", x, e, true});
            }
        if (s.finishes == 0 || lead_of(s.finished | 1 << x) >= c.sides) return;
        State n = s;
        --n.finishes, n.finished |= uint8_t(1 << x);
        out(n, {"learner %d has made its last step", x, 0, true});
    }
    bool resolved(const State& s, int x) const {
        for (int e = 0; e < c.episodes; ++e) {
            const auto& row = s.sample[x][e];
            const uint8_t one = row[0] == DROPPED ? row[1] : row[0];
            if (one != COMMITTED && one != ASIDE && one != DROPPED) return false;
        }
        return true;
    }

    // -- the holders

    template <class Out>
    void choose(const State& s, int h, int view, Out&& out) const {
        const int lead = lead_of(view);
        const bool late = view != s.finished;
        for (int e = 0; e < c.episodes; ++e)
            for (int t = 0; t < kTries; ++t) {
                if (s.sample[lead][e][t] == QUEUED) {
                    State n = s;
                    put(n, lead, e, t, uint8_t(HELD + h));
                    n.holder[h] = {LOOKS, uint8_t(e), uint8_t(t), uint8_t(1 << lead), uint8_t(lead + 1)};
                    out(n, {"holder %d claims the lead side of %d", h, e, late});
                }
                for (int x = lead + 1; x < c.sides; ++x) {
                    if ((view >> x & 1) || s.sample[x][e][t] != QUEUED || !past(s, lead, e, t)) continue;
                    State n = s;
                    n.holder[h] = {ORPHAN, uint8_t(e), uint8_t(t), 0, uint8_t(x)};
                    out(n, {"holder %d sees an orphan of %d", h, e, late});
                }
            }
    }

    template <class Out>
    void go_on(const State& s, int h, Out&& out) const {
        const Holder& p = s.holder[h];
        State n = s;
        Holder& q = n.holder[h];
        if (p.pc == LOOKS) return look(s, h, out);
        if (p.pc == ORPHAN) {  // what the lead does by now is not read again
            if (s.sample[p.side][p.episode][p.attempt] != QUEUED) {
                q = {};
                return out(n, {"holder %d is late for its orphan", h});
            }
            put(n, p.side, p.episode, p.attempt, uint8_t(HELD + h));
            q.pc = PLAYS, q.mine = uint8_t(1 << p.side), q.side = 0;
            return out(n, {"holder %d claims side %d by itself", h, p.side});
        }
        if (p.pc == PLAYS) {
            n.plays = uint8_t(std::min(15, s.plays + 1));
            n.alone |= p.mine != (1 << c.sides) - 1;
            q.pc = ENDS;
            out(n, {"holder %d has played %d", h, p.episode});
            if (s.accidents == 0) return;
            q.pc = DROPS, --n.accidents;
            return out(n, {"holder %d fails to play %d", h, p.episode, true});
        }
        end_side(s, h, out);
    }
    template <class Out>
    void look(const State& s, int h, Out&& out) const {
        const Holder& p = s.holder[h];
        State n = s;
        Holder& q = n.holder[h];
        if (p.side == c.sides) {
            q.pc = PLAYS, q.side = 0;
            return out(n, {"holder %d begins to play %d", h, p.episode});
        }
        ++q.side;
        const uint8_t x = s.sample[p.side][p.episode][p.attempt];
        const bool counts = !(s.finished >> p.side & 1);
        if (x == QUEUED) {
            State m = n;
            put(m, p.side, p.episode, p.attempt, uint8_t(HELD + h));
            m.holder[h].mine |= uint8_t(1 << p.side);
            out(m, {"holder %d claims side %d too", h, p.side, !counts});
        }
        const bool waits = c.mutant == PairMutant::WAITS && !(x >= COMMITTED && x <= ASIDE);
        if ((x != QUEUED && !waits) || !counts) out(n, {"holder %d goes on without side %d", h, p.side});
    }
    // The last side first. A payload that does not fit drops its side alone, an episode that failed drops all.
    template <class Out>
    void end_side(const State& s, int h, Out&& out) const {
        const Holder& p = s.holder[h];
        int x = c.sides - 1;
        while (!(p.mine >> x & 1)) --x;
        State n = s;
        Holder& q = n.holder[h];
        q.mine &= uint8_t(~(1 << x));
        if (q.mine == 0) q = {};
        State dropped = n;
        put(dropped, x, p.episode, p.attempt, DROPPED);
        if (p.pc == DROPS) return out(dropped, {"holder %d drops side %d", h, x});
        put(n, x, p.episode, p.attempt, COMMITTED);
        out(n, {"holder %d commits side %d", h, x});
        if (s.accidents == 0 || c.whole) return;
        --dropped.accidents;
        out(dropped, {"holder %d has no room for what side %d is", h, x, true});
    }

    // -- deaths

    // The next process has another entry; what the dead one held is LEFT until somebody has proof.
    template <class Out>
    void die(const State& s, int h, Out&& out) const {
        if (s.deaths == 0) return;
        State n = s;
        --n.deaths;
        for (int x = 0; x < c.sides; ++x)
            if (s.holder[h].mine >> x & 1) n.sample[x][s.holder[h].episode][s.holder[h].attempt] = LEFT;
        n.holder[h] = {};
        out(n, {"holder %d is killed", h, 0, true});
    }

    template <class Out>
    void reap(const State& s, int r, Out&& out) const {
        const Reaper& p = s.reaper[r];
        State n = s;
        if (p.armed) {
            n.reaper[r] = {};
            if (!p.stale || c.mutant == PairMutant::NO_REREAD) put(n, p.side, p.episode, p.attempt, QUEUED);
            return out(n, {"a reaper moves side %d of %d if it is as it was", p.side, p.episode});
        }
        for (int x = 0; x < c.sides; ++x)
            for (int e = 0; e < c.episodes; ++e)
                for (int t = 0; t < kTries; ++t) {
                    const uint8_t one = s.sample[x][e][t];
                    if (one != LEFT && !(one >= HELD && c.mutant == PairMutant::NO_PROOF)) continue;
                    n = s;
                    n.reaper[r] = {1, uint8_t(x), uint8_t(e), uint8_t(t), 0};
                    out(n, {"a reaper sees that the holder of side %d of %d is dead", x, e});
                }
    }

    // The whole run is killed and started again, and one ring is gone: what has no end is put back there. A ledger that
    // was finished may have been given more steps.
    template <class Out>
    void start(const State& s, Out&& out) const {
        for (int x = 0; x < c.sides; ++x) {
            State n = s;
            --n.starts;
            for (int y = 0; y < c.sides; ++y)
                for (auto& row : n.sample[y])
                    for (uint8_t& one : row) {
                        if (one >= HELD) one = LEFT;
                        if (y == x && !is_end(one)) one = NOTHING;
                    }
            for (Holder& p : n.holder) p = {};
            for (Reaper& p : n.reaper) p = {};
            out(n, {"the run starts again without ring %d", x, 0, true});
            if (s.finished == 0) continue;
            n.finished = 0;
            out(n, {"the run starts again without ring %d, and with more steps", x, 0, true});
        }
    }

  public:
    // Which holder is which, and which reaper, makes no difference.
    Key pack(const State& s) const {
        Key best = pack_as(s, 0);
        if (c.holders == 2) best = std::min(best, pack_as(s, 1));
        return best;
    }
    State unpack(const Key& key) const {
        Bits<2> b;
        b.words = key;
        State s{};
        walk(s, [&](uint8_t& field, uint32_t bits) { field = uint8_t(b.get(bits)); });
        return s;
    }

  private:
    Key pack_as(const State& given, int flip) const {
        State s = given;
        if (flip) {
            std::swap(s.holder[0], s.holder[1]);
            for (auto& side : s.sample)
                for (auto& row : side)
                    for (uint8_t& one : row)
                        if (one >= HELD) one = uint8_t(2 * HELD + 1 - one);
        }
        if (std::memcmp(&s.reaper[0], &s.reaper[1], sizeof(Reaper)) > 0) std::swap(s.reaper[0], s.reaper[1]);
        Bits<2> b;
        walk(s, [&](uint8_t& field, uint32_t bits) { b.put(field, bits); });
        return b.words;
    }
    template <class Do>
    static void walk(State& s, Do&& each) {
        for (auto& side : s.sample)
            for (auto& row : side)
                for (uint8_t& one : row) each(one, 4);
        for (Holder& p : s.holder)
            each(p.pc, 3), each(p.episode, 1), each(p.attempt, 1), each(p.mine, 3), each(p.side, 2);
        for (Reaper& p : s.reaper)
            each(p.armed, 1), each(p.side, 2), each(p.episode, 1), each(p.attempt, 1), each(p.stale, 1);
        each(s.deaths, 2), each(s.accidents, 2), each(s.starts, 2), each(s.finishes, 2);
        each(s.finished, 3), each(s.plays, 4), each(s.alone, 1);
    }
};

}  // namespace model
