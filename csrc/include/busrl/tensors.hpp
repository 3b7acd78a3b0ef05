// The tensor table of a slot: up to 48 named arrays, each of one segment or of none.
//
//  * Only the owner of the slot writes. A reader copies an entry, checks it, then uses it; nothing in shared memory
//    is trusted, and a bad entry is an error about that slot alone.
//  * An entry of segment k counts iff k < segs of the control word, or the reader owns the slot. The entry is written
//    before the commit that raises segs, and is never touched again.
//  * An entry of no segment (255) may be replaced by whoever owns the slot; it is invalid while that happens.
//  * There is no allocator state: the end of the last valid entry is the end of the used bytes. Placed by room.hpp.
#pragma once

#include <optional>

#include "busrl/segment.hpp"

namespace busrl {

inline TensorEntry load_entry(const TensorTable& table, uint32_t i) {
    uint64_t word[sizeof(TensorEntry) / 8];
    // Validity is read first: [TENSOR read] acquire, pairs with [TENSOR publish].
    for (int w = int(std::size(word)) - 1; w >= 0; --w) word[w] = table.entry[i][w].load(std::memory_order_acquire);
    TensorEntry entry;
    std::memcpy(&entry, word, sizeof(entry));
    return entry;
}

inline void invalidate_entry(TensorTable& table, uint32_t i) {
    table.entry[i][offsetof(TensorEntry, flags) / 8].store(0, std::memory_order_release);
}

inline void store_entry(TensorTable& table, uint32_t i, const TensorEntry& entry) {
    uint64_t word[sizeof(TensorEntry) / 8];
    std::memcpy(word, &entry, sizeof(entry));
    // [TENSOR publish] release; `flags` is the last word, so it becomes visible last.
    for (size_t w = 0; w < std::size(word); ++w) table.entry[i][w].store(word[w], std::memory_order_release);
    if (table.used.load(std::memory_order_relaxed) <= i) table.used.store(i + 1, std::memory_order_release);
}

inline uint32_t used_entries(const TensorTable& table) {
    return std::min(table.used.load(std::memory_order_acquire), kTensors);
}

struct TensorName {
    uint64_t word[kNameBytes / 8] = {};

    explicit TensorName(const std::string& name) {
        if (name.empty() || name.size() > kNameBytes)
            throw Error(Fault::general, "a tensor name has 1 .. 32 bytes, got \"" + name + "\"");
        std::memcpy(word, name.data(), name.size());
    }
};

// The index of a valid entry, whatever its segment's standing.
inline std::optional<uint32_t> find_entry(const TensorTable& table, const TensorName& name, uint8_t segment) {
    const uint32_t used = used_entries(table);
    for (uint32_t i = 0; i < used; ++i) {
        const auto& e = table.entry[i];
        if (e[0].load(std::memory_order_acquire) != name.word[0]) continue;
        if ((e[4].load(std::memory_order_acquire) & 0xFF) != segment) continue;
        if (!(e[15].load(std::memory_order_acquire) & kTensorValid)) continue;
        bool same = true;
        for (int w = 1; w < 4; ++w) same = same && e[w].load(std::memory_order_acquire) == name.word[w];
        if (same) return i;
    }
    return std::nullopt;
}

inline bool known_dtype(const TensorEntry& e) {
    switch (e.code) {
        case kInt:
        case kUint:
            return e.bits == 8 || e.bits == 16 || e.bits == 32 || e.bits == 64;
        case kFloat:
            return e.bits == 16 || e.bits == 32 || e.bits == 64;
        case kBfloat:
            return e.bits == 16;
        case kBool:
            return e.bits == 8;
        default:
            return false;
    }
}

// Bytes of the array that a copied entry describes; nullopt where no array of that shape can be, not even an empty one:
// the product is taken over the dimensions that are not 0, since readers multiply them too.
inline std::optional<uint64_t> shape_bytes(const TensorEntry& e) {
    if (e.ndim > kMaxDims) return std::nullopt;
    unsigned __int128 span = e.bits / 8;
    bool empty = false;
    for (uint32_t d = 0; d < e.ndim; ++d) {
        empty = empty || e.shape[d] == 0;
        if (e.shape[d] != 0) span *= e.shape[d];
        if (span >> 62) return std::nullopt;
    }
    return empty ? 0 : uint64_t(span);
}

// The rules that a copied entry must keep before its bytes are looked at: what it breaks, or nullptr.
inline const char* entry_fault(const TensorEntry& e, uint64_t slot_bytes) {
    if (!known_dtype(e)) return "its number type is unknown";
    if (e.ndim > kMaxDims) return "it has more than 4 dimensions";
    if (e.offset % kTensorAlign != 0) return "its offset is not a multiple of 64";
    if (e.offset > slot_bytes || e.nbytes > slot_bytes - e.offset) return "it reaches beyond its slot";
    if (e.capacity < e.nbytes || e.capacity > slot_bytes - e.offset) return "the room set aside for it is impossible";
    const auto bytes = shape_bytes(e);
    if (!bytes) return "its shape is impossible";
    return *bytes == e.nbytes ? nullptr : "its size does not follow from its shape";
}

inline bool entry_is_sound(const TensorEntry& e, uint64_t slot_bytes) {
    return entry_fault(e, slot_bytes) == nullptr;
}

// For messages: a hostile name must not make them unreadable.
inline std::string describe_name(const TensorEntry& e) {
    std::string name(e.name, ::strnlen(e.name, kNameBytes));
    for (char& c : name)
        if (c < 0x20 || c > 0x7E) c = '?';
    return name + (e.segment == kNoSegment ? "" : " of segment " + std::to_string(e.segment));
}

// Forgets what was written of segments `from` and above: the leftovers of an owner that never committed.
inline void clear_segments(TensorTable& table, uint32_t from) {
    const uint32_t used = used_entries(table);
    for (uint32_t i = 0; i < used; ++i) {
        const uint32_t segment = uint32_t(table.entry[i][4].load(std::memory_order_acquire) & 0xFF);
        if (segment != kNoSegment && segment >= from) invalidate_entry(table, i);
    }
}

inline void clear_all(TensorTable& table) {
    const uint32_t used = used_entries(table);
    for (uint32_t i = 0; i < used; ++i) invalidate_entry(table, i);
    table.used.store(0, std::memory_order_release);
}

}  // namespace busrl
