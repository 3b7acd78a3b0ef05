// Threads of one process, each with its own entry in the table, work through one mapping: for ThreadSanitizer, which
// cannot see across processes. Payloads are plain memory, so a missing release or acquire is a reported race.
#include <atomic>
#include <thread>

#include "calls_world.hpp"

using namespace busrl;

namespace {

struct Shared {
    test::World world{{24, 16, 2048}};
    std::atomic<uint64_t> next_uid{0};
    std::atomic<uint64_t> ended{0};
    std::atomic<uint64_t> torn{0};
    uint64_t samples;
    explicit Shared(uint64_t n) : samples(n) { world.fates.train->reserve(n); }
};

void work(Shared& s, uint32_t role) {
    const Segment& seg = *s.world.seg;
    Membership member(s.world.seg, "thread", std::to_string(role));
    const uint32_t me = member.index();
    uint32_t cursor = role;
    while (s.ended.load() < s.samples) {
        const uint64_t uid = s.next_uid.load();
        uint64_t mine = uid;
        if (role == 0 && uid < s.samples && dispatch(seg, me, s.world.fates, test::World::task(uid), cursor))
            s.next_uid.compare_exchange_strong(mine, uid + 1);
        for (const Held& h : take(seg, me, {State::QUEUED, State::GENERATING, -1, 2, 255})) {
            const uint64_t uid_here = seg.line(h.slot).uid.load();
            test::put_pattern(seg, h.slot, h.word, "tokens", uint8_t(segs_of(h.word)), uid_here + segs_of(h.word), 64);
            commit_segment(seg, me, h.slot, h.word, segs_of(h.word) == 1);
        }
        for (const Held& h : take(seg, me, {State::GENERATED, State::REWARDING, -1, 2, 255})) {
            if (!test::pattern_holds(seg, h.slot, "tokens", 0, seg.line(h.slot).uid.load())) s.torn.fetch_add(1);
            test::put_pattern(seg, h.slot, h.word, "parts", kNoSegment, 7, 4);
            release(seg, me, h.slot, h.word, State::REWARDED);
        }
        for (const Held& h : take(seg, me, {State::REWARDED, State::TRAINING, -1, 2, 255})) {
            const uint64_t uid_here = seg.line(h.slot).uid.load();
            if (!test::pattern_holds(seg, h.slot, "tokens", 1, uid_here + 1)) s.torn.fetch_add(1);
            if (finish(seg, me, s.world.fates, h.slot, h.word, 'T')) s.ended.fetch_add(1);
        }
        reap(seg, s.world.fates, me);
        nap(seg, State::REWARDED, transitions(seg, State::REWARDED), me, 200'000);
    }
}

// Each thread puts calls, answers those of all, and takes the answers to its own.
void call(test::CallWorld& w, std::atomic<uint64_t>& taken, std::atomic<uint64_t>& torn, uint64_t goal,
          uint64_t first) {
    const Segment& seg = *w.seg;
    Membership member(w.seg, "thread", std::to_string(first));
    const uint32_t me = member.index();
    uint32_t cursor = uint32_t(first);
    uint64_t number = first;
    while (taken.load() < goal) {
        std::vector<int32_t> ids(20);
        for (uint64_t i = 0; i < ids.size(); ++i) ids[i] = test::call_id(number, i);
        Call one{test::World::task(number), ids.data(), ids.size()};
        one.line.max_new_tokens = 32;
        if (put_call(seg, me, one, cursor)) ++number;
        for (const Held& h : take(seg, me, {State::QUEUED, State::GENERATING, -1, 2, 255})) {
            const uint64_t uid = seg.line(h.slot).uid.load();
            if (!test::call_ids_are(seg, h.slot, uid, 20)) torn.fetch_add(1);
            test::put_pattern(seg, h.slot, h.word, "tokens", 0, uid, 16);
            commit_segment(seg, me, h.slot, h.word, true);
        }
        for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
            const uint64_t word = load_word(seg, i);
            if (state_of(word) != State::GENERATED || !is_call_of(seg, i, me, member.ident())) continue;
            if (!test::pattern_holds(seg, i, "tokens", 0, seg.line(i).uid.load())) torn.fetch_add(1);
            if (free_call(seg, me, i, word)) taken.fetch_add(1);
        }
        reap(seg, {}, me);
    }
    free_calls_of(seg, me);
}

}  // namespace

TEST("four threads call each other and take every answer whole, while all of them reap") {
    test::CallWorld w({12, 8, 1024});
    std::atomic<uint64_t> taken{0}, torn{0};
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < 4; ++i)
        threads.emplace_back(call, std::ref(w), std::ref(taken), std::ref(torn), 2000, i << 32);
    for (auto& t : threads) t.join();
    reap(*w.seg, {}, w.me());
    CHECK(torn == 0 && taken >= 2000);
    for (const Held& h : take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 12, 255}))
        free_call(*w.seg, w.me(), h.slot, h.word);
    CHECK(w.all_free());
}

TEST("four threads pass every sample through the ring once, untorn, while all of them reap") {
    Shared shared(2000);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; ++i) threads.emplace_back(work, std::ref(shared), i);
    for (auto& t : threads) t.join();
    CHECK(shared.torn == 0 && shared.ended == shared.samples);
    for (uint64_t uid = 0; uid < shared.samples; ++uid) CHECK(shared.world.fates.train->get(uid) == 'T');
    for (uint32_t i = 0; i < shared.world.seg->shape.n_slots; ++i)
        CHECK(state_of(load_word(*shared.world.seg, i)) == State::FREE);
    for (uint32_t s = 0; s < kStates; ++s) CHECK(shared.world.seg->wake(State(s)).waiters == 0);
}

TEST("the compare-and-swap on the word alone carries a payload from one owner to the next") {
    test::World world({1, 8, 64});
    const Segment& seg = *world.seg;
    auto* payload = reinterpret_cast<uint64_t*>(seg.payload(0));  // plain memory, no table, no wait in between
    seg.line(0).word.store(make_word(State::QUEUED, 0, 0, 1));
    constexpr uint64_t kRounds = 20000;
    std::atomic<uint64_t> wrong{0};
    auto pass = [&](State from, State working, State to, uint64_t expected) {
        for (uint64_t round = 0; round < kRounds;) {
            const uint64_t word = load_word(seg, 0);
            if (state_of(word) != from) {
                std::this_thread::yield();
                continue;
            }
            const uint64_t mine = move_slot(seg, 0, word, working, 1);
            if (*payload != 2 * round + expected) wrong.fetch_add(1, std::memory_order_relaxed);
            *payload += 1;
            move_slot(seg, 0, mine, to, 0);
            ++round;
        }
    };
    std::thread first(pass, State::QUEUED, State::GENERATING, State::GENERATED, 0);
    std::thread second(pass, State::GENERATED, State::REWARDING, State::QUEUED, 1);
    first.join();
    second.join();
    CHECK(wrong == 0 && *payload == 2 * kRounds);
}

int main() {
    return test::run();
}
