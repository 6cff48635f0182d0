/* Devices, contexts, errors, and how torch and Triton find the driver's functions. */
#include "fake.h"

#include <dlfcn.h>

_Thread_local int current_device;

/* ---- errors ---- */

static _Thread_local cudaError_t last_error;

cudaError_t failed(cudaError_t error) { return last_error = error; }

EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* Name and text as the runtime has them, for the errors that this driver can give. */
static const struct {
  int code;
  const char *runtime_name, *driver_name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {-1, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};
static int row_of(int code) {
  int i = 0;
  while (ERRORS[i].code != code && ERRORS[i].code >= 0) i++;
  return i;
}
EXPORT const char *cudaGetErrorName(cudaError_t error) { return ERRORS[row_of(error)].runtime_name; }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return ERRORS[row_of(error)].text; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  int code = error == CUDA_ERROR_OUT_OF_MEMORY ? (int)cudaErrorMemoryAllocation : (int)error;
  *text = ERRORS[row_of(code)].text;
  FINE;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  int code = error == CUDA_ERROR_OUT_OF_MEMORY ? (int)cudaErrorMemoryAllocation : (int)error;
  *text = ERRORS[row_of(code)].driver_name;
  FINE;
}

/* ---- devices ---- */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  ready();
  *count = settings.devices;
  return settings.devices ? cudaSuccess : failed(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *device) {
  ready();
  *device = current_device;
  OK;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  ready();
  if (device < 0 || device >= settings.devices) return failed(cudaErrorInvalidDevice);
  current_device = device;
  make_context(device);
  OK;
}
EXPORT cudaError_t cudaInitDevice(int device, unsigned flags, unsigned more) { return cudaSetDevice(device); }
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  OK;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  OK;
}

static int attribute(int which) {
  const Card *c = &settings.card;
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return c->clock_khz;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return c->sms;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return 1;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 1;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return c->memory_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return c->bus_bits;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return c->l2_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return c->threads_per_sm;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return c->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return c->minor;
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return c->shared_per_sm;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return c->shared_optin;
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return c->blocks_per_sm;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return c->major >= 9;
    default: return 0;
  }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  ready();
  *value = attribute((int)which);
  OK;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  ready();
  if (device < 0 || device >= settings.devices) return failed(cudaErrorInvalidDevice);
  const Card *c = &settings.card;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  memcpy(p->uuid.bytes, "fakecuda-card-0", 16);
  p->uuid.bytes[14] = '0' + device;
  p->totalGlobalMem = settings.memory_bytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c->major;
  p->minor = c->minor;
  p->textureAlignment = p->surfaceAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = c->sms;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = p->managedMemory = 1;
  p->pciBusID = 1 + device;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = c->bus_bits;
  p->l2CacheSize = c->l2_bytes;
  p->maxThreadsPerMultiProcessor = c->threads_per_sm;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = c->shared_per_sm;
  p->sharedMemPerBlockOptin = c->shared_optin;
  p->maxBlocksPerMultiProcessor = c->blocks_per_sm;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = p->computePreemptionSupported = 1;
  p->clusterLaunch = c->major >= 9;
  OK;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02X:00.0", 1 + device);
  OK;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  OK;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  OK;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  static char pools[MAX_DEVICES];
  *pool = (cudaMemPool_t)&pools[device];
  OK;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
  *(uint64_t *)value = 0;
  OK;
}

/* ---- the same by the driver's interface ---- */

EXPORT CUresult cuInit(unsigned flags) {
  ready();
  return settings.devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  FINE;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ready();
  if (ordinal < 0 || ordinal >= settings.devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  FINE;
}
EXPORT CUresult cuDeviceGetCount(int *count) {
  ready();
  *count = settings.devices;
  FINE;
}
EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  ready();
  snprintf(name, size, "%s", settings.card.name);
  FINE;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memcpy(uuid->bytes, "fakecuda-card-0", 16);
  uuid->bytes[14] = '0' + device;
  FINE;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  ready();
  *bytes = settings.memory_bytes;
  FINE;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  ready();
  *value = attribute((int)which);
  FINE;
}
EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  ready();
  *major = settings.card.major, *minor = settings.card.minor;
  FINE;
}
EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
  cudaDeviceGetPCIBusId(text, size, device);
  FINE;
}

/* ---- contexts: one for each device, named by its number ---- */

static int contexts[MAX_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  *found = (CUcontext)&contexts[device];
  FINE;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  ready();
  if (flags) *flags = 0;
  *active = own->used[device] != 0;
  FINE;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *found) { return cuDevicePrimaryCtxRetain(found, current_device); }
EXPORT CUresult cuCtxSetCurrent(CUcontext wanted) {
  if (wanted) current_device = *(int *)wanted;
  FINE;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext wanted) { return cuCtxSetCurrent(wanted); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *found) { return found ? cuCtxGetCurrent(found) : CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current_device;
  FINE;
}
EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
  *version = CUDA_VERSION;
  FINE;
}
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  FINE;
}

/* ---- functions by name: the newest version of each ---- */

static void *newest(const char *symbol) {
  static const char *const VERSIONS[] = {"_v3", "_v2", ""};
  char name[160];
  for (int i = 0; i < 3; i++) {
    snprintf(name, sizeof name, "%s%s", symbol, VERSIONS[i]);
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found) return found;
  }
  say("no function %s", symbol);
  return NULL;
}
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
  *found = newest(symbol);
  if (status) *status = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **found, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
  *found = newest(symbol);
  if (status) *status = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  OK;
}
