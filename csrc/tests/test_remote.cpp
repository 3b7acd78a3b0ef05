// Remote entries: no death removes them, no registration takes them, and only their lease or goodbye frees their slots.
#include "busrl/remote.hpp"
#include "harness.hpp"

using namespace busrl;
using test::World;

namespace {
Held claim_for(World& w, uint32_t who, State from, State to) {
    const auto held = take(*w.seg, who, {from, to, -1, 1, 255});
    CHECK(held.size() == 1);
    return held[0];
}
}  // namespace

TEST("a remote entry is live, has no process, and is never proven dead nor reaped though its lock is free") {
    World w;
    const uint32_t far = enter_remote(*w.seg, "reward", "far", 77);
    const uint64_t ident = w.seg->proc(far).ident.load();
    CHECK(is_live(ident) && is_remote(ident) && pid_of(ident) == 0 && w.seg->proc(far).start_ticks.load() == 77);
    CHECK(!byte_is_held(w.seg->fd(), far));
    uint64_t dead;
    CHECK(!proven_dead(*w.seg, far, &dead));
    CHECK(w.dispatch(3));
    const Held g = claim_for(w, far, State::QUEUED, State::GENERATING);
    CHECK(reap(*w.seg, w.fates, w.me()).empty() && load_word(*w.seg, g.slot) == g.word);
}

TEST("a registration passes over a remote entry, and a remote entry over registered ones") {
    World w({4, 4, 4096});
    const uint32_t far = enter_remote(*w.seg, "reward", "far", 1);
    Membership other(w.seg, "x", "x");
    CHECK(far != w.me() && other.index() != far && other.index() != w.me());
    test::check_fault(Fault::table_full, [&] { enter_remote(*w.seg, "reward", "near", 2); });
    test::check_fault(Fault::table_full, [&] { Membership third(w.seg, "y", "y"); });
    leave_remote(*w.seg, far);
    Membership third(w.seg, "y", "y");
    CHECK(third.index() == far && !is_remote(w.seg->proc(far).ident.load()));
}

TEST("an entry that is used again has a new epoch, and what was removed is no remote worker's") {
    World w;
    const uint32_t far = enter_remote(*w.seg, "reward", "far", 1);
    const uint64_t before = w.seg->proc(far).ident.load();
    leave_remote(*w.seg, far);
    test::check_fault(Fault::not_registered, [&] { leave_remote(*w.seg, far); });
    test::check_fault(Fault::not_registered, [&] { check_remote(*w.seg, w.me()); });
    CHECK(enter_remote(*w.seg, "reward", "far", 1) == far && w.seg->proc(far).ident.load() != before);
}

TEST("a lease that ends keeps the attempt of a generation, counts one for a reward, and unmarks a commit cut short") {
    World w;
    const uint32_t far = enter_remote(*w.seg, "rollout", "far", 1);
    CHECK(w.dispatch(3));
    Held g = claim_for(w, far, State::QUEUED, State::GENERATING);
    w.seg->line(g.slot).last_commit_seq.store(seq_of(g.word));
    CHECK(expire(*w.seg, far, g.slot, g.word) != 0 && expire(*w.seg, far, g.slot, g.word) == 0);
    Line& line = w.seg->line(g.slot);
    CHECK(line.attempt.load() == 1 && line.last_commit_seq.load() == 0);
    g = claim_for(w, far, State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 5, 16);
    CHECK(commit_segment(*w.seg, far, g.slot, g.word, true) != 0);
    const Held r = claim_for(w, far, State::GENERATED, State::REWARDING);
    CHECK(expire(*w.seg, far, r.slot, r.word) != 0 && line.attempt.load() == 1);
    CHECK(state_of(load_word(*w.seg, r.slot)) == State::GENERATED);
}

TEST("the commit of a reward is marked by its seq, handing it back is not") {
    World w;
    CHECK(w.dispatch(3));
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
    Held r = w.claim(State::GENERATED, State::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, State::GENERATED) != 0);
    CHECK(w.seg->line(r.slot).last_commit_seq.load() == seq_of(g.word));
    r = w.claim(State::GENERATED, State::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, State::REWARDED) != 0);
    CHECK(w.seg->line(r.slot).last_commit_seq.load() == seq_of(r.word));
}

TEST("a worker that is removed while it holds slots leaves them at rest") {
    World w;
    const uint32_t far = enter_remote(*w.seg, "rollout", "far", 1);
    CHECK(w.dispatch(3) && w.dispatch(4));
    claim_for(w, far, State::QUEUED, State::GENERATING);
    claim_for(w, far, State::QUEUED, State::GENERATING);
    leave_remote(*w.seg, far);
    for (uint32_t slot = 0; slot < w.seg->shape.n_slots; ++slot) CHECK(!is_working(state_of(load_word(*w.seg, slot))));
}

int main() {
    return test::run();
}
