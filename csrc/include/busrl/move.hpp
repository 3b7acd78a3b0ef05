// How a slot changes state: one compare-and-swap, then the hint and the wake-up that others find it by.
// Knows nothing of who may do it: slots.hpp, endings.hpp, calls.hpp, room.hpp and reap.hpp do.
#pragma once

#include "busrl/crash.hpp"
#include "busrl/hints.hpp"
#include "busrl/wake.hpp"

namespace busrl {

struct Held {
    uint32_t slot;
    uint64_t word;
};

// The one place where a slot changes state. Returns the new word, or 0 if the slot is no longer at `word`.
// Owner: whoever the table in word.hpp allows; the caller has checked that it is the one.
inline uint64_t move_slot(const Segment& seg, uint32_t slot, uint64_t word, State to, uint32_t who,
                          uint32_t new_segments = 0) {
    const uint64_t next = next_word(word, to, who, new_segments);
    // [WORD move] seq_cst: releases the owner's writes to the next reader, acquires the last owner's, and stands before
    // [HINT set] in the one order that [WORD recheck] relies on; failure acquire.
    if (!seg.line(slot).word.compare_exchange_strong(word, next, std::memory_order_seq_cst, std::memory_order_acquire))
        return 0;
    crash_point("move.cas");
    hint(seg, to, slot);
    crash_point("move.hinted");
    announce(seg, to);
    return next;
}

}  // namespace busrl
