// A storm on a ring of calls: callers, engines and reapers are killed and stopped at random moments, and at named
// steps. At the end no answer was wrong, no call went from under a living caller, and every slot is FREE.
//
//  * BUSRL_STORM_S is the length in seconds, BUSRL_STORM_SEED the seed; BUSRL_STORM_PLANS=0 leaves out deaths at named
//    steps, which need exec().
//  * The ids of a call follow from its number and its answer from its ids: a torn or foreign one can not pass.
#include <sys/prctl.h>
#include <sys/wait.h>

#include <random>

#include "calls_world.hpp"

using namespace busrl;
using S = State;

namespace {

constexpr uint32_t kMostIds = 200;
constexpr uint64_t kIdleNs = 1'000'000;
constexpr int kRefused = 9;
constexpr const char* kPoints[] = {"register.cas",  "dispatch.claimed", "dispatch.written", "dispatch.queued",
                                   "move.cas",      "move.hinted",      "claim.cas",        "take.claimed",
                                   "commit.before", "commit.after",     "release.before",   "release.after",
                                   "reap.before",   "reap.cas",         "reap.entry"};

struct Tally {  // mapped by all
    A<uint64_t> taken, wrong, lost, cancelled;
};

struct Files {
    std::shared_ptr<Segment> seg;
    Tally* tally;
    Files(const std::string& folder, std::shared_ptr<Segment> segment) : seg(std::move(segment)) {
        File file(::open((folder + "/fates").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        if (::ftruncate(file.fd(), sizeof(Tally)) != 0) throw test::Failure{"no room for the tally"};
        void* where = ::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
        if (where == MAP_FAILED) throw test::Failure{"cannot map the tally"};
        tally = static_cast<Tally*>(where);
    }
    ~Files() { ::munmap(tally, sizeof(Tally)); }
};

uint64_t sum_of_ids(const Segment& seg, uint32_t slot) {
    const auto at = find_entry(seg.table(slot), TensorName("prompt_ids"), kNoSegment);
    if (!at) return ~uint64_t{0};
    const TensorEntry e = load_entry(seg.table(slot), *at);
    if (!entry_is_sound(e, seg.shape.slot_bytes)) return ~uint64_t{0};
    uint64_t sum = e.nbytes;
    const auto* ids = reinterpret_cast<const int32_t*>(seg.payload(slot) + e.offset);
    for (uint64_t i = 0; i < e.shape[0]; ++i) sum = (sum ^ uint64_t(ids[i])) * 0x9E3779B97F4A7C15u;
    return sum;
}
uint64_t sum_of_call(uint64_t number, uint64_t n) {
    uint64_t sum = 4 * n;
    for (uint64_t i = 0; i < n; ++i) sum = (sum ^ uint64_t(test::call_id(number, i))) * 0x9E3779B97F4A7C15u;
    return sum;
}

// An engine: some calls it hands back, as one does that is stopped.
void generate(const Files& f, uint32_t me, std::mt19937& random) {
    const Segment& seg = *f.seg;
    const auto held = take(seg, me, {S::QUEUED, S::GENERATING, -1, 3, 60000});
    for (const Held& h : held) {
        if (random() % 16 == 0) {
            release(seg, me, h.slot, h.word, S::QUEUED);
            continue;
        }
        if (random() % 64 == 0 && is_orphan(seg, h.slot)) {  // it was asked to cancel a call that nobody waits for
            free_call(seg, me, h.slot, h.word);
            continue;
        }
        test::put_pattern(seg, h.slot, h.word, "tokens", 0, sum_of_ids(seg, h.slot), 16);
        commit_segment(seg, me, h.slot, h.word, true);
    }
    if (held.empty()) nap(seg, S::QUEUED, transitions(seg, S::QUEUED), me, kIdleNs);
}

struct Open {
    uint32_t slot;
    uint64_t number, n;
};

// What a caller does with one of its calls: true when it is done with it.
bool look_after(const Files& f, uint32_t me, uint64_t ident, const Open& call, std::mt19937& random) {
    const Segment& seg = *f.seg;
    const uint64_t word = load_word(seg, call.slot);
    const S state = state_of(word);
    if (state == S::FREE || state == S::RESERVED || !is_call_of(seg, call.slot, me, ident)) {
        f.tally->lost.fetch_add(1);
        return true;
    }
    if (state == S::QUEUED && random() % 256 == 0) {
        if (!free_call(seg, me, call.slot, word)) return false;
        f.tally->cancelled.fetch_add(1);
        return true;
    }
    if (state != S::GENERATED) return false;
    if (!test::pattern_holds(seg, call.slot, "tokens", 0, sum_of_call(call.number, call.n)))
        f.tally->wrong.fetch_add(1);
    if (!free_call(seg, me, call.slot, word)) f.tally->lost.fetch_add(1);
    f.tally->taken.fetch_add(1);
    return true;
}

void ask(const Files& f, const Membership& member, std::vector<Open>& open, std::mt19937& random, uint32_t& cursor) {
    const Segment& seg = *f.seg;
    while (open.size() < 6) {
        const uint64_t number = random(), n = 1 + random() % kMostIds;
        std::vector<int32_t> ids(n);
        for (uint64_t i = 0; i < n; ++i) ids[i] = test::call_id(number, i);
        Call call{test::World::task(number), ids.data(), n};
        call.line.max_new_tokens = 64;
        const auto put = put_call(seg, member.index(), call, cursor);
        if (!put) break;
        open.push_back({put->slot, number, n});
    }
    const uint64_t seen = transitions(seg, S::GENERATED);
    const size_t before = open.size();
    open.erase(
        std::remove_if(open.begin(), open.end(),
                       [&](const Open& one) { return look_after(f, member.index(), member.ident(), one, random); }),
        open.end());
    if (open.size() == before) nap(seg, S::GENERATED, seen, member.index(), kIdleNs);
}

[[noreturn]] void work(const Files& f, char role) {
    Membership member(f.seg, "storm", std::string(1, role));
    std::mt19937 random{uint32_t(getpid())};
    uint32_t cursor = random();
    std::vector<Open> open;
    for (uint32_t round = 0;; ++round) {
        if (role == 'c') ask(f, member, open, random, cursor);
        if (role == 'e') generate(f, member.index(), random);
        if (role == 'r' || round % 64 == 0) reap(*f.seg, {}, member.index());
        if (role == 'r') nap(*f.seg, S::FREE, transitions(*f.seg, S::FREE), member.index(), kIdleNs);
    }
}

int child(const std::string& folder, char role) {
    try {
        work(Files(folder, Segment::attach(folder + "/ring", false, Machine::calls)), role);
    } catch (const std::exception& e) {
        std::printf("      a child of role %c: %s\n", role, e.what());
    } catch (const test::Failure& e) {
        std::printf("      a child of role %c: %s\n", role, e.text.c_str());
    }
    std::fflush(stdout);
    return kRefused;
}

struct Storm {
    struct Child {
        char role;
        pid_t pid;
    };
    test::CallWorld world{{12, 24, 4096}};
    Files files{world.place.folder, world.seg};
    std::mt19937 random{uint32_t(std::getenv("BUSRL_STORM_SEED") ? std::atol(std::getenv("BUSRL_STORM_SEED")) : 1)};
    const bool plans = std::getenv("BUSRL_STORM_PLANS") == nullptr || *std::getenv("BUSRL_STORM_PLANS") != '0';
    std::vector<Child> children;
    uint64_t kills = 0, stops = 0, own_deaths = 0, refusals = 0;

    Storm() {
        for (char role : {'c', 'c', 'c', 'e', 'e', 'r'}) children.push_back({role, start(role)});
    }
    pid_t start(char role) {
        const std::string plan = plans && random() % 3 == 0 ? std::string(kPoints[random() % std::size(kPoints)]) +
                                                                  ":" + std::to_string(1 + random() % 20)
                                                            : "";
        const pid_t pid = ::fork();
        if (pid != 0) return pid;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        const std::string folder = world.place.folder;
        if (plan.empty()) ::_exit(child(folder, role));
        const char name[] = {role, 0};
        const char* argv[] = {"storm_calls", folder.c_str(), name, nullptr};
        ::setenv("BUSRL_CRASH_POINT", plan.c_str(), 1);
        ::execv("/proc/self/exe", const_cast<char**>(argv));
        ::_exit(kRefused);
    }
    void bury(int status) { refusals += !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); }
    void kill_now(Child& c) {
        int status = 0;
        ::kill(c.pid, SIGKILL);
        ::waitpid(c.pid, &status, 0);
        bury(status);
        ++kills;
    }
    void blow(double seconds) {
        const uint64_t end = monotonic_ns() + uint64_t(seconds * 1e9);
        uint64_t next = 0;
        for (uint64_t now = monotonic_ns(); now < end; now = monotonic_ns()) {
            const timespec pause{0, 500'000};
            ::nanosleep(&pause, nullptr);
            for (Child& c : children) {
                int status = 0;
                if (::waitpid(c.pid, &status, WNOHANG) != c.pid) continue;
                bury(status);
                ++own_deaths;
                c.pid = start(c.role);
            }
            if (now < next) continue;
            next = now + 2'000'000 + random() % 10'000'000;
            Child& victim = children[random() % children.size()];
            ::kill(victim.pid, SIGSTOP);
            ++stops;
            if (random() % 2 == 0) {
                kill_now(victim);
                victim.pid = start(victim.role);
            }
            for (Child& c : children)
                if (random() % 2 == 0) ::kill(c.pid, SIGCONT);
        }
        for (Child& c : children) kill_now(c);
    }
};

}  // namespace

TEST("a storm of SIGKILL and SIGSTOP gives no wrong answer, takes no call from a living caller, and leaks no slot") {
    const char* set = std::getenv("BUSRL_STORM_S");
    Storm storm;
    storm.blow(0.5 * (set ? std::atof(set) : 20.0));
    const Segment& seg = *storm.files.seg;
    std::mt19937 random(1);
    const uint64_t end = monotonic_ns() + 10'000'000'000;
    for (reap(seg, {}, storm.world.me()); !storm.world.all_free() && monotonic_ns() < end;) {
        generate(storm.files, storm.world.me(), random);
        reap(seg, {}, storm.world.me());
    }
    const Tally& t = *storm.files.tally;
    std::printf(
        "      %lu kills, %lu stops, %lu deaths at named steps; %lu answers taken, %lu cancelled, %lu wrong, %lu "
        "lost\n",
        storm.kills, storm.stops, storm.own_deaths, t.taken.load(), t.cancelled.load(), t.wrong.load(), t.lost.load());
    CHECK(storm.world.all_free() && storm.refusals == 0 && t.wrong.load() == 0 && t.lost.load() == 0);
    CHECK(t.taken.load() > 0 && t.cancelled.load() > 0 && storm.kills > 0);
    for (uint32_t i = 1; i < seg.shape.n_procs; ++i) CHECK(i == storm.world.me() || !is_live(seg.proc(i).ident.load()));
}

int main(int argc, char** argv) {
    if (argc == 3) return child(argv[1], argv[2][0]);
    return test::run();
}
