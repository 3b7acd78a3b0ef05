// Processes that pass checksummed samples through the ring are killed with SIGKILL at random moments and restarted,
// while the survivors reap. At the end nothing is torn, leaked, lost or ended twice. BUSRL_STORM_S sets the length.
#include <sys/wait.h>

#include <random>

#include "harness.hpp"

using namespace busrl;

namespace {

constexpr uint64_t kSamples = 1 << 22;
constexpr uint32_t kWorkers = 5;
constexpr int kTorn = 9;

struct Tally {  // shared by all processes
    A<uint64_t> cycles;
    A<uint8_t> ended[kSamples];
};

struct Storm {
    test::Place place;
    std::shared_ptr<Segment> seg = Segment::create(place.path("ring"), {48, 32, 4096}, {});
    Tally* tally =
        static_cast<Tally*>(::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    FateBook fates;
    Storm() { open_fates(fates); }
    void open_fates(FateBook& book) const {
        book.train = std::make_shared<Fates>(place.path("fates"), true, kSamples);
        book.validate = book.train;
    }
};

void pass_on(const Segment& seg, uint32_t me, const FateBook& fates, Tally& tally) {
    for (const Held& h : take(seg, me, {State::QUEUED, State::GENERATING, -1, 3, 60000})) {
        const uint64_t value = seg.line(h.slot).uid.load() + segs_of(h.word);
        test::put_pattern(seg, h.slot, h.word, "tokens", uint8_t(segs_of(h.word)), value, 128);
        commit_segment(seg, me, h.slot, h.word, segs_of(h.word) == 2);
    }
    for (const Held& h : take(seg, me, {State::GENERATED, State::REWARDING, -1, 3, 0}))
        release(seg, me, h.slot, h.word, State::REWARDED);
    for (const Held& h : take(seg, me, {State::REWARDED, State::TRAINING, -1, 3, 0})) {
        const uint64_t uid = seg.line(h.slot).uid.load();
        for (uint8_t k = 0; k < 3; ++k)
            if (!test::pattern_holds(seg, h.slot, "tokens", k, uid + k)) ::_exit(kTorn);
        const bool bad = uid % 17 == 0;
        if (bad ? release(seg, me, h.slot, h.word, State::REWARDED) == 0 : !finish(seg, me, fates, h.slot, h.word, 'T'))
            continue;
        if (bad && !drop(seg, me, fates, h.slot, next_word(h.word, State::REWARDED, 0), 'f')) continue;
        tally.ended[uid].fetch_add(1);
        tally.cycles.fetch_add(1);
    }
}

// Worker 0 dispatches as well: like the scheduler it is alone, and reads from the fates where to go on.
[[noreturn]] void child(const Storm& storm, uint32_t number) {
    auto seg = Segment::attach(storm.place.path("ring"), false);
    FateBook fates;
    storm.open_fates(fates);
    Membership member(seg, "worker", std::to_string(number));
    uint64_t uid = 0;
    uint32_t cursor = 0;
    if (number == 0) reap(*seg, fates, member.index());
    while (true) {
        while (number == 0 && uid < kSamples) {
            if (fates.train->get(uid) == 0 && !dispatch(*seg, member.index(), fates, test::World::task(uid), cursor))
                break;
            ++uid;
        }
        pass_on(*seg, member.index(), fates, *storm.tally);
        reap(*seg, fates, member.index());
        finish_drops(*seg, fates);
    }
}

pid_t start(const Storm& storm, uint32_t number) {
    const pid_t pid = ::fork();
    if (pid == 0) child(storm, number);
    return pid;
}

}  // namespace

TEST("a storm of SIGKILL tears, leaks, loses and doubles nothing") {
    Storm storm;
    const char* seconds = std::getenv("BUSRL_STORM_S");
    const uint64_t end = monotonic_ns() + uint64_t((seconds ? std::atof(seconds) : 3.0) * 1e9);
    std::mt19937 random(1);
    pid_t pids[kWorkers];
    for (uint32_t i = 0; i < kWorkers; ++i) pids[i] = start(storm, i);
    uint64_t kills = 0, reaped = 0, torn = 0;
    auto stop = [&](uint32_t i) {
        int status = 0;
        ::kill(pids[i], SIGKILL);
        ::waitpid(pids[i], &status, 0);
        torn += !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    };
    while (monotonic_ns() < end) {
        const timespec pause{0, long(500'000 + random() % 6'000'000)};
        ::nanosleep(&pause, nullptr);
        const uint32_t i = random() % kWorkers;
        stop(i);
        ++kills;
        reaped += reap(*storm.seg, storm.fates, 0).size();
        pids[i] = start(storm, i);
    }
    for (uint32_t i = 0; i < kWorkers; ++i) stop(i);
    reap(*storm.seg, storm.fates, 0);
    finish_drops(*storm.seg, storm.fates);
    for (uint32_t i = 0; i < storm.seg->shape.n_slots; ++i) {
        const uint64_t word = load_word(*storm.seg, i);
        CHECK(!is_working(state_of(word)) && state_of(word) != State::DROPPED);
    }
    for (uint32_t i = 1; i < storm.seg->shape.n_procs; ++i) CHECK(!is_live(storm.seg->proc(i).ident.load()));
    Membership last(storm.seg, "worker", "last");
    for (int round = 0; round < 1000; ++round) pass_on(*storm.seg, last.index(), storm.fates, *storm.tally);
    uint64_t dispatched = 0;
    for (uint64_t uid = 0; uid < kSamples; ++uid) {
        const uint8_t fate = storm.fates.train->get(uid);
        CHECK(storm.tally->ended[uid] <= 1);
        if (fate == 0) continue;
        ++dispatched;
        CHECK(fate == (uid % 17 == 0 ? 'f' : 'T'));
    }
    for (uint32_t i = 0; i < storm.seg->shape.n_slots; ++i) CHECK(state_of(load_word(*storm.seg, i)) == State::FREE);
    std::printf(
        "      %lu kills, %lu slots reaped by the parent, %lu samples ended, %lu processes ended by themselves\n",
        kills, reaped, dispatched, torn);
    CHECK(torn == 0 && dispatched > 0 && kills > 0);
}

int main() {
    return test::run();
}
