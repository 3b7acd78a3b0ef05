// Rings of model calls: the table of their transitions, who may free what, and what a ring of calls refuses.
#include "busrl/remote.hpp"
#include "calls_world.hpp"

using namespace busrl;
using test::CallWorld;
using S = State;

namespace {
Held only(std::vector<Held> held) {
    CHECK(held.size() == 1);
    return held[0];
}
Held generating(CallWorld& w, uint32_t engine) {
    return only(take(*w.seg, engine, {S::QUEUED, S::GENERATING, -1, 1, 255}));
}
uint64_t answered(CallWorld& w, uint32_t engine) {
    const Held g = generating(w, engine);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, g.slot, 8);
    const uint64_t done = commit_segment(*w.seg, engine, g.slot, g.word, true);
    CHECK(done != 0);
    return done;
}
}  // namespace

TEST("every arrow of a call makes a word that was never there, and names an owner exactly where one works") {
    for (const Transition& t : kCallTransitions) {
        CHECK(is_allowed(t.from, t.to, Machine::calls));
        const uint64_t before = make_word(t.from, is_working(t.from) ? 7 : 0, 0, 41);
        const uint64_t after = next_word(before, t.to, 9, t.to == S::GENERATED);
        CHECK(after != before && owner_of(after) == (is_working(t.to) ? 9u : 0u));
        CHECK(seq_of(after) == 41u + (is_working(t.to) || t.to == S::FREE));
    }
    uint32_t allowed = 0;
    for (uint32_t from = 0; from < 64; ++from)
        for (uint32_t to = 0; to < 64; ++to) allowed += is_allowed(State(from), State(to), Machine::calls);
    CHECK(allowed == std::size(kCallTransitions));
}

TEST("a call goes to an engine with its ids and comes back with the answer, and its caller frees the slot") {
    CallWorld w;
    Membership engine(w.seg, "rollout", "rollout/0");
    const auto put = w.put(0, 5);
    CHECK(put);
    const Line& line = w.seg->line(put->slot);
    CHECK(line.group.load() == w.me() && line.step.load() == epoch_of(w.member->ident()));
    CHECK(line.prompt_tokens.load() == 5 && state_of(put->word) == S::QUEUED);
    const Held g = generating(w, engine.index());
    CHECK(test::call_ids_are(*w.seg, g.slot, 0, 5));
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 11, 4);
    const uint64_t done = commit_segment(*w.seg, engine.index(), g.slot, g.word, true);
    CHECK(state_of(done) == S::GENERATED && segs_of(done) == 1);
    CHECK(test::pattern_holds(*w.seg, g.slot, "tokens", 0, 11));
    CHECK(free_call(*w.seg, w.me(), g.slot, done) && w.all_free());
    CHECK(!free_call(*w.seg, w.me(), g.slot, done));
}

TEST("a caller frees its own calls at rest, and nobody else may; the engine that holds one frees it, its caller not") {
    CallWorld w;
    Membership engine(w.seg, "rollout", "rollout/0"), other(w.seg, "agent", "agent/1");
    const auto queued = w.put(0, 3);
    for (uint32_t who : {other.index(), engine.index()})
        test::check_fault(Fault::not_owner, [&] { free_call(*w.seg, who, queued->slot, queued->word); });
    const Held g = generating(w, engine.index());
    test::check_fault(Fault::not_owner, [&] { free_call(*w.seg, w.me(), g.slot, g.word); });
    CHECK(free_call(*w.seg, engine.index(), g.slot, g.word) && w.all_free());
    w.put(1, 3);
    const uint64_t done = answered(w, engine.index());
    const uint32_t slot = w.first(S::GENERATED);
    test::check_fault(Fault::not_owner, [&] { free_call(*w.seg, other.index(), slot, done); });
    CHECK(free_call(*w.seg, w.me(), slot, done));
    const auto cancelled = w.put(2, 3);
    CHECK(free_call(*w.seg, w.me(), cancelled->slot, cancelled->word) && w.all_free());
}

TEST("a ring of calls refuses what samples do, and a ring of samples what calls do") {
    CallWorld w;
    uint32_t cursor = 0;
    FateBook none;
    test::check_fault(Fault::transition, [&] { dispatch(*w.seg, w.me(), none, test::World::task(1), cursor); });
    w.put(0, 3);
    const Held g = generating(w, w.me());
    test::check_fault(Fault::transition, [&] { commit_segment(*w.seg, w.me(), g.slot, g.word, false); });
    test::check_fault(Fault::transition, [&] { drop(*w.seg, w.me(), none, g.slot, g.word, 'f'); });
    const uint64_t done = commit_segment(*w.seg, w.me(), g.slot, g.word, true);
    test::check_fault(Fault::transition, [&] { claim(*w.seg, w.me(), g.slot, done, S::REWARDING); });
    test::check_fault(Fault::transition, [&] { take(*w.seg, w.me(), {S::GENERATED, S::REWARDING, -1, 1, 0}); });
    test::World samples;
    CHECK(samples.dispatch(1));
    const uint64_t queued = load_word(*samples.seg, 0);
    test::check_fault(Fault::transition, [&] { free_call(*samples.seg, samples.me(), 0, queued); });
    test::check_fault(Fault::transition, [&] { put_call(*samples.seg, samples.me(), w.call(1, 1), cursor); });
}

TEST("a ring is attached only as what it holds") {
    CallWorld calls;
    test::World samples;
    test::check_fault(Fault::corrupt, [&] { Segment::attach(calls.place.path("ring"), false); });
    test::check_fault(Fault::corrupt, [&] { Segment::attach(samples.place.path("ring"), true, Machine::calls); });
    CHECK(Segment::attach(calls.place.path("ring"), false, Machine::calls)->machine() == Machine::calls);
}

TEST(
    "a call that has no room for its longest answer is refused before a slot is taken, and one that fits is answered") {
    CallWorld w({2, 4, 64 + 64 + 3 * 256 + 64});
    test::check_fault(Fault::slot_too_small, [&] { w.put(0, 17, 64); });
    test::check_fault(Fault::slot_too_small, [&] { w.put(0, 16, 65); });
    test::check_fault(Fault::general, [&] { w.put(0, 0); });
    CHECK(w.all_free() && w.put(0, 16, 64));
    const Held g = generating(w, w.me());
    for (const char* name : {"tokens", "logprobs", "versions"})
        test::put_pattern(*w.seg, g.slot, g.word, name, 0, 1, 32);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
}

TEST("a caller that says goodbye takes its calls along, and what an engine works on is freed when it comes to rest") {
    CallWorld w;
    auto caller = std::make_unique<Membership>(w.seg, "agent", "agent/1");
    for (uint64_t k = 0; k < 3; ++k) CHECK(w.put_as(caller->index(), k, 3));
    w.put(9, 3);
    const Held g = generating(w, w.me());
    answered(w, w.me());
    CHECK(surrender(*w.seg, {}, caller->index()));
    caller->leave();
    CHECK(w.count(S::FREE) == 6 && w.count(S::GENERATING) == 1 && w.count(S::QUEUED) == 1);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
    const auto reaped = reap(*w.seg, {}, w.me());
    CHECK(reaped.size() == 1 && reaped[0].from == S::GENERATED && reaped[0].label == "agent/1");
    CHECK(w.count(S::QUEUED) == 1 && w.count(S::FREE) == 7);
}

TEST("a caller is known by index and epoch: who has its entry next neither keeps nor frees its calls") {
    CallWorld w;
    auto caller = std::make_unique<Membership>(w.seg, "agent", "agent/1");
    const uint32_t index = caller->index();
    const auto put = w.put_as(index, 0, 3);
    caller->leave();
    caller = std::make_unique<Membership>(w.seg, "agent", "agent/2");
    CHECK(caller->index() == index);
    test::check_fault(Fault::not_owner, [&] { free_call(*w.seg, index, put->slot, put->word); });
    CHECK(reap(*w.seg, {}, w.me()).size() == 1 && w.all_free());
}

TEST("the call of a late turn goes first, then the older admission; an offer keeps others away for its time") {
    CallWorld w;
    Membership engine(w.seg, "rollout", "rollout/0");
    const auto old = w.put(0, 1), young = w.put(1, 1), late = w.put(2, 1, 8, 5), offered = w.put(3, 1, 8, 9);
    w.seg->line(offered->slot).offer_to.store(uint16_t(w.me()));
    w.seg->line(offered->slot).offer_until_ns.store(monotonic_ns() + 60'000'000'000);
    for (const auto& want : {late, old, young}) CHECK(generating(w, engine.index()).slot == want->slot);
    CHECK(take(*w.seg, engine.index(), {S::QUEUED, S::GENERATING, -1, 1, 255}).empty());
    CHECK(generating(w, w.me()).slot == offered->slot);
}

TEST("a lease of a remote engine that ends puts its call back, and its goodbye too") {
    CallWorld w;
    const uint32_t far = enter_remote(*w.seg, "rollout", "far", 1);
    w.put(0, 3), w.put(1, 3);
    const Held g = generating(w, far);
    generating(w, far);
    CHECK(expire(*w.seg, far, g.slot, g.word) != 0 && w.count(S::QUEUED) == 1);
    leave_remote(*w.seg, far);
    CHECK(w.count(S::QUEUED) == 2 && w.count(S::FREE) == 6);
}

int main() {
    return test::run();
}
