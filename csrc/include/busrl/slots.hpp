// Claiming, committing and handing back slots: each is one compare-and-swap on the exact word that was read.
//
//  * Line fields are written only by the owner, between its claim and its commit.
//  * A claim that fails says nothing but "look again".
//  * `attempt` counts claims for generation since the last committed segment, `alone_deaths` those made alone; an owner
//    that hands a slot back takes its own count back, so only deaths remain counted.
#pragma once

#include <vector>

#include "busrl/room.hpp"

namespace busrl {

inline void check_slot(const Segment& seg, uint32_t slot) {
    if (slot >= seg.shape.n_slots)
        throw Error(Fault::general, "slot " + std::to_string(slot) + " of " + std::to_string(seg.shape.n_slots));
}

inline void check_arrow(const Segment& seg, uint64_t word, State to) {
    if (!is_allowed(state_of(word), to, seg.machine()))
        throw Error(Fault::transition, std::string("there is no transition ") + name_of(state_of(word)) + " -> " +
                                           (uint32_t(to) < kStates ? name_of(to) : "?") + " of " +
                                           kHolds[uint32_t(seg.machine())]);
}

inline void check_machine(const Segment& seg, Machine machine) {
    if (seg.machine() != machine)
        throw Error(Fault::transition, "ring " + seg.path + " holds " + kHolds[uint32_t(seg.machine())] + ", not " +
                                           kHolds[uint32_t(machine)]);
}

// The owner's right to write: the slot is still at `word`, and `word` names `me`.
inline void check_owner(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word) {
    check_slot(seg, slot);
    const uint64_t now = load_word(seg, slot);
    if (now == word && me != 0 && is_owned_by(word, me)) return;
    throw Error(Fault::not_owner, "slot " + std::to_string(slot) + " is " + name_of(state_of(now)) + " of process " +
                                      std::to_string(is_working(state_of(now)) ? owner_of(now) : 0) + " at seq " +
                                      std::to_string(seq_of(now)) + ", not " + name_of(state_of(word)) +
                                      " of process " + std::to_string(me) + " at seq " + std::to_string(seq_of(word)));
}

namespace detail {
inline void after_claim(const Segment& seg, uint32_t slot, uint64_t word, State to) {
    Line& line = seg.line(slot);
    if (to == State::GENERATING) {
        clear_segments(seg.table(slot), segs_of(word));
        line.flags.store(line.flags.load(std::memory_order_relaxed) & ~kFlagAlone, std::memory_order_release);
        line.attempt.store(uint16_t(line.attempt.load(std::memory_order_relaxed) + 1), std::memory_order_release);
    }
    line.changed_ns.store(coarse_ns(), std::memory_order_release);
}

inline void before_rest(const Segment& seg, uint32_t slot, uint64_t word, bool committed) {
    Line& line = seg.line(slot);
    line.changed_ns.store(coarse_ns(), std::memory_order_release);
    if (committed) line.last_commit_seq.store(seq_of(word), std::memory_order_release);
    if (state_of(word) != State::GENERATING) return;
    const uint32_t flags = line.flags.load(std::memory_order_relaxed);
    const uint16_t attempt = line.attempt.load(std::memory_order_relaxed);
    const uint16_t alone = line.alone_deaths.load(std::memory_order_relaxed);
    if (committed) {
        line.alone_deaths.store(0, std::memory_order_release);
        line.attempt.store(0, std::memory_order_release);
    } else {
        if ((flags & kFlagAlone) && alone > 0) line.alone_deaths.store(uint16_t(alone - 1), std::memory_order_release);
        if (attempt > 0) line.attempt.store(uint16_t(attempt - 1), std::memory_order_release);
    }
    line.flags.store(flags & ~kFlagAlone, std::memory_order_release);
}
}  // namespace detail

// resting -> working. FREE -> RESERVED is dispatch()'s alone, because only it keeps uid and fate in step.
inline uint64_t claim(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word, State to) {
    check_slot(seg, slot);
    if (word == 0) return 0;
    check_arrow(seg, word, to);
    if (!is_working(to) || to == State::RESERVED)
        throw Error(Fault::transition, std::string(name_of(to)) + " is not reached by a claim");
    const uint64_t mine = move_slot(seg, slot, word, to, me);
    if (mine == 0) return 0;
    crash_point("claim.cas");
    detail::after_claim(seg, slot, mine, to);
    return mine;
}

// working -> resting without a new segment. Returns the new word, or 0 if the slot was not at `word`.
inline uint64_t release(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word, State to) {
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return 0;
    check_arrow(seg, word, to);
    check_owner(seg, me, slot, word);
    if (is_working(to) || to == State::DROPPED || to == State::FREE)
        throw Error(Fault::transition, std::string(name_of(state_of(word))) + " -> " + name_of(to) +
                                           " is not a release; use finish(), drop() or free_call()");
    detail::before_rest(seg, slot, word, to != rest_of(state_of(word)));  // going back is no commit
    if (to == State::REWARDED && state_of(word) == State::REWARDING) settle(seg, slot);
    crash_point("release.before");
    const uint64_t next = move_slot(seg, slot, word, to, 0);
    crash_point("release.after");
    return next;
}

// GENERATING -> QUEUED (more to come) or GENERATED (done), with one more committed segment.
inline uint64_t commit_segment(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word, bool done) {
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return 0;
    if (state_of(word) != State::GENERATING)
        throw Error(Fault::transition,
                    std::string("a segment is committed from GENERATING, not from ") + name_of(state_of(word)));
    check_owner(seg, me, slot, word);
    if (!done && seg.machine() == Machine::calls)
        throw Error(Fault::transition, "the answer to a model call is one segment: commit it when it is whole");
    if (segs_of(word) >= kMaxSegs)
        throw Error(Fault::slot_too_small, "slot " + std::to_string(slot) + " has 254 segments, the most there can be");
    detail::before_rest(seg, slot, word, true);
    if (seg.machine() == Machine::calls) settle(seg, slot);
    crash_point("commit.before");
    const uint64_t next = move_slot(seg, slot, word, done ? State::GENERATED : State::QUEUED, 0, 1);
    crash_point("commit.after");
    return next;
}

// The claimer of a GENERATING slot says that it holds nothing else: should it die, the slot itself is to blame.
inline void mark_alone(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word) {
    check_owner(seg, me, slot, word);
    Line& line = seg.line(slot);
    const uint32_t flags = line.flags.load(std::memory_order_relaxed);
    if (flags & kFlagAlone) return;
    line.alone_deaths.store(uint16_t(line.alone_deaths.load(std::memory_order_relaxed) + 1), std::memory_order_release);
    line.flags.store(flags | kFlagAlone, std::memory_order_release);
}

struct Wanted {
    State from;
    State to;
    int64_t cls;  // -1 = any
    uint32_t limit;
    uint32_t max_attempt;
};

namespace detail {
struct Candidate {
    uint32_t slot;
    int32_t priority;
    bool unfinished;
    uint64_t admission;
    uint64_t uid;
    uint64_t word;
    bool operator<(const Candidate& o) const {
        if (unfinished != o.unfinished) return unfinished;
        if (priority != o.priority) return priority > o.priority;
        return admission != o.admission ? admission < o.admission : uid < o.uid;
    }
};

// Every slot that `want` speaks of. What is read of a line here holds if the CAS on `word` succeeds.
inline std::vector<Candidate> candidates(const Segment& seg, uint32_t me, const Wanted& want) {
    std::vector<Candidate> found;
    found.reserve(8);  // small: larger blocks cost the allocator more than they save
    const uint64_t now = want.from == State::QUEUED ? monotonic_ns() : 0;
    auto look = [&](uint32_t slot, uint64_t word) {
        const Line& line = seg.line(slot);
        if (want.cls >= 0 && line.cls.load(std::memory_order_acquire) != uint32_t(want.cls)) return true;
        if (want.from == State::QUEUED) {
            if (line.attempt.load(std::memory_order_acquire) > want.max_attempt) return true;
            const uint32_t other = line.offer_to.load(std::memory_order_acquire);
            if (other != 0 && other != me && line.offer_until_ns.load(std::memory_order_acquire) > now) return true;
        }
        found.push_back(
            {slot, line.priority.load(std::memory_order_acquire), want.from == State::QUEUED && segs_of(word) > 0,
             line.admission.load(std::memory_order_acquire), line.uid.load(std::memory_order_acquire), word});
        return true;
    };
    search(seg, want.from, 0, seg.shape.n_slots, look);
    return found;
}

inline void take_best(const Segment& seg, uint32_t me, const Wanted& want, std::vector<Held>& held) {
    std::vector<Candidate> found = candidates(seg, me, want);
    size_t sorted = 0;  // as many as are needed: claims by others make it a few more
    for (size_t i = 0; i < found.size() && held.size() < want.limit; ++i) {
        if (i == sorted) {
            sorted = std::min(found.size(), i + want.limit - held.size());
            std::partial_sort(found.begin() + long(i), found.begin() + long(sorted), found.end());
        }
        const Candidate& best = found[i];
        const uint64_t mine = claim(seg, me, best.slot, best.word, want.to);
        if (mine == 0) continue;
        held.push_back({best.slot, mine});
        unhint(seg, want.from, best.slot / 64, uint64_t{1} << (best.slot % 64));
        crash_point("take.claimed");
    }
}
}  // namespace detail

// Claims up to `limit` slots, the best first: unfinished before fresh, then priority, then the older admission.
inline std::vector<Held> take(const Segment& seg, uint32_t me, const Wanted& want) {
    check_arrow(seg, make_word(want.from, 0, 0, 0), want.to);
    std::vector<Held> held;
    if (want.limit == 0 || !has_hints(want.from)) return held;
    detail::take_best(seg, me, want, held);
    if (held.size() < want.limit && rescan_if_older(seg, kRescanSearchNs)) detail::take_best(seg, me, want, held);
    return held;
}

}  // namespace busrl
