// Many slots in one call, for loops that handle thousands of samples a second: what a single one does is in csrc/capi,
// and each slot is still one compare-and-swap of its own. The first that is not held is an error.
#include "handle.hpp"

namespace busrl::python {
namespace {

using SlotWord = std::pair<uint32_t, uint64_t>;

// The bytes of one slot's tensor, which has one dimension and the number type of `kind`.
py::bytes copy_of(Handle& ring, const SlotWord& held, const std::string& name, const busrl_tensor& kind, bool last) {
    const auto& [slot, word] = held;
    check_owner(ring.live(), ring.me(), slot, word);
    const uint32_t segs = segs_of(word);
    busrl_tensor tensor{};
    tensor.size = sizeof(tensor);
    check(busrl_ring_tensor(&ring, slot, name.c_str(), last && segs > 0 ? segs - 1 : kNoSegment, &tensor));
    if (tensor.dtype != kind.dtype || tensor.bits != kind.bits || tensor.ndim != 1)
        throw Error(Fault::bad_tensor, "slot " + std::to_string(slot) + ": tensor " + name +
                                           ": it is of another type or rank than was asked for");
    return py::bytes(static_cast<const char*>(tensor.data), tensor.nbytes);
}

py::list copies(Handle& ring, const std::vector<SlotWord>& held, const std::string& name, const py::dtype& dtype,
                bool last) {
    busrl_tensor kind{};
    set_dtype(kind, dtype);
    py::list out;
    for (const SlotWord& one : held) out.append(copy_of(ring, one, name, kind, last));
    return out;
}

std::vector<uint64_t> commit_rewards(const Handle& ring, const std::vector<SlotWord>& held,
                                     const std::vector<double>& rewards) {
    if (held.size() != rewards.size())
        throw Error(Fault::general, std::to_string(held.size()) + " slots and " + std::to_string(rewards.size()) +
                                        " rewards: there must be one for each");
    const Segment& seg = ring.writable();
    std::vector<uint64_t> out;
    for (size_t i = 0; i < held.size(); ++i) {
        const auto& [slot, word] = held[i];
        check_owner(seg, ring.me(), slot, word);
        Line& line = seg.line(slot);
        line.reward.store(rewards[i], std::memory_order_release);
        line.reward_parts.store(1, std::memory_order_release);
        out.push_back(release(seg, ring.me(), slot, word, State::REWARDED));
    }
    return out;
}

}  // namespace

void bind_bulk(py::class_<Handle>& ring) {
    ring.def("copies", &copies, py::arg("held"), py::arg("name"), py::arg("dtype"), py::kw_only(),
             py::arg("last_segment") = false)
        .def("commit_rewards", &commit_rewards, py::arg("held"), py::arg("rewards"));
}

}  // namespace busrl::python
