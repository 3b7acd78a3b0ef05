// The calls of busrl_ring.h that move slots and processes, or look at the whole ring: arguments checked, the core
// called, what it throws turned into a code and a text. What is inside of a slot: slot.cpp.
//
//  * No exception and no C++ type leaves this file; the text of the last error is the thread's own.
// Talks to the core through handle.hpp. Knows nothing of runs, of the bus, or of what the tensors mean.
#include "call.hpp"

using namespace busrl;
using namespace busrl::capi;

// ---------------------------------------------------------------- library

uint32_t busrl_ring_abi(void) {
    return BUSRL_RING_ABI;
}

const char* busrl_ring_error(uint64_t* needed, uint64_t* available) {
    if (needed != nullptr) *needed = g_last.needed;
    if (available != nullptr) *available = g_last.available;
    return g_last.text;
}

// ---------------------------------------------------------------- life

int busrl_ring_attach(uint32_t abi, const char* name, uint32_t flags, busrl_ring** ring) {
    return guarded([&] {
        given(ring, "ring") = nullptr;
        if (abi != BUSRL_RING_ABI)
            return fail(BUSRL_E_ABI, ("the program was built for ABI " + std::to_string(abi) +
                                      " of busrl_ring, this library speaks " + std::to_string(BUSRL_RING_ABI) +
                                      "; build it again with this library's header")
                                         .c_str());
        if (flags & ~(BUSRL_ATTACH_READ_ONLY | BUSRL_ATTACH_CALLS))
            invalid("attach knows no such flags: " + std::to_string(flags));
        const auto machine = flags & BUSRL_ATTACH_CALLS ? Machine::calls : Machine::samples;
        *ring = new busrl_ring(Segment::attach(text_arg(name, "name", 4095), flags & BUSRL_ATTACH_READ_ONLY, machine));
        return int(BUSRL_OK);
    });
}

int busrl_ring_detach(busrl_ring* ring) {
    return guarded([&] {
        const std::unique_ptr<busrl_ring> owned(ring);
        if (owned) owned->close();
        return BUSRL_OK;
    });
}

int busrl_ring_info(busrl_ring* ring, busrl_info* info) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        busrl_info i{};
        i.abi = BUSRL_RING_ABI;
        i.layout_major = seg.shape.layout_major;
        i.layout_minor = seg.shape.layout_minor;
        i.n_slots = seg.shape.n_slots;
        i.n_processes = seg.shape.n_procs;
        i.slot_bytes = seg.shape.slot_bytes;
        i.total_bytes = seg.shape.total_bytes;
        std::memcpy(i.uuid, seg.shape.uuid, sizeof(i.uuid));
        i.index = ring->index();
        i.read_only = seg.read_only;
        return write_struct(info, i, "info");
    });
}

int busrl_ring_bind_fates(busrl_ring* ring, const char* train, const char* validate) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        auto open = [&](const char* path, const char* what) {
            return path == nullptr
                       ? nullptr
                       : std::make_shared<Fates>(text_arg(path, what, 4095), false, kFateCapacity, seg.read_only);
        };
        FateBook book{open(train, "train"), open(validate, "validate")};
        ring->fates = std::move(book);
        return BUSRL_OK;
    });
}

int busrl_ring_register(busrl_ring* ring, const char* role, const char* label, uint32_t* index) {
    return guarded([&] {
        const uint32_t entry = given(ring, "ring").join(text_arg(role, "role", 15), text_arg(label, "label", 39));
        if (index != nullptr) *index = entry;
        return BUSRL_OK;
    });
}

int busrl_ring_ready(busrl_ring* ring) {
    return guarded([&] {
        given(ring, "ring").entry().ready.store(1, std::memory_order_release);
        return BUSRL_OK;
    });
}

int busrl_ring_progress(busrl_ring* ring) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        e.progress_ns.store(monotonic_ns(), std::memory_order_release);
        e.progress.fetch_add(1, std::memory_order_release);
        return BUSRL_OK;
    });
}

int busrl_ring_activity(busrl_ring* ring, const char* name, double deadline_s) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        const char* text = &given(name, "name");
        // Written so that NaN becomes 0: a comparison with it is false.
        const double seconds = deadline_s > 0 ? std::min(deadline_s, 1e9) : 0;
        e.deadline_ns.store(uint64_t(seconds * 1e9), std::memory_order_release);
        store_text(e.activity, std::string(text, ::strnlen(text, sizeof(e.activity))));
        e.activity_ns.store(monotonic_ns(), std::memory_order_release);
        e.progress.fetch_add(1, std::memory_order_release);  // to begin something is to get on
        return BUSRL_OK;
    });
}

int busrl_ring_add(busrl_ring* ring, uint64_t busy_ns, uint64_t idle_ns, uint64_t tokens, uint64_t samples) {
    return guarded([&] {
        ProcEntry& e = given(ring, "ring").entry();
        e.busy_ns.fetch_add(busy_ns, std::memory_order_relaxed);
        e.idle_ns.fetch_add(idle_ns, std::memory_order_relaxed);
        e.tokens.fetch_add(tokens, std::memory_order_relaxed);
        e.samples.fetch_add(samples, std::memory_order_relaxed);
        // The entry goes with its process; what all of them generated stays.
        if (tokens) ring->writable().header().counters[kTokens].value.fetch_add(tokens, std::memory_order_relaxed);
        return BUSRL_OK;
    });
}

// ---------------------------------------------------------------- claiming

static_assert(sizeof(busrl_held) == sizeof(Held) && offsetof(busrl_held, word) == offsetof(Held, word));

int busrl_ring_take(busrl_ring* ring, uint32_t from, uint32_t to, int64_t cls, uint32_t max_attempt, busrl_held* held,
                    uint32_t limit, uint32_t* count) {
    return guarded([&] {
        given(count, "count") = 0;
        if (limit != 0) given(held, "held");
        if (cls < -1 || cls > int64_t(UINT32_MAX)) invalid("a class is 0 .. 2**32 - 1, or -1 for any");
        const Wanted want{state_arg(from), state_arg(to), cls, limit, max_attempt};
        const Segment& seg = given(ring, "ring").writable();
        for (const Held& h : take(seg, ring->me(), want)) held[(*count)++] = {h.slot, 0, h.word};
        return BUSRL_OK;
    });
}

int busrl_ring_claim(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* mine) {
    return guarded([&] {
        given(mine, "mine") = 0;
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(claim(seg, ring->me(), slot, word, state_arg(to)), mine);
    });
}

int busrl_ring_mark_alone(busrl_ring* ring, uint32_t slot, uint64_t word) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (state_of(word) != State::GENERATING) invalid("only a GENERATING slot is marked alone");
        mark_alone(seg, ring->me(), slot, word);
        return BUSRL_OK;
    });
}

// ---------------------------------------------------------------- letting go

int busrl_ring_commit(busrl_ring* ring, uint32_t slot, uint64_t word, int done, uint64_t* next) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(commit_segment(seg, ring->me(), slot, word, done != 0), next);
    });
}

int busrl_ring_release(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* next) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        return word_or_again(release(seg, ring->me(), slot, word, state_arg(to)), next);
    });
}

int busrl_ring_free(busrl_ring* ring, uint32_t slot, uint64_t word) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        return free_call(seg, ring->me(), slot, word) ? BUSRL_OK : BUSRL_AGAIN;
    });
}

int busrl_ring_drop(busrl_ring* ring, uint32_t slot, uint64_t word, char reason) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (reason < '!' || reason > '~' || reason == kDispatched || reason == kTrained || reason == kValidated)
            invalid("the reason of a drop is one ASCII letter that is not D, T or V");
        return drop(seg, ring->index(), ring->fates, slot, word, uint8_t(reason)) ? BUSRL_OK : BUSRL_AGAIN;
    });
}

// ---------------------------------------------------------------- waiting and watching

int busrl_ring_wait(busrl_ring* ring, uint32_t state, uint64_t seen, uint64_t timeout_ns, uint64_t* now) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const State which = state_arg(state);
        const bool changed = wait_for_entry(seg, ring->index(), which, seen, timeout_ns);
        if (now != nullptr) *now = transitions(seg, which);
        return changed ? BUSRL_OK : BUSRL_AGAIN;
    });
}

int busrl_ring_reap(busrl_ring* ring, busrl_reaped* reaped, uint32_t limit, uint32_t* count) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").writable();
        if (limit != 0) given(reaped, "reaped");
        const std::vector<Reaped> all = reap(seg, ring->fates, ring->index());
        for (size_t i = 0; i < std::min(size_t(limit), all.size()); ++i) {
            busrl_reaped one{all[i].slot, uint32_t(all[i].from), uint32_t(all[i].to), all[i].pid, {}};
            all[i].label.copy(one.label, sizeof(one.label) - 1);
            reaped[i] = one;
        }
        if (count != nullptr) *count = uint32_t(all.size());
        return BUSRL_OK;
    });
}

int busrl_ring_stats(busrl_ring* ring, busrl_stats* stats) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const Header& h = seg.header();
        busrl_stats s{};
        s.states = kStates;
        for (uint32_t k = 0; k < kStates; ++k) s.transitions[k] = transitions(seg, State(k));
        for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
            const uint32_t k = state_index(load_word(seg, i));
            if (k < kStates) ++s.occupancy[k];
        }
        for (uint32_t k = 0; k < 64; ++k) s.drops[k] = h.drops[k].load(std::memory_order_relaxed);
        auto counter = [&](Counter c) { return h.counters[c].value.load(std::memory_order_relaxed); };
        auto entered = [&](State state) { return s.transitions[uint32_t(state)]; };
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
        return write_struct(stats, s, "stats");
    });
}

int busrl_ring_header(busrl_ring* ring, const char* name, uint64_t* value) {
    return guarded([&] {
        const Segment& seg = given(ring, "ring").live();
        const std::string wanted = text_arg(name, "name", 64);
        given(value, "value") = 0;
        for (uint32_t i = 0; i < kHeaderWordCount; ++i) {
            if (wanted != kHeaderWords[i]) continue;
            *value = seg.header().words[i].load(std::memory_order_acquire);
            return BUSRL_OK;
        }
        invalid("the ring header has no word \"" + wanted + "\"");
    });
}
