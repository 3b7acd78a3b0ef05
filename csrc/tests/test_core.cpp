// The core in one process: words, fates, tensors, transitions, endings, header checks.
#include "harness.hpp"

using namespace busrl;
using test::World;

TEST("a word keeps its four parts apart") {
    const uint64_t w = make_word(State::TRAINING, kMaxOwner, 255, kSeqMask);
    CHECK(state_of(w) == State::TRAINING && owner_of(w) == kMaxOwner && segs_of(w) == 255 && seq_of(w) == kSeqMask);
    CHECK(make_word(State::DROPPED, 0, 0, 0) >> 58 == 8);
}

TEST("seq grows at claims and at FREE, segs return to 0 with FREE") {
    uint64_t w = make_word(State::FREE, 0, 0, 7);
    w = next_word(w, State::RESERVED, 3);
    CHECK(seq_of(w) == 8 && owner_of(w) == 3);
    w = next_word(w, State::QUEUED, 99);
    CHECK(seq_of(w) == 8 && owner_of(w) == 0);
    w = next_word(next_word(w, State::GENERATING, 4), State::GENERATED, 0, 1);
    CHECK(seq_of(w) == 9 && segs_of(w) == 1);
    w = next_word(w, State::DROPPED, 'f');
    CHECK(owner_of(w) == 'f' && seq_of(w) == 9 && segs_of(w) == 1 && !is_owned_by(w, 'f'));
    w = next_word(w, State::FREE, 0);
    CHECK(w == make_word(State::FREE, 0, 0, 10));
}

TEST("the table has an arrow out of every state and none between two working states") {
    for (uint32_t from = 0; from < kStates; ++from) {
        uint32_t out = 0;
        for (uint32_t to = 0; to < kStates; ++to) {
            if (!is_allowed(State(from), State(to))) continue;
            ++out;
            CHECK(!(is_working(State(from)) && is_working(State(to))));
        }
        CHECK(out > 0);
    }
    for (State s : {State::GENERATING, State::REWARDING, State::TRAINING}) CHECK(is_allowed(s, rest_of(s)));
}

TEST("a sample passes through all states and ends trained, and its slot is free again") {
    World w;
    CHECK(w.dispatch(5));
    CHECK(w.fates.train->get(5) == 'D');
    Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 5, 16);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, false) != 0);
    g = w.claim(State::QUEUED, State::GENERATING);
    CHECK(segs_of(g.word) == 1);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 1, 6, 16);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
    const Held r = w.claim(State::GENERATED, State::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, State::REWARDED) != 0);
    const Held t = w.claim(State::REWARDED, State::TRAINING);
    CHECK(test::pattern_holds(*w.seg, t.slot, "tokens", 0, 5) && test::pattern_holds(*w.seg, t.slot, "tokens", 1, 6));
    CHECK(finish(*w.seg, w.me(), w.fates, t.slot, t.word, 'T'));
    CHECK(w.fates.train->get(5) == 'T' && state_of(load_word(*w.seg, t.slot)) == State::FREE);
    CHECK(!finish(*w.seg, w.me(), w.fates, t.slot, t.word, 'T'));
}

TEST("dispatch refuses a uid that has a fate, and says so before it holds a slot") {
    World w;
    CHECK(w.dispatch(1));
    test::check_fault(Fault::fates, [&] { w.dispatch(1); });
    uint32_t free = 0;
    for (uint32_t i = 0; i < 8; ++i) free += state_of(load_word(*w.seg, i)) == State::FREE;
    CHECK(free == 7);
}

TEST("dispatch has no slot left when all are taken") {
    World w;
    for (uint64_t uid = 0; uid < 8; ++uid) CHECK(w.dispatch(uid));
    CHECK(!w.dispatch(8) && w.fates.train->get(8) == 0);
}

TEST("take prefers unfinished slots, then priority, then the older admission") {
    World w;
    for (uint64_t uid : {4, 3, 2}) CHECK(w.dispatch(uid, 0));
    CHECK(w.dispatch(9, 5));
    Held g = w.claim(State::QUEUED, State::GENERATING);
    CHECK(w.seg->line(g.slot).uid == 9);
    CHECK(release(*w.seg, w.me(), g.slot, g.word, State::QUEUED) != 0);
    auto all = take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 2, 1});
    CHECK(all.size() == 2 && w.seg->line(all[1].slot).uid == 2);
    CHECK(commit_segment(*w.seg, w.me(), all[1].slot, all[1].word, false) != 0);
    CHECK(release(*w.seg, w.me(), all[0].slot, all[0].word, State::QUEUED) != 0);
    CHECK(w.seg->line(w.claim(State::QUEUED, State::GENERATING).slot).uid == 2);
}

TEST("take leaves other classes, live offers to others, and slots with too many attempts alone") {
    World w;
    CHECK(w.dispatch(1, 0, 3));
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, 2, 9, 1}).empty());
    Line& line = w.seg->line(0);
    line.offer_to = uint16_t(w.me() + 1);
    line.offer_until_ns = monotonic_ns() + 60'000'000'000;
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, 3, 9, 1}).empty());
    line.offer_until_ns = 1;
    line.attempt = 2;
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, 3, 9, 1}).empty());
    CHECK(take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, 3, 9, 2}).size() == 1);
}

TEST("attempts count claims for generation until a segment is committed or the slot is handed back") {
    World w;
    CHECK(w.dispatch(1));
    Held g = w.claim(State::QUEUED, State::GENERATING);
    Line& line = w.seg->line(g.slot);
    mark_alone(*w.seg, w.me(), g.slot, g.word);
    mark_alone(*w.seg, w.me(), g.slot, g.word);
    CHECK(line.attempt == 1 && line.alone_deaths == 1);
    CHECK(release(*w.seg, w.me(), g.slot, g.word, State::QUEUED) != 0);
    CHECK(line.attempt == 0 && line.alone_deaths == 0);
    g = w.claim(State::QUEUED, State::GENERATING);
    move_slot(*w.seg, g.slot, g.word, State::QUEUED, 0);  // what a reaper does: the count stays
    CHECK(line.attempt == 1);
    g = w.claim(State::QUEUED, State::GENERATING);
    CHECK(line.attempt == 2);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
    CHECK(line.attempt == 0 && line.last_commit_seq == seq_of(g.word));
}

TEST("what a dead generator left of an uncommitted segment is gone at the next claim, the task stays") {
    World w;
    CHECK(w.dispatch(1));
    Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 1, 100);
    test::put_pattern(*w.seg, g.slot, g.word, "scratch", kNoSegment, 1, 100);
    move_slot(*w.seg, g.slot, g.word, State::QUEUED, 0);
    g = w.claim(State::QUEUED, State::GENERATING);
    CHECK(!find_entry(w.seg->table(g.slot), TensorName("tokens"), 0));
    CHECK(find_entry(w.seg->table(g.slot), TensorName("task"), kNoSegment));
    test::put_pattern(*w.seg, g.slot, g.word, "scratch", kNoSegment, 2, 200);
    CHECK(test::pattern_holds(*w.seg, g.slot, "scratch", kNoSegment, 2));
}

TEST("a committed segment is never written again") {
    World w;
    CHECK(w.dispatch(1));
    Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 1, 8);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, false) != 0);
    g = w.claim(State::QUEUED, State::GENERATING);
    test::check_fault(Fault::not_owner, [&] { test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 2, 8); });
    CHECK(test::pattern_holds(*w.seg, g.slot, "tokens", 0, 1));
}

TEST("a tensor that does not fit is refused with both sizes, and replacing one in place needs no room") {
    World w;
    CHECK(w.dispatch(1));
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "big", kNoSegment, 1, 450);
    test::put_pattern(*w.seg, g.slot, g.word, "big", kNoSegment, 2, 450);
    test::check_fault(Fault::slot_too_small, [&] { test::put_pattern(*w.seg, g.slot, g.word, "more", 0, 1, 200); });
    CHECK(test::pattern_holds(*w.seg, g.slot, "big", kNoSegment, 2));
}

TEST("only the owner writes and only resting slots are dropped by others") {
    World w;
    Membership other(w.seg, "test", "other");
    CHECK(w.dispatch(1));
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    test::check_fault(Fault::not_owner, [&] { check_owner(*w.seg, other.index(), g.slot, g.word); });
    test::check_fault(Fault::not_owner, [&] { release(*w.seg, other.index(), g.slot, g.word, State::QUEUED); });
    test::check_fault(Fault::not_owner, [&] { drop(*w.seg, other.index(), w.fates, g.slot, g.word, 'P'); });
    CHECK(drop(*w.seg, w.me(), w.fates, g.slot, g.word, 'P'));
    CHECK(w.fates.train->get(1) == 'P' && state_of(load_word(*w.seg, g.slot)) == State::FREE);
}

TEST("there is no shortcut through the state machine") {
    World w;
    CHECK(w.dispatch(1));
    const uint64_t queued = load_word(*w.seg, 0);
    test::check_fault(Fault::transition, [&] { claim(*w.seg, w.me(), 0, queued, State::TRAINING); });
    test::check_fault(Fault::transition, [&] { claim(*w.seg, w.me(), 1, load_word(*w.seg, 1), State::RESERVED); });
    test::check_fault(Fault::transition, [&] { check_arrow(*w.seg, load_word(*w.seg, 1), State::DROPPED); });
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    test::check_fault(Fault::transition, [&] { release(*w.seg, w.me(), g.slot, g.word, State::REWARDED); });
    CHECK(claim(*w.seg, w.me(), g.slot, queued, State::GENERATING) == 0);
}

TEST("fates only move forward") {
    World w;
    Fates& f = *w.fates.train;
    CHECK(!f.store(1, 'f') && f.get(1) == 0);
    CHECK(f.store(1, 'D') && f.store(1, 'D') && f.store(1, 'f') && f.store(1, 'f'));
    CHECK(!f.store(1, 'D') && !f.store(1, 'o') && !f.store(1, 0) && f.get(1) == 'f');
    CHECK(f.store(1, 'T') && !f.store(1, 'f') && f.get(1) == 'T');
    CHECK(f.store(2, 'D') && f.store(2, 0) && f.get(2) == 0);
    CHECK(f.get(1 << 19) == 0);
    test::check_fault(Fault::fates, [&] { f.store(1 << 30, 'D'); });
}

TEST("validation uids live in their own table") {
    World w;
    CHECK(w.dispatch(kUidValidate | 3));
    CHECK(w.fates.train->get(3) == 0 && w.fates.validate->get(3) == 'D');
}

TEST("a header is refused whenever one of its words was changed") {
    World w;
    const HeaderFixed good = w.seg->shape;
    check_header(good, crc32c(&good, sizeof(good)), 1, good.total_bytes, "test");
    for (size_t byte = 0; byte < sizeof(good); ++byte) {
        HeaderFixed bad = good;
        reinterpret_cast<uint8_t*>(&bad)[byte] ^= 0x41;
        bool refused = false;
        try {
            check_header(bad, crc32c(&good, sizeof(good)), 1, good.total_bytes, "test");
        } catch (const Error&) {
            refused = true;
        }
        CHECK(refused);
    }
    HeaderFixed moved = good;
    moved.data_off += 4096;
    test::check_fault(Fault::corrupt,
                      [&] { check_header(moved, crc32c(&moved, sizeof(moved)), 1, good.total_bytes, "test"); });
    HeaderFixed old = good;
    old.boot_id[3] ^= 1;
    test::check_fault(Fault::stale, [&] { check_header(old, crc32c(&old, sizeof(old)), 1, good.total_bytes, "test"); });
}

TEST("a tensor entry is checked without trust: bounds, overflow, type") {
    TensorEntry e{};
    e.code = kFloat;
    e.bits = 32;
    e.ndim = 2;
    e.shape[0] = e.shape[1] = 4;
    e.nbytes = e.capacity = 64;
    CHECK(entry_is_sound(e, 4096));
    auto broken = [&](auto change) {
        TensorEntry copy = e;
        change(copy);
        return !entry_is_sound(copy, 4096);
    };
    CHECK(broken([](TensorEntry& t) { t.offset = 4096; }));
    CHECK(broken([](TensorEntry& t) { t.offset = ~uint64_t{63}; }));
    CHECK(broken([](TensorEntry& t) { t.offset = 1; }));
    CHECK(broken([](TensorEntry& t) { t.nbytes = 128; }));
    CHECK(broken([](TensorEntry& t) { t.capacity = 32; }));
    CHECK(broken([](TensorEntry& t) { t.shape[0] = t.shape[1] = uint64_t{1} << 63; }));
    CHECK(broken([](TensorEntry& t) { t.ndim = 200; }));
    CHECK(broken([](TensorEntry& t) { t.code = 5; }));
    CHECK(broken([](TensorEntry& t) { t.bits = 24; }));
}

TEST("the word that a slow reaper read never fits a later claim, though slot and entry are the same") {
    World w;
    CHECK(w.dispatch(1));
    auto first = std::make_unique<Membership>(w.seg, "worker", "first");
    const uint32_t entry = first->index();
    const uint64_t dead_word = take(*w.seg, entry, {State::QUEUED, State::GENERATING, -1, 1, 255})[0].word;
    move_slot(*w.seg, 0, dead_word, State::QUEUED, 0);  // the fast reaper rests the slot and frees the entry
    first.reset();
    Membership second(w.seg, "worker", "second");
    CHECK(second.index() == entry);
    CHECK(take(*w.seg, entry, {State::QUEUED, State::GENERATING, -1, 1, 255}).size() == 1);
    CHECK(move_slot(*w.seg, 0, dead_word, State::QUEUED, 0) == 0);
}

int main() {
    return test::run();
}
