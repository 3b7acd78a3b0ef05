// One mapping of the segment: made under no name and linked when ready, or attached after its header was checked.
//
//  * No half-built segment is ever visible: the final name appears by link(2), which fails if it is taken.
//  * Memory is allocated by the creator, so a full /dev/shm is an error at start, not SIGBUS later; but for the far
//    parts of large slots, which are allocated before they are written (loose.hpp).
//  * The header is copied once, checked, and never read again: `shape` is private memory.
// Talks to the file system; knows nothing of states.
#pragma once

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include <cstdio>
#include <memory>

#include "busrl/errors.hpp"
#include "busrl/fork_guard.hpp"
#include "busrl/loose.hpp"

namespace busrl {

struct Geometry {
    uint32_t n_slots;
    uint32_t n_procs;  // entry 0 is never used
    uint64_t slot_bytes;
};

inline uint64_t hint_off(const HeaderFixed& h) {
    return align_up(h.line_off + uint64_t(h.n_slots) * sizeof(Line), 4096);
}

inline HeaderFixed plan(const Geometry& g, const std::array<uint8_t, 16>& uuid, Machine machine = Machine::samples) {
    if (g.n_slots < 1 || g.n_slots > 1u << 20)
        throw Error(Fault::general, "slots must be 1 .. 1048576, got " + std::to_string(g.n_slots));
    if (g.n_procs < 2 || g.n_procs > kMaxOwner + 1)
        throw Error(Fault::general, "processes must be 2 .. 16384, got " + std::to_string(g.n_procs));
    if (g.slot_bytes < kTensorAlign || g.slot_bytes > uint64_t{1} << 40)
        throw Error(Fault::general, "slot_bytes must be 64 .. 2**40, got " + std::to_string(g.slot_bytes));
    HeaderFixed h{};
    h.magic = kMagic[uint32_t(machine)];
    h.layout_major = kLayoutMajor;
    h.layout_minor = kLayoutMinor;
    std::memcpy(h.uuid, uuid.data(), 16);
    std::memcpy(h.boot_id, boot_id().data(), 16);
    h.pid_ns = pid_namespace();
    h.n_slots = g.n_slots;
    h.n_procs = g.n_procs;
    h.slot_bytes = align_up(g.slot_bytes, kTensorAlign);
    h.slot_stride = align_up(h.slot_bytes, 256);
    h.proc_off = sizeof(Header);
    h.line_off = align_up(h.proc_off + uint64_t(g.n_procs) * sizeof(ProcEntry), 4096);
    h.table_off = align_up(hint_off(h) + kHintStates * hint_bytes(g.n_slots), 4096);
    h.data_off = align_up(h.table_off + uint64_t(g.n_slots) * sizeof(TensorTable), 4096);
    h.total_bytes = align_up(h.data_off + uint64_t(g.n_slots) * h.slot_stride, 4096);
    return h;
}

// The command as it can be typed.
inline std::string removal(const std::string& path, bool force) {
    return "remove it with `busrl ring clean " + path.substr(path.rfind('/') + 1) + (force ? " --force`" : "`");
}

// A private copy of a header is right when it is exactly what this library would have planned for its numbers.
// Every refusal says what was expected, what was found, and what to do.
inline void check_header(const HeaderFixed& h, uint32_t crc, uint32_t ready, uint64_t file_bytes,
                         const std::string& path, Machine machine = Machine::samples) {
    const auto wanted = uint32_t(machine), other = 1 - wanted;
    const std::string kRemove = "; " + removal(path, true) + " (what was in its slots is generated again)";
    auto refuse = [&](Fault fault, const std::string& why) { throw Error(fault, "ring " + path + ": " + why); };
    if (h.magic == kMagic[other])
        refuse(Fault::corrupt, std::string("its slots hold ") + kHolds[other] + ", not " + kHolds[wanted] +
                                   "; give the name of the run's other ring");
    if (h.magic != kMagic[wanted])
        refuse(Fault::corrupt, "not a busrl ring: its first bytes are " + hex_of(&h.magic, 8) + ", expected " +
                                   hex_of(&kMagic[wanted], 8) + " (" + kMagicText[wanted] +
                                   "); give the name that `busrl ring list` shows, or" + kRemove.substr(1));
    if (h.layout_major != kLayoutMajor)
        refuse(Fault::layout, "layout version " + std::to_string(h.layout_major) + ", this library reads " +
                                  std::to_string(kLayoutMajor) + "; use the busrl that made it, or" +
                                  kRemove.substr(1));
    const uint32_t sum = crc32c(&h, sizeof(h));
    if (crc != sum)
        refuse(Fault::corrupt, "its header checksum is wrong: the header says " + hex_of(&crc, 4) +
                                   ", its bytes give " + hex_of(&sum, 4) + kRemove);
    if (ready != 1)
        refuse(Fault::corrupt, "it was never finished: `ready` is " + std::to_string(ready) + ", expected 1" + kRemove);
    if (h.total_bytes != file_bytes)
        refuse(Fault::corrupt, "the header says " + std::to_string(h.total_bytes) + " bytes, the file has " +
                                   std::to_string(file_bytes) + kRemove);
    std::array<uint8_t, 16> uuid;
    std::memcpy(uuid.data(), h.uuid, 16);
    HeaderFixed want;
    try {
        want = plan({h.n_slots, h.n_procs, h.slot_bytes}, uuid, machine);
    } catch (const Error& e) {
        refuse(Fault::corrupt, e.what() + std::string(kRemove));
    }
    const struct {
        const char* name;
        uint64_t found, expected;
    } rules[] = {{"proc_off", h.proc_off, want.proc_off},          {"line_off", h.line_off, want.line_off},
                 {"table_off", h.table_off, want.table_off},       {"data_off", h.data_off, want.data_off},
                 {"slot_stride", h.slot_stride, want.slot_stride}, {"slot_bytes", h.slot_bytes, want.slot_bytes},
                 {"total_bytes", h.total_bytes, want.total_bytes}};
    for (const auto& rule : rules)
        if (rule.found != rule.expected)
            refuse(Fault::corrupt, std::string("its offsets do not follow from its slot and process counts: ") +
                                       rule.name + " is " + std::to_string(rule.found) + ", expected " +
                                       std::to_string(rule.expected) + kRemove);
    if (std::memcmp(want.boot_id, h.boot_id, 16) != 0)
        refuse(Fault::stale, "made before the last boot of this machine (boot " + hex_of(h.boot_id, 16) + ", now " +
                                 hex_of(want.boot_id, 16) + ")" + kRemove);
}

// Whoever may write the file may change what we map; whoever made it with holes may kill us with SIGBUS at a touch.
// A file that is cut after this look still can: only its owner may cut it, and the next start says what was cut.
inline void check_file(const struct stat& info, const std::string& path) {
    auto refuse = [&](const std::string& why) { throw Error(Fault::corrupt, "ring " + path + ": " + why); };
    if (!S_ISREG(info.st_mode)) refuse("not a regular file; give the name that `busrl ring list` shows");
    if (info.st_uid != ::geteuid())
        refuse("it belongs to user " + std::to_string(info.st_uid) + ", not to you (" + std::to_string(::geteuid()) +
               "); a ring is only for its maker: have it removed by that user or by root, or use another name or run "
               "directory");
    if (uint64_t(info.st_size) < sizeof(Header))
        refuse("it has " + std::to_string(info.st_size) + " bytes, a ring has at least " +
               std::to_string(sizeof(Header)) + "; " + removal(path, true));
}

inline void check_holes(int fd, const struct stat& info, const HeaderFixed& shape, const std::string& path) {
    struct statfs where;
    const bool in_memory = ::fstatfs(fd, &where) == 0 && where.f_type == TMPFS_MAGIC;
    const uint64_t kept = kept_bytes(shape), found = uint64_t(info.st_blocks) * 512;
    if (in_memory && found < kept)
        throw Error(Fault::corrupt, "ring " + path + ": it has holes: " + std::to_string(found) +
                                        " bytes are allocated, a ring of this shape has at least " +
                                        std::to_string(kept) + "; " + removal(path, true));
}

// After the content, so that a file that is no ring is called that.
inline void check_mode(const struct stat& info, const std::string& path) {
    if ((info.st_mode & 0077) == 0) return;
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", unsigned(info.st_mode & 07777));
    throw Error(Fault::corrupt, "ring " + path + ": its mode is " + mode +
                                    ", expected 0600: others may have changed it; if you trust what is in it, "
                                    "`chmod 600` it, else " +
                                    removal(path, true));
}

class Segment : public ForkGuarded {
  public:
    static std::string path_of(const std::string& name) {
        return name.find('/') == std::string::npos ? "/dev/shm/" + name : name;
    }

    static std::shared_ptr<Segment> create(const std::string& name, const Geometry& geometry,
                                           const std::array<uint8_t, 16>& uuid, Machine machine = Machine::samples) {
        const std::string path = path_of(name);
        const std::string folder = path.substr(0, path.rfind('/') + 1);
        const HeaderFixed shape = plan(geometry, uuid, machine);
        if (::access(path.c_str(), F_OK) == 0) throw already_there(path);
        refuse_if_too_small(folder, kept_bytes(shape));
        File file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
        std::string draft;  // where O_TMPFILE is unknown, a hidden name in the same folder
        if (!file) {
            draft = folder + "." + path.substr(folder.size()) + "." + std::to_string(getpid()) + ".tmp";
            ::unlink(draft.c_str());
            file = File(::open(draft.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
        }
        if (!file) throw Error(Fault::general, errno_text("cannot make a ring in " + folder));
        try {
            ::fchmod(file.fd(), 0600);
            const int code = allocate_kept(file.fd(), shape);
            if (code == ENOSPC) throw too_small(folder, kept_bytes(shape), free_bytes(folder));
            errno = code;
            if (code != 0) throw Error(Fault::general, errno_text("cannot allocate the ring " + path));
            auto segment = std::make_shared<Segment>(Key{}, std::move(file), shape, path, false);
            segment->build();
            segment->link_as(path, draft);
            if (!draft.empty()) ::unlink(draft.c_str());
            return segment;
        } catch (...) {
            if (!draft.empty()) ::unlink(draft.c_str());
            throw;
        }
    }

    static std::shared_ptr<Segment> attach(const std::string& name, bool read_only,
                                           Machine machine = Machine::samples) {
        const std::string path = path_of(name);
        File file(::open(path.c_str(), (read_only ? O_RDONLY : O_RDWR) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
        if (!file)
            throw Error(errno == ENOENT ? Fault::missing : Fault::general, errno_text("cannot open the ring " + path));
        struct stat info;
        if (::fstat(file.fd(), &info) != 0) throw Error(Fault::general, errno_text("cannot inspect the ring " + path));
        check_file(info, path);
        struct {
            HeaderFixed fixed;
            uint32_t crc, ready;
        } copy;
        static_assert(sizeof(copy) == 0x80);
        if (::pread(file.fd(), &copy, sizeof(copy), 0) != ssize_t(sizeof(copy)))
            throw Error(Fault::corrupt, errno_text("cannot read the header of the ring " + path));
        check_header(copy.fixed, copy.crc, copy.ready, uint64_t(info.st_size), path, machine);
        check_mode(info, path);
        check_holes(file.fd(), info, copy.fixed, path);
        auto segment = std::make_shared<Segment>(Key{}, std::move(file), copy.fixed, path, read_only);
        // [READY observe] acquire, pairs with [READY publish]: everything the creator wrote is visible.
        if (segment->header().ready.load(std::memory_order_acquire) != 1)
            throw Error(Fault::corrupt, "ring " + path + ": it was never finished");
        return segment;
    }

    static bool unlink(const std::string& name) {
        if (::unlink(path_of(name).c_str()) == 0) return true;
        if (errno == ENOENT) return false;
        throw Error(Fault::general, errno_text("cannot remove the ring " + path_of(name)));
    }

    Machine machine() const { return shape.magic == kMagic[1] ? Machine::calls : Machine::samples; }
    Header& header() const { return *at<Header>(0); }
    WakeLine& wake(State state) const { return header().wake[uint32_t(state)]; }
    ProcEntry& proc(uint32_t index) const { return at<ProcEntry>(shape.proc_off)[index]; }
    Line& line(uint32_t slot) const { return at<Line>(shape.line_off)[slot]; }
    HintMap hints(State state) const {
        uint8_t* map = base_ + hint_off_ + hint_index(state) * hint_bytes(shape.n_slots);
        return {reinterpret_cast<U64*>(map), reinterpret_cast<U64*>(map + leaf_bytes(shape.n_slots))};
    }
    TensorTable& table(uint32_t slot) const { return at<TensorTable>(shape.table_off)[slot]; }
    uint8_t* payload(uint32_t slot) const { return base_ + shape.data_off + uint64_t(slot) * shape.slot_stride; }
    void count(Counter which) const { header().counters[which].value.fetch_add(1, std::memory_order_relaxed); }

    bool in_forked_child() const { return forked_; }
    int fd() const { return file_.fd(); }
    // Another description of the same file: only with its own can a process hold a byte lock of its own.
    File reopen() const {
        const std::string self = "/proc/self/fd/" + std::to_string(file_.fd());
        File again(::open(self.c_str(), O_RDWR | O_CLOEXEC));
        if (!again) throw Error(Fault::general, errno_text("cannot open the lock descriptor of the ring " + path));
        return again;
    }

    const HeaderFixed shape;  // checked private copy
    const std::string path;
    const bool read_only;

  private:
    struct Key {};

  public:
    Segment(Key, File file, const HeaderFixed& shape, std::string path, bool read_only)
        : shape(shape),
          path(std::move(path)),
          read_only(read_only),
          hint_off_(busrl::hint_off(shape)),
          file_(std::move(file)) {
        const int access = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
        // Populating holes would allocate them.
        const int populate = has_loose(shape) ? 0 : MAP_POPULATE;
        void* where = ::mmap(nullptr, shape.total_bytes, access, MAP_SHARED | populate, file_.fd(), 0);
        if (where == MAP_FAILED) throw Error(Fault::general, errno_text("cannot map the ring " + this->path));
        base_ = static_cast<uint8_t*>(where);
        ::madvise(base_, shape.total_bytes, MADV_DONTFORK);
        guard();
    }
    ~Segment() override {
        unguard();
        ::munmap(base_, shape.total_bytes);
    }

  private:
    template <class T>
    T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(base_ + offset);
    }

    void build() {
#ifdef MADV_POPULATE_WRITE
        // best effort: the pages are allocated already
        ::madvise(base_, has_loose(shape) ? shape.data_off : shape.total_bytes, MADV_POPULATE_WRITE);
#endif
        Header& h = header();
        h.fixed = shape;
        h.crc32c = crc32c(&shape, sizeof(shape));
        for (uint32_t i = 0; i < shape.n_slots; ++i) {
            // seq starts at 1: the word 0 never stands in a slot, so it can mean "lost" in every answer.
            line(i).word.store(make_word(State::FREE, 0, 0, 1), std::memory_order_relaxed);
            line(i).uid.store(kUidNone, std::memory_order_relaxed);
            const HintMap map = hints(State::FREE);
            map.leaf[i / 64].fetch_or(uint64_t{1} << (i % 64), std::memory_order_relaxed);
            map.top[i / 4096].fetch_or(uint64_t{1} << (i / 64 % 64), std::memory_order_relaxed);
        }
        // [READY publish] release by the creator, pairs with [READY observe].
        h.ready.store(1, std::memory_order_release);
    }

    void link_as(const std::string& final_path, const std::string& draft) const {
        const std::string self = draft.empty() ? "/proc/self/fd/" + std::to_string(file_.fd()) : draft;
        if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, final_path.c_str(), AT_SYMLINK_FOLLOW) == 0) return;
        if (errno == EEXIST) throw already_there(final_path);
        throw Error(Fault::general, errno_text("cannot name the ring " + final_path));
    }

    static Error already_there(const std::string& path) {
        return Error(Fault::exists,
                     "ring " + path + " exists; attach to it to adopt the run, or " + removal(path, false));
    }
    static uint64_t free_bytes(const std::string& folder) {
        struct statvfs info;
        return ::statvfs(folder.c_str(), &info) == 0 ? uint64_t(info.f_bavail) * info.f_frsize : ~uint64_t{0};
    }
    static Error too_small(const std::string& folder, uint64_t needed, uint64_t available) {
        return Error(Fault::shm_too_small,
                     "the ring needs " + std::to_string(needed) + " bytes, " + folder + " has " +
                         std::to_string(available) + " free; lower ring.slots or ring.slot_bytes, or enlarge it " +
                         "(mount -o remount,size=..., docker run --shm-size=...)",
                     needed, available);
    }
    static void refuse_if_too_small(const std::string& folder, uint64_t needed) {
        const uint64_t available = free_bytes(folder);
        if (available < needed) throw too_small(folder, needed, available);
    }

    void in_child() noexcept override {
        forked_ = true;
        file_.close();
        ::mmap(base_, shape.total_bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }

    const uint64_t hint_off_;
    File file_;
    uint8_t* base_ = nullptr;
    bool forked_ = false;
};

}  // namespace busrl
