/* The card, the environment, and the processes that share it. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* From NVIDIA's data sheets and the CUDA programming guide's table of technical specifications. */
static const Card CARDS[] = {
    {"4070", "NVIDIA GeForce RTX 4070", 12281, 8, 9, 86, 46, 1536, 24, 102400, 101376, 37748736, 192, 2475000, 10501000, 128, 200},
    {"3060", "NVIDIA GeForce RTX 3060", 12288, 8, 6, 86, 28, 1536, 16, 102400, 101376, 2359296, 192, 1777000, 7501000, 128, 170},
    {"4090", "NVIDIA GeForce RTX 4090", 24564, 8, 9, 86, 128, 1536, 24, 102400, 101376, 75497472, 384, 2520000, 10501000, 128, 450},
    {"a100", "NVIDIA A100-SXM4-80GB", 81920, 8, 0, 80, 108, 2048, 32, 167936, 166912, 41943040, 5120, 1410000, 1593000, 64, 400},
    {"h100", "NVIDIA H100 80GB HBM3", 81559, 9, 0, 90, 132, 2048, 32, 233472, 232448, 52428800, 5120, 1980000, 2619000, 128, 700},
};

Settings settings;
static Process this_process[MAX_PROCESSES];
Process *processes = this_process, *own = this_process;

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

/* ---- the processes that share the card ---- */

static void forget(Process *process) {
  for (int d = 0; d < MAX_DEVICES; d++) process->used[d] = 0;
  process->pid = 0;
}

static void join_shared_card(void) {
  for (int i = 0; i < MAX_PROCESSES; i++) {
    int pid = processes[i].pid;
    if (pid && pid != getpid() && kill(pid, 0) && errno == ESRCH) forget(&processes[i]); /* it ended: free again */
  }
  for (int i = 0; i < MAX_PROCESSES; i++) {
    int none = 0;
    if (atomic_compare_exchange_strong(&processes[i].pid, &none, getpid())) {
      own = &processes[i];
      return;
    }
  }
}

static void after_fork(void) {
  own = this_process;
  if (processes != this_process) join_shared_card();
}

static void at_exit(void) {
  if (own->pid == getpid()) forget(own);
}

static void share(const char *path) {
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (!ftruncate(file, sizeof this_process)) {
    void *map = mmap(NULL, sizeof this_process, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) processes = map;
  }
  close(file);
  if (processes == this_process) return;
  join_shared_card();
  atexit(at_exit);
}

size_t used_on(int device) {
  size_t sum = 0;
  for (int i = 0; i < MAX_PROCESSES; i++) sum += processes[i].used[device];
  return sum;
}

/* ---- the environment ---- */

static int visible(int all) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return all;
  int count = 0;
  while (*text && *text != '-' && count < all) {
    count++;
    text += strcspn(text, ",");
    text += *text == ',';
  }
  return count;
}

static void start(void) {
  const char *key = getenv("FAKECUDA_GPU"), *state = getenv("FAKECUDA_STATE");
  settings.card = CARDS[0];
  for (size_t i = 0; key && i < sizeof CARDS / sizeof *CARDS; i++)
    if (!strcasecmp(key, CARDS[i].key)) settings.card = CARDS[i];
  settings.memory_bytes = number("FAKECUDA_MEMORY_MIB", settings.card.memory_mib) * MIB;
  settings.context_bytes = number("FAKECUDA_CONTEXT_MIB", 300) * MIB;
  size_t copies_mib = number("FAKECUDA_COPY_MIB", 512);
  settings.copy_limit_bytes = copies_mib ? copies_mib * MIB : SIZE_MAX;
  size_t devices = number("FAKECUDA_DEVICES", 1);
  settings.nvml_devices = devices > MAX_DEVICES ? MAX_DEVICES : (int)devices;
  settings.devices = visible(settings.nvml_devices);
  settings.trace = number("FAKECUDA_TRACE", 0);
  settings.small_kernels = number("FAKECUDA_FILL", 1);
  if (state && *state) share(state);
  pthread_atfork(NULL, NULL, after_fork);
}

void ready(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, start);
}

/* ---- what it says ---- */

void say(const char *format, ...) {
  ready();
  if (!settings.trace) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("fakecuda: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

/* Called by a stub of a function that torch asks for and the driver lacks (build.py makes them). */
EXPORT int fakecuda_missing(const char *name, int answer) {
  ready();
  static _Atomic int said;
  if (settings.trace || said++ < 20) fprintf(stderr, "fakecuda: %s is missing; it answers %d\n", name, answer);
  return answer;
}
