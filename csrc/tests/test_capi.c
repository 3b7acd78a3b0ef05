/* The C ABI as a C99 program uses it: a sample's way, another process, deaths; and the program that runs all C tests.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi_check.h"

const char* g_failed;
char g_place[512];

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
    CODE(busrl_ring_free(ring, held.slot, held.word), BUSRL_E_TRANSITION); /* a sample */
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

const capi_case capi_ordinary[] = {
    CASE(a_sample_passes_from_a_generator_to_a_judge),
    CASE(a_tensor_is_written_in_place_listed_and_checked_by_its_sum),
    CASE(handing_back_dropping_and_the_counts),
    CASE(detaching_hands_back_what_is_held),
    CASE(two_processes_hand_samples_over_and_wake_each_other),
    CASE(slots_of_a_killed_process_go_back_to_rest),
    CASE(a_handle_is_refused_in_a_forked_child_which_may_attach_again),
    CASE(threads_share_a_handle),
    {NULL, NULL},
};

/* Runs one list, each test on a ring of its own; how many failed, or -1 if there was no ring. */
static int run_all(const capi_case* cases, int* count) {
    int failed = 0;
    for (; cases->name != NULL; ++cases, ++*count) {
        world* w = world_make();
        if (w == NULL) return -1;
        g_failed = NULL;
        cases->body(w);
        printf("%s %s\n", g_failed ? "FAIL " : "ok   ", cases->name);
        if (g_failed) printf("      %s\n", g_failed);
        fflush(stdout);
        failed += g_failed != NULL;
        world_end(w);
    }
    return failed;
}

int main(void) {
    int count = 0;
    const int ordinary = run_all(capi_ordinary, &count);
    const int hostile = ordinary < 0 ? -1 : run_all(capi_hostile, &count);
    if (hostile < 0) return 2;
    printf("%d tests, %d failed\n", count, ordinary + hostile);
    return ordinary + hostile != 0;
}
