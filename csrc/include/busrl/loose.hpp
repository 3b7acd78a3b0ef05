// Which bytes of the segment are in memory only while they are needed: the far part of each large slot's payload.
//
//  * Of a slot the first kKept bytes are allocated for good, and all of a slot below kLooseFrom: short answers never
//    cost a system call.
//  * Loose are whole pages of one slot alone, so giving them back touches no neighbour.
//  * Loose bytes are allocated before they are written: a full /dev/shm is an error there, never SIGBUS.
// Talks to the file; knows nothing of states. Who may call, and when: room.hpp.
#pragma once

#include "busrl/util.hpp"

namespace busrl {

constexpr uint64_t kKept = 64 << 10;
constexpr uint64_t kLooseFrom = 256 << 10;  // of slot_stride

struct Span {  // of the file
    uint64_t begin;
    uint64_t end;
    uint64_t bytes() const { return end - begin; }
};

inline uint64_t page_bytes() {
    static const auto size = uint64_t(::sysconf(_SC_PAGESIZE));
    return size;
}

inline bool has_loose(const HeaderFixed& h) {
    return h.slot_stride >= kLooseFrom;
}

inline Span loose_span(const HeaderFixed& h, uint32_t slot) {
    const uint64_t at = h.data_off + uint64_t(slot) * h.slot_stride, end = at + h.slot_stride;
    if (!has_loose(h)) return {end, end};
    return {align_up(at + kKept, page_bytes()), end / page_bytes() * page_bytes()};
}

inline uint64_t kept_bytes(const HeaderFixed& h) {
    uint64_t bytes = h.total_bytes;
    if (has_loose(h))
        for (uint32_t slot = 0; slot < h.n_slots; ++slot) bytes -= loose_span(h, slot).bytes();
    return bytes;
}

// All that is not loose. 0, or an errno.
inline int allocate_kept(int fd, const HeaderFixed& h) {
    if (::ftruncate(fd, off_t(h.total_bytes)) != 0) return errno;
    uint64_t from = 0;
    if (has_loose(h))
        for (uint32_t slot = 0; slot < h.n_slots; ++slot) {
            const Span span = loose_span(h, slot);
            if (const int code = allocate(fd, from, span.begin)) return code;
            from = span.end;
        }
    return allocate(fd, from, h.total_bytes);
}

// Gives the pages back; where the file system cannot, they stay.
inline void punch(int fd, const Span& span) {
    if (span.begin >= span.end) return;
    ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(span.begin), off_t(span.bytes()));
}

}  // namespace busrl
