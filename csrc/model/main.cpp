// Runs the models: `model quick`, `model full`, `model traces` (the controls alone; full and traces print the whole way
// to each failure), `model steps` (the crash points that the models know). Ends with 1 when anything is not as it
// should be.
//
//  * The protocol itself must hold in every configuration; every control, which breaks one rule of it, must fail in the
//    way that is written beside it.
//  * All arrows of kTransitions and of kCallTransitions must have been taken, no others of a call, and a process killed
//  after every named step.
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "call_model.hpp"
#include "hint_model.hpp"
#include "host_model.hpp"
#include "ledger_model.hpp"
#include "pair_model.hpp"
#include "slot_model.hpp"

using namespace model;

namespace {

struct Run {
    const char* name;
    const char* expected;  // nullptr: all rules hold; else what must be found wrong
    bool quick;
    std::function<Verdict(const char*)> explore;
};

template <class Model>
std::function<Verdict(const char*)> with(typename Model::Config config) {
    return [config](const char* only) {
        const Model model(config);
        return Explorer<Model>(model, only).run();
    };
}

// Model 6: its numbers, then whatever else is to be set.
using P = PairModel::Config;
using M = PairMutant;
std::function<Verdict(const char*)> pairs(
    uint8_t sides, uint8_t episodes, uint8_t deaths, uint8_t accidents, void (*more)(P&) = [](P&) {}) {
    P config;
    config.sides = sides, config.episodes = episodes, config.deaths = deaths, config.accidents = accidents;
    more(config);
    return with<PairModel>(config);
}
void room_in_1(P& p) {
    p.room[1] = 1;
}
void start(P& p) {
    p.starts = 1;
}
void starts(P& p) {
    p.starts = 2;
}
void finishes(P& p) {
    p.finishes = p.starts = p.room[0] = 1;
}
void two_finish(P& p) {
    p.finishes = 2;
}
void whole(P& p) {
    p.whole = 1;
}
void apart(P& p) {
    whole(p), p.mutant = M::SECOND_APART;
}
template <uint8_t Closes>
void halves(P& p) {
    p.starts = 2, p.closes = Closes, p.holders = 1;
}
void halves_of_two(P& p) {
    halves<3>(p), p.holders = 2;
}
template <PairMutant Mutant>
void mutant(P& p) {
    p.mutant = Mutant;
}

std::vector<Run> protocol() {
    using L = LedgerModel;
    return {
        {"slot: 3 entries, 1 slot, 1 sample", nullptr, false, with<SlotModel>({1, 3, 1, false, false, 0})},
        {"slot: 2 entries, 2 slots, 2 samples", nullptr, false, with<SlotModel>({2, 2, 2, false, false, 0})},
        {"ledger: 4 slots, at most 2 deaths", nullptr, false, with<L>({4, true, true, LedgerMutant::NONE, 2})},
        {"ledger: 3 slots", nullptr, false, with<L>({3, true, true})},
        {"slot: 2 entries, 2 slots, 1 sample, drops", nullptr, true, with<SlotModel>({2, 2, 1, true, true, 0})},
        {"slot: 2 entries, 1 slot, 2 samples, drops", nullptr, true, with<SlotModel>({1, 2, 2, true, true, 0})},
        {"slot: 2 entries, 1 slot, 2 segments, drops", nullptr, true, with<SlotModel>({1, 2, 1, true, true, 2})},
        {"ledger: 2 slots", nullptr, true, with<L>({2, true, true})},
        {"hint: 3 processes, 2 slots", nullptr, true, with<HintModel>({})},
        {"calls: 1 death", nullptr, true, with<CallModel>({CallMutant::NONE, 1})},
        {"calls: 2 deaths", nullptr, true, with<CallModel>({})},
        {"hosts: 1 death, 3 messages", nullptr, true, with<HostModel>({})},
        {"hosts: the same, of one name", nullptr, true, with<HostModel>({1, 1, 1, 3, true})},
        {"hosts: 1 death, 4 messages, of one name", nullptr, false, with<HostModel>({1, 1, 1, 4, true})},
        {"hosts: 2 deaths, 2 messages", nullptr, false, with<HostModel>({1, 1, 2, 2})},
        {"pairs: no deaths", nullptr, true, pairs(2, 2, 0, 0)},
        {"pairs: 2 accidents of whole episodes", nullptr, true, pairs(2, 2, 0, 2, whole)},
        {"pairs: 1 death, 1 accident", nullptr, true, pairs(2, 2, 1, 1)},
        {"pairs: 2 deaths, 1 accident", nullptr, false, pairs(2, 2, 2, 1)},
        {"pairs: 3 deaths, 2 accidents, 1 episode", nullptr, true, pairs(2, 1, 3, 2)},
        {"pairs: the second row, room for one", nullptr, true, pairs(2, 2, 1, 1, room_in_1)},
        {"pairs: 2 starts, 1 death, 1 accident, 1 episode", nullptr, true, pairs(2, 1, 1, 1, starts)},
        {"pairs: a start without a ring", nullptr, true, pairs(2, 2, 0, 0, start)},
        {"pairs: 2 starts, the lead's group in halves", nullptr, true, pairs(2, 2, 0, 0, halves<1>)},
        {"pairs: the same of the other ledger", nullptr, true, pairs(2, 2, 0, 0, halves<2>)},
        {"pairs: the same of both", nullptr, true, pairs(2, 2, 0, 0, halves<3>)},
        {"pairs: the same, 2 holders, 1 death", nullptr, false, pairs(2, 2, 1, 0, halves_of_two)},
        {"pairs: a ledger finishes, 1 death, 1 start", nullptr, true, pairs(2, 2, 1, 0, finishes)},
        {"pairs: 3 sides, no deaths", nullptr, true, pairs(3, 2, 0, 0)},
        {"pairs: 3 sides, 1 accident of a whole episode", nullptr, true, pairs(3, 2, 0, 1, whole)},
        {"pairs: 3 sides, 1 death", nullptr, true, pairs(3, 2, 1, 0)},
        {"pairs: 3 sides, 2 deaths, 1 accident, 1 episode", nullptr, false, pairs(3, 1, 2, 1)},
        {"pairs: 3 sides, 2 finish, 1 death, 1 episode", nullptr, true, pairs(3, 1, 1, 0, two_finish)},
    };
}

template <uint8_t Closes>
void unknown(P& p) {
    halves<Closes>(p), p.mutant = M::CLOSED_UNKNOWN;
}
void across(P& p) {
    p.mutant = M::BY_ITSELF, p.room[0] = p.room[1] = p.first[1] = 1;
}
void waits_across(P& p) {
    across(p), p.mutant = M::WAITS;
}
void waits(P& p) {
    p.mutant = M::WAITS, p.holders = 1, p.room[0] = 2, p.room[1] = 1;
}
void counted(P& p) {
    finishes(p), p.starts = 0, p.mutant = M::FINISHED_COUNTS;
}

std::vector<Run> controls() {
    const auto slot = [](SlotMutant mutant) { return with<SlotModel>({1, 2, 1, true, false, 1, mutant}); };
    const auto slots = [](SlotMutant mutant) { return with<SlotModel>({2, 2, 2, false, false, 0, mutant}); };
    const auto hint = [](HintMutant mutant) { return with<HintModel>({mutant}); };
    const auto call = [](CallMutant mutant) { return with<CallModel>({mutant, 1}); };
    const auto host = [](HostMutant mutant) { return with<HostModel>({1, 1, 1, 3, false, mutant}); };
    const auto ledger = [](LedgerMutant mutant) { return with<LedgerModel>({2, true, true, mutant}); };
    return {
        {"reclaim by timeout", "torn", true, slot(SlotMutant::TIMEOUT)},
        {"no seq at claim", "a slot is taken from a living process", true, slot(SlotMutant::NO_SEQ)},
        {"no second look at the entry", "a slot is taken from a living process", true, slot(SlotMutant::NO_REREAD)},
        {"no group credit", "stuck", true, ledger(LedgerMutant::NO_CREDIT)},
        {"no roll-forward", "lost", true, slot(SlotMutant::NO_ROLL_FORWARD)},
        {"no roll-forward (ledger)", "lost", true, ledger(LedgerMutant::NO_ROLL_FORWARD)},
        {"no log check at claim", "trained twice", true, slot(SlotMutant::NO_LOG_CHECK)},
        {"no log check at claim (ledger)", "trained twice", true, ledger(LedgerMutant::NO_LOG_CHECK)},
        {"free before fate", "lost", true, slot(SlotMutant::FREE_FIRST)},
        {"free before fate, at a drop", "lost", true, slot(SlotMutant::DROP_FREE_FIRST)},
        {"free before fate, at a drop (ledger)", "lost", true, ledger(LedgerMutant::DROP_FREE_FIRST)},
        {"the uid counts without its seq", "doubled", true, slots(SlotMutant::NO_UID_CHECK)},
        {"a scheduler does not wait for its predecessor", "doubled", true, slots(SlotMutant::SUCCESSOR_RUSHES)},
        {"the same (ledger)", "doubled", true, ledger(LedgerMutant::SUCCESSOR_RUSHES)},
        {"the entry is freed before its slots", "leaked", true, slot(SlotMutant::ENTRY_FIRST)},
        {"a full table of the dead is not reaped", "stuck", true, slot(SlotMutant::GIVES_UP)},
        {"the checkpoint's records are trained again", "trained twice", true, ledger(LedgerMutant::REPLAY_ALL)},
        {"the log is cut before the checkpoint is whole", "a sample is called trained", true,
         ledger(LedgerMutant::LOG_CUT_FIRST)},
        {"a hint is cleared without a second look", "hidden", true, hint(HintMutant::NO_RECHECK)},
        {"a top hint is cleared without a second look", "hidden", true, hint(HintMutant::NO_TOP_RECHECK)},
        {"a hint is set before the slot has moved", "hidden", true, hint(HintMutant::HINT_FIRST)},
        {"no rescan after a death", "stuck", true, hint(HintMutant::NO_RESCAN)},
        {"calls: a slot is taken from a living engine", "torn", true, call(CallMutant::NO_PROOF)},
        {"calls: nobody frees those of a dead caller", "stuck", true, call(CallMutant::NO_ORPHANS)},
        {"calls: a caller is known by its index alone", "stuck", true, call(CallMutant::INDEX_ONLY)},
        {"calls: a reaper swaps without comparing", "torn", true, call(CallMutant::NO_REREAD)},
        {"calls: CALL_CANCEL without its seq", "lost", true, call(CallMutant::NO_BELL_SEQ)},
        {"hosts: a life joins a ring that it has no claims of", "an answer for another ring", true,
         host(HostMutant::NO_RING)},
        {"hosts: an answer counts by slot and uid", "an answer of another claim", true, host(HostMutant::UID_ALONE)},
        {"hosts: leases are a host's, not its claims'", "stuck", true, host(HostMutant::HOST_LEASE)},
        {"hosts: an answer counts after its lease", "an answer is taken after", true, host(HostMutant::LATE_TAKEN)},
        {"hosts: a new life has the claims of the last", "an answer of a life that is over", true,
         host(HostMutant::NO_LIFE)},
        {"hosts: a new satellite does not read its ring", "doubled", true, host(HostMutant::FORGETS)},
        {"hosts: again before its slot there is free", "doubled", true, host(HostMutant::EARLY)},
        {"hosts: what is late gets no answer", "stuck", true, host(HostMutant::SILENT)},
        {"pairs: the lead is dispatched first", "an episode is played without", true,
         pairs(2, 2, 0, 0, mutant<M::LEAD_FIRST>)},
        {"pairs: orphan = lead not queued", "an episode is played without", true,
         pairs(2, 2, 0, 0, mutant<M::NOT_QUEUED>)},
        {"pairs: a second try is past where there is none", "an episode is played without", true,
         pairs(2, 1, 0, 1, apart)},
        {"pairs: closed groups of ledger 0 are not known", "stuck", true, pairs(2, 2, 0, 0, unknown<1>)},
        {"pairs: closed groups of ledger 1 are not known", "stuck", true, pairs(2, 2, 0, 0, unknown<2>)},
        {"pairs: two schedulers, a holder waits", "stuck", true, pairs(2, 2, 0, 0, waits)},
        {"pairs: the same in other orders", "stuck", true, pairs(2, 2, 0, 0, waits_across)},
        {"pairs: the same, and no holder waits", "an episode is played without", true, pairs(2, 2, 0, 0, across)},
        {"pairs: a side is taken from a living holder", "taken", true, pairs(2, 2, 0, 0, mutant<M::NO_PROOF>)},
        {"pairs: a reaper swaps without comparing", "an episode is played more often", true,
         pairs(2, 1, 1, 0, mutant<M::NO_REREAD>)},
        {"pairs: a finished ledger has to have room", "stuck", true, pairs(2, 2, 0, 0, counted)},
    };
}

struct Report {
    std::mutex lock;
    Coverage seen;
    int failed = 0;
    bool traces = false;

    void add(const Run& run, const Verdict& v) {
        const std::lock_guard<std::mutex> guard(lock);
        const bool good = run.expected ? v.wrong.rfind(run.expected, 0) == 0 : v.wrong.empty();
        failed += !good;
        const std::string found = v.wrong.empty() ? "all rules hold, the end is reachable from every state"
                                                  : v.wrong + ", after " + std::to_string(v.trace.size()) + " steps";
        std::printf("%s  %-48s %9zu states %10zu steps %6.1f s  %s\n", good ? "ok  " : "FAIL", run.name, v.states,
                    v.steps, v.seconds, found.c_str());
        if (traces || (!good && !v.wrong.empty()))
            for (const std::string& line : v.trace) std::printf("        %s\n", line.c_str());
        std::fflush(stdout);
    }

    using S = busrl::State;

    // Only the protocol itself counts as coverage: a mutant may go where it should not.
    void check_coverage() {
        for (const busrl::Transition& t : busrl::kTransitions)
            if (seen.arrows[uint32_t(t.from)][uint32_t(t.to)] == 0) {
                std::printf("FAIL  no model takes the arrow %s -> %s\n", busrl::name_of(t.from), busrl::name_of(t.to));
                ++failed;
            }
        for (uint32_t a = 0; a < busrl::kStates; ++a)
            for (uint32_t b = 0; b < busrl::kStates; ++b)
                if ((seen.calls[a][b] != 0) != busrl::is_allowed(S(a), S(b), busrl::Machine::calls)) {
                    std::printf("FAIL  the arrow %s -> %s of a call is %s\n", busrl::name_of(S(a)),
                                busrl::name_of(S(b)), seen.calls[a][b] ? "not in its table" : "taken by no model");
                    ++failed;
                }
        for (size_t i = 0; i < kStepCount; ++i)
            if (!seen.killed_after[i]) {
                std::printf("FAIL  no model kills a process after %s\n", std::string(kSteps[i]).c_str());
                ++failed;
            }
        if (failed == 0)
            std::printf("ok    all %zu arrows of the tables were taken, and a process killed after each of %zu steps\n",
                        std::size(busrl::kTransitions) + std::size(busrl::kCallTransitions), kStepCount);
    }
};

void run_all(const std::vector<Run>& runs, Report& report, bool cover) {
    std::atomic<size_t> next{0};
    auto work = [&] {
        coverage() = {};
        for (size_t i = next++; i < runs.size(); i = next++) report.add(runs[i], runs[i].explore(runs[i].expected));
        const std::lock_guard<std::mutex> guard(report.lock);
        if (cover) report.seen.merge(coverage());
    };
    std::thread other(work);
    work();
    other.join();
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "full";
    if (what == "steps") {
        for (std::string_view step : kSteps) std::printf("%.*s\n", int(step.size()), step.data());
        return 0;
    }
    if (what != "quick" && what != "full" && what != "traces") {
        std::fprintf(stderr, "usage: model [quick | full | traces | steps]\n");
        return 2;
    }
    Report report;
    report.traces = what != "quick";
    if (what != "traces") {
        std::vector<Run> runs;
        for (const Run& run : protocol())
            if (run.quick || what == "full") runs.push_back(run);
        run_all(runs, report, true);
        report.check_coverage();
    }
    run_all(controls(), report, false);
    std::printf("%s\n", report.failed ? "some models are not as they should be" : "all models are as they should be");
    return report.failed != 0;
}
