/* The card's memory: counted against its size, mapped lazily. What nobody copies to reads as zeros and costs no RAM. */
#include "fake.h"

#include <pthread.h>
#include <sys/mman.h>

#define GRANULE ((size_t)1 << 16) /* whether memory is known to be zero is known in pieces of this size */
#define SEGMENT (2 * MIB)         /* the driver hands out memory in pieces of this size */

/* ---- regions: what is allocated, sorted by address ---- */

enum { DEVICE, HOST, REGISTERED, RESERVED };
typedef struct {
  char *base;
  size_t size, charged; /* charged: to the card's memory */
  int device, kind;
  unsigned char *dirty; /* one byte a GRANULE: something was written there; NULL: host memory */
} Region;

static Region *regions;
static size_t region_count, region_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Region *find(const void *pointer) { /* with the lock held */
  size_t low = 0, high = region_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (regions[middle].base <= (char *)pointer) low = middle + 1;
    else high = middle;
  }
  if (!low) return NULL;
  Region *found = &regions[low - 1];
  return (char *)pointer < found->base + (found->size ? found->size : 1) ? found : NULL;
}

static void insert(Region region) {
  if (region_count == region_room) {
    region_room = region_room ? 2 * region_room : 256;
    regions = realloc(regions, region_room * sizeof *regions);
  }
  size_t at = region_count++;
  for (; at && regions[at - 1].base > region.base; at--) regions[at] = regions[at - 1];
  if (region.kind == DEVICE || region.kind == RESERVED) region.dirty = calloc(region.size / GRANULE + 2, 1);
  regions[at] = region;
}

static void drop(Region *region) {
  free(region->dirty);
  size_t at = region - regions;
  memmove(region, region + 1, (--region_count - at) * sizeof *regions);
}

static bool on_device(const Region *region) { return region && region->dirty; }

/* ---- taking and giving back ---- */

static bool charge(int device, size_t bytes) { /* with the lock held; the first byte brings the context with it */
  size_t context = own->used[device] ? 0 : settings.context_bytes;
  if (used_on(device) + context + bytes > settings.memory_bytes) return false;
  own->used[device] += bytes + context;
  return true;
}

bool make_context(int device) {
  pthread_mutex_lock(&lock);
  bool made = own->used[device] || charge(device, 0);
  pthread_mutex_unlock(&lock);
  return made;
}

/* Between free blocks of one size PyTorch takes the lowest, so where a segment lies decides what fragments. Like class
 * Falling of foretrain/predict/allocator/addresses.py: chunks of whole 32 MiB, each below the last one, and what a segment
 * leaves of its chunk goes to later ones, the lowest first. FAKECUDA_RISING=1: each behind the last one, as Rising. */
#define CHUNK (32 * MIB)
typedef struct {
  char *base;
  size_t size;
} Rest;
static Rest *rests; /* of chunks */
static size_t rest_count;

static size_t whole(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static char *place(size_t size) { /* with the lock held; what is freed is not given again */
  static char *next = (char *)0x500000000000;
  const char *rising = getenv("FAKECUDA_RISING");
  size = whole(size, SEGMENT);
  if (rising && *rising == '1') {
    next += size;
    return next - size;
  }
  Rest *found = NULL;
  for (Rest *rest = rests; rest < rests + rest_count; rest++)
    if (rest->size >= size && (!found || rest->base < found->base)) found = rest;
  if (!found) {
    next -= whole(size, CHUNK);
    rests = realloc(rests, (rest_count + 1) * sizeof *rests);
    found = &rests[rest_count++];
    *found = (Rest){next, whole(size, CHUNK)};
  }
  char *base = found->base;
  found->base += size;
  found->size -= size;
  if (!found->size) *found = rests[--rest_count];
  return base;
}

static void *map_lazily(size_t size, char *wish) { /* the host's memory lies where the system wishes: NULL */
  void *found = mmap(wish, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return NULL;
  madvise(found, size, MADV_NOHUGEPAGE);
  return found;
}

static bool take(void **pointer, size_t bytes, int kind, int device) {
  ready();
  *pointer = NULL;
  if (!bytes) return true;
  size_t unit = kind == HOST ? 4096 : SEGMENT, size = (bytes + unit - 1) / unit * unit;
  pthread_mutex_lock(&lock);
  bool fits = kind != DEVICE || charge(device, size);
  void *base = fits ? map_lazily(size, kind == HOST ? NULL : place(size)) : NULL;
  if (base) insert((Region){base, size, kind == DEVICE ? size : 0, device, kind, NULL});
  else if (fits && kind == DEVICE) own->used[device] -= size;
  pthread_mutex_unlock(&lock);
  say("%s %zu bytes on %d -> %p", kind == DEVICE ? "malloc" : "host alloc", bytes, device, base);
  *pointer = base;
  return base != NULL;
}

static bool give(void *pointer) {
  if (!pointer) return true;
  pthread_mutex_lock(&lock);
  Region *region = find(pointer);
  bool known = region && region->base == pointer;
  if (known) {
    say("free %zu bytes of %d at %p", region->size, region->device, pointer);
    own->used[region->device] -= region->charged;
    if (region->kind != REGISTERED) munmap(region->base, region->size);
    drop(region);
  }
  pthread_mutex_unlock(&lock);
  return known;
}

/* ---- what is in it ---- */

static bool clean(const Region *region, const char *from, size_t bytes) {
  size_t first = (from - region->base) / GRANULE, last = (from + bytes - 1 - region->base) / GRANULE;
  for (size_t i = first; i <= last; i++)
    if (region->dirty[i]) return false;
  return true;
}

static void soil(Region *region, const char *from, size_t bytes) {
  size_t first = (from - region->base) / GRANULE, last = (from + bytes - 1 - region->base) / GRANULE;
  memset(region->dirty + first, 1, last - first + 1);
}

static void zero(Region *region, char *from, size_t bytes) { /* whole granules go back to the system */
  char *end = from + bytes;
  while (from < end) {
    size_t i = (from - region->base) / GRANULE;
    char *start = region->base + i * GRANULE, *stop = start + GRANULE;
    bool whole = from == start && stop <= end;
    if (stop > end) stop = end;
    if (region->dirty[i] && whole) {
      madvise(from, GRANULE, MADV_DONTNEED);
      region->dirty[i] = 0;
    } else if (region->dirty[i])
      memset(from, 0, stop - from);
    from = stop;
  }
}

void copy_bytes(void *to, const void *from, size_t bytes) {
  if (!bytes) return;
  pthread_mutex_lock(&lock);
  Region *target = find(to), *source = find(from);
  if (!on_device(target)) target = NULL;
  if (on_device(source) && clean(source, from, bytes)) {
    if (target) zero(target, to, bytes);
    else memset(to, 0, bytes);
  } else if (!target || bytes <= settings.copy_limit_bytes) {
    if (target) soil(target, to, bytes);
    memmove(to, from, bytes);
  }
  pthread_mutex_unlock(&lock);
}

void fill(void *to, const void *value, size_t width, size_t count) {
  static const char zeros[16];
  if (!count) return;
  pthread_mutex_lock(&lock);
  Region *region = find(to);
  bool is_zero = !memcmp(value, zeros, width);
  if (on_device(region) && (is_zero || width * count > 64 * MIB)) zero(region, to, width * count);
  else {
    if (on_device(region)) soil(region, to, width * count);
    for (size_t i = 0; i < count; i++) memcpy((char *)to + i * width, value, width);
  }
  pthread_mutex_unlock(&lock);
}

/* ---- the runtime's calls ---- */

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  return take(pointer, bytes, DEVICE, current_device) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFree(void *pointer) { return give(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue); }
EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t s) { return cudaMalloc(pointer, bytes); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
EXPORT cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) { return cudaMalloc(pointer, bytes); }
EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  cudaSetDevice(current_device);
  size_t used = used_on(current_device);
  *free_bytes = used < settings.memory_bytes ? settings.memory_bytes - used : 0;
  *total_bytes = settings.memory_bytes;
  OK;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  return take(pointer, bytes, HOST, 0) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }
EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  pthread_mutex_lock(&lock);
  insert((Region){pointer, bytes, 0, 0, REGISTERED, NULL});
  pthread_mutex_unlock(&lock);
  OK;
}
EXPORT cudaError_t cudaHostUnregister(void *pointer) { return cudaFree(pointer); }
EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  OK;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeUnregistered;
  found->device = -2;
  pthread_mutex_lock(&lock);
  Region *region = find(pointer);
  if (region) {
    found->type = on_device(region) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    found->device = region->device;
    found->devicePointer = (void *)pointer;
    found->hostPointer = on_device(region) ? NULL : (void *)pointer;
  }
  pthread_mutex_unlock(&lock);
  OK;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  copy_bytes(to, from, bytes);
  OK;
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  return cudaMemcpy(to, from, bytes, kind);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++)
    copy_bytes((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  OK;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  unsigned char byte = (unsigned char)value;
  fill(to, &byte, 1, bytes);
  OK;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) { return cudaMemset(to, value, bytes); }

/* ---- the driver's calls ---- */

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  cudaMemGetInfo(free_bytes, total_bytes);
  FINE;
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  return take((void **)pointer, bytes, DEVICE, current_device) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr at) { return give((void *)at) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  pthread_mutex_lock(&lock);
  Region *region = find((void *)pointer);
  if (region && base) *base = (CUdeviceptr)region->base;
  if (region && size) *size = region->size;
  pthread_mutex_unlock(&lock);
  return region ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  copy_bytes((void *)to, from, bytes);
  FINE;
}
EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  copy_bytes(to, (void *)from, bytes);
  FINE;
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  copy_bytes((void *)to, (void *)from, bytes);
  FINE;
}
EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyDtoD_v2(to, from, bytes);
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  fill((void *)to, &value, 1, count);
  FINE;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char v, size_t n, CUstream s) { return cuMemsetD8_v2(to, v, n); }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  fill((void *)to, &value, 4, count);
  FINE;
}
EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned flags) {
  return cuMemsetD32Async(to, value, 1, stream);
}
EXPORT CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr pointer) {
  CUresult result = CUDA_SUCCESS;
  CUcontext context = NULL;
  pthread_mutex_lock(&lock);
  Region *region = find((void *)pointer);
  if (region) cuDevicePrimaryCtxRetain(&context, region->device);
  if (!region) result = CUDA_ERROR_INVALID_VALUE;
  else switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)found = context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)found = on_device(region) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)found = pointer; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)found = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)found = region->device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)found = (CUdeviceptr)region->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)found = region->size; break;
    default: result = CUDA_ERROR_NOT_SUPPORTED;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* ---- virtual memory, for expandable segments: memory is charged when it is created, addresses cost nothing ---- */

typedef struct {
  size_t size;
  int device, references; /* torch lets the handle go right after cuMemMap or at the unmapping; both are counted */
} Physical;
typedef struct {
  CUdeviceptr at;
  Physical *physical;
} Mapping;
static Mapping *mappings;
static size_t mapping_count;

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
  *size = SEGMENT;
  FINE;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t align, CUdeviceptr at, unsigned long long f) {
  pthread_mutex_lock(&lock);
  void *base = map_lazily(size, place(size));
  if (base) insert((Region){base, size, 0, current_device, RESERVED, NULL});
  pthread_mutex_unlock(&lock);
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = (CUdeviceptr)base;
  FINE;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) { return cuMemFree_v2(pointer); }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *p, unsigned long long f) {
  ready();
  pthread_mutex_lock(&lock);
  bool fits = charge(p->location.id, size);
  pthread_mutex_unlock(&lock);
  if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *physical = calloc(1, sizeof *physical);
  *physical = (Physical){size, p->location.id, 1};
  *made = (CUmemGenericAllocationHandle)physical;
  FINE;
}
static void let_go(Physical *physical) { /* with the lock held */
  if (--physical->references) return;
  own->used[physical->device] -= physical->size;
  free(physical);
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle physical) {
  pthread_mutex_lock(&lock);
  let_go((Physical *)physical);
  pthread_mutex_unlock(&lock);
  FINE;
}
EXPORT CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle physical, unsigned long long f) {
  pthread_mutex_lock(&lock);
  mappings = realloc(mappings, (mapping_count + 1) * sizeof *mappings);
  mappings[mapping_count++] = (Mapping){at, (Physical *)physical};
  ((Physical *)physical)->references++;
  pthread_mutex_unlock(&lock);
  FINE;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < mapping_count;) {
    if (mappings[i].at < at || mappings[i].at >= at + size) {
      i++;
      continue;
    }
    Physical *physical = mappings[i].physical;
    mappings[i] = mappings[--mapping_count];
    let_go(physical);
  }
  Region *region = find((void *)at);
  if (on_device(region)) zero(region, (char *)at, size);
  pthread_mutex_unlock(&lock);
  FINE;
}
