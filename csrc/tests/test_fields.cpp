// Reader of protobuf fields: what is written is read again, and of bytes that are no message nothing outside is
// touched.
#include <cstring>
#include <memory>
#include <random>

#include "../python/fields.hpp"
#include "harness.hpp"

using namespace busrl::fields;

namespace {

using Bytes = std::vector<uint8_t>;

// Bytes in memory of exactly their size: a sanitizer sees each look beyond them.
struct Exact {
    std::unique_ptr<uint8_t[]> memory;
    uint64_t size;
    explicit Exact(const Bytes& bytes) : memory(new uint8_t[bytes.size()]), size(bytes.size()) {
        if (size != 0) std::memcpy(memory.get(), bytes.data(), size);
    }
    Span all() const { return {memory.get(), 0, size}; }
};

void put_number(Bytes& bytes, uint64_t value) {
    for (; value > 127; value >>= 7) bytes.push_back(uint8_t(value & 127) | 128);
    bytes.push_back(uint8_t(value));
}
void put_key(Bytes& bytes, uint64_t number, Kind kind) {
    put_number(bytes, number << kKindBits | kind);
}
void put_sized(Bytes& bytes, uint64_t number, const Bytes& content) {
    put_key(bytes, number, kSized);
    put_number(bytes, content.size());
    bytes.insert(bytes.end(), content.begin(), content.end());
}

Fault fault_of(const Bytes& bytes) {
    const Exact exact(bytes);
    Span span = exact.all();
    Field field{};
    while (span.at < span.end)
        if (const Fault fault = read_field(span, field); fault != Fault::none) return fault;
    return Fault::none;
}

// A message with fields of all kinds, and such messages in it.
Bytes message(std::mt19937_64& random, int depth) {
    Bytes bytes;
    for (uint64_t left = random() % 6; left > 0; --left) {
        const uint64_t number = random() >> (32 + random() % 32);
        switch (random() % 4) {
            case 0:
                put_key(bytes, number, kVarint);
                put_number(bytes, random() >> random() % 64);
                break;
            case 1:
                put_key(bytes, number, kEight);
                bytes.insert(bytes.end(), 8, 7);
                break;
            case 2:
                put_key(bytes, number, kFour);
                bytes.insert(bytes.end(), 4, 7);
                break;
            default:
                put_sized(bytes, number, depth > 0 ? message(random, depth - 1) : Bytes(random() % 200, 9));
        }
    }
    return bytes;
}

void spoil(std::mt19937_64& random, Bytes& bytes) {
    for (uint64_t left = random() % 5; left > 0 && !bytes.empty(); --left) {
        const auto at = bytes.begin() + std::ptrdiff_t(random() % bytes.size());
        switch (random() % 4) {
            case 0:
                *at = uint8_t(random());
                break;
            case 1:
                *at |= 128;
                break;
            case 2:
                bytes.erase(at, bytes.end());
                break;
            default:
                bytes.insert(at, random() % 12, 255);
        }
    }
}

// Fields of a message and of all that may be messages in it; false at a fault.
bool read_all(Span span, int depth, uint64_t& sum) {
    while (span.at < span.end) {
        const uint64_t before = span.at;
        Field field{};
        if (read_field(span, field) != Fault::none) return false;
        CHECK(before < span.at && span.at <= span.end && field.stop == span.at);
        if ((field.key & 7) == kVarint) continue;
        CHECK(before < field.start && field.start <= field.stop);
        for (uint64_t at = field.start; at < field.stop; ++at) sum += span.body[at];
        if ((field.key & 7) == kSized && depth > 0) read_all({span.body, field.start, field.stop}, depth - 1, sum);
    }
    return true;
}

}  // namespace

TEST("fields are read with the keys, values and places that were written") {
    Bytes bytes;
    put_key(bytes, 1, kVarint);
    put_number(bytes, UINT64_MAX);
    put_sized(bytes, 5000, Bytes(300, 7));
    put_key(bytes, 2, kEight);
    bytes.insert(bytes.end(), 8, 1);
    put_key(bytes, 3, kFour);
    bytes.insert(bytes.end(), 4, 1);
    const Exact exact(bytes);
    Span span = exact.all();
    Field field{};
    CHECK(read_field(span, field) == Fault::none && field.key == 8 && field.start == UINT64_MAX && field.stop == 11);
    CHECK(read_field(span, field) == Fault::none && field.key == (5000 << 3 | kSized));
    CHECK(field.stop - field.start == 300 && exact.memory[field.start] == 7);
    CHECK(read_field(span, field) == Fault::none && field.key == 17 && field.stop - field.start == 8);
    CHECK(read_field(span, field) == Fault::none && field.key == 29 && span.at == span.end);
}

TEST("a number ends after ten bytes or with the message, and its bits beyond 64 count for nothing") {
    CHECK(fault_of(Bytes(11, 0x80)) == Fault::endless && fault_of({0x08, 0x80}) == Fault::endless);
    CHECK(fault_of({0x08}) == Fault::endless && fault_of({0x0a}) == Fault::endless);
    Bytes bytes{0x08};
    bytes.insert(bytes.end(), 9, 0xff);
    bytes.push_back(0x7f);
    const Exact exact(bytes);
    Span span = exact.all();
    Field field{};
    CHECK(read_field(span, field) == Fault::none && field.start == UINT64_MAX && span.at == span.end);
}

TEST("a size beyond the message is a fault, also one that would wrap around") {
    CHECK(fault_of({0x0a, 0x01}) == Fault::beyond && fault_of({0x0d, 1, 2, 3}) == Fault::beyond);
    CHECK(fault_of({0x09, 1, 2, 3, 4, 5, 6, 7}) == Fault::beyond);
    for (uint64_t size : {UINT64_MAX, UINT64_MAX - 10, uint64_t(1) << 63, uint64_t(1) << 32}) {
        Bytes bytes{0x0a};
        put_number(bytes, size);
        bytes.insert(bytes.end(), 3, 0);
        CHECK(fault_of(bytes) == Fault::beyond);
    }
}

TEST("kinds that protobuf does not have any more are a fault") {
    for (uint8_t kind : {3, 4, 6, 7}) CHECK(fault_of({kind, 0, 0, 0, 0}) == Fault::kind);
}

TEST("spoilt messages are read within their bytes, or a fault") {
    std::mt19937_64 random(36);
    uint64_t sum = 0, whole = 0;
    constexpr int kMessages = 20000;
    for (int left = kMessages; left > 0; --left) {
        Bytes bytes = message(random, 3);
        const Exact sound(bytes);
        CHECK(read_all(sound.all(), 0, sum));
        spoil(random, bytes);
        const Exact exact(bytes);
        whole += read_all(exact.all(), 4, sum);
    }
    CHECK(sum > 0 && whole > kMessages / 10 && whole < kMessages * 9 / 10);
}

int main() {
    return test::run();
}
