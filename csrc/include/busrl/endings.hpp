// Dispatch, and the two ways in which a sample ends: finished (trained, validated) or dropped for a reason.
//
//  * The fate is stored before the slot is freed; a process killed in between leaves what anybody can complete.
//  * fate[uid] = D is the commit point of a dispatch: before it the dispatch never happened, after it a dead
//    dispatcher's slot is rolled forward to QUEUED.
#pragma once

#include "busrl/fates.hpp"
#include "busrl/slots.hpp"

namespace busrl {

struct Task {
    uint64_t uid;
    uint64_t group;
    uint64_t admission;
    uint64_t version;
    uint64_t offer_until_ns;
    const void* bytes;
    uint64_t nbytes;
    uint32_t cls;
    uint32_t prompt_crc;
    uint32_t max_new_tokens;
    uint32_t step;
    int32_t priority;
    float temperature;
    float top_p;
    uint16_t member;
    uint16_t group_size;
    uint16_t offer_to;
};

namespace detail {
inline void describe_task(Line& line, const Task& t) {
    auto put = [](auto& field, auto value) { field.store(value, std::memory_order_release); };
    put(line.group, t.group);
    put(line.admission, t.admission);
    put(line.version, t.version);
    put(line.offer_until_ns, t.offer_until_ns);
    put(line.reward, 0.0);
    put(line.cls, t.cls);
    put(line.reward_parts, 0u);
    put(line.member, t.member);
    put(line.group_size, t.group_size);
    put(line.attempt, uint16_t{0});
    put(line.offer_to, t.offer_to);
    put(line.priority, t.priority);
    put(line.prompt_tokens, 0u);
    put(line.response_tokens, 0u);
    put(line.max_new_tokens, t.max_new_tokens);
    put(line.temperature, t.temperature);
    put(line.top_p, t.top_p);
    put(line.prompt_crc, t.prompt_crc);
    put(line.finish, uint16_t{0});
    put(line.alone_deaths, uint16_t{0});
    put(line.step, t.step);
    put(line.flags, 0u);
}

// An array of one dimension that belongs to no segment, in a slot that is RESERVED*; `bits` of an element.
inline void write_array(const Segment& seg, uint32_t slot, uint64_t word, const char* name, DtypeCode code,
                        uint8_t bits, const void* data, uint64_t elements) {
    TensorEntry entry{};
    std::memcpy(entry.name, name, std::strlen(name));
    entry.segment = kNoSegment;
    entry.code = code;
    entry.bits = bits;
    entry.ndim = 1;
    entry.shape[0] = elements;
    entry.nbytes = elements * bits / 8;
    entry.flags = kTensorValid;
    uint32_t index;
    try {
        index = place_entry(seg, slot, word, entry);
    } catch (const Error&) {
        move_slot(seg, slot, word, State::FREE, 0);  // no memory: as if it had never been claimed
        throw;
    }
    if (elements != 0) std::memcpy(seg.payload(slot) + entry.offset, data, entry.nbytes);
    store_entry(seg.table(slot), index, entry);
}
}  // namespace detail

namespace detail {
// FREE -> RESERVED* for the next FREE slot at or after `cursor`, round the ring; nullopt when there is none.
inline std::optional<Held> reserve_slot(const Segment& seg, uint32_t me, uint32_t cursor) {
    std::optional<Held> mine;
    auto reserve = [&](uint32_t slot, uint64_t word) {
        if (const uint64_t got = move_slot(seg, slot, word, State::RESERVED, me)) mine = Held{slot, got};
        return !mine;
    };
    const uint32_t n = seg.shape.n_slots, begin = cursor % n;
    if (search(seg, State::FREE, begin, n, reserve)) search(seg, State::FREE, 0, begin, reserve);
    return mine;
}

// The same, for whoever writes into it next; `cursor` moves on behind it.
inline std::optional<Held> begin_slot(const Segment& seg, uint32_t me, uint32_t& cursor) {
    auto mine = reserve_slot(seg, me, cursor);
    if (!mine && rescan_if_older(seg, kRescanSearchNs)) mine = reserve_slot(seg, me, cursor);
    if (!mine) return std::nullopt;
    cursor = mine->slot + 1;
    crash_point("dispatch.claimed");
    unhint(seg, State::FREE, mine->slot / 64, uint64_t{1} << (mine->slot % 64));
    return mine;
}
}  // namespace detail

// FREE -> RESERVED* -> QUEUED with the task inside. nullopt when no slot is FREE. `cursor` is a private hint.
inline std::optional<Held> dispatch(const Segment& seg, uint32_t me, const FateBook& fates, const Task& task,
                                    uint32_t& cursor) {
    check_machine(seg, Machine::samples);
    if (task.nbytes > seg.shape.slot_bytes)
        throw Error(Fault::slot_too_small,
                    "a task of " + std::to_string(task.nbytes) + " bytes does not fit a slot of " +
                        std::to_string(seg.shape.slot_bytes) + "; raise ring.slot_bytes",
                    task.nbytes, seg.shape.slot_bytes);
    if (task.uid == kUidNone) throw Error(Fault::general, "uid 2**64-1 means no sample");
    Fates& fate = fates.must(task.uid);
    const uint64_t i = FateBook::index(task.uid);
    fate.reserve(i + 1);  // a full disk is an error here, before anything is held
    if (const uint8_t now = fate.get(i))
        throw Error(Fault::fates, "uid " + std::to_string(task.uid) + " has the fate '" + std::string(1, char(now)) +
                                      "' and cannot be dispatched again");
    const auto reserved = detail::begin_slot(seg, me, cursor);
    if (!reserved) return std::nullopt;
    const auto [slot, mine] = *reserved;
    Line& line = seg.line(slot);
    // [UID clear] release: between here and [UID write] there is no sample in this slot.
    line.uid.store(kUidNone, std::memory_order_release);
    crash_point("dispatch.reserved");
    detail::describe_task(line, task);
    clear_all(seg.table(slot));
    detail::write_array(seg, slot, mine, "task", kUint, 8, task.bytes, task.nbytes);
    line.changed_ns.store(coarse_ns(), std::memory_order_release);
    crash_point("dispatch.written");
    // [UID write] begins here: last_commit_seq first, release, pairs with its acquire load after [UID read].
    // The uid counts only together with the seq of this claim: a slot may still hold an earlier sample's uid whose
    // fate is D because it was dispatched elsewhere.
    line.last_commit_seq.store(seq_of(mine), std::memory_order_release);
    // [UID write] release, pairs with [UID read] of the reaper: line and task are complete.
    line.uid.store(task.uid, std::memory_order_release);
    crash_point("dispatch.uid");
    fate.store(i, kDispatched);
    crash_point("dispatch.fate");
    const uint64_t queued = move_slot(seg, slot, mine, State::QUEUED, 0);
    crash_point("dispatch.queued");
    seg.count(kDispatches);
    return Held{slot, queued};
}

// TRAINING* -> FREE with fate T (or V): the step that holds the sample is on record.
inline bool finish(const Segment& seg, uint32_t me, const FateBook& fates, uint32_t slot, uint64_t word, uint8_t code) {
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return false;
    if (state_of(word) != State::TRAINING)
        throw Error(Fault::transition,
                    std::string("a sample is finished from TRAINING, not from ") + name_of(state_of(word)));
    check_arrow(seg, word, State::FREE);
    check_owner(seg, me, slot, word);
    const uint64_t uid = seg.line(slot).uid.load(std::memory_order_acquire);
    fates.must(uid).store(FateBook::index(uid), code);
    crash_point("finish.fate");
    seg.line(slot).changed_ns.store(coarse_ns(), std::memory_order_release);  // for trim(): since when it is FREE
    if (move_slot(seg, slot, word, State::FREE, 0) == 0) return false;
    crash_point("finish.free");
    seg.count(kFinished);
    return true;
}

// DROPPED -> fate -> FREE. Anybody may do it, several at once: the store is idempotent and the CAS has one winner.
inline bool complete_drop(const Segment& seg, const FateBook& fates, uint32_t slot, uint64_t word) {
    const uint64_t uid = seg.line(slot).uid.load(std::memory_order_acquire);
    if (load_word(seg, slot) != word) return false;  // the uid may already be another sample's
    fates.must(uid).store(FateBook::index(uid), uint8_t(owner_of(word)));
    crash_point("drop.fate");
    return move_slot(seg, slot, word, State::FREE, 0) != 0;
}

// resting -> DROPPED(reason) -> FREE; an owner may drop what it holds. False if the slot is no longer at `word`.
inline bool drop(const Segment& seg, uint32_t me, const FateBook& fates, uint32_t slot, uint64_t word, uint8_t reason) {
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return false;
    check_arrow(seg, word, State::DROPPED);
    if (is_working(state_of(word))) check_owner(seg, me, slot, word);
    const uint64_t uid = seg.line(slot).uid.load(std::memory_order_acquire);
    fates.must(uid);  // refuse before the slot is touched
    const uint64_t dropped = move_slot(seg, slot, word, State::DROPPED, reason);
    if (dropped == 0) return false;
    seg.count(kDrops);
    seg.header().drops[reason & 63].fetch_add(1, std::memory_order_relaxed);
    crash_point("drop.cas");
    complete_drop(seg, fates, slot, dropped);
    return true;
}

// One slot whose sample can not be recorded must not keep the others: the first such error comes after all of them.
inline uint32_t finish_drops(const Segment& seg, const FateBook& fates) {
    uint32_t done = 0;
    std::optional<Error> first;
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (state_of(word) != State::DROPPED) continue;
        try {
            if (complete_drop(seg, fates, i, word)) ++done;
        } catch (const Error& e) {
            if (!first) first.emplace(e.fault, "slot " + std::to_string(i) + ": " + e.what(), e.needed, e.available);
        }
    }
    if (first) throw *first;
    return done;
}

}  // namespace busrl
