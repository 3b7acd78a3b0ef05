// The control word of a slot, and the tables of its transitions: one for rings of samples, one for rings of calls.
//
//   state:6 | owner:14 | segs:8 | seq:36
//
//  * A working state names its owner (an index into the process table), a resting state never does.
//  * `seq` grows at every claim and at every return to FREE, so no word value ever comes back.
//  * DROPPED keeps its reason (one ASCII byte) where an owner would stand.
//  * `segs` counts committed segments; it returns to 0 with FREE.
// Knows nothing of memory: all functions here are pure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace busrl {

enum class State : uint8_t {
    FREE = 0,
    RESERVED = 1,  // working
    QUEUED = 2,
    GENERATING = 3,  // working
    GENERATED = 4,
    REWARDING = 5,  // working
    REWARDED = 6,
    TRAINING = 7,  // working
    DROPPED = 8,
};
constexpr uint32_t kStates = 9;

constexpr uint32_t kMaxOwner = (1u << 14) - 1;
constexpr uint32_t kMaxSegs = 254;  // 255 marks a tensor that belongs to no segment
constexpr uint64_t kSeqMask = (uint64_t{1} << 36) - 1;

constexpr uint64_t make_word(State state, uint32_t owner, uint32_t segs, uint64_t seq) {
    return uint64_t(state) << 58 | uint64_t(owner) << 44 | uint64_t(segs) << 36 | (seq & kSeqMask);
}
constexpr uint32_t state_index(uint64_t word) {
    return uint32_t(word >> 58);
}
constexpr State state_of(uint64_t word) {
    return State(state_index(word));
}
constexpr uint32_t owner_of(uint64_t word) {
    return uint32_t(word >> 44) & kMaxOwner;
}
constexpr uint32_t segs_of(uint64_t word) {
    return uint32_t(word >> 36) & 0xFF;
}
constexpr uint64_t seq_of(uint64_t word) {
    return word & kSeqMask;
}

constexpr bool is_working(State s) {
    return s == State::RESERVED || s == State::GENERATING || s == State::REWARDING || s == State::TRAINING;
}
constexpr bool is_owned_by(uint64_t word, uint32_t owner) {
    return is_working(state_of(word)) && owner_of(word) == owner;
}

// What the slots of a ring hold; the magic number of its header says which.
enum class Machine : uint8_t { samples, calls };

struct Transition {
    State from;
    State to;
    const char* meaning;
};

// The whole state machine of samples. Whatever is not in this table cannot happen through this library.
constexpr Transition kTransitions[] = {
    {State::FREE, State::RESERVED, "claim: a dispatch begins"},
    {State::RESERVED, State::QUEUED, "commit: dispatched (or a dead dispatch rolled forward)"},
    {State::RESERVED, State::FREE, "undo: nothing was dispatched"},
    {State::QUEUED, State::GENERATING, "claim"},
    {State::GENERATING, State::QUEUED, "commit of a segment, hand-back, or death of the owner"},
    {State::GENERATING, State::GENERATED, "commit of the last segment"},
    {State::GENERATED, State::REWARDING, "claim"},
    {State::REWARDING, State::GENERATED, "one part of the reward, hand-back, or death of the owner"},
    {State::REWARDING, State::REWARDED, "commit of the reward"},
    {State::REWARDED, State::TRAINING, "claim"},
    {State::TRAINING, State::REWARDED, "hand-back, or death of the owner"},
    {State::TRAINING, State::FREE, "the step is on record"},
    {State::QUEUED, State::DROPPED, "drop"},
    {State::GENERATED, State::DROPPED, "drop"},
    {State::REWARDED, State::DROPPED, "drop"},
    // By the owner only: the same as handing back and dropping with nobody in between.
    {State::GENERATING, State::DROPPED, "drop by the owner"},
    {State::REWARDING, State::DROPPED, "drop by the owner"},
    {State::TRAINING, State::DROPPED, "drop by the owner"},
    {State::DROPPED, State::FREE, "the reason is on record"},
};

// The whole state machine of model calls, see calls.hpp.
constexpr Transition kCallTransitions[] = {
    {State::FREE, State::RESERVED, "claim: a call is being written"},
    {State::RESERVED, State::QUEUED, "commit: the call waits for an engine"},
    {State::RESERVED, State::FREE, "undo, or death of the caller"},
    {State::QUEUED, State::GENERATING, "claim"},
    {State::GENERATING, State::QUEUED, "hand-back, or death of the engine"},
    {State::GENERATING, State::GENERATED, "commit of the answer"},
    {State::GENERATING, State::FREE, "cancelled, by the engine that holds it"},
    {State::QUEUED, State::FREE, "cancelled, or death of the caller"},
    {State::GENERATED, State::FREE, "taken, or death of the caller"},
};

struct Arrows {  // bit `to` of mask[from]: the same table in a form that costs no search
    uint16_t mask[64] = {};
    template <size_t N>
    constexpr explicit Arrows(const Transition (&table)[N]) {
        for (const Transition& t : table) mask[uint32_t(t.from)] |= uint16_t(1u << uint32_t(t.to));
    }
};
constexpr Arrows kArrows[] = {Arrows(kTransitions), Arrows(kCallTransitions)};  // by Machine

constexpr bool is_allowed(State from, State to, Machine machine = Machine::samples) {
    return uint32_t(to) < kStates && (kArrows[uint32_t(machine)].mask[uint32_t(from) & 63] >> uint32_t(to) & 1) != 0;
}
static_assert(!is_allowed(State::QUEUED, State::FREE) && !is_allowed(State::GENERATING, State::FREE),
              "a sample never leaves its slot without a fate");
static_assert(is_allowed(State::QUEUED, State::FREE, Machine::calls) &&
              is_allowed(State::GENERATING, State::FREE, Machine::calls) &&
              is_allowed(State::GENERATED, State::FREE, Machine::calls));
static_assert(kArrows[uint32_t(Machine::calls)].mask[uint32_t(State::REWARDING)] == 0 &&
                  !is_allowed(State::GENERATED, State::DROPPED, Machine::calls),
              "a call has neither reward nor fate");

// Where a slot goes when its owner is dead. RESERVED is decided by its fate, see reap.hpp.
constexpr State rest_of(State working) {
    return working == State::GENERATING  ? State::QUEUED
           : working == State::REWARDING ? State::GENERATED
           : working == State::TRAINING  ? State::REWARDED
                                         : State::FREE;
}

// The word after a transition: the only place where owner, segs and seq are derived.
// `who` is the claimer for a working target and the reason for DROPPED; it is ignored otherwise.
constexpr uint64_t next_word(uint64_t word, State to, uint32_t who, uint32_t new_segments = 0) {
    const bool named = is_working(to) || to == State::DROPPED;
    const bool grows = is_working(to) || to == State::FREE;
    return make_word(to, named ? who : 0, to == State::FREE ? 0 : segs_of(word) + new_segments,
                     seq_of(word) + (grows ? 1 : 0));
}

inline const char* name_of(State s) {
    constexpr const char* names[] = {"FREE",      "RESERVED", "QUEUED",   "GENERATING", "GENERATED",
                                     "REWARDING", "REWARDED", "TRAINING", "DROPPED"};
    return uint32_t(s) < kStates ? names[uint32_t(s)] : "?";
}

}  // namespace busrl
