// What a ring of long answers takes of memory: little when made, what is held while it is held, little again.
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

void train(World& w, uint64_t uid) {
    const Held r = w.claim(State::GENERATED, State::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, State::REWARDED) != 0);
    const Held t = w.claim(State::REWARDED, State::TRAINING);
    CHECK(test::pattern_holds(*w.seg, t.slot, "tokens", 0, uid));
    CHECK(finish(*w.seg, w.me(), w.fates, t.slot, t.word, 'T'));
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

TEST("memory grows by what is written and is given back when the slot is free") {
    World w(kLong);
    const uint64_t before = memory_of(*w.seg);
    for (uint64_t uid = 0; uid < 16; ++uid) answer(w, uid, kMiB / 8);
    const uint64_t held = memory_of(*w.seg) - before;
    CHECK(held > 14 * kMiB && held < 17 * kMiB);
    for (uint64_t uid = 0; uid < 8; ++uid) train(w, uid);
    const uint64_t half = memory_of(*w.seg) - before;
    CHECK(half > held / 2 - kMiB && half < held / 2 + kMiB);
    for (uint64_t uid = 8; uid < 16; ++uid) train(w, uid);
    CHECK(memory_of(*w.seg) == before);
}

TEST("a short answer costs no memory and no step of its own") {
    World w(kLong);
    const uint64_t before = memory_of(*w.seg);
    answer(w, 1, kKept / 8 - 64);
    CHECK(memory_of(*w.seg) == before);
    train(w, 1);
    CHECK(entries_into(*w.seg, State::RESERVED) == 1 && entries_into(*w.seg, State::FREE) == 1);
    answer(w, 2, kMiB / 8);
    train(w, 2);
    CHECK(entries_into(*w.seg, State::RESERVED) == 3 && entries_into(*w.seg, State::FREE) == 3);
}

TEST("a dropped sample gives its memory back, whoever completes the drop") {
    World w(kLong);
    const uint64_t before = memory_of(*w.seg);
    answer(w, 1, kMiB / 8);
    CHECK(drop(*w.seg, w.me(), w.fates, 0, load_word(*w.seg, 0), 'f'));
    CHECK(memory_of(*w.seg) == before);
    answer(w, 2, kMiB / 8);
    const uint64_t word = load_word(*w.seg, 1);
    CHECK(state_of(word) == State::GENERATED && drop(*w.seg, 0, w.fates, 1, word, 'f'));
    CHECK(memory_of(*w.seg) > before);  // by somebody without an entry: a reaper does it
    trim_all(*w.seg, w.me());
    CHECK(memory_of(*w.seg) == before && state_of(load_word(*w.seg, 1)) == State::FREE);
}

TEST("a slot that was claimed again before its memory was given back keeps it for that sample") {
    World w({1, 8, 4 * kMiB});
    answer(w, 1, kMiB / 8);
    const uint64_t held = memory_of(*w.seg);
    CHECK(drop(*w.seg, 0, w.fates, 0, load_word(*w.seg, 0), 'f'));
    answer(w, 2, 16);
    trim_all(*w.seg, w.me());
    CHECK(memory_of(*w.seg) == held);
    train(w, 2);
    CHECK(memory_of(*w.seg) == kept_bytes(w.seg->shape));
}

TEST("nothing is trimmed in the name of a remote worker, whose death nobody could prove") {
    World w(kLong);
    answer(w, 1, kMiB / 8);
    const uint32_t far = enter_remote(*w.seg, "rollout", "far", 1);
    const uint64_t word = load_word(*w.seg, 0);
    CHECK(drop(*w.seg, far, w.fates, 0, word, 'f'));
    CHECK(entries_into(*w.seg, State::RESERVED) == 1 && memory_of(*w.seg) > kept_bytes(w.seg->shape));
}

TEST("a reader without a claim finds nothing of an answer whose memory was given back") {
    World w(kLong);
    answer(w, 1, kMiB / 8);
    const uint64_t seen = load_word(*w.seg, 0);
    CHECK(find_entry(w.seg->table(0), TensorName("tokens"), 0));
    train(w, 1);
    CHECK(!find_entry(w.seg->table(0), TensorName("tokens"), 0) && load_word(*w.seg, 0) != seen);
}

TEST("a call's slot gives its memory back when the answer was taken") {
    test::CallWorld w({4, 8, 4 * kMiB});
    const uint64_t before = memory_of(*w.seg);
    CHECK(put_call(*w.seg, w.me(), w.call(1, 8), w.cursor));
    const Held g = take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 1, 255}).at(0);
    test::put_pattern(*w.seg, g.slot, g.word, "tokens", 0, 1, kMiB / 8);
    const uint64_t done = commit_segment(*w.seg, w.me(), g.slot, g.word, true);
    CHECK(done != 0 && memory_of(*w.seg) > before);
    CHECK(free_call(*w.seg, w.me(), g.slot, done));
    CHECK(memory_of(*w.seg) == before);
}

TEST("samples pass whole through slots that one thread frees, another fills and a third trims") {
    World w({2, 8, kLooseFrom});
    std::atomic<bool> over{false};
    std::thread other([&] {
        const Membership member(w.seg, "test", "trims");
        while (!over.load()) trim_all(*w.seg, member.index());
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
        drop(*w.seg, 0, w.fates, g.slot, load_word(*w.seg, g.slot), 'f');  // 0: the other thread trims
    }
    over.store(true);
    other.join();
    CHECK(whole == kRounds);
}

TEST("a full /dev/shm is an error of the write, which succeeds when a sample has ended, and of the dispatch") {
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
        put();
        CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, true) != 0);
        train(w, 2);
        test::check_fault(Fault::shm_too_small,
                          [&] { Segment::create(w.place.path("other"), {4096, 8, 4 * kMiB}, {1, 2, 3}); });
    });
    if (!ran) std::printf("      not tried: no mount namespace here\n");
}

int main() {
    return test::run();
}
