/* What the files of the C tests share: checks that remember the first failure, and the few calls that every test makes.
 */
#ifndef BUSRL_CAPI_CHECK_H
#define BUSRL_CAPI_CHECK_H

#include <stdio.h>
#include <string.h>

#include "busrl_ring.h"
#include "capi_world.h"

typedef struct {
    const char* name;
    void (*body)(world*);
} capi_case;

#define CASE(name) {#name, name}

/* Lists of cases, each ended by one without a name. */
extern const capi_case capi_ordinary[]; /* test_capi.c */
extern const capi_case capi_hostile[];  /* test_capi_hostile.c */

extern const char* g_failed; /* the first check of a test that did not hold */
extern char g_place[512];

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition) && g_failed == NULL) {                                                             \
            snprintf(g_place, sizeof g_place, "%s:%d: %s (last error: %s)", __FILE__, __LINE__, #condition, \
                     busrl_ring_error(NULL, NULL));                                                         \
            g_failed = g_place;                                                                             \
        }                                                                                                   \
    } while (0)
#define CODE(call, code)                                                                                              \
    do {                                                                                                              \
        const int got = (call);                                                                                       \
        if (got != (code) && g_failed == NULL) {                                                                      \
            snprintf(g_place, sizeof g_place, "%s:%d: %s gave %d, not %s: %s", __FILE__, __LINE__, #call, got, #code, \
                     busrl_ring_error(NULL, NULL));                                                                   \
            g_failed = g_place;                                                                                       \
        }                                                                                                             \
    } while (0)
#define OK(call) CODE(call, BUSRL_OK)

#define SECOND ((uint64_t)1000000000)

static inline busrl_ring* join(world* w, const char* label) {
    busrl_ring* ring = NULL;
    OK(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 0, &ring));
    OK(busrl_ring_bind_fates(ring, world_fates(w), NULL));
    OK(busrl_ring_register(ring, "test", label, NULL));
    return ring;
}

static inline busrl_held take_one(busrl_ring* ring, uint32_t from, uint32_t to) {
    busrl_held held = {0, 0, 0};
    uint32_t count = 0;
    OK(busrl_ring_take(ring, from, to, BUSRL_ANY_CLASS, 255, &held, 1, &count));
    CHECK(count == 1);
    return held;
}

static inline busrl_tensor ints(const int32_t* data, uint64_t count) {
    busrl_tensor t;
    memset(&t, 0, sizeof t);
    t.size = sizeof t;
    t.dtype = BUSRL_INT;
    t.bits = 32;
    t.ndim = 1;
    t.shape[0] = count;
    t.data = (void*)data;
    return t;
}

static inline busrl_tensor lookup(void) {
    busrl_tensor t;
    memset(&t, 0xEE, sizeof t);
    t.size = sizeof t;
    return t;
}

static inline busrl_line line_of(busrl_ring* ring, uint32_t slot) {
    busrl_line line;
    memset(&line, 0, sizeof line);
    line.size = sizeof line;
    OK(busrl_ring_line(ring, slot, &line));
    return line;
}

static inline void generate(busrl_ring* ring, busrl_held held, int32_t first) {
    int32_t tokens[16];
    for (int i = 0; i < 16; ++i) tokens[i] = first + i;
    busrl_tensor t = ints(tokens, 16);
    OK(busrl_ring_put(ring, held.slot, held.word, "tokens", 0, &t));
    OK(busrl_ring_commit(ring, held.slot, held.word, 1, NULL));
}

#endif
