// The ring's core against raw shared memory: each figure and its floor in the same process pair, in turn.
//
//   core ROUNDS     prints one JSON line per figure and round; core.py compiles it and judges the medians
//
// Hand-off: a slot goes there (commit of a segment, claimed for its reward) and back (reward committed, claimed for
// training), both sides reading and writing their data; the slots are dispatched and freed outside the clock. The floor
// of a hand-off is one way of a ping-pong over two cache lines.
#include <vector>

#include "busrl/reap.hpp"
#include "pair.hpp"

using namespace busrl;
using bench::pair;

namespace {

constexpr uint32_t kBatch = 64;   // slots that go to and fro before they are freed and dispatched again
constexpr uint64_t kPage = 4096;  // bytes of the tensor hand-off
constexpr uint64_t kMega = 1 << 20;

struct Ring {  // a segment of its own under /dev/shm, with fates; unlinked with the object
    std::string folder;
    std::shared_ptr<Segment> seg;
    FateBook fates;

    explicit Ring(Geometry g) {
        char name[] = "/dev/shm/busrl.bench.XXXXXX";
        if (::mkdtemp(name) == nullptr) throw Error(Fault::general, "cannot make a folder in /dev/shm");
        folder = name;
        seg = Segment::create(folder + "/ring", g, {7});
        fates.train = std::make_shared<Fates>(folder + "/fates", true, uint64_t{1} << 27);
    }
    ~Ring() {
        for (const char* file : {"/ring", "/fates"}) ::unlink((folder + file).c_str());
        ::rmdir(folder.c_str());
    }
};

struct Actor {  // one process's face of the ring: attached and registered anew, as any stranger would
    std::shared_ptr<Segment> seg;
    FateBook fates;
    Membership member;
    uint32_t cursor = 0;

    Actor(const std::string& folder, const char* label)
        : seg(Segment::attach(folder + "/ring", false)), member(seg, "bench", label) {
        fates.train = std::make_shared<Fates>(folder + "/fates", true, uint64_t{1} << 27);
    }
    uint32_t me() const { return member.index(); }

    Held dispatch_one(uint64_t uid, uint64_t payload = 6) {
        static const std::vector<uint8_t> bytes(1024, 'p');
        Task t{};
        t.uid = t.admission = uid;
        t.bytes = bytes.data();
        t.nbytes = payload;
        const auto held = dispatch(*seg, me(), fates, t, cursor);
        if (!held) throw Error(Fault::general, "the ring of the benchmark is full");
        return *held;
    }
    Held generating(uint64_t uid) {
        const Held q = dispatch_one(uid);
        return {q.slot, claim(*seg, me(), q.slot, q.word, State::GENERATING)};
    }
};

uint64_t g_uid = 0;  // never used twice, so that every dispatch is a first one

uint64_t await_state(const Segment& seg, uint32_t slot, State state) {
    for (;;) {
        const uint64_t word = load_word(seg, slot);
        if (state_of(word) == state) return word;
        bench::relax();
    }
}

enum class Data { line, both, page };

// `line`: the 48 bytes that share the word's cache line with it and the uid: 32 that an owner writes, 16 that the ring
// writes by itself. `both`: 48 bytes that the owner writes, on both cache lines of the control line.
void write_fields(Line& line, uint64_t value, Data data) {
    line.version.store(value, std::memory_order_release);
    line.group.store(value, std::memory_order_release);
    line.admission.store(value, std::memory_order_release);
    line.offer_until_ns.store(value, std::memory_order_release);
    if (data == Data::line) return;
    line.reward.store(double(value), std::memory_order_release);
    line.prompt_tokens.store(uint32_t(value), std::memory_order_release);
    line.response_tokens.store(uint32_t(value), std::memory_order_release);
}
uint64_t read_fields(const Line& line, Data data) {
    uint64_t sum = line.version.load(std::memory_order_acquire) + line.group.load(std::memory_order_acquire) +
                   line.admission.load(std::memory_order_acquire) + line.offer_until_ns.load(std::memory_order_acquire);
    if (data == Data::line)
        return sum + line.changed_ns.load(std::memory_order_acquire) +
               line.last_commit_seq.load(std::memory_order_acquire);
    sum += uint64_t(line.reward.load(std::memory_order_acquire));
    return sum + line.prompt_tokens.load(std::memory_order_acquire) +
           line.response_tokens.load(std::memory_order_acquire);
}

uint64_t* payload(const Segment& seg, uint32_t slot) {
    return reinterpret_cast<uint64_t*>(seg.payload(slot) + 64);
}
void write_page(uint64_t* to, uint64_t value) {
    for (uint64_t i = 0; i < kPage / 8; ++i) to[i] = value + i;
}
uint64_t read_page(const uint64_t* from) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < kPage / 8; ++i) sum += from[i];
    return sum;
}
volatile uint64_t g_sink;

// One side of a hand-off: claims `slot` as soon as it is in `from`, works on it, and commits it to `next`.
struct Side {
    Actor& actor;
    Data data;
    uint64_t take(uint32_t slot, State from, State to) const {
        const Segment& seg = *actor.seg;
        for (;;) {
            const uint64_t word = await_state(seg, slot, from);
            if (const uint64_t mine = claim(seg, actor.me(), slot, word, to)) {
                g_sink = data == Data::page ? read_page(payload(seg, slot)) : read_fields(seg.line(slot), data);
                return mine;
            }
        }
    }
    void write(uint32_t slot, uint64_t value) const {
        if (data == Data::page)
            write_page(payload(*actor.seg, slot), value);
        else
            write_fields(actor.seg->line(slot), value, data);
    }
};

// Nanoseconds of one hand-off (half a round trip), over `batches` of kBatch slots.
double hand_off(const Ring& ring, uint32_t batches, Data data) {
    bench::Lines& raw = bench::lines();
    raw.there = raw.back = raw.ready = 0;
    Actor here(ring.folder, "here");
    bench::Chunks timed;
    pair(
        [&] {
            Actor there(ring.folder, "there");
            const Side side{there, data};
            raw.ready.store(1, std::memory_order_release);
            for (uint32_t b = 1; b <= batches; ++b) {
                bench::await(raw.there, b);
                for (uint32_t slot = 0; slot < kBatch; ++slot) {
                    const uint64_t mine = side.take(slot, State::GENERATED, State::REWARDING);
                    side.write(slot, b);
                    release(*there.seg, there.me(), slot, mine, State::REWARDED);
                }
            }
        },
        [&] {
            const Side side{here, data};
            bench::await(raw.ready, 1);
            for (uint32_t b = 1; b <= batches; ++b) {
                std::vector<uint64_t> word(kBatch);
                for (uint32_t k = 0; k < kBatch; ++k) {
                    const Held held = here.generating(g_uid++);
                    word[held.slot] = held.word;
                }
                raw.there.store(b, std::memory_order_release);
                timed.start();
                for (uint32_t slot = 0; slot < kBatch; ++slot) {
                    side.write(slot, b);
                    commit_segment(*here.seg, here.me(), slot, word[slot], true);
                    word[slot] = side.take(slot, State::REWARDED, State::TRAINING);
                }
                timed.stop();
                for (uint32_t slot = 0; slot < kBatch; ++slot)
                    finish(*here.seg, here.me(), here.fates, slot, word[slot], 'T');
            }
        });
    return timed.median() / kBatch / 2;
}

double raw_lines(uint32_t chunks, bool page) {
    bench::Lines& raw = bench::lines();
    raw.there = raw.back = 0;
    auto* bytes = reinterpret_cast<uint64_t*>(raw.bytes);
    bench::Chunks timed;
    pair(
        [&] {
            for (uint32_t i = 1; i <= chunks * kBatch; ++i) {
                bench::await(raw.there, i);
                if (page) g_sink = read_page(bytes), write_page(bytes, i);
                raw.back.store(i, std::memory_order_release);
            }
        },
        [&] {
            for (uint32_t c = 0, i = 0; c < chunks; ++c) {
                timed.start();
                for (uint32_t k = 0; k < kBatch; ++k) {
                    if (page) write_page(bytes, i);
                    raw.there.store(++i, std::memory_order_release);
                    bench::await(raw.back, i);
                    if (page) g_sink = read_page(bytes);
                }
                timed.stop();
            }
        });
    return timed.median() / kBatch / 2;
}

double raw_futex(uint32_t chunks) {
    bench::Lines& raw = bench::lines();
    raw.there = raw.back = 0;
    bench::Chunks timed;
    pair(
        [&] {
            for (uint32_t i = 1; i <= chunks * kBatch; ++i) {
                bench::sleep_until(raw.there, i);
                bench::store_and_wake(raw.back, i);
            }
        },
        [&] {
            for (uint32_t c = 0, i = 0; c < chunks; ++c) {
                timed.start();
                for (uint32_t k = 0; k < kBatch; ++k) {
                    bench::store_and_wake(raw.there, ++i);
                    bench::sleep_until(raw.back, i);
                }
                timed.stop();
            }
        });
    return timed.median() / kBatch / 2;
}

// As hand_off, but who waits sleeps on the ring's wake-up and finds its slot by take().
Held take_asleep(const Actor& actor, State from, State to) {
    for (;;) {
        const uint64_t seen = transitions(*actor.seg, from);
        const auto held = take(*actor.seg, actor.me(), {from, to, -1, 1, 255});
        if (!held.empty()) return held[0];
        nap(*actor.seg, from, seen, actor.me(), kWaitSliceNs);
    }
}

double blocking(const Ring& ring, uint32_t batches) {
    bench::Lines& raw = bench::lines();
    raw.ready = 0;
    Actor here(ring.folder, "here");
    bench::Chunks timed;
    pair(
        [&] {
            Actor there(ring.folder, "there");
            raw.ready.store(1, std::memory_order_release);
            for (uint32_t k = 0; k < batches * kBatch; ++k) {
                const Held h = take_asleep(there, State::GENERATED, State::REWARDING);
                release(*there.seg, there.me(), h.slot, h.word, State::REWARDED);
            }
        },
        [&] {
            bench::await(raw.ready, 1);
            for (uint32_t b = 0; b < batches; ++b) {
                std::vector<Held> held(kBatch);
                for (Held& h : held) h = here.generating(g_uid++);
                timed.start();
                for (Held& h : held) {
                    commit_segment(*here.seg, here.me(), h.slot, h.word, true);
                    h = take_asleep(here, State::REWARDED, State::TRAINING);
                }
                timed.stop();
                for (const Held& h : held) finish(*here.seg, here.me(), here.fates, h.slot, h.word, 'T');
            }
        });
    return timed.median() / kBatch / 2;
}

TensorEntry mega_entry() {
    TensorEntry e{};
    std::memcpy(e.name, "data", 4);
    e.segment = 0;
    e.code = kUint;
    e.bits = 8;
    e.ndim = 1;
    e.nbytes = e.shape[0] = kMega;
    e.flags = kTensorValid;
    return e;
}

// GB/s of filling 1 MiB tensors slot after slot: by memcpy alone, or with tensor entry, commit and a consumer that
// claims every slot and commits it onwards.
double fill(const Ring& ring, uint32_t slots, bool handed) {
    static const std::vector<uint8_t> source(8 * kMega, 3);
    bench::Lines& raw = bench::lines();
    raw.ready = 0;
    Actor here(ring.folder, "here");
    std::vector<Held> held(slots);
    for (Held& h : held) h = here.generating(g_uid++);
    bench::Chunks timed;
    auto consume = [&] {
        Actor there(ring.folder, "there");
        raw.ready.store(1, std::memory_order_release);
        for (uint32_t k = 0; handed && k < slots; ++k) {
            const Held h = take_asleep(there, State::GENERATED, State::REWARDING);
            g_sink = there.seg->payload(h.slot)[4096];
            release(*there.seg, there.me(), h.slot, h.word, State::REWARDED);
        }
    };
    pair(consume, [&] {
        bench::await(raw.ready, 1);
        for (uint32_t k = 0; k < slots; ++k) {
            timed.start();
            const uint8_t* from = source.data() + (k % 8) * kMega;
            const Held& h = held[k];
            if (!handed) {
                std::memcpy(here.seg->payload(h.slot) + 64, from, kMega);
                timed.stop();
                continue;
            }
            TensorEntry entry = mega_entry();
            const uint32_t index = place_entry(*here.seg, h.slot, h.word, entry);
            std::memcpy(here.seg->payload(h.slot) + entry.offset, from, kMega);
            store_entry(here.seg->table(h.slot), index, entry);
            commit_segment(*here.seg, here.me(), h.slot, h.word, true);
            timed.stop();
        }
    });
    for (const Held& h : held) {
        uint64_t word =
            handed ? load_word(*here.seg, h.slot) : commit_segment(*here.seg, here.me(), h.slot, h.word, true);
        drop(*here.seg, here.me(), here.fates, h.slot, word, 'x');
    }
    return double(kMega) / timed.median();
}

struct Costs {
    double take, commit, dispatch, scan;
};

// Nanoseconds per operation on a ring of `slots` with `live` samples in it; `scan` is per slot.
Costs costs(uint32_t slots, uint32_t live, uint32_t rounds) {
    Ring ring({slots, 8, 256});
    Actor a(ring.folder, "one");
    bench::Chunks dispatching, taking, committing, scanning;
    std::vector<Held> held(live);
    for (uint32_t r = 0; r < rounds; ++r) {
        dispatching.start();
        for (uint32_t k = 0; k < live; ++k) a.dispatch_one(g_uid++);
        dispatching.stop();
        a.cursor = (a.cursor + slots / 8 + 1) % slots;  // the samples of the next round lie elsewhere
        for (auto [from, to, next] : {std::tuple{State::QUEUED, State::GENERATING, State::GENERATED},
                                      std::tuple{State::GENERATED, State::REWARDING, State::REWARDED},
                                      std::tuple{State::REWARDED, State::TRAINING, State::FREE}}) {
            taking.start();
            for (Held& h : held) h = take(*a.seg, a.me(), {from, to, -1, 1, 255}).at(0);
            taking.stop();
            committing.start();
            for (Held& h : held) {
                if (next == State::GENERATED)
                    commit_segment(*a.seg, a.me(), h.slot, h.word, true);
                else if (next == State::REWARDED)
                    release(*a.seg, a.me(), h.slot, h.word, next);
                else
                    finish(*a.seg, a.me(), a.fates, h.slot, h.word, 'T');
            }
            committing.stop();
        }
    }
    const uint32_t passes = std::max<uint32_t>(9, 300'000 / slots);
    for (uint32_t p = 0; p < passes; ++p) {
        uint64_t sum = 0;
        scanning.start();
        for (uint32_t i = 0; i < slots; ++i) sum += state_index(load_word(*a.seg, i));
        scanning.stop();
        g_sink = sum;
    }
    return {taking.median() / live, committing.median() / live, dispatching.median() / live, scanning.median() / slots};
}

void one_round(const Ring& small, const Ring& big) {
    bench::say("raw_line", raw_lines(2000, false), "ns");
    bench::say("ring_line", hand_off(small, 2000, Data::line), "ns");
    bench::say("ring_both_lines", hand_off(small, 2000, Data::both), "ns");
    bench::say("raw_4k", raw_lines(300, true), "ns");
    bench::say("ring_4k", hand_off(small, 300, Data::page), "ns");
    bench::say("raw_futex", raw_futex(100), "ns");
    bench::say("ring_blocking", blocking(small, 100), "ns");
    bench::say("memcpy_1m", fill(big, 256, false), "GB/s");
    bench::say("ring_fill_1m", fill(big, 256, true), "GB/s");
    for (uint32_t slots : {64u, 256u, 1024u, 4096u, 16384u, 65536u}) {
        const Costs c = costs(slots, 32, 300);
        const std::string tail = "_" + std::to_string(slots);
        bench::say(("take" + tail).c_str(), c.take, "ns");
        bench::say(("commit" + tail).c_str(), c.commit, "ns");
        bench::say(("dispatch" + tail).c_str(), c.dispatch, "ns");
        bench::say(("scan" + tail).c_str(), c.scan, "ns/slot");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
    try {
        Ring small({kBatch, 8, 8192});
        Ring big({256, 8, kMega + 4096});
        for (int r = 0; r < rounds; ++r) one_round(small, big);
    } catch (const Error& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    return 0;
}
