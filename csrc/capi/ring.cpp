// The calls of busrl_ring.h: arguments checked, the core called, what it throws turned into a code and a text.
//
//  * No exception and no C++ type leaves this file; the text of the last error is the thread's own.
// Talks to the core through handle.hpp. Knows nothing of runs, of the bus, or of what the tensors mean.
#include "call.hpp"

using namespace busrl;
using namespace busrl::capi;

namespace {

// ---------------------------------------------------------------- fields

enum FieldIndex {
#define BUSRL_FIELD(name, type, offset) field_##name,
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
        kFields
};
static_assert(BUSRL_SET_GROUP == 1 << field_group && BUSRL_SET_ADMISSION == 1 << field_admission);
static_assert(BUSRL_SET_VERSION == 1 << field_version && BUSRL_SET_OFFER_UNTIL_NS == 1 << field_offer_until_ns);
static_assert(BUSRL_SET_REWARD == 1 << field_reward && BUSRL_SET_CLS == 1 << field_cls);
static_assert(BUSRL_SET_REWARD_PARTS == 1 << field_reward_parts && BUSRL_SET_MEMBER == 1 << field_member);
static_assert(BUSRL_SET_GROUP_SIZE == 1 << field_group_size && BUSRL_SET_ATTEMPT == 1 << field_attempt);
static_assert(BUSRL_SET_OFFER_TO == 1 << field_offer_to && BUSRL_SET_PRIORITY == 1 << field_priority);
static_assert(BUSRL_SET_PROMPT_TOKENS == 1 << field_prompt_tokens);
static_assert(BUSRL_SET_RESPONSE_TOKENS == 1 << field_response_tokens);
static_assert(BUSRL_SET_MAX_NEW_TOKENS == 1 << field_max_new_tokens);
static_assert(BUSRL_SET_TEMPERATURE == 1 << field_temperature && BUSRL_SET_TOP_P == 1 << field_top_p);
static_assert(BUSRL_SET_PROMPT_CRC == 1 << field_prompt_crc && BUSRL_SET_FINISH == 1 << field_finish);
static_assert(BUSRL_SET_ALONE_DEATHS == 1 << field_alone_deaths && BUSRL_SET_STEP == 1 << field_step);
static_assert(BUSRL_SET_FLAGS == 1 << field_flags);
constexpr uint32_t kOwnFields = 1u << field_uid | 1u << field_last_commit_seq | 1u << field_changed_ns;

void set_fields(Line& line, const busrl_line& from, uint32_t fields) {
#define BUSRL_FIELD(name, type, offset)                             \
    if (fields & 1u << field_##name && field_##name != field_flags) \
        line.name.store(from.name, std::memory_order_release);
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
    if (!(fields & BUSRL_SET_FLAGS)) return;
    const uint32_t own = line.flags.load(std::memory_order_relaxed) & kFlagAlone;  // the ring keeps one bit for itself
    line.flags.store((from.flags & ~kFlagAlone) | own, std::memory_order_release);
}

// ---------------------------------------------------------------- tensors

TensorEntry begin_entry(const char* name, uint32_t segment, const busrl_tensor& t) {
    const TensorName checked(name_arg(name));
    if (segment > kNoSegment) invalid("segment is 0 .. 254, or 255 for none");
    TensorEntry entry{};
    std::memcpy(entry.name, checked.word, kNameBytes);
    entry.segment = uint8_t(segment);
    entry.code = t.dtype;
    entry.bits = t.bits;
    entry.ndim = t.ndim;
    entry.flags = kTensorValid;
    if (!known_dtype(entry)) invalid("no dtype " + std::to_string(t.dtype) + " of " + std::to_string(t.bits) + " bits");
    if (t.ndim > kMaxDims) invalid("a tensor has at most 4 dimensions, got " + std::to_string(t.ndim));
    for (uint32_t d = 0; d < t.ndim; ++d) entry.shape[d] = t.shape[d];
    const auto bytes = shape_bytes(entry);
    if (!bytes) throw Error(Fault::slot_too_small, "a tensor of more than 2**62 bytes fits no slot");
    entry.nbytes = *bytes;
    return entry;
}

// Fills the caller's struct. In this hot path it is written once; a struct of another size takes the long way.
int describe(const Segment& seg, uint32_t slot, const TensorEntry& e, busrl_tensor* theirs) {
    busrl_tensor other;
    const bool same = common_size(theirs, "tensor") == sizeof(other) && theirs->size == sizeof(other);
    busrl_tensor& t = same ? *theirs : other;
    t.dtype = e.code;
    t.bits = e.bits;
    t.ndim = e.ndim;
    t.segment = e.segment;
    std::memcpy(t.shape, e.shape, sizeof(t.shape));
    t.nbytes = e.nbytes;
    t.data = seg.payload(slot) + e.offset;
    t.flags = e.flags & kTensorHasCrc ? BUSRL_CHECKSUM : 0;
    t.zero = 0;
    std::memcpy(t.name, e.name, kNameBytes);
    std::memset(t.name + kNameBytes, 0, sizeof(t.name) - kNameBytes);
    return same ? int(BUSRL_OK) : write_struct(theirs, t, "tensor");
}

bool may_see(const busrl_ring& ring, uint64_t word, uint32_t segment) {
    return segment == kNoSegment || segment < segs_of(word) || (ring.index() != 0 && is_owned_by(word, ring.index()));
}

[[noreturn]] void no_tensor(const Segment& seg, uint32_t slot, const std::string& name, uint32_t segment) {
    const uint64_t word = load_word(seg, slot);
    throw Error(Fault::no_tensor, "slot " + std::to_string(slot) + " (" + name_of(state_of(word)) + ", " +
                                      std::to_string(segs_of(word)) + " segments) has no tensor \"" + name + "\"" +
                                      (segment == kNoSegment ? "" : " of segment " + std::to_string(segment)));
}

void check_entry(const Segment& seg, uint32_t slot, const TensorEntry& e, bool checksum) {
    const char* why = entry_fault(e, seg.shape.slot_bytes);
    if (why == nullptr && checksum && (e.flags & kTensorHasCrc) &&
        crc32c(seg.payload(slot) + e.offset, e.nbytes) != e.crc32c)
        why = "its checksum is wrong";
    if (why != nullptr)
        throw Error(Fault::bad_tensor, "slot " + std::to_string(slot) + ": tensor " + describe_name(e) + ": " + why);
}

}  // namespace

// ---------------------------------------------------------------- library

uint32_t busrl_ring_abi(void) {
    return BUSRL_RING_ABI;
}

const char* busrl_ring_error(uint64_t* needed, uint64_t* available) {
    if (needed != nullptr) *needed = g_last.needed;
    if (available != nullptr) *available = g_last.available;
    return g_last.text;
}

// ---------------------------------------------------------------- life

int busrl_ring_attach(uint32_t abi, const char* name, uint32_t flags, busrl_ring** ring) {
    return guarded([&] {
        given(ring, "ring") = nullptr;
        if (abi != BUSRL_RING_ABI)
            return fail(BUSRL_E_ABI, ("the program was built for ABI " + std::to_string(abi) +
                                      " of busrl_ring, this library speaks " + std::to_string(BUSRL_RING_ABI) +
                                      "; build it again with this library's header")
                                         .c_str());
        if (flags & ~BUSRL_ATTACH_READ_ONLY) invalid("attach knows no such flags: " + std::to_string(flags));
        *ring = new busrl_ring(Segment::attach(text_arg(name, "name", 4095), flags & BUSRL_ATTACH_READ_ONLY));
        return int(BUSRL_OK);
    });
}

int busrl_ring_detach(busrl_ring* ring) {
    return guarded([&] {
        const std::unique_ptr<busrl_ring> owned(ring);
        if (owned) owned->close();
        return BUSRL_OK;
    });
}

int busrl_ring_info(busrl_ring* ring, busrl_info* info) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        busrl_info i{};
        i.abi = BUSRL_RING_ABI;
        i.layout_major = seg.shape.layout_major;
        i.layout_minor = seg.shape.layout_minor;
        i.n_slots = seg.shape.n_slots;
        i.n_processes = seg.shape.n_procs;
        i.slot_bytes = seg.shape.slot_bytes;
        i.total_bytes = seg.shape.total_bytes;
        std::memcpy(i.uuid, seg.shape.uuid, sizeof(i.uuid));
        i.index = ring->index();
        i.read_only = seg.read_only;
        return write_struct(info, i, "info");
    });
}

int busrl_ring_bind_fates(busrl_ring* ring, const char* train, const char* validate) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        auto open = [&](const char* path, const char* what) {
            return path == nullptr
                       ? nullptr
                       : std::make_shared<Fates>(text_arg(path, what, 4095), false, kFateCapacity, seg.read_only);
        };
        FateBook book{open(train, "train"), open(validate, "validate")};
        ring->fates = std::move(book);
        return BUSRL_OK;
    });
}

int busrl_ring_register(busrl_ring* ring, const char* role, const char* label, uint32_t* index) {
    return guarded([&] {
        const uint32_t entry = given(ring, "ring").join(text_arg(role, "role", 15), text_arg(label, "label", 39));
        if (index != nullptr) *index = entry;
        return BUSRL_OK;
    });
}

int busrl_ring_ready(busrl_ring* ring) {
    return guarded([&] {
        given(ring, "ring").entry().ready.store(1, std::memory_order_release);
        return BUSRL_OK;
    });
}

int busrl_ring_progress(busrl_ring* ring) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        e.progress_ns.store(monotonic_ns(), std::memory_order_release);
        e.progress.fetch_add(1, std::memory_order_release);
        return BUSRL_OK;
    });
}

int busrl_ring_activity(busrl_ring* ring, const char* name, double deadline_s) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        const char* text = &given(name, "name");
        // Written so that NaN becomes 0: a comparison with it is false.
        const double seconds = deadline_s > 0 ? std::min(deadline_s, 1e9) : 0;
        e.deadline_ns.store(uint64_t(seconds * 1e9), std::memory_order_release);
        store_text(e.activity, std::string(text, ::strnlen(text, sizeof(e.activity))));
        e.activity_ns.store(monotonic_ns(), std::memory_order_release);
        e.progress.fetch_add(1, std::memory_order_release);  // to begin something is to get on
        return BUSRL_OK;
    });
}

int busrl_ring_add(busrl_ring* ring, uint64_t busy_ns, uint64_t idle_ns, uint64_t tokens, uint64_t samples) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        e.busy_ns.fetch_add(busy_ns, std::memory_order_relaxed);
        e.idle_ns.fetch_add(idle_ns, std::memory_order_relaxed);
        e.tokens.fetch_add(tokens, std::memory_order_relaxed);
        e.samples.fetch_add(samples, std::memory_order_relaxed);
        // The entry goes with its process; what all of them generated stays.
        if (tokens) ring->writable().header().counters[kTokens].value.fetch_add(tokens, std::memory_order_relaxed);
        return BUSRL_OK;
    });
}

// ---------------------------------------------------------------- claiming

static_assert(sizeof(busrl_held) == sizeof(Held) && offsetof(busrl_held, word) == offsetof(Held, word));

int busrl_ring_take(busrl_ring* ring, uint32_t from, uint32_t to, int64_t cls, uint32_t max_attempt, busrl_held* held,
                    uint32_t limit, uint32_t* count) {
    return guarded([&] {
        given(count, "count") = 0;
        if (limit != 0) given(held, "held");
        if (cls < -1 || cls > int64_t(UINT32_MAX)) invalid("a class is 0 .. 2**32 - 1, or -1 for any");
        const Wanted want{state_arg(from), state_arg(to), cls, limit, max_attempt};
        const Segment& seg = given(ring, "ring").writable();
        for (const Held& h : take(seg, ring->me(), want)) held[(*count)++] = {h.slot, 0, h.word};
        return BUSRL_OK;
    });
}

int busrl_ring_claim(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* mine) {
    return guarded([&] {
        given(mine, "mine") = 0;
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(claim(seg, ring->me(), slot, word, state_arg(to)), mine);
    });
}

int busrl_ring_mark_alone(busrl_ring* ring, uint32_t slot, uint64_t word) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (state_of(word) != State::GENERATING) invalid("only a GENERATING slot is marked alone");
        mark_alone(seg, ring->me(), slot, word);
        return BUSRL_OK;
    });
}

// ---------------------------------------------------------------- reading and writing a slot

int busrl_ring_line(busrl_ring* ring, uint32_t slot, busrl_line* line) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        check_slot(seg, slot);
        busrl_line found;
        read_line(seg, slot, found);
        return write_struct(line, found, "line");
    });
}

int busrl_ring_set(busrl_ring* ring, uint32_t slot, uint64_t word, const busrl_line* line, uint32_t fields) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        const busrl_line from = read_struct(line, "line");
        if (fields >> kFields || fields & kOwnFields) invalid("fields names some that are the ring's own, or unknown");
        check_owner(seg, ring->me(), slot, word);
        set_fields(seg.line(slot), from, fields);
        return BUSRL_OK;
    });
}

int busrl_ring_tensor(busrl_ring* ring, uint32_t slot, const char* name, uint32_t segment, busrl_tensor* tensor) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        check_slot(seg, slot);
        const std::string text = name_arg(name);
        if (segment > kNoSegment || !may_see(*ring, load_word(seg, slot), segment)) no_tensor(seg, slot, text, segment);
        const TensorTable& table = seg.table(slot);
        const auto index = find_entry(table, TensorName(text), uint8_t(segment));
        if (!index) no_tensor(seg, slot, text, segment);
        const TensorEntry entry = load_entry(table, *index);
        check_entry(seg, slot, entry, true);
        return describe(seg, slot, entry, tensor);
    });
}

int busrl_ring_tensor_at(busrl_ring* ring, uint32_t slot, uint32_t place, busrl_tensor* tensor) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        check_slot(seg, slot);
        if (place >= kTensors) invalid("a slot has " + std::to_string(kTensors) + " places for tensors");
        const TensorTable& table = seg.table(slot);
        if (place >= used_entries(table)) return int(BUSRL_AGAIN);
        const TensorEntry entry = load_entry(table, place);
        const bool seen = (entry.flags & kTensorValid) && may_see(*ring, load_word(seg, slot), entry.segment);
        if (!seen) return int(BUSRL_AGAIN);
        check_entry(seg, slot, entry, false);
        return describe(seg, slot, entry, tensor);
    });
}

int busrl_ring_put(busrl_ring* ring, uint32_t slot, uint64_t word, const char* name, uint32_t segment,
                   const busrl_tensor* tensor) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        check_owner(seg, ring->me(), slot, word);
        const busrl_tensor t = read_struct(tensor, "tensor");
        if (t.flags & ~BUSRL_CHECKSUM) invalid("a tensor knows no such flags: " + std::to_string(t.flags));
        TensorEntry entry = begin_entry(name, segment, t);
        if (entry.nbytes != 0) given(static_cast<const char*>(t.data), "tensor.data");
        const uint32_t index = place_entry(seg, slot, word, entry);
        if (entry.nbytes != 0) std::memcpy(seg.payload(slot) + entry.offset, t.data, entry.nbytes);
        if (t.flags & BUSRL_CHECKSUM) {
            entry.crc32c = crc32c(t.data, entry.nbytes);
            entry.flags |= kTensorHasCrc;
        }
        crash_point("put.copied");
        store_entry(seg.table(slot), index, entry);
        crash_point("put.stored");
        return BUSRL_OK;
    });
}

int busrl_ring_alloc(busrl_ring* ring, uint32_t slot, uint64_t word, const char* name, uint32_t segment,
                     busrl_tensor* tensor) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        check_owner(seg, ring->me(), slot, word);
        TensorEntry entry = begin_entry(name, segment, read_struct(tensor, "tensor"));
        const uint32_t index = place_entry(seg, slot, word, entry);
        store_entry(seg.table(slot), index, entry);
        return describe(seg, slot, entry, tensor);
    });
}

// ---------------------------------------------------------------- letting go

int busrl_ring_commit(busrl_ring* ring, uint32_t slot, uint64_t word, int done, uint64_t* next) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(commit_segment(seg, ring->me(), slot, word, done != 0), next);
    });
}

int busrl_ring_release(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* next) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(release(seg, ring->me(), slot, word, state_arg(to)), next);
    });
}

int busrl_ring_drop(busrl_ring* ring, uint32_t slot, uint64_t word, char reason) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (reason < '!' || reason > '~' || reason == kDispatched || reason == kTrained || reason == kValidated)
            invalid("the reason of a drop is one ASCII letter that is not D, T or V");
        return drop(seg, ring->index(), ring->fates, slot, word, uint8_t(reason)) ? BUSRL_OK : BUSRL_AGAIN;
    });
}

// ---------------------------------------------------------------- waiting and watching

int busrl_ring_wait(busrl_ring* ring, uint32_t state, uint64_t seen, uint64_t timeout_ns, uint64_t* now) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const State which = state_arg(state);
        const bool changed = wait_for_entry(seg, ring->index(), which, seen, timeout_ns);
        if (now != nullptr) *now = transitions(seg, which);
        return changed ? BUSRL_OK : BUSRL_AGAIN;
    });
}

int busrl_ring_reap(busrl_ring* ring, busrl_reaped* reaped, uint32_t limit, uint32_t* count) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (limit != 0) given(reaped, "reaped");
        const std::vector<Reaped> all = reap(seg, ring->fates, ring->index());
        for (size_t i = 0; i < std::min(size_t(limit), all.size()); ++i) {
            busrl_reaped one{all[i].slot, uint32_t(all[i].from), uint32_t(all[i].to), all[i].pid, {}};
            all[i].label.copy(one.label, sizeof(one.label) - 1);
            reaped[i] = one;
        }
        if (count != nullptr) *count = uint32_t(all.size());
        return BUSRL_OK;
    });
}

int busrl_ring_stats(busrl_ring* ring, busrl_stats* stats) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const Header& h = seg.header();
        busrl_stats s{};
        s.states = kStates;
        for (uint32_t k = 0; k < kStates; ++k) s.transitions[k] = transitions(seg, State(k));
        for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
            const uint32_t k = state_index(load_word(seg, i));
            if (k < kStates) ++s.occupancy[k];
        }
        for (uint32_t k = 0; k < 64; ++k) s.drops[k] = h.drops[k].load(std::memory_order_relaxed);
        auto counter = [&](Counter c) { return h.counters[c].value.load(std::memory_order_relaxed); };
        auto entered = [&](State state) { return s.transitions[uint32_t(state)]; };
        s.claims = entered(State::GENERATING) + entered(State::REWARDING) + entered(State::TRAINING);
        // What came to rest by neither a dispatch nor a reaper was committed or handed back by its owner. The parts are
        // read one after another, so while others work the difference may be off by a few, but never below zero.
        const uint64_t rested = entered(State::QUEUED) + entered(State::GENERATED) + entered(State::REWARDED);
        const uint64_t others = counter(kDispatches) + counter(kReturned);
        s.commits = rested - std::min(rested, others);
        s.reaps = counter(kReaps);
        s.dropped = counter(kDrops);
        s.finished = counter(kFinished);
        s.dispatched = counter(kDispatches);
        s.tokens = counter(kTokens);
        return write_struct(stats, s, "stats");
    });
}

int busrl_ring_header(busrl_ring* ring, const char* name, uint64_t* value) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const std::string wanted = text_arg(name, "name", 64);
        given(value, "value") = 0;
        for (uint32_t i = 0; i < kHeaderWordCount; ++i) {
            if (wanted != kHeaderWords[i]) continue;
            *value = seg.header().words[i].load(std::memory_order_acquire);
            return BUSRL_OK;
        }
        invalid("the ring header has no word \"" + wanted + "\"");
    });
}
