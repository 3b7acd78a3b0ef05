// NumPy faces of control lines and tensors. Views are made in place; their base keeps the mapping alive.
#include "hot.hpp"

namespace busrl::python {
void set_dtype(busrl_tensor& tensor, const py::dtype& dtype) {
    const char kind = dtype.kind(), order = dtype.byteorder();
    const bool known = (kind == 'i' || kind == 'u' || kind == 'f' || kind == 'b') && order != '>';
    if (!known || dtype.itemsize() > 8)
        throw Error(Fault::general, "a tensor is of a native integer, float or bool type of at most 64 bits, not " +
                                        std::string(py::str(dtype)));
    tensor.bits = uint8_t(dtype.itemsize() * 8);
    tensor.dtype = kind == 'i' ? BUSRL_INT : kind == 'f' ? BUSRL_FLOAT : kind == 'b' ? BUSRL_BOOL : BUSRL_UINT;
}

namespace {

using Row = busrl_line;  // a control line as Python sees it

const py::dtype& row_dtype() {
    static const py::dtype* one = [] {
        py::list names, formats, offsets;
        auto add = [&](const char* name, const py::dtype& format, size_t offset) {
            names.append(name);
            formats.append(format);
            offsets.append(offset);
        };
        add("word", py::dtype::of<uint64_t>(), offsetof(Row, word));
#define BUSRL_FIELD(name, type, offset) add(#name, py::dtype::of<type>(), offsetof(Row, name));
        BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
        add("seq", py::dtype::of<uint64_t>(), offsetof(Row, seq));
        add("owner", py::dtype::of<uint16_t>(), offsetof(Row, owner));
        add("state", py::dtype::of<uint8_t>(), offsetof(Row, state));
        add("segs", py::dtype::of<uint8_t>(), offsetof(Row, segs));
        return new py::dtype(names, formats, offsets, sizeof(Row));  // lives as long as the interpreter
    }();
    return *one;
}

const py::dtype& dtype_of(uint8_t code, uint8_t bits) {
    static std::array<std::array<py::dtype*, 4>, 8> cache{};
    const uint32_t size = bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : 3;
    py::dtype*& one = cache[code & 7][size];
    if (one == nullptr) {
        const char kind = code == kInt ? 'i' : code == kFloat ? 'f' : code == kBool ? 'b' : 'u';  // bfloat16: raw bits
        one = new py::dtype(std::string(1, kind) + std::to_string(bits / 8));
    }
    return *one;
}

busrl_tensor begin_tensor(uint8_t dtype = BUSRL_UINT, uint8_t bits = 8) {
    busrl_tensor tensor{};
    tensor.size = sizeof(tensor);
    tensor.dtype = dtype;
    tensor.bits = bits;
    return tensor;
}

void set_shape(busrl_tensor& tensor, const py::ssize_t* shape, size_t ndim) {
    if (ndim > kMaxDims) throw Error(Fault::general, "a tensor has at most 4 dimensions, got " + std::to_string(ndim));
    tensor.ndim = uint8_t(ndim);
    for (size_t d = 0; d < ndim; ++d) {
        if (shape[d] < 0) throw Error(Fault::general, "a tensor has no negative dimension");
        tensor.shape[d] = uint64_t(shape[d]);
    }
}

py::array view_of(const Handle& ring, const busrl_tensor& t, bool writable) {
    py::ssize_t shape[kMaxDims] = {};
    for (uint32_t d = 0; d < t.ndim; ++d) shape[d] = py::ssize_t(t.shape[d]);
    py::array::ShapeContainer dims(shape, shape + t.ndim);
    py::array view(dtype_of(t.dtype, t.bits), std::move(dims), t.data, ring.mapping);
    if (!writable) py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return view;
}

// Read-only. The owner of the slot looks into the mapping. Anybody else might meet a hole there, if the slot is given
// back meanwhile: a long answer is copied out of the file then, which reads holes as zeros.
py::array seen(const Handle& ring, uint32_t slot, const busrl_tensor& t) {
    const Segment& seg = ring.live();
    if (!has_loose(seg.shape) || (ring.index() != 0 && is_owned_by(load_word(seg, slot), ring.index())))
        return view_of(ring, t, false);
    py::array copy(dtype_of(t.dtype, t.bits), py::array::ShapeContainer(t.shape, t.shape + t.ndim));
    auto* to = static_cast<char*>(copy.mutable_data());
    const auto from = static_cast<const uint8_t*>(t.data) - seg.payload(0) + off_t(seg.shape.data_off);
    for (uint64_t done = 0; done < t.nbytes;) {
        const ssize_t n = ::pread(seg.fd(), to + done, t.nbytes - done, from + off_t(done));
        if (n <= 0) throw Error(Fault::general, errno_text("cannot read the ring " + seg.path));
        done += uint64_t(n);
    }
    py::detail::array_proxy(copy.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return copy;
}

}  // namespace

py::array lines(const Handle& ring, const std::optional<std::vector<uint32_t>>& slots) {
    const Segment& seg = ring.live();
    const uint32_t count = slots ? uint32_t(slots->size()) : seg.shape.n_slots;
    py::array out(row_dtype(), py::ssize_t(count));
    Row* row = static_cast<Row*>(out.mutable_data());
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t slot = slots ? (*slots)[i] : i;
        check_slot(seg, slot);
        read_line(seg, slot, row[i]);
    }
    return out;
}

py::object line(const Handle& ring, uint32_t slot) {
    const Segment& seg = ring.live();
    check_slot(seg, slot);
    py::array out(row_dtype(), py::ssize_t(1));
    read_line(seg, slot, *static_cast<Row*>(out.mutable_data()));
    return out[py::int_(0)];
}

py::array words(const Handle& ring) {
    const Segment& seg = ring.live();
    py::array_t<uint64_t> out(py::ssize_t(seg.shape.n_slots));
    uint64_t* word = out.mutable_data();
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) word[i] = load_word(seg, i);
    return out;
}

void put(Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& array, uint32_t segment,
         bool checksum) {
    busrl_tensor tensor = begin_tensor();
    tensor.flags = checksum ? BUSRL_CHECKSUM : 0;
    py::array held;
    if (PyBytes_Check(array.ptr())) {
        const py::ssize_t size = PyBytes_GET_SIZE(array.ptr());
        set_shape(tensor, &size, 1);
        tensor.data = PyBytes_AS_STRING(array.ptr());
    } else {
        held = py::array::ensure(array, py::array::c_style);
        if (!held) throw py::error_already_set();
        set_dtype(tensor, held.dtype());
        set_shape(tensor, held.shape(), size_t(held.ndim()));
        tensor.data = const_cast<void*>(held.data());  // put only reads it
    }
    check(busrl_ring_put(&ring, slot, word, name.c_str(), segment, &tensor));
}

py::array alloc(Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& dtype,
                const py::object& shape, uint32_t segment) {
    busrl_tensor tensor = begin_tensor(BUSRL_BFLOAT, 16);
    if (const py::dtype* known = named_dtype(dtype))
        set_dtype(tensor, *known);
    else if (!py::isinstance<py::str>(dtype) || dtype.cast<std::string>() != "bfloat16")
        set_dtype(tensor, py::dtype::from_args(dtype));
    std::vector<py::ssize_t> dims;
    if (py::isinstance<py::int_>(shape))
        dims.push_back(shape.cast<py::ssize_t>());
    else
        dims = shape.cast<std::vector<py::ssize_t>>();
    set_shape(tensor, dims.data(), dims.size());
    check(busrl_ring_alloc(&ring, slot, word, name.c_str(), segment, &tensor));
    return view_of(ring, tensor, true);
}

py::array get(Handle& ring, uint32_t slot, const std::string& name, uint32_t segment) {
    busrl_tensor tensor;
    tensor.size = sizeof(tensor);
    check(busrl_ring_tensor(&ring, slot, name.c_str(), segment, &tensor));
    return seen(ring, slot, tensor);
}

py::dict tensors(Handle& ring, uint32_t slot) {
    py::dict out;
    for (uint32_t place = 0; place < kTensors; ++place) {
        busrl_tensor tensor = begin_tensor();
        if (check(busrl_ring_tensor_at(&ring, slot, place, &tensor)) == BUSRL_AGAIN) continue;
        out[py::make_tuple(readable(tensor.name), tensor.segment)] = seen(ring, slot, tensor);
    }
    return out;
}

namespace {
uint32_t field_bit(const std::string& name, const py::handle& value, busrl_line& line) {
    uint32_t bit = 1;
#define BUSRL_FIELD(field, type, offset) \
    if (name == #field) {                \
        line.field = value.cast<type>(); \
        return bit;                      \
    }                                    \
    bit <<= 1;
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
    throw Error(Fault::general, "a control line has no field \"" + name + "\"");
}
}  // namespace

void set_fields(Handle& ring, uint32_t slot, uint64_t word, const py::kwargs& fields) {
    busrl_line line{};
    line.size = sizeof(line);
    uint32_t bits = 0;
    for (const auto& [key, value] : fields) {
        const std::string name = py::cast<std::string>(key);
        if (name == "uid" || name == "last_commit_seq" || name == "changed_ns")
            throw Error(Fault::general, "the line field \"" + name + "\" is the ring's own and cannot be set");
        bits |= field_bit(name, value, line);
    }
    check(busrl_ring_set(&ring, slot, word, &line, bits));
}

}  // namespace busrl::python
