// Many slots in one call, for loops that handle thousands of samples a second: each slot is still one compare-and-swap
// of its own, and a slot that cannot be had is left out. What a single one does is in csrc/include/busrl.
#include "handle.hpp"

namespace busrl::python {
namespace {

using SlotWord = std::pair<uint32_t, uint64_t>;

py::bytes copy_of(const Handle& ring, const SlotWord& held, const TensorName& name, const std::string& readable,
                  bool last) {
    const Segment& seg = ring.live();
    const auto& [slot, word] = held;
    check_owner(seg, ring.me(), slot, word);
    const uint32_t segs = segs_of(word);
    const uint32_t segment = last && segs > 0 ? segs - 1 : kNoSegment;
    const TensorTable& table = seg.table(slot);
    const auto index = find_entry(table, name, uint8_t(segment));
    if (!index) throw Error(Fault::no_tensor, "slot " + std::to_string(slot) + " has no tensor \"" + readable + "\"");
    const TensorEntry entry = load_entry(table, *index);
    if (!entry_is_sound(entry, seg.shape.slot_bytes))
        throw Error(Fault::corrupt, "slot " + std::to_string(slot) + ": " + describe_name(entry) +
                                        ": its descriptor breaks the layout");
    return py::bytes(reinterpret_cast<const char*>(seg.payload(slot) + entry.offset), entry.nbytes);
}

py::list copies(const Handle& ring, const std::vector<SlotWord>& held, const std::string& name, bool last) {
    const TensorName wanted(name);
    py::list out;
    for (const SlotWord& one : held) out.append(copy_of(ring, one, wanted, name, last));
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
    ring.def("copies", &copies, py::arg("held"), py::arg("name"), py::kw_only(), py::arg("last_segment") = false)
        .def("commit_rewards", &commit_rewards, py::arg("held"), py::arg("rewards"));
}

}  // namespace busrl::python
