// A reward worker of a busrl run in C++: `reward RUN_DIR NAME`.
//
// Takes GENERATED slots through the C ABI (busrl_ring.h), compares the answer in the completion with that of the
// prompt's record as busrl's own `exact_match` does, writes the reward, commits REWARDED, rings REWARD_COMPUTED.
//
//  * The ring is the truth: it is looked at every 50 ms even if no doorbell ever rings.
//  * A slot is held only while it is judged. If this process dies meanwhile, the slot goes back to GENERATED.
#include <busrl_ring.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <regex>

#include "bus.hpp"

namespace {

constexpr int kTickMs = 50;
constexpr uint32_t kBatch = 64;
using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t g_signalled = 0;

// A negative code ends this worker with its text; the supervisor starts it again.
int check(int code, const char* what) {
    if (code < 0) throw std::runtime_error(std::string(what) + ": " + busrl_ring_error(nullptr, nullptr));
    return code;
}

json read_json(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("can not read " + path);
    return json::parse(file);
}

class Judge {  // busrl's exact_match: what `extract` finds last in the completion is the answer
  public:
    Judge(const std::string& extract, std::string key)
        : asked_(!extract.empty()), pattern_(extract), key_(std::move(key)) {}

    double operator()(const std::string& record, const std::string& completion) const {
        const json right = json::parse(record).at(key_);
        const std::string wanted = right.is_string() ? right.get<std::string>() : right.dump();
        return find(completion) == strip(wanted) ? 1.0 : 0.0;
    }

  private:
    std::optional<std::string> find(const std::string& text) const {
        if (!asked_) return strip(text);
        std::optional<std::string> found;
        for (std::sregex_iterator one(text.begin(), text.end(), pattern_), end; one != end; ++one)
            found = strip(pattern_.mark_count() ? one->str(1) : one->suffix().str());
        return found;
    }
    static std::string strip(const std::string& text) {
        const char* space = " \t\n\r\f\v";
        const size_t from = text.find_first_not_of(space);
        return from == std::string::npos ? "" : text.substr(from, text.find_last_not_of(space) - from + 1);
    }
    bool asked_;
    std::regex pattern_;
    std::string key_;
};

class Worker {
  public:
    Worker(const std::string& run_dir, std::string name)
        : name_(std::move(name)),
          run_(read_json(run_dir + "/run.json")),
          topology_(read_json(run_dir + "/topology.json")),
          judge_(topology_["reward"]["extract"], topology_["reward"]["answer_key"]) {
        const std::string ring = run_["ring"];
        check(busrl_ring_attach(BUSRL_RING_ABI, ring.c_str(), 0, &ring_), "attach");
        const std::string fates = run_dir + "/fates.bin", validate = run_dir + "/fates.validate.bin";
        check(busrl_ring_bind_fates(ring_, fates.c_str(), validate.c_str()), "bind fates");
        check(busrl_ring_register(ring_, "reward", name_.c_str(), &index_), "register");
    }
    ~Worker() { busrl_ring_detach(ring_); }  // hands back whatever is still held
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    void run() {
        const double ready_s = topology_["limits"]["ready_s"];
        check(busrl_ring_activity(ring_, "starting", ready_s), "activity");
        std::string address = name_;
        std::replace(address.begin(), address.end(), '/', '-');
        Bus bus(address, run_["frontend"], run_["backend"], {"DATA_GENERATED/", "STOP/"},
                topology_["bus"]["max_message_bytes"]);
        if (!bus.ready(ready_s)) throw std::runtime_error("no round trip through the broker");
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        bus.post("HELLO", {{"role", "reward"}, {"pid", getpid()}, {"host", host}, {"index", index_}});
        check(busrl_ring_activity(ring_, "", 0), "activity");
        check(busrl_ring_ready(ring_), "ready");
        std::cerr << "ready" << std::endl;
        loop(bus);
        bus.post("GOODBYE", {{"reason", stopping_}});
        std::cerr << "stopping: " << stopping_ << std::endl;
    }

  private:
    void loop(Bus& bus) {
        Clock::time_point next_heartbeat{};
        while (stopping_.empty()) {
            while (std::optional<json> message = bus.take())  // DATA_GENERATED says no more than "look"
                if ((*message)["type"] == "STOP") stopping_ = "STOP: " + message->value("reason", "");
            if (g_signalled) stopping_ = "a signal";
            check(busrl_ring_progress(ring_), "progress");
            if (Clock::now() >= next_heartbeat) {
                bus.post("HEARTBEAT", {{"role", "reward"}, {"activity", ""}});
                next_heartbeat = Clock::now() + std::chrono::seconds(1);
            }
            if (stopping_.empty() && !step(bus)) bus.wait(kTickMs);
        }
    }

    // Judges what is there; false if nothing was.
    bool step(Bus& bus) {
        const Clock::time_point began = Clock::now();
        busrl_held held[kBatch];
        uint32_t count = 0;
        check(busrl_ring_take(ring_, BUSRL_GENERATED, BUSRL_REWARDING, BUSRL_ANY_CLASS, 1, held, kBatch, &count),
              "take");
        json bell;  // one doorbell for the whole batch: it names the first slot and counts the rest
        for (uint32_t i = 0; i < count; ++i) {
            const json told = settle(held[i]);
            if (bell.is_null()) bell = told;
        }
        if (count == 0) return false;
        bell["count"] = count;
        bus.post("REWARD_COMPUTED", bell);
        const auto busy = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began);
        check(busrl_ring_add(ring_, uint64_t(busy.count()), 0, 0, count), "add");
        return true;
    }

    json settle(const busrl_held& held) {
        busrl_line line{};
        line.size = sizeof line;
        check(busrl_ring_line(ring_, held.slot, &line), "line");
        try {
            line.reward = judge_(text(held.slot, "task", BUSRL_NO_SEGMENT), text(held.slot, "text", line.segs - 1u));
        } catch (const std::exception& problem) {  // this sample can not be judged: its group gets another one
            std::cerr << "sample " << line.uid << ": " << problem.what() << std::endl;
            check(busrl_ring_drop(ring_, held.slot, held.word, 'R'), "drop");
            return {{"slot_id", held.slot}, {"seq", line.seq}, {"uid", line.uid}, {"reward", 0.0}};
        }
        line.reward_parts = 1;
        check(busrl_ring_set(ring_, held.slot, held.word, &line, BUSRL_SET_REWARD | BUSRL_SET_REWARD_PARTS), "set");
        check(busrl_ring_release(ring_, held.slot, held.word, BUSRL_REWARDED, nullptr), "release");
        return {{"slot_id", held.slot}, {"seq", line.seq}, {"uid", line.uid}, {"reward", line.reward}};
    }

    std::string text(uint32_t slot, const char* name, uint32_t segment) {
        busrl_tensor tensor;
        tensor.size = sizeof tensor;
        check(busrl_ring_tensor(ring_, slot, name, segment, &tensor), name);
        std::string found(static_cast<const char*>(tensor.data), tensor.nbytes);
        while (!found.empty() && found.back() == '\0') found.pop_back();
        return found;
    }

    std::string name_;
    json run_, topology_;
    Judge judge_;
    busrl_ring* ring_ = nullptr;
    uint32_t index_ = 0;
    std::string stopping_;
};

}  // namespace

int main(int count, char** words) {
    if (count != 3) {
        std::cerr << "usage: reward RUN_DIR NAME\n";
        return 2;
    }
    for (int number : {SIGTERM, SIGINT}) std::signal(number, [](int) { g_signalled = 1; });
    try {
        Worker(words[1], words[2]).run();
        return 0;
    } catch (const std::exception& problem) {
        std::cerr << words[2] << ": " << problem.what() << std::endl;
        return 1;
    }
}
