/* What the parts of the driver share: the card, its memory, and how they report.
 *
 * The library stands in for libcudart, libcuda, cuBLAS(Lt), NCCL and NVML in front of PyTorch's own CUDA build. It has
 * a card's memory and no card: allocations are counted against the card's size, kernels do nothing. Written against
 * NVIDIA's public headers only, which come with the wheels. README.md has the environment variables and the limits.
 */
#pragma once
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __CUDA_API_VERSION_INTERNAL /* cuda.h then declares every version of a function and renames none */
#include <cuda.h>
#undef __CUDA_API_VERSION_INTERNAL
#include <cuda_runtime_api.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB ((size_t)1 << 20)
#define MAX_DEVICES 8
#define MAX_PROCESSES 64

/* ---- the card (card.c) ---- */

typedef struct {
  const char *key, *name;
  size_t memory_mib;
  int major, minor, binary; /* binary: the newest architecture that torch's wheel holds and this card can run */
  int sms, threads_per_sm, blocks_per_sm, shared_per_sm, shared_optin, l2_bytes, bus_bits, clock_khz, memory_khz;
  int cores_per_sm, power_w;
} Card;

typedef struct {
  Card card;
  size_t memory_bytes, context_bytes;
  size_t copy_limit_bytes; /* a copy to the card above this is dropped */
  int devices, nvml_devices; /* CUDA_VISIBLE_DEVICES hides cards from CUDA and not from NVML */
  bool trace, small_kernels;
} Settings;
extern Settings settings;

typedef struct { /* a process and what it has allocated on each card */
  _Atomic int pid;
  _Atomic size_t used[MAX_DEVICES];
} Process;
extern Process *processes; /* MAX_PROCESSES of them: this process alone, or all that share FAKECUDA_STATE */
extern Process *own;

void ready(void);         /* reads the environment, once */
void say(const char *format, ...); /* to stderr, where FAKECUDA_TRACE=1 */
double now_ms(void);
size_t used_on(int device); /* by all processes, contexts included */

/* ---- memory (memory.c) ---- */

void copy_bytes(void *to, const void *from, size_t bytes);
void fill(void *to, const void *value, size_t width, size_t count); /* count values of `width` bytes */
bool make_context(int device);

/* ---- errors and handles (devices.c, streams.c) ---- */

extern _Thread_local int current_device;
cudaError_t failed(cudaError_t error); /* remembers it for cudaGetLastError */
void *new_handle(void);                /* an opaque object that free() ends */

#define OK return cudaSuccess
#define FINE return CUDA_SUCCESS
