// Every way in which the ring refuses, with the numbers a caller may want to act upon.
// The Python face turns each Fault into one exception class of the same meaning; the core knows no Python.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace busrl {

enum class Fault : uint8_t {
    general,
    missing,         // no segment under that name
    no_file,         // no fate table under that path
    exists,          // the final name is taken
    corrupt,         // bytes in shared memory contradict the layout
    layout,          // another layout version
    stale,           // made before the last boot
    shm_too_small,   // the tmpfs cannot hold the segment
    slot_too_small,  // the payload or its table does not fit in one slot
    not_owner,       // the caller does not hold the slot under that word
    transition,      // the state machine has no such arrow
    no_tensor,       // no valid entry of that name and segment
    table_full,      // the process table has no free entry
    not_registered,  // the call needs a process-table entry
    closed,          // the handle was closed, or was inherited over fork()
    fates,           // no fate table bound, or the fate forbids the step
    disk_full,       // the file system of the fate table is full
    lock_timeout,    // another process holds the lock
    read_only,       // the handle maps the segment read-only
    // A descriptor or payload of one slot contradicts itself; the rest is sound. (19 and 20 are codes of the C ABI.)
    bad_tensor = 21,
};

class Error : public std::runtime_error {
  public:
    Error(Fault fault, const std::string& text, uint64_t needed = 0, uint64_t available = 0)
        : std::runtime_error(text), fault(fault), needed(needed), available(available) {}

    Fault fault;
    uint64_t needed;     // what was asked for, in bytes; 0 where it means nothing
    uint64_t available;  // what there was
};

inline std::string errno_text(const std::string& what) {
    int code = errno;
    return what + ": " + std::strerror(code) + " (errno " + std::to_string(code) + ")";
}

}  // namespace busrl
