// The bitmaps that say where slots rest: what searches find, what deaths leave, what four threads at once leave.
#include <sys/wait.h>

#include <atomic>
#include <set>
#include <thread>

#include "harness.hpp"

using namespace busrl;
using test::World;

namespace {

std::set<uint32_t> found(const Segment& seg, State state, uint32_t begin = 0, uint32_t end = ~0u) {
    std::set<uint32_t> slots;
    search(seg, state, begin, std::min(end, seg.shape.n_slots), [&](uint32_t slot, uint64_t) {
        slots.insert(slot);
        return true;
    });
    return slots;
}

std::set<uint32_t> truth(const Segment& seg, State state) {
    std::set<uint32_t> slots;
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i)
        if (state_of(load_word(seg, i)) == state) slots.insert(i);
    return slots;
}

constexpr State kResting[] = {State::FREE, State::QUEUED, State::GENERATED, State::REWARDED};

void forget_hints(const Segment& seg, State state) {  // what deaths between the move and its hint leave, all at once
    const HintMap map = seg.hints(state);
    for (uint64_t w = 0; w < leaf_bytes(seg.shape.n_slots) / 8; ++w) map.leaf[w].store(0);
    map.top[0].store(0);
}

}  // namespace

TEST("a search finds exactly the slots that rest in a state, at every size of the ring and from every start") {
    for (uint32_t n : {1u, 63u, 64u, 65u, 4096u, 4097u, 9000u}) {
        World w({n, 4, 64});
        CHECK(found(*w.seg, State::FREE) == truth(*w.seg, State::FREE));
        w.cursor = n - 1;
        const uint32_t samples = std::min(n, 300u);
        for (uint64_t uid = 0; uid < samples; ++uid) CHECK(w.dispatch(uid));
        CHECK(found(*w.seg, State::QUEUED) == truth(*w.seg, State::QUEUED));
        CHECK(found(*w.seg, State::FREE) == truth(*w.seg, State::FREE));
        CHECK(found(*w.seg, State::QUEUED, n / 2, n).size() + found(*w.seg, State::QUEUED, 0, n / 2).size() == samples);
        CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, samples, 255}).size() == samples);
        CHECK(found(*w.seg, State::QUEUED).empty());
    }
}

TEST("a search that is stopped has looked at no further slot") {
    World w;
    for (uint64_t uid = 0; uid < 4; ++uid) CHECK(w.dispatch(uid));
    uint32_t seen = 0;
    CHECK(!search(*w.seg, State::QUEUED, 0, 8, [&](uint32_t, uint64_t) { return ++seen < 2; }));
    CHECK(seen == 2);
}

TEST("a bit too many costs a look and is gone after it") {
    World w;
    CHECK(w.dispatch(1));
    hint(*w.seg, State::GENERATED, 0);
    hint(*w.seg, State::GENERATED, 7);
    CHECK(found(*w.seg, State::GENERATED).empty());
    CHECK(w.seg->hints(State::GENERATED).leaf[0].load() == 0);
    CHECK(found(*w.seg, State::GENERATED).empty());
    CHECK(w.seg->hints(State::GENERATED).top[0].load() == 0);
}

TEST("taking a bit back leaves the bit of a slot that has come meanwhile") {
    World w;
    CHECK(w.dispatch(1) && w.dispatch(2));
    unhint(*w.seg, State::QUEUED, 0, 3);
    CHECK(found(*w.seg, State::QUEUED) == truth(*w.seg, State::QUEUED) && found(*w.seg, State::QUEUED).size() == 2);
}

TEST("bits beyond the last slot, as a hostile process may set them, are never followed") {
    World w;
    w.seg->hints(State::QUEUED).leaf[0].store(~uint64_t{0});
    w.seg->hints(State::QUEUED).top[0].store(~uint64_t{0});
    CHECK(found(*w.seg, State::QUEUED).empty());
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 8, 255}).empty());
}

TEST("slots without a hint are found again by a search that comes back short") {
    World w;
    for (uint64_t uid = 0; uid < 3; ++uid) CHECK(w.dispatch(uid));
    forget_hints(*w.seg, State::QUEUED);
    w.seg->header().rescanned_ns.store(0);
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 8, 255}).size() == 3);
    forget_hints(*w.seg, State::FREE);
    w.seg->header().rescanned_ns.store(0);
    CHECK(w.dispatch(9));
}

TEST("a rescan stamp from the future holds nobody up") {
    World w;
    CHECK(w.dispatch(1));
    forget_hints(*w.seg, State::QUEUED);
    w.seg->header().rescanned_ns.store(~uint64_t{0});
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 1, 255}).size() == 1);
}

TEST("a reaper that has proven a death finds the slots that the dead moved without a hint") {
    World w;
    CHECK(w.dispatch(1));
    const pid_t child = fork();
    if (child == 0) {
        auto seg = Segment::attach(w.place.path("ring"), false);
        Membership member(seg, "worker", "dies");
        const auto held = take(*seg, member.index(), {State::QUEUED, State::GENERATING, -1, 1, 255});
        // What commit_segment() does up to its compare-and-swap, and no further.
        seg->line(held.at(0).slot).word.store(next_word(held[0].word, State::QUEUED, 0, 1));
        kill(getpid(), SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(truth(*w.seg, State::QUEUED).size() == 1 && found(*w.seg, State::QUEUED).empty());
    w.seg->header().rescanned_ns.store(monotonic_ns());
    reap(*w.seg, w.fates, w.me());
    CHECK(found(*w.seg, State::QUEUED).size() == 1);
}

TEST("while all live, threads that move, hint and search at once leave no slot without its bit") {
    World w({192, 16, 64});
    const Segment& seg = *w.seg;
    for (uint64_t uid = 0; uid < 150; ++uid) CHECK(w.dispatch(uid));
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 4; ++t)
        threads.emplace_back([&] {
            Membership member(w.seg, "thread", "t");
            for (uint32_t round = 0; round < 3000; ++round) {
                seg.header().rescanned_ns.store(monotonic_ns(), std::memory_order_relaxed);  // no rescan helps
                for (const Held& h : take(seg, member.index(), {State::QUEUED, State::GENERATING, -1, 3, 255}))
                    commit_segment(seg, member.index(), h.slot, h.word, round % 2 == 0 && segs_of(h.word) > 3);
                for (const Held& h : take(seg, member.index(), {State::GENERATED, State::REWARDING, -1, 3, 255}))
                    release(seg, member.index(), h.slot, h.word, State::GENERATED);
            }
        });
    for (auto& t : threads) t.join();
    for (State s : kResting) CHECK(found(seg, s) == truth(seg, s));
}

int main() {
    return test::run();
}
