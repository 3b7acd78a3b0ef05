/*
 * busrl_ring.h: the slot ring of a busrl run from C, or from any language that can call C. ABI version 1.
 *
 * The ring is one shared-memory file. A slot of it holds one sample: a control word (state, owner), a control line
 * (what the sample is) and named tensors. A worker attaches, registers, takes slots of the state that it consumes,
 * reads and writes their tensors, and commits or releases them into the next state. docs/c-abi.md leads through one.
 *
 * Rules that hold for every call:
 *   - It returns a code of `enum busrl_code`: 0 done, 1 nothing done (look again), negative an error. It never throws,
 *     never ends the process, and trusts no byte of the shared memory. After an error busrl_ring_error() has the text.
 *   - `word` is the control word that the claim returned. It is the key to a slot: a call with another word changes
 *     nothing. Once a slot is committed, released or dropped, the word is spent and its tensors are not yours any more.
 *   - Pointers to tensors point into the slot. They are valid until busrl_ring_detach, and settled only while the slot
 *     is held by you.
 *   - Structs begin with `size`: set it to sizeof(the struct) before every call. The library fills or reads no more
 *     than that, so that an older program works with a newer library; afterwards `size` is what was filled.
 *   - Several threads may use one handle. Only attach, register, bind_fates and detach need it for themselves.
 *   - A handle is useless in a fork()ed child (every call returns BUSRL_E_CLOSED): attach again there.
 *   - Strings are UTF-8 and end with a zero byte. Times are nanoseconds of CLOCK_MONOTONIC unless they say otherwise.
 *
 * Little endian, 64-bit Linux. Thread-safe error text; no global state.
 */
#ifndef BUSRL_RING_H
#define BUSRL_RING_H

#include <stddef.h>
#include <stdint.h>

#if defined(BUSRL_RING_STATIC)
#define BUSRL_RING_API
#else
#define BUSRL_RING_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a call, a code or the meaning of a field changes; growing a struct at its end does not raise it. */
#define BUSRL_RING_ABI 1u

typedef struct busrl_ring busrl_ring; /* one mapping of a ring, and perhaps one entry of its process table */

enum busrl_code {
    BUSRL_OK = 0,
    BUSRL_AGAIN = 1,              /* not an error: another process was faster, or the time passed; look again */
    BUSRL_E_INVALID = -1,         /* a bad argument, or a system call failed: the text says which */
    BUSRL_E_MISSING = -2,         /* no ring of that name: the run has ended */
    BUSRL_E_NO_FILE = -3,         /* no fate table under that path */
    BUSRL_E_EXISTS = -4,          /* the name of a new ring is taken */
    BUSRL_E_CORRUPT = -5,         /* bytes in shared memory contradict the layout */
    BUSRL_E_LAYOUT = -6,          /* the ring has another layout version */
    BUSRL_E_STALE = -7,           /* the ring was made before the last boot */
    BUSRL_E_SHM_TOO_SMALL = -8,   /* /dev/shm can not hold it: the same call succeeds when there is room */
    BUSRL_E_SLOT_TOO_SMALL = -9,  /* the tensor does not fit; busrl_ring_error gives both sizes */
    BUSRL_E_NOT_OWNER = -10,      /* you do not hold the slot under that word */
    BUSRL_E_TRANSITION = -11,     /* the state machine has no such arrow */
    BUSRL_E_NO_TENSOR = -12,      /* no tensor of that name and segment that you may see */
    BUSRL_E_TABLE_FULL = -13,     /* the process table has no free entry */
    BUSRL_E_NOT_REGISTERED = -14, /* call busrl_ring_register first */
    BUSRL_E_CLOSED = -15,         /* the handle was inherited over fork() */
    BUSRL_E_FATES = -16,          /* no fate table is bound, or the sample's fate forbids the step */
    BUSRL_E_DISK_FULL = -17,      /* the file system of the fate table is full */
    BUSRL_E_LOCKED = -18,         /* another process holds the lock */
    BUSRL_E_READ_ONLY = -19,      /* the handle was attached read-only */
    BUSRL_E_ABI = -20,            /* this library speaks another ABI version */
    BUSRL_E_MEMORY = -21,         /* out of memory */
    BUSRL_E_BAD_TENSOR = -22      /* a descriptor or payload of one slot contradicts itself; leave that slot alone */
};

/* States of a slot. A working state (*) has an owner, a resting one never has.
 * FREE -> RESERVED* -> QUEUED -> GENERATING* -> GENERATED -> REWARDING* -> REWARDED -> TRAINING* -> FREE
 * A model call goes from QUEUED, GENERATING* or GENERATED to FREE, and has no state after GENERATED. */
enum busrl_state {
    BUSRL_FREE = 0,
    BUSRL_RESERVED = 1,
    BUSRL_QUEUED = 2,
    BUSRL_GENERATING = 3,
    BUSRL_GENERATED = 4,
    BUSRL_REWARDING = 5,
    BUSRL_REWARDED = 6,
    BUSRL_TRAINING = 7,
    BUSRL_DROPPED = 8,
    BUSRL_STATES = 9
};

enum busrl_dtype { BUSRL_INT = 0, BUSRL_UINT = 1, BUSRL_FLOAT = 2, BUSRL_BFLOAT = 4, BUSRL_BOOL = 6 };

#define BUSRL_ATTACH_READ_ONLY 1u /* flag of attach: look, never write; no registration */
#define BUSRL_ATTACH_CALLS 2u     /* flag of attach: a ring of model calls, not of samples */
#define BUSRL_CHECKSUM 1u         /* flag of a tensor: it carries a CRC-32C, which every lookup verifies */
#define BUSRL_NO_SEGMENT 255u     /* a tensor that belongs to no segment, such as "task" */
#define BUSRL_ANY_CLASS (-1)      /* busrl_ring_take: slots of every class */
#define BUSRL_MAX_TENSORS 48u     /* entries of a slot's tensor table */
#define BUSRL_MAX_NAME 32u        /* bytes of a tensor's name */

typedef struct busrl_info { /* what does not change while attached */
    uint32_t size;
    uint32_t abi;
    uint32_t layout_major, layout_minor;
    uint32_t n_slots;
    uint32_t n_processes; /* entries of the process table, entry 0 included, which is never used */
    uint64_t slot_bytes;  /* payload of one slot */
    uint64_t total_bytes; /* the whole file */
    uint8_t uuid[16];     /* of the run */
    uint32_t index;       /* own entry of the process table, 0 before register */
    uint32_t read_only;
} busrl_info;

typedef struct busrl_held { /* a slot that you hold now */
    uint32_t slot;
    uint32_t zero;
    uint64_t word;
} busrl_held;

/* A control line, and its word taken apart. docs/ring-layout.md says what each field means. */
typedef struct busrl_line {
    uint32_t size;
    uint8_t state;  /* enum busrl_state */
    uint8_t segs;   /* committed segments */
    uint16_t owner; /* index into the process table of a working state; the reason (ASCII) of DROPPED; else 0 */
    uint64_t seq;   /* claims so far: slot and seq name one claim for ever */
    uint64_t word;
    uint64_t uid;
    uint64_t group;
    uint64_t admission;
    uint64_t version;
    uint64_t last_commit_seq;
    uint64_t changed_ns;
    uint64_t offer_until_ns;
    double reward;
    uint32_t cls;
    uint32_t reward_parts;
    uint16_t member;
    uint16_t group_size;
    uint16_t attempt;
    uint16_t offer_to;
    int32_t priority;
    uint32_t prompt_tokens;
    uint32_t response_tokens;
    uint32_t max_new_tokens;
    float temperature;
    float top_p;
    uint32_t prompt_crc;
    uint16_t finish;
    uint16_t alone_deaths;
    uint32_t step;
    uint32_t flags;
} busrl_line;

/* Which fields busrl_ring_set takes from the line. What is not here is the ring's own. */
enum busrl_field {
    BUSRL_SET_GROUP = 1 << 1,
    BUSRL_SET_ADMISSION = 1 << 2,
    BUSRL_SET_VERSION = 1 << 3,
    BUSRL_SET_OFFER_UNTIL_NS = 1 << 6,
    BUSRL_SET_REWARD = 1 << 7,
    BUSRL_SET_CLS = 1 << 8,
    BUSRL_SET_REWARD_PARTS = 1 << 9,
    BUSRL_SET_MEMBER = 1 << 10,
    BUSRL_SET_GROUP_SIZE = 1 << 11,
    BUSRL_SET_ATTEMPT = 1 << 12,
    BUSRL_SET_OFFER_TO = 1 << 13,
    BUSRL_SET_PRIORITY = 1 << 14,
    BUSRL_SET_PROMPT_TOKENS = 1 << 15,
    BUSRL_SET_RESPONSE_TOKENS = 1 << 16,
    BUSRL_SET_MAX_NEW_TOKENS = 1 << 17,
    BUSRL_SET_TEMPERATURE = 1 << 18,
    BUSRL_SET_TOP_P = 1 << 19,
    BUSRL_SET_PROMPT_CRC = 1 << 20,
    BUSRL_SET_FINISH = 1 << 21,
    BUSRL_SET_ALONE_DEATHS = 1 << 22,
    BUSRL_SET_STEP = 1 << 23,
    BUSRL_SET_FLAGS = 1 << 24 /* the highest bit of flags stays the ring's */
};

/* A tensor: C order, native byte order. put reads dtype, bits, ndim, shape, flags and data; alloc the first four. */
typedef struct busrl_tensor {
    uint32_t size;
    uint8_t dtype; /* enum busrl_dtype */
    uint8_t bits;  /* 8, 16, 32 or 64 per element */
    uint8_t ndim;  /* 0 to 4 */
    uint8_t segment;
    uint64_t shape[4];
    uint64_t nbytes;
    void* data; /* filled: where it lies in the slot. For put: where to copy from */
    uint32_t flags;
    uint32_t zero;
    char name[40]; /* filled: the name, ended with a zero byte */
} busrl_tensor;

typedef struct busrl_reaped { /* a slot that was taken back from a dead process */
    uint32_t slot;
    uint32_t from;
    uint32_t to;
    uint32_t pid;
    char label[48];
} busrl_reaped;

typedef struct busrl_stats { /* arrays are indexed by enum busrl_state; counts since the ring was made */
    uint32_t size;
    uint32_t states;          /* how many of the 16 places mean something */
    uint64_t occupancy[16];   /* slots in each state, now */
    uint64_t transitions[16]; /* entries into each state */
    uint64_t claims;
    uint64_t commits;
    uint64_t reaps;
    uint64_t dropped;
    uint64_t finished;
    uint64_t dispatched;
    uint64_t tokens;
    uint64_t drops[64]; /* by reason: the place of reason R is R - 64 */
} busrl_stats;

/* ---- library -------------------------------------------------------------------------------------------------- */

/* The ABI version of the library; compare it with BUSRL_RING_ABI if you loaded the library by hand. */
BUSRL_RING_API uint32_t busrl_ring_abi(void);

/* Text of the last error of this thread, "" if there was none; valid until the thread's next failing call.
 * needed and available (either may be NULL) get the sizes in bytes of *_TOO_SMALL and DISK_FULL, else 0. */
BUSRL_RING_API const char* busrl_ring_error(uint64_t* needed, uint64_t* available);

/* ---- life ----------------------------------------------------------------------------------------------------- */

/* Map a ring. abi: BUSRL_RING_ABI. name: a file name in /dev/shm, or a path. flags: 0 or BUSRL_ATTACH_READ_ONLY.
 * *ring is the handle, NULL after an error.
 * ABI, MISSING, CORRUPT (also: it belongs to another user), LAYOUT, STALE, INVALID. */
BUSRL_RING_API int busrl_ring_attach(uint32_t abi, const char* name, uint32_t flags, busrl_ring** ring);

/* Hand back what you hold, leave the process table, unmap. The handle and all pointers into the ring are gone, also
 * after an error. NULL is allowed. */
BUSRL_RING_API int busrl_ring_detach(busrl_ring* ring);

/* Sizes and identity of the ring. */
BUSRL_RING_API int busrl_ring_info(busrl_ring* ring, busrl_info* info);

/* Bind the fate tables of the run (fates.bin and fates.validate.bin of the run directory). drop needs them, and reap
 * needs them to decide about slots whose dispatcher died. A NULL path leaves that table unbound. NO_FILE. */
BUSRL_RING_API int busrl_ring_bind_fates(busrl_ring* ring, const char* train, const char* validate);

/* Take an entry of the process table, once per handle; claims need it. role: up to 15 bytes; label: the name of the
 * process as in the topology ("reward/0"), up to 39 bytes. index (may be NULL) gets the entry. The entry ends with
 * detach, or, if the process dies, by the next reap of anybody. TABLE_FULL, READ_ONLY. */
BUSRL_RING_API int busrl_ring_register(busrl_ring* ring, const char* role, const char* label, uint32_t* index);

/* Say that the process has started up. The supervisor waits for this. */
BUSRL_RING_API int busrl_ring_ready(busrl_ring* ring);

/* Say that the process gets on. A registered process that does not call this (or activity) for limits.progress_s is
 * killed and started again, so call it in every pass of the loop. */
BUSRL_RING_API int busrl_ring_progress(busrl_ring* ring);

/* Declare what the process is doing ("" = the usual), up to 31 bytes, and for how many seconds it may be silent
 * meanwhile (0 = the usual limit). */
BUSRL_RING_API int busrl_ring_activity(busrl_ring* ring, const char* name, double deadline_s);

/* Add to the process's own counters, which `busrl status` shows: time spent working and waiting, tokens, samples. */
BUSRL_RING_API int busrl_ring_add(busrl_ring* ring, uint64_t busy_ns, uint64_t idle_ns, uint64_t tokens,
                                  uint64_t samples);

/* ---- claiming ------------------------------------------------------------------------------------------------- */

/* Claim up to `limit` slots of state `from` into working state `to`, the best first: unfinished ones, then by
 * priority, then the oldest. cls: only that class, or BUSRL_ANY_CLASS. max_attempt: leave alone what more claims than
 * this already died on (only for from = QUEUED; the usual is 1). held gets them, *count how many (0 = none was there).
 * TRANSITION, NOT_REGISTERED. */
BUSRL_RING_API int busrl_ring_take(busrl_ring* ring, uint32_t from, uint32_t to, int64_t cls, uint32_t max_attempt,
                                   busrl_held* held, uint32_t limit, uint32_t* count);

/* Claim one slot, if it is still at `word` (as busrl_ring_line showed it), into working state `to`. *mine is the word
 * to hold it by. AGAIN: it is not at that word any more. */
BUSRL_RING_API int busrl_ring_claim(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* mine);

/* For a GENERATING slot: say that this process holds nothing else, so that its death counts against this sample. */
BUSRL_RING_API int busrl_ring_mark_alone(busrl_ring* ring, uint32_t slot, uint64_t word);

/* ---- reading and writing a slot ------------------------------------------------------------------------------- */

/* The control line of a slot. Consistent for a resting slot; of a slot that somebody works on, a look in passing. */
BUSRL_RING_API int busrl_ring_line(busrl_ring* ring, uint32_t slot, busrl_line* line);

/* Write fields of a slot that you hold: those of `line` whose bits of enum busrl_field are in `fields`. NOT_OWNER. */
BUSRL_RING_API int busrl_ring_set(busrl_ring* ring, uint32_t slot, uint64_t word, const busrl_line* line,
                                  uint32_t fields);

/* Where a tensor lies. segment: 0, 1, ..., or BUSRL_NO_SEGMENT. Segments that are not committed are seen by the owner
 * only. NO_TENSOR; CORRUPT: the descriptor breaks the layout, or the checksum is wrong. */
BUSRL_RING_API int busrl_ring_tensor(busrl_ring* ring, uint32_t slot, const char* name, uint32_t segment,
                                     busrl_tensor* tensor);

/* The tensor in place `place` (0 to BUSRL_MAX_TENSORS - 1) of the slot's table, to list them all.
 * AGAIN: nothing that you may see is in this place. */
BUSRL_RING_API int busrl_ring_tensor_at(busrl_ring* ring, uint32_t slot, uint32_t place, busrl_tensor* tensor);

/* Copy a tensor into a slot that you hold. One of the same name and segment is replaced, unless it is committed.
 * flags: 0 or BUSRL_CHECKSUM. NOT_OWNER, SLOT_TOO_SMALL. */
BUSRL_RING_API int busrl_ring_put(busrl_ring* ring, uint32_t slot, uint64_t word, const char* name, uint32_t segment,
                                  const busrl_tensor* tensor);

/* Set room for a tensor aside in a slot that you hold; fills nbytes and data, which you then write. */
BUSRL_RING_API int busrl_ring_alloc(busrl_ring* ring, uint32_t slot, uint64_t word, const char* name, uint32_t segment,
                                    busrl_tensor* tensor);

/* ---- letting go ----------------------------------------------------------------------------------------------- */

/* GENERATING -> GENERATED (done != 0) or QUEUED (more to come), with one more committed segment: the tensors of
 * segment number segs are seen by everybody from now on. next (may be NULL) gets the word at rest. */
BUSRL_RING_API int busrl_ring_commit(busrl_ring* ring, uint32_t slot, uint64_t word, int done, uint64_t* next);

/* Let go without a new segment: REWARDING -> REWARDED (the reward is written), or hand back (GENERATING -> QUEUED,
 * REWARDING -> GENERATED, TRAINING -> REWARDED). next may be NULL. */
BUSRL_RING_API int busrl_ring_release(busrl_ring* ring, uint32_t slot, uint64_t word, uint32_t to, uint64_t* next);

/* Free the slot of a model call (a ring that was attached with BUSRL_ATTACH_CALLS): by its caller where it rests, by
 * the engine that holds it if it was asked to cancel it. AGAIN: it is not at that word any more. NOT_OWNER, TRANSITION.
 */
BUSRL_RING_API int busrl_ring_free(busrl_ring* ring, uint32_t slot, uint64_t word);

/* End a sample untrained: by its owner, or by anybody where it rests. reason: one ASCII character, such as 'R' (the
 * reward raised), 'M' (malformed); the table stands in docs/architecture.md. FATES. */
BUSRL_RING_API int busrl_ring_drop(busrl_ring* ring, uint32_t slot, uint64_t word, char reason);

/* ---- waiting and watching ------------------------------------------------------------------------------------- */

/* Wait until a slot enters `state`: until the number of entries into it is not `seen` any more, or timeout_ns passed.
 * *now (may be NULL) gets the number. OK: it changed; AGAIN: the time passed. timeout_ns = 0 only looks. A wake-up may
 * be missed or needless: look at the slots after every wait, and keep the timeout short (50 ms is usual). */
BUSRL_RING_API int busrl_ring_wait(busrl_ring* ring, uint32_t state, uint64_t seen, uint64_t timeout_ns, uint64_t* now);

/* Give the slots of proven dead processes back to their resting states. Anybody may, at any time; the keeper of a run
 * does it every few milliseconds. *count (may be NULL) gets the number of slots; the first `limit` are described in
 * `reaped` (NULL if limit is 0). */
BUSRL_RING_API int busrl_ring_reap(busrl_ring* ring, busrl_reaped* reaped, uint32_t limit, uint32_t* count);

/* Counts of the whole ring. */
BUSRL_RING_API int busrl_ring_stats(busrl_ring* ring, busrl_stats* stats);

/* A named number of the ring's header: "version" (newest weights), "step", "run_state" (0 running, 1 finished,
 * 2 stopping), "hold", ... docs/ring-layout.md lists them. */
BUSRL_RING_API int busrl_ring_header(busrl_ring* ring, const char* name, uint64_t* value);

#ifdef __cplusplus
}
#endif

#endif
