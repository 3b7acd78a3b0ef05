// Many slots in one call, for loops that handle thousands of samples a second: each slot is still one compare-and-swap
// of its own, and a slot that cannot be had is left out. What a single one does is in csrc/include/busrl.
#include "handle.hpp"

namespace busrl::python {
namespace {

using SlotWord = std::pair<uint32_t, uint64_t>;

// The tensor of one slot: `kind` says name, number type and rank 1.
py::bytes copy_of(const Handle& ring, const SlotWord& held, const TensorName& name, const TensorEntry& kind,
                  bool last) {
    const Segment& seg = ring.live();
    const auto& [slot, word] = held;
    check_owner(seg, ring.me(), slot, word);
    const uint32_t segs = segs_of(word);
    const TensorTable& table = seg.table(slot);
    const auto index = find_entry(table, name, uint8_t(last && segs > 0 ? segs - 1 : kNoSegment));
    if (!index) throw Error(Fault::no_tensor, "slot " + std::to_string(slot) + " has no tensor " + describe_name(kind));
    const TensorEntry entry = load_entry(table, *index);
    const char* why = entry_fault(entry, seg.shape.slot_bytes);
    if (why == nullptr && (entry.code != kind.code || entry.bits != kind.bits || entry.ndim != 1))
        why = "it is of another type or rank than was asked for";
    if (why != nullptr)
        throw Error(Fault::bad_tensor,
                    "slot " + std::to_string(slot) + ": tensor " + describe_name(entry) + ": " + why);
    return py::bytes(reinterpret_cast<const char*>(seg.payload(slot) + entry.offset), entry.nbytes);
}

py::list copies(const Handle& ring, const std::vector<SlotWord>& held, const std::string& name, const py::dtype& dtype,
                bool last) {
    const TensorName wanted(name);
    TensorEntry kind{};
    std::memcpy(kind.name, wanted.word, kNameBytes);
    kind.segment = kNoSegment;
    kind.code = dtype.kind() == 'i' ? kInt : dtype.kind() == 'f' ? kFloat : dtype.kind() == 'b' ? kBool : kUint;
    kind.bits = uint8_t(dtype.itemsize() * 8);
    py::list out;
    for (const SlotWord& one : held) out.append(copy_of(ring, one, wanted, kind, last));
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
