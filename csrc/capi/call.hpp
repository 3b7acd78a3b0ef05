// What every call of busrl_ring.h does around its work: check arguments, copy structs by their size, catch everything.
//
//  * guarded() is the only way out of a call: an exception becomes a code, its text the thread's last error.
//  * A struct of the caller is copied by its `size`, so that programs and libraries of different ages fit together.
// Knows nothing of slots or tensors.
#pragma once

#include "handle.hpp"

namespace busrl::capi {

// ---------------------------------------------------------------- errors

struct LastError {  // of one thread; plain memory, so that nothing has to be destroyed at a thread's end
    uint64_t needed;
    uint64_t available;
    char text[2048];
};
inline thread_local LastError g_last{};

constexpr int code_of(Fault fault) {
    return -1 - int(fault);
}
static_assert(code_of(Fault::general) == BUSRL_E_INVALID && code_of(Fault::missing) == BUSRL_E_MISSING);
static_assert(code_of(Fault::no_file) == BUSRL_E_NO_FILE && code_of(Fault::exists) == BUSRL_E_EXISTS);
static_assert(code_of(Fault::corrupt) == BUSRL_E_CORRUPT && code_of(Fault::layout) == BUSRL_E_LAYOUT);
static_assert(code_of(Fault::stale) == BUSRL_E_STALE && code_of(Fault::shm_too_small) == BUSRL_E_SHM_TOO_SMALL);
static_assert(code_of(Fault::slot_too_small) == BUSRL_E_SLOT_TOO_SMALL);
static_assert(code_of(Fault::not_owner) == BUSRL_E_NOT_OWNER && code_of(Fault::transition) == BUSRL_E_TRANSITION);
static_assert(code_of(Fault::no_tensor) == BUSRL_E_NO_TENSOR && code_of(Fault::table_full) == BUSRL_E_TABLE_FULL);
static_assert(code_of(Fault::not_registered) == BUSRL_E_NOT_REGISTERED && code_of(Fault::closed) == BUSRL_E_CLOSED);
static_assert(code_of(Fault::fates) == BUSRL_E_FATES && code_of(Fault::disk_full) == BUSRL_E_DISK_FULL);
static_assert(code_of(Fault::lock_timeout) == BUSRL_E_LOCKED && code_of(Fault::read_only) == BUSRL_E_READ_ONLY);
static_assert(code_of(Fault::bad_tensor) == BUSRL_E_BAD_TENSOR);

inline int fail(int code, const char* text, uint64_t needed = 0, uint64_t available = 0) noexcept {
    g_last.needed = needed;
    g_last.available = available;
    const size_t length = std::min(std::strlen(text), sizeof(g_last.text) - 1);
    std::memcpy(g_last.text, text, length);
    g_last.text[length] = 0;
    return code;
}

// Runs one call. `body` returns a code, or throws.
template <class Body>
int guarded(Body&& body) noexcept {
    try {
        return body();
    } catch (const Error& e) {
        return fail(code_of(e.fault), e.what(), e.needed, e.available);
    } catch (const std::bad_alloc&) {
        return fail(BUSRL_E_MEMORY, "out of memory");
    } catch (const std::exception& e) {
        return fail(BUSRL_E_INVALID, e.what());
    } catch (...) {
        return fail(BUSRL_E_INVALID, "an error of unknown kind");
    }
}

[[noreturn]] inline void invalid(const std::string& why) {
    throw Error(Fault::general, why);
}

// ---------------------------------------------------------------- arguments

template <class T>
T& given(T* pointer, const char* what) {
    if (pointer == nullptr) invalid(std::string(what) + " is NULL");
    return *pointer;
}

inline std::string text_arg(const char* text, const char* what, size_t longest) {
    const size_t length = ::strnlen(&given(text, what), longest + 1);
    if (length > longest) invalid(std::string(what) + " has more than " + std::to_string(longest) + " bytes");
    return std::string(text, length);
}

// A tensor's name, one byte more than it may have if it is too long: the core says so then.
inline std::string name_arg(const char* name) {
    given(name, "name");
    return std::string(name, ::strnlen(name, kNameBytes + 1));
}

inline State state_arg(uint32_t value) {
    if (value >= kStates) invalid("there is no state " + std::to_string(value));
    return State(value);
}

// How much of a struct both sides know. A struct that has grown since ABI 1 passes its first size as `least`.
template <class T>
uint32_t common_size(const T* theirs, const char* what, size_t least = sizeof(T)) {
    const uint32_t size = given(theirs, what).size;
    if (size < least)
        invalid(std::string(what) + ": size is " + std::to_string(size) + ", at least " + std::to_string(least) +
                " is needed; set it to sizeof before the call");
    return uint32_t(std::min(size_t(size), sizeof(T)));
}

template <class T>
T read_struct(const T* theirs, const char* what) {
    T ours{};
    std::memcpy(&ours, theirs, common_size(theirs, what));
    return ours;
}

template <class T>
int write_struct(T* theirs, T& ours, const char* what) {
    ours.size = common_size(theirs, what);
    std::memcpy(theirs, &ours, ours.size);
    return BUSRL_OK;
}

inline int word_or_again(uint64_t word, uint64_t* out) {
    if (out != nullptr) *out = word;
    return word != 0 ? BUSRL_OK : BUSRL_AGAIN;
}

}  // namespace busrl::capi
