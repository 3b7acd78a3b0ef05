// Every step x state: for each thing that a process can do to a slot in each state, and each crash point of the source,
// a real process is killed there. After one reap() the slot is where it was before or where it was going, never
// between; the entry is free, nothing is lost, and the ordinary path ends the sample. Reapers are killed at each of
// their steps.
//
//  * The points come from the source (the Makefile collects them): a new one is tried in every scenario at once, and a
//    point that no scenario reaches fails the last test.
//  * A child is another run of this program, so that each has a crash plan of its own.
#include <sys/wait.h>

#include <map>

#include "busrl/remote.hpp"
#include "harness.hpp"

using namespace busrl;
using S = State;

namespace {

constexpr const char* kPoints[] = {
#include "crash_points.inc"
};

constexpr uint64_t kUid = 5;

struct Actor {  // a child, registered in the ring at argv[2]
    std::shared_ptr<Segment> seg;
    FateBook fates;
    Membership member;

    explicit Actor(const std::string& folder)
        : seg(Segment::attach(folder + "/ring", false)), fates(fates_of(folder)), member(seg, "child", "child") {}
    uint32_t me() const { return member.index(); }
    Held take(S from, S to) { return busrl::take(*seg, me(), {from, to, -1, 1, 255}).at(0); }
    Held rest(S state) const {
        for (uint32_t i = 0; i < seg->shape.n_slots; ++i)
            if (const uint64_t word = load_word(*seg, i); state_of(word) == state) return {i, word};
        throw test::Failure{std::string("no slot is ") + name_of(state)};
    }
    void release(S from, S working, S to) {
        const Held h = take(from, working);
        busrl::release(*seg, me(), h.slot, h.word, to);
    }
    void commit(bool done) {
        const Held h = take(S::QUEUED, S::GENERATING);
        if (segs_of(h.word) == 0) test::skip_kept(*seg, h.slot, h.word);
        test::put_pattern(*seg, h.slot, h.word, "tokens", uint8_t(segs_of(h.word)), kUid + segs_of(h.word), 32);
        commit_segment(*seg, me(), h.slot, h.word, done);
    }
    void drop_own(S from, S working) {
        const Held h = take(from, working);
        drop(*seg, me(), fates, h.slot, h.word, 'f');
    }
    void drop_rest(S state) {
        const Held h = rest(state);
        drop(*seg, me(), fates, h.slot, h.word, 'f');
    }

  private:
    static FateBook fates_of(const std::string& folder) {
        return {std::make_shared<Fates>(folder + "/fates", true, 1 << 20),
                std::make_shared<Fates>(folder + "/validate", true, 1 << 20)};
    }
};

struct Rest {
    S state;
    uint8_t fate;
    uint32_t segments;
};

struct Scenario {
    const char* name;
    S start;             // where the sample is when the child begins; FREE = not dispatched
    uint32_t segments;   // and how many it has
    Rest before, after;  // at rest again: without, and with, what the child was doing
    void (*act)(Actor&);
    const char* victim = nullptr;  // a process killed here while it held the sample, for the child to reap
};

void dispatch_one(Actor& a) {
    uint32_t cursor = 0;
    dispatch(*a.seg, a.me(), a.fates, test::World::task(kUid), cursor);
}
void dispatch_another(Actor& a) {
    uint32_t cursor = 0;
    dispatch(*a.seg, a.me(), a.fates, test::World::task(kUid + 1), cursor);
}
void trim_at_rest(Actor& a) {
    trim_all(*a.seg, a.me(), 0);
}
void reap_all(Actor& a) {
    reap(*a.seg, a.fates, a.me());
}
// What a keeper does for a worker without a mapping, from its entry to its goodbye.
void speak_for_another(Actor& a) {
    const uint32_t far = enter_remote(*a.seg, "rollout", "far", 1);
    busrl::take(*a.seg, far, {S::QUEUED, S::GENERATING, -1, 1, 255}).at(0);
    leave_remote(*a.seg, far);
}

const Rest kNowhere{S::FREE, 0, 0}, kDropped{S::FREE, 'f', 0}, kTrained{S::FREE, 'T', 0};
const Rest kQueued{S::QUEUED, 'D', 0}, kQueued1{S::QUEUED, 'D', 1};
const Rest kGenerated{S::GENERATED, 'D', 2}, kRewarded{S::REWARDED, 'D', 2};

const Scenario kScenarios[] = {
    {"registers", S::FREE, 0, kNowhere, kNowhere, [](Actor&) {}},
    {"dispatches", S::FREE, 0, kNowhere, kQueued, dispatch_one},
    {"commits a segment", S::QUEUED, 0, kQueued, kQueued1, [](Actor& a) { a.commit(false); }},
    {"commits the last segment", S::QUEUED, 1, kQueued1, kGenerated, [](Actor& a) { a.commit(true); }},
    {"hands back what it generates", S::QUEUED, 1, kQueued1, kQueued1,
     [](Actor& a) { a.release(S::QUEUED, S::GENERATING, S::QUEUED); }},
    {"ends a generation without another segment",
     S::QUEUED,
     1,
     kQueued1,
     {S::GENERATED, 'D', 1},
     [](Actor& a) { a.release(S::QUEUED, S::GENERATING, S::GENERATED); }},
    {"rewards one part", S::GENERATED, 2, kGenerated, kGenerated,
     [](Actor& a) { a.release(S::GENERATED, S::REWARDING, S::GENERATED); }},
    {"rewards", S::GENERATED, 2, kGenerated, kRewarded,
     [](Actor& a) { a.release(S::GENERATED, S::REWARDING, S::REWARDED); }},
    {"hands back what it would train", S::REWARDED, 2, kRewarded, kRewarded,
     [](Actor& a) { a.release(S::REWARDED, S::TRAINING, S::REWARDED); }},
    {"trains", S::REWARDED, 2, kRewarded, kTrained,
     [](Actor& a) {
         const Held h = a.take(S::REWARDED, S::TRAINING);
         finish(*a.seg, a.me(), a.fates, h.slot, h.word, 'T');
     }},
    {"drops QUEUED", S::QUEUED, 1, kQueued1, kDropped, [](Actor& a) { a.drop_rest(S::QUEUED); }},
    {"drops GENERATED", S::GENERATED, 2, kGenerated, kDropped, [](Actor& a) { a.drop_rest(S::GENERATED); }},
    {"drops REWARDED", S::REWARDED, 2, kRewarded, kDropped, [](Actor& a) { a.drop_rest(S::REWARDED); }},
    {"drops its GENERATING", S::QUEUED, 1, kQueued1, kDropped, [](Actor& a) { a.drop_own(S::QUEUED, S::GENERATING); }},
    {"drops its REWARDING", S::GENERATED, 2, kGenerated, kDropped,
     [](Actor& a) { a.drop_own(S::GENERATED, S::REWARDING); }},
    {"drops its TRAINING", S::REWARDED, 2, kRewarded, kDropped, [](Actor& a) { a.drop_own(S::REWARDED, S::TRAINING); }},
    {"completes another's drop", S::QUEUED, 1, kDropped, kDropped, [](Actor& a) { finish_drops(*a.seg, a.fates); },
     "drop.cas"},
    {"surrenders", S::GENERATED, 2, kGenerated, kGenerated,
     [](Actor& a) {
         a.take(S::GENERATED, S::REWARDING);
         surrender(*a.seg, a.fates, a.me());
         a.member.leave();
     }},
    {"gives back the memory of FREE slots", S::FREE, 0, kNowhere, kNowhere, trim_at_rest},
    {"gives back what QUEUED does not use", S::QUEUED, 1, kQueued1, kQueued1, trim_at_rest},
    {"speaks for a remote worker", S::QUEUED, 1, kQueued1, kQueued1, speak_for_another},
    {"reaps RESERVED before its uid", S::FREE, 0, kNowhere, kNowhere, reap_all, "dispatch.written"},
    {"reaps RESERVED before its fate", S::FREE, 0, kNowhere, kNowhere, reap_all, "dispatch.uid"},
    {"reaps RESERVED with its fate", S::FREE, 0, kQueued, kQueued, reap_all, "dispatch.fate"},
    {"reaps GENERATING", S::QUEUED, 1, kQueued1, kQueued1, reap_all, "claim.cas"},
    {"reaps REWARDING", S::GENERATED, 2, kGenerated, kGenerated, reap_all, "claim.cas"},
    {"reaps TRAINING", S::REWARDED, 2, kRewarded, kRewarded, reap_all, "claim.cas"},
    {"reaps TRAINING with its fate",
     S::REWARDED,
     2,
     {S::REWARDED, 'T', 2},
     {S::REWARDED, 'T', 2},
     reap_all,
     "finish.fate"},
    {"reaps one that was leaving", S::QUEUED, 0, kQueued, kQueued, reap_all, "release.before"},
};

// What the victim of a scenario does until it is killed at scenario.victim.
void be_victim(const Scenario& s, Actor& a) {
    if (s.start == S::FREE) dispatch_one(a);
    if (std::strcmp(s.victim, "drop.cas") == 0) a.drop_rest(S::QUEUED);
    if (std::strcmp(s.victim, "release.before") == 0) a.release(S::QUEUED, S::GENERATING, S::QUEUED);
    if (s.start == S::QUEUED) a.commit(false);
    if (s.start == S::GENERATED) a.release(S::GENERATED, S::REWARDING, S::REWARDED);
    const Held h = a.take(S::REWARDED, S::TRAINING);
    finish(*a.seg, a.me(), a.fates, h.slot, h.word, 'T');
}

// Runs this program again: `role` acts scenario `index`, killed at the count-th arrival at `point`. True if it was.
bool dies(const std::string& folder, const char* role, size_t index, const std::string& point, int count) {
    const std::string plan = point + ":" + std::to_string(count);
    const std::string number = std::to_string(index);
    const pid_t pid = ::fork();
    if (pid == 0) {
        const char* argv[] = {"crash_points", role, folder.c_str(), number.c_str(), nullptr};
        ::setenv("BUSRL_CRASH_POINT", plan.c_str(), 1);
        ::execv("/proc/self/exe", const_cast<char**>(argv));
        ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return false;
    throw test::Failure{std::string(role) + " of scenario " + number + " ended with status " + std::to_string(status)};
}

// Leaves two slots FREE with the memory of a very long answer.
void leave_memory(test::World& w) {
    for (uint64_t uid = 1; uid <= 2; ++uid) {
        CHECK(w.dispatch(uid));
        const Held g = w.claim(S::QUEUED, S::GENERATING);
        test::skip_kept(*w.seg, g.slot, g.word, 2 * kKept);
        CHECK(drop(*w.seg, w.me(), w.fates, g.slot, g.word, 'f'));
    }
    w.cursor = 0;
}

void bring_to(test::World& w, S state, uint32_t segments) {
    leave_memory(w);
    if (state == S::FREE) return;
    CHECK(w.dispatch(kUid));
    for (uint32_t k = 0; k < segments; ++k) {
        const Held g = w.claim(S::QUEUED, S::GENERATING);
        if (k == 0) test::skip_kept(*w.seg, g.slot, g.word);
        test::put_pattern(*w.seg, g.slot, g.word, "tokens", uint8_t(k), kUid + k, 32);
        CHECK(commit_segment(*w.seg, w.me(), g.slot, g.word, state != S::QUEUED && k + 1 == segments) != 0);
    }
    if (state != S::REWARDED) return;
    const Held r = w.claim(S::GENERATED, S::REWARDING);
    CHECK(release(*w.seg, w.me(), r.slot, r.word, S::REWARDED) != 0);
}

// Empty if everything is as `want` says: one slot at most in use, at rest, its committed payload whole, no entry left,
// no memory of a long answer in a free slot.
std::string differs(const test::World& w, const Rest& want) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < w.seg->shape.n_slots; ++i) {
        const uint64_t word = load_word(*w.seg, i);
        if (state_of(word) == S::FREE) continue;
        ++used;
        if (state_of(word) != want.state) return std::string("the slot is ") + name_of(state_of(word));
        if (segs_of(word) != want.segments) return "it has " + std::to_string(segs_of(word)) + " segments";
        if (w.seg->line(i).uid.load() != kUid) return "it holds another sample";
        for (uint32_t k = 0; k < want.segments; ++k)
            if (!test::pattern_holds(*w.seg, i, "tokens", uint8_t(k), kUid + k)) return "a segment is torn";
    }
    if (used != (want.state != S::FREE)) return std::to_string(used) + " slots are in use";
    for (uint32_t i = 1; i < w.seg->shape.n_procs; ++i)
        if (i != w.me() && is_live(w.seg->proc(i).ident.load())) return "entry " + std::to_string(i) + " is not free";
    if (used == 0 && test::memory_of(*w.seg) != kept_bytes(w.seg->shape)) return "a free slot has kept its memory";
    const uint8_t fate = w.fates.train->get(kUid);
    return fate == want.fate ? "" : "its fate is " + std::to_string(fate);
}

void end_the_sample(test::World& w) {
    if (w.fates.train->get(kUid) == 0) CHECK(w.dispatch(kUid));
    for (const Held& h : take(*w.seg, w.me(), {S::QUEUED, S::GENERATING, -1, 9, 255}))
        CHECK(release(*w.seg, w.me(), h.slot, h.word, S::GENERATED) != 0);
    for (const Held& h : take(*w.seg, w.me(), {S::GENERATED, S::REWARDING, -1, 9, 0}))
        CHECK(release(*w.seg, w.me(), h.slot, h.word, S::REWARDED) != 0);
    for (const Held& h : take(*w.seg, w.me(), {S::REWARDED, S::TRAINING, -1, 9, 0}))
        CHECK(finish(*w.seg, w.me(), w.fates, h.slot, h.word, 'T'));
}

// Is the sample past its commit point at this step of this scenario? Either is right at a step that this does not know.
bool may_be_before(const Scenario& s, const std::string& point) {
    if (s.after.state == S::FREE && s.after.fate == 'f') return point != "drop.cas" && point != "drop.fate";
    for (const char* done : {"dispatch.fate", "dispatch.queued", "commit.after", "release.after", "finish.free"})
        if (point == done) return false;
    return true;
}
bool may_be_after(const Scenario& s, const std::string& point) {
    if (!may_be_before(s, point) || s.victim) return true;
    for (const char* early :
         {"register.", "dispatch.", "claim.cas", "take.claimed", "cut.", "commit.before", "release.before"})
        if (point.rfind(early, 0) == 0) return false;
    return true;
}

std::string try_once(const Scenario& s, size_t index, const std::string& point, int count, bool& killed) {
    test::World w({8, 8, kLooseFrom});  // answers are long: see skip_kept
    bring_to(w, s.start, s.segments);
    if (s.victim && !dies(w.place.folder, "victim", index, s.victim, 1)) return "the victim lived";
    killed = dies(w.place.folder, "child", index, point, count);
    if (!killed) return "";
    reap(*w.seg, w.fates, w.me());
    finish_drops(*w.seg, w.fates);
    trim_all(*w.seg, w.me(), 0);
    for (uint32_t i = 1; i < w.seg->shape.n_procs; ++i)  // the next keeper: no death removes a remote entry
        if (is_remote(w.seg->proc(i).ident.load())) leave_remote(*w.seg, i);
    Rest before = s.before;
    if (point == "finish.fate") before.fate = 'T';
    std::string wrong = may_be_before(s, point) ? differs(w, before) : "not past its commit";
    if (!wrong.empty() && may_be_after(s, point)) wrong = differs(w, s.after);
    if (!wrong.empty()) return wrong;
    end_the_sample(w);
    trim_all(*w.seg, w.me(), 0);
    return differs(w, s.after.fate == 'f' && w.fates.train->get(kUid) == 'f' ? kDropped : kTrained);
}

std::map<std::string, int>& deaths() {
    static std::map<std::string, int> all;
    return all;
}

// All steps of one scenario; a point is tried a second and a third time while the child still gets there.
void try_scenario(size_t index) {
    const Scenario& s = kScenarios[index];
    int died = 0;
    for (const std::string point : kPoints) {
        bool killed = true;
        for (int count = 1; killed; ++count) {
            const std::string wrong = try_once(s, index, point, count, killed);
            if (!wrong.empty())
                throw test::Failure{std::string("a process that ") + s.name + ", killed at " + point + ":" +
                                    std::to_string(count) + ": " + wrong};
            died += killed;
            deaths()[point] += killed;
        }
    }
    CHECK(died > 0);
}

int act(int argc, char** argv) {
    if (argc != 4) return 2;
    const Scenario& s = kScenarios[std::strtoul(argv[3], nullptr, 10)];
    Actor actor(argv[2]);
    if (std::strcmp(argv[1], "another") == 0)
        dispatch_another(actor);
    else if (std::strcmp(argv[1], "victim") == 0)
        be_victim(s, actor);
    else
        s.act(actor);
    return 0;
}

std::vector<std::string>& names() {
    static std::vector<std::string> all;
    return all;
}

}  // namespace

TEST("a uid left in a free slot is not revived by a later death") {
    test::World w;
    constexpr size_t kDispatches = 1;
    CHECK(dies(w.place.folder, "child", kDispatches, "dispatch.uid", 1));
    reap(*w.seg, w.fates, w.me());
    CHECK(state_of(load_word(*w.seg, 0)) == S::FREE && w.seg->line(0).uid == kUid);
    w.cursor = 1;
    const auto held = w.dispatch(kUid);
    CHECK(held && held->slot == 1);
    CHECK(dies(w.place.folder, "another", kDispatches, "dispatch.claimed", 1));
    reap(*w.seg, w.fates, w.me());
    CHECK(state_of(load_word(*w.seg, 0)) == S::FREE && state_of(load_word(*w.seg, 1)) == S::QUEUED);
}

int main(int argc, char** argv) {
    if (argc > 1) return act(argc, argv);
    for (size_t i = 0; i < std::size(kScenarios); ++i)
        names().push_back(std::string("a process that ") + kScenarios[i].name + " may be killed at each of its steps");
    for (size_t i = 0; i < std::size(kScenarios); ++i)
        test::cases().push_back({names()[i].c_str(), [i] { try_scenario(i); }});
    test::cases().push_back({"every crash point of the source has killed a process", [] {
                                 for (const char* point : kPoints)
                                     if (deaths()[point] == 0) throw test::Failure{std::string(point) + " killed none"};
                                 int all = 0;
                                 for (const auto& [point, count] : deaths()) all += count;
                                 std::printf("      %d deaths at %zu points\n", all, std::size(kPoints));
                             }});
    return test::run();
}
