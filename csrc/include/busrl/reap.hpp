// Giving the slots of the dead back to the living. Anybody may do it at any time, several at once, and die doing it.
//
//  * Order: prove the death of (pid, epoch); for each slot read its word, see that the entry still says (pid, epoch),
//    CAS the exact word to its resting state; after all slots, CAS the entry free.
//  * The re-read makes sure that the word belongs to the dead process and not to a new one in the same entry; `seq` in
//    the word makes sure that the CAS cannot hit a later claim.
//  * Nothing marks a reaper, so a killed one leaves nothing: the entry stays, and the next one does it all again.
//  * RESERVED goes forward if its uid was written under this very claim and its fate says D (the dispatch had
//  happened),
//    back to FREE otherwise.
//  * In a ring of calls RESERVED is always undone, and what rests is freed once its caller is gone: see calls.hpp.
#pragma once

#include "busrl/calls.hpp"

namespace busrl {

namespace detail {
// nullopt: cannot be decided without the fate table, which is not bound here.
inline std::optional<State> resting_state(const Segment& seg, const FateBook& fates, uint32_t slot, uint64_t word) {
    if (state_of(word) != State::RESERVED) return rest_of(state_of(word));
    if (seg.machine() == Machine::calls) return State::FREE;
    // [UID read] acquire, pairs with [UID write].
    const uint64_t uid = seg.line(slot).uid.load(std::memory_order_acquire);
    if (uid == kUidNone) return State::FREE;
    if (seg.line(slot).last_commit_seq.load(std::memory_order_acquire) != seq_of(word)) return State::FREE;
    Fates* table = fates.of(uid);
    if (table == nullptr) return std::nullopt;
    return table->get(FateBook::index(uid)) == kDispatched ? State::QUEUED : State::FREE;
}

inline void forget_waits(const Segment& seg, uint32_t index) {
    for (uint32_t s = 0; s < kStates; ++s)
        // Relaxed: its process is dead, and of several reapers the exchange gives the count to one.
        if (const uint8_t n = seg.proc(index).waits[s].exchange(0, std::memory_order_relaxed))
            seg.wake(State(s)).waiters.fetch_sub(n, std::memory_order_seq_cst);
}
}  // namespace detail

// Rests every slot of entry `index` while it still holds `ident`. False if the entry must stay for a later reaper.
inline bool rest_slots_of(const Segment& seg, const FateBook& fates, uint32_t index, uint64_t ident,
                          std::vector<Reaped>& out) {
    bool complete = true;
    const std::string label = load_text(seg.proc(index).label);
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (!is_owned_by(word, index)) continue;
        // [ENTRY read] acquire, after the word: pairs with [ENTRY retire] and [ENTRY publish] of a new owner.
        if (seg.proc(index).ident.load(std::memory_order_acquire) != ident) return false;
        const auto to = detail::resting_state(seg, fates, i, word);
        if (!to) {
            complete = false;
            continue;
        }
        crash_point("reap.before");
        if (move_slot(seg, i, word, *to, 0) == 0) continue;  // another reaper was faster
        crash_point("reap.cas");
        seg.count(kReaps);
        if (*to != State::FREE) seg.count(kReturned);
        out.push_back({i, state_of(word), *to, label, pid_of(ident)});
    }
    return complete;
}

// An orderly goodbye: hands back all that this process holds, with its own counts taken back. False as above.
inline bool surrender(const Segment& seg, const FateBook& fates, uint32_t me) {
    bool complete = true;
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (!is_owned_by(word, me)) continue;
        if (state_of(word) != State::RESERVED) {
            release(seg, me, i, word, rest_of(state_of(word)));
        } else if (const auto to = detail::resting_state(seg, fates, i, word)) {
            if (move_slot(seg, i, word, *to, 0) != 0 && *to != State::FREE) seg.count(kReturned);
        } else {
            complete = false;
        }
    }
    if (seg.machine() == Machine::calls) free_calls_of(seg, me);
    return complete;
}

// `me` is never looked at: one's own life needs no proof.
inline std::vector<Reaped> reap(const Segment& seg, const FateBook& fates, uint32_t me) {
    std::vector<Reaped> out;
    bool died = false;
    for (uint32_t index = 1; index < seg.shape.n_procs; ++index) {
        uint64_t dead = 0;
        if (index == me || !proven_dead(seg, index, &dead)) continue;
        died = true;
        if (!rest_slots_of(seg, fates, index, dead, out)) continue;
        crash_point("reap.entry");
        // Before the entry is free: afterwards these counts may be a new process's. A reaper killed in between only
        // costs needless wake-ups.
        if (seg.proc(index).ident.load(std::memory_order_acquire) == dead) detail::forget_waits(seg, index);
        // [ENTRY retire] acq_rel, pairs with [ENTRY read]; one reaper wins.
        seg.proc(index).ident.compare_exchange_strong(dead, make_ident(0, epoch_of(dead), false),
                                                      std::memory_order_acq_rel, std::memory_order_acquire);
    }
    if (seg.machine() == Machine::calls) free_orphans(seg, out);
    // The dead may have moved a slot without its hint: a slot that rests and that no search finds.
    bool rescanned = died;
    if (died)
        rescan(seg);
    else
        rescanned = rescan_if_older(seg, kRescanReapNs);
    if (rescanned) trim_all(seg, me, kTrimAfterNs);
    return out;
}

}  // namespace busrl
