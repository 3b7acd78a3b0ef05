// A ring of model calls for tests, with ids that follow from the number of the call and an answer that follows from
// both.
#pragma once

#include "harness.hpp"

namespace test {

inline int32_t call_id(uint64_t number, uint64_t at) {
    return int32_t((number * 0x9E3779B97F4A7C15u + at * 0x2545F491u) >> 40);
}

// The ids as a reader gets them: by the entry's own checks, element for element.
inline bool call_ids_are(const busrl::Segment& seg, uint32_t slot, uint64_t number, uint64_t n) {
    const auto at = busrl::find_entry(seg.table(slot), busrl::TensorName("prompt_ids"), busrl::kNoSegment);
    if (!at) return false;
    const busrl::TensorEntry e = busrl::load_entry(seg.table(slot), *at);
    if (!busrl::entry_is_sound(e, seg.shape.slot_bytes) || e.code != busrl::kInt || e.bits != 32 || e.shape[0] != n)
        return false;
    const auto* ids = reinterpret_cast<const int32_t*>(seg.payload(slot) + e.offset);
    for (uint64_t i = 0; i < n; ++i)
        if (ids[i] != call_id(number, i)) return false;
    return true;
}

struct CallWorld {  // a ring of calls, and one member
    Place place;
    std::shared_ptr<busrl::Segment> seg;
    std::unique_ptr<busrl::Membership> member;
    uint32_t cursor = 0;
    std::vector<int32_t> ids;

    explicit CallWorld(busrl::Geometry geometry = {8, 8, 4096})
        : seg(busrl::Segment::create(place.path("ring"), geometry, {1, 2, 3}, busrl::Machine::calls)) {
        member = std::make_unique<busrl::Membership>(seg, "agent", "agent/0");
    }
    uint32_t me() const { return member->index(); }
    busrl::Call call(uint64_t number, uint64_t n, uint32_t max_new_tokens = 8, int32_t priority = 0) {
        busrl::Call call{World::task(number, priority), nullptr, n};
        call.line.max_new_tokens = max_new_tokens;
        ids.resize(n);
        for (uint64_t i = 0; i < n; ++i) ids[i] = call_id(number, i);
        call.ids = ids.data();
        return call;
    }
    std::optional<busrl::Held> put(uint64_t number, uint64_t n, uint32_t max_new_tokens = 8, int32_t priority = 0) {
        return busrl::put_call(*seg, me(), call(number, n, max_new_tokens, priority), cursor);
    }
    std::optional<busrl::Held> put_as(uint32_t who, uint64_t number, uint64_t n) {
        return busrl::put_call(*seg, who, call(number, n), cursor);
    }
    uint32_t count(busrl::State state) const {
        uint32_t n = 0;
        for (uint32_t i = 0; i < seg->shape.n_slots; ++i) n += busrl::state_of(busrl::load_word(*seg, i)) == state;
        return n;
    }
    uint32_t first(busrl::State state) const {
        for (uint32_t i = 0; i < seg->shape.n_slots; ++i)
            if (busrl::state_of(busrl::load_word(*seg, i)) == state) return i;
        throw Failure{std::string("no slot is ") + busrl::name_of(state)};
    }
    bool all_free() const { return count(busrl::State::FREE) == seg->shape.n_slots; }
};

}  // namespace test
