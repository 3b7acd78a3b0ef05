// What low-rank adapters add to the rows of a layer: out[row] += (x[row] A[place]) B[place], for rows of many adapters
// in one call, on one thread.
//
//  * Addresses come from tensors that the caller keeps alive, whose shapes it has checked. How many rows there are for
//    how many places is checked here, and that A and B have these places: no row is added another's adapter.
//  * A row's numbers are summed in one order, whatever rows stand beside it and however many: the same to the bit.
//  * Place 0 has no adapter: its rows stay as they are.
//  * The interpreter's lock is given up for the whole of a call.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

namespace {

// One call: `rows` lines of x [inputs] and of out [outputs], `each` in turn for each of `places`. A is [stacked,
// inputs, width], B [stacked, width, columns], of which the first `outputs` columns from `up` on are used.
struct Work {
    float* out;
    const float* x;
    const int64_t* place;
    const float *down, *up;
    size_t places, stacked, rows, each, inputs, width, outputs, columns;
};

// Both compile to what they are called in: the compiler has no choice between one rounding and two.
struct Fused {
    static inline __attribute__((always_inline)) float add(float a, float b, float c) {
        return __builtin_fmaf(a, b, c);
    }
};
struct Plain {
    static inline __attribute__((always_inline)) float add(float a, float b, float c) { return a * b + c; }
};

// out[0..N) += of[0] m[0][..] + of[1] m[1][..] + ..., the sums in registers.
template <typename Sum, size_t N>
inline __attribute__((always_inline)) void add_block(float* __restrict out, const float* __restrict of, size_t count,
                                                     const float* __restrict m, size_t columns) {
    float sum[N];
    for (size_t j = 0; j < N; ++j) sum[j] = out[j];
    for (size_t k = 0; k < count; ++k, m += columns)
        for (size_t j = 0; j < N; ++j) sum[j] = Sum::add(of[k], m[j], sum[j]);
    for (size_t j = 0; j < N; ++j) out[j] = sum[j];
}

template <typename Sum>
inline __attribute__((always_inline)) void add_product(float* __restrict out, size_t outputs,
                                                       const float* __restrict of, size_t count,
                                                       const float* __restrict m, size_t columns) {
    size_t o = 0;
    for (; o + 64 <= outputs; o += 64) add_block<Sum, 64>(out + o, of, count, m + o, columns);
    size_t left = (outputs - o) / 8;  // whole vectors: in one pass, for each waits for the sums of the one before
    if (left >= 6) add_block<Sum, 48>(out + o, of, count, m + o, columns), o += 48, left -= 6;
    if (left >= 4) add_block<Sum, 32>(out + o, of, count, m + o, columns), o += 32, left -= 4;
    if (left == 3) add_block<Sum, 24>(out + o, of, count, m + o, columns), o += 24;
    if (left == 2) add_block<Sum, 16>(out + o, of, count, m + o, columns), o += 16;
    if (left == 1) add_block<Sum, 8>(out + o, of, count, m + o, columns), o += 8;
    for (; o < outputs; ++o) add_block<Sum, 1>(out + o, of, count, m + o, columns);
}

template <typename Sum>
inline __attribute__((always_inline)) void add_rows(const Work& w, float* __restrict low) {
    for (size_t row = 0; row < w.rows; ++row) {
        size_t place = static_cast<size_t>(w.place[row / w.each]);
        if (place == 0) continue;
        for (size_t j = 0; j < w.width; ++j) low[j] = 0.0f;
        add_product<Sum>(low, w.width, w.x + row * w.inputs, w.inputs, w.down + place * w.inputs * w.width, w.width);
        add_product<Sum>(w.out + row * w.outputs, w.outputs, low, w.width, w.up + place * w.width * w.columns,
                         w.columns);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void add_rows_fused(const Work& w, float* low) {
    add_rows<Fused>(w, low);
}
void add_rows_plain(const Work& w, float* low) {
    add_rows<Plain>(w, low);
}
bool fuses() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
void add_rows_fused(const Work& w, float* low) {
    add_rows<Fused>(w, low);
}
void add_rows_plain(const Work& w, float* low) {
    add_rows_fused(w, low);
}
bool fuses() {
    return true;
}
#endif

// True if the rows are those of the places, and A and B have all of these; else with an error.
bool fits(const Work& w) {
    if (w.places == 0 || w.rows % w.places || w.rows / w.places != w.each) {
        PyErr_Format(PyExc_ValueError, "%zu rows are not %zu for each of %zu places", w.rows, w.each, w.places);
        return false;
    }
    for (size_t i = 0; i < w.places; ++i)
        if (w.place[i] < 0 || static_cast<size_t>(w.place[i]) >= w.stacked) {
            PyErr_Format(PyExc_ValueError, "place %lld: adapters have places 0 to %zd",
                         static_cast<long long>(w.place[i]), static_cast<Py_ssize_t>(w.stacked) - 1);
            return false;
        }
    return true;
}

// add(out, x, place, down, up, places, stacked, rows, each, inputs, width, outputs, columns): addresses, then counts.
PyObject* add(PyObject*, PyObject* const* args, Py_ssize_t count) {
    unsigned long long n[13];
    if (count != 13) return PyErr_Format(PyExc_TypeError, "add() takes 13 numbers, got %zd", count);
    for (int i = 0; i < 13; ++i) {
        n[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (PyErr_Occurred()) return nullptr;
    }
    Work w{reinterpret_cast<float*>(n[0]),
           reinterpret_cast<const float*>(n[1]),
           reinterpret_cast<const int64_t*>(n[2]),
           reinterpret_cast<const float*>(n[3]),
           reinterpret_cast<const float*>(n[4]),
           n[5],
           n[6],
           n[7],
           n[8],
           n[9],
           n[10],
           n[11],
           n[12]};
    if (!fits(w)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    std::vector<float> low(w.width);
    if (fuses()) {
        add_rows_fused(w, low.data());
    } else {
        add_rows_plain(w, low.data());
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL,
     "Add to each row what the adapter of its place gives."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_adapters",
                      "Low-rank adapters of many rows.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__adapters() {
    return PyModule_Create(&module);
}
