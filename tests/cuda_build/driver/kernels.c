/* Kernels: registered, launched, and done by none, but for three kinds that small scalars need.
 *
 * Programs branch on scalars (`if found_inf == 0`), and a block that was used before holds what another tensor left
 * there. So fills, comparisons with a number and the outputs of element-wise kernels are done here for at most
 * SMALL elements; tests/cuda_build/branches.py checks that a step took the branches of a real one.
 */
#include "fake.h"

#include <pthread.h>

#define SMALL 1024

/* ---- what a kernel is, by its mangled name ---- */

typedef struct {
  const void *function;
  const char *name;
  int fill_width;  /* bytes of the value that it writes N times; 0: it fills nothing */
  int operands;    /* of an element-wise kernel: how many tensors, the output first; -1: cat; 0: neither */
  char compared;   /* type (f d l i) of the tensor that it compares with a number; 0: it compares nothing */
} Kernel;

/* torch fills a contiguous tensor by vectorized_elementwise_kernel<n, FillFunctor<T>, std::array<char*, 1>>. The letter
 * after FillFunctorI is T as Itanium C++ mangles it. */
static int fill_width(const char *name) {
  const char *at = strstr(name, "vectorized_elementwise_kernelILi") ? strstr(name, "11FillFunctorI") : NULL;
  if (!at) return 0;
  switch (at[14]) {
    case 'b': case 'h': case 'a': return 1;
    case 's': return 2;
    case 'f': case 'i': return 4;
    case 'd': case 'l': return 8;
    case 'N': return strstr(at, "c104Half") == at + 15 || strstr(at, "c108BFloat16") == at + 15 ? 2 : 0;
    default: return 0;
  }
}

/* torch's other element-wise kernels have the arguments (int N, functor, std::array<char*, operands>, ...). */
static int operands(const char *name) {
  if (strstr(name, "CatArrayBatchedCopy")) return -1; /* cat, stack: the first argument is the output */
  if (!strstr(name, "vectorized_elementwise_kernelILi") && !strstr(name, "unrolled_elementwise_kernel")) return 0;
  const char *at = strstr(name, "St5arrayIPcLm");
  return at ? atoi(at + 13) : 0;
}

/* tensor == number, tensor != number: UnaryFunctor<T, T, bool, CompareEqFunctor<T>>. */
static char compared(const char *name) {
  const char *at = strstr(name, "vectorized_elementwise_kernelILi") ? strstr(name, "UnaryFunctorI") : NULL;
  bool equals = at && at[13] == at[14] && at[15] == 'b' && strstr(at, "CompareEqFunctorI");
  return equals && strchr("fdli", at[13]) ? at[13] : 0;
}

/* ---- registration ---- */

static Kernel *kernels;
static size_t kernel_count, kernel_room;
static bool sorted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void **__cudaRegisterFatBinary(void *data) {
  static void *dummy;
  return &dummy;
}
EXPORT char __cudaInitModule(void **binary) { return 1; }
EXPORT void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *t,
                                   void *b, void *bd, void *gd, int *warp) {
  pthread_mutex_lock(&lock);
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 1 << 16;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (Kernel){.function = host, .name = name ? name : "?"};
  sorted = false;
  pthread_mutex_unlock(&lock);
}

static int by_function(const void *a, const void *b) {
  const char *x = ((const Kernel *)a)->function, *y = ((const Kernel *)b)->function;
  return (x > y) - (x < y);
}

static const Kernel *kernel_of(const void *function) {
  pthread_mutex_lock(&lock);
  if (!sorted) {
    for (size_t i = 0; i < kernel_count; i++) {
      Kernel *kernel = &kernels[i];
      kernel->fill_width = fill_width(kernel->name);
      kernel->operands = operands(kernel->name);
      kernel->compared = compared(kernel->name);
    }
    qsort(kernels, kernel_count, sizeof *kernels, by_function);
    sorted = true;
  }
  Kernel key = {.function = function}, *found = bsearch(&key, kernels, kernel_count, sizeof *kernels, by_function);
  pthread_mutex_unlock(&lock);
  return found;
}

/* ---- variables of the card: their host copies ---- */

typedef struct {
  const void *host;
  size_t size;
  void *memory;
} Variable;
static Variable *variables;
static size_t variable_count;

EXPORT void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int ext, size_t size,
                              int constant, int global) {
  pthread_mutex_lock(&lock);
  variables = realloc(variables, (variable_count + 1) * sizeof *variables);
  variables[variable_count++] = (Variable){host, size, NULL};
  pthread_mutex_unlock(&lock);
}
static void *variable(const void *symbol) {
  void *found = NULL;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < variable_count && !found; i++)
    if (variables[i].host == symbol) {
      if (!variables[i].memory) variables[i].memory = calloc(1, variables[i].size + 16);
      found = variables[i].memory;
    }
  pthread_mutex_unlock(&lock);
  return found;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  *pointer = variable(symbol);
  return *pointer ? cudaSuccess : failed(cudaErrorInvalidSymbol);
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind) {
  char *to = variable(symbol);
  if (to) memcpy(to + offset, from, bytes);
  OK;
}

/* ---- what small kernels do ---- */

static void compare(char type, const void *functor, void **data, unsigned n) { /* functor: {int op; number}, op 1: != */
  const char *number = (const char *)functor + (type == 'f' || type == 'i' ? 4 : 8);
  unsigned char result[SMALL];
  for (unsigned i = 0; i < n; i++) {
    bool equal = type == 'f'   ? ((float *)data[1])[i] == *(float *)number
                 : type == 'd' ? ((double *)data[1])[i] == *(double *)number
                 : type == 'l' ? ((int64_t *)data[1])[i] == *(int64_t *)number
                               : ((int *)data[1])[i] == *(int *)number;
    result[i] = equal != *(const int *)functor;
  }
  copy_bytes(data[0], result, n);
}

static void zero_output(void **data, int count, unsigned n) {
  static const unsigned char none;
  for (int i = 1; i < count; i++)
    if (data[i] == data[0]) return; /* in place */
  fill(data[0], &none, 1, 4 * (size_t)n);
}

static void do_small(const Kernel *kernel, void **arguments) {
  static const unsigned char none;
  unsigned n = *(const unsigned *)arguments[0];
  if (kernel->fill_width)
    fill(*(void **)arguments[2], arguments[1], kernel->fill_width, n); /* of any size: zeros cost nothing */
  else if (kernel->operands < 0) {
    if ((*(uintptr_t *)arguments[0] & 511) == 0) fill(*(void **)arguments[0], &none, 1, 512); /* a block's start */
  } else if (n > SMALL)
    return;
  else if (kernel->compared)
    compare(kernel->compared, arguments[1], arguments[2], n);
  else if (kernel->operands)
    zero_output(arguments[2], kernel->operands, n);
}

/* ---- launches ---- */

static _Atomic uint64_t launches;
EXPORT uint64_t fakecuda_launches(void) { return launches; }

static cudaError_t launch(const void *function, dim3 grid, void **arguments) {
  ready();
  launches++;
  if (!settings.small_kernels && !settings.trace) OK;
  const Kernel *kernel = kernel_of(function);
  say("kernel <<<%u>>> %s", grid.x, kernel ? kernel->name : "?");
  if (settings.small_kernels && kernel && arguments) do_small(kernel, arguments);
  OK;
}

static _Thread_local struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} pushed[8];
static _Thread_local int depth;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  if (depth < 8) {
    pushed[depth].grid = grid, pushed[depth].block = block;
    pushed[depth].shared = shared, pushed[depth].stream = stream;
  }
  depth++;
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (--depth < 8) {
    *grid = pushed[depth].grid, *block = pushed[depth].block;
    *shared = pushed[depth].shared, *(void **)stream = pushed[depth].stream;
  }
  OK;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  OK;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
  return launch(kernel, grid, arguments);
}
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
  return launch(function, grid, arguments);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
  return launch(function, grid, arguments);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function, config->gridDim, arguments);
}

/* ---- what is asked about kernels: constants (README.md, limits) ---- */

static int blocks_that_fit(int threads) {
  ready();
  int fit = threads > 0 ? settings.card.threads_per_sm / threads : 1;
  return fit < 1 ? 1 : fit > settings.card.blocks_per_sm ? settings.card.blocks_per_sm : fit;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  ready();
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = settings.card.binary;
  found->maxDynamicSharedSizeBytes = 49152;
  OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int threads, size_t shared, unsigned flags) {
  *blocks = blocks_that_fit(threads);
  OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t s) {
  *blocks = blocks_that_fit(threads);
  OK;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t shared) {
  *blocks = blocks_that_fit(threads);
  FINE;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction f, const CUlaunchConfig *config) {
  *clusters = 1;
  FINE;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  ready();
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = settings.card.major * 10 + settings.card.minor;
      break;
    default: *value = 0;
  }
  FINE;
}

/* ---- modules and libraries of compiled kernels: any bytes are one, and every name is in it ---- */

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *o, void **v,
                                       unsigned n, enum cudaLibraryOption *lo, void **lv, unsigned ln) {
  *library = (cudaLibrary_t)new_handle();
  OK;
}
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  *kernel = (cudaKernel_t)new_handle();
  OK;
}
EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *o, void **v, unsigned n,
                                  CUlibraryOption *lo, void **lv, unsigned ln) {
  *library = (CUlibrary)new_handle();
  FINE;
}
EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  *kernel = (CUkernel)strdup(name);
  FINE;
}
EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  *function = (CUfunction)kernel;
  FINE;
}
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)new_handle();
  FINE;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) {
  return cuModuleLoadData(m, image);
}
EXPORT CUresult cuModuleLoadFatBinary(CUmodule *m, const void *image) { return cuModuleLoadData(m, image); }
EXPORT CUresult cuModuleLoad(CUmodule *m, const char *file) { return cuModuleLoadData(m, file); }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  FINE;
}
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void **arguments, void **extra) {
  launches++;
  say("module kernel <<<%u>>> %s", x, (const char *)f);
  FINE;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **arguments, void **extra) {
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, 1, 1, 0, c->hStream, arguments, extra);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **arguments) {
  return cuLaunchKernel(f, x, y, z, bx, by, bz, shared, stream, arguments, NULL);
}
