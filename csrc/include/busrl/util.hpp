// Small things from the system: clock, checksum, text in atomic words, one open file.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <string>
#include <utility>

#include "busrl/layout.hpp"

namespace busrl {

inline uint64_t monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

// The same clock as of the last timer tick (1 to 10 ms ago): for stamps that people read. Reading the exact one waits
// for all earlier loads and stores, which on the path of a hand-off costs as much as moving the cache line.
inline uint64_t coarse_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

constexpr uint64_t align_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}

namespace detail {
constexpr std::array<uint32_t, 256> crc_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t c = i;
        for (int k = 0; k < 8; ++k) c = (c & 1) ? 0x82F63B78u ^ (c >> 1) : c >> 1;  // Castagnoli, reflected
        table[i] = c;
    }
    return table;
}
}  // namespace detail

inline uint32_t crc32c(const void* data, size_t size) {
    static constexpr auto table = detail::crc_table();
    const auto* byte = static_cast<const uint8_t*>(data);
    uint32_t crc = ~0u;
    for (size_t i = 0; i < size; ++i) crc = table[(crc ^ byte[i]) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

// For messages: bytes in the order in which they lie in memory.
inline std::string hex_of(const void* data, size_t size) {
    static constexpr char digit[] = "0123456789abcdef";
    std::string text;
    for (const auto* byte = static_cast<const uint8_t*>(data); size-- > 0; ++byte) {
        text += digit[*byte >> 4];
        text += digit[*byte & 15];
    }
    return text;
}

// Text shorter than the field is zero-padded, longer text is cut: these are names for people.
template <size_t Words>
void store_text(Text<Words>& field, const std::string& text) {
    char bytes[Words * 8] = {};
    text.copy(bytes, sizeof(bytes) - 1);
    for (size_t i = 0; i < Words; ++i) {
        uint64_t word;
        std::memcpy(&word, bytes + 8 * i, 8);
        field[i].store(word, std::memory_order_release);
    }
}

template <size_t Words>
std::string load_text(const Text<Words>& field) {
    char bytes[Words * 8 + 1] = {};
    for (size_t i = 0; i < Words; ++i) {
        const uint64_t word = field[i].load(std::memory_order_acquire);
        std::memcpy(bytes + 8 * i, &word, 8);
    }
    return std::string(bytes);
}

class File {  // owns one descriptor
  public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    File& operator=(File&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { close(); }

    int fd() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void close() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

  private:
    int fd_ = -1;
};

// 0, or an errno: ENOSPC where the file system is full. What was allocated stays as it was.
inline int allocate(int fd, uint64_t begin, uint64_t end) {
    if (begin >= end) return 0;
    int code;
    do code = ::posix_fallocate(fd, off_t(begin), off_t(end - begin));
    while (code == EINTR);
    return code;
}

inline std::string read_small(const char* path) {
    File file(::open(path, O_RDONLY | O_CLOEXEC));
    char buffer[1024];
    const ssize_t n = file ? ::read(file.fd(), buffer, sizeof(buffer)) : -1;
    return n > 0 ? std::string(buffer, size_t(n)) : std::string();
}

inline std::array<uint8_t, 16> boot_id() {
    std::array<uint8_t, 16> id{};
    size_t nibble = 0;
    for (char c : read_small("/proc/sys/kernel/random/boot_id")) {
        const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (value < 0 || nibble >= 32) continue;
        id[nibble / 2] = uint8_t(id[nibble / 2] << 4 | value);
        ++nibble;
    }
    return id;
}

inline uint64_t pid_namespace() {
    struct stat info;
    return ::stat("/proc/self/ns/pid", &info) == 0 ? uint64_t(info.st_ino) : 0;
}

}  // namespace busrl
