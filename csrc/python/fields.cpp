// The Python module busrl._fields: a reader of protobuf fields over bytes, with a bound on how many there may be.
//
//  * A Reader keeps its bytes alive. Places are checked against them, whatever the caller gives.
//  * All messages of a Reader share one bound, so that small fields without number cannot keep a process busy.
//  * Fields are read as they are asked for: a fault is raised when its turn comes, by an exception of the caller's.
// Knows nothing of field numbers or of what a message means; fields.hpp does the reading.
#define PY_SSIZE_T_CLEAN
#include "fields.hpp"

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <new>
#include <vector>

namespace {

using busrl::fields::Fault;
using busrl::fields::Field;
using busrl::fields::Span;

constexpr size_t kRow = 4;   // numbers of a field: its message, key, start and stop
constexpr int kTooMany = 4;  // the fault that is this module's own
static_assert(kTooMany == int(Fault::beyond) + 1, "its number follows those of fields.hpp");

struct Reader {
    PyObject ob_base;
    PyObject* body;   // bytes
    PyObject* error;  // makes the exception of a fault and a number
    Py_ssize_t most, left;
};

// Of one message of a Reader.
struct Fields {
    PyObject ob_base;
    Reader* reader;
    Span span;
};

PyTypeObject* g_fields = nullptr;

PyObject* fail(Reader* self, int fault, uint64_t number) {
    PyObject* error = PyObject_CallFunction(self->error, "iK", fault, static_cast<unsigned long long>(number));
    if (error == nullptr) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
    return nullptr;
}

bool span_of(Reader* self, PyObject* const* args, Span& span) {
    const Py_ssize_t at = PyLong_AsSsize_t(args[0]);
    if (at == -1 && PyErr_Occurred()) return false;
    const Py_ssize_t end = PyLong_AsSsize_t(args[1]);
    if (end == -1 && PyErr_Occurred()) return false;
    if (at < 0 || end < at || end > PyBytes_GET_SIZE(self->body)) {
        PyErr_Format(PyExc_IndexError, "[%zd:%zd] of %zd bytes", at, end, PyBytes_GET_SIZE(self->body));
        return false;
    }
    span = {reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(self->body)), uint64_t(at), uint64_t(end)};
    return true;
}

// fields(at, end): an iterator over key, start and stop of each field of the message there.
PyObject* fields(PyObject* object, PyObject* const* args, Py_ssize_t n) {
    Reader* self = reinterpret_cast<Reader*>(object);
    Span span;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "fields() takes the places where a message begins and ends");
    if (!span_of(self, args, span)) return nullptr;
    Fields* made = PyObject_New(Fields, g_fields);
    if (made == nullptr) return nullptr;
    Py_INCREF(object);
    made->reader = self;
    made->span = span;
    return reinterpret_cast<PyObject*>(made);
}

PyObject* next_field(PyObject* object) {
    Fields* self = reinterpret_cast<Fields*>(object);
    Span& span = self->span;
    if (span.at >= span.end) return nullptr;  // StopIteration
    Field field{};
    const Fault fault = busrl::fields::read_field(span, field);
    const bool too_many = fault == Fault::none && self->reader->left == 0;
    if (fault != Fault::none || too_many) {
        span.at = span.end;
        return too_many ? fail(self->reader, kTooMany, uint64_t(self->reader->most))
                        : fail(self->reader, int(fault), field.key & 7);
    }
    --self->reader->left;
    PyObject* parts[] = {PyLong_FromUnsignedLongLong(field.key), PyLong_FromUnsignedLongLong(field.start),
                         PyLong_FromUnsignedLongLong(field.stop)};
    PyObject* tuple = PyTuple_New(3);
    if (tuple == nullptr || parts[0] == nullptr || parts[1] == nullptr || parts[2] == nullptr) {
        for (PyObject* part : parts) Py_XDECREF(part);
        Py_XDECREF(tuple);
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < 3; ++i) PyTuple_SET_ITEM(tuple, i, parts[i]);
    return tuple;
}

// numbers(at, end, most): a list of the varints that stand there in a row, the first `most` of them.
PyObject* numbers(PyObject* object, PyObject* const* args, Py_ssize_t n) {
    Reader* self = reinterpret_cast<Reader*>(object);
    Span span;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "numbers() takes two places and how many at most");
    const Py_ssize_t most = PyLong_AsSsize_t(args[2]);
    if ((most == -1 && PyErr_Occurred()) || !span_of(self, args, span)) return nullptr;
    PyObject* list = PyList_New(0);
    while (list != nullptr && span.at < span.end && PyList_GET_SIZE(list) < most) {
        uint64_t value = 0;
        const Fault fault = busrl::fields::read_number(span, value);
        PyObject* number = fault == Fault::none ? PyLong_FromUnsignedLongLong(value) : fail(self, int(fault), 0);
        if (number == nullptr || PyList_Append(list, number) != 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

// The fields of the messages at `bounds`, pairs of places: message, key, start and stop of each. False at a fault, or
// if there are more than `left`.
bool read_rows(const uint8_t* body, const int64_t* bounds, size_t messages, size_t left, std::vector<int64_t>& rows) {
    rows.reserve(kRow * std::min(left, 4 * messages));
    Field field{};
    for (size_t message = 0; message < messages; ++message) {
        Span span{body, uint64_t(bounds[2 * message]), uint64_t(bounds[2 * message + 1])};
        while (span.at < span.end) {
            if (rows.size() / kRow == left || busrl::fields::read_field(span, field) != Fault::none) return false;
            rows.insert(rows.end(), {int64_t(message), int64_t(field.key), int64_t(field.start), int64_t(field.stop)});
        }
    }
    return true;
}

bool are_within(const int64_t* bounds, size_t messages, Py_ssize_t size) {
    for (size_t message = 0; message < messages; ++message) {
        const int64_t at = bounds[2 * message], end = bounds[2 * message + 1];
        if (at < 0 || end < at || end > size) return false;
    }
    return true;
}

PyObject* rows_of(Reader* self, const Py_buffer& bounds) {
    const auto* places = static_cast<const int64_t*>(bounds.buf);
    const size_t messages = size_t(bounds.len) / (2 * sizeof(int64_t));
    if (size_t(bounds.len) % (2 * sizeof(int64_t)) != 0)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are no pairs of places", bounds.len);
    if (!are_within(places, messages, PyBytes_GET_SIZE(self->body)))
        return PyErr_Format(PyExc_IndexError, "a message outside of %zd bytes", PyBytes_GET_SIZE(self->body));
    const auto* body = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(self->body));
    std::vector<int64_t> rows;
    try {
        if (!read_rows(body, places, messages, size_t(self->left), rows)) Py_RETURN_NONE;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    self->left -= Py_ssize_t(rows.size() / kRow);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(rows.data()),
                                     Py_ssize_t(rows.size() * sizeof(int64_t)));
}

// rows(bounds): 64-bit numbers, four for each field of the messages; None at a fault, and then nothing is counted.
PyObject* rows(PyObject* object, PyObject* places) {
    Py_buffer bounds;
    if (PyObject_GetBuffer(places, &bounds, PyBUF_SIMPLE) != 0) return nullptr;
    PyObject* found = rows_of(reinterpret_cast<Reader*>(object), bounds);
    PyBuffer_Release(&bounds);
    return found;
}

// Reader(body, most, error)
PyObject* new_reader(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    PyObject *body, *error;
    Py_ssize_t most;
    static const char* names[] = {"body", "most", "error", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "SnO", const_cast<char**>(names), &body, &most, &error))
        return nullptr;
    if (most < 0) return PyErr_Format(PyExc_ValueError, "%zd fields at most", most);
    Reader* self = reinterpret_cast<Reader*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->body = Py_NewRef(body);
    self->error = Py_NewRef(error);
    self->most = self->left = most;
    return reinterpret_cast<PyObject*>(self);
}

void free_reader(PyObject* object) {
    Reader* self = reinterpret_cast<Reader*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_CLEAR(self->body);
    Py_CLEAR(self->error);
    type->tp_free(object);
    Py_DECREF(type);
}

void free_fields(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    Py_DECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Fields*>(object)->reader));
    PyObject_Free(object);
    Py_DECREF(type);
}

template <typename F>
PyCFunction function(F* one) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(one));
}

PyMethodDef reader_methods[] = {
    {"fields", function(fields), METH_FASTCALL, "Key, start and stop of each field of a message."},
    {"rows", rows, METH_O, "All fields of some messages, as 64-bit numbers; None at a fault."},
    {"numbers", function(numbers), METH_FASTCALL, "The numbers that stand in a row."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef reader_members[] = {
    {"left", T_PYSSIZET, offsetof(Reader, left), READONLY, "How many fields may still be read."},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot reader_slots[] = {
    {Py_tp_doc, const_cast<char*>("Reads the messages in some bytes.")},
    {Py_tp_new, reinterpret_cast<void*>(new_reader)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_reader)},
    {Py_tp_methods, reader_methods},
    {Py_tp_members, reader_members},
    {0, nullptr},
};
PyType_Slot fields_slots[] = {
    {Py_tp_doc, const_cast<char*>("The fields of a message, one after the other.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_fields)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(next_field)},
    {0, nullptr},
};
PyType_Spec reader_type = {"busrl._fields.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};
PyType_Spec fields_type = {"busrl._fields.Fields", sizeof(Fields), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, fields_slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "busrl._fields",
                      "Fields of protobuf messages.",
                      -1,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__fields() {
    g_fields = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&fields_type));
    PyObject* made = g_fields == nullptr ? nullptr : PyModule_Create(&module);
    PyObject* type = made == nullptr ? nullptr : PyType_FromSpec(&reader_type);
    if (type != nullptr && PyModule_AddObject(made, "Reader", type) == 0) return made;  // which takes `type` over
    Py_XDECREF(type);
    Py_XDECREF(made);
    return nullptr;
}
