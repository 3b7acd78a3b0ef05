// The process table: registration, and the proof that a process is dead.
//
//  * An entry belongs to whoever holds the byte lock of its index (open-file-description lock on the segment file,
//    byte = index). The lock is taken first; then one CAS stores pid and epoch together.
//  * Dead = that lock is free AND, where the pid is visible, it is gone, has another start time, or is a zombie.
//    Death is final: once proven for (pid, epoch) it stays true, so reapers may act on it late.
//  * A remote entry (remote.hpp) has no process here, so there is never proof of its death.
//  * Entry 0 is never used: owner 0 means nobody.
// Talks to /proc and fcntl; knows nothing of slots.
#pragma once

#include <csignal>

#include "busrl/crash.hpp"
#include "busrl/segment.hpp"

namespace busrl {

struct StatLine {
    bool found;
    char state;
    uint64_t start_ticks;
};

// State and start time from /proc/<pid>/stat; the name in it may hold anything, so parse after the last ')'.
inline StatLine read_stat(uint32_t pid) {
    const std::string text = read_small(("/proc/" + std::to_string(pid) + "/stat").c_str());
    size_t at = text.rfind(')');
    if (at == std::string::npos || at + 2 >= text.size()) return {false, 0, 0};
    const char state = text[at + 2];
    for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
    return {true, state, at == std::string::npos ? 0 : std::strtoull(text.c_str() + at, nullptr, 10)};
}

namespace detail {
inline struct flock byte_of(uint32_t index) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = off_t(index);
    lock.l_len = 1;
    return lock;
}
}  // namespace detail

// Is the byte of this entry held by any other open file description than `fd`'s own?
inline bool byte_is_held(int fd, uint32_t index) {
    struct flock lock = detail::byte_of(index);
    if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) throw Error(Fault::general, errno_text("cannot probe a liveness lock"));
    return lock.l_type != F_UNLCK;
}

// True only with proof. On true, `*proven` is the ident that is dead.
inline bool proven_dead(const Segment& seg, uint32_t index, uint64_t* proven) {
    ProcEntry& entry = seg.proc(index);
    // [ENTRY read] acquire, pairs with [ENTRY publish]: the fields below belong to this ident.
    const uint64_t ident = entry.ident.load(std::memory_order_acquire);
    const uint64_t start = entry.start_ticks.load(std::memory_order_acquire);
    const uint64_t pid_ns = entry.pid_ns.load(std::memory_order_acquire);
    if (!is_live(ident) || is_remote(ident) || byte_is_held(seg.fd(), index)) return false;
    if (pid_ns == pid_namespace()) {
        const StatLine now = read_stat(pid_of(ident));
        const bool gone = now.found ? now.start_ticks != start || now.state == 'Z' || now.state == 'X'
                                    : ::kill(pid_t(pid_of(ident)), 0) != 0 && errno == ESRCH;
        if (!gone) return false;
    }
    // [ENTRY read] again, pairs with [ENTRY retire].
    if (entry.ident.load(std::memory_order_acquire) != ident) return false;  // reaped and reused meanwhile
    *proven = ident;
    return true;
}

// Fills an entry that nobody sees yet: its lock is held and its ident is not live.
inline void describe_entry(ProcEntry& e, const std::string& role, const std::string& label, uint64_t start,
                           uint64_t pid_ns) {
    const uint64_t now = monotonic_ns();
    for (U64* zero : {&e.progress, &e.deadline_ns, &e.busy_ns, &e.idle_ns, &e.tokens, &e.samples, &e.version})
        zero->store(0, std::memory_order_release);
    for (auto& wait : e.waits) wait.store(0, std::memory_order_release);
    e.ready.store(0, std::memory_order_release);
    e.start_ticks.store(start, std::memory_order_release);
    e.pid_ns.store(pid_ns, std::memory_order_release);
    for (U64* stamp : {&e.started_ns, &e.progress_ns, &e.activity_ns}) stamp->store(now, std::memory_order_release);
    store_text(e.role, role);
    store_text(e.label, label);
    store_text(e.activity, "starting");
}

class Membership : public ForkGuarded {  // this process's entry; giving it up is the destructor's job
  public:
    Membership(std::shared_ptr<Segment> segment, const std::string& role, const std::string& label)
        : seg_(std::move(segment)), lock_(seg_->reopen()) {
        for (uint32_t i = 1; i < seg_->shape.n_procs; ++i) {
            if (!try_take(i, role, label)) continue;
            guard();
            return;
        }
        throw Error(Fault::table_full,
                    "all " + std::to_string(seg_->shape.n_procs - 1) + " entries of the process table of " +
                        seg_->path + " are taken; raise ring.processes or stop unused monitors",
                    1, 0);
    }
    ~Membership() override {
        unguard();
        leave();
    }

    uint32_t index() const { return index_; }
    uint64_t ident() const { return ident_; }
    ProcEntry& entry() const { return seg_->proc(index_); }

    // Gives up the lock but not the entry: for an entry that still owns slots, which a reaper rests once we are gone.
    void abandon() {
        lock_.close();
        index_ = 0;
    }

    // Frees the entry, then the lock. The slots must have been handed back before.
    void leave() {
        if (index_ == 0 || !lock_) return;
        uint64_t mine = ident_;
        // [ENTRY retire] release, pairs with [ENTRY read].
        entry().ident.compare_exchange_strong(mine, make_ident(0, epoch_of(ident_), false), std::memory_order_acq_rel,
                                              std::memory_order_acquire);
        lock_.close();
        index_ = 0;
    }

  private:
    bool try_take(uint32_t i, const std::string& role, const std::string& label) {
        ProcEntry& e = seg_->proc(i);
        if (is_live(e.ident.load(std::memory_order_acquire))) return false;
        struct flock lock = detail::byte_of(i);
        if (::fcntl(lock_.fd(), F_OFD_SETLK, &lock) != 0) return false;
        crash_point("register.lock");
        uint64_t before = e.ident.load(std::memory_order_acquire);
        if (is_live(before)) {  // its owner died and nobody has reaped it: not ours to have
            lock.l_type = F_UNLCK;
            ::fcntl(lock_.fd(), F_OFD_SETLK, &lock);
            return false;
        }
        describe_entry(e, role, label, read_stat(uint32_t(getpid())).start_ticks, pid_namespace());
        const uint64_t mine = make_ident(uint32_t(getpid()), epoch_of(before) + 1, true);
        // [ENTRY publish] release, pairs with [ENTRY read]. The lock keeps every other registration away.
        if (!e.ident.compare_exchange_strong(before, mine, std::memory_order_acq_rel, std::memory_order_acquire))
            throw Error(Fault::corrupt, "process entry " + std::to_string(i) + " changed under its lock");
        index_ = i;
        ident_ = mine;
        crash_point("register.cas");
        return true;
    }

    void in_child() noexcept override {  // the entry stays the parent's
        lock_.close();
        index_ = 0;
    }

    std::shared_ptr<Segment> seg_;
    File lock_;
    uint32_t index_ = 0;
    uint64_t ident_ = 0;
};

}  // namespace busrl
