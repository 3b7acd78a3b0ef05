/* The C ABI as a C99 program uses it: a sample's way, another process, deaths, wrong use, hostile bytes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "busrl_ring.h"
#include "capi_world.h"

static const char* g_failed; /* the first check of a test that did not hold */
static char g_place[512];

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

static busrl_ring* join(world* w, const char* label) {
    busrl_ring* ring = NULL;
    OK(busrl_ring_attach(BUSRL_RING_ABI, world_ring(w), 0, &ring));
    OK(busrl_ring_bind_fates(ring, world_fates(w), NULL));
    OK(busrl_ring_register(ring, "test", label, NULL));
    return ring;
}

static busrl_held take_one(busrl_ring* ring, uint32_t from, uint32_t to) {
    busrl_held held = {0, 0, 0};
    uint32_t count = 0;
    OK(busrl_ring_take(ring, from, to, BUSRL_ANY_CLASS, 255, &held, 1, &count));
    CHECK(count == 1);
    return held;
}

static busrl_tensor ints(const int32_t* data, uint64_t count) {
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

static busrl_tensor lookup(void) {
    busrl_tensor t;
    memset(&t, 0xEE, sizeof t);
    t.size = sizeof t;
    return t;
}

static busrl_line line_of(busrl_ring* ring, uint32_t slot) {
    busrl_line line;
    memset(&line, 0, sizeof line);
    line.size = sizeof line;
    OK(busrl_ring_line(ring, slot, &line));
    return line;
}

static void generate(busrl_ring* ring, busrl_held held, int32_t first) {
    int32_t tokens[16];
    for (int i = 0; i < 16; ++i) tokens[i] = first + i;
    busrl_tensor t = ints(tokens, 16);
    OK(busrl_ring_put(ring, held.slot, held.word, "tokens", 0, &t));
    OK(busrl_ring_commit(ring, held.slot, held.word, 1, NULL));
}

/* -- the way of a sample ------------------------------------------------------------------------------------------ */

static void a_sample_passes_from_a_generator_to_a_judge(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 5));
    busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    busrl_tensor task = lookup();
    OK(busrl_ring_tensor(ring, held.slot, "task", BUSRL_NO_SEGMENT, &task));
    CHECK(task.nbytes == 6 && memcmp(task.data, "prompt", 6) == 0 && strcmp(task.name, "task") == 0);
    CHECK(task.dtype == BUSRL_UINT && task.bits == 8 && task.ndim == 1 && task.shape[0] == 6);
    generate(ring, held, 100);

    held = take_one(ring, BUSRL_GENERATED, BUSRL_REWARDING);
    busrl_tensor tokens = lookup();
    OK(busrl_ring_tensor(ring, held.slot, "tokens", 0, &tokens));
    CHECK(tokens.nbytes == 64 && ((int32_t*)tokens.data)[15] == 115 && tokens.segment == 0);
    busrl_line reward;
    memset(&reward, 0, sizeof reward);
    reward.size = sizeof reward;
    reward.reward = 0.75;
    reward.reward_parts = 1;
    OK(busrl_ring_set(ring, held.slot, held.word, &reward, BUSRL_SET_REWARD | BUSRL_SET_REWARD_PARTS));
    uint64_t next = 0;
    OK(busrl_ring_release(ring, held.slot, held.word, BUSRL_REWARDED, &next));
    const busrl_line line = line_of(ring, held.slot);
    CHECK(line.word == next && line.state == BUSRL_REWARDED && line.segs == 1 && line.owner == 0 && line.uid == 5);
    CHECK(line.seq == (line.word & (((uint64_t)1 << 36) - 1)) && line.seq > 2);
    CHECK(line.reward == 0.75 && line.reward_parts == 1 && line.size == sizeof line);
    OK(busrl_ring_detach(ring));
}

static void a_tensor_is_written_in_place_listed_and_checked_by_its_sum(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 1));
    const busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    busrl_tensor room = ints(NULL, 12);
    room.ndim = 2;
    room.shape[0] = 3;
    room.shape[1] = 4;
    OK(busrl_ring_alloc(ring, held.slot, held.word, "grid", BUSRL_NO_SEGMENT, &room));
    CHECK(room.nbytes == 48 && room.data != NULL);
    memset(room.data, 7, 48);
    const int32_t five[5] = {1, 2, 3, 4, 5};
    busrl_tensor sum = ints(five, 5);
    sum.flags = BUSRL_CHECKSUM;
    OK(busrl_ring_put(ring, held.slot, held.word, "summed", 0, &sum));
    int found = 0;
    for (uint32_t place = 0; place < BUSRL_MAX_TENSORS; ++place) {
        busrl_tensor t = lookup();
        const int code = busrl_ring_tensor_at(ring, held.slot, place, &t);
        CHECK(code == BUSRL_OK || code == BUSRL_AGAIN);
        if (code != BUSRL_OK) continue;
        found += !strcmp(t.name, "task") || !strcmp(t.name, "grid") || !strcmp(t.name, "summed");
        if (!strcmp(t.name, "summed")) CHECK(t.flags == BUSRL_CHECKSUM);
    }
    CHECK(found == 3);
    busrl_tensor back = lookup();
    OK(busrl_ring_tensor(ring, held.slot, "summed", 0, &back));
    ((uint8_t*)back.data)[2] ^= 1;
    CODE(busrl_ring_tensor(ring, held.slot, "summed", 0, &back), BUSRL_E_BAD_TENSOR);
    CHECK(strstr(busrl_ring_error(NULL, NULL), "checksum") != NULL);
    OK(busrl_ring_detach(ring));
}

static void handing_back_dropping_and_the_counts(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 1) && world_dispatch(w, 2));
    busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    OK(busrl_ring_mark_alone(ring, held.slot, held.word));
    CHECK(line_of(ring, held.slot).alone_deaths == 1);
    OK(busrl_ring_release(ring, held.slot, held.word, BUSRL_QUEUED, NULL));
    CODE(busrl_ring_release(ring, held.slot, held.word, BUSRL_QUEUED, NULL), BUSRL_AGAIN);
    held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    CODE(busrl_ring_drop(ring, held.slot, held.word, 'T'), BUSRL_E_INVALID);
    CODE(busrl_ring_drop(ring, held.slot, held.word, 0), BUSRL_E_INVALID);
    OK(busrl_ring_drop(ring, held.slot, held.word, 'M'));
    CODE(busrl_ring_drop(ring, held.slot, held.word, 'M'), BUSRL_AGAIN);
    CHECK(world_fate(w, 1) == 'M');
    OK(busrl_ring_ready(ring));
    OK(busrl_ring_activity(ring, "judging", 3.0));
    OK(busrl_ring_progress(ring));
    OK(busrl_ring_add(ring, 10, 20, 30, 40));
    busrl_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    OK(busrl_ring_stats(ring, &stats));
    CHECK(stats.states == BUSRL_STATES && stats.occupancy[BUSRL_FREE] == 7 && stats.occupancy[BUSRL_QUEUED] == 1);
    CHECK(stats.claims == 2 && stats.dropped == 1 && stats.drops['M' - 64] == 1 && stats.tokens == 30);
    uint64_t value = 9;
    OK(busrl_ring_header(ring, "run_state", &value));
    CHECK(value == 0);
    CODE(busrl_ring_header(ring, "no such word", &value), BUSRL_E_INVALID);
    OK(busrl_ring_detach(ring));
}

static void detaching_hands_back_what_is_held(world* w) {
    busrl_ring* ring = join(w, "worker");
    CHECK(world_dispatch(w, 1));
    const busrl_held held = take_one(ring, BUSRL_QUEUED, BUSRL_GENERATING);
    OK(busrl_ring_detach(ring));
    ring = join(w, "other");
    CHECK(line_of(ring, held.slot).state == BUSRL_QUEUED && line_of(ring, held.slot).attempt == 0);
    OK(busrl_ring_detach(ring));
    OK(busrl_ring_detach(NULL));
}

/* -- other processes and threads ------------------------------------------------------------------------------------
 */

/* Runs `body` in a process of its own, which attaches by name like a stranger. */
static pid_t spawn(world* w, void (*body)(world*)) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid != 0) return pid;
    g_failed = NULL;
    body(w);
    if (g_failed != NULL) fprintf(stderr, "in the child: %s\n", g_failed);
    _exit(g_failed != NULL);
}

static int status_of(pid_t pid) {
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

static void generate_all(world* w) {
    busrl_ring* ring = join(w, "generator");
    uint64_t seen = 0;
    for (int done = 0; done < 6;) {
        busrl_held held[4];
        uint32_t count = 0;
        OK(busrl_ring_take(ring, BUSRL_QUEUED, BUSRL_GENERATING, BUSRL_ANY_CLASS, 1, held, 4, &count));
        for (uint32_t i = 0; i < count; ++i) generate(ring, held[i], (int32_t)line_of(ring, held[i].slot).uid * 1000);
        done += (int)count;
        if (count == 0 && busrl_ring_wait(ring, BUSRL_QUEUED, seen, SECOND, &seen) < 0) break;
    }
    OK(busrl_ring_detach(ring));
}

static void two_processes_hand_samples_over_and_wake_each_other(world* w) {
    busrl_ring* ring = join(w, "judge");
    const pid_t pid = spawn(w, generate_all);
    for (uint64_t uid = 0; uid < 6; ++uid) CHECK(world_dispatch(w, uid));
    uint64_t seen = 0;
    int judged = 0;
    for (int waits = 0; judged < 6 && waits < 1200 && g_failed == NULL; ++waits) {
        busrl_held held[4];
        uint32_t count = 0;
        OK(busrl_ring_take(ring, BUSRL_GENERATED, BUSRL_REWARDING, BUSRL_ANY_CLASS, 1, held, 4, &count));
        for (uint32_t i = 0; i < count; ++i) {
            busrl_tensor tokens = lookup();
            OK(busrl_ring_tensor(ring, held[i].slot, "tokens", 0, &tokens));
            CHECK(((int32_t*)tokens.data)[15] == (int32_t)line_of(ring, held[i].slot).uid * 1000 + 15);
            OK(busrl_ring_release(ring, held[i].slot, held[i].word, BUSRL_REWARDED, NULL));
        }
        judged += (int)count;
        CHECK(busrl_ring_wait(ring, BUSRL_GENERATED, seen, SECOND / 20, &seen) >= 0);
    }
    CHECK(judged == 6 && status_of(pid) == 0);
    uint64_t now = 0;
    OK(busrl_ring_wait(ring, BUSRL_GENERATED, 0, 0, &now));
    CHECK(now == 6);
    CODE(busrl_ring_wait(ring, BUSRL_GENERATED, now, SECOND / 1000, NULL), BUSRL_AGAIN);
    OK(busrl_ring_detach(ring));
}

static void take_and_die(world* w) {
    busrl_ring* ring = join(w, "victim");
    busrl_held held[8];
    uint32_t count = 0;
    OK(busrl_ring_take(ring, BUSRL_QUEUED, BUSRL_GENERATING, BUSRL_ANY_CLASS, 1, held, 2, &count));
    CHECK(count == 2);
    if (g_failed == NULL) kill(getpid(), SIGKILL);
}

static void slots_of_a_killed_process_go_back_to_rest(world* w) {
    busrl_ring* ring = join(w, "reaper");
    CHECK(world_dispatch(w, 1) && world_dispatch(w, 2));
    const pid_t pid = spawn(w, take_and_die);
    const int status = status_of(pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    busrl_reaped reaped[1];
    uint32_t count = 0;
    OK(busrl_ring_reap(ring, reaped, 1, &count));
    CHECK(count == 2 && reaped[0].from == BUSRL_GENERATING && reaped[0].to == BUSRL_QUEUED);
    CHECK(reaped[0].pid == (uint32_t)pid && strcmp(reaped[0].label, "victim") == 0);
    OK(busrl_ring_reap(ring, NULL, 0, &count));
    CHECK(count == 0 && line_of(ring, reaped[0].slot).attempt == 1);
    OK(busrl_ring_detach(ring));
}

static busrl_ring* g_inherited;

static void use_an_inherited_handle(world* w) {
    busrl_line line;
    line.size = sizeof line;
    CODE(busrl_ring_line(g_inherited, 0, &line), BUSRL_E_CLOSED);
    CODE(busrl_ring_progress(g_inherited), BUSRL_E_CLOSED);
    OK(busrl_ring_detach(g_inherited));
    busrl_ring* ring = join(w, "child");
    CHECK(line_of(ring, 0).state == BUSRL_QUEUED);
    OK(busrl_ring_detach(ring));
}

static void a_handle_is_refused_in_a_forked_child_which_may_attach_again(world* w) {
    g_inherited = join(w, "parent");
    CHECK(world_dispatch(w, 1));
    CHECK(status_of(spawn(w, use_an_inherited_handle)) == 0);
    OK(busrl_ring_progress(g_inherited));
    OK(busrl_ring_detach(g_inherited));
}

struct turn {
    busrl_ring* ring;
    uint32_t from, to, back;
    int done;
};

static void* pass_slots_on(void* argument) {
    struct turn* turn = argument;
    for (int round = 0; round < 300; ++round) {
        busrl_held held[4];
        uint32_t count = 0;
        if (busrl_ring_take(turn->ring, turn->from, turn->to, BUSRL_ANY_CLASS, 255, held, 4, &count) < 0) return NULL;
        for (uint32_t i = 0; i < count; ++i)
            if (busrl_ring_release(turn->ring, held[i].slot, held[i].word, turn->back, NULL) != BUSRL_OK) return NULL;
        if (busrl_ring_wait(turn->ring, turn->from, 0, 0, NULL) < 0 || busrl_ring_progress(turn->ring) < 0) return NULL;
        /* An error of one thread leaves the text of the others alone. */
        if (busrl_ring_claim(turn->ring, 0, 0, turn->to, NULL) != BUSRL_E_INVALID) return NULL;
    }
    turn->done = 1;
    return NULL;
}

static void threads_share_a_handle(world* w) {
    busrl_ring* ring = join(w, "threads");
    for (uint64_t uid = 0; uid < 8; ++uid) CHECK(world_dispatch(w, uid));
    struct turn turns[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; ++i) {
        const struct turn turn = {ring, BUSRL_QUEUED, BUSRL_GENERATING, BUSRL_QUEUED, 0};
        turns[i] = turn;
        CHECK(pthread_create(&threads[i], NULL, pass_slots_on, &turns[i]) == 0);
    }
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    CHECK(turns[0].done && turns[1].done && turns[2].done);
    busrl_stats stats;
    stats.size = sizeof stats;
    OK(busrl_ring_stats(ring, &stats));
    CHECK(stats.occupancy[BUSRL_QUEUED] == 8 && stats.claims == stats.commits);
    OK(busrl_ring_detach(ring));
}

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
    CHECK(info.uuid[0] == 1 && info.uuid[2] == 3 && info.n_processes == 8 && info.layout_major == 2);
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

int main(void) {
    const struct {
        const char* name;
        void (*body)(world*);
    } cases[] = {
#define CASE(name) {#name, name}
        CASE(a_sample_passes_from_a_generator_to_a_judge),
        CASE(a_tensor_is_written_in_place_listed_and_checked_by_its_sum),
        CASE(handing_back_dropping_and_the_counts),
        CASE(detaching_hands_back_what_is_held),
        CASE(two_processes_hand_samples_over_and_wake_each_other),
        CASE(slots_of_a_killed_process_go_back_to_rest),
        CASE(a_handle_is_refused_in_a_forked_child_which_may_attach_again),
        CASE(threads_share_a_handle),
        CASE(attaching_says_what_is_wrong),
        CASE(only_the_owner_may_write_and_only_along_the_arrows),
        CASE(bad_tensors_are_refused_with_their_sizes),
        CASE(null_pointers_are_errors),
        CASE(structs_of_other_sizes_are_told_apart),
        CASE(hostile_descriptors_cost_only_their_slot),
        CASE(hostile_words_are_shown_and_never_followed),
        CASE(a_hostile_header_is_not_attached),
    };
    const size_t count = sizeof cases / sizeof cases[0];
    int failed = 0;
    for (size_t i = 0; i < count; ++i) {
        world* w = world_make();
        if (w == NULL) return 2;
        g_failed = NULL;
        cases[i].body(w);
        printf("%s %s\n", g_failed ? "FAIL " : "ok   ", cases[i].name);
        if (g_failed) printf("      %s\n", g_failed);
        fflush(stdout);
        failed += g_failed != NULL;
        world_end(w);
    }
    printf("%zu tests, %d failed\n", count, failed);
    return failed != 0;
}
