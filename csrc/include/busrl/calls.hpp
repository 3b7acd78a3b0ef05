// Model calls: a caller puts token ids into a slot, any engine claims it, the answer comes back in place.
//
//  * A call has no fate: what is lost with one is time. Its slot is FREE again once the answer was taken, the call was
//    cancelled, or its caller is gone.
//  * The line names the caller by process index (`group`) and epoch (`step`): an index alone is used again. Both are
//    written between the claim of the slot and QUEUED, so whoever sees QUEUED or a later state sees them.
//  * A caller frees its own calls where they rest; the engine that holds one frees it when it was asked to cancel it;
//    anybody frees the resting calls of a caller that is gone, by a swap of the very word under which it was judged.
//  * An engine keeps the line that it read after its claim. Nobody but the caller writes the ids.
// Talks to slots and the process table; knows nothing of what the ids mean.
#pragma once

#include "busrl/endings.hpp"
#include "busrl/proctable.hpp"

namespace busrl {

constexpr uint64_t kAnswerBytes = 4;  // of an id, a log-probability and a version each

struct Call {
    Task line;           // `bytes` are those of the tensor `call`; `group` and `step` are set here
    const int32_t* ids;  // all that the engine reads
    uint64_t n_ids;
};

struct Reaped {
    uint32_t slot;
    State from;
    State to;
    std::string label;
    uint32_t pid;
};

namespace detail {
// Of the ids, the details and an answer of the greatest length with what is said of it: a call that is taken can always
// be answered.
inline uint64_t room_of(const Call& call) {
    return align_up(4 * call.n_ids, kTensorAlign) + align_up(call.line.nbytes, kTensorAlign) +
           3 * align_up(kAnswerBytes * call.line.max_new_tokens, kTensorAlign) + kTensorAlign;
}

inline void check_room(const Segment& seg, const Call& call) {
    if (call.n_ids == 0 || call.n_ids > uint64_t{1} << 31)
        throw Error(Fault::general, "a model call has 1 to 2**31 ids, got " + std::to_string(call.n_ids));
    const uint64_t needed = room_of(call);
    if (needed > seg.shape.slot_bytes)
        throw Error(Fault::slot_too_small,
                    "a call of " + std::to_string(call.n_ids) + " ids, " + std::to_string(call.line.nbytes) +
                        " bytes of details and up to " + std::to_string(call.line.max_new_tokens) +
                        " new tokens needs " + std::to_string(needed) + " bytes, a slot of the call ring has " +
                        std::to_string(seg.shape.slot_bytes),
                    needed, seg.shape.slot_bytes);
}
}  // namespace detail

// The caller whose call this is: its process index and its epoch there. True of a slot that is QUEUED or later.
inline bool is_call_of(const Segment& seg, uint32_t slot, uint32_t index, uint64_t ident) {
    const Line& line = seg.line(slot);
    return line.group.load(std::memory_order_acquire) == index &&
           line.step.load(std::memory_order_acquire) == epoch_of(ident);
}

// FREE -> RESERVED* -> QUEUED with the call inside. nullopt when no slot is FREE. `cursor` is a private hint.
inline std::optional<Held> put_call(const Segment& seg, uint32_t me, const Call& call, uint32_t& cursor) {
    check_machine(seg, Machine::calls);
    detail::check_room(seg, call);
    const auto reserved = detail::begin_slot(seg, me, cursor);
    if (!reserved) return std::nullopt;
    const auto [slot, mine] = *reserved;
    Line& line = seg.line(slot);
    Task mark = call.line;
    mark.group = me;
    mark.step = epoch_of(seg.proc(me).ident.load(std::memory_order_acquire));
    detail::describe_task(line, mark);
    line.uid.store(mark.uid, std::memory_order_release);
    line.prompt_tokens.store(uint32_t(call.n_ids), std::memory_order_release);
    clear_all(seg.table(slot));
    detail::write_array(seg, slot, mine, "prompt_ids", kInt, 32, call.ids, call.n_ids);
    detail::write_array(seg, slot, mine, "call", kUint, 8, mark.bytes, mark.nbytes);
    line.last_commit_seq.store(seq_of(mine), std::memory_order_release);
    line.changed_ns.store(coarse_ns(), std::memory_order_release);
    crash_point("dispatch.written");
    const uint64_t queued = move_slot(seg, slot, mine, State::QUEUED, 0);
    crash_point("dispatch.queued");
    seg.count(kDispatches);
    return Held{slot, queued};
}

// -> FREE: from QUEUED (cancelled) or GENERATED (taken) by its caller, from GENERATING (cancelled) by its engine. False
// if the slot is no longer at `word`.
inline bool free_call(const Segment& seg, uint32_t me, uint32_t slot, uint64_t word) {
    check_machine(seg, Machine::calls);
    check_slot(seg, slot);
    if (load_word(seg, slot) != word || word == 0) return false;
    check_arrow(seg, word, State::FREE);
    if (is_working(state_of(word))) {
        check_owner(seg, me, slot, word);
    } else if (!is_call_of(seg, slot, me, seg.proc(me).ident.load(std::memory_order_acquire))) {
        if (load_word(seg, slot) != word) return false;  // what was read may be of the next call
        throw Error(Fault::not_owner, "slot " + std::to_string(slot) + " holds a call of process " +
                                          std::to_string(seg.line(slot).group.load(std::memory_order_acquire)) +
                                          ", not of process " + std::to_string(me));
    }
    crash_point("release.before");
    const bool freed = move_slot(seg, slot, word, State::FREE, 0) != 0;
    crash_point("release.after");
    if (freed) seg.count(kFinished);
    return freed;
}

// Whether nobody waits for this call any more: its caller's entry is not live, or another process has it now. Proof of
// death was needed to end that entry, so there is nothing to prove here.
inline bool is_orphan(const Segment& seg, uint32_t slot) {
    const uint64_t caller = seg.line(slot).group.load(std::memory_order_acquire);
    if (caller == 0 || caller >= seg.shape.n_procs) return true;
    // [ENTRY read] acquire, pairs with [ENTRY retire] and [ENTRY publish] of whoever has the entry next.
    const uint64_t ident = seg.proc(uint32_t(caller)).ident.load(std::memory_order_acquire);
    return !is_live(ident) || !is_call_of(seg, slot, uint32_t(caller), ident);
}

constexpr bool is_call_at_rest(State s) {
    return s == State::QUEUED || s == State::GENERATED;
}

namespace detail {
// For people: the entry keeps its label until another process has it.
inline std::string label_of_caller(const Segment& seg, uint32_t slot) {
    const uint64_t caller = seg.line(slot).group.load(std::memory_order_acquire);
    const std::string entry = "entry " + std::to_string(caller);
    if (caller == 0 || caller >= seg.shape.n_procs) return entry;
    const uint64_t ident = seg.proc(uint32_t(caller)).ident.load(std::memory_order_acquire);
    return is_call_of(seg, slot, uint32_t(caller), ident) ? load_text(seg.proc(uint32_t(caller)).label) : entry;
}
}  // namespace detail

// Frees what rests of callers that are gone. One that an engine works on is freed when it comes to rest.
inline void free_orphans(const Segment& seg, std::vector<Reaped>& out) {
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (!is_call_at_rest(state_of(word)) || !is_orphan(seg, i)) continue;
        const std::string label = detail::label_of_caller(seg, i);
        crash_point("reap.before");
        // The swap compares: had the slot moved since `word` was read, the line may have been another call's.
        if (move_slot(seg, i, word, State::FREE, 0) == 0) continue;
        crash_point("reap.cas");
        seg.count(kReaps);
        out.push_back({i, state_of(word), State::FREE, label, 0});
    }
}

// A caller's orderly goodbye. What an engine works on is an orphan from now on.
inline void free_calls_of(const Segment& seg, uint32_t me) {
    const uint64_t ident = seg.proc(me).ident.load(std::memory_order_acquire);
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        if (is_call_at_rest(state_of(word)) && is_call_of(seg, i, me, ident)) free_call(seg, me, i, word);
    }
}

}  // namespace busrl
