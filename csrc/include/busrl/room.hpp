// Room for what is written: which bytes of a large slot are in memory when, and where the next entry lies.
//
//  * Only the owner of a slot allocates or gives back pages of it: nobody else may read or write behind its committed
//    entries then, and whoever looks without a claim sees that the word has changed.
//  * A slot that is freed keeps its pages, so the next sample of that size costs no system call and no new page.
//  * So that nothing keeps them for good: the owner gives back what is not used at the commit after which nothing is
//    written (settle); a reaper those of a slot that has been FREE or QUEUED for a second, under a claim of its own
//    (trim); and whoever finds no memory left does so for slots of any age before it fails (grow).
//  * A trimmer that dies leaves an undone dispatch or a dead generator: the slot goes back to where it was.
#pragma once

#include "busrl/move.hpp"
#include "busrl/tensors.hpp"

namespace busrl {

constexpr uint64_t kSlack = 16 << 10;             // bytes that are not used and yet not worth a system call
constexpr uint64_t kTrimAfterNs = 1'000'000'000;  // at rest; what is passed on sooner keeps its pages

// The end of the last entry that holds. The caller owns the slot.
inline uint64_t written_end(const Segment& seg, uint32_t slot) {
    const TensorTable& table = seg.table(slot);
    const uint32_t used = used_entries(table);
    uint64_t end = 0;
    for (uint32_t i = 0; i < used; ++i) {
        const TensorEntry e = load_entry(table, i);
        if ((e.flags & kTensorValid) && entry_is_sound(e, seg.shape.slot_bytes))
            end = std::max(end, e.offset + e.nbytes);
    }
    return end;
}

// Gives back what lies behind `end`, but for one loose page: while that is there `allocated` is above kKept, and so a
// later trim() finds the slot, wherever this process is killed. The caller owns the slot.
inline void cut(const Segment& seg, uint32_t slot, uint64_t end) {
    const uint64_t keep = std::max(end, kKept + 1);
    const uint64_t at = seg.shape.data_off + uint64_t(slot) * seg.shape.slot_stride;
    // [PAYLOAD size] release, before the pages go: it never claims more than there is.
    seg.table(slot).allocated.store(keep, std::memory_order_release);
    crash_point("cut.lowered");
    punch(seg.fd(), {align_up(at + keep, page_bytes()), loose_span(seg.shape, slot).end});
    crash_point("cut.punched");
}

// To be called by the owner of a slot before a commit after which nothing is written into it.
inline void settle(const Segment& seg, uint32_t slot) {
    if (!has_loose(seg.shape)) return;
    const uint64_t had = seg.table(slot).allocated.load(std::memory_order_acquire);  // [PAYLOAD size], see layout.hpp
    if (had <= kKept + kSlack) return;
    const uint64_t end = std::max(written_end(seg, slot), kKept);
    if (had > end + kSlack) cut(seg, slot, end);
}

namespace detail {
// The state from which the memory of a slot at rest is given back, if it is. The
// caller of a call takes a new word for the death of its engine: of calls only FREE slots are trimmed.
inline std::optional<State> trims_as(const Segment& seg, State rest) {
    if (rest == State::FREE) return State::RESERVED;
    if (rest == State::QUEUED && seg.machine() == Machine::samples) return State::GENERATING;
    return std::nullopt;
}

// Of a remote entry nobody proves the death, so what it held would stay so.
inline bool may_trim(const Segment& seg, uint32_t me) {
    return has_loose(seg.shape) && me != 0 && me < seg.shape.n_procs &&
           !is_remote(seg.proc(me).ident.load(std::memory_order_acquire));
}

inline void give_back(const Segment& seg, uint32_t slot, uint64_t mine) {
    TensorTable& table = seg.table(slot);
    if (state_of(mine) == State::GENERATING) {
        clear_segments(table, segs_of(mine));
        cut(seg, slot, written_end(seg, slot));
        return;
    }
    clear_all(table);  // before the pages, so that a later look finds nothing and not zeros
    cut(seg, slot, 0);
    table.allocated.store(0, std::memory_order_release);  // [PAYLOAD size]
    punch(seg.fd(), loose_span(seg.shape, slot));         // what cut() left: one page
}
}  // namespace detail

// Gives back the unused memory of a slot that rests FREE or QUEUED and has done so for `rested_ns`.
inline void trim(const Segment& seg, uint32_t me, uint32_t slot, uint64_t rested_ns) {
    const uint64_t word = load_word(seg, slot);
    const auto to = detail::trims_as(seg, state_of(word));
    if (!to) return;
    // [PAYLOAD size] acquire, pairs with the store of whoever owned the slot. These looks only choose: the swap of
    // `word` proves what was read since.
    const uint64_t had = seg.table(slot).allocated.load(std::memory_order_acquire);
    if (had <= kKept) return;
    if (*to == State::GENERATING && had <= std::max(written_end(seg, slot), kKept) + kSlack) return;
    if (seg.line(slot).changed_ns.load(std::memory_order_acquire) + rested_ns > monotonic_ns()) return;
    const uint64_t mine = move_slot(seg, slot, word, *to, me);
    if (mine == 0) return;
    crash_point("trim.claimed");
    detail::give_back(seg, slot, mine);
    if (move_slot(seg, slot, mine, rest_of(*to), 0) != 0 && *to == State::GENERATING) seg.count(kReturned);
}

inline void trim_all(const Segment& seg, uint32_t me, uint64_t rested_ns) {
    if (!detail::may_trim(seg, me)) return;
    for (uint32_t slot = 0; slot < seg.shape.n_slots; ++slot) trim(seg, me, slot, rested_ns);
}

// Allocates the payload up to `end`, by `owner` of the slot, who writes there next. A full /dev/shm is an error here,
// once no slot at rest keeps what it does not use; nothing is lost by it, and the same call succeeds once there is
// room.
inline void grow(const Segment& seg, uint32_t slot, uint32_t owner, uint64_t end) {
    if (!has_loose(seg.shape) || end <= kKept) return;
    A<uint64_t>& allocated = seg.table(slot).allocated;
    const uint64_t had = allocated.load(std::memory_order_acquire);  // [PAYLOAD size], see layout.hpp
    if (end <= had) return;
    const Span loose = loose_span(seg.shape, slot);
    const uint64_t at = seg.shape.data_off + uint64_t(slot) * seg.shape.slot_stride;
    // From the first page that is not there yet: where it fails, the kernel takes back unwritten pages of the range.
    const Span missing{std::max(loose.begin, align_up(at + had, page_bytes())), std::min(loose.end, at + end)};
    int code = allocate(seg.fd(), missing.begin, missing.end);
    if (code == ENOSPC) {
        trim_all(seg, owner, 0);
        code = allocate(seg.fd(), missing.begin, missing.end);
    }
    if (code == ENOSPC)
        throw Error(Fault::shm_too_small,
                    "no memory is left where the ring " + seg.path + " is, for " + std::to_string(end - had) +
                        " more bytes of slot " + std::to_string(slot) +
                        "; enlarge it (mount -o remount,size=..., docker run --shm-size=...), or wait for samples to "
                        "be trained",
                    end - had, 0);
    errno = code;
    if (code != 0) throw Error(Fault::general, errno_text("cannot allocate payload of the ring " + seg.path));
    allocated.store(end, std::memory_order_release);  // [PAYLOAD size]
}

// Sets room aside and returns the entry to publish. `entry` brings name, segment, dtype, shape and nbytes.
// The caller owns the slot. The index is where the entry belongs; it is invalid until store_entry.
inline uint32_t place_entry(const Segment& seg, uint32_t slot, uint64_t word, TensorEntry& entry) {
    TensorTable& table = seg.table(slot);
    const TensorName name(std::string(entry.name, ::strnlen(entry.name, kNameBytes)));
    const bool committed = entry.segment != kNoSegment && entry.segment < segs_of(word);
    if (committed)
        throw Error(Fault::not_owner, "slot " + std::to_string(slot) + ": " + describe_name(entry) +
                                          " is committed, and a committed segment is never written again");
    entry.writer = word;
    if (auto old = find_entry(table, name, entry.segment)) {
        const TensorEntry before = load_entry(table, *old);
        invalidate_entry(table, *old);
        if (entry_is_sound(before, seg.shape.slot_bytes) && before.capacity >= entry.nbytes) {
            entry.offset = before.offset;
            entry.capacity = before.capacity;
            grow(seg, slot, owner_of(word), entry.offset + entry.nbytes);
            return *old;
        }
    }
    const uint32_t used = used_entries(table);
    uint32_t index = used;
    uint64_t end = 0;
    for (uint32_t i = 0; i < used; ++i) {
        const TensorEntry e = load_entry(table, i);
        if (!(e.flags & kTensorValid)) {
            index = std::min(index, i);
        } else if (entry_is_sound(e, seg.shape.slot_bytes)) {
            end = std::max(end, align_up(e.offset + e.capacity, kTensorAlign));
        }
    }
    if (index >= kTensors)
        throw Error(Fault::slot_too_small, "slot " + std::to_string(slot) + " holds " + std::to_string(kTensors) +
                                               " tensors already, no room for " + describe_name(entry));
    if (end > seg.shape.slot_bytes || entry.nbytes > seg.shape.slot_bytes - end)
        throw Error(Fault::slot_too_small,
                    "slot " + std::to_string(slot) + ": " + describe_name(entry) + " needs " +
                        std::to_string(entry.nbytes) + " bytes, " +
                        std::to_string(seg.shape.slot_bytes - std::min(end, seg.shape.slot_bytes)) + " of " +
                        std::to_string(seg.shape.slot_bytes) + " are left; raise ring.slot_bytes",
                    entry.nbytes, seg.shape.slot_bytes - std::min(end, seg.shape.slot_bytes));
    grow(seg, slot, owner_of(word), end + entry.nbytes);
    entry.offset = end;
    entry.capacity = entry.nbytes;
    return index;
}

}  // namespace busrl
