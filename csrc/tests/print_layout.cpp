// Prints the layout as the compiler sees it, as JSON: every field with offset, bytes and type, the constants, the
// states and the table of transitions. tests/docs compares docs/ring.md and ring-layout.md with it.
//
//  * A field that is added to a struct and not here leaves a gap or moves a `pad`, which the comparison finds.
#include <cstdio>
#include <type_traits>

#include "busrl/layout.hpp"

using namespace busrl;

namespace {

template <class T>
struct Name {
    static constexpr const char* text = "?";
};
#define BUSRL_NAME(type, shown)                    \
    template <>                                    \
    struct Name<type> {                            \
        static constexpr const char* text = shown; \
    };                                             \
    template <>                                    \
    struct Name<A<type>> {                         \
        static constexpr const char* text = shown; \
    };
BUSRL_NAME(uint8_t, "u8")
BUSRL_NAME(uint16_t, "u16")
BUSRL_NAME(uint32_t, "u32")
BUSRL_NAME(uint64_t, "u64")
BUSRL_NAME(int32_t, "i32")
BUSRL_NAME(float, "f32")
BUSRL_NAME(double, "f64")
BUSRL_NAME(char, "char")
BUSRL_NAME(HeaderFixed, "HeaderFixed")
template <>
struct Name<WakeLine> {
    static constexpr const char* text = "WakeLine";
};
template <>
struct Name<CounterLine> {
    static constexpr const char* text = "CounterLine";
};

bool first = true;

template <class T>
void field(size_t offset, const char* name) {
    using Element = std::remove_all_extents_t<T>;
    std::printf("%s[%zu, %zu, \"%s", first ? "" : ", ", offset, sizeof(T), Name<Element>::text);
    if constexpr (std::is_array_v<T>) std::printf("[%zu]", sizeof(T) / sizeof(Element));
    std::printf("\", \"%s\"]", name);
    first = false;
}

void begin(const char* name, size_t size) {
    std::printf("  \"%s\": {\"bytes\": %zu, \"fields\": [", name, size);
    first = true;
}
void end(bool last = false) {
    std::printf("]}%s\n", last ? "" : ",");
}

#define FIELD(of, name) field<decltype(of::name)>(offsetof(of, name), #name);

void structs() {
    begin("HeaderFixed", sizeof(HeaderFixed));
    FIELD(HeaderFixed, magic)
    FIELD(HeaderFixed, layout_major)
    FIELD(HeaderFixed, layout_minor)
    FIELD(HeaderFixed, total_bytes)
    FIELD(HeaderFixed, uuid)
    FIELD(HeaderFixed, boot_id)
    FIELD(HeaderFixed, pid_ns)
    FIELD(HeaderFixed, n_slots)
    FIELD(HeaderFixed, n_procs)
    FIELD(HeaderFixed, proc_off)
    FIELD(HeaderFixed, line_off)
    FIELD(HeaderFixed, table_off)
    FIELD(HeaderFixed, data_off)
    FIELD(HeaderFixed, slot_stride)
    FIELD(HeaderFixed, slot_bytes)
    end();
    begin("Header", sizeof(Header));
    FIELD(Header, fixed)
    FIELD(Header, crc32c)
    FIELD(Header, ready)
    FIELD(Header, words)
    FIELD(Header, rescanned_ns)
    FIELD(Header, pad)
    FIELD(Header, wake)
    FIELD(Header, counters)
    FIELD(Header, drops)
    FIELD(Header, pad2)
    end();
    begin("WakeLine", sizeof(WakeLine));
    FIELD(WakeLine, transitions)
    FIELD(WakeLine, waiters)
    FIELD(WakeLine, pad)
    end();
    begin("CounterLine", sizeof(CounterLine));
    FIELD(CounterLine, value)
    FIELD(CounterLine, pad)
    end();
    begin("ProcEntry", sizeof(ProcEntry));
    FIELD(ProcEntry, ident)
    FIELD(ProcEntry, start_ticks)
    FIELD(ProcEntry, pid_ns)
    FIELD(ProcEntry, started_ns)
    FIELD(ProcEntry, ready)
    FIELD(ProcEntry, pad0)
    FIELD(ProcEntry, role)
    FIELD(ProcEntry, label)
    FIELD(ProcEntry, progress)
    FIELD(ProcEntry, progress_ns)
    FIELD(ProcEntry, activity_ns)
    FIELD(ProcEntry, deadline_ns)
    FIELD(ProcEntry, activity)
    FIELD(ProcEntry, busy_ns)
    FIELD(ProcEntry, idle_ns)
    FIELD(ProcEntry, tokens)
    FIELD(ProcEntry, samples)
    FIELD(ProcEntry, version)
    FIELD(ProcEntry, waits)
    FIELD(ProcEntry, pad1)
    end();
    begin("Line", sizeof(Line));
    FIELD(Line, word)
#define BUSRL_FIELD(name, type, offset) FIELD(Line, name)
    BUSRL_LINE_FIELDS(BUSRL_FIELD)
#undef BUSRL_FIELD
    end();
    begin("TensorTable", sizeof(TensorTable));
    FIELD(TensorTable, used)
    FIELD(TensorTable, pad0)
    FIELD(TensorTable, allocated)
    FIELD(TensorTable, pad)
    FIELD(TensorTable, entry)
    end();
    begin("TensorEntry", sizeof(TensorEntry));
    FIELD(TensorEntry, name)
    FIELD(TensorEntry, segment)
    FIELD(TensorEntry, code)
    FIELD(TensorEntry, bits)
    FIELD(TensorEntry, ndim)
    FIELD(TensorEntry, crc32c)
    FIELD(TensorEntry, offset)
    FIELD(TensorEntry, nbytes)
    FIELD(TensorEntry, shape)
    FIELD(TensorEntry, capacity)
    FIELD(TensorEntry, writer)
    FIELD(TensorEntry, reserved)
    FIELD(TensorEntry, flags)
    end(true);
}

}  // namespace

int main() {
    std::printf("{\"layout\": [%u, %u],\n\"structs\": {\n", kLayoutMajor, kLayoutMinor);
    structs();
    std::printf("},\n\"states\": [");
    for (uint32_t s = 0; s < kStates; ++s)
        std::printf("%s[\"%s\", %s]", s ? ", " : "", name_of(State(s)), is_working(State(s)) ? "true" : "false");
    std::printf("],\n\"header_words\": [");
    for (uint32_t i = 0; i < kHeaderWordCount; ++i) std::printf("%s\"%s\"", i ? ", " : "", kHeaderWords[i]);
    std::printf("],\n\"transitions\": [");
    const char* comma = "";
    for (const Transition& t : kTransitions) {
        std::printf("%s[\"%s\", \"%s\", \"%s\"]", comma, name_of(t.from), name_of(t.to), t.meaning);
        comma = ", ";
    }
    std::printf("],\n\"call_transitions\": [");
    comma = "";
    for (const Transition& t : kCallTransitions) {
        std::printf("%s[\"%s\", \"%s\", \"%s\"]", comma, name_of(t.from), name_of(t.to), t.meaning);
        comma = ", ";
    }
    std::printf("],\n\"magic\": [\"%s\", \"%s\"", kMagicText[0], kMagicText[1]);
    std::printf("],\n\"counters\": {\"returned\": %d, \"reaps\": %d, \"drops\": %d, ", kReturned, kReaps, kDrops);
    std::printf("\"finished\": %d, \"dispatches\": %d, \"tokens\": %d},\n", kFinished, kDispatches, kTokens);
    std::printf("\"hints\": {\"states\": [");
    comma = "";
    for (uint32_t s = 0; s < kStates; ++s)
        if (has_hints(State(s))) {
            std::printf("%s\"%s\"", comma, name_of(State(s)));
            comma = ", ";
        }
    std::printf("], \"bytes\": [");
    comma = "";
    const uint64_t counts[] = {1, 64, 1024, 1025, 65536, 1 << 20};
    for (uint64_t n : counts) {
        std::printf("%s[%llu, %llu, %llu]", comma, (unsigned long long)n, (unsigned long long)leaf_bytes(n),
                    (unsigned long long)hint_bytes(n));
        comma = ", ";
    }
    std::printf("]},\n");
    std::printf("\"dtypes\": {\"int\": %d, \"uint\": %d, \"float\": %d, \"bfloat\": %d, \"bool\": %d},\n", kInt, kUint,
                kFloat, kBfloat, kBool);
    std::printf("\"word\": [%llu, %llu, %llu, %llu],\n", (unsigned long long)make_word(State(1), 0, 0, 0),
                (unsigned long long)make_word(State(0), 1, 0, 0), (unsigned long long)make_word(State(0), 0, 1, 0),
                (unsigned long long)make_word(State(0), 0, 0, 1));
    std::printf("\"ident\": %llu, \"owners\": %u, \"segments\": %u, \"tensors\": %u, \"tensor_align\": %llu}\n",
                (unsigned long long)make_ident(3, 2, true), kMaxOwner, kMaxSegs, kTensors,
                (unsigned long long)kTensorAlign);
}
