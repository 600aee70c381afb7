/* Faults of a GPU, planted between torch and the CUDA runtime: preloaded, it passes every call on but the one that FAULT names.

   FAULT=WHERE:N:CODE, at the Nth call of that kind in a process, once as long as the file of FAULT_ONCE is there.
   launch   told late: the kernel is taken, and every call after it gives the code, as after an assert in it
   gone     the same, and where the file is, no other process can open the device
   malloc   two calls give the code: torch empties its cache after the first
   create   cuBLAS cannot begin
   product  cublasLt refuses a product */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int E;
typedef struct { unsigned x, y, z; } dim3;
typedef void *P;

static char where[16];
static long number;
static int code, armed, ready;
static atomic_long seen;
static atomic_int broken;

static void begin(void) {
    if (ready) return;
    ready = 1;
    const char *fault = getenv("FAULT"), *once = getenv("FAULT_ONCE");
    armed = fault && once && sscanf(fault, "%15[a-z]:%ld:%d", where, &number, &code) == 3 && access(once, F_OK) != 0;
}

/* The code if this call is to fail, else 0. */
static E struck(const char *kind, long calls) {
    begin();
    if (!armed || strcmp(kind, where) != 0) return 0;
    long at = ++seen;
    if (at < number || at >= number + calls) return 0;
    fclose(fopen(getenv("FAULT_ONCE"), "w"));
    return code;
}

static int gone(void) {
    begin();
    return !armed && strncmp(getenv("FAULT") ? getenv("FAULT") : "", "gone", 4) == 0;
}

static void launched(void) {
    E told = struck("launch", 1);
    if (!told) told = struck("gone", 1);
    if (told) broken = told;
}

#define NEXT(name) P next = dlsym(RTLD_NEXT, #name)
#define PLAIN(name, types, names) \
    E name types { NEXT(name); if (broken) return broken; return ((E(*) types)next) names; }

PLAIN(cudaDeviceSynchronize, (void), ())
PLAIN(cudaStreamSynchronize, (P s), (s))
PLAIN(cudaEventSynchronize, (P e), (e))
PLAIN(cudaEventQuery, (P e), (e))
PLAIN(cudaEventRecord, (P e, P s), (e, s))
PLAIN(cudaEventRecordWithFlags, (P e, P s, unsigned f), (e, s, f))
PLAIN(cudaMemcpyAsync, (P d, P s, size_t n, int k, P stream), (d, s, n, k, stream))
PLAIN(cudaMemsetAsync, (P d, int v, size_t n, P stream), (d, v, n, stream))
PLAIN(cudaFree, (P p), (p))
PLAIN(cudaMemGetInfo, (P f, P t), (f, t))

#define LAUNCH(name, types, names) \
    E name types { NEXT(name); if (broken) return broken; launched(); return ((E(*) types)next) names; }

LAUNCH(cudaLaunchKernel, (P f, dim3 g, dim3 b, P a, size_t m, P s), (f, g, b, a, m, s))
LAUNCH(__cudaLaunchKernel, (P f, dim3 g, dim3 b, P a, size_t m, P s), (f, g, b, a, m, s))
LAUNCH(cudaLaunchKernelExC, (P c, P f, P a), (c, f, a))

E cudaMalloc(P p, size_t n) {
    NEXT(cudaMalloc);
    E told = broken ? broken : struck("malloc", 2);
    return told ? told : ((E(*)(P, size_t))next)(p, n);
}

E cudaSetDevice(int d) {
    NEXT(cudaSetDevice);
    if (gone()) return broken ? broken : 100; /* no device is detected */
    return broken ? broken : ((E(*)(int))next)(d);
}

E cudaGetLastError(void) {
    NEXT(cudaGetLastError);
    return broken ? broken : ((E(*)(void))next)();
}

E cudaPeekAtLastError(void) {
    NEXT(cudaPeekAtLastError);
    return broken ? broken : ((E(*)(void))next)();
}

const char *cudaGetErrorString(E e) {
    NEXT(cudaGetErrorString);
    switch (e) { /* as the runtime words them */
    case 2: return "out of memory";
    case 100: return "no CUDA-capable device is detected";
    case 214: return "uncorrectable ECC error encountered";
    case 700: return "an illegal memory access was encountered";
    case 710: return "device-side assert triggered";
    case 719: return "unspecified launch failure";
    }
    return ((const char *(*)(E))next)(e);
}

E cublasCreate_v2(P h) {
    NEXT(cublasCreate_v2);
    E told = broken ? 1 : struck("create", 1);
    return told ? told : ((E(*)(P))next)(h);
}

E cublasLtMatmul(P h, P d, P al, P a, P la, P b, P lb, P be, P c, P lc, P o, P lo, P algo, P w, size_t n, P s) {
    NEXT(cublasLtMatmul);
    E told = broken ? 13 : struck("product", 1);
    return told ? told : ((E(*)(P, P, P, P, P, P, P, P, P, P, P, P, P, P, size_t, P))next)(
        h, d, al, a, la, b, lb, be, c, lc, o, lo, algo, w, n, s);
}
