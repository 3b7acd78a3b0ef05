// NumPy faces of control lines and tensors. Views are made in place; their base keeps the mapping alive.
#include "hot.hpp"

namespace busrl::python {
namespace {

struct Row {  // a control line as Python sees it: the fields of the line, and the word taken apart
    uint64_t word;
#define BUSRL_FIELD(name, type, offset) type name;
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
    uint64_t seq;
    uint16_t owner;
    uint8_t state;
    uint8_t segs;
    uint32_t pad;
};
static_assert(sizeof(Row) == 144 && offsetof(Row, seq) == sizeof(Line));
#define BUSRL_FIELD(name, type, offset) static_assert(offsetof(Row, name) == (offset));
BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD

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

// A row of a slot at rest is consistent: it is read again if the word moved meanwhile.
void read_row(const Segment& seg, uint32_t slot, Row& row) {
    using Raw = uint64_t __attribute__((may_alias));  // a line is 16 aligned words; whole words copy fastest
    const auto* from = reinterpret_cast<const Raw*>(&seg.line(slot));
    auto* to = reinterpret_cast<Raw*>(&row);
    for (int tries = 0; tries < 4; ++tries) {
        for (size_t k = 0; k < sizeof(Line) / 8; ++k) to[k] = __atomic_load_n(from + k, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(from, __ATOMIC_ACQUIRE) == row.word) break;
    }
    row.seq = seq_of(row.word);
    row.owner = uint16_t(owner_of(row.word));
    row.state = uint8_t(state_index(row.word));
    row.segs = uint8_t(segs_of(row.word));
    row.pad = 0;
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

void set_dtype(TensorEntry& entry, const py::dtype& dtype) {
    const char kind = dtype.kind(), order = dtype.byteorder();
    entry.bits = uint8_t(dtype.itemsize() * 8);
    entry.code = kind == 'i' ? kInt : kind == 'f' ? kFloat : kind == 'b' ? kBool : kUint;
    const bool known = (kind == 'i' || kind == 'u' || kind == 'f' || kind == 'b') && order != '>';
    if (!known || dtype.itemsize() > 8 || !known_dtype(entry))
        throw Error(Fault::general, "a tensor is of a native integer, float or bool type of at most 64 bits, not " +
                                        std::string(py::str(dtype)));
}

TensorEntry begin_entry(const std::string& name, uint32_t segment) {
    TensorName checked(name);
    if (segment > kNoSegment) throw Error(Fault::general, "segment is 0 .. 254, or 255 for none");
    TensorEntry entry{};
    std::memcpy(entry.name, checked.word, kNameBytes);
    entry.segment = uint8_t(segment);
    entry.flags = kTensorValid;
    return entry;
}

void set_shape(TensorEntry& entry, const py::ssize_t* shape, size_t ndim) {
    if (ndim > kMaxDims) throw Error(Fault::general, "a tensor has at most 4 dimensions, got " + std::to_string(ndim));
    entry.ndim = uint8_t(ndim);
    unsigned __int128 bytes = entry.bits / 8;
    for (size_t d = 0; d < ndim; ++d) {
        if (shape[d] < 0) throw Error(Fault::general, "a tensor has no negative dimension");
        entry.shape[d] = uint64_t(shape[d]);
        bytes *= entry.shape[d];
        if (bytes >> 62) throw Error(Fault::slot_too_small, "a tensor of more than 2**62 bytes fits no slot");
    }
    entry.nbytes = uint64_t(bytes);
}

py::array view_of(const Handle& ring, const Segment& seg, uint32_t slot, const TensorEntry& e, bool writable) {
    py::ssize_t shape[kMaxDims] = {};
    for (uint32_t d = 0; d < e.ndim; ++d) shape[d] = py::ssize_t(e.shape[d]);
    py::array::ShapeContainer dims(shape, shape + e.ndim);
    py::array view(dtype_of(e.code, e.bits), std::move(dims), seg.payload(slot) + e.offset, ring.mapping);
    if (!writable) py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return view;
}

[[noreturn]] void no_tensor(const Segment& seg, uint32_t slot, const std::string& name, uint32_t segment) {
    const uint64_t word = load_word(seg, slot);
    throw Error(Fault::no_tensor, "slot " + std::to_string(slot) + " (" + name_of(state_of(word)) + ", " +
                                      std::to_string(segs_of(word)) + " segments) has no tensor \"" + name + "\"" +
                                      (segment == kNoSegment ? "" : " of segment " + std::to_string(segment)));
}

[[noreturn]] void bad_entry(uint32_t slot, const TensorEntry& e, const char* why) {
    throw Error(Fault::corrupt, "slot " + std::to_string(slot) + ": " + describe_name(e) + ": " + why);
}

bool may_see(const Handle& ring, uint64_t word, uint32_t segment) {
    return segment == kNoSegment || segment < segs_of(word) || (ring.index() != 0 && is_owned_by(word, ring.index()));
}

}  // namespace

py::array lines(const Handle& ring) {
    const Segment& seg = ring.live();
    py::array out(row_dtype(), py::ssize_t(seg.shape.n_slots));
    Row* row = static_cast<Row*>(out.mutable_data());
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) read_row(seg, i, row[i]);
    return out;
}

py::object line(const Handle& ring, uint32_t slot) {
    const Segment& seg = ring.live();
    check_slot(seg, slot);
    py::array out(row_dtype(), py::ssize_t(1));
    read_row(seg, slot, *static_cast<Row*>(out.mutable_data()));
    return out[py::int_(0)];
}

py::array words(const Handle& ring) {
    const Segment& seg = ring.live();
    py::array_t<uint64_t> out(py::ssize_t(seg.shape.n_slots));
    uint64_t* word = out.mutable_data();
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) word[i] = load_word(seg, i);
    return out;
}

void put(const Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& array,
         uint32_t segment, bool checksum) {
    const Segment& seg = ring.writable();
    check_owner(seg, ring.me(), slot, word);
    TensorEntry entry = begin_entry(name, segment);
    const void* bytes;
    py::array held;
    if (PyBytes_Check(array.ptr())) {
        const py::ssize_t size = PyBytes_GET_SIZE(array.ptr());
        entry.code = kUint;
        entry.bits = 8;
        set_shape(entry, &size, 1);
        bytes = PyBytes_AS_STRING(array.ptr());
    } else {
        held = py::array::ensure(array, py::array::c_style);
        if (!held) throw py::error_already_set();
        set_dtype(entry, held.dtype());
        set_shape(entry, held.shape(), size_t(held.ndim()));
        bytes = held.data();
    }
    const uint32_t index = place_entry(seg, slot, word, entry);
    if (entry.nbytes != 0) std::memcpy(seg.payload(slot) + entry.offset, bytes, entry.nbytes);
    if (checksum) {
        entry.crc32c = crc32c(bytes, entry.nbytes);
        entry.flags |= kTensorHasCrc;
    }
    crash_point("put.copied");
    store_entry(seg.table(slot), index, entry);
    crash_point("put.stored");
}

py::array alloc(const Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& dtype,
                const py::object& shape, uint32_t segment) {
    const Segment& seg = ring.writable();
    check_owner(seg, ring.me(), slot, word);
    TensorEntry entry = begin_entry(name, segment);
    if (py::isinstance<py::str>(dtype) && dtype.cast<std::string>() == "bfloat16") {
        entry.code = kBfloat;
        entry.bits = 16;
    } else if (const py::dtype* known = named_dtype(dtype)) {
        set_dtype(entry, *known);
    } else {
        set_dtype(entry, py::dtype::from_args(dtype));
    }
    std::vector<py::ssize_t> dims;
    if (py::isinstance<py::int_>(shape))
        dims.push_back(shape.cast<py::ssize_t>());
    else
        dims = shape.cast<std::vector<py::ssize_t>>();
    set_shape(entry, dims.data(), dims.size());
    const uint32_t index = place_entry(seg, slot, word, entry);
    store_entry(seg.table(slot), index, entry);
    return view_of(ring, seg, slot, entry, true);
}

py::array get(const Handle& ring, uint32_t slot, const std::string& name, uint32_t segment) {
    const Segment& seg = ring.live();
    check_slot(seg, slot);
    if (segment > kNoSegment || !may_see(ring, load_word(seg, slot), segment)) no_tensor(seg, slot, name, segment);
    const TensorTable& table = seg.table(slot);
    const auto index = find_entry(table, TensorName(name), uint8_t(segment));
    if (!index) no_tensor(seg, slot, name, segment);
    const TensorEntry entry = load_entry(table, *index);
    if (!entry_is_sound(entry, seg.shape.slot_bytes)) bad_entry(slot, entry, "its descriptor breaks the layout");
    if ((entry.flags & kTensorHasCrc) && crc32c(seg.payload(slot) + entry.offset, entry.nbytes) != entry.crc32c)
        bad_entry(slot, entry, "its checksum is wrong");
    return view_of(ring, seg, slot, entry, false);
}

py::dict tensors(const Handle& ring, uint32_t slot) {
    const Segment& seg = ring.live();
    check_slot(seg, slot);
    const uint64_t word = load_word(seg, slot);
    const TensorTable& table = seg.table(slot);
    py::dict out;
    for (uint32_t i = 0, used = used_entries(table); i < used; ++i) {
        const TensorEntry entry = load_entry(table, i);
        if (!(entry.flags & kTensorValid) || !may_see(ring, word, entry.segment)) continue;
        if (!entry_is_sound(entry, seg.shape.slot_bytes)) bad_entry(slot, entry, "its descriptor breaks the layout");
        const py::str name = readable(std::string(entry.name, ::strnlen(entry.name, kNameBytes)));
        out[py::make_tuple(name, entry.segment)] = view_of(ring, seg, slot, entry, false);
    }
    return out;
}

void set_fields(const Handle& ring, uint32_t slot, uint64_t word, const py::kwargs& fields) {
    const Segment& seg = ring.writable();
    check_owner(seg, ring.me(), slot, word);
    Line& line = seg.line(slot);
    for (const auto& [key, value] : fields) {
        const std::string name = py::cast<std::string>(key);
        if (name == "uid" || name == "last_commit_seq" || name == "changed_ns")
            throw Error(Fault::general, "the line field \"" + name + "\" is the ring's own and cannot be set");
        if (name == "flags") {  // the ring keeps one bit of it for itself
            const uint32_t own = line.flags.load(std::memory_order_relaxed) & kFlagAlone;
            line.flags.store((value.cast<uint32_t>() & ~kFlagAlone) | own, std::memory_order_release);
            continue;
        }
#define BUSRL_FIELD(field, type, offset)                                 \
    if (name == #field) {                                                \
        line.field.store(value.cast<type>(), std::memory_order_release); \
        continue;                                                        \
    }
        BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
        throw Error(Fault::general, "a control line has no field \"" + name + "\"");
    }
}

}  // namespace busrl::python
