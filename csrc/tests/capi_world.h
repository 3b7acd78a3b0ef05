/* What a C test needs that the C ABI does not have: a ring to attach to, tasks in it, and an enemy that scribbles. */
#ifndef BUSRL_CAPI_WORLD_H
#define BUSRL_CAPI_WORLD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct world world;

world* world_make(void); /* 8 slots of 4096 bytes, 8 process entries, fate tables; NULL if it can not be made */
void world_end(world* w);
const char* world_ring(const world* w);
const char* world_fates(const world* w);
int world_dispatch(world* w, uint64_t uid); /* one task, "prompt"; 0 if there was no free slot */
int world_fate(world* w, uint64_t uid);
/* Overwrites `bytes` bytes at `offset` of the file, or of tensor entry 0 of a slot, as a hostile process could. */
void world_scribble(world* w, uint64_t offset, const void* data, uint64_t bytes);
void world_scribble_tensor(world* w, uint32_t slot, uint64_t offset, const void* data, uint64_t bytes);
void world_scribble_word(world* w, uint32_t slot, uint64_t word);

#ifdef __cplusplus
}
#endif

#endif
