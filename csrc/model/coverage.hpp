// What the models have really done: every arrow of the tables in word.hpp that was taken, and every named step of csrc
// after which a process was killed. main.cpp fails when anything is left over; a test compares kSteps with the source.
#pragma once

#include <cstddef>
#include <iterator>
#include <string_view>

#include "busrl/word.hpp"

namespace model {

// The crash points of csrc, by the names that crash_point() has there.
inline constexpr std::string_view kSteps[] = {
    "register.lock", "register.cas",   "dispatch.claimed", "dispatch.reserved", "dispatch.written",
    "dispatch.uid",  "dispatch.fate",  "dispatch.queued",  "move.cas",          "move.hinted",
    "claim.cas",     "take.claimed",   "put.copied",       "put.stored",        "commit.before",
    "commit.after",  "release.before", "release.after",    "finish.fate",       "finish.free",
    "drop.cas",      "drop.fate",      "reap.before",      "reap.cas",          "reap.entry"};
constexpr size_t kStepCount = std::size(kSteps);

constexpr size_t step_of(std::string_view name) {
    for (size_t i = 0; i < kStepCount; ++i)
        if (kSteps[i] == name) return i;
    throw "no such step";  // in a constant expression: an error of the compiler
}

struct Coverage {
    uint64_t arrows[busrl::kStates][busrl::kStates] = {};
    uint64_t calls[busrl::kStates][busrl::kStates] = {};  // of the table of model calls
    bool killed_after[kStepCount + 1] = {};               // the last one is for places without a name

    void arrow(busrl::State from, busrl::State to) { ++arrows[uint32_t(from)][uint32_t(to)]; }
    void call_arrow(busrl::State from, busrl::State to) { ++calls[uint32_t(from)][uint32_t(to)]; }
    void merge(const Coverage& other) {
        for (uint32_t a = 0; a < busrl::kStates; ++a)
            for (uint32_t b = 0; b < busrl::kStates; ++b)
                arrows[a][b] += other.arrows[a][b], calls[a][b] += other.calls[a][b];
        for (size_t i = 0; i < kStepCount; ++i) killed_after[i] |= other.killed_after[i];
    }
};

inline Coverage& coverage() {
    thread_local Coverage mine;
    return mine;
}

}  // namespace model
