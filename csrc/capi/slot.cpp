// The calls of busrl_ring.h that read and write what one slot holds: its control line and its tensors.
//
//  * A line is written, and a tensor put, only by the slot's owner; anybody may look.
//  * A descriptor is copied, then checked, then used: nothing that lies in shared memory is believed.
// Talks to the core through handle.hpp. Knows nothing of how a slot moves, or of what the tensors mean.
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
