// Attaches to segments that a seeded mutator has changed, and does with them what a process of a run does.
//
//   fuzz_segment [INPUTS [SEED [control]]]
//
//  * Every input is a valid segment with all kinds of slots in it, every third one of model calls, changed in 1 to 16
//  places: header (mostly with its
//    checksum made right again), process table, control lines, tensor tables, payloads, length of the file.
//  * The only thing that may come back is busrl::Error. A crash, a hang (30 s for one input), another exception or a
//    sanitizer's report ends the program; so does an array that reaches out of its slot, by arithmetic of our own.
//  * `control` takes every descriptor at its word, as a reader without checks would: that must be caught at once.
// Talks to the public headers only.
#include <cinttypes>
#include <iterator>
#include <random>

#include "calls_world.hpp"

namespace {

using namespace busrl;
using test::World;

constexpr uint32_t kHangS = 30;
constexpr Geometry kShape{6, 6, 1024};
bool g_trusting = false;  // the control: believe what the segment says

struct Tally {
    uint64_t attached = 0, refused = 0, steps = 0, errors = 0, arrays = 0;
};
Tally g_tally;
uint64_t g_read = 0;  // keeps the reads from being optimised away

[[noreturn]] void fail(const char* what, uint64_t input, uint64_t seed) {
    std::printf("FAIL  input %" PRIu64 " of seed %" PRIu64 ": %s\n", input, seed, what);
    std::exit(1);
}

// ------------------------------------------------------------------------------------------------ the valid segment

void add_arrays(World& w, const Held& held, uint8_t segment) {
    test::put_pattern(*w.seg, held.slot, held.word, "tokens", segment, held.slot, 8);
    test::put_pattern(*w.seg, held.slot, held.word, "logprobs", segment, held.slot, 8);
}

std::vector<uint8_t> copy_of(const Segment& seg) {
    std::vector<uint8_t> bytes(seg.shape.total_bytes);
    std::memcpy(bytes.data(), &seg.header(), bytes.size());
    return bytes;
}

// One slot each FREE, QUEUED, GENERATING, GENERATED, REWARDING and REWARDED; the working ones are of a dead process.
std::vector<uint8_t> valid_segment() {
    World w(kShape);
    for (uint64_t uid = 1; uid <= 5; ++uid) w.dispatch(uid);
    for (uint32_t done = 0; done < 4; ++done) {
        const Held held = w.claim(State::QUEUED, State::GENERATING);
        add_arrays(w, held, 0);
        if (done < 3) commit_segment(*w.seg, w.me(), held.slot, held.word, true);
    }
    for (uint32_t done = 0; done < 2; ++done) {
        const Held held = w.claim(State::GENERATED, State::REWARDING);
        add_arrays(w, held, kNoSegment);
        if (done < 1) release(*w.seg, w.me(), held.slot, held.word, State::REWARDED);
    }
    auto bytes = copy_of(*w.seg);
    w.member->abandon();  // the entry and what it owns stay, as after a kill
    return bytes;
}

// Calls that are QUEUED, GENERATING and GENERATED, of a dead process and of one that has left.
std::vector<uint8_t> valid_segment_of_calls() {
    test::CallWorld w(kShape);
    const Membership gone(w.seg, "agent", "agent/1");
    for (uint64_t number = 0; number < 4; ++number)
        put_call(*w.seg, number % 2 ? gone.index() : w.me(), w.call(number, 8), w.cursor);
    for (uint32_t done = 0; done < 3; ++done) {
        const Held held = take(*w.seg, w.me(), {State::QUEUED, State::GENERATING, -1, 1, 255}).at(0);
        test::put_pattern(*w.seg, held.slot, held.word, "tokens", 0, held.slot, 8);
        if (done < 2) commit_segment(*w.seg, w.me(), held.slot, held.word, true);
    }
    auto bytes = copy_of(*w.seg);
    w.member->abandon();
    return bytes;
}

// ------------------------------------------------------------------------------------------------------- mutations

class Mutator {
  public:
    Mutator(const std::vector<uint8_t>& valid, uint64_t seed) : valid_(valid), random_(seed) {
        std::memcpy(&shape_, valid.data(), sizeof(shape_));
    }

    // The bytes of the next input, and the length that its file shall have.
    uint64_t next(std::vector<uint8_t>& bytes) {
        std::memcpy(bytes.data(), valid_.data(), valid_.size());
        for (uint32_t left = 1 + below(16); left > 0; --left) change(bytes, 1 + below(12));
        if (below(4) == 0) {
            for (uint32_t left = 1 + below(2); left > 0; --left) change(bytes, 0);
            if (below(4) != 0) repair_checksum(bytes);
        }
        if (below(32) != 0) return bytes.size();
        return below(2) ? below(uint32_t(bytes.size())) : bytes.size() + below(3) * 4096;
    }

    uint32_t below(uint32_t n) { return uint32_t(random_() % n); }

  private:
    void change(std::vector<uint8_t>& bytes, uint32_t pick) {
        const struct {
            uint64_t from, to;
        } regions[] = {{0, sizeof(HeaderFixed) + 8},        {sizeof(HeaderFixed) + 8, sizeof(Header)},
                       {shape_.proc_off, shape_.line_off},  {shape_.line_off, shape_.table_off},
                       {shape_.table_off, shape_.data_off}, {shape_.data_off, shape_.total_bytes}};
        static constexpr uint32_t weight[] = {0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5};
        const uint32_t which = weight[pick];
        const uint64_t at = regions[which].from + used_part(which, regions[which].to - regions[which].from);
        overwrite(bytes, at, regions[which].to);
    }

    // Most of a region is empty; changes there say little.
    uint64_t used_part(uint32_t which, uint64_t size) {
        if (which == 3 && below(4) != 0) return below(kShape.n_slots) * sizeof(Line) + below(sizeof(Line));
        if (which == 4 && below(4) != 0)
            return below(kShape.n_slots) * sizeof(TensorTable) + below(128 + 4 * sizeof(TensorEntry));
        if (which == 2 && below(4) != 0) return sizeof(ProcEntry) * (1 + below(2)) + below(0xD8);
        return random_() % size;
    }

    void overwrite(std::vector<uint8_t>& bytes, uint64_t at, uint64_t end) {
        static constexpr uint32_t sizes[] = {1, 1, 2, 4, 8, 8};
        const uint64_t size = std::min<uint64_t>(sizes[below(6)], end - at);
        if (below(2)) at -= at % size;  // fields are aligned
        uint64_t value = 0;
        std::memcpy(&value, &bytes[at], size);
        switch (below(4)) {
            case 0:
                value ^= uint64_t{1} << below(uint32_t(8 * size));
                break;
            case 1:
                value = random_();
                break;
            case 2:
                value += uint64_t(int64_t(below(129)) - 64);
                break;
            default:
                value = interesting();
        }
        std::memcpy(&bytes[at], &value, size);
    }

    uint64_t interesting() {
        const uint64_t some[] = {0,
                                 1,
                                 ~uint64_t{0},
                                 uint64_t{1} << 31,
                                 uint64_t{1} << 32,
                                 uint64_t{1} << 62,
                                 uint64_t{1} << 63,
                                 (uint64_t{1} << 63) - 1,
                                 kUidNone - 1,
                                 kShape.slot_bytes,
                                 kShape.slot_bytes - 64,
                                 kShape.slot_bytes + 64,
                                 shape_.slot_stride,
                                 shape_.total_bytes,
                                 make_word(State(below(64)), below(8), below(256), below(16)),
                                 make_ident(below(2) ? uint32_t(getpid()) : below(70000), below(4), below(2))};
        return some[below(uint32_t(std::size(some)))];
    }

    static void repair_checksum(std::vector<uint8_t>& bytes) {
        const uint32_t crc = crc32c(bytes.data(), sizeof(HeaderFixed));
        std::memcpy(&bytes[sizeof(HeaderFixed)], &crc, sizeof(crc));
    }

    const std::vector<uint8_t>& valid_;
    HeaderFixed shape_;
    std::mt19937_64 random_;
};

// -------------------------------------------------------------------------------------------- what a process does

template <class F>
void step(F&& work) {
    ++g_tally.steps;
    try {
        work();
    } catch (const Error&) {
        ++g_tally.errors;
    }
}

void read_array(const Segment& seg, uint32_t slot, const TensorEntry& e) {
    if (!g_trusting && !entry_is_sound(e, seg.shape.slot_bytes)) return;
    unsigned __int128 bytes = e.bits / 8;
    for (uint32_t d = 0; d < std::min(e.ndim, uint8_t(kMaxDims)); ++d) bytes *= e.shape[d];
    const unsigned __int128 end = static_cast<unsigned __int128>(e.offset) + bytes;
    if (e.ndim > kMaxDims || bytes != e.nbytes || end > seg.shape.slot_bytes) {
        std::printf("FAIL  an array of %" PRIu64 " bytes at %" PRIu64 " of slot %u was taken for sound\n", e.nbytes,
                    e.offset, slot);
        std::exit(1);
    }
    ++g_tally.arrays;
    for (uint64_t i = 0; i < e.nbytes; ++i) g_read += seg.payload(slot)[e.offset + i];
}

void look(const Segment& seg) {
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) {
        const uint64_t word = load_word(seg, i);
        g_read += uint64_t(name_of(state_of(word))[0]) + seg.line(i).uid.load() + seg.line(i).group.load();
        const TensorTable& table = seg.table(i);
        for (uint32_t k = 0, used = used_entries(table); k < used; ++k) {
            const TensorEntry e = load_entry(table, k);
            g_read += describe_name(e).size();
            if (e.flags & kTensorValid) read_array(seg, i, e);
        }
        for (const char* name : {"task", "tokens", "logprobs", "prompt_ids", "call"})
            for (const uint8_t segment : {uint8_t{0}, kNoSegment})
                if (const auto at = find_entry(table, TensorName(name), segment))
                    read_array(seg, i, load_entry(table, *at));
    }
    for (uint32_t i = 1; i < seg.shape.n_procs; ++i) {
        ProcEntry& e = seg.proc(i);
        g_read += load_text(e.role).size() + load_text(e.label).size() + load_text(e.activity).size();
        uint64_t proven;
        g_read += proven_dead(seg, i, &proven);
    }
    for (uint32_t s = 0; s < kStates; ++s) g_read += transitions(seg, State(s));
}

void work_on(const Segment& seg, uint32_t me, const FateBook& fates, const Held& held) {
    step([&] {
        TensorEntry e{};
        std::memcpy(e.name, "tokens", 6);
        e.segment = uint8_t(segs_of(held.word));
        e.code = kUint;
        e.bits = 8;
        e.ndim = 1;
        e.shape[0] = e.nbytes = 64;
        e.flags = kTensorValid;
        const uint32_t index = place_entry(seg, held.slot, held.word, e);
        std::memset(seg.payload(held.slot) + e.offset, 1, e.nbytes);
        store_entry(seg.table(held.slot), index, e);
        read_array(seg, held.slot, e);
    });
    step([&] {
        switch (state_of(held.word)) {
            case State::GENERATING:
                commit_segment(seg, me, held.slot, held.word, held.slot % 2 != 0);
                break;
            case State::REWARDING:
                release(seg, me, held.slot, held.word, State::REWARDED);
                break;
            default:
                if (held.slot % 2 != 0)
                    finish(seg, me, fates, held.slot, held.word, kTrained);
                else
                    drop(seg, me, fates, held.slot, held.word, 'M');
        }
    });
}

void call(const std::shared_ptr<Segment>& segment, uint64_t number) {
    const Segment& seg = *segment;
    Membership member(segment, "fuzz", "fuzz");
    const uint32_t me = member.index();
    const int32_t ids[] = {1, 2, 3, int32_t(number)};
    Call one{World::task(number), ids, 4};
    one.line.max_new_tokens = 8;
    uint32_t cursor = 0;
    step([&] { reap(seg, {}, me); });
    step([&] { put_call(seg, me, one, cursor); });
    std::vector<Held> held;
    step([&] { held = take(seg, me, {State::QUEUED, State::GENERATING, -1, 3, 255}); });
    for (const Held& h : held) {
        if (h.slot % 3 == 0)
            step([&] { free_call(seg, me, h.slot, h.word); });
        else
            work_on(seg, me, {}, h);
    }
    for (uint32_t i = 0; i < seg.shape.n_slots; ++i) step([&] { free_call(seg, me, i, load_word(seg, i)); });
    look(seg);
    step([&] { surrender(seg, {}, me); });
}

void take_part(const std::shared_ptr<Segment>& segment, const FateBook& fates, uint64_t uid) {
    const Segment& seg = *segment;
    Membership member(segment, "fuzz", "fuzz");
    const uint32_t me = member.index();
    uint32_t cursor = 0;
    step([&] { reap(seg, fates, me); });
    step([&] { finish_drops(seg, fates); });
    for (const auto& [from, to] : {std::pair{State::QUEUED, State::GENERATING},
                                   {State::GENERATED, State::REWARDING},
                                   {State::REWARDED, State::TRAINING}}) {
        std::vector<Held> held;
        step([&] { held = take(seg, me, {from, to, -1, 2, 255}); });
        for (const Held& one : held) work_on(seg, me, fates, one);
    }
    step([&] { dispatch(seg, me, fates, World::task(uid), cursor); });
    look(seg);
    step([&] { surrender(seg, fates, me); });
}

void one_input(const std::string& path, const FateBook& fates, uint64_t input, bool read_only, Machine machine) {
    std::shared_ptr<Segment> seg;
    try {
        seg = Segment::attach(path, read_only, machine);
    } catch (const Error&) {
        ++g_tally.refused;
        return;
    }
    ++g_tally.attached;
    look(*seg);
    if (read_only) return;
    if (machine == Machine::calls)
        step([&] { call(seg, input); });
    else
        step([&] { take_part(seg, fates, 100 + input % 50000); });
}

// The fates are those of the valid segment again, so that every input begins alike.
void reset(Fates& fates, uint64_t upto) {
    auto* byte = const_cast<uint8_t*>(fates.bytes());
    std::memset(byte, 0, upto);
    std::memset(byte + 1, kDispatched, 5);
}

}  // namespace

int main(int count, char** arguments) {
    const uint64_t inputs = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 20'000;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    g_trusting = count > 3 && std::string(arguments[3]) == "control";
    const std::vector<uint8_t> valid[] = {valid_segment(), valid_segment_of_calls()};
    test::Place place;
    const std::string path = place.path("ring");
    File file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    FateBook fates;
    fates.train = std::make_shared<Fates>(place.path("fates"), true, 1 << 16);
    fates.validate = std::make_shared<Fates>(place.path("validate"), true, 1 << 16);
    fates.train->reserve(1 << 16);
    Mutator mutators[] = {{valid[0], seed}, {valid[1], seed + 1}};
    std::vector<uint8_t> bytes(valid[0].size());  // both have the same shape
    for (uint64_t input = 0; input < inputs; ++input) {
        ::alarm(kHangS);  // its default action ends the program: a hang is a failure
        const auto machine = input % 3 == 2 ? Machine::calls : Machine::samples;
        const uint64_t size = mutators[uint32_t(machine)].next(bytes);
        if (::ftruncate(file.fd(), off_t(size)) != 0 ||
            ::pwrite(file.fd(), bytes.data(), std::min<uint64_t>(size, bytes.size()), 0) < 0)
            fail("cannot write the input", input, seed);
        reset(*fates.train, input % 64 == 0 ? 1 << 16 : 256);
        try {
            one_input(path, fates, input, input % 4 == 0, machine);
        } catch (const std::exception& e) {
            fail(e.what(), input, seed);
        }
    }
    ::alarm(0);
    std::printf("ok    %" PRIu64 " mutated segments of seed %" PRIu64 ": %" PRIu64 " attached, %" PRIu64
                " refused; %" PRIu64 " steps, %" PRIu64 " errors, %" PRIu64 " arrays read\n",
                inputs, seed, g_tally.attached, g_tally.refused, g_tally.steps, g_tally.errors, g_tally.arrays);
    const bool both = g_tally.attached > inputs / 4 && g_tally.refused > 0 && g_tally.errors > 0 && g_tally.arrays > 0;
    return both ? 0 : 1;  // a fuzzer that is always refused, or never, tests nothing
}
