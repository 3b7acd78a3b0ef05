// Breadth-first search through every state of a model, with the shortest way to whatever is wrong.
//
//  * A model is a class with `State` (plain data), `Key` (its packed form), `initial`, `pack`, `unpack`, `next`,
//  `wrong`
//    and `ended`. `pack` gives states that differ only by a renaming the same key: that is the symmetry reduction.
//  * Checked: no step and no state is wrong; from every state the end is reachable by steps that are not deaths.
//  * Keys are stored whole, never only their hashes: two states are never taken for one.
// Knows nothing of slots or samples.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace model {

// One arrow out of a state. `text` is a printf format for `a` and `b`; `wrong` names the rule that it breaks.
struct Step {
    const char* text;
    int a = 0;
    int b = 0;
    bool death = false;
    const char* wrong = nullptr;
};

struct Verdict {
    std::string wrong;  // empty: all rules hold
    size_t states = 0;
    size_t steps = 0;
    double seconds = 0;
    std::vector<std::string> trace;
};

template <class Model>
class Explorer {
  public:
    using State = typename Model::State;
    using Key = typename Model::Key;

    // With `only`, other wrongs are passed over: what a mutant is expected to break may not be the first thing it
    // breaks.
    explicit Explorer(const Model& model, const char* only = nullptr) : model_(model), only_(only) {}

    Verdict run() {
        const auto begun = std::chrono::steady_clock::now();
        Verdict verdict;
        explore(verdict);
        if (verdict.wrong.empty()) check_progress(verdict);
        verdict.states = keys_.size();
        verdict.steps = steps_;
        verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        return verdict;
    }

  private:
    static constexpr uint32_t kNone = ~uint32_t{0};
    static constexpr size_t kMost = 50'000'000;

    bool looked_for(const char* wrong) const {
        return wrong != nullptr && (only_ == nullptr || std::strncmp(wrong, only_, std::strlen(only_)) == 0);
    }

    void explore(Verdict& verdict) {
        table_.assign(1 << 16, kNone);
        add(model_.pack(model_.initial()), kNone);
        for (uint32_t at = 0; at < keys_.size() && verdict.wrong.empty(); ++at) {
            const State state = model_.unpack(keys_[at]);
            if (const char* wrong = model_.wrong(state); looked_for(wrong)) return fail(verdict, wrong, at);
            first_edge_.push_back(edges_.size());
            model_.next(state, [&](const State& after, const Step& step) {
                ++steps_;
                if (!verdict.wrong.empty()) return;
                if (looked_for(step.wrong)) return fail(verdict, step.wrong, at, &step);
                const uint32_t to = add(model_.pack(after), at);
                if (!step.death && to != at) edges_.push_back(to);
            });
            if (keys_.size() > kMost) return fail(verdict, "more states than these models are meant to have", at);
        }
        first_edge_.push_back(edges_.size());
    }

    // From every state the end must be reachable without another death: no deadlock, no way in without a way out.
    void check_progress(Verdict& verdict) {
        const uint32_t count = uint32_t(keys_.size());
        std::vector<uint64_t> first(count + 1, 0);
        for (uint32_t to : edges_) ++first[to + 1];
        for (uint32_t i = 0; i < count; ++i) first[i + 1] += first[i];
        std::vector<uint64_t> place(first.begin(), first.end() - 1);
        std::vector<uint32_t> before(edges_.size());
        for (uint32_t from = 0; from < count; ++from)
            for (uint64_t e = first_edge_[from]; e < first_edge_[from + 1]; ++e) before[place[edges_[e]]++] = from;
        std::vector<bool> good(count, false);
        std::vector<uint32_t> todo;
        for (uint32_t i = 0; i < count; ++i)
            if (model_.ended(model_.unpack(keys_[i]))) {
                good[i] = true;
                todo.push_back(i);
            }
        while (!todo.empty()) {
            const uint32_t at = todo.back();
            todo.pop_back();
            for (uint64_t e = first[at]; e < first[at + 1]; ++e)
                if (!good[before[e]]) {
                    good[before[e]] = true;
                    todo.push_back(before[e]);
                }
        }
        for (uint32_t i = 0; i < count; ++i)
            if (!good[i]) return fail(verdict, "stuck: no way to the end", i);
    }

    uint32_t add(const Key& key, uint32_t from) {
        if ((keys_.size() + 1) * 2 > table_.size()) grow();
        size_t at = hash(key) & (table_.size() - 1);
        while (table_[at] != kNone) {
            if (keys_[table_[at]] == key) return table_[at];
            at = (at + 1) & (table_.size() - 1);
        }
        table_[at] = uint32_t(keys_.size());
        keys_.push_back(key);
        parent_.push_back(from);
        return table_[at];
    }

    void grow() {
        std::vector<uint32_t> bigger(table_.size() * 2, kNone);
        for (uint32_t i = 0; i < keys_.size(); ++i) {
            size_t at = hash(keys_[i]) & (bigger.size() - 1);
            while (bigger[at] != kNone) at = (at + 1) & (bigger.size() - 1);
            bigger[at] = i;
        }
        table_.swap(bigger);
    }

    static size_t hash(const Key& key) {
        uint64_t h = 0;
        for (uint64_t word : key) {
            h = (h ^ word) * 0x9E3779B97F4A7C15u;
            h ^= h >> 29;
        }
        return h;
    }

    void fail(Verdict& verdict, const char* wrong, uint32_t at, const Step* last = nullptr) {
        verdict.wrong = wrong;
        std::vector<uint32_t> path;
        for (uint32_t i = at; i != kNone; i = parent_[i]) path.push_back(i);
        std::reverse(path.begin(), path.end());
        verdict.trace = replay(path);
        if (last) verdict.trace.push_back(line_of(*last));
    }

    // Walks the path again without renaming, so that the trace speaks of the same process by the same number.
    std::vector<std::string> replay(const std::vector<uint32_t>& path) {
        std::vector<std::string> lines;
        State now = model_.initial();
        for (size_t i = 1; i < path.size(); ++i) {
            bool found = false;
            State chosen = now;
            model_.next(now, [&](const State& after, const Step& step) {
                if (found || looked_for(step.wrong) || !(model_.pack(after) == keys_[path[i]])) return;
                found = true;
                chosen = after;
                lines.push_back(line_of(step));
            });
            now = chosen;
        }
        return lines;
    }

    static std::string line_of(const Step& step) {
        char line[160];
        std::snprintf(line, sizeof(line), step.text, step.a, step.b);
        return line;
    }

    const Model& model_;
    const char* const only_;
    std::vector<Key> keys_;
    std::vector<uint32_t> parent_;
    std::vector<uint32_t> table_;
    std::vector<uint32_t> edges_;       // of all states in order, deaths left out
    std::vector<uint64_t> first_edge_;  // where each state's begin
    size_t steps_ = 0;
};

// Fields of a few bits, one after the other, in 64-bit words.
template <size_t Words>
class Bits {
  public:
    std::array<uint64_t, Words> words{};

    void put(uint64_t value, uint32_t bits) {
        const uint32_t word = at_ / 64, shift = at_ % 64;
        words[word] |= value << shift;
        if (shift + bits > 64) words[word + 1] |= value >> (64 - shift);
        at_ += bits;
    }
    uint64_t get(uint32_t bits) {
        const uint32_t word = at_ / 64, shift = at_ % 64;
        uint64_t value = words[word] >> shift;
        if (shift + bits > 64) value |= words[word + 1] << (64 - shift);
        at_ += bits;
        return value & ((uint64_t{1} << bits) - 1);
    }

  private:
    uint32_t at_ = 0;
};

}  // namespace model
