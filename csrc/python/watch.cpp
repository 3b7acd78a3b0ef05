// What people and supervisors look at: processes, reaped slots, counts; and the two file faces, Fates and OfdLock.
#include "watch.hpp"

namespace busrl::python {
namespace {

struct FatesFace {  // close() drops this reference; a ring that is bound to the table keeps its own
    std::shared_ptr<Fates> table;

    Fates& open() const {
        if (!table) throw Error(Fault::closed, "the fate table is closed");
        return *table;
    }
};

// Text from the process table is cut to its field and may be hostile, so it may not be UTF-8.
template <class Record, std::string Record::* Field>
py::str text(const Record& record) {
    return readable(record.*Field);
}

uint64_t row(uint64_t i) {
    return i & ~kUidValidate;
}  // a validation uid names the same row

}  // namespace

std::shared_ptr<Fates> fates_of(const py::object& face) {
    return face.is_none() ? nullptr : face.cast<const FatesFace&>().table;
}

std::vector<Process> processes(const Handle& ring) {
    const Segment& seg = ring.live();
    std::vector<Process> out;
    for (uint32_t i = 1; i < seg.shape.n_procs; ++i) {
        const ProcEntry& e = seg.proc(i);
        const uint64_t ident = e.ident.load(std::memory_order_acquire);
        if (!is_live(ident)) continue;
        auto get = [](const U64& field) { return field.load(std::memory_order_acquire); };
        Process p{i,
                  pid_of(ident),
                  epoch_of(ident),
                  e.ready.load(std::memory_order_acquire) != 0,
                  load_text(e.role),
                  load_text(e.label),
                  load_text(e.activity),
                  get(e.progress),
                  get(e.progress_ns),
                  get(e.activity_ns),
                  double(get(e.deadline_ns)) * 1e-9,
                  get(e.busy_ns),
                  get(e.idle_ns),
                  get(e.tokens),
                  get(e.samples),
                  get(e.started_ns),
                  get(e.version)};
        if (e.ident.load(std::memory_order_acquire) == ident) out.push_back(std::move(p));
    }
    return out;
}

Stats stats(const Handle& ring) {
    const Segment& seg = ring.live();
    Stats s;
    for (uint32_t k = 0; k < kStates; ++k) {
        s.occupancy[name_of(State(k))] = 0;
        s.transitions[name_of(State(k))] = transitions(seg, State(k));
    }
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint32_t k = state_index(load_word(seg, i));
        if (k < kStates) ++s.occupancy[name_of(State(k))];
    }
    for (uint32_t k = 0; k < 64; ++k)
        if (const uint64_t n = seg.header().drops[k].load(std::memory_order_relaxed))
            s.drops[std::string(1, char(64 + k))] = n;
    auto counter = [&](Counter c) { return seg.header().counters[c].value.load(std::memory_order_relaxed); };
    auto entered = [&](State state) { return transitions(seg, state); };
    s.claims = entered(State::GENERATING) + entered(State::REWARDING) + entered(State::TRAINING);
    // What came to rest by neither a dispatch nor a reaper was committed or handed back by its owner. The parts are
    // read one after another, so while others work the difference may be off by a few, but never below zero.
    const uint64_t rested = entered(State::QUEUED) + entered(State::GENERATED) + entered(State::REWARDED);
    const uint64_t others = counter(kDispatches) + counter(kReturned);
    s.commits = rested - std::min(rested, others);
    s.reaps = counter(kReaps);
    s.dropped = counter(kDrops);
    s.finished = counter(kFinished);
    s.dispatched = counter(kDispatches);
    s.tokens = counter(kTokens);
    return s;
}

void bind_records(py::module_& m) {
    py::class_<Process>(m, "Process")
        .def_readonly("index", &Process::index)
        .def_readonly("pid", &Process::pid)
        .def_readonly("epoch", &Process::epoch)
        .def_property_readonly("state", [](const Process& p) { return p.ready ? "ready" : "starting"; })
        .def_property_readonly("role", &text<Process, &Process::role>)
        .def_property_readonly("label", &text<Process, &Process::label>)
        .def_property_readonly("activity", &text<Process, &Process::activity>)
        .def_readonly("progress", &Process::progress)
        .def_readonly("progress_ns", &Process::progress_ns)
        .def_readonly("activity_ns", &Process::activity_ns)
        .def_readonly("deadline_s", &Process::deadline_s)
        .def_readonly("busy_ns", &Process::busy_ns)
        .def_readonly("idle_ns", &Process::idle_ns)
        .def_readonly("tokens", &Process::tokens)
        .def_readonly("samples", &Process::samples)
        .def_readonly("started_ns", &Process::started_ns)
        .def_readonly("version", &Process::version)
        .def("__repr__", [](const Process& p) {
            return py::str("Process(index={}, pid={}, label={!r}, activity={!r})")
                .format(p.index, p.pid, readable(p.label), readable(p.activity));
        });
    py::class_<Reaped>(m, "Reaped")
        .def_readonly("slot", &Reaped::slot)
        .def_property_readonly("frm", [](const Reaped& r) { return state_enum()(int(r.from)); })
        .def_property_readonly("to", [](const Reaped& r) { return state_enum()(int(r.to)); })
        .def_property_readonly("label", &text<Reaped, &Reaped::label>)
        .def_readonly("pid", &Reaped::pid)
        .def("__repr__", [](const Reaped& r) {
            return py::str("Reaped(slot={}, {} -> {}, label={!r}, pid={})")
                .format(r.slot, name_of(r.from), name_of(r.to), readable(r.label), r.pid);
        });
    py::class_<Stats>(m, "RingStats")
        .def_readonly("occupancy", &Stats::occupancy)
        .def_readonly("transitions", &Stats::transitions)
        .def_readonly("drops", &Stats::drops)
        .def_readonly("claims", &Stats::claims)
        .def_readonly("commits", &Stats::commits)
        .def_readonly("reaps", &Stats::reaps)
        .def_readonly("dropped", &Stats::dropped)
        .def_readonly("finished", &Stats::finished)
        .def_readonly("dispatched", &Stats::dispatched)
        .def_readonly("tokens", &Stats::tokens);
}

void bind_locks(py::module_& m) {
    py::class_<FatesFace>(m, "Fates")
        .def(py::init([](const std::string& path, bool create, uint64_t capacity, bool read_only) {
                 return FatesFace{std::make_shared<Fates>(path, create, capacity, read_only)};
             }),
             py::arg("path"), py::kw_only(), py::arg("create") = false, py::arg("capacity") = uint64_t{1} << 26,
             py::arg("read_only") = false)
        .def(
            "get", [](const FatesFace& f, uint64_t i) { return f.open().get(row(i)); }, py::arg("i"))
        .def(
            "store",
            [](const FatesFace& f, uint64_t i, const py::object& code) {
                return f.open().store(row(i), fate_code(code));
            },
            py::arg("i"), py::arg("code"))
        .def(
            "reserve", [](const FatesFace& f, uint64_t upto) { f.open().reserve(upto); }, py::arg("upto"))
        .def("view",
             [](const py::object& self) {
                 Fates& table = self.cast<const FatesFace&>().open();
                 auto keep = py::capsule(new std::shared_ptr<Fates>(self.cast<const FatesFace&>().table),
                                         [](void* p) { delete static_cast<std::shared_ptr<Fates>*>(p); });
                 py::array_t<uint8_t> view(py::ssize_t(table.refresh()), table.bytes(), keep);
                 py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
                 return view;
             })
        .def(
            "sync", [](const FatesFace& f) { f.open().sync(); }, py::call_guard<py::gil_scoped_release>())
        .def("close", [](FatesFace& f) { f.table.reset(); })
        .def("__len__", [](const FatesFace& f) { return f.open().refresh(); })
        .def_property_readonly("path", [](const FatesFace& f) { return f.open().path; })
        .def_property_readonly("capacity", [](const FatesFace& f) { return f.open().capacity; });

    py::class_<OfdLock>(m, "OfdLock")
        .def(py::init<std::string>(), py::arg("path"))
        .def("try_acquire", &OfdLock::try_acquire)
        .def(
            "acquire",
            [](OfdLock& lock, double timeout_s) {
                if (lock.try_acquire()) return;
                int attempt = 0;
                const bool got = wait_for(timeout_s, [&](uint64_t left) {
                    const uint64_t ns = std::min(left, OfdLock::pause_ns(attempt++));
                    const timespec pause{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
                    ::nanosleep(&pause, nullptr);
                    return lock.try_acquire();
                });
                if (!got)
                    throw Error(Fault::lock_timeout, "lock " + lock.path + " is held by process " +
                                                         std::to_string(lock.holder()) + ", waited " +
                                                         std::to_string(timeout_s) + " s");
            },
            py::arg("timeout_s"))
        .def("release", &OfdLock::release)
        .def("holder",
             [](const OfdLock& lock) -> std::optional<long> {
                 const long pid = lock.holder();
                 return pid == 0 ? std::nullopt : std::optional<long>(pid);
             })
        .def("fileno", &OfdLock::fd)
        .def_property_readonly("held", &OfdLock::held)
        .def_property_readonly("path", [](const OfdLock& lock) { return lock.path; })
        .def_property("inheritable", &OfdLock::inheritable, &OfdLock::set_inheritable);
}

}  // namespace busrl::python
