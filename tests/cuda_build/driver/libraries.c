/* cuBLAS, cuBLASLt and NCCL: handles, and what their callers read back. All that computes is in stubs.txt. */
#include "fake.h"

#include <unistd.h>

static int make(void **made) {
  *made = calloc(1, 512);
  return 0;
}
static int unmake(void *made) {
  free(made);
  return 0;
}

/* ---- cuBLAS ---- */

typedef struct {
  int pointer_mode, math_mode;
} Blas;
EXPORT int cublasCreate_v2(void **made) { return make(made); }
EXPORT int cublasDestroy_v2(void *blas) { return unmake(blas); }
EXPORT int cublasGetPointerMode_v2(Blas *blas, int *mode) {
  *mode = blas->pointer_mode;
  return 0;
}
EXPORT int cublasSetPointerMode_v2(Blas *blas, int mode) {
  blas->pointer_mode = mode;
  return 0;
}
EXPORT int cublasGetMathMode(Blas *blas, int *mode) {
  *mode = blas->math_mode;
  return 0;
}
EXPORT int cublasSetMathMode(Blas *blas, int mode) {
  blas->math_mode = mode;
  return 0;
}

/* ---- cuBLASLt: one algorithm for every product, which needs no workspace ---- */

typedef struct { /* cublasLtMatmulHeuristicResult_t */
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} Heuristic;
EXPORT size_t cublasLtGetVersion(void) { return 130101; }
EXPORT int cublasLtCreate(void **made) { return make(made); }
EXPORT int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return make(made); }
EXPORT int cublasLtMatmulDescDestroy(void *made) { return unmake(made); }
EXPORT int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t ld) { return make(made); }
EXPORT int cublasLtMatrixLayoutDestroy(void *made) { return unmake(made); }
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *made) { return unmake(made); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *blas, void *d, void *a, void *b, void *c, void *e, void *preference,
                                          int wanted, Heuristic *results, int *found) {
  memset(results, 0, sizeof *results);
  results->waves = 1;
  *found = 1;
  return 0;
}

/* ---- NCCL: every rank is taken to hold what this one holds; small results are made, as DDP compares shapes ---- */

typedef struct {
  int ranks, rank;
} Comm;
typedef struct {
  char bytes[128];
} CommId;
static const int BYTES_OF[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */

static int join(void **made, int ranks, int rank) {
  Comm *comm = calloc(1, sizeof *comm);
  *comm = (Comm){ranks, rank};
  *made = comm;
  return 0;
}
EXPORT int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}
EXPORT int ncclGetUniqueId(CommId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "fakecuda %d", (int)getpid());
  return 0;
}
EXPORT const char *ncclGetErrorString(int error) { return error ? "unknown error" : "no error"; }
EXPORT const char *ncclGetLastError(void *comm) { return ""; }
EXPORT int ncclCommInitRank(void **comm, int ranks, CommId id, int rank) { return join(comm, ranks, rank); }
EXPORT int ncclCommInitRankConfig(void **comm, int ranks, CommId id, int rank, void *config) { return join(comm, ranks, rank); }
EXPORT int ncclCommInitRankScalable(void **comm, int ranks, int rank, int ids, CommId *id, void *config) { return join(comm, ranks, rank); }
EXPORT int ncclCommSplit(Comm *comm, int color, int key, void **made, void *config) {
  *made = NULL;
  return color < 0 ? 0 : join(made, comm->ranks, comm->rank);
}
EXPORT int ncclCommCount(Comm *comm, int *count) {
  *count = comm->ranks;
  return 0;
}
EXPORT int ncclCommUserRank(Comm *comm, int *rank) {
  *rank = comm->rank;
  return 0;
}
EXPORT int ncclCommGetAsyncError(void *comm, int *error) {
  *error = 0;
  return 0;
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  size_t bytes = count * BYTES_OF[type % 12];
  for (int i = 0; bytes <= MIB && i < comm->ranks; i++) copy_bytes((char *)to + i * bytes, from, bytes);
  return 0;
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  size_t bytes = count * BYTES_OF[type % 12];
  if (from != to && bytes <= MIB) copy_bytes(to, from, bytes);
  return 0;
}
