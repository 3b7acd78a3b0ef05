// The frozen records that the Python face hands out.
#pragma once

#include <map>

#include "handle.hpp"

namespace busrl::python {

struct Process {
    uint32_t index;
    uint32_t pid;
    uint32_t epoch;
    bool ready;
    std::string role;
    std::string label;
    std::string activity;
    uint64_t progress;
    uint64_t progress_ns;
    uint64_t activity_ns;
    double deadline_s;
    uint64_t busy_ns;
    uint64_t idle_ns;
    uint64_t tokens;
    uint64_t samples;
    uint64_t started_ns;
    uint64_t version;
    bool remote;    // it does not map the ring: the keeper speaks for it
    uint64_t life;  // of a remote one, which start of that name this is
};

struct Stats {
    std::map<std::string, uint64_t> occupancy;    // slots by state, now
    std::map<std::string, uint64_t> transitions;  // entries into each state, ever
    std::map<std::string, uint64_t> drops;        // by reason
    uint64_t claims, commits, reaps, dropped, finished, dispatched, tokens;
};

std::vector<Process> processes(const Handle& ring);
Stats stats(Handle& ring);
std::shared_ptr<Fates> fates_of(const py::object& face);

}  // namespace busrl::python
