// Named places at which a test may kill this process: BUSRL_CRASH_POINT="name:count" raises SIGKILL the count-th
// time that the named step is reached. SIGKILL runs no handler, so what is left behind is what a real death leaves.
// Without the variable a crash point is one predictable branch. A topology sets it by [[faults.crash]].
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace busrl {

// Every name that crash_point() is called with, in the order of a sample's life; a test compares with the calls.
constexpr const char* kCrashPoints[] = {
    "register.lock", "register.cas",     "dispatch.claimed", "dispatch.reserved", "dispatch.written", "dispatch.uid",
    "dispatch.fate", "dispatch.queued",  "move.cas",         "move.hinted",       "claim.cas",        "take.claimed",
    "put.copied",    "put.stored",       "commit.before",    "commit.after",      "release.before",   "release.after",
    "finish.fate",   "finish.free",      "drop.cas",         "drop.fate",         "reap.before",      "reap.cas",
    "reap.entry",    "remote.described", "remote.entered",   "remote.rested",     "expire.before",    "cut.lowered",
    "cut.punched",   "trim.claimed",
};

class CrashPlan {
  public:
    static CrashPlan& get() {
        static CrashPlan plan;
        return plan;
    }
    bool armed() const { return name_ != nullptr; }

    void reach(const char* step) {
        if (std::strlen(step) != length_ || std::memcmp(step, name_, length_) != 0) return;
        if (left_.fetch_sub(1, std::memory_order_relaxed) == 1) kill(getpid(), SIGKILL);
    }

  private:
    CrashPlan() {
        const char* plan = std::getenv("BUSRL_CRASH_POINT");
        if (plan == nullptr || *plan == 0) return;
        const char* colon = std::strrchr(plan, ':');
        length_ = colon ? size_t(colon - plan) : std::strlen(plan);
        left_.store(colon ? std::atol(colon + 1) : 1, std::memory_order_relaxed);
        name_ = plan;
    }
    const char* name_ = nullptr;
    size_t length_ = 0;
    std::atomic<long> left_{0};  // of this process alone; relaxed: it counts, and orders nothing
};

inline void crash_point(const char* step) {
    if (__builtin_expect(CrashPlan::get().armed(), 0)) CrashPlan::get().reach(step);
}

}  // namespace busrl
