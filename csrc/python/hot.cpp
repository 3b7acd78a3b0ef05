// The calls of every hand-off: take, release, commit_segment, finish, put, alloc, get.
//
//  * Bound by hand, because pybind11's matching of arguments costs several times what these calls do.
//  * Each only reads its arguments and makes its answer; the work is in arrays.cpp and csrc/capi.
//  * Names, order and defaults of the arguments stand here once, in the Names of each call, and in busrl/_ring.pyi.
#include "hot.hpp"

namespace busrl::python {
namespace {

// The arguments of one call, found by place or by name. `names` begins with `positional` ones that may be given by
// place; of all of them the first `required` must be there, in either way.
template <size_t N>
struct Names {
    const char* call;
    size_t positional;
    size_t required;
    const char* name[N];
    PyObject* interned[N] = {};

    void intern() {
        for (size_t i = 0; i < N; ++i) interned[i] = PyUnicode_InternFromString(name[i]);
    }
    size_t find(PyObject* key) const {
        for (size_t i = 0; i < N; ++i)
            if (interned[i] == key) return i;
        for (size_t i = 0; i < N; ++i)
            if (PyUnicode_CompareWithASCIIString(key, name[i]) == 0) return i;
        throw py::type_error(std::string(call) + "() has no argument " + std::string(py::str(key)));
    }
    std::array<PyObject*, N> match(PyObject* const* args, Py_ssize_t n, PyObject* keywords) const {
        std::array<PyObject*, N> got{};
        if (size_t(n) > positional)
            throw py::type_error(std::string(call) + "() takes at most " + std::to_string(positional) +
                                 " arguments by place, got " + std::to_string(n));
        std::copy(args, args + n, got.begin());
        for (Py_ssize_t k = 0; keywords != nullptr && k < PyTuple_GET_SIZE(keywords); ++k) {
            PyObject*& slot = got[find(PyTuple_GET_ITEM(keywords, k))];
            if (slot != nullptr) throw py::type_error(std::string(call) + "() got an argument twice");
            slot = args[n + k];
        }
        for (size_t i = 0; i < required; ++i)
            if (got[i] == nullptr) throw py::type_error(std::string(call) + "() needs the argument " + name[i]);
        return got;
    }
};

uint64_t whole(PyObject* value) {
    const unsigned long long n = PyLong_Check(value) ? PyLong_AsUnsignedLongLong(value) : [&] {
        const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value));  // NumPy's integers
        if (!index) throw py::error_already_set();
        return PyLong_AsUnsignedLongLong(index.ptr());
    }();
    if (n == ~0ull && PyErr_Occurred()) throw py::error_already_set();
    return n;
}
uint32_t whole32(PyObject* value) {
    const uint64_t n = whole(value);
    if (n > UINT32_MAX) throw py::type_error("a number of at most 32 bits is expected, got " + std::to_string(n));
    return uint32_t(n);
}
uint32_t whole32(PyObject* value, uint32_t otherwise) {
    return value == nullptr ? otherwise : whole32(value);
}
double seconds(PyObject* value) {
    const double s = value == nullptr ? 0.0 : PyFloat_AsDouble(value);
    if (s == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return s;
}
std::string text(PyObject* value) {
    Py_ssize_t size;
    const char* bytes = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
    if (bytes == nullptr && PyErr_Occurred()) throw py::error_already_set();
    if (bytes == nullptr) throw py::type_error("a name is a str");
    return std::string(bytes, size_t(size));
}
State state_arg(PyObject* value) {
    const uint32_t n = whole32(value);
    if (n >= kStates) throw Error(Fault::general, "there is no state " + std::to_string(n));
    return State(n);
}
py::object borrowed(PyObject* value) {
    return py::reinterpret_borrow<py::object>(value);
}

std::vector<busrl_held> take_now(Handle& ring, const Wanted& want) {
    std::vector<busrl_held> held(std::min(want.limit, ring.live().shape.n_slots));
    uint32_t count;
    check(busrl_ring_take(&ring, uint32_t(want.from), uint32_t(want.to), want.cls, want.max_attempt, held.data(),
                          uint32_t(held.size()), &count));
    held.resize(count);
    return held;
}

// As take(); while there is nothing to take, it spins on the state's count for `spin_s`, then sleeps on it.
std::vector<busrl_held> take_within(Handle& ring, const Wanted& want, double timeout_s, double spin_s) {
    const Segment& seg = ring.writable();
    const uint32_t me = ring.me();
    uint64_t seen = transitions(seg, want.from);
    std::vector<busrl_held> held = take_now(ring, want);
    if (!held.empty() || timeout_s <= 0 || want.limit == 0) return held;
    const py::object keep = ring.mapping;  // close() in another thread must not unmap what we wait on
    const uint64_t spin_until = monotonic_ns() + uint64_t(std::max(0.0, std::min(spin_s, timeout_s)) * 1e9);
    wait_for(timeout_s, [&](uint64_t left) {
        const uint64_t now = spin_s > 0 ? monotonic_ns() : spin_until;
        if (now >= spin_until)
            nap(seg, want.from, seen, me, left);
        else if (!spin(seg, want.from, seen, std::min(spin_until - now, kWaitSliceNs)))
            return false;
        seen = transitions(seg, want.from);  // before the look: what comes during it ends the next wait at once
        held = take_now(ring, want);
        return !held.empty();
    });
    return held;
}

Names<7> g_take{"take", 2, 4, {"frm", "to", "cls", "limit", "max_attempt", "timeout_s", "spin_s"}};
py::object call_take(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_take.match(args, n, keywords);
    const Wanted want{state_arg(a[0]), state_arg(a[1]), a[2] == Py_None ? BUSRL_ANY_CLASS : int64_t(whole32(a[2])),
                      whole32(a[3]), whole32(a[4], 1)};
    const std::vector<busrl_held> held = take_within(ring, want, seconds(a[5]), seconds(a[6]));
    py::list out(held.size());
    for (size_t i = 0; i < held.size(); ++i) {
        PyObject* pair = PyTuple_New(2);
        if (pair == nullptr) throw py::error_already_set();
        PyTuple_SET_ITEM(pair, 0, PyLong_FromUnsignedLong(held[i].slot));
        PyTuple_SET_ITEM(pair, 1, PyLong_FromUnsignedLongLong(held[i].word));
        PyList_SET_ITEM(out.ptr(), Py_ssize_t(i), pair);
    }
    return std::move(out);
}

Names<3> g_release{"release", 3, 3, {"slot", "word", "to"}};
py::object call_release(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_release.match(args, n, keywords);
    uint64_t next;
    check(busrl_ring_release(&ring, whole32(a[0]), whole(a[1]), uint32_t(state_arg(a[2])), &next));
    return py::int_(next);
}

Names<3> g_commit{"commit_segment", 3, 3, {"slot", "word", "done"}};
py::object call_commit(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_commit.match(args, n, keywords);
    const bool done = borrowed(a[2]).cast<bool>();
    uint64_t next;
    check(busrl_ring_commit(&ring, whole32(a[0]), whole(a[1]), done, &next));
    return py::int_(next);
}

Names<3> g_finish{"finish", 3, 3, {"slot", "word", "fate"}};
py::object call_finish(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_finish.match(args, n, keywords);
    const uint8_t fate = fate_code(borrowed(a[2]));
    return py::bool_(finish(ring.writable(), ring.me(), ring.fates, whole32(a[0]), whole(a[1]), fate));
}

Names<6> g_put{"put", 5, 4, {"slot", "word", "name", "array", "segment", "checksum"}};
py::object call_put(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_put.match(args, n, keywords);
    const bool checksum = a[5] != nullptr && borrowed(a[5]).cast<bool>();
    put(ring, whole32(a[0]), whole(a[1]), text(a[2]), borrowed(a[3]), whole32(a[4], kNoSegment), checksum);
    return py::none();
}

Names<6> g_alloc{"alloc", 6, 5, {"slot", "word", "name", "dtype", "shape", "segment"}};
py::object call_alloc(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_alloc.match(args, n, keywords);
    return alloc(ring, whole32(a[0]), whole(a[1]), text(a[2]), borrowed(a[3]), borrowed(a[4]),
                 whole32(a[5], kNoSegment));
}

Names<3> g_get{"get", 3, 2, {"slot", "name", "segment"}};
py::object call_get(Handle& ring, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    const auto a = g_get.match(args, n, keywords);
    return get(ring, whole32(a[0]), text(a[1]), whole32(a[2], kNoSegment));
}

using Call = py::object (*)(Handle&, PyObject* const*, Py_ssize_t, PyObject*);

// What Python calls: finds the Handle in `self` (whose class the method descriptor has checked) and turns C++
// exceptions into Python's.
template <Call call>
PyObject* enter(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    try {
        void* handle = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr();
        if (handle == nullptr) throw py::type_error("a Ring is made by Ring.create or Ring.attach");
        return call(*static_cast<Handle*>(handle), args, n, keywords).release().ptr();
    } catch (...) {
        py::detail::try_translate_exceptions();
        return nullptr;
    }
}

template <Call call>
constexpr PyMethodDef method(const char* name) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter<call>)),
            METH_FASTCALL | METH_KEYWORDS, nullptr};
}

}  // namespace

const py::dtype* named_dtype(const py::object& name) {
    static constexpr const char* known[] = {"uint8",  "int32",  "float32", "int64", "bool",   "float64",
                                            "uint32", "uint64", "float16", "int16", "uint16", "int8"};
    static std::array<py::dtype*, std::size(known)> made{};
    if (!PyUnicode_Check(name.ptr())) return nullptr;
    for (size_t i = 0; i < std::size(known); ++i) {
        if (PyUnicode_CompareWithASCIIString(name.ptr(), known[i]) != 0) continue;
        if (made[i] == nullptr) made[i] = new py::dtype(known[i]);  // lives as long as the interpreter
        return made[i];
    }
    return nullptr;
}

void bind_hot(const py::object& ring) {
    static PyMethodDef methods[] = {
        method<call_take>("take"),     method<call_release>("release"), method<call_commit>("commit_segment"),
        method<call_finish>("finish"), method<call_put>("put"),         method<call_alloc>("alloc"),
        method<call_get>("get"),
    };
    g_take.intern();
    g_release.intern();
    g_commit.intern();
    g_finish.intern();
    g_put.intern();
    g_alloc.intern();
    g_get.intern();
    for (PyMethodDef& one : methods) {
        auto descriptor =
            py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(ring.ptr()), &one));
        if (!descriptor) throw py::error_already_set();
        ring.attr(one.ml_name) = descriptor;
    }
}

}  // namespace busrl::python
