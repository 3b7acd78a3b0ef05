// Fields of a protobuf message in bytes that may be anything: one after the other, nothing copied, nothing believed.
//
//  * No byte outside of [at, end) is read, and no field reaches beyond `end`: its size is compared with what is left.
//  * A step forward is at least one byte, so a message of n bytes has n fields at most.
//  * A number has ten bytes at most; of its bits those beyond 64 count for nothing, as in protobuf itself.
// Knows nothing of Python, of field numbers or of what a message means.
#pragma once

#include <cstddef>
#include <cstdint>

namespace busrl::fields {

enum class Fault : int { none, endless, kind, beyond };
enum Kind : uint64_t { kVarint = 0, kEight = 1, kSized = 2, kFour = 5 };  // low bits of a key: number << 3 | kind

constexpr unsigned kKindBits = 3, kVarintBits = 7, kWordBits = 64;
constexpr unsigned kLastShift = (kWordBits - 1) / kVarintBits * kVarintBits;
static_assert(kLastShift == 63, "ten bytes of a number, and no shift as wide as the word");
static_assert(sizeof(size_t) == sizeof(uint64_t), "sizes and places are compared as 64-bit numbers");

// Of a varint `start` is its value, and `stop` the place behind it.
struct Field {
    uint64_t key, start, stop;
};

// The part of a body that is still to be read.
struct Span {
    const uint8_t* body;
    uint64_t at, end;
};

inline Fault read_number(Span& span, uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; span.at < span.end && shift <= kLastShift; shift += kVarintBits) {
        const uint64_t byte = span.body[span.at++];
        value |= (byte & 127) << shift;
        if (byte < 128) return Fault::none;
    }
    return Fault::endless;
}

inline Fault skip(Span& span, uint64_t bytes) {
    if (bytes > span.end - span.at) return Fault::beyond;
    span.at += bytes;
    return Fault::none;
}

// The next field of a message that has one: span.at < span.end.
inline Fault read_field(Span& span, Field& field) {
    Fault fault = read_number(span, field.key);
    if (fault != Fault::none) return fault;
    uint64_t size = 0;
    switch (field.key & ((1 << kKindBits) - 1)) {
        case kVarint:
            fault = read_number(span, field.start);
            field.stop = span.at;
            return fault;
        case kSized:
            fault = read_number(span, size);
            if (fault != Fault::none) return fault;
            break;
        case kEight:
            size = 8;
            break;
        case kFour:
            size = 4;
            break;
        default:
            return Fault::kind;
    }
    field.start = span.at;
    fault = skip(span, size);
    field.stop = span.at;
    return fault;
}

}  // namespace busrl::fields
