// What the Python class Ring holds: a busrl_ring, on which the calls of the C ABI work, and the base of its views.
// What the C ABI has is called through it; dispatching, finishing, and looking at many lines go to the core.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>

#include "../capi/handle.hpp"
#include "busrl/lock.hpp"

namespace py = pybind11;

namespace busrl::python {

struct Mapping {  // the base object of every view: the memory stays while a view lives, also after close()
    std::shared_ptr<Segment> segment;
};

class Handle : public busrl_ring {
  public:
    explicit Handle(busrl_ring&& opened) : busrl_ring(std::move(opened)), mapping(py::cast(Mapping{segment()})) {}

    // A handle that acts in the name of a remote entry, for the keeper. It owns neither the entry nor its slots.
    std::unique_ptr<Handle> stand_in(uint32_t index) const {
        me();
        auto hand = std::make_unique<Handle>(busrl_ring(segment()));
        hand->fates = fates;
        hand->act_for(index);
        return hand;
    }

    void close() {
        mapping = py::none();
        busrl_ring::close();
    }

    py::object mapping;
};

// A negative code of the C calls becomes the exception of the same meaning.
inline int check(int code) {
    if (code >= 0) return code;
    uint64_t needed, available;
    const std::string text = busrl_ring_error(&needed, &available);
    const bool same = code >= BUSRL_E_READ_ONLY || code == BUSRL_E_BAD_TENSOR;
    throw Error(same ? Fault(-1 - code) : Fault::general, text, needed, available);
}

// arrays.cpp
void set_dtype(busrl_tensor& tensor, const py::dtype& dtype);
py::array lines(const Handle& ring, const std::optional<std::vector<uint32_t>>& slots);
py::object line(const Handle& ring, uint32_t slot);
py::array words(const Handle& ring);
void put(Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& array, uint32_t segment,
         bool checksum);
py::array alloc(Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& dtype,
                const py::object& shape, uint32_t segment);
py::array get(Handle& ring, uint32_t slot, const std::string& name, uint32_t segment);
py::dict tensors(Handle& ring, uint32_t slot);
void set_fields(Handle& ring, uint32_t slot, uint64_t word, const py::kwargs& fields);

// bulk.cpp
void bind_bulk(py::class_<Handle>& ring);

// watch.cpp
void bind_records(py::module_& m);
void bind_locks(py::module_& m);

// module.cpp
py::object state_enum();
py::str readable(const std::string& bytes);  // bytes that are not UTF-8 are replaced
uint8_t fate_code(const py::object& code);
// Calls `nap(ns)` without the GIL until it returns true or the time is up; signals raise. True if it did.
bool wait_for(double timeout_s, const std::function<bool(uint64_t)>& nap);

}  // namespace busrl::python
