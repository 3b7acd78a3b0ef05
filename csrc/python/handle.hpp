// What the Python class Ring holds: one mapping, perhaps one registration, the bound fate tables.
// Every call goes through live(), writable() or me(), which refuse closed, inherited, read-only and unregistered use.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>

#include "busrl/lock.hpp"
#include "busrl/remote.hpp"

namespace py = pybind11;

namespace busrl::python {

struct Mapping {  // the base object of every view: the memory stays while a view lives, also after close()
    std::shared_ptr<Segment> segment;
};

class Handle {
  public:
    explicit Handle(std::shared_ptr<Segment> segment)
        : mapping(py::cast(Mapping{segment})), segment_(std::move(segment)) {}
    ~Handle() {
        try {
            close();
        } catch (const std::exception&) {  // the process is ending; what is left behind is reaped
        }
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    const Segment& live() const {
        if (!segment_) throw Error(Fault::closed, "the ring handle is closed");
        if (segment_->in_forked_child())
            throw Error(Fault::closed, "the ring handle was inherited over fork(); attach and register in the child");
        return *segment_;
    }
    const Segment& writable() const {
        const Segment& seg = live();
        if (seg.read_only) throw Error(Fault::read_only, "ring " + seg.path + " is attached read-only");
        return seg;
    }
    uint32_t me() const {
        if (remote_ != 0) return remote();
        if (!member_) throw Error(Fault::not_registered, "this process is not registered in the ring; call register");
        return member_->index();
    }
    uint32_t index() const { return remote_ != 0 ? remote_ : member_ ? member_->index() : 0; }
    ProcEntry& entry() const { return writable().proc(me()); }

    // A handle that acts in the name of a remote entry, for the keeper. It owns neither the entry nor its slots.
    std::unique_ptr<Handle> stand_in(uint32_t index) const {
        me();
        check_remote(writable(), index);
        auto hand = std::make_unique<Handle>(segment_);
        hand->fates = fates;
        hand->remote_ = index;
        hand->remote_ident_ = segment_->proc(index).ident.load(std::memory_order_acquire);
        return hand;
    }

    uint32_t join(const std::string& role, const std::string& label) {
        const Segment& seg = writable();
        if (remote_ != 0) throw Error(Fault::general, "a stand-in is not registered itself");
        if (member_) throw Error(Fault::general, "already registered as entry " + std::to_string(index()));
        try {
            member_ = std::make_unique<Membership>(segment_, role, label);
        } catch (const Error& e) {
            if (e.fault != Fault::table_full) throw;
            reap(seg, fates, 0);  // entries of the dead may be all that is missing
            member_ = std::make_unique<Membership>(segment_, role, label);
        }
        return index();
    }

    void close() {
        if (!segment_) return;
        if (!segment_->in_forked_child() && member_) {
            if (surrender(*segment_, fates, member_->index()))
                member_->leave();
            else
                member_->abandon();
        }
        member_.reset();
        fates = {};
        mapping = py::none();
        segment_.reset();
    }
    bool closed() const { return !segment_; }

    FateBook fates;
    uint32_t cursor = 0;  // where the next search for a FREE slot begins
    py::object mapping;

  private:
    uint32_t remote() const {
        if (live().proc(remote_).ident.load(std::memory_order_acquire) != remote_ident_)
            throw Error(Fault::not_registered, "process entry " + std::to_string(remote_) +
                                                   " is no longer the remote worker's that this handle stands for");
        return remote_;
    }

    uint32_t remote_ = 0;  // 0: this handle acts for its own process
    uint64_t remote_ident_ = 0;
    std::shared_ptr<Segment> segment_;
    std::unique_ptr<Membership> member_;
};

// arrays.cpp
py::array lines(const Handle& ring);
py::object line(const Handle& ring, uint32_t slot);
py::array words(const Handle& ring);
void put(const Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& array,
         uint32_t segment, bool checksum);
py::array alloc(const Handle& ring, uint32_t slot, uint64_t word, const std::string& name, const py::object& dtype,
                const py::object& shape, uint32_t segment);
py::array get(const Handle& ring, uint32_t slot, const std::string& name, uint32_t segment);
py::dict tensors(const Handle& ring, uint32_t slot);
void set_fields(const Handle& ring, uint32_t slot, uint64_t word, const py::kwargs& fields);

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
