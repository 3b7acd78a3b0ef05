// Work on plain memory for the weight transports: many copies in one call, the values that changed, putting them in
// place, and a digest.
//
//  * Addresses come from tensors that the caller keeps alive; nothing here knows of tensors, names or files.
//  * Values are compared and kept as bits: a NaN is equal to itself, -0.0 is not equal to 0.0.
//  * The interpreter's lock is given up for the whole of each call.
//  * Nothing is written by put() unless every index is within the tensor.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;

// A buffer of the caller, given back at the end of the call.
struct View {
    Py_buffer b{};
    bool held = false;
    ~View() {
        if (held) PyBuffer_Release(&b);
    }
    bool take(PyObject* object, int flags) {
        held = PyObject_GetBuffer(object, &b, flags) == 0;
        return held;
    }
    template <typename T>
    T* as() const {
        return static_cast<T*>(b.buf);
    }
    template <typename T>
    size_t length() const {
        return static_cast<size_t>(b.len) / sizeof(T);
    }
};

// What one value adds to the sum that a tensor's state is known by; one-to-one in `bits` for a given index.
inline uint64_t mix(uint64_t index, uint64_t bits) {
    uint64_t x = bits + index * kOdd;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline bool line_differs(const unsigned char* a, const unsigned char* b) {
    uint64_t x[8], y[8], any = 0;
    memcpy(x, a, kLine);
    memcpy(y, b, kLine);
    for (int i = 0; i < 8; ++i) any |= x[i] ^ y[i];
    return any != 0;
}

// Which values of one line differ, one bit each.
template <typename T>
inline uint64_t differing(const T* a, const T* b) {
    uint64_t mask = 0;
    for (size_t j = 0; j < kLine / sizeof(T); ++j) mask |= uint64_t(a[j] != b[j]) << j;
    return mask;
}

// The found values so far, and how many there may be.
template <typename T>
struct Found {
    uint32_t* index;
    T* value;
    size_t n, most;

    bool add(size_t start, uint64_t mask, const T* now) {
        for (; mask != 0; mask &= mask - 1) {
            size_t j = start + static_cast<size_t>(__builtin_ctzll(mask));
            if (n == most) return false;
            index[n] = static_cast<uint32_t>(j);
            value[n] = now[j];
            ++n;
        }
        return true;
    }
};

// Indices and new bits of the values that differ; -1 as soon as there are too many.
template <typename T>
int64_t find_anywhere(const T* before, const T* now, size_t count, Found<T> found) {
    constexpr size_t kPerLine = kLine / sizeof(T);
    size_t i = 0;
    for (; i + kPerLine <= count; i += kPerLine) {
        if (!line_differs(reinterpret_cast<const unsigned char*>(before + i),
                          reinterpret_cast<const unsigned char*>(now + i)))
            continue;
        if (!found.add(i, differing(before + i, now + i), now)) return -1;
    }
    for (; i < count; ++i)
        if (before[i] != now[i] && !found.add(i, 1, now)) return -1;
    return static_cast<int64_t>(found.n);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define BUSRL_AVX512 __attribute__((target("avx512f,avx512bw")))
template <typename T>
BUSRL_AVX512 inline uint64_t differing_512(const T* a, const T* b) {
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    if (sizeof(T) == 1) return _mm512_cmpneq_epi8_mask(x, y);
    if (sizeof(T) == 2) return _mm512_cmpneq_epi16_mask(x, y);
    if (sizeof(T) == 4) return _mm512_cmpneq_epi32_mask(x, y);
    return _mm512_cmpneq_epi64_mask(x, y);
}

template <typename T>
BUSRL_AVX512 int64_t find_512(const T* before, const T* now, size_t count, Found<T> found) {
    constexpr size_t kPerLine = kLine / sizeof(T);
    size_t i = 0;
    for (; i + kPerLine <= count; i += kPerLine) {
        uint64_t mask = differing_512(before + i, now + i);
        if (mask != 0 && !found.add(i, mask, now)) return -1;
    }
    for (; i < count; ++i)
        if (before[i] != now[i] && !found.add(i, 1, now)) return -1;
    return static_cast<int64_t>(found.n);
}
#endif

template <typename T>
int64_t find(const T* before, const T* now, size_t count, Found<T> found, bool may_be_wide) {
#ifdef BUSRL_AVX512
    static const bool wide = __builtin_cpu_supports("avx512bw");
    if (wide && may_be_wide) return find_512(before, now, count, found);
#endif
    (void)may_be_wide;
    return find_anywhere(before, now, count, found);
}

template <typename T>
uint64_t put_all(T* target, const uint32_t* index, const T* value, size_t n) {
    constexpr size_t kAhead = 24;
    uint64_t sum = 0;
    for (size_t k = 0; k < n; ++k) {
        if (k + kAhead < n) __builtin_prefetch(target + index[k + kAhead], 1);
        sum += mix(index[k], value[k]) - mix(index[k], target[index[k]]);
        target[index[k]] = value[k];
    }
    return sum;
}

// move(to, from, sizes): memcpy of each; three arrays of unsigned 64-bit numbers of one length.
PyObject* move(PyObject*, PyObject* args) {
    PyObject *to_object, *from_object, *size_object;
    View to, from, size;
    if (!PyArg_ParseTuple(args, "OOO", &to_object, &from_object, &size_object)) return nullptr;
    if (!to.take(to_object, PyBUF_SIMPLE) || !from.take(from_object, PyBUF_SIMPLE) ||
        !size.take(size_object, PyBUF_SIMPLE))
        return nullptr;
    if (to.b.len != from.b.len || to.b.len != size.b.len)
        return PyErr_Format(PyExc_ValueError, "the three arrays differ in length");
    size_t n = to.length<uint64_t>();
    Py_BEGIN_ALLOW_THREADS;
    for (size_t k = 0; k < n; ++k)
        memcpy(reinterpret_cast<void*>(to.as<uint64_t>()[k]), reinterpret_cast<const void*>(from.as<uint64_t>()[k]),
               size.as<uint64_t>()[k]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

bool width_is_known(int width) {
    if (width == 1 || width == 2 || width == 4 || width == 8) return true;
    PyErr_Format(PyExc_ValueError, "a value has %d bytes; known are 1, 2, 4 and 8", width);
    return false;
}

// changed(before, now, count, width, indices, values, wide = true): how many differ, -1 if more than fit. `wide` false:
// without the instructions that not every processor has.
PyObject* changed(PyObject*, PyObject* args) {
    unsigned long long before, now, count;
    int width, may_be_wide = 1;
    PyObject *index_object, *value_object;
    View index, value;
    if (!PyArg_ParseTuple(args, "KKKiOO|p", &before, &now, &count, &width, &index_object, &value_object,
                          &may_be_wide) ||
        !width_is_known(width) || !index.take(index_object, PyBUF_WRITABLE) ||
        !value.take(value_object, PyBUF_WRITABLE))
        return nullptr;
    if (count > UINT32_MAX) return PyErr_Format(PyExc_ValueError, "%llu values are too many for one index", count);
    size_t most = index.length<uint32_t>(), room = static_cast<size_t>(value.b.len) / static_cast<size_t>(width);
    if (room < most) most = room;
    int64_t n = 0;
    auto run = [&](auto zero) {
        using T = decltype(zero);
        n = find(reinterpret_cast<const T*>(before), reinterpret_cast<const T*>(now), count,
                 Found<T>{index.as<uint32_t>(), value.as<T>(), 0, most}, may_be_wide != 0);
    };
    Py_BEGIN_ALLOW_THREADS;
    if (width == 1) run(uint8_t{});
    if (width == 2) run(uint16_t{});
    if (width == 4) run(uint32_t{});
    if (width == 8) run(uint64_t{});
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(n);
}

// put(target, count, width, indices, values): write the values; how the tensor's sum changes by it.
PyObject* put(PyObject*, PyObject* args) {
    unsigned long long target, count;
    int width;
    PyObject *index_object, *value_object;
    View index, value;
    if (!PyArg_ParseTuple(args, "KKiOO", &target, &count, &width, &index_object, &value_object) ||
        !width_is_known(width) || !index.take(index_object, PyBUF_SIMPLE) || !value.take(value_object, PyBUF_SIMPLE))
        return nullptr;
    size_t n = index.length<uint32_t>();
    if (static_cast<size_t>(value.b.len) != n * static_cast<size_t>(width))
        return PyErr_Format(PyExc_ValueError, "%zu indices, but %zd bytes of values", n, value.b.len);
    bool within = true;
    uint64_t sum = 0;
    auto run = [&](auto zero) {
        using T = decltype(zero);
        sum = put_all(reinterpret_cast<T*>(target), index.as<const uint32_t>(), value.as<const T>(), n);
    };
    Py_BEGIN_ALLOW_THREADS;
    for (size_t k = 0; k < n; ++k) within &= index.as<const uint32_t>()[k] < count;
    if (within && width == 1) run(uint8_t{});
    if (within && width == 2) run(uint16_t{});
    if (within && width == 4) run(uint32_t{});
    if (within && width == 8) run(uint64_t{});
    Py_END_ALLOW_THREADS;
    if (!within) return PyErr_Format(PyExc_IndexError, "an index is beyond the tensor's %llu values", count);
    return PyLong_FromUnsignedLongLong(sum);
}

// digest(bytes, seed): 64 bits that change with any one word; eight lanes, so that memory is what limits it.
PyObject* digest(PyObject*, PyObject* args) {
    PyObject* object;
    unsigned long long seed = 0;
    View bytes;
    if (!PyArg_ParseTuple(args, "O|K", &object, &seed) || !bytes.take(object, PyBUF_SIMPLE)) return nullptr;
    uint64_t lane[8], sum = seed ^ static_cast<uint64_t>(bytes.b.len);
    Py_BEGIN_ALLOW_THREADS;
    const unsigned char* at = bytes.as<const unsigned char>();
    size_t left = static_cast<size_t>(bytes.b.len);
    for (int i = 0; i < 8; ++i) lane[i] = mix(static_cast<uint64_t>(i), seed);
    unsigned char tail[kLine] = {};
    while (left > 0) {
        uint64_t word[8];
        size_t take = left < kLine ? left : kLine;
        if (take == kLine) {
            memcpy(word, at, kLine);
        } else {
            memcpy(tail, at, take);
            memcpy(word, tail, kLine);
        }
        for (int i = 0; i < 8; ++i) {
            lane[i] = (lane[i] ^ word[i]) * kOdd;
            lane[i] ^= lane[i] >> 29;
        }
        at += take;
        left -= take;
    }
    for (int i = 0; i < 8; ++i) sum = mix(sum, lane[i]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(sum);
}

PyMethodDef methods[] = {
    {"move", move, METH_VARARGS, "Copy blocks: addresses to, addresses from, sizes."},
    {"changed", changed, METH_VARARGS, "Find the values of a tensor that differ."},
    {"put", put, METH_VARARGS, "Write values at indices of a tensor."},
    {"digest", digest, METH_VARARGS, "A 64-bit digest of bytes."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_blocks",
                      "Work on plain memory for the weights.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__blocks() {
    return PyModule_Create(&module);
}
