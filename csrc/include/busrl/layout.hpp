// Every byte of the segment: header, wake lines, counters, process table, control lines, hints, tensor tables,
// payloads.
//
//  * Little endian, offsets from the start of the segment, never a pointer.
//  * A field that more than one process may touch is a lock-free atomic of its natural size.
//  * Fields are stored with release and loaded with acquire, so others see them in the program's order.
//  * At each atomic below stands its owner (who may write it), its ordering and its partner, by a label. An access in
//    the code that has no label of its own is of the kind that stands here; those that differ say so where they are.
//  * The static_asserts are the specification: the numbers in the documentation are checked here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "busrl/word.hpp"

namespace busrl {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the layout is little endian");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<uint16_t>::is_always_lock_free && std::atomic<uint8_t>::is_always_lock_free,
              "the ring needs lock-free atomics of 1 to 8 bytes");

template <class T>
using A = std::atomic<T>;
using U64 = A<uint64_t>;

// By Machine: the bytes "BUSRLRG1" and "BUSRLCL1". All else is laid out alike.
constexpr uint64_t kMagic[] = {0x3147524C52535542, 0x314C434C52535542};
constexpr const char* kMagicText[] = {"BUSRLRG1", "BUSRLCL1"};
constexpr const char* kHolds[] = {"samples", "model calls"};
constexpr uint32_t kLayoutMajor = 3;
constexpr uint32_t kLayoutMinor = 0;
constexpr uint64_t kUidNone = ~uint64_t{0};
constexpr uint64_t kUidValidate = uint64_t{1} << 62;  // set in the uid of a validation sample
constexpr uint8_t kNoSegment = 255;                   // a tensor that belongs to no segment
constexpr uint32_t kFlagAlone = 1u << 31;             // in Line::flags: the claimer holds nothing else

// ---------------------------------------------------------------- header, 0x000
struct HeaderFixed {  // written once by the creator, covered by crc32c, copied and checked by everybody else
    uint64_t magic;
    uint32_t layout_major;
    uint32_t layout_minor;
    uint64_t total_bytes;
    uint8_t uuid[16];
    uint8_t boot_id[16];
    uint64_t pid_ns;
    uint32_t n_slots;
    uint32_t n_procs;
    uint64_t proc_off;
    uint64_t line_off;
    uint64_t table_off;
    uint64_t data_off;
    uint64_t slot_stride;
    uint64_t slot_bytes;
};
static_assert(sizeof(HeaderFixed) == 0x78);
static_assert(offsetof(HeaderFixed, uuid) == 0x18 && offsetof(HeaderFixed, boot_id) == 0x28);
static_assert(offsetof(HeaderFixed, pid_ns) == 0x38 && offsetof(HeaderFixed, n_slots) == 0x40);
static_assert(offsetof(HeaderFixed, proc_off) == 0x48 && offsetof(HeaderFixed, line_off) == 0x50);
static_assert(offsetof(HeaderFixed, table_off) == 0x58 && offsetof(HeaderFixed, data_off) == 0x60);
static_assert(offsetof(HeaderFixed, slot_stride) == 0x68 && offsetof(HeaderFixed, slot_bytes) == 0x70);

constexpr const char* kHeaderWords[] = {"version", "version_step", "next_admission", "unpublished_groups",
                                        "hold",    "step",         "run_state",      "generation_pause"};
constexpr uint32_t kHeaderWordCount = sizeof(kHeaderWords) / sizeof(kHeaderWords[0]);

struct WakeLine {  // one per state, 128 bytes so that two states never share a pair of cache lines
    // How many slots ever entered this state; its low half is the futex word. Owner: nobody, every mover adds, seq_cst
    // [WAKE raise]; loaded acquire by who compares it with what it saw last, and by the kernel for [WAKE wait].
    U64 transitions;
    // A hint: 0 saves the wake-up call. Owner: nobody, each waiter adds 1 and takes it back, seq_cst [WAKE wait], pairs
    // with the load of [WAKE raise]; a reaper takes back what the dead had added.
    A<uint32_t> waiters;
    uint8_t pad[116];
};
static_assert(sizeof(WakeLine) == 128 && offsetof(WakeLine, transitions) == 0 && offsetof(WakeLine, waiters) == 8);

// Claims and commits have no counter of their own: two processes that pass slots to and fro would share its cache line.
// They follow from the transitions, see watch.cpp; kReturned is what else comes to rest there.
enum Counter : uint32_t { kReturned, kReaps, kDrops, kFinished, kDispatches, kTokens, kCounters };
struct CounterLine {
    U64 value;  // owner: nobody, all add; relaxed, without a partner: never used to decide
    uint8_t pad[56];
};
static_assert(sizeof(CounterLine) == 64);

// Words of the run, each stored with release and loaded with acquire, so that who sees a value sees what its writer
// had done before. Owners: version, version_step, step, unpublished_groups: the learner; next_admission: the scheduler;
// hold: the validator, by CAS acq_rel, since the keeper clears that of a dead one; run_state: learner and launch;
// generation_pause: launch before any child runs, then the learner, which clears bit 0, then launch again.
struct Header {
    HeaderFixed fixed;
    uint32_t crc32c;                // of `fixed`
    A<uint32_t> ready;              // 0x07C: 1 once all is in place; owner: creator [READY publish], [READY observe]
    U64 words[kHeaderWordCount];    // 0x080: named in kHeaderWords; owners below
    U64 rescanned_ns;               // 0x0C0: when the hints were last made anew; owner: nobody, [RESCAN stamp]
    uint8_t pad[0x100 - 0xC8];      // 0x0C8
    WakeLine wake[16];              // 0x100: index = state
    CounterLine counters[32];       // 0x900: index = Counter; for display, never for decisions
    U64 drops[64];                  // 0x1100: index = reason & 63; all add, relaxed, for display
    uint8_t pad2[0x2000 - 0x1300];  // 0x1300
};
static_assert(sizeof(Header) == 0x2000 && offsetof(Header, crc32c) == 0x78 && offsetof(Header, ready) == 0x7C);
static_assert(offsetof(Header, words) == 0x80 && offsetof(Header, rescanned_ns) == 0xC0);
static_assert(offsetof(Header, wake) == 0x100);
static_assert(offsetof(Header, counters) == 0x900 && offsetof(Header, drops) == 0x1100);
static_assert(kStates <= 16 && kCounters <= 32);

// ---------------------------------------------------------------- process table, proc_off
// ident = pid:32 | epoch:24 | flags:8 (bit 0 live, bit 1 remote). A free entry keeps its epoch, a registration raises
// it.
constexpr uint64_t make_ident(uint32_t pid, uint32_t epoch, bool live) {
    return uint64_t(pid) << 32 | uint64_t(epoch & 0xFFFFFF) << 8 | uint64_t(live);
}
constexpr uint32_t pid_of(uint64_t ident) {
    return uint32_t(ident >> 32);
}
constexpr uint32_t epoch_of(uint64_t ident) {
    return uint32_t(ident >> 8) & 0xFFFFFF;
}
constexpr bool is_live(uint64_t ident) {
    return (ident & 0xFF) != 0;
}
constexpr uint64_t kRemoteBit = 2;  // the entry of a process without a mapping, see remote.hpp
constexpr uint64_t make_remote_ident(uint32_t epoch) {
    return make_ident(0, epoch, true) | kRemoteBit;
}
constexpr bool is_remote(uint64_t ident) {
    return (ident & kRemoteBit) != 0;
}

template <size_t Words>
using Text = A<uint64_t>[Words];  // zero-padded UTF-8, 8 bytes a word

// `ident` is changed by CAS, acq_rel [ENTRY publish] [ENTRY retire], and read with acquire [ENTRY read]. The other
// fields are described before [ENTRY publish] and belong to an ident only if it is the same before and after they are
// read. Their owner: the process whose byte lock is held (of a remote entry the keeper); it alone stores them, with
// release. Those from `progress` on are for display and for who judges silence: loaded with acquire, each for itself,
// without a partner; busy_ns to samples are added to, relaxed.
struct ProcEntry {
    U64 ident;        // owner: whoever holds the byte lock; any reaper after proof of death; see above
    U64 start_ticks;  // field 22 of /proc/<pid>/stat; of a remote entry, the number of its life
    U64 pid_ns;       // inode of /proc/self/ns/pid
    U64 started_ns;
    A<uint32_t> ready;
    uint32_t pad0;
    Text<2> role;   // 0x28
    Text<5> label;  // 0x38
    U64 progress;   // 0x60: grows while the process gets on
    U64 progress_ns;
    U64 activity_ns;
    U64 deadline_ns;   // how long the declared activity may take; 0 = the usual limit
    Text<4> activity;  // 0x80
    U64 busy_ns;       // 0xA0
    U64 idle_ns;
    U64 tokens;
    U64 samples;
    U64 version;           // 0xC0: newest weight version in use
    A<uint8_t> waits[16];  // 0xC8: its threads waiting, by state; relaxed, read by its reaper after proof of death
    uint8_t pad1[0x100 - 0xD8];
};
static_assert(sizeof(ProcEntry) == 256 && offsetof(ProcEntry, role) == 0x28 && offsetof(ProcEntry, label) == 0x38);
static_assert(offsetof(ProcEntry, progress) == 0x60 && offsetof(ProcEntry, activity) == 0x80);
static_assert(offsetof(ProcEntry, busy_ns) == 0xA0 && offsetof(ProcEntry, version) == 0xC0);
static_assert(offsetof(ProcEntry, waits) == 0xC8);

// ---------------------------------------------------------------- control lines, line_off
// X(name, type, offset): the fields after the word. Set, decoded and documented from this one list.
#define BUSRL_LINE_FIELDS(X)           \
    X(uid, uint64_t, 0x08)             \
    X(group, uint64_t, 0x10)           \
    X(admission, uint64_t, 0x18)       \
    X(version, uint64_t, 0x20)         \
    X(last_commit_seq, uint64_t, 0x28) \
    X(changed_ns, uint64_t, 0x30)      \
    X(offer_until_ns, uint64_t, 0x38)  \
    X(reward, double, 0x40)            \
    X(cls, uint32_t, 0x48)             \
    X(reward_parts, uint32_t, 0x4C)    \
    X(member, uint16_t, 0x50)          \
    X(group_size, uint16_t, 0x52)      \
    X(attempt, uint16_t, 0x54)         \
    X(offer_to, uint16_t, 0x56)        \
    X(priority, int32_t, 0x58)         \
    X(prompt_tokens, uint32_t, 0x5C)   \
    X(response_tokens, uint32_t, 0x60) \
    X(max_new_tokens, uint32_t, 0x64)  \
    X(temperature, float, 0x68)        \
    X(top_p, float, 0x6C)              \
    X(prompt_crc, uint32_t, 0x70)      \
    X(finish, uint16_t, 0x74)          \
    X(alone_deaths, uint16_t, 0x76)    \
    X(step, uint32_t, 0x78)            \
    X(flags, uint32_t, 0x7C)

// Fields: written by the owner that `word` names, between its claim and its commit, with release. Readers load with
// acquire and believe them only if the word is the same afterwards; a claim that succeeds proves the same. Those that
// order more than this: uid [UID write], and last_commit_seq, stored before it and read after it. The owner reads its
// own fields relaxed: nobody else writes them.
struct alignas(128) Line {
    U64 word;  // owner: itself, see word.hpp; CAS [WORD move], pairs with [WORD read] and [WORD recheck]
#define BUSRL_FIELD(name, type, offset) A<type> name;
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
};
static_assert(sizeof(Line) == 128 && offsetof(Line, word) == 0);
#define BUSRL_FIELD(name, type, offset) static_assert(offsetof(Line, name) == (offset));
BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD

// ---------------------------------------------------------------- hints, hint_off
// For FREE, QUEUED, GENERATED, REWARDED in this order: `leaf`, one bit a slot, then `top`, one bit a word of `leaf`;
// each begins on a line of 128 bytes. The offset is no field of the header: it follows from line_off and n_slots.
constexpr uint32_t kHintStates = 4;
constexpr bool has_hints(State s) {
    return s == State::FREE || s == State::QUEUED || s == State::GENERATED || s == State::REWARDED;
}
constexpr uint32_t hint_index(State s) {  // resting states have even numbers
    return uint32_t(s) / 2;
}
static_assert(hint_index(State::FREE) == 0 && hint_index(State::QUEUED) == 1);
static_assert(hint_index(State::GENERATED) == 2 && hint_index(State::REWARDED) == 3);

constexpr uint64_t bitmap_bytes(uint64_t bits) {
    return (bits + 1023) / 1024 * 128;
}
constexpr uint64_t leaf_bytes(uint64_t n_slots) {
    return bitmap_bytes(n_slots);
}
constexpr uint64_t hint_bytes(uint64_t n_slots) {  // of one state
    return leaf_bytes(n_slots) + bitmap_bytes((n_slots + 63) / 64);
}
static_assert(hint_bytes(1) == 256 && hint_bytes(1024) == 256 && hint_bytes(1025) == 384);
static_assert(hint_bytes(65536) == 8192 + 128);

// Owner: nobody, every process sets and clears bits, seq_cst [HINT set] [HINT clear]; a search loads with acquire.
struct HintMap {
    U64* leaf;  // bit `slot % 64` of word `slot / 64`
    U64* top;   // bit `w % 64` of word `w / 64` for word w of `leaf`
};

// ---------------------------------------------------------------- tensor tables, table_off
constexpr uint32_t kTensors = 48;
constexpr uint32_t kNameBytes = 32;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kTensorAlign = 64;
enum DtypeCode : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };  // the codes of DLPack
constexpr uint32_t kTensorValid = 1, kTensorHasCrc = 2;

struct TensorEntry {  // a private copy; in the segment it lies as 16 atomic words, see tensors.hpp
    char name[kNameBytes];
    uint8_t segment;
    uint8_t code;
    uint8_t bits;
    uint8_t ndim;
    uint32_t crc32c;
    uint64_t offset;  // from the start of the slot's payload
    uint64_t nbytes;
    uint64_t shape[kMaxDims];
    uint64_t capacity;  // bytes set aside, so that a later tensor of that name may take their place
    uint64_t writer;    // the control word under which it was written
    uint64_t reserved[2];
    uint64_t flags;  // last: validity is published after everything else
};
static_assert(sizeof(TensorEntry) == 128 && offsetof(TensorEntry, segment) == 0x20);
static_assert(offsetof(TensorEntry, offset) == 0x28 && offsetof(TensorEntry, shape) == 0x38);
static_assert(offsetof(TensorEntry, capacity) == 0x58 && offsetof(TensorEntry, writer) == 0x60);
static_assert(offsetof(TensorEntry, flags) == 0x78);

struct alignas(128) TensorTable {
    // Both are written by the owner of the slot alone, with release, and read by anybody with acquire.
    A<uint32_t> used;  // entries at and above this index are not looked at; raised after [TENSOR publish]
    uint32_t pad0;
    // Bytes from the slot's begin up to which its payload is in memory; 0 = what always is. Written by the owner of the
    // slot after it has allocated and before it gives back [PAYLOAD size]; pairs with the next owner's load, and a look
    // at slots at rest that only chooses.
    U64 allocated;
    uint8_t pad[112];
    U64 entry[kTensors][sizeof(TensorEntry) / 8];  // [TENSOR publish] `flags` last, pairs with [TENSOR read]
};
static_assert(sizeof(TensorTable) == 128 + kTensors * 128 && offsetof(TensorTable, entry) == 128);
static_assert(offsetof(TensorTable, allocated) == 8);

}  // namespace busrl
