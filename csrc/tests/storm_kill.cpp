// A storm on a small run: schedulers, rollout and reward workers, learners with a log, each a process of its own, are
// killed and stopped at random moments and, by crash plans, at random steps. At the end nothing is torn, leaked, lost
// or ended twice, and every sample is trained exactly once (or dropped, where the test drops some).
//
//  * BUSRL_STORM_S is the length in seconds, BUSRL_STORM_SEED the seed of what is killed when;
//    BUSRL_STORM_PLANS=0 leaves out crash plans, which need exec().
//  * A payload carries its sample, the claim under which it was written and a checksum over all of it.
//  * The judge is this process: it reads ring, fates and the shared tally, and trusts no count of the ring's own.
#include <sys/prctl.h>
#include <sys/wait.h>

#include <map>
#include <random>

#include "busrl/lock.hpp"
#include "harness.hpp"

using namespace busrl;
using S = State;

namespace {

constexpr const char* kPoints[] = {
#include "crash_points.inc"
};
constexpr uint64_t kSamples = 1 << 22;
constexpr uint32_t kSegments = 3, kWords = 256;
constexpr uint64_t kIdleNs = 1'000'000;
constexpr int kRefused = 9;  // exit status of a child to which the ring raised an error

struct Tally {  // a file mapped by all
    A<uint64_t> torn;
    A<uint8_t> logged[kSamples];  // the learner's log: how often this sample has a record
    A<uint8_t> ended[kSamples];   // how often its slot was freed
};

struct Files {
    std::string folder;
    std::shared_ptr<Segment> seg;
    FateBook fates;
    Tally* tally;

    Files(const std::string& folder, std::shared_ptr<Segment> segment) : folder(folder), seg(std::move(segment)) {
        fates.train = fates.validate = std::make_shared<Fates>(folder + "/fates", true, kSamples);
        File file(::open((folder + "/tally").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        if (::ftruncate(file.fd(), sizeof(Tally)) != 0) throw test::Failure{"no room for the tally"};
        void* where = ::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
        if (where == MAP_FAILED) throw test::Failure{"cannot map the tally"};
        tally = static_cast<Tally*>(where);
    }
    ~Files() { ::munmap(tally, sizeof(Tally)); }
};

// ------------------------------------------------------------------------------------------------ payloads

// words[0] = uid, [1] = the word of the claim, the rest follows from both; with a crc32c in the entry.
void put_payload(const Segment& seg, const Held& h, const char* name, uint8_t segment) {
    uint64_t words[kWords] = {seg.line(h.slot).uid.load(), h.word};
    for (uint32_t i = 2; i < kWords; ++i) words[i] = (words[i - 1] ^ words[0]) * 0x9E3779B97F4A7C15u + words[1];
    TensorEntry e{};
    std::memcpy(e.name, name, std::strlen(name));
    e.segment = segment;
    e.code = kUint;
    e.bits = 64;
    e.ndim = 1;
    e.shape[0] = kWords;
    e.nbytes = sizeof(words);
    e.flags = kTensorValid | kTensorHasCrc;
    e.crc32c = crc32c(words, sizeof(words));
    const uint32_t index = place_entry(seg, h.slot, h.word, e);
    std::memcpy(seg.payload(h.slot) + e.offset, words, sizeof(words));
    store_entry(seg.table(h.slot), index, e);
}

bool payload_is_whole(const Segment& seg, uint32_t slot, const char* name, uint8_t segment) {
    const auto at = find_entry(seg.table(slot), TensorName(name), segment);
    if (!at) return false;
    const TensorEntry e = load_entry(seg.table(slot), *at);
    uint64_t words[kWords];
    if (!entry_is_sound(e, seg.shape.slot_bytes) || e.nbytes != sizeof(words)) return false;
    std::memcpy(words, seg.payload(slot) + e.offset, sizeof(words));
    bool whole = words[0] == seg.line(slot).uid.load() && crc32c(words, sizeof(words)) == e.crc32c;
    for (uint32_t i = 2; i < kWords; ++i)
        whole = whole && words[i] == (words[i - 1] ^ words[0]) * 0x9E3779B97F4A7C15u + words[1];
    return whole;
}

// ------------------------------------------------------------------------------------------------ what the roles do

size_t generate(const Files& f, uint32_t me) {
    const auto held = take(*f.seg, me, {S::QUEUED, S::GENERATING, -1, 3, 60000});
    for (const Held& h : held) {
        // Long and very long answers by turns, so that memory is given back at rest and at the reward.
        const uint64_t more = f.seg->line(h.slot).uid.load() % 3 ? 0 : kKept;
        if (segs_of(h.word) == 0) test::skip_kept(*f.seg, h.slot, h.word, more);
        put_payload(*f.seg, h, "tokens", uint8_t(segs_of(h.word)));
        commit_segment(*f.seg, me, h.slot, h.word, segs_of(h.word) + 1 == kSegments);
    }
    return held.size();
}

size_t reward(const Files& f, uint32_t me) {
    const auto held = take(*f.seg, me, {S::GENERATED, S::REWARDING, -1, 3, 0});
    for (const Held& h : held) {
        put_payload(*f.seg, h, "reward", kNoSegment);
        release(*f.seg, me, h.slot, h.word, S::REWARDED);
    }
    return held.size();
}

void check_payloads(const Files& f, uint32_t slot) {
    bool whole = payload_is_whole(*f.seg, slot, "reward", kNoSegment);
    for (uint8_t k = 0; k < kSegments; ++k) whole = whole && payload_is_whole(*f.seg, slot, "tokens", k);
    if (!whole) f.tally->torn.fetch_add(1);
}

bool is_dropped(uint64_t uid, bool drops) {
    return drops && uid % 5 == 0;
}

// The order of the learner: look into the log, append to it, store the fate, free the slot.
size_t train(const Files& f, uint32_t me, bool drops) {
    const auto held = take(*f.seg, me, {S::REWARDED, S::TRAINING, -1, 8, 0});
    for (const Held& h : held) {
        const uint64_t uid = f.seg->line(h.slot).uid.load();
        if (is_dropped(uid, drops)) {
            f.tally->ended[uid].fetch_add(drop(*f.seg, me, f.fates, h.slot, h.word, 'f'));
            continue;
        }
        if (f.tally->logged[uid].load() == 0) {
            check_payloads(f, h.slot);
            f.tally->logged[uid].fetch_add(1);
        }
        f.tally->ended[uid].fetch_add(finish(*f.seg, me, f.fates, h.slot, h.word, 'T'));
    }
    return held.size();
}

size_t dispatch_more(const Files& f, uint32_t me, uint32_t& cursor, uint64_t& uid) {
    size_t done = 0;
    for (; uid < kSamples && done < 16; ++uid) {
        if (f.fates.train->get(uid) != 0) continue;
        if (!dispatch(*f.seg, me, f.fates, test::World::task(uid), cursor)) break;
        ++done;
    }
    return done;
}

bool anything_reserved(const Segment& seg) {
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i)
        if (state_of(load_word(seg, i)) == S::RESERVED) return true;
    return false;
}

void wait_for(const Files& f, S state, uint32_t me) {
    nap(*f.seg, state, transitions(*f.seg, state), me, kIdleNs);
}

// A singleton's way in: its lock, then (for a scheduler) the end of whatever its predecessor had begun.
void become_the_one(const Files& f, uint32_t me, OfdLock& lock, bool schedules) {
    while (!lock.try_acquire()) wait_for(f, S::FREE, me);
    if (!schedules) return;
    reap(*f.seg, f.fates, me);
    while (anything_reserved(*f.seg)) {
        wait_for(f, S::FREE, me);
        reap(*f.seg, f.fates, me);
    }
}

[[noreturn]] void work(const Files& f, char role, bool drops) {
    Membership member(f.seg, "storm", std::string(1, role));
    const uint32_t me = member.index();
    OfdLock lock(f.folder + "/" + role + ".lock");
    if (role == 's' || role == 'l') become_the_one(f, me, lock, role == 's');
    uint32_t cursor = uint32_t(getpid());  // anywhere: a slot left by a predecessor is not the next one to be taken
    uint64_t uid = 0;
    for (uint32_t round = 0;; ++round) {
        const size_t done = role == 's'   ? dispatch_more(f, me, cursor, uid)
                            : role == 'g' ? generate(f, me)
                            : role == 'r' ? reward(f, me)
                                          : train(f, me, drops);
        if (done == 0) wait_for(f, role == 's' ? S::FREE : role == 'g' ? S::QUEUED : S::REWARDED, me);
        if (done == 0 || round % 64 == 0) {
            reap(*f.seg, f.fates, me);
            finish_drops(*f.seg, f.fates);
            trim_all(*f.seg, me, round % 5 == 0 ? 0 : kIdleNs);
        }
    }
}

int child(const std::string& folder, char role, bool drops) {
    try {
        const Files files(folder, Segment::attach(folder + "/ring", false));
        work(files, role, drops);
    } catch (const std::exception& e) {
        std::printf("      a child of role %c: %s\n", role, e.what());
        std::fflush(stdout);
    }
    return kRefused;
}

// ------------------------------------------------------------------------------------------------ the storm

struct Storm {
    struct Child {
        char role;
        pid_t pid;
        bool stopped;
    };
    test::Place place;
    Files files{place.folder, Segment::create(place.path("ring"), {16, 32, kLooseFrom}, {})};
    const bool drops;
    std::mt19937 random;
    bool plans = true;
    std::vector<Child> children;
    uint64_t kills = 0, stops = 0, own_deaths = 0, refusals = 0;

    explicit Storm(bool drops, uint32_t seed) : drops(drops), random(seed) {
        if (const char* set = std::getenv("BUSRL_STORM_PLANS")) plans = *set != '0';
        for (char role : {'s', 's', 's', 's', 'g', 'g', 'g', 'r', 'l', 'l'})
            children.push_back({role, start(role), false});
    }
    ~Storm() {
        for (const char* name : {"tally", "s.lock", "l.lock", "g.lock", "r.lock"}) ::unlink(place.path(name).c_str());
    }

    // A step that this role comes by, early. Most of the schedulers' plans are about the two steps between which a slot
    // names a sample that it does not hold: there a wrong rule shows itself the soonest.
    std::string plan_for(char role) {
        if (!plans || random() % 4 == 0) return "";
        const uint32_t count = 1 + random() % 4;
        std::string point = random() % 2 ? "dispatch.uid" : "dispatch.claimed";
        while (role != 's' || random() % 4 == 0) {
            point = kPoints[random() % std::size(kPoints)];
            if (is_for(role, point)) break;
        }
        return point + ":" + std::to_string(count);
    }
    static bool is_for(char role, const std::string& point) {
        for (const auto& [prefix, roles] : std::map<std::string, std::string>{{"dispatch.", "s"},
                                                                              {"claim.", "grl"},
                                                                              {"take.", "grl"},
                                                                              {"commit.", "g"},
                                                                              {"release.", "r"},
                                                                              {"finish.", "l"},
                                                                              {"drop.", "l"}})
            if (point.rfind(prefix, 0) == 0) return roles.find(role) != std::string::npos;
        return true;
    }

    pid_t start(char role) {
        const std::string plan = plan_for(role);
        const pid_t pid = ::fork();
        if (pid != 0) return pid;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // no child outlives this program
        const char name[] = {role, 0};
        if (plan.empty()) ::_exit(child(place.folder, role, drops));
        const char* argv[] = {"storm_kill", place.folder.c_str(), name, drops ? "1" : "0", nullptr};
        ::setenv("BUSRL_CRASH_POINT", plan.c_str(), 1);
        ::execv("/proc/self/exe", const_cast<char**>(argv));
        ::_exit(kRefused);
    }

    void bury(int status) { refusals += !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); }
    void restart(Child& c) { c = {c.role, start(c.role), false}; }
    void kill_now(Child& c) {
        int status = 0;
        ::kill(c.pid, SIGKILL);
        ::waitpid(c.pid, &status, 0);
        bury(status);
        ++kills;
    }

    // Those that died by their crash plans.
    void replace_the_dead() {
        for (Child& c : children) {
            int status = 0;
            if (::waitpid(c.pid, &status, WNOHANG) != c.pid) continue;
            bury(status);
            ++own_deaths;
            restart(c);
        }
    }

    void strike() {
        for (Child& c : children)
            if (c.stopped && random() % 3 == 0) ::kill(c.pid, SIGCONT), c.stopped = false;
        Child& victim = children[random() % children.size()];
        if (random() % 5 < 2) {
            ::kill(victim.pid, SIGSTOP);
            victim.stopped = true;
            ++stops;
        } else {
            kill_now(victim);
            restart(victim);
        }
        if (random() % 4 == 0) reap(*files.seg, files.fates, 0);
    }

    void blow(double seconds) {
        const uint64_t end = monotonic_ns() + uint64_t(seconds * 1e9);
        uint64_t next = 0;
        for (uint64_t now = monotonic_ns(); now < end; now = monotonic_ns()) {
            const timespec pause{0, 300'000};
            ::nanosleep(&pause, nullptr);
            replace_the_dead();
            if (now < next) continue;
            next = now + 300'000 + random() % 4'000'000;
            strike();
        }
        for (Child& c : children) kill_now(c);
    }
};

// ------------------------------------------------------------------------------------------------ the judge

void check_at_rest(const Files& f) {
    reap(*f.seg, f.fates, 0);
    finish_drops(*f.seg, f.fates);
    for (uint32_t i = 0; i < f.seg->shape.n_slots; ++i) {
        const uint64_t word = load_word(*f.seg, i);
        CHECK(!is_working(state_of(word)) && state_of(word) != S::DROPPED);
    }
    for (uint32_t i = 1; i < f.seg->shape.n_procs; ++i) CHECK(!is_live(f.seg->proc(i).ident.load()));
}

bool all_free(const Segment& seg) {
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i)
        if (state_of(load_word(seg, i)) != S::FREE) return false;
    return true;
}

void drain(const Files& f, bool drops) {
    const Membership last(f.seg, "storm", "last");
    const uint64_t end = monotonic_ns() + 10'000'000'000;
    while (!all_free(*f.seg) && monotonic_ns() < end) {
        const size_t done = generate(f, last.index()) + reward(f, last.index()) + train(f, last.index(), drops);
        if (done == 0) reap(*f.seg, f.fates, last.index());
    }
    CHECK(all_free(*f.seg));
    trim_all(*f.seg, last.index(), 0);
    std::printf("      memory at the end: %lu KiB, %lu of them always there\n", test::memory_of(*f.seg) >> 10,
                kept_bytes(f.seg->shape) >> 10);
}

// Every sample that was ever dispatched has the one fate that it must have, in fates and log alike.
uint64_t audit(const Files& f, bool drops) {
    uint64_t dispatched = 0, lost = 0, doubled = 0, disagree = 0;
    for (uint64_t uid = 0; uid < kSamples; ++uid) {
        const uint8_t fate = f.fates.train->get(uid), logged = f.tally->logged[uid], ended = f.tally->ended[uid];
        if (fate == 0 && logged == 0 && ended == 0) continue;
        ++dispatched;
        lost += fate == kDispatched || fate == 0;
        doubled += logged > 1 || ended > 1;
        disagree += fate != kDispatched && (fate == kTrained) != (logged == 1);
        disagree += fate != kDispatched && fate != (is_dropped(uid, drops) ? 'f' : kTrained);
    }
    std::printf("      %lu samples: %lu lost, %lu ended twice, %lu whose fate and log disagree, %lu torn\n", dispatched,
                lost, doubled, disagree, f.tally->torn.load());
    CHECK(lost == 0 && doubled == 0 && disagree == 0 && f.tally->torn.load() == 0);
    return dispatched;
}

double seconds_of(double share) {
    const char* set = std::getenv("BUSRL_STORM_S");
    return share * (set ? std::atof(set) : 20.0);
}

void run_storm(bool drops, double seconds) {
    const char* set = std::getenv("BUSRL_STORM_SEED");
    Storm storm(drops, set ? uint32_t(std::atol(set)) : 1);
    storm.blow(seconds);
    std::printf("      %lu kills and %lu stops from outside, %lu deaths at crash points, %lu refusals\n", storm.kills,
                storm.stops, storm.own_deaths, storm.refusals);
    check_at_rest(storm.files);
    drain(storm.files, drops);
    const uint64_t dispatched = audit(storm.files, drops);
    CHECK(storm.refusals == 0 && dispatched > 0 && storm.kills > 0 && storm.stops > 0);
}

}  // namespace

TEST("a storm of SIGKILL and SIGSTOP tears, leaks, loses and doubles nothing, and every sample is trained once") {
    run_storm(false, seconds_of(0.75));
}

TEST("the same where every fifth sample is dropped instead") {
    run_storm(true, seconds_of(0.25));
}

int main(int argc, char** argv) {
    if (argc == 4) return child(argv[1], argv[2][0], argv[3][0] == '1');
    return test::run();
}
