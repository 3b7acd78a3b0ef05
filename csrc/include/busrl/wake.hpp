// Waking those who wait for a state: the count of its transitions is the futex word.
//
//  * Correctness never rests on it: every wait is bounded, and its caller looks at the slots again.
//  * The system call is made only while somebody waits (`waiters` > 0, a hint kept right by the reaper).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include <algorithm>

#include "busrl/segment.hpp"

namespace busrl {

constexpr uint64_t kWaitSliceNs = 50'000'000;  // a waker killed before its system call costs at most this

inline long futex(WakeLine& line, int operation, uint32_t value, const timespec* timeout) {
    auto* low_half = reinterpret_cast<uint32_t*>(&line.transitions);  // little endian, see layout.hpp
    return ::syscall(SYS_futex, low_half, operation, value, timeout, nullptr, 0);
}

inline void announce(const Segment& seg, State entered) {
    WakeLine& w = seg.wake(entered);
    // [WAKE raise] seq_cst, pairs with [WAKE wait]: either this sees the waiter or the waiter sees the new value.
    w.transitions.fetch_add(1, std::memory_order_seq_cst);
    if (w.waiters.load(std::memory_order_seq_cst) != 0) futex(w, FUTEX_WAKE, INT32_MAX, nullptr);
}

inline uint64_t transitions(const Segment& seg, State state) {
    // Acquire, pairs with [WAKE raise]: the slot that entered the state is seen there by who looks after this.
    return seg.wake(state).transitions.load(std::memory_order_acquire);
}

// Looks at the count for at most `ns` without giving up the core; true once it is no longer `seen`.
inline bool spin(const Segment& seg, State state, uint64_t seen, uint64_t ns) {
    const uint64_t until = monotonic_ns() + ns;
    do {
        for (int look = 0; look < 64; ++look) {  // reading the clock costs as much as many looks
            if (transitions(seg, state) != seen) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    } while (monotonic_ns() < until);
    return false;
}

// One bounded nap: returns at a wake-up, a signal, or after `ns` (at most one slice). `me` 0 = unregistered.
inline void nap(const Segment& seg, State state, uint64_t seen, uint32_t me, uint64_t ns) {
    WakeLine& w = seg.wake(state);
    const uint64_t slice = std::min(ns, kWaitSliceNs);
    const timespec timeout{time_t(slice / 1'000'000'000), long(slice % 1'000'000'000)};
    if (transitions(seg, state) != seen) return;
    const uint32_t value = uint32_t(seen);
    if (seg.read_only) {  // cannot announce itself, so it only looks again after the slice
        futex(w, FUTEX_WAIT, value, &timeout);
        return;
    }
    if (me != 0) seg.proc(me).waits[uint32_t(state)].fetch_add(1, std::memory_order_relaxed);
    // [WAKE wait] seq_cst, pairs with [WAKE raise]; the kernel compares the count again before it sleeps.
    w.waiters.fetch_add(1, std::memory_order_seq_cst);
    futex(w, FUTEX_WAIT, value, &timeout);
    w.waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (me != 0) seg.proc(me).waits[uint32_t(state)].fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace busrl
