// The smallest test harness that says what failed: TEST("a sentence") { ... CHECK(...); }
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "busrl/reap.hpp"

namespace test {

struct Case {
    const char* name;
    std::function<void()> body;
};
inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}
struct Register {
    Register(const char* name, std::function<void()> body) { cases().push_back({name, std::move(body)}); }
};
struct Failure {
    std::string text;
};

#define TEST_JOIN2(a, b) a##b
#define TEST_JOIN(a, b) TEST_JOIN2(a, b)
#define TEST(name)                                                                          \
    static void TEST_JOIN(test_, __LINE__)();                                               \
    static test::Register TEST_JOIN(register_, __LINE__)(name, TEST_JOIN(test_, __LINE__)); \
    static void TEST_JOIN(test_, __LINE__)()
#define CHECK(condition)                                                                                   \
    do {                                                                                                   \
        if (!(condition))                                                                                  \
            throw test::Failure{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition}; \
    } while (0)

template <class F>
void check_fault(busrl::Fault fault, F&& call) {
    try {
        call();
    } catch (const busrl::Error& e) {
        if (e.fault == fault) return;
        throw Failure{std::string("another fault: ") + e.what()};
    }
    throw Failure{"no fault was raised"};
}

// A folder under /dev/shm that is gone with the test.
struct Place {
    std::string folder;
    Place() {
        char name[] = "/dev/shm/busrl.test.XXXXXX";
        if (::mkdtemp(name) == nullptr) throw Failure{"cannot make a folder in /dev/shm"};
        folder = name;
    }
    ~Place() {
        for (const char* file : {"ring", "fates", "validate"}) ::unlink((folder + "/" + file).c_str());
        ::rmdir(folder.c_str());
    }
    std::string path(const char* file) const { return folder + "/" + file; }
};

struct World {  // a ring with fates, and one member
    Place place;
    std::shared_ptr<busrl::Segment> seg;
    busrl::FateBook fates;
    std::unique_ptr<busrl::Membership> member;
    uint32_t cursor = 0;

    explicit World(busrl::Geometry geometry = {8, 8, 4096})
        : seg(busrl::Segment::create(place.path("ring"), geometry, {1, 2, 3})) {
        fates.train = std::make_shared<busrl::Fates>(place.path("fates"), true, 1 << 20);
        fates.validate = std::make_shared<busrl::Fates>(place.path("validate"), true, 1 << 20);
        member = std::make_unique<busrl::Membership>(seg, "test", "test");
    }
    uint32_t me() const { return member->index(); }
    std::optional<busrl::Held> dispatch(uint64_t uid, int32_t priority = 0, uint32_t cls = 0) {
        return busrl::dispatch(*seg, me(), fates, task(uid, priority, cls), cursor);
    }
    static busrl::Task task(uint64_t uid, int32_t priority = 0, uint32_t cls = 0) {
        busrl::Task t{};
        t.uid = uid;
        t.admission = uid;
        t.cls = cls;
        t.priority = priority;
        t.bytes = "prompt";
        t.nbytes = 6;
        return t;
    }
    busrl::Held claim(busrl::State from, busrl::State to) {
        auto held = busrl::take(*seg, me(), {from, to, -1, 1, 255});
        if (held.empty()) throw Failure{"nothing to claim"};
        return held[0];
    }
};

inline int run() {
    int failed = 0;
    for (const Case& c : cases()) {
        try {
            c.body();
            std::printf("ok    %s\n", c.name);
        } catch (const Failure& f) {
            ++failed;
            std::printf("FAIL  %s\n      %s\n", c.name, f.text.c_str());
        } catch (const std::exception& e) {
            ++failed;
            std::printf("FAIL  %s\n      %s\n", c.name, e.what());
        }
        std::fflush(stdout);
    }
    std::printf("%zu tests, %d failed\n", cases().size(), failed);
    return failed != 0;
}

// An array of 64-bit words whose content follows from one number: a torn copy can not pass for a whole one.
inline void put_pattern(const busrl::Segment& seg, uint32_t slot, uint64_t word, const char* name, uint8_t segment,
                        uint64_t value, uint64_t words) {
    busrl::TensorEntry e{};
    std::memcpy(e.name, name, std::strlen(name));
    e.segment = segment;
    e.code = busrl::kUint;
    e.bits = 64;
    e.ndim = 1;
    e.shape[0] = words;
    e.nbytes = words * 8;
    e.flags = busrl::kTensorValid;
    const uint32_t index = busrl::place_entry(seg, slot, word, e);
    auto* out = reinterpret_cast<uint64_t*>(seg.payload(slot) + e.offset);
    for (uint64_t i = 0; i < words; ++i) out[i] = value * 0x9E3779B97F4A7C15u + i;
    busrl::store_entry(seg.table(slot), index, e);
}

// Room that is passed over: what is put next begins behind the part of a slot that is always in memory.
inline void skip_kept(const busrl::Segment& seg, uint32_t slot, uint64_t word, uint64_t more = 0) {
    busrl::TensorEntry e{};
    std::memcpy(e.name, "skip", 4);
    e.segment = busrl::kNoSegment;
    e.code = busrl::kUint;
    e.bits = 8;
    e.ndim = 1;
    e.shape[0] = e.nbytes = busrl::kKept + more;
    e.flags = busrl::kTensorValid;
    const uint32_t index = busrl::place_entry(seg, slot, word, e);
    busrl::store_entry(seg.table(slot), index, e);
}

// What the segment's file takes of memory.
inline uint64_t memory_of(const busrl::Segment& seg) {
    struct stat info;
    if (::fstat(seg.fd(), &info) != 0) throw Failure{"cannot look at the ring's file"};
    return uint64_t(info.st_blocks) * 512;
}

inline bool pattern_holds(const busrl::Segment& seg, uint32_t slot, const char* name, uint8_t segment, uint64_t value) {
    const auto at = busrl::find_entry(seg.table(slot), busrl::TensorName(name), segment);
    if (!at) return false;
    const busrl::TensorEntry e = busrl::load_entry(seg.table(slot), *at);
    if (!busrl::entry_is_sound(e, seg.shape.slot_bytes)) return false;
    const auto* in = reinterpret_cast<const uint64_t*>(seg.payload(slot) + e.offset);
    for (uint64_t i = 0; i < e.nbytes / 8; ++i)
        if (in[i] != value * 0x9E3779B97F4A7C15u + i) return false;
    return true;
}

}  // namespace test
