// The fate table: a file with one byte per sample, mapped by everybody, that says what became of it.
//
//  * Stores are idempotent and only move forward: D over 0; a reason only over D; T or V over anything; 0 only over D.
//    So any process may repeat any of them late.
//  * The file is never longer than what is allocated: a full disk is DiskFull at reserve(), never SIGBUS at a store.
// The file's length is the only other state; it has no header.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <memory>
#include <mutex>

#include "busrl/errors.hpp"
#include "busrl/util.hpp"

namespace busrl {

constexpr uint8_t kDispatched = 'D', kTrained = 'T', kValidated = 'V';
constexpr uint64_t kFateCapacity = uint64_t{1} << 32;  // samples that a table maps unless somebody says otherwise

class Fates {
  public:
    static constexpr uint64_t kChunk = 1 << 16;

    Fates(const std::string& path, bool create, uint64_t capacity, bool read_only = false)
        : path(path), capacity(align_up(capacity, kChunk)), read_only(read_only) {
        const int access = read_only ? O_RDONLY : O_RDWR;
        file_ = File(::open(path.c_str(), access | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0), 0600));
        if (!file_) throw Error(errno == ENOENT ? Fault::no_file : Fault::general, errno_text("cannot open " + path));
        void* where =
            ::mmap(nullptr, this->capacity, read_only ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd(), 0);
        if (where == MAP_FAILED) throw Error(Fault::general, unmapped(path, this->capacity));
        byte_ = static_cast<A<uint8_t>*>(where);
        refresh();
    }
    ~Fates() { ::munmap(static_cast<void*>(byte_), capacity); }
    Fates(const Fates&) = delete;
    Fates& operator=(const Fates&) = delete;

    uint8_t get(uint64_t i) {
        if (i >= size() && i >= refresh()) return 0;
        return byte_[i].load(std::memory_order_acquire);  // [FATE read] pairs with [FATE store]
    }

    // True if the byte is `code` afterwards.
    bool store(uint64_t i, uint8_t code) {
        if (read_only) throw Error(Fault::read_only, path + " is open read-only");
        if (code == 0 && i >= size() && i >= refresh()) return true;
        reserve(i + 1);
        uint8_t now = byte_[i].load(std::memory_order_acquire);
        while (now != code) {
            if (!may_replace(now, code)) return false;
            // [FATE store] acq_rel, pairs with [FATE read].
            if (byte_[i].compare_exchange_weak(now, code, std::memory_order_acq_rel, std::memory_order_acquire)) break;
        }
        return true;
    }

    static constexpr bool may_replace(uint8_t now, uint8_t code) {
        if (code == kTrained || code == kValidated) return true;
        if (code == kDispatched) return now == 0;
        return now == kDispatched;
    }

    // Allocates the first `upto` bytes. Only ever makes the file longer.
    void reserve(uint64_t upto) {
        if (upto <= size() || upto <= refresh()) return;
        if (upto > capacity)
            throw Error(Fault::fates, path + " maps " + std::to_string(capacity) + " samples, " + std::to_string(upto) +
                                          " are needed; open it with a larger capacity");
        const uint64_t target = align_up(upto, kChunk);
        const int code = allocate(file_.fd(), 0, target);
        errno = code;
        if (code == ENOSPC || code == EDQUOT || code == EFBIG)
            throw Error(Fault::disk_full, errno_text("no space for " + path), target, refresh());
        if (code != 0) throw Error(Fault::general, errno_text("cannot extend " + path));
        refresh();
    }

    void sync() const {
        if (::fdatasync(file_.fd()) != 0) throw Error(Fault::general, errno_text("cannot sync " + path));
    }

    uint64_t size() const { return size_.load(std::memory_order_acquire); }
    uint64_t refresh() {  // another process may have made it longer
        struct stat info;
        if (::fstat(file_.fd(), &info) != 0) throw Error(Fault::general, errno_text("cannot inspect " + path));
        const uint64_t now = std::min(uint64_t(info.st_size), capacity);
        size_.store(now, std::memory_order_release);
        return now;
    }
    const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(byte_); }

    const std::string path;
    const uint64_t capacity;
    const bool read_only;

  private:
    // Why the table cannot be mapped, from errno; a limit on address space is the common reason.
    static std::string unmapped(const std::string& path, uint64_t capacity) {
        const std::string text = errno_text("cannot map " + path);
        struct rlimit limit{};
        if (errno != ENOMEM || ::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return text;
        return text + ": it takes " + std::to_string(capacity >> 20) +
               " MiB of address space (not of memory), and each process of a run maps two such tables beside its own "
               "memory; the limit is " +
               std::to_string(limit.rlim_cur >> 20) + " MiB. Raise it where the run is started: `ulimit -v unlimited`";
    }

    File file_;
    A<uint8_t>* byte_ = nullptr;  // owner: nobody; every change is a CAS, acq_rel [FATE store], that only moves forward
    // Private to this process, shared by its threads: stored with release, loaded with acquire, so that who sees a
    // length may touch the bytes below it.
    std::atomic<uint64_t> size_{0};
};

struct FateBook {  // bit 62 of a uid says which table it is in
    std::shared_ptr<Fates> train;
    std::shared_ptr<Fates> validate;

    Fates* of(uint64_t uid) const { return uid & kUidValidate ? validate.get() : train.get(); }
    static uint64_t index(uint64_t uid) { return uid & ~kUidValidate; }

    Fates& must(uint64_t uid) const {
        if (Fates* table = of(uid)) return *table;
        throw Error(Fault::fates, std::string("no fate table is bound for ") +
                                      (uid & kUidValidate ? "validation" : "training") + " samples; call bind_fates");
    }
};

}  // namespace busrl
