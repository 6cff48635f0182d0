/* Streams, events and graphs. Nothing runs, so whatever is waited for has happened: see also stubs.txt. */
#include "fake.h"

typedef struct {
  int priority;
  uint64_t capture; /* the id of the capture under way; 0: none */
  double recorded_ms;
} Handle;

void *new_handle(void) { return calloc(1, sizeof(Handle)); }

static Handle *made_by_us(const void *stream) { /* the default streams are small numbers */
  return (uintptr_t)stream > 16 ? (Handle *)stream : NULL;
}

/* ---- streams ---- */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Handle *made = new_handle();
  made->priority = priority;
  *stream = (cudaStream_t)made;
  OK;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(made_by_us(stream));
  OK;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = made_by_us(stream) ? made_by_us(stream)->priority : 0;
  OK;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
  call(stream, cudaSuccess, data);
  OK;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  call(data);
  OK;
}

/* ---- events ---- */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)new_handle();
  OK;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  OK;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ((Handle *)event)->recorded_ms = now_ms();
  OK;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  double passed = ((Handle *)end)->recorded_ms - ((Handle *)start)->recorded_ms;
  *ms = passed > 1e-3 ? (float)passed : 1e-3f; /* never 0: benchmarks divide by it */
  OK;
}

/* ---- captures and graphs: a graph is empty, as nothing that was captured would do anything ---- */

static _Atomic uint64_t captures;
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (!made_by_us(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  ((Handle *)stream)->capture = ++captures;
  OK;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  ((Handle *)stream)->capture = 0;
  *graph = (cudaGraph_t)new_handle();
  OK;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  Handle *ours = made_by_us(stream);
  *status = ours && ours->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  OK;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = made_by_us(stream) ? made_by_us(stream)->capture : 0;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  OK;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  *made = (cudaGraphExec_t)new_handle();
  OK;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *m, cudaGraph_t g, unsigned long long f) {
  return cudaGraphInstantiateWithFlags(m, g, f);
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  OK;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  free(graph);
  OK;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = 1; /* torch warns of an empty graph */
  OK;
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  enum cudaStreamCaptureStatus found;
  cudaStreamIsCapturing(stream, &found);
  *status = (CUstreamCaptureStatus)found;
  FINE;
}
