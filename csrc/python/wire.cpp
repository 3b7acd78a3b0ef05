// The two sockets of a bus endpoint, driven through the very libzmq that pyzmq has loaded: a message out, many in.
//
//  * No header of libzmq and nothing linked: use() looks its stable C functions up in pyzmq's compiled part and what
//    that depends on. Where they cannot be seen (another backend, hidden symbols), busrl/bus/endpoint.py does the
//    same.
//  * pyzmq makes, fills and closes the sockets; a Wire keeps both alive and forgets their handles at close().
//  * The interpreter's lock is given up only where receive() may wait. One thread uses a Wire, as it uses a socket.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>

#include <algorithm>

namespace {

// zmq.h, since libzmq 4.1
constexpr int kDontWait = 1, kSendMore = 2;
struct Message {
    alignas(8) unsigned char opaque[64];
};

constexpr int kMost = 64;                       // messages of one call of receive()
constexpr size_t kMostBytes = size_t(1) << 18;  // beyond so many bytes there is not one more

struct Libzmq {
    void (*version)(int*, int*, int*);
    int (*send)(void*, const void*, size_t, int);
    int (*msg_init)(Message*);
    int (*msg_recv)(Message*, void*, int);
    void* (*msg_data)(Message*);
    size_t (*msg_size)(const Message*);
    int (*msg_more)(const Message*);
    int (*msg_close)(Message*);
};
Libzmq g_zmq{};
bool g_found = false;

template <typename F>
bool look_up(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
}

bool look_up_all(void* library, Libzmq& z) {
    return look_up(library, "zmq_version", z.version) && look_up(library, "zmq_send", z.send) &&
           look_up(library, "zmq_msg_init", z.msg_init) && look_up(library, "zmq_msg_recv", z.msg_recv) &&
           look_up(library, "zmq_msg_data", z.msg_data) && look_up(library, "zmq_msg_size", z.msg_size) &&
           look_up(library, "zmq_msg_more", z.msg_more) && look_up(library, "zmq_msg_close", z.msg_close);
}

// use(path): the version of the libzmq that the loaded library at `path` uses; LookupError if it can not be seen.
PyObject* use(PyObject*, PyObject* path) {
    const char* name = PyUnicode_AsUTF8(path);
    if (name == nullptr) return nullptr;
    // NOLOAD: a second copy would have other sockets. It stays open, as pyzmq's part never leaves the process either.
    void* library = *name == 0 ? nullptr : dlopen(name, RTLD_LAZY | RTLD_NOLOAD);  // "" would be the program itself
    Libzmq z{};
    if (library == nullptr || !look_up_all(library, z))
        return PyErr_Format(PyExc_LookupError, "no functions of libzmq are to be seen in %s", name);
    int major = 0, minor = 0, patch = 0;
    z.version(&major, &minor, &patch);
    if (major != 4 || minor < 1)
        return PyErr_Format(PyExc_LookupError, "libzmq %d.%d is not known here; 4.1 or a later 4 is", major, minor);
    g_zmq = z;
    g_found = true;
    return PyUnicode_FromFormat("%d.%d.%d", major, minor, patch);
}

// A frame on its way in: closed however its scope is left.
struct Frame {
    Message message;
    Frame() { g_zmq.msg_init(&message); }
    ~Frame() { g_zmq.msg_close(&message); }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;

    bool more() const { return g_zmq.msg_more(&message) != 0; }
    size_t size() const { return g_zmq.msg_size(&message); }
    PyObject* bytes() {
        return PyBytes_FromStringAndSize(static_cast<const char*>(g_zmq.msg_data(&message)), Py_ssize_t(size()));
    }
};

struct Wire {
    PyObject ob_base;
    PyObject *pub, *sub;  // pyzmq's sockets, kept alive
    PyObject* error;      // makes the exception of an errno
    void *out, *in;       // their handles; null once closed
    bool tail;            // the next frame belongs to a message whose first two were handed out
    int most;             // messages of the next call: asking for one that is not there costs a system call
};

PyObject* fail(Wire* self, int number) {
    PyObject* error = PyObject_CallFunction(self->error, "i", number);
    if (error == nullptr) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
    return nullptr;
}

bool send_frame(Wire* self, PyObject* bytes, int flags) {
    int sent;
    do sent = g_zmq.send(self->out, PyBytes_AS_STRING(bytes), size_t(PyBytes_GET_SIZE(bytes)), flags | kDontWait);
    while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

// send(topic, payload): both frames, or none, since a PUB socket drops whole messages. Never waits.
PyObject* send(PyObject* object, PyObject* const* args, Py_ssize_t n) {
    Wire* self = reinterpret_cast<Wire*>(object);
    if (n != 2 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "send() takes a topic and a payload, both bytes");
    if (self->out == nullptr) return fail(self, ENOTSOCK);
    if (!send_frame(self, args[0], kSendMore) || !send_frame(self, args[1], 0)) return fail(self, errno);
    Py_RETURN_NONE;
}

enum class Got { frame, nothing, error };

// The next frame; `error` with Python's exception set. A handler of a signal may close the socket while this waits.
Got receive_frame(Wire* self, Frame& frame, int flags) {
    while (self->in != nullptr) {
        void* socket = self->in;
        int size, number;
        if (flags & kDontWait) {
            size = g_zmq.msg_recv(&frame.message, socket, flags);
            number = errno;
        } else {
            Py_BEGIN_ALLOW_THREADS;
            size = g_zmq.msg_recv(&frame.message, socket, flags);
            number = errno;
            Py_END_ALLOW_THREADS;
        }
        if (size >= 0) return Got::frame;
        if (number == EAGAIN) return Got::nothing;
        if (number != EINTR) return fail(self, number), Got::error;
        if (PyErr_CheckSignals() != 0) return Got::error;
    }
    return fail(self, ENOTSOCK), Got::error;
}

// Tuples of frames. PyTuple_Pack would count each reference twice; these take them over.
PyObject* alone(Frame& first) {
    PyObject* bytes = first.bytes();
    PyObject* frames = bytes == nullptr ? nullptr : PyTuple_New(1);
    if (frames == nullptr) return Py_XDECREF(bytes), nullptr;
    PyTuple_SET_ITEM(frames, 0, bytes);
    return frames;
}
PyObject* pair(Frame& first, Frame& second) {
    PyObject* topic = first.bytes();
    PyObject* payload = topic == nullptr ? nullptr : second.bytes();
    PyObject* frames = payload == nullptr ? nullptr : PyTuple_New(2);
    if (frames == nullptr) return Py_XDECREF(topic), Py_XDECREF(payload), nullptr;
    PyTuple_SET_ITEM(frames, 0, topic);
    PyTuple_SET_ITEM(frames, 1, payload);
    return frames;
}

// The next tuple of frames, counted into `bytes`.
Got receive_message(Wire* self, int flags, PyObject*& frames, size_t& bytes) {
    Frame first, second;
    Got got = receive_frame(self, first, flags);
    if (got != Got::frame) return got;
    const bool more = first.more();
    const bool whole = !self->tail && more;
    if (whole && (got = receive_frame(self, second, kDontWait)) == Got::error) return got;
    const bool two = whole && got == Got::frame;  // always, since libzmq hands messages out whole
    self->tail = two ? second.more() : self->tail && more;
    frames = two ? pair(first, second) : alone(first);
    bytes += first.size() + second.size();
    return frames == nullptr ? Got::error : Got::frame;
}

// receive(flags): a list of what is here, each topic and payload or a single frame that belongs to no message. Twice as
// many as the last time if those were all there, one if not: one at a time, nothing is asked for in vain.
PyObject* receive(PyObject* object, PyObject* const* args, Py_ssize_t n) {
    Wire* self = reinterpret_cast<Wire*>(object);
    const long flags = n == 1 ? PyLong_AsLong(args[0]) : -1;
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    if (flags != 0 && flags != kDontWait) return PyErr_Format(PyExc_TypeError, "receive() takes the flags 0 or 1");
    PyObject* list = PyList_New(0);
    if (list == nullptr) return nullptr;
    Got got = Got::frame;
    size_t bytes = 0;
    for (int count = 0; count < self->most && bytes <= kMostBytes; ++count) {
        PyObject* frames = nullptr;
        got = receive_message(self, count == 0 ? int(flags) : kDontWait, frames, bytes);
        if (got == Got::frame && PyList_Append(list, frames) != 0) got = Got::error;
        Py_XDECREF(frames);
        if (got != Got::frame) break;
    }
    if (got == Got::error) return Py_DECREF(list), nullptr;
    self->most = got == Got::nothing ? 1 : std::min(2 * self->most, kMost);
    return list;
}

// close(): no handle is used from here on; the sockets stay their owner's to close. Idempotent.
PyObject* close_wire(PyObject* object, PyObject*) {
    Wire* self = reinterpret_cast<Wire*>(object);
    self->out = self->in = nullptr;
    Py_RETURN_NONE;
}

void* handle_of(PyObject* socket) {
    PyObject* number = PyObject_GetAttrString(socket, "underlying");
    if (number == nullptr) return nullptr;
    void* handle = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    if (handle == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the socket has no handle");
    return handle;
}

void free_wire(PyObject* object) {
    Wire* self = reinterpret_cast<Wire*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_CLEAR(self->pub);
    Py_CLEAR(self->sub);
    Py_CLEAR(self->error);
    type->tp_free(object);
    Py_DECREF(type);
}

// Wire(pub, sub, error)
PyObject* new_wire(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    PyObject *pub, *sub, *error;
    static const char* names[] = {"pub", "sub", "error", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO", const_cast<char**>(names), &pub, &sub, &error))
        return nullptr;
    if (!g_found) return PyErr_Format(PyExc_LookupError, "no libzmq: use() has not found one");
    void* out = handle_of(pub);
    void* in = out == nullptr ? nullptr : handle_of(sub);
    if (in == nullptr) return nullptr;
    Wire* self = reinterpret_cast<Wire*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->pub = Py_NewRef(pub);
    self->sub = Py_NewRef(sub);
    self->error = Py_NewRef(error);
    self->out = out;
    self->in = in;
    self->most = 1;
    return reinterpret_cast<PyObject*>(self);
}

template <typename F>
PyCFunction function(F* one) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(one));
}

PyMethodDef wire_methods[] = {
    {"send", function(send), METH_FASTCALL, "Topic and payload, both or none; never waits."},
    {"receive", function(receive), METH_FASTCALL, "What is here, as a list of tuples of frames."},
    {"close", close_wire, METH_NOARGS, "No handle is used from here on; idempotent."},
    {nullptr, nullptr, 0, nullptr},
};
PyMethodDef module_methods[] = {
    {"use", use, METH_O, "The version of the libzmq of the loaded library at a path; LookupError."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot wire_slots[] = {
    {Py_tp_doc, const_cast<char*>("The sockets of one endpoint, through pyzmq's own libzmq.")},
    {Py_tp_new, reinterpret_cast<void*>(new_wire)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_wire)},
    {Py_tp_methods, wire_methods},
    {0, nullptr},
};
PyType_Spec wire_type = {"busrl._wire.Wire", sizeof(Wire), 0, Py_TPFLAGS_DEFAULT, wire_slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "busrl._wire",
                      "libzmq as pyzmq has loaded it.",
                      -1,
                      module_methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__wire() {
    PyObject* made = PyModule_Create(&module);
    PyObject* type = made == nullptr ? nullptr : PyType_FromSpec(&wire_type);
    if (type != nullptr && PyModule_AddObject(made, "Wire", type) == 0) return made;  // which takes `type` over
    Py_XDECREF(type);
    Py_XDECREF(made);
    return nullptr;
}
