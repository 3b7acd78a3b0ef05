// Entries of processes that do not map the ring: the keeper makes them, speaks for them and removes them.
//
//  * `ident` carries kRemoteBit and pid 0. Nobody holds the byte lock of such an entry, so a free lock proves nothing:
//    proven_dead() is never true of it, and no reaper takes its slots, whoever dies, the keeper included.
//  * Only a lease that ends (on the keeper's clock) or a goodbye gives its slots back. Taking them from a process that
//    may still be alive is safe here alone: it can not write, the keeper writes for it, and there is one keeper, by
//    lock.
//  * `start_ticks` holds the number of its life, so that a keeper that comes back knows whom it spoke for.
// Talks to the process table and the slots; knows nothing of leases, clocks or messages.
#pragma once

#include "busrl/reap.hpp"

namespace busrl {

// A free entry for a process without a mapping. The byte lock is held only while the entry is made: it keeps
// registrations away until `ident` says that it is taken.
inline uint32_t enter_remote(const Segment& seg, const std::string& role, const std::string& label, uint64_t life) {
    const File lock_file = seg.reopen();
    for (uint32_t i = 1; i < seg.shape.n_procs; ++i) {
        ProcEntry& e = seg.proc(i);
        if (is_live(e.ident.load(std::memory_order_acquire))) continue;
        struct flock lock = detail::byte_of(i);
        if (::fcntl(lock_file.fd(), F_OFD_SETLK, &lock) != 0) continue;
        uint64_t before = e.ident.load(std::memory_order_acquire);
        if (!is_live(before)) {
            describe_entry(e, role, label, life, 0);
            e.ready.store(1, std::memory_order_release);
            store_text(e.activity, "");
            crash_point("remote.described");
            // [ENTRY publish] release, pairs with [ENTRY read]. The lock keeps every other registration away.
            if (e.ident.compare_exchange_strong(before, make_remote_ident(epoch_of(before) + 1),
                                                std::memory_order_acq_rel, std::memory_order_acquire)) {
                crash_point("remote.entered");
                return i;
            }
        }
        lock.l_type = F_UNLCK;
        ::fcntl(lock_file.fd(), F_OFD_SETLK, &lock);
    }
    throw Error(Fault::table_full,
                "all " + std::to_string(seg.shape.n_procs - 1) + " entries of the process table of " + seg.path +
                    " are taken; raise ring.processes or stop unused workers",
                1, 0);
}

inline void check_remote(const Segment& seg, uint32_t index) {
    if (index == 0 || index >= seg.shape.n_procs || !is_remote(seg.proc(index).ident.load(std::memory_order_acquire)))
        throw Error(Fault::not_registered, "process entry " + std::to_string(index) + " is no remote worker's");
}

// The lease of one slot ended: it goes back to rest, one attempt the poorer. Returns the new word, 0 if it moved.
// Attempts at GENERATING were counted by the claim; for REWARDING they are counted here.
inline uint64_t expire(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word) {
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return 0;
    check_owner(seg, me, slot, word);
    Line& line = seg.line(slot);
    line.changed_ns.store(monotonic_ns(), std::memory_order_release);
    // A keeper killed inside a commit may have left this claim's mark of success without its CAS.
    if (line.last_commit_seq.load(std::memory_order_relaxed) == seq_of(word))
        line.last_commit_seq.store(0, std::memory_order_release);
    if (state_of(word) == State::REWARDING) {
        const uint16_t attempt = line.attempt.load(std::memory_order_relaxed);
        line.attempt.store(uint16_t(std::min(attempt + 1, 255)), std::memory_order_release);
    }
    crash_point("expire.before");
    const uint64_t next = move_slot(seg, slot, word, rest_of(state_of(word)), 0);
    if (next != 0) seg.count(kReaps);
    return next;
}

// Removes the entry. Its slots must rest already: one that does not is handed back as at the end of its lease.
inline void leave_remote(const Segment& seg, uint32_t index) {
    check_remote(seg, index);
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (is_owned_by(word, index)) expire(seg, index, i, word);
    }
    crash_point("remote.rested");
    uint64_t ident = seg.proc(index).ident.load(std::memory_order_acquire);
    // [ENTRY retire] acq_rel, pairs with [ENTRY read].
    seg.proc(index).ident.compare_exchange_strong(ident, make_ident(0, epoch_of(ident), false),
                                                  std::memory_order_acq_rel, std::memory_order_acquire);
}

}  // namespace busrl
