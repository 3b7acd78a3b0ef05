// What a `busrl_ring` is: one mapping, perhaps one registration, the bound fate tables. Behind the C calls of
// busrl_ring.h and under the Python class Ring alike. Talks to the core in busrl/; knows nothing of C codes or Python.
//
//  * Every call goes through live(), writable() or me(), which refuse closed, inherited, read-only and unregistered
//  use.
//  * Giving up the entry is close()'s job; the destructor calls it and lets nothing out.
#pragma once

#include <type_traits>

#include "busrl/reap.hpp"
#include "busrl/remote.hpp"
#include "busrl_ring.h"

struct busrl_ring {
  public:
    explicit busrl_ring(std::shared_ptr<busrl::Segment> segment) : segment_(std::move(segment)) {}
    busrl_ring(busrl_ring&&) = default;
    ~busrl_ring() {
        try {
            close();
        } catch (const std::exception&) {  // the process is ending; what is left behind is reaped
        }
    }
    busrl_ring(const busrl_ring&) = delete;
    busrl_ring& operator=(const busrl_ring&) = delete;

    const busrl::Segment& live() const {
        using busrl::Fault;
        if (!segment_) throw busrl::Error(Fault::closed, "the ring handle is closed");
        if (segment_->in_forked_child())
            throw busrl::Error(Fault::closed,
                               "the ring handle was inherited over fork(); attach and register in the child");
        return *segment_;
    }
    const busrl::Segment& writable() const {
        const busrl::Segment& seg = live();
        if (seg.read_only) throw busrl::Error(busrl::Fault::read_only, "ring " + seg.path + " is attached read-only");
        return seg;
    }
    uint32_t me() const {
        if (remote_ != 0) return remote();
        if (!member_)
            throw busrl::Error(busrl::Fault::not_registered,
                               "this process is not registered in the ring; call register");
        return member_->index();
    }
    uint32_t index() const { return remote_ != 0 ? remote_ : member_ ? member_->index() : 0; }
    busrl::ProcEntry& entry() const { return writable().proc(me()); }

    // From now on this handle acts for a remote entry, for the keeper. It owns neither the entry nor its slots.
    void act_for(uint32_t index) {
        busrl::check_remote(writable(), index);
        remote_ = index;
        remote_ident_ = segment_->proc(index).ident.load(std::memory_order_acquire);
    }
    const std::shared_ptr<busrl::Segment>& segment() const { return segment_; }

    uint32_t join(const std::string& role, const std::string& label) {
        const busrl::Segment& seg = writable();
        if (remote_ != 0) throw busrl::Error(busrl::Fault::general, "a stand-in is not registered itself");
        if (member_)
            throw busrl::Error(busrl::Fault::general, "already registered as entry " + std::to_string(index()));
        try {
            member_ = std::make_unique<busrl::Membership>(segment_, role, label);
        } catch (const busrl::Error& e) {
            if (e.fault != busrl::Fault::table_full) throw;
            busrl::reap(seg, fates, 0);  // entries of the dead may be all that is missing
            member_ = std::make_unique<busrl::Membership>(segment_, role, label);
        }
        return index();
    }

    void close() {
        if (!segment_) return;
        if (!segment_->in_forked_child() && member_) {
            if (busrl::surrender(*segment_, fates, member_->index()))
                member_->leave();
            else
                member_->abandon();
        }
        member_.reset();
        fates = {};
        segment_.reset();
    }
    bool closed() const { return !segment_; }

    busrl::FateBook fates;
    uint32_t cursor = 0;  // where the next search for a FREE slot begins

  private:
    uint32_t remote() const {
        if (live().proc(remote_).ident.load(std::memory_order_acquire) != remote_ident_)
            throw busrl::Error(busrl::Fault::not_registered,
                               "process entry " + std::to_string(remote_) +
                                   " is no longer the remote worker's that this handle stands for");
        return remote_;
    }

    uint32_t remote_ = 0;  // 0: this handle acts for its own process
    uint64_t remote_ident_ = 0;
    std::shared_ptr<busrl::Segment> segment_;
    std::unique_ptr<busrl::Membership> member_;
};

namespace busrl {

// A line as others see it: 16 words as they lie in the segment, behind the word taken apart.
static_assert(sizeof(busrl_line) == 16 + sizeof(Line) && offsetof(busrl_line, word) == 16);
#define BUSRL_FIELD(name, type, offset) \
    static_assert(offsetof(busrl_line, name) == 16 + (offset) && std::is_same_v<decltype(busrl_line::name), type>);
BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD

// A line of a slot at rest is consistent: it is read again if the word moved meanwhile.
inline void read_line(const Segment& seg, uint32_t slot, busrl_line& line) {
    using Raw = uint64_t __attribute__((may_alias));  // a line is 16 aligned words; whole words copy fastest
    const auto* from = reinterpret_cast<const Raw*>(&seg.line(slot));
    auto* to = reinterpret_cast<Raw*>(&line.word);
    for (int tries = 0; tries < 4; ++tries) {
        // [WORD read] acquire, pairs with [WORD move] of the owner; the second look sees whether it moved in between.
        for (size_t k = 0; k < sizeof(Line) / 8; ++k) to[k] = __atomic_load_n(from + k, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(from, __ATOMIC_ACQUIRE) == line.word) break;
    }
    line.size = sizeof(line);
    line.seq = seq_of(line.word);
    line.owner = uint16_t(owner_of(line.word));
    line.state = uint8_t(state_index(line.word));
    line.segs = uint8_t(segs_of(line.word));
}

// Waits in slices until `state` was entered again (true) or `ns` passed. The caller keeps the mapping alive.
inline bool wait_for_entry(const Segment& seg, uint32_t me, State state, uint64_t seen, uint64_t ns) {
    const uint64_t end = monotonic_ns() + std::min<uint64_t>(ns, uint64_t{1} << 62);
    for (uint64_t now = monotonic_ns(); transitions(seg, state) == seen && now < end; now = monotonic_ns())
        nap(seg, state, seen, me, end - now);
    return transitions(seg, state) != seen;
}

}  // namespace busrl
