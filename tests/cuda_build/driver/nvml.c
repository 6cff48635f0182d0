/* NVML: the card's name and memory, and who uses it. Load, clocks, power and temperature are made up.
 *
 * nvml.h comes with no wheel, so these are its documented layouts. An answer of 0 is success.
 */
#include "fake.h"

enum { NO_DRIVER = 9, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7 };
typedef struct {
  unsigned long long total, free, used;
} NvmlMemory;
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} NvmlMemory2;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} NvmlProcess;
typedef struct {
  unsigned gpu, memory;
} NvmlUtilization;
static int device_of(void *nvml) { return (int)(uintptr_t)nvml - 1; }

EXPORT int nvmlInit_v2(void) {
  ready();
  return settings.nvml_devices ? 0 : NO_DRIVER;
}
EXPORT int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char *nvmlErrorString(int error) { return error ? "unknown error" : "Success"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  ready();
  *count = settings.nvml_devices;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  ready();
  *device = (void *)(uintptr_t)(index + 1);
  return index < (unsigned)settings.nvml_devices ? 0 : INVALID_ARGUMENT;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  const char *at = strchr(id, ':');
  *device = (void *)(uintptr_t)(at ? strtoul(at + 1, NULL, 16) : 1);
  return 0;
}
EXPORT int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "%s", settings.card.name);
  return 0;
}
EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { /* as torch prints its uuid */
  snprintf(text, size, "GPU-66616b65-6375-6461-2d63-6172642d%02x00", '0' + device_of(device));
  return 0;
}
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "fakecuda");
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = CUDA_VERSION;
  return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *device, NvmlMemory *memory) {
  size_t used = used_on(device_of(device));
  *memory = (NvmlMemory){settings.memory_bytes, settings.memory_bytes - used, used};
  return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, NvmlMemory2 *memory) {
  size_t used = used_on(device_of(device));
  memory->total = settings.memory_bytes, memory->free = settings.memory_bytes - used, memory->used = used, memory->reserved = 0;
  return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, NvmlProcess *found) {
  unsigned room = *count, n = 0;
  for (int i = 0; i < MAX_PROCESSES; i++)
    if (processes[i].pid && processes[i].used[device_of(device)]) {
      if (n < room && found) found[n] = (NvmlProcess){processes[i].pid, processes[i].used[device_of(device)], -1, -1};
      n++;
    }
  *count = n;
  return n > room ? INSUFFICIENT_SIZE : 0;
}
typedef struct {
  unsigned pid;
  unsigned long long used;
} NvmlProcess1;
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, NvmlProcess1 *found) { /* torch's OOM message asks this one */
  NvmlProcess all[MAX_PROCESSES];
  unsigned room = *count, n = MAX_PROCESSES;
  nvmlDeviceGetComputeRunningProcesses_v3(device, &n, all);
  for (unsigned i = 0; i < n && i < room && found; i++) found[i] = (NvmlProcess1){all[i].pid, all[i].used};
  *count = n;
  return n > room ? INSUFFICIENT_SIZE : 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = settings.card.major, *minor = settings.card.minor;
  return 0;
}
EXPORT int nvmlDeviceGetNumGpuCores(void *device, unsigned *cores) {
  *cores = settings.card.sms * settings.card.cores_per_sm;
  return 0;
}
EXPORT int nvmlDeviceGetUtilizationRates(void *device, NvmlUtilization *found) {
  *found = (NvmlUtilization){0, 0};
  return 0;
}
EXPORT int nvmlDeviceGetClockInfo(void *device, int which, unsigned *mhz) {
  *mhz = (which == 2 ? settings.card.memory_khz : settings.card.clock_khz) / 1000;
  return 0;
}
EXPORT int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  *milliwatts = settings.card.power_w * 1000;
  return 0;
}
EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
  *millijoules = (unsigned long long)(now_ms() * settings.card.power_w);
  return 0;
}
EXPORT int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
  *celsius = 50;
  return 0;
}
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
  *reasons = 0;
  return 0;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned *info) { /* the first number is version and size */
  memset(info + 1, 0, (*info & 0xffffff) - 4);                        /* state 0: this card has no fabric */
  return 0;
}
