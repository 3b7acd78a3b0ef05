// The C++ side of the C tests: the ring that they attach to.
#include "capi_world.h"

#include "harness.hpp"

struct world {
    test::World inner;
    std::string ring = inner.place.path("ring");
    std::string fates = inner.place.path("fates");
};

extern "C" {

world* world_make(void) {
    try {
        return new world;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "no ring for the test: %s\n", e.what());
    } catch (const test::Failure& f) {
        std::fprintf(stderr, "no ring for the test: %s\n", f.text.c_str());
    }
    return nullptr;
}

void world_end(world* w) {
    delete w;
}

const char* world_ring(const world* w) {
    return w->ring.c_str();
}

const char* world_fates(const world* w) {
    return w->fates.c_str();
}

int world_dispatch(world* w, uint64_t uid) {
    return w->inner.dispatch(uid).has_value();
}

int world_fate(world* w, uint64_t uid) {
    return w->inner.fates.train->get(uid);
}

void world_scribble(world* w, uint64_t offset, const void* data, uint64_t bytes) {
    std::memcpy(reinterpret_cast<uint8_t*>(&w->inner.seg->header()) + offset, data, bytes);
}

void world_scribble_tensor(world* w, uint32_t slot, uint64_t offset, const void* data, uint64_t bytes) {
    std::memcpy(reinterpret_cast<uint8_t*>(&w->inner.seg->table(slot).entry[0]) + offset, data, bytes);
}

void world_scribble_word(world* w, uint32_t slot, uint64_t word) {
    w->inner.seg->line(slot).word.store(word);
}
}
