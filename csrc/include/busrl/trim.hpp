// Memory of long answers goes back once their slot is FREE: FREE -> RESERVED* -> FREE, and the pages in between.
//
//  * Only the owner of a RESERVED slot gives pages back: nobody else may read or write its payload then, and whoever
//    looks without a claim sees that the word has changed.
//  * Not earlier: a slot of TRAINING* whose owner dies is read again, and a DROPPED one has no owner.
//  * The entries go before the pages, so what a later look finds of this slot is nothing and not zeros.
//  * Whoever freed the slot does it, if nobody has claimed it meanwhile (then it is done after that sample); a reaper
//    does it for those that were killed before. A death in between is an undone dispatch: the slot goes back to FREE.
#pragma once

#include "busrl/slots.hpp"

namespace busrl {

inline void trim(const Segment& seg, uint32_t me, uint32_t slot) {
    if (!has_loose(seg.shape) || me == 0) return;
    TensorTable& table = seg.table(slot);
    // [PAYLOAD size] acquire, pairs with the store of whoever owned the slot.
    if (table.allocated.load(std::memory_order_acquire) <= kKept) return;
    const uint64_t word = load_word(seg, slot);
    if (state_of(word) != State::FREE) return;
    // Of a remote entry nobody proves the death, so what it held RESERVED would stay so.
    if (is_remote(seg.proc(me).ident.load(std::memory_order_acquire))) return;
    const uint64_t mine = move_slot(seg, slot, word, State::RESERVED, me);
    if (mine == 0) return;
    crash_point("trim.claimed");
    clear_all(table);
    // [PAYLOAD size] release, before the pages go: it never claims more than there is.
    table.allocated.store(0, std::memory_order_release);
    punch(seg.fd(), loose_span(seg.shape, slot));
    crash_point("trim.punched");
    move_slot(seg, slot, mine, State::FREE, 0);
}

// Every FREE slot that still has memory of an earlier answer.
inline void trim_all(const Segment& seg, uint32_t me) {
    if (!has_loose(seg.shape)) return;
    for (uint32_t slot = 0; slot < seg.shape.n_slots; ++slot)
        if (state_of(load_word(seg, slot)) == State::FREE) trim(seg, me, slot);
}

}  // namespace busrl
