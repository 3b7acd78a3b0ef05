// The Python module busrl._ring: names and argument lists only; what they do is in csrc/capi and csrc/include/busrl.
#include "hot.hpp"
#include "watch.hpp"

namespace busrl::python {
namespace {

const char* class_of(Fault fault) {
    switch (fault) {
        case Fault::missing:
            return "RingNotFound";
        case Fault::exists:
            return "RingExists";
        case Fault::corrupt:
        case Fault::layout:
        case Fault::stale:
            return "RingMismatch";
        case Fault::shm_too_small:
            return "ShmTooSmall";
        case Fault::slot_too_small:
            return "SlotTooSmall";
        case Fault::not_owner:
            return "NotOwner";
        case Fault::transition:
            return "NoSuchTransition";
        case Fault::no_tensor:
            return "NoSuchTensor";
        case Fault::table_full:
            return "RingFull";
        case Fault::not_registered:
            return "NotRegistered";
        case Fault::closed:
            return "RingClosed";
        case Fault::fates:
            return "FateRefused";
        case Fault::disk_full:
            return "DiskFull";
        case Fault::lock_timeout:
            return "LockTimeout";
        case Fault::read_only:
            return "RingReadOnly";
        case Fault::bad_tensor:
            return "BadTensor";
        case Fault::no_file:
        case Fault::general:
            break;
    }
    return "RingError";
}

void raise(const Error& e) {
    py::object type = e.fault == Fault::no_file ? py::module_::import("builtins").attr("FileNotFoundError")
                                                : py::module_::import("busrl.errors").attr(class_of(e.fault));
    py::object error = type(e.what());
    if (e.needed != 0) {
        error.attr("needed") = e.needed;
        error.attr("free") = e.available;
    }
    PyErr_SetObject(type.ptr(), error.ptr());
}

State state_arg(uint32_t value) {
    if (value >= kStates) throw Error(Fault::general, "there is no state " + std::to_string(value));
    return State(value);
}

uint32_t word_index(const std::string& name) {
    for (uint32_t i = 0; i < kHeaderWordCount; ++i)
        if (name == kHeaderWords[i]) return i;
    throw Error(Fault::general, "the ring header has no word \"" + name + "\"");
}

U64& header_word(const Segment& seg, const std::string& name) {
    return seg.header().words[word_index(name)];
}

Machine machine_of(bool calls) {
    return calls ? Machine::calls : Machine::samples;
}

std::array<uint8_t, 16> uuid_arg(const py::bytes& uuid) {
    const std::string text = uuid;
    if (text.size() != 16) throw Error(Fault::general, "uuid has 16 bytes, got " + std::to_string(text.size()));
    std::array<uint8_t, 16> out;
    std::memcpy(out.data(), text.data(), 16);
    return out;
}

py::object g_state;  // the enum; alive while the module is

void bind_state(py::module_& m) {
    py::list members;
    for (uint32_t s = 0; s < kStates; ++s) members.append(py::make_tuple(name_of(State(s)), s));
    g_state = py::module_::import("enum").attr("IntEnum")("State", members, py::arg("module") = "busrl._ring");
    g_state.attr("__doc__") =
        "State of a slot; a working state (*) has an owner.\n\n"
        "FREE -> RESERVED* -> QUEUED -> GENERATING* -> GENERATED -> REWARDING* -> REWARDED -> TRAINING* -> FREE\n"
        "GENERATING* -> QUEUED: one more committed segment, or back. REWARDING* -> GENERATED, TRAINING* -> REWARDED: "
        "back.\n"
        "any state but FREE and RESERVED* -> DROPPED -> FREE. Owner dead: RESERVED* -> QUEUED or FREE,\n"
        "GENERATING* -> QUEUED, REWARDING* -> GENERATED, TRAINING* -> REWARDED.";
    g_state.inc_ref();  // outlives static destruction, which runs after the interpreter is gone
    m.attr("State") = g_state;
}

// Members of one group: `t` describes the first, the others differ by uid and member only. Ends at the first for which
// no slot is free.
py::list dispatch_members(Handle& ring, const py::bytes& task, Task t, uint16_t members, double offer_s) {
    const Segment& seg = ring.writable();
    t.bytes = PyBytes_AS_STRING(task.ptr());
    t.nbytes = uint64_t(PyBytes_GET_SIZE(task.ptr()));
    t.offer_until_ns = t.offer_to != 0 ? monotonic_ns() + uint64_t(std::max(0.0, offer_s) * 1e9) : 0;
    py::list out;
    for (uint16_t i = 0; i < members; ++i, ++t.uid, ++t.member) {
        const auto held = dispatch(seg, ring.me(), ring.fates, t, ring.cursor);
        if (!held) break;
        out.append(py::make_tuple(held->slot, held->word));
    }
    return out;
}

using Ids = py::array_t<int32_t, py::array::c_style>;

// (slot, word) at QUEUED; None when no slot is FREE.
py::object put_call(Handle& ring, const Ids& ids, const py::bytes& details, Task line, double offer_s) {
    const Segment& seg = ring.writable();
    if (ids.ndim() != 1) throw Error(Fault::general, "the ids of a call have one dimension");
    line.bytes = PyBytes_AS_STRING(details.ptr());
    line.nbytes = uint64_t(PyBytes_GET_SIZE(details.ptr()));
    line.offer_until_ns = line.offer_to != 0 ? monotonic_ns() + uint64_t(std::max(0.0, offer_s) * 1e9) : 0;
    const auto put = busrl::put_call(seg, ring.me(), {line, ids.data(), uint64_t(ids.size())}, ring.cursor);
    if (!put) return py::none();
    return py::make_tuple(put->slot, put->word);
}

std::vector<Reaped> reap_dead(Handle& ring) {
    const uint32_t most = ring.live().shape.n_slots;
    const std::unique_ptr<busrl_reaped[]> found(new busrl_reaped[most]);  // not filled: nearly always nobody is dead
    uint32_t count;
    check(busrl_ring_reap(&ring, found.get(), most, &count));
    std::vector<Reaped> out;
    for (const busrl_reaped* one = found.get(); one != found.get() + std::min(count, most); ++one)
        out.push_back({one->slot, State(one->from), State(one->to), one->label, one->pid});
    return out;
}

void bind_life(py::class_<Handle>& ring) {
    ring.def_static(
            "create",
            [](const std::string& name, uint32_t slots, uint64_t slot_bytes, uint32_t processes, const py::bytes& uuid,
               bool calls) {
                return std::make_unique<Handle>(busrl_ring(
                    Segment::create(name, {slots, processes, slot_bytes}, uuid_arg(uuid), machine_of(calls))));
            },
            py::arg("name"), py::kw_only(), py::arg("slots"), py::arg("slot_bytes"), py::arg("processes") = 64,
            py::arg("uuid"), py::arg("calls") = false)
        .def_static(
            "attach",
            [](const std::string& name, bool read_only, bool calls) {
                busrl_ring* opened;
                const uint32_t flags = (read_only ? BUSRL_ATTACH_READ_ONLY : 0) | (calls ? BUSRL_ATTACH_CALLS : 0);
                check(busrl_ring_attach(BUSRL_RING_ABI, name.c_str(), flags, &opened));
                const std::unique_ptr<busrl_ring> moved(opened);
                return std::make_unique<Handle>(std::move(*moved));
            },
            py::arg("name"), py::kw_only(), py::arg("read_only") = false, py::arg("calls") = false)
        .def_static("unlink", &Segment::unlink, py::arg("name"))
        .def(
            "register",
            [](Handle& r, const std::string& role, const std::string& label) {
                uint32_t index;
                check(busrl_ring_register(&r, role.substr(0, 15).c_str(), label.substr(0, 39).c_str(), &index));
                return index;
            },
            py::arg("role"), py::arg("label"))
        .def("set_ready", [](Handle& r) { check(busrl_ring_ready(&r)); })
        .def("close", &Handle::close)
        .def_property_readonly("closed", &Handle::closed)
        .def_property_readonly("index", &Handle::index)
        .def_property_readonly("epoch",
                               [](const Handle& r) {
                                   r.me();
                                   return epoch_of(r.entry().ident.load(std::memory_order_acquire));
                               })
        .def_property_readonly("holds_calls", [](const Handle& r) { return r.live().machine() == Machine::calls; })
        .def_property_readonly("name", [](const Handle& r) { return r.live().path; })
        .def_property_readonly(
            "uuid", [](const Handle& r) { return py::bytes(reinterpret_cast<const char*>(r.live().shape.uuid), 16); })
        .def_property_readonly("n_slots", [](const Handle& r) { return r.live().shape.n_slots; })
        .def_property_readonly("slot_bytes", [](const Handle& r) { return r.live().shape.slot_bytes; })
        .def_property_readonly("n_processes", [](const Handle& r) { return r.live().shape.n_procs; })
        .def_property_readonly("read_only", [](const Handle& r) { return r.live().read_only; })
        .def(
            "bind_fates",
            [](Handle& r, const py::object& train, const py::object& validate) {
                r.live();
                r.fates = {fates_of(train), fates_of(validate)};
            },
            py::arg("train"), py::arg("validate") = py::none());
}

void bind_slots(py::class_<Handle>& ring) {
    ring.def(
            "dispatch",
            [](Handle& r, uint64_t uid, uint64_t group, uint64_t admission, uint16_t member, uint16_t group_size,
               uint32_t cls, const py::bytes& task, uint32_t prompt_crc, int32_t priority, uint32_t max_new_tokens,
               float temperature, float top_p, uint64_t version, uint32_t step, uint16_t members, uint16_t offer_to,
               double offer_s) {
                const Task t{uid,         group, admission,  version,        0,       nullptr,
                             0,           cls,   prompt_crc, max_new_tokens, step,    priority,
                             temperature, top_p, member,     group_size,     offer_to};
                return dispatch_members(r, task, t, members, offer_s);
            },
            py::kw_only(), py::arg("uid"), py::arg("group"), py::arg("admission"), py::arg("member"),
            py::arg("group_size"), py::arg("cls"), py::arg("task"), py::arg("prompt_crc"), py::arg("priority") = 0,
            py::arg("max_new_tokens"), py::arg("temperature"), py::arg("top_p") = 1.0f, py::arg("version") = 0,
            py::arg("step") = 0, py::arg("members") = 1, py::arg("offer_to") = 0, py::arg("offer_s") = 0.0)
        .def(
            "claim",
            [](Handle& r, uint32_t slot, uint64_t word, uint32_t to) {
                uint64_t mine;
                check(busrl_ring_claim(&r, slot, word, to, &mine));
                return mine;
            },
            py::arg("slot"), py::arg("word"), py::arg("to"))
        .def(
            "mark_alone", [](Handle& r, uint32_t slot, uint64_t word) { check(busrl_ring_mark_alone(&r, slot, word)); },
            py::arg("slot"), py::arg("word"))
        .def(
            "drop",
            [](Handle& r, uint32_t slot, uint64_t word, const py::object& fate) {
                return check(busrl_ring_drop(&r, slot, word, char(fate_code(fate)))) == BUSRL_OK;
            },
            py::arg("slot"), py::arg("word"), py::arg("fate"))
        .def("finish_drops", [](const Handle& r) { return finish_drops(r.writable(), r.fates); })
        .def("reap", &reap_dead);
}

// What a ring of model calls has beside the rest.
void bind_calls(py::class_<Handle>& ring) {
    ring.def(
            "put_call",
            [](Handle& r, const Ids& ids, const py::bytes& details, uint64_t uid, uint64_t admission, uint32_t cls,
               int32_t priority, uint32_t max_new_tokens, float temperature, float top_p, uint16_t offer_to,
               double offer_s) {
                Task line{};
                line.uid = uid;
                line.admission = admission;
                line.cls = cls;
                line.priority = priority;
                line.max_new_tokens = max_new_tokens;
                line.temperature = temperature;
                line.top_p = top_p;
                line.offer_to = offer_to;
                return put_call(r, ids, details, line, offer_s);
            },
            py::arg("ids"), py::arg("details"), py::kw_only(), py::arg("uid"), py::arg("admission") = 0,
            py::arg("cls") = 0, py::arg("priority") = 0, py::arg("max_new_tokens"), py::arg("temperature") = 1.0f,
            py::arg("top_p") = 1.0f, py::arg("offer_to") = 0, py::arg("offer_s") = 0.0)
        .def(
            "free_call",
            [](Handle& r, uint32_t slot, uint64_t word) { return check(busrl_ring_free(&r, slot, word)) == BUSRL_OK; },
            py::arg("slot"), py::arg("word"))
        .def(
            "is_orphan",
            [](const Handle& r, uint32_t slot) {
                check_machine(r.live(), Machine::calls);
                check_slot(r.live(), slot);
                return is_orphan(r.live(), slot);
            },
            py::arg("slot"));
}

void bind_data(py::class_<Handle>& ring) {
    ring.def("lines", &lines, py::arg("slots") = py::none())
        .def("words", &words)
        .def("line", &line, py::arg("slot"))
        .def("set", &set_fields, py::arg("slot"), py::arg("word"))
        .def("tensors", &tensors, py::arg("slot"))
        .def(
            "clear_segments",
            [](const Handle& r, uint32_t slot, uint64_t word, uint32_t from) {
                const Segment& seg = r.writable();
                check_owner(seg, r.me(), slot, word);
                clear_segments(seg.table(slot), std::max(from, segs_of(word)));  // what is committed stays
            },
            py::arg("slot"), py::arg("word"), py::arg("from_segment"));
}

// The keeper's calls for processes without a mapping.
void bind_remote(py::class_<Handle>& ring) {
    ring.def(
            "enter_remote",
            [](const Handle& r, const std::string& role, const std::string& label, uint64_t life) {
                r.me();
                return enter_remote(r.writable(), role, label, life);
            },
            py::arg("role"), py::arg("label"), py::kw_only(), py::arg("life"))
        .def("stand_in", &Handle::stand_in, py::arg("index"))
        .def(
            "leave_remote",
            [](const Handle& r, uint32_t index) {
                r.me();
                leave_remote(r.writable(), index);
            },
            py::arg("index"))
        .def(
            "expire",
            [](const Handle& r, uint32_t slot, uint64_t word) {
                check_remote(r.writable(), r.me());
                return expire(r.writable(), r.me(), slot, word);
            },
            py::arg("slot"), py::arg("word"));
}

void bind_watch(py::class_<Handle>& ring) {
    ring.def(
            "transitions", [](const Handle& r, uint32_t s) { return transitions(r.live(), state_arg(s)); },
            py::arg("state"))
        .def(
            "wait",
            [](const Handle& r, uint32_t s, uint64_t seen, double timeout_s) {
                const State state = state_arg(s);
                const Segment& seg = r.live();
                const py::object keep = r.mapping;  // close() in another thread must not unmap what we wait on
                const uint32_t me = r.index();
                if (transitions(seg, state) == seen)
                    wait_for(timeout_s, [&](uint64_t left) {
                        return wait_for_entry(seg, me, state, seen, std::min(left, kWaitSliceNs));
                    });
                return transitions(seg, state);
            },
            py::arg("state"), py::arg("seen"), py::arg("timeout_s"))
        .def("processes", &processes)
        .def(
            "is_dead",
            [](const Handle& r, uint32_t index) {
                const Segment& seg = r.live();
                if (index == 0 || index >= seg.shape.n_procs)
                    throw Error(Fault::general, "there is no process entry " + std::to_string(index));
                uint64_t ident;
                if (index == r.index()) return false;
                return !is_live(seg.proc(index).ident.load(std::memory_order_acquire)) ||
                       proven_dead(seg, index, &ident);
            },
            py::arg("index"))
        .def("stats", &stats)
        .def("progress", [](Handle& r) { check(busrl_ring_progress(&r)); })
        .def(
            "activity",
            [](Handle& r, const std::string& name, double deadline_s) {
                check(busrl_ring_activity(&r, name.c_str(), deadline_s));
            },
            py::arg("name"), py::arg("deadline_s") = 0.0)
        .def(
            "add",
            [](Handle& r, uint64_t busy_ns, uint64_t idle_ns, uint64_t tokens, uint64_t samples) {
                check(busrl_ring_add(&r, busy_ns, idle_ns, tokens, samples));
            },
            py::kw_only(), py::arg("busy_ns") = 0, py::arg("idle_ns") = 0, py::arg("tokens") = 0,
            py::arg("samples") = 0)
        .def(
            "set_version_seen",
            [](const Handle& r, uint64_t v) { r.entry().version.store(v, std::memory_order_release); },
            py::arg("version"))
        .def(
            "header",
            [](Handle& r, const std::string& name) {
                uint64_t value;
                check(busrl_ring_header(&r, name.c_str(), &value));
                return value;
            },
            py::arg("name"))
        .def(
            "set_header",
            [](const Handle& r, const std::string& name, uint64_t v) {
                header_word(r.writable(), name).store(v, std::memory_order_release);
            },
            py::arg("name"), py::arg("value"))
        .def(
            "cas_header",
            [](const Handle& r, const std::string& name, uint64_t old, uint64_t v) {
                return header_word(r.writable(), name)
                    .compare_exchange_strong(old, v, std::memory_order_acq_rel, std::memory_order_acquire);
            },
            py::arg("name"), py::arg("old"), py::arg("new"));
}

}  // namespace

py::object state_enum() {
    return g_state;
}

py::str readable(const std::string& bytes) {
    return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(bytes.data(), py::ssize_t(bytes.size()), "replace"));
}

uint8_t fate_code(const py::object& code) {
    if (py::isinstance<py::int_>(code)) return code.cast<uint8_t>();
    const std::string text = code.cast<std::string>();
    if (text.size() != 1) throw Error(Fault::general, "a fate is one ASCII character, got \"" + text + "\"");
    return uint8_t(text[0]);
}

bool wait_for(double timeout_s, const std::function<bool(uint64_t)>& nap) {
    const uint64_t end = monotonic_ns() + uint64_t(std::max(0.0, std::min(timeout_s, 1e6)) * 1e9);
    for (uint64_t now = monotonic_ns(); now < end; now = monotonic_ns()) {
        bool done;
        {
            py::gil_scoped_release release;
            done = nap(end - now);
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    return false;
}

}  // namespace busrl::python

PYBIND11_MODULE(_ring, m) {
    using namespace busrl::python;
    m.doc() = "The slot ring in shared memory, the fate tables and the role locks. See busrl.ring.";
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const busrl::Error& e) {
            raise(e);
        }
    });
    py::class_<Mapping>(m, "_Mapping");
    bind_state(m);
    bind_records(m);
    bind_locks(m);
    py::class_<Handle> ring(m, "Ring");
    bind_life(ring);
    bind_slots(ring);
    bind_calls(ring);
    bind_data(ring);
    bind_bulk(ring);
    bind_remote(ring);
    bind_watch(ring);
    bind_hot(ring);
    py::list names;
    for (const char* name : busrl::kHeaderWords) names.append(name);
    m.attr("HEADER_WORDS") = py::tuple(names);
    py::list points;
    for (const char* point : busrl::kCrashPoints) points.append(point);
    m.attr("CRASH_POINTS") = py::tuple(points);
    m.attr("UID_NONE") = busrl::kUidNone;
    m.attr("UID_VALIDATE") = busrl::kUidValidate;
    m.attr("NO_SEGMENT") = busrl::kNoSegment;
    m.attr("MAX_TENSORS") = busrl::kTensors;
    m.attr("LAYOUT") = py::make_tuple(busrl::kLayoutMajor, busrl::kLayoutMinor);
}
