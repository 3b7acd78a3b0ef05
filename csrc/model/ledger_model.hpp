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

#include "coverage.hpp"
#include "explorer.hpp"

namespace model {

enum class LedgerMutant : uint8_t {
    NONE,
    NO_CREDIT,         // a group is opened whenever a slot is free
    NO_ROLL_FORWARD,   // a dead dispatch is always undone
    NO_LOG_CHECK,      // the learner does not look for its samples in checkpoint and log
    DROP_FREE_FIRST,   // a dropped slot is freed before its fate is stored
    REPLAY_ALL,        // records that the checkpoint holds already are trained again at a restart
    LOG_CUT_FIRST,     // records are dropped before the checkpoint is whole
    SUCCESSOR_RUSHES,  // a scheduler begins while its predecessor's slot is still RESERVED
};

class LedgerModel {
  public:
    static constexpr int kGroups = 2, kMembers = 2, kTries = 2, kPoison = 2;

    struct Config {
        int slots;
        bool accidents;    // rewards break
        bool checkpoints;  // the learner writes some
        LedgerMutant mutant = LedgerMutant::NONE;
        int deaths = kNoLimit;
    };
    static constexpr int kNoLimit = 15;

    // A slot's state seen from its sample, the owner reduced to "living" or "dead".
    enum Place : uint8_t {
        NOWHERE,
        RESERVED,
        RESERVED_DEAD,
        QUEUED,
        CLAIMED,
        GENERATING,
        GENERATING_DEAD,
        GENERATED,
        REWARDING,
        REWARDING_DEAD,
        REWARDED,
        TRAINING,
        TRAINING_DEAD,
        DROPPED_ACCIDENT,
        DROPPED_RULE
    };
    enum Fate : uint8_t { NONE, DISPATCHED, TRAINED, ACCIDENT, RULE };
    enum SchedulerPc : uint8_t { S_GONE, S_START, S_LOOK, S_SEEN, S_GO, S_BLANK, S_UID, S_FATE };
    enum LearnerPc : uint8_t { L_GONE, L_START, L_LOOK, L_CLAIM, L_RECORD, L_END, L_ASIDE, L_CHECKPOINT };

    struct Sample {
        uint8_t place, fate, logged, kept, attempt;  // kept: in the checkpoint
        uint8_t planned, current;                    // by the scheduler: to be dispatched; being dispatched
    };
    struct State {
        Sample sample[kGroups][kMembers][kTries];
        uint8_t scheduler, free_seen, blank_dead;  // blank: RESERVED by a dead scheduler, without a sample
        uint8_t learner, at_group, deaths;         // at_group: 1 + the group in the learner's hands
    };
    using Key = std::array<uint64_t, 2>;

    explicit LedgerModel(const Config& config) : c(config) {}

    State initial() const {
        State s{};
        s.scheduler = S_GONE;
        s.learner = L_GONE;
        return s;
    }

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
    const Config c;

    static constexpr busrl::State kStateOf[] = {
        busrl::State::FREE,       busrl::State::RESERVED,   busrl::State::RESERVED,   busrl::State::QUEUED,
        busrl::State::GENERATING, busrl::State::GENERATING, busrl::State::GENERATING, busrl::State::GENERATED,
        busrl::State::REWARDING,  busrl::State::REWARDING,  busrl::State::REWARDED,   busrl::State::TRAINING,
        busrl::State::TRAINING,   busrl::State::DROPPED,    busrl::State::DROPPED};

    // Every change of a slot; there is none that the table in word.hpp does not allow.
    static bool move(Sample& x, Place to) {
        const busrl::State before = kStateOf[x.place], after = kStateOf[to];
        if (!busrl::is_allowed(before, after)) return false;
        coverage().arrow(before, after);
        x.place = to;
        if (to == NOWHERE || to == GENERATED) x.attempt = 0;
        return true;
    }

    static int uid(int g, int m, int t) { return (g * kTries + t) * kMembers + m; }

    bool may_die(const State& s) const { return c.deaths == kNoLimit || s.deaths < c.deaths; }
    State killed(const State& s) const {
        State n = s;
        if (c.deaths != kNoLimit) ++n.deaths;
        return n;
    }

    template <class F>
    static void each(State& s, F&& f) {
        for (auto& group : s.sample)
            for (auto& member : group)
                for (Sample& x : member) f(x);
    }

    // -- groups, as busrl/scheduling/groups.py derives them from ring and fates ------------------------------------

    static const Sample& standing(const Sample (&member)[kTries]) {
        return member[0].fate == ACCIDENT ? member[1] : member[0];
    }
    static bool opened(const State& s, int g) {
        for (const auto& member : s.sample[g])
            for (const Sample& x : member)
                if (x.fate != NONE) return true;
        return false;
    }
    static bool closed(const State& s, int g) {
        for (const auto& member : s.sample[g])
            if (const uint8_t fate = standing(member).fate; fate == TRAINED || fate == RULE) return true;
        return false;
    }
    static bool is_due(const State& s, int g, int m, int t) {
        const auto& member = s.sample[g][m];
        return opened(s, g) && !closed(s, g) && standing(member).fate == NONE &&
               (member[0].fate == ACCIDENT) == (t == 1);
    }
    static int due_of(const State& s, int g) {
        int due = 0;
        for (int m = 0; m < kMembers; ++m) due += is_due(s, g, m, 0) + is_due(s, g, m, 1);
        return due;
    }
    static bool survives(const Sample& x) { return x.place == REWARDED && x.fate == DISPATCHED; }
    static int survivors(const State& s, int g) {
        int alive = 0;
        for (const auto& member : s.sample[g]) alive += survives(standing(member));
        return alive;
    }
    static bool resolved(const State& s, int g) {
        if (!opened(s, g) || due_of(s, g) != 0) return false;
        for (const auto& member : s.sample[g])
            if (const Sample& x = standing(member); x.fate == DISPATCHED && x.place != REWARDED) return false;
        return true;
    }
    int free_slots(const State& s) const {
        int used = s.blank_dead + (s.scheduler == S_BLANK);
        for (const auto& group : s.sample)
            for (const auto& member : group)
                for (const Sample& x : member) used += x.place != NOWHERE;
        return c.slots - used;
    }

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

    // -- the learner ---------------------------------------------------------------------------------------------

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

    // ------------------------------------------------------------------------------------------------ packing

  public:
    // Members of a group in the order of what they are, then the groups: the same for all numberings.
    Key pack(const State& s) const {
        uint64_t group[kGroups];
        for (int g = 0; g < kGroups; ++g) {
            const uint64_t a = pack_member(s.sample[g][0]), b = pack_member(s.sample[g][1]);
            group[g] = uint64_t(s.at_group == g + 1) << 52 | std::min(a, b) << 26 | std::max(a, b);
        }
        if (group[1] < group[0]) std::swap(group[0], group[1]);
        Bits<2> bits;
        bits.put(group[0], 53), bits.put(group[1], 53);
        bits.put(s.scheduler, 3), bits.put(s.free_seen, 3), bits.put(s.blank_dead, 1), bits.put(s.learner, 3);
        bits.put(s.deaths, 4);
        return bits.words;
    }

    State unpack(const Key& key) const {
        Bits<2> bits;
        bits.words = key;
        State s{};
        for (int g = 0; g < kGroups; ++g) {
            const uint64_t group = bits.get(53);
            if (group >> 52) s.at_group = uint8_t(g + 1);
            unpack_member(group >> 26 & kMemberMask, s.sample[g][0]);
            unpack_member(group & kMemberMask, s.sample[g][1]);
        }
        auto get = [&](uint32_t n) { return uint8_t(bits.get(n)); };
        s.scheduler = get(3), s.free_seen = get(3), s.blank_dead = get(1), s.learner = get(3), s.deaths = get(4);
        return s;
    }

  private:
    static constexpr uint64_t kMemberMask = (uint64_t{1} << 26) - 1;

    static uint64_t pack_member(const Sample (&member)[kTries]) {
        Bits<1> bits;
        for (const Sample& x : member) {
            bits.put(x.place, 4), bits.put(x.fate, 3), bits.put(x.logged, 1), bits.put(x.kept, 1);
            bits.put(x.attempt, 2), bits.put(x.planned, 1), bits.put(x.current, 1);
        }
        return bits.words[0];
    }
    static void unpack_member(uint64_t packed, Sample (&member)[kTries]) {
        Bits<1> bits;
        bits.words[0] = packed;
        auto get = [&](uint32_t n) { return uint8_t(bits.get(n)); };
        for (Sample& x : member) {
            x.place = get(4), x.fate = get(3), x.logged = get(1), x.kept = get(1);
            x.attempt = get(2), x.planned = get(1), x.current = get(1);
        }
    }
};

}  // namespace model
