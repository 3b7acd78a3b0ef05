// What a ring of long answers takes of memory: little when made, what is held while it is held, little again soon.
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <thread>

#include "busrl/remote.hpp"
#include "calls_world.hpp"

using namespace busrl;
using test::memory_of;
using test::World;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr Geometry kLong{16, 8, 4 * kMiB};

// An answer of `words` in the slot of `uid`, whose sample is QUEUED.
Held answer(World& w, uint64_t uid, uint64_t words) {
    CHECK(w.dispatch(uid));
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, uid, words);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
    return g;
}

void reward(World& w) {
    const Held r = w.claim(State::GENERATED, State::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, State::REWARDED) != 0);
}

void learn(World& w, uint64_t uid) {
    const Held t = w.claim(State::REWARDED, State::TRAINING);
    CHECK(test::pattern_holds(*w.seg, t.slot, "tokens", 0, uid));
    CHECK(finish(*w.seg, w.me(), w.fates, t.slot, t.word, 'T'));
}

void train(World& w, uint64_t uid) {
    reward(w);
    learn(w, uid);
}

// A reaper comes, and the last one is long ago.
void look_later(World& w) {
    w.seg->header().rescanned_ns.store(0);
    reap(*w.seg, w.fates, w.me());
}

// The same, and whatever rests has done so for long.
void rest_for_long(World& w) {
    for (uint32_t slot = 0; slot < w.seg->shape.n_slots; ++slot) w.seg->line(slot).changed_ns.store(0);
    look_later(w);
}

uint64_t entries_into(const Segment& seg, State state) {
    return seg.wake(state).transitions.load();
}

// Runs `body` in a process that has a /dev/shm of its own, of so many bytes. False where this is not allowed.
bool with_small_shm(uint64_t bytes, const std::function<void()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) {
        const std::string size = "size=" + std::to_string(bytes);
        if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ::_exit(77);
        if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount("none", "/dev/shm", "tmpfs", 0, size.c_str()) != 0)
            ::_exit(77);
        try {
            body();
        } catch (const test::Failure& f) {
            std::printf("      %s\n", f.text.c_str());
            ::fflush(stdout);
            ::_exit(1);
        } catch (const std::exception& e) {
            std::printf("      %s\n", e.what());
            ::fflush(stdout);
            ::_exit(1);
        }
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return false;
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);  // and not killed by SIGBUS
    return true;
}

}  // namespace

TEST("loose spans are whole pages of one slot, behind what is kept of it, and small slots have none") {
    const HeaderFixed h = plan({5, 8, kMiB + 64}, {});
    for (uint32_t slot = 0; slot < 5; ++slot) {
        const Span span = loose_span(h, slot);
        const uint64_t at = h.data_off + slot * h.slot_stride;
        CHECK(span.begin % page_bytes() == 0 && span.end % page_bytes() == 0 && span.begin < span.end);
        CHECK(span.begin >= at + kKept && span.end <= at + h.slot_stride);
    }
    const HeaderFixed small = plan({5, 8, kLooseFrom - 256}, {});
    CHECK(!has_loose(small) && loose_span(small, 3).bytes() == 0 && kept_bytes(small) == small.total_bytes);
}

TEST("a ring of long answers is made without its payloads, and attaching allocates nothing") {
    World w(kLong);
    CHECK(w.seg->shape.total_bytes > 64 * kMiB);
    CHECK(memory_of(*w.seg) == kept_bytes(w.seg->shape) && memory_of(*w.seg) < 2 * kMiB);
    const auto again = Segment::attach(w.place.path("ring"), false);
    const auto reader = Segment::attach(w.place.path("ring"), true);
    CHECK(memory_of(*w.seg) == kept_bytes(w.seg->shape));
}

TEST("memory grows by what is written, stays for the next samples, and goes when slots have been free for long") {
    World w(kLong);
    const uint64_t before = memory_of(*w.seg);
    for (uint64_t uid = 0; uid < 16; ++uid) answer(w, uid, kMiB / 8);
    const uint64_t held = memory_of(*w.seg) - before;
    CHECK(held > 14 * kMiB && held < 17 * kMiB);
    for (uint64_t uid = 0; uid < 8; ++uid) train(w, uid);
    look_later(w);
    CHECK(memory_of(*w.seg) - before == held);  // a reaper came, but too soon
    rest_for_long(w);
    const uint64_t half = memory_of(*w.seg) - before;
    CHECK(half > held / 2 - kMiB && half < held / 2 + kMiB);
    for (uint64_t uid = 8; uid < 16; ++uid) train(w, uid);
    rest_for_long(w);
    CHECK(memory_of(*w.seg) == before);
}

TEST("neither a short answer nor another long one in the same slot costs memory or a step of its own") {
    World w({1, 8, 4 * kMiB});
    const uint64_t before = memory_of(*w.seg);
    answer(w, 1, kKept / 8 - 64);
    CHECK(memory_of(*w.seg) == before);
    train(w, 1);
    answer(w, 2, kMiB / 8);
    const uint64_t held = memory_of(*w.seg);
    for (uint64_t uid = 3; uid < 9; ++uid) {
        train(w, uid - 1);
        answer(w, uid, kMiB / 8);
        CHECK(memory_of(*w.seg) == held);
    }
    CHECK(entries_into(*w.seg, State::RESERVED) == 8 && entries_into(*w.seg, State::FREE) == 7);
}

TEST("a slot that is never at rest for long keeps no more than its sample uses once that has its reward") {
    World w({1, 8, 4 * kMiB});
    answer(w, 1, kMiB / 8);
    train(w, 1);
    answer(w, 2, kMiB / 16);
    reward(w);
    const uint64_t after = memory_of(*w.seg) - kept_bytes(w.seg->shape);
    CHECK(after > kMiB / 2 - 2 * kKept && after < kMiB / 2 + kSlack);
    learn(w, 2);  // whole
    answer(w, 3, 16);
    train(w, 3);
    CHECK(memory_of(*w.seg) <= kept_bytes(w.seg->shape) + kSlack);
    answer(w, 4, kMiB / 8);  // and what was given back is allocated again before it is written
    CHECK(memory_of(*w.seg) > kMiB && w.seg->table(0).allocated.load() > kMiB);
    train(w, 4);
}

TEST("a dropped sample's memory goes like that of a trained one, whoever completes the drop") {
    World w(kLong);
    const uint64_t before = memory_of(*w.seg);
    answer(w, 1, kMiB / 8);
    CHECK(drop(*w.seg, w.me(), w.fates, 0, load_word(*w.seg, 0), 'f'));
    answer(w, 2, kMiB / 8);
    CHECK(drop(*w.seg, 0, w.fates, 1, load_word(*w.seg, 1), 'f'));
    CHECK(memory_of(*w.seg) > before + kMiB);
    trim_all(*w.seg, 0, 0);  // nothing in the name of nobody
    CHECK(memory_of(*w.seg) > before + kMiB);
    rest_for_long(w);
    CHECK(memory_of(*w.seg) == before && state_of(load_word(*w.seg, 1)) == State::FREE);
}

TEST("a sample that waits gives back what an earlier one left, and is as it was") {
    World w({1, 8, 4 * kMiB});
    answer(w, 1, kMiB / 8);
    train(w, 1);
    CHECK(w.dispatch(2));
    const Held g = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 2, kMiB / 32);
    CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, false) != 0);
    CHECK(memory_of(*w.seg) > kMiB);
    const uint64_t changed = w.seg->line(0).changed_ns.load();
    trim_all(*w.seg, w.me(), 0);
    CHECK(memory_of(*w.seg) - kept_bytes(w.seg->shape) < kMiB / 4);
    const uint64_t word = load_word(*w.seg, 0);
    CHECK(state_of(word) == State::QUEUED && segs_of(word) == 1 && seq_of(word) > seq_of(g.word));
    CHECK(w.seg->line(0).attempt.load() == 0 && w.seg->line(0).changed_ns.load() == changed);
    trim_all(*w.seg, w.me(), 0);
    CHECK(load_word(*w.seg, 0) == word);  // once
    const Held again = w.claim(State::QUEUED, State::GENERATING);
    test::put_pattern(*w.seg, again.slot, again.word, "tokens", 1, 3, kMiB / 8);
    CHECK(test::pattern_holds(*w.seg, 0, "tokens", 0, 2) && test::pattern_holds(*w.seg, 0, "tokens", 1, 3));
}

TEST("a slot that was claimed again before it rested for long keeps its memory for that sample") {
    World w({1, 8, 4 * kMiB});
    answer(w, 1, kMiB / 8);
    const uint64_t held = memory_of(*w.seg);
    CHECK(drop(*w.seg, 0, w.fates, 0, load_word(*w.seg, 0), 'f'));
    answer(w, 2, 16);
    trim_all(*w.seg, w.me(), 0);
    CHECK(memory_of(*w.seg) == held);
}

TEST("nothing is trimmed in the name of a remote worker, whose death nobody could prove") {
    World w(kLong);
    answer(w, 1, kMiB / 8);
    const uint32_t far = enter_remote(*w.seg, "rollout", "far", 1);
    CHECK(drop(*w.seg, far, w.fates, 0, load_word(*w.seg, 0), 'f'));
    trim_all(*w.seg, far, 0);
    CHECK(entries_into(*w.seg, State::RESERVED) == 1 && memory_of(*w.seg) > kept_bytes(w.seg->shape));
}

TEST("a reader without a claim finds nothing of an answer whose memory was given back") {
    World w(kLong);
    answer(w, 1, kMiB / 8);
    const uint64_t seen = load_word(*w.seg, 0);
    CHECK(find_entry(w.seg->table(0), TensorName("tokens"), 0));
    train(w, 1);
    rest_for_long(w);
    CHECK(!find_entry(w.seg->table(0), TensorName("tokens"), 0) && load_word(*w.seg, 0) != seen);
}

TEST("a call's answer keeps what it uses, its free slot nothing for long, and a call that waits is not touched") {
    test::CallWorld w({1, 8, 4 * kMiB});
    const uint64_t before = memory_of(*w.seg);
    const auto answered = [&](uint64_t words) {
        CHECK(put_call(*w.seg, w.me(), w.call(1, 8), w.cursor));
        const Held g = take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 1, 255}).at(0);
        test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 1, words);
        const uint64_t done = commit_segment(*w.seg, w.me(), g.slot, g.word, true);
        CHECK(done != 0 && test::pattern_holds(*w.seg, g.slot, "tokens", 0, 1));
        const uint64_t held = memory_of(*w.seg) - before;
        CHECK(free_call(*w.seg, w.me(), g.slot, done));
        return held;
    };
    CHECK(answered(kMiB / 8) > kMiB - 2 * kKept && answered(16) <= kSlack && answered(kMiB / 8) > kMiB - 2 * kKept);
    const auto waits = put_call(*w.seg, w.me(), w.call(2, 8), w.cursor);
    trim_all(*w.seg, w.me(), 0);
    CHECK(waits && load_word(*w.seg, 0) == waits->word && memory_of(*w.seg) > before);
    CHECK(free_call(*w.seg, w.me(), 0, waits->word));
    trim_all(*w.seg, w.me(), 0);
    CHECK(memory_of(*w.seg) == before);
}

TEST("samples pass whole through slots that one thread frees, another fills and a third trims") {
    World w({2, 8, kLooseFrom});
    std::atomic<bool> over{false};
    std::thread other([&] {
        const Membership member(w.seg, "test", "trims");
        while (!over.load()) trim_all(*w.seg, member.index(), 0);
    });
    constexpr uint64_t kRounds = 2000;
    uint64_t whole = 0;
    for (uint64_t uid = 0; uid < kRounds; ++uid) {
        while (!w.dispatch(uid)) {
        }
        const Held g = w.claim(State::QUEUED, State::GENERATING);
        test::skip_kept(*w.seg, g.slot, g.word);
        test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, uid, 512);
        commit_segment(*w.seg, w.me(), g.slot, g.word, true);
        whole += test::pattern_holds(*w.seg, g.slot, "tokens", 0, uid);
        drop(*w.seg, w.me(), w.fates, g.slot, load_word(*w.seg, g.slot), 'f');
    }
    over.store(true);
    other.join();
    CHECK(whole == kRounds);
}

TEST("a full /dev/shm is an error of the write and of the dispatch, but not while slots at rest have kept memory") {
    const bool ran = with_small_shm(8 * kMiB, [] {
        World w({8, 8, 4 * kMiB});
        answer(w, 1, 4 * kMiB / 8 - 512);
        CHECK(w.dispatch(2));
        const Held g = w.claim(State::QUEUED, State::GENERATING);
        const auto put = [&] { test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 2, 4 * kMiB / 8 - 512); };
        test::check_fault(Fault::shm_too_small, put);
        test::check_fault(Fault::shm_too_small, put);
        CHECK(load_word(*w.seg, g.slot) == g.word);
        Task task = World::task(3);
        const std::string longest(4 * kMiB, 'x');
        task.bytes = longest.data();
        task.nbytes = longest.size();
        test::check_fault(Fault::shm_too_small, [&] { dispatch(*w.seg, w.me(), w.fates, task, w.cursor); });
        CHECK(w.fates.train->get(3) == 0 && state_of(load_word(*w.seg, 2)) == State::FREE);
        train(w, 1);
        put();  // of the memory that a free slot has kept
        CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
        train(w, 2);
        w.cursor = g.slot;
        CHECK(w.dispatch(4) && state_of(load_word(*w.seg, g.slot)) == State::QUEUED);
        CHECK(memory_of(*w.seg) > 4 * kMiB);
        task.uid = 5;
        const auto longest_too = dispatch(*w.seg, w.me(), w.fates, task, w.cursor);  // that one that waits has kept
        CHECK(longest_too && w.seg->table(longest_too->slot).allocated.load() >= 4 * kMiB);
        test::check_fault(Fault::shm_too_small,
                          [&] { Segment::create(w.place.path("other"), {4096, 8, 4 * kMiB}, {1, 2, 3}); });
    });
    if (!ran) std::printf("      not tried: no mount namespace here\n");
}

int main() {
    return test::run();
}
