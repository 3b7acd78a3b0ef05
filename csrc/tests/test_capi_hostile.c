/* The C ABI against wrong use and hostile bytes: each is a code with a text, and costs nobody else anything. */
#include <stdlib.h>

#include "capi_check.h"

/* -- wrong use --------------------------------------------------------------------------------------------------------
 */

static void attaching_says_what_is_wrong(world* w) {
    busrl_ring* ring = (busrl_ring*)w;
    CODE(busrl_ring_attach(BUSRL_RING_ABI + 1, world_ring(w), 0, &ring), BUSRL_E_ABI);
    CHECK(ring == NULL && strstr(busrl_ring_error(NULL, NULL), "ABI 2") != NULL && busrl_ring_abi() == BUSRL_RING_ABI);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, "/dev/shm/busrl.no.such.ring", 0, &ring), BUSRL_E_MISSING);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, world_fates(w), 0, &ring), BUSRL_E_CORRUPT);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, "/dev/null", 0, &ring), BUSRL_E_CORRUPT);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 64, &ring), BUSRL_E_INVALID);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, NULL, 0, &ring), BUSRL_E_INVALID);
    CODE(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 0, NULL), BUSRL_E_INVALID);
    OK(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), BUSRL_ATTACH_READ_ONLY, &ring));
    busrl_info info;
    info.size = sizeof info;
    OK(busrl_ring_info(ring, &info));
    CHECK(info.abi == 1 && info.n_slots == 8 && info.slot_bytes == 4096 && info.read_only == 1 && info.index == 0);
    CHECK(info.uuid[0] == 1 && info.uuid[2] == 3 && info.n_processes == 8 && info.layout_major == 3);
    CODE(busrl_ring_register(ring, "test", "monitor", NULL), BUSRL_E_READ_ONLY);
    CODE(busrl_ring_reap(ring, NULL, 0, NULL), BUSRL_E_READ_ONLY);
    CODE(busrl_ring_bind_fates(ring, "/dev/shm/busrl.no.such.file", NULL), BUSRL_E_NO_FILE);
    OK(busrl_ring_detach(ring));
}

static void only_the_owner_may_write_and_only_along_the_arrows(world* w) {
    busrl_ring *owner = join(w, "owner"), *other = join(w, "other"), *nobody = NULL;
    OK(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 0, &nobody));
    CHECK(world_dispatch(w, 1));
    const uint64_t queued = line_of(owner, 0).word;
    uint64_t mine = 9;
    CODE(busrl_ring_claim(nobody, 0, queued, BUSRL_GENERATING, &mine), BUSRL_E_NOT_REGISTERED);
    CODE(busrl_ring_claim(owner, 0, queued, BUSRL_TRAINING, &mine), BUSRL_E_TRANSITION);
    CODE(busrl_ring_claim(owner, 0, queued, BUSRL_DROPPED, &mine), BUSRL_E_TRANSITION);
    CODE(busrl_ring_claim(owner, 0, queued, 99, &mine), BUSRL_E_INVALID);
    CODE(busrl_ring_claim(owner, 8, queued, BUSRL_GENERATING, &mine), BUSRL_E_INVALID);
    CODE(busrl_ring_claim(owner, 1, line_of(owner, 1).word, BUSRL_RESERVED, &mine), BUSRL_E_TRANSITION);
    CODE(busrl_ring_claim(owner, 0, queued + 1, BUSRL_GENERATING, &mine), BUSRL_AGAIN);
    CHECK(mine == 0);
    OK(busrl_ring_claim(owner, 0, queued, BUSRL_GENERATING, &mine));
    const int32_t data[4] = {1, 2, 3, 4};
    busrl_tensor t = ints(data, 4);
    busrl_line line = line_of(owner, 0);
    CODE(busrl_ring_put(other, 0, mine, "tokens", 0, &t), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_put(owner, 0, queued, "tokens", 0, &t), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_alloc(other, 0, mine, "tokens", 0, &t), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_set(other, 0, mine, &line, BUSRL_SET_REWARD), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_set(owner, 0, mine, &line, 1), BUSRL_E_INVALID);
    CODE(busrl_ring_set(owner, 0, mine, &line, 1u << 31), BUSRL_E_INVALID);
    CODE(busrl_ring_commit(other, 0, mine, 1, NULL), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_release(other, 0, mine, BUSRL_QUEUED, NULL), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_release(owner, 0, mine, BUSRL_REWARDED, NULL), BUSRL_E_TRANSITION);
    CODE(busrl_ring_drop(other, 0, mine, 'M'), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_commit(owner, 0, queued, 1, NULL), BUSRL_AGAIN);
    CODE(busrl_ring_drop(nobody, 0, mine, 'M'), BUSRL_E_NOT_OWNER);
    OK(busrl_ring_commit(owner, 0, mine, 0, NULL));
    CODE(busrl_ring_drop(nobody, 0, line_of(owner, 0).word, 'M'), BUSRL_E_FATES);
    OK(busrl_ring_detach(other));
    OK(busrl_ring_detach(nobody));
    OK(busrl_ring_detach(owner));
}

static void bad_tensors_are_refused_with_their_sizes(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 1));
    const busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    int32_t* big = calloc(4096, 4);
    busrl_tensor t = ints(big, 4096);
    CODE(busrl_ring_put(ring, held.slot, held.word, "big", 0, &t), BUSRL_E_SLOT_TOO_SMALL);
    uint64_t needed = 0, available = 0;
    busrl_ring_error(&needed, &available);
    CHECK(needed == 16384 && available > 3000 && available < 4096);
    t.ndim = 4;
    t.shape[0] = t.shape[1] = t.shape[2] = t.shape[3] = (uint64_t)1 << 61;
    CODE(busrl_ring_put(ring, held.slot, held.word, "huge", 0, &t), BUSRL_E_SLOT_TOO_SMALL);
    t = ints(big, 4);
    t.ndim = 5;
    CODE(busrl_ring_put(ring, held.slot, held.word, "x", 0, &t), BUSRL_E_INVALID);
    t = ints(big, 4);
    t.bits = 24;
    CODE(busrl_ring_put(ring, held.slot, held.word, "x", 0, &t), BUSRL_E_INVALID);
    t = ints(NULL, 4);
    CODE(busrl_ring_put(ring, held.slot, held.word, "x", 0, &t), BUSRL_E_INVALID);
    t = ints(big, 4);
    CODE(busrl_ring_put(ring, held.slot, held.word, "a name of more than thirty-two bytes", 0, &t), BUSRL_E_INVALID);
    CODE(busrl_ring_put(ring, held.slot, held.word, "", 0, &t), BUSRL_E_INVALID);
    CODE(busrl_ring_put(ring, held.slot, held.word, NULL, 0, &t), BUSRL_E_INVALID);
    CODE(busrl_ring_put(ring, held.slot, held.word, "x", 256, &t), BUSRL_E_INVALID);
    t.size = 8;
    CODE(busrl_ring_put(ring, held.slot, held.word, "x", 0, &t), BUSRL_E_INVALID);
    t = ints(NULL, 0);
    OK(busrl_ring_put(ring, held.slot, held.word, "empty", 0, &t));
    t = lookup();
    CODE(busrl_ring_tensor(ring, held.slot, "x", 0, &t), BUSRL_E_NO_TENSOR);
    CODE(busrl_ring_tensor(ring, held.slot, "x", 999, &t), BUSRL_E_NO_TENSOR);
    CODE(busrl_ring_tensor(ring, 8, "x", 0, &t), BUSRL_E_INVALID);
    CODE(busrl_ring_tensor_at(ring, held.slot, BUSRL_MAX_TENSORS, &t), BUSRL_E_INVALID);
    free(big);
    OK(busrl_ring_detach(ring));
}

static void null_pointers_are_errors(world* w) {
    busrl_ring* ring = join(w, "worker");
    uint32_t count;
    CODE(busrl_ring_info(NULL, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_info(ring, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_bind_fates(NULL, NULL, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_register(NULL, "a", "b", NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_register(ring, NULL, "b", NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_register(ring, "a role of many bytes", "b", NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_register(ring, "again", "again", NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_ready(NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_progress(NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_activity(ring, NULL, 0), BUSRL_E_INVALID);
    CODE(busrl_ring_add(NULL, 0, 0, 0, 0), BUSRL_E_INVALID);
    CODE(busrl_ring_take(NULL, 2, 3, -1, 1, NULL, 0, &count), BUSRL_E_INVALID);
    CODE(busrl_ring_take(ring, 2, 3, -1, 1, NULL, 4, &count), BUSRL_E_INVALID);
    CODE(busrl_ring_take(ring, 2, 3, -1, 1, NULL, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_take(ring, 2, 3, -2, 1, NULL, 0, &count), BUSRL_E_INVALID);
    CODE(busrl_ring_take(ring, 77, 3, -1, 1, NULL, 0, &count), BUSRL_E_INVALID);
    CODE(busrl_ring_claim(ring, 0, 1, 3, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_mark_alone(ring, 0, line_of(ring, 0).word), BUSRL_E_INVALID);
    CODE(busrl_ring_line(ring, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_set(ring, 0, 0, NULL, 0), BUSRL_E_INVALID);
    CODE(busrl_ring_tensor(ring, 0, NULL, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_tensor(NULL, 0, "x", 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_put(ring, 0, 0, "x", 0, NULL), BUSRL_E_NOT_OWNER);
    CODE(busrl_ring_alloc(NULL, 0, 0, "x", 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_commit(NULL, 0, 0, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_release(NULL, 0, 0, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_drop(NULL, 0, 0, 'M'), BUSRL_E_INVALID);
    CODE(busrl_ring_free(NULL, 0, 0), BUSRL_E_INVALID);
    CODE(busrl_ring_wait(NULL, 0, 0, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_wait(ring, 9, 0, 0, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_reap(ring, NULL, 5, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_stats(ring, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_header(ring, NULL, NULL), BUSRL_E_INVALID);
    CODE(busrl_ring_header(ring, "step", NULL), BUSRL_E_INVALID);
    OK(busrl_ring_detach(ring));
}

struct newer_line { /* what a program built with a later header may pass */
    busrl_line line;
    uint64_t later[4];
};

static void structs_of_other_sizes_are_told_apart(world* w) {
    busrl_ring* ring = join(w, "worker");
    struct newer_line newer;
    memset(&newer, 0x55, sizeof newer);
    newer.line.size = sizeof newer;
    OK(busrl_ring_line(ring, 0, &newer.line));
    CHECK(newer.line.size == sizeof(busrl_line) && newer.later[0] == 0x5555555555555555u);
    busrl_line line;
    line.size = 40;
    CODE(busrl_ring_line(ring, 0, &line), BUSRL_E_INVALID);
    CHECK(strstr(busrl_ring_error(NULL, NULL), "sizeof") != NULL);
    struct {
        busrl_tensor tensor;
        uint64_t later;
    } bigger;
    CHECK(world_dispatch(w, 1));
    bigger.tensor.size = sizeof bigger;
    bigger.later = 7;
    OK(busrl_ring_tensor(ring, 0, "task", BUSRL_NO_SEGMENT, &bigger.tensor));
    CHECK(bigger.tensor.size == sizeof(busrl_tensor) && bigger.later == 7 && bigger.tensor.nbytes == 6);
    OK(busrl_ring_detach(ring));
}

/* -- hostile bytes
 * ------------------------------------------------------------------------------------------------------ */

static void hostile_descriptors_cost_only_their_slot(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 1) && world_dispatch(w, 2));
    uint32_t random = 12345;
    for (int round = 0; round < 4000; ++round) { /* the name stays, so that the lookup gets as far as the bytes */
        uint8_t bytes[96];
        for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = (uint8_t)((random = random * 1664525 + 1013904223) >> 24);
        if (round & 1) bytes[0] = 255;                      /* the segment that is looked for */
        if (round & 2) bytes[1] = BUSRL_UINT, bytes[2] = 8; /* a type that exists */
        bytes[88] |= 1;                                     /* valid */
        world_scribble_tensor(w, 0, 32 + (uint64_t)(round % 5 ? 0 : round % 88), bytes, round % 5 ? 96 : 8);
        busrl_tensor t = lookup();
        int code = busrl_ring_tensor(ring, 0, "task", BUSRL_NO_SEGMENT, &t);
        CHECK(code == BUSRL_OK || code == BUSRL_E_BAD_TENSOR || code == BUSRL_E_NO_TENSOR);
        if (code == BUSRL_OK) CHECK(t.nbytes <= 4096 && ((uint8_t*)t.data)[t.nbytes ? t.nbytes - 1 : 0] < 256);
        code = busrl_ring_tensor_at(ring, 0, 0, &t);
        CHECK(code == BUSRL_OK || code == BUSRL_E_BAD_TENSOR || code == BUSRL_AGAIN);
    }
    busrl_tensor t = lookup();
    OK(busrl_ring_tensor(ring, 1, "task", BUSRL_NO_SEGMENT, &t));
    const busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    const int32_t data[2] = {1, 2};
    t = ints(data, 2);
    CHECK(busrl_ring_put(ring, held.slot, held.word, "task", BUSRL_NO_SEGMENT, &t) <= 0);
    OK(busrl_ring_detach(ring));
}

static void hostile_words_are_shown_and_never_followed(world* w) {
    busrl_ring* ring = join(w, "worker");
    uint64_t random = 1;
    for (int round = 0; round < 4000; ++round) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        world_scribble_word(w, 3, random);
        const busrl_line line = line_of(ring, 3);
        CHECK(line.word == random && line.state == random >> 58);
        uint64_t mine;
        CHECK(busrl_ring_claim(ring, 3, random, (uint32_t)(random >> 20) % 9, &mine) <= 1);
        CHECK(busrl_ring_release(ring, 3, random, (uint32_t)(random >> 24) % 9, NULL) <= 1);
        CHECK(busrl_ring_commit(ring, 3, random, 1, NULL) <= 1);
        CHECK(busrl_ring_drop(ring, 3, random, 'M') <= 1);
        busrl_stats stats;
        stats.size = sizeof stats;
        OK(busrl_ring_stats(ring, &stats));
        if (round % 100 == 0) CHECK(busrl_ring_reap(ring, NULL, 0, NULL) <= 0);
    }
    world_scribble_word(w, 3, 0);
    OK(busrl_ring_detach(ring));
}

static void a_hostile_header_is_not_attached(world* w) {
    for (uint64_t byte = 0; byte < 0x80; ++byte) {
        busrl_ring* ring = NULL;
        uint8_t evil[1] = {0x5A};
        static uint8_t good[0x80];
        if (byte == 0) {
            FILE* file = fopen(world_ring(w), "rb");
            CHECK(file != NULL && fread(good, 1, sizeof good, file) == sizeof good);
            if (file != NULL) fclose(file);
        }
        if (good[byte] == evil[0]) continue;
        world_scribble(w, byte, evil, 1);
        CHECK(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 0, &ring) < 0 && ring == NULL);
        world_scribble(w, byte, good + byte, 1);
    }
    busrl_ring* ring = join(w, "whole again");
    OK(busrl_ring_detach(ring));
}

const capi_case capi_hostile[] = {
    CASE(attaching_says_what_is_wrong),
    CASE(only_the_owner_may_write_and_only_along_the_arrows),
    CASE(bad_tensors_are_refused_with_their_sizes),
    CASE(null_pointers_are_errors),
    CASE(structs_of_other_sizes_are_told_apart),
    CASE(hostile_descriptors_cost_only_their_slot),
    CASE(hostile_words_are_shown_and_never_followed),
    CASE(a_hostile_header_is_not_attached),
    {NULL, NULL},
};
