// A lock that says "this role runs here": an open-file-description lock on a file of the run directory.
//
//  * The kernel drops it when the last descriptor of that open is gone, so death needs no clean-up.
//  * The file holds the holder's pid for people; the lock itself is the truth.
//  * `inheritable` keeps the descriptor over exec(), on purpose: then the lock is free only when all children are gone.
#pragma once

#include <algorithm>

#include "busrl/errors.hpp"
#include "busrl/util.hpp"

namespace busrl {

class OfdLock {
  public:
    explicit OfdLock(std::string path) : path(std::move(path)) {}

    bool try_acquire() {
        if (held_) return true;
        if (!file_) file_ = File(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!file_) throw Error(Fault::general, errno_text("cannot open the lock " + path));
        struct flock lock = whole(F_WRLCK);
        if (::fcntl(file_.fd(), F_OFD_SETLK, &lock) != 0) {
            if (errno == EAGAIN || errno == EACCES) return false;
            throw Error(Fault::general, errno_text("cannot lock " + path));
        }
        held_ = true;
        const std::string pid = std::to_string(getpid()) + "\n";
        if (::ftruncate(file_.fd(), 0) != 0 || ::pwrite(file_.fd(), pid.data(), pid.size(), 0) < 0)
            return true;  // the pid is for people; a full disk must not stop a lock
        return true;
    }

    void release() {
        held_ = false;
        file_.close();
    }

    bool held() const { return held_; }
    int fd() const { return file_.fd(); }

    void set_inheritable(bool on) {
        if (!file_) throw Error(Fault::general, "lock " + path + ": acquire it before making it inheritable");
        if (::fcntl(file_.fd(), F_SETFD, on ? 0 : FD_CLOEXEC) != 0)
            throw Error(Fault::general, errno_text("cannot change the lock " + path));
    }
    bool inheritable() const { return file_ && (::fcntl(file_.fd(), F_GETFD) & FD_CLOEXEC) == 0; }

    // Pid of the process that took the lock, 0 if it is free, -1 if it is held but names nobody.
    long holder() const {
        if (held_) return getpid();
        File probe(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
        if (!probe) return 0;
        struct flock lock = whole(F_WRLCK);
        if (::fcntl(probe.fd(), F_OFD_GETLK, &lock) != 0)
            throw Error(Fault::general, errno_text("cannot probe " + path));
        if (lock.l_type == F_UNLCK) return 0;
        const long pid = std::strtol(read_small(path.c_str()).c_str(), nullptr, 10);
        return pid > 0 ? pid : -1;
    }

    // How long to wait before looking again: the kernel has no lock with a time-out.
    static uint64_t pause_ns(int attempt) {
        return std::min<uint64_t>(1'000'000ull << std::min(attempt, 6), 50'000'000);
    }

    const std::string path;

  private:
    static struct flock whole(short type) {
        struct flock lock{};
        lock.l_type = type;
        lock.l_whence = SEEK_SET;
        lock.l_len = 1;
        return lock;
    }
    File file_;
    bool held_ = false;
};

}  // namespace busrl
