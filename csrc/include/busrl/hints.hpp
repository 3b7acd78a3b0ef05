// Where to look for slots at rest: for each of four states a bitmap of its slots, and one above it of the words in use.
//
//  * A hint and never the truth: the word in the control line decides. One bit too many costs a look, one too few hides
//    a slot until the next rescan.
//  * Set by whoever moves a slot into the state, after its compare-and-swap; cleared by whoever looks and finds the
//  slot
//    elsewhere, and who then looks once more. So while all live no bit stays missing: see [HINT set] and [HINT clear].
//  * A process killed (or stopped) between the two leaves one bit too few. reap() rescans after every death that it has
//    proven, and once a second without one; a search that comes back short rescans at most every 20 ms.
// With them the cost of a search follows from the slots that are found, not from the size of the ring.
#pragma once

#include "busrl/segment.hpp"

namespace busrl {

constexpr uint64_t kRescanSearchNs = 20'000'000;   // between the rescans of searches that came back short
constexpr uint64_t kRescanReapNs = 1'000'000'000;  // between those of reapers that found no death

inline uint64_t load_word(const Segment& seg, uint32_t slot) {
    // [WORD read] acquire, pairs with [WORD move]: the line and payload of the last commit are visible.
    return seg.line(slot).word.load(std::memory_order_acquire);
}

namespace detail {
// Every process that may move slots sets and clears these words; nobody owns them. All four accesses are seq_cst:
// setter = word moved, then bit read; clearer = bit cleared, then word read. In their one order at least one of the two
// sees the other, so a slot that rests in the state has its bit or is about to get it.
inline void set_bit(U64& field, uint64_t bit) {
    // [HINT set] seq_cst, pairs with [HINT clear]. Read first: a bit that is set already costs no write to a line that
    // other processes read.
    if (!(field.load(std::memory_order_seq_cst) & bit)) field.fetch_or(bit, std::memory_order_seq_cst);
}
}  // namespace detail

// To be called after the slot was moved into `state`.
inline void hint(const Segment& seg, State state, uint32_t slot) {
    if (!has_hints(state)) return;
    const HintMap map = seg.hints(state);
    detail::set_bit(map.leaf[slot / 64], uint64_t{1} << (slot % 64));
    detail::set_bit(map.top[slot / 4096], uint64_t{1} << (slot / 64 % 64));
}

// Takes back the bits `mask` of leaf `at`, whose slots were seen elsewhere, but not of those that have come since.
inline void unhint(const Segment& seg, State state, uint32_t at, uint64_t mask) {
    U64& leaf = seg.hints(state).leaf[at];
    // [HINT clear] seq_cst, pairs with [HINT set].
    leaf.fetch_and(~mask, std::memory_order_seq_cst);
    for (uint64_t left = mask; left != 0; left &= left - 1) {
        const uint32_t slot = at * 64 + uint32_t(__builtin_ctzll(left));
        // [WORD recheck] seq_cst, pairs with [WORD move].
        if (slot < seg.shape.n_slots && state_of(seg.line(slot).word.load(std::memory_order_seq_cst)) == state)
            hint(seg, state, slot);
    }
}

// Calls visit(slot, word) for slots of [begin, end) that are in `state`, in order, until it returns false; drops the
// bits that proved stale on the way. False if it was stopped.
template <class Visit>
bool search(const Segment& seg, State state, uint32_t begin, uint32_t end, Visit&& visit) {
    const HintMap map = seg.hints(state);
    const uint32_t leaves = (end + 63) / 64;
    for (uint32_t at = begin / 64; at < leaves; ++at) {
        const uint64_t above = map.top[at / 64].load(std::memory_order_acquire) >> (at % 64);
        if (above == 0) {
            at |= 63;
            continue;
        }
        at += uint32_t(__builtin_ctzll(above));
        if (at >= leaves) break;
        uint64_t bits = map.leaf[at].load(std::memory_order_acquire);
        if (bits == 0) {
            U64& top = map.top[at / 64];
            // [HINT clear] as above, one level up.
            top.fetch_and(~(uint64_t{1} << (at % 64)), std::memory_order_seq_cst);
            if (map.leaf[at].load(std::memory_order_seq_cst) != 0) detail::set_bit(top, uint64_t{1} << (at % 64));
            continue;
        }
        if (at == begin / 64) bits &= ~uint64_t{0} << (begin % 64);
        uint64_t stale = 0;
        bool stopped = false;
        for (; bits != 0 && !stopped; bits &= bits - 1) {
            const uint32_t slot = at * 64 + uint32_t(__builtin_ctzll(bits));
            if (slot >= end) break;
            const uint64_t word = load_word(seg, slot);
            if (state_of(word) == state)
                stopped = !visit(slot, word);
            else
                stale |= bits & -bits;
        }
        if (stale != 0) unhint(seg, state, at, stale);
        if (stopped) return false;
    }
    return true;
}

// Sets the bit of every slot that rests without one. Bits too many are left to the searches.
inline void rescan(const Segment& seg) {
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) hint(seg, state_of(load_word(seg, i)), i);
}

// True if it rescanned: when the last one, by whichever process, is at least `every_ns` old.
inline bool rescan_if_older(const Segment& seg, uint64_t every_ns) {
    U64& stamp = seg.header().rescanned_ns;
    // [RESCAN stamp] any process writes it; relaxed, since it only keeps them from all doing the same.
    uint64_t last = stamp.load(std::memory_order_relaxed);
    const uint64_t now = monotonic_ns();
    if (last <= now && now - last < every_ns) return false;
    if (!stamp.compare_exchange_strong(last, now, std::memory_order_relaxed)) return false;
    rescan(seg);
    return true;
}

}  // namespace busrl
