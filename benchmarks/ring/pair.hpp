// What the programs of this folder share: clocks, two pinned processes, raw lines and futexes, one JSON line a figure.
// The raw primitives are written without the ring's library, since they are what it is compared with.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace bench {

inline double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) * 1e9 + double(t.tv_nsec);
}

inline void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core % int(sysconf(_SC_NPROCESSORS_ONLN)), &set);
    sched_setaffinity(0, sizeof(set), &set);
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("" ::: "memory");
#endif
}

inline void say(const char* name, double value, const char* unit) {
    std::printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}\n", name, value, unit);
    std::fflush(stdout);
}

// The median of the times of many short chunks: a chunk in which one side lost its core says nothing of the code.
class Chunks {
  public:
    void start() { began_ = now_ns(); }
    void stop() { spent_.push_back(now_ns() - began_); }
    double median() {
        std::nth_element(spent_.begin(), spent_.begin() + long(spent_.size() / 2), spent_.end());
        return spent_[spent_.size() / 2];
    }

  private:
    double began_ = 0;
    std::vector<double> spent_;
};

// Runs `other` in a child on core 1 and `timed` here on core 0.
inline void pair(const std::function<void()>& other, const std::function<void()>& timed) {
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // it spins: it must not outlive a failed parent
        pin(1);
        other();
        _exit(0);
    }
    pin(0);
    timed();
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) {
        std::fprintf(stderr, "the other process of a pair ended with %d\n", status);
        std::exit(1);
    }
}

struct Lines {  // shared between the two processes of a raw pair
    alignas(128) std::atomic<uint32_t> there;
    alignas(128) std::atomic<uint32_t> back;
    alignas(128) std::atomic<uint32_t> ready;
    alignas(4096) uint8_t bytes[4096];
};

inline Lines& lines() {
    static auto* one = static_cast<Lines*>(
        ::mmap(nullptr, sizeof(Lines), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    return *one;
}

inline void await(std::atomic<uint32_t>& line, uint32_t value) {
    while (line.load(std::memory_order_acquire) != value) relax();
}

inline long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    return syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

inline void sleep_until(std::atomic<uint32_t>& line, uint32_t value) {
    for (uint32_t seen; (seen = line.load(std::memory_order_acquire)) != value;) futex(line, FUTEX_WAIT, seen);
}

inline void store_and_wake(std::atomic<uint32_t>& line, uint32_t value) {
    line.store(value, std::memory_order_release);
    futex(line, FUTEX_WAKE, 1);
}

}  // namespace bench
