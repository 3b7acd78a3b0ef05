// What a state of the ledger model is: samples with place, fate and record, the scheduler and the learner; what follows
// from it for a group; and the packing, in which states that differ by numbering are one.
// What the processes do is in ledger_learner.hpp and ledger_model.hpp.
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

class LedgerState {
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

    explicit LedgerState(const Config& config) : c(config) {}

    State initial() const {
        State s{};
        s.scheduler = S_GONE;
        s.learner = L_GONE;
        return s;
    }

    // ------------------------------------------------------------------------------------------------ packing

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

  protected:
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
