// A process's connection to the bus of a run, with libzmq and msgpack alone: one PUB and one SUB socket.
//
//  * Messages are flat msgpack maps; `post` fills the envelope (v, sender, msg_seq, time_ns) of each.
//  * Sending never blocks. Nothing is sent again: a message is a doorbell, and whoever waits for one also looks at the
//    ring on a timer.
#pragma once

#include <zmq.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using nlohmann::json;

constexpr int kProtocol = 1;

// The map of a message of our protocol (without `v`: version 1), or nothing: damaged bytes, another version and what is
// no map are left out.
inline std::optional<json> read(const std::string& raw) {
    const json message = json::from_msgpack(raw, true, false);  // no exception: damaged bytes give a discarded value
    const bool ours =
        message.is_object() && message.value("v", json(1)) == kProtocol && message.value("type", json()).is_string();
    return ours ? std::optional<json>(message) : std::nullopt;
}

class Bus {
  public:
    Bus(std::string name, const std::string& frontend, const std::string& backend,
        const std::vector<std::string>& topics, int64_t max_bytes)
        : name_(std::move(name)), context_(zmq_ctx_new()) {
        pub_ = open(ZMQ_PUB, max_bytes);
        sub_ = open(ZMQ_SUB, max_bytes);
        for (const std::string& topic : topics) zmq_setsockopt(sub_, ZMQ_SUBSCRIBE, topic.data(), topic.size());
        // Last: subscriptions travel in order, so an echo of our own PING proves that the others arrived too.
        const std::string own = "PING/" + name_ + "/";
        zmq_setsockopt(sub_, ZMQ_SUBSCRIBE, own.data(), own.size());
        connect(pub_, frontend);
        connect(sub_, backend);
    }
    ~Bus() {
        zmq_close(pub_);
        zmq_close(sub_);
        zmq_ctx_term(context_);
    }
    Bus(const Bus&) = delete;
    Bus& operator=(const Bus&) = delete;

    // `to` empty: to everybody. The fields are those of the message; the envelope is added here.
    void post(const std::string& type, json fields, const std::string& to = "") {
        const std::string topic = type + "/" + (to.empty() ? "" : to + "/");
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        fields["type"] = type;
        fields["v"] = kProtocol;
        fields["sender"] = name_;
        fields["time_ns"] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
        if (type == "HEARTBEAT") fields["last_seqs"] = sent_;
        fields["msg_seq"] = ++sent_[topic];
        const std::vector<uint8_t> raw = json::to_msgpack(fields);
        zmq_send(pub_, topic.data(), topic.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT);
        zmq_send(pub_, raw.data(), raw.size(), ZMQ_DONTWAIT);
    }

    // The next message that is here; PING is answered on the way, and what is no message of our protocol is left out.
    std::optional<json> take() {
        while (true) {
            const std::optional<std::string> topic = frame();
            if (!topic) return std::nullopt;
            if (!more()) continue;
            const std::string raw = frame().value_or("");
            bool long_one = false;
            for (; more(); frame()) long_one = true;
            std::optional<json> message = read(raw);
            if (!message || long_one) continue;
            if ((*message)["type"] != "PING") return message;
            answer(*message);
        }
    }

    void wait(int timeout_ms) {
        zmq_pollitem_t item{sub_, 0, ZMQ_POLLIN, 0};
        zmq_poll(&item, 1, timeout_ms);
    }

    // True when a message of our own came back through the broker.
    bool ready(double timeout_s) {
        token_ = std::to_string(std::random_device{}()) + std::to_string(std::random_device{}());
        const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
        while (!echoed_ && std::chrono::steady_clock::now() < end) {
            post("PING", {{"token", token_}}, name_);
            wait(50);
            while (take()) {
            }
        }
        return echoed_;
    }

  private:
    void* open(int kind, int64_t max_bytes) {
        void* socket = zmq_socket(context_, kind);
        const int linger = 250;
        const int64_t limit = max_bytes * 4;
        zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &limit, sizeof limit);
        return socket;
    }
    void connect(void* socket, const std::string& endpoint) {
        if (zmq_connect(socket, endpoint.c_str()) != 0)
            throw std::runtime_error("can not connect to " + endpoint + ": " + zmq_strerror(zmq_errno()));
    }
    std::optional<std::string> frame() {
        zmq_msg_t part;
        zmq_msg_init(&part);
        std::optional<std::string> bytes;
        if (zmq_msg_recv(&part, sub_, ZMQ_DONTWAIT) >= 0)
            bytes.emplace(static_cast<char*>(zmq_msg_data(&part)), zmq_msg_size(&part));
        zmq_msg_close(&part);
        return bytes;
    }
    bool more() {
        int on = 0;
        size_t size = sizeof on;
        zmq_getsockopt(sub_, ZMQ_RCVMORE, &on, &size);
        return on != 0;
    }
    void answer(const json& ping) {
        const json token = ping.value("token", json()), sender = ping.value("sender", json());
        if (!token.is_string() || !sender.is_string()) return;
        if (sender != name_)
            post("PONG", {{"token", token}}, sender);
        else if (token == token_)
            echoed_ = true;
    }

    std::string name_;
    void* context_;
    void* pub_ = nullptr;
    void* sub_ = nullptr;
    std::map<std::string, uint64_t> sent_;  // topic -> number of the last message
    std::string token_;
    bool echoed_ = false;
};
