// Model 2, "ledger": groups, the group credit, fates, the write-ahead log and checkpoints, over whole lives of samples.
//
// Modelled: a scheduler that looks (ring first, then fates), opens groups under the credit, dispatches members and the
// one re-roll of a member that ended by accident; any number of rollout and reward workers; a learner that loads the
// checkpoint, replays the log, stores the fates of what was trained, frees trained slots, claims a resolved group
// member by member, appends its record, stores fates, frees slots, writes checkpoints and drops records; sets groups
// aside by rule; poison and broken rewards. Everybody may be killed between any two steps, any number of times, and is
// started again; slots of the dead are put at rest by anybody at any time. The states that a sample passes through are
// those of kTransitions in word.hpp: move() refuses any other arrow.
//
// Left out, because model 1 has it: the steps inside a claim, a reaping or a registration, payloads and segments, what
// a free slot still says. So a slot without a sample is only counted here. Also left out: versions, the trigger and the
// staleness bound (pure code with tests of their own), classes with reserves, a step of more than one group.
//
// Exact reductions: workers hold nothing but slots, so that "some worker" is enough; members of a group and groups are
// interchangeable, so that states which differ by their numbering are one.
#pragma once

#include "ledger_learner.hpp"

namespace model {

class LedgerModel : public LedgerLearner {
  public:
    using LedgerLearner::LedgerLearner;

    // ------------------------------------------------------------------------------------------------ the rules

    const char* wrong(const State& s) const {
        for (const auto& group : s.sample)
            for (const auto& member : group) {
                for (const Sample& x : member) {
                    const bool trained = x.logged || x.kept;
                    if (x.fate == DISPATCHED && x.place == NOWHERE) return "lost: a dispatched sample is in no slot";
                    // While it writes a checkpoint the learner itself knows what was trained.
                    if (x.fate == TRAINED && !trained && s.learner != L_CHECKPOINT)
                        return "a sample is called trained that is in neither log nor checkpoint";
                    if ((x.fate == ACCIDENT || x.fate == RULE) && trained)
                        return "a trained sample has an untrained fate";
                    if (x.place >= QUEUED && x.fate == NONE) return "a sample in a slot has no fate";
                }
                if ((member[0].logged || member[0].kept) && (member[1].logged || member[1].kept))
                    return "a member was trained by its first try and by its re-roll";
            }
        return nullptr;
    }

    bool ended(const State& s) const {
        if (s.blank_dead || s.scheduler == S_BLANK) return false;
        for (int g = 0; g < kGroups; ++g) {
            if (!opened(s, g) || due_of(s, g) != 0) return false;
            for (const auto& member : s.sample[g])
                for (const Sample& x : member)
                    if (x.place != NOWHERE || x.fate == DISPATCHED) return false;
        }
        return true;
    }

    // ------------------------------------------------------------------------------------------------ the steps

    template <class Out>
    void next(const State& s, Out&& out) const {
        scheduler(s, out);
        learner(s, out);
        for (int g = 0; g < kGroups; ++g)
            for (int m = 0; m < kMembers; ++m)
                for (int t = 0; t < kTries; ++t) {
                    const uint8_t place = s.sample[g][m][t].place;
                    if (place == NOWHERE) continue;
                    work(s, g, m, t, out);
                    reap(s, g, m, t, out);
                    complete_drop(s, g, m, t, out);
                }
        if (s.blank_dead) {
            State n = s;
            n.blank_dead = 0;
            coverage().arrow(busrl::State::RESERVED, busrl::State::FREE);
            out(n, {"anybody frees the slot that the dead scheduler had RESERVED for nothing"});
        }
    }

  private:
    // -- the scheduler -------------------------------------------------------------------------------------------

    template <class Out>
    void scheduler(const State& s, Out&& out) const {
        State n = s;
        if (s.scheduler != S_GONE && may_die(s)) scheduler_dies(s, out);
        switch (s.scheduler) {
            case S_GONE:
                n.scheduler = S_START;
                return out(n, {"a scheduler starts"});
            case S_START:
                if (c.mutant != LedgerMutant::SUCCESSOR_RUSHES && reserved_by_the_dead(s)) return;
                n.scheduler = S_LOOK;
                return out(n, {"the scheduler sees that its predecessor left nothing RESERVED"});
            case S_LOOK:
                n.scheduler = S_SEEN;
                n.free_seen = uint8_t(free_slots(s));
                return out(n, {"the scheduler copies the ring: %d slots are FREE", n.free_seen});
            case S_SEEN:
                return plan(s, out);
            case S_GO:
                return begin_dispatch(s, out);
            default:
                return go_on_dispatch(s, out);
        }
    }

    static bool reserved_by_the_dead(const State& s) {
        for (const auto& group : s.sample)
            for (const auto& member : group)
                for (const Sample& x : member)
                    if (x.place == RESERVED_DEAD) return true;
        return s.blank_dead != 0;
    }

    template <class Out>
    void scheduler_dies(const State& s, Out&& out) const {
        State n = killed(s);
        if (s.scheduler == S_BLANK) n.blank_dead = 1;
        each(n, [](Sample& x) {
            if (x.place == RESERVED) x.place = RESERVED_DEAD;
            x.planned = x.current = 0;
        });
        n.scheduler = S_GONE;
        n.free_seen = 0;
        out(n, {"the scheduler is killed", 0, 0, true});
    }

    // Members that are due, and as many new groups as the credit allows, whichever the policy likes.
    template <class Out>
    void plan(const State& s, Out&& out) const {
        State n = s;
        int due = 0, unopened = 0;
        for (int g = 0; g < kGroups; ++g) {
            unopened += !opened(s, g);
            for (int m = 0; m < kMembers; ++m)
                for (int t = 0; t < kTries; ++t)
                    if (is_due(s, g, m, t)) n.sample[g][m][t].planned = 1, ++due;
        }
        n.scheduler = S_GO;
        n.free_seen = 0;
        const bool credit = c.mutant != LedgerMutant::NO_CREDIT;
        int room = credit ? std::max(0, (s.free_seen - due) / kMembers) : s.free_seen;
        if (room >= unopened || room == 0) {
            for (int g = 0; g < kGroups && room > 0; ++g)
                if (!opened(s, g)) plan_group(n, g);
            return out(n, {"the scheduler reads the fates: %d members are due, room for %d new groups", due, room});
        }
        for (int g = 0; g < kGroups; ++g) {
            if (opened(s, g)) continue;
            State chosen = n;
            plan_group(chosen, g);
            out(chosen, {"the scheduler reads the fates: %d members are due, and it opens group %d", due, g});
        }
    }
    static void plan_group(State& n, int g) {
        for (auto& member : n.sample[g]) member[0].planned = 1;
    }

    template <class Out>
    void begin_dispatch(const State& s, Out&& out) const {
        bool some = false;
        for (const auto& group : s.sample)
            for (const auto& member : group)
                for (const Sample& x : member) some |= x.planned;
        State n = s;
        if (!some || free_slots(s) == 0) {
            each(n, [](Sample& x) { x.planned = 0; });
            n.scheduler = S_LOOK;
            return out(n, {some ? "the scheduler finds no FREE slot" : "the scheduler has dispatched what it planned"});
        }
        for (int g = 0; g < kGroups; ++g)
            for (int m = 0; m < kMembers; ++m)
                for (int t = 0; t < kTries; ++t) {
                    if (!s.sample[g][m][t].planned) continue;
                    State chosen = s;
                    chosen.sample[g][m][t].planned = 0;
                    chosen.sample[g][m][t].current = 1;
                    chosen.scheduler = S_BLANK;
                    coverage().arrow(busrl::State::FREE, busrl::State::RESERVED);
                    out(chosen, {"the scheduler claims a FREE slot for sample %d", uid(g, m, t)});
                }
    }

    template <class Out>
    void go_on_dispatch(const State& s, Out&& out) const {
        State n = s;
        Sample* x = nullptr;
        each(n, [&](Sample& y) {
            if (y.current) x = &y;
        });
        n.scheduler = uint8_t(s.scheduler + 1);
        switch (s.scheduler) {
            case S_BLANK: {
                const char* wrong = x->place != NOWHERE ? "doubled: one sample in two slots" : nullptr;
                x->place = RESERVED;
                return out(n, {"the scheduler writes the sample into the slot", 0, 0, false, wrong});
            }
            case S_UID:
                x->fate = DISPATCHED;
                return out(n, {"the scheduler stores fate D"});
            default:
                move(*x, QUEUED);
                x->current = 0;
                n.scheduler = S_GO;
                return out(n, {"the scheduler commits the slot: QUEUED"});
        }
    }

    // -- rollout and reward workers ------------------------------------------------------------------------------

    template <class Out>
    void work(const State& s, int g, int m, int t, Out&& out) const {
        const Sample& x = s.sample[g][m][t];
        const int u = uid(g, m, t);
        auto to = [&](Place place, const char* text) {
            State n = s;
            if (move(n.sample[g][m][t], place)) out(n, {text, u});
        };
        auto dies = [&](Place place, const char* text) {
            if (!may_die(s)) return;
            State n = killed(s);
            n.sample[g][m][t].place = place;
            out(n, {text, u, 0, true});
        };
        switch (x.place) {
            case QUEUED:
                return x.attempt < kPoison ? to(CLAIMED, "a worker claims sample %d")
                                           : to(DROPPED_ACCIDENT, "the keeper drops sample %d as poison");
            case CLAIMED: {
                dies(GENERATING_DEAD, "the worker that claimed sample %d is killed");
                State n = s;
                n.sample[g][m][t].place = GENERATING;
                ++n.sample[g][m][t].attempt;
                return out(n, {"the worker counts its attempt at sample %d", u});
            }
            case GENERATING:
                dies(GENERATING_DEAD, "the worker of sample %d is killed");
                return to(GENERATED, "the worker commits sample %d");
            case GENERATED:
                return to(REWARDING, "a reward worker claims sample %d");
            case REWARDING:
                dies(REWARDING_DEAD, "the reward worker of sample %d is killed");
                if (c.accidents) to(DROPPED_ACCIDENT, "the reward of sample %d breaks");
                return to(REWARDED, "the reward worker commits sample %d");
            default:
                return;
        }
    }

    // -- by anybody ----------------------------------------------------------------------------------------------

    template <class Out>
    void reap(const State& s, int g, int m, int t, Out&& out) const {
        const Sample& x = s.sample[g][m][t];
        const busrl::State state = kStateOf[x.place];
        if (x.place != RESERVED_DEAD && x.place != GENERATING_DEAD && x.place != REWARDING_DEAD &&
            x.place != TRAINING_DEAD)
            return;
        const bool forward = x.fate == DISPATCHED && c.mutant != LedgerMutant::NO_ROLL_FORWARD;
        const Place rest = x.place == GENERATING_DEAD  ? QUEUED
                           : x.place == REWARDING_DEAD ? GENERATED
                           : x.place == TRAINING_DEAD  ? REWARDED
                           : forward                   ? QUEUED
                                                       : NOWHERE;
        if (state != busrl::State::RESERVED && kStateOf[rest] != busrl::rest_of(state)) return;  // one source of rests
        State n = s;
        if (move(n.sample[g][m][t], rest)) out(n, {"anybody rests the dead owner's slot of sample %d", uid(g, m, t)});
    }

    template <class Out>
    void complete_drop(const State& s, int g, int m, int t, Out&& out) const {
        const Sample& x = s.sample[g][m][t];
        if (x.place != DROPPED_ACCIDENT && x.place != DROPPED_RULE) return;
        State n = s;
        Sample& y = n.sample[g][m][t];
        if (x.fate == DISPATCHED && c.mutant != LedgerMutant::DROP_FREE_FIRST) {
            y.fate = x.place == DROPPED_ACCIDENT ? ACCIDENT : RULE;
            return out(n, {"anybody stores the reason of sample %d", uid(g, m, t)});
        }
        move(y, NOWHERE);
        out(n, {"anybody frees the dropped slot of sample %d", uid(g, m, t)});
    }
};

}  // namespace model
