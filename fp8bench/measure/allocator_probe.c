/* Intercepts a process's calls of its memory allocator; counts and times them while it is switched on.

   CountingWorker (handle.py) loads it by LD_PRELOAD. dlsym allocates memory before the real allocator is known: that
   memory comes from a small block that is never freed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void (*real_free)(void *);
static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_aligned_alloc)(size_t, size_t);
static void *(*real_memalign)(size_t, size_t);

static char early_block[1 << 14] __attribute__((aligned(64)));
static size_t early_used;
static atomic_int switched_on;
static _Atomic uint64_t allocations, releases, bytes, nanoseconds;

static uint64_t now(void) {
  struct timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return (uint64_t)moment.tv_sec * 1000000000u + (uint64_t)moment.tv_nsec;
}

static void *allocate_early(size_t size) {
  size_t offset = early_used;
  early_used += (size + 63) & ~(size_t)63;
  return early_used <= sizeof early_block ? early_block + offset : NULL;
}

static int is_early(void *pointer) {
  return (char *)pointer >= early_block && (char *)pointer < early_block + sizeof early_block;
}

__attribute__((constructor)) static void resolve(void) {
  static int resolving;
  if (resolving) return;
  resolving = 1;
  real_calloc = dlsym(RTLD_NEXT, "calloc");
  real_realloc = dlsym(RTLD_NEXT, "realloc");
  real_free = dlsym(RTLD_NEXT, "free");
  real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
  real_memalign = dlsym(RTLD_NEXT, "memalign");
  real_malloc = dlsym(RTLD_NEXT, "malloc");
}

static uint64_t start_call(void) {
  if (!real_malloc) resolve();
  return atomic_load_explicit(&switched_on, memory_order_relaxed) ? now() : 0;
}

static void end_call(uint64_t started, size_t size, int allocates) {
  if (!started) return;
  atomic_fetch_add_explicit(&nanoseconds, now() - started, memory_order_relaxed);
  atomic_fetch_add_explicit(allocates ? &allocations : &releases, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&bytes, size, memory_order_relaxed);
}

void *malloc(size_t size) {
  uint64_t started = start_call();
  if (!real_malloc) return allocate_early(size);
  void *memory = real_malloc(size);
  end_call(started, size, 1);
  return memory;
}

void *calloc(size_t count, size_t size) {
  uint64_t started = start_call();
  if (!real_malloc) return allocate_early(count * size);
  void *memory = real_calloc(count, size);
  end_call(started, count * size, 1);
  return memory;
}

void *realloc(void *pointer, size_t size) {
  uint64_t started = start_call();
  if (!real_malloc || is_early(pointer)) {
    void *moved = real_malloc ? real_malloc(size) : allocate_early(size);
    size_t available = pointer ? (size_t)(early_block + sizeof early_block - (char *)pointer) : 0;
    if (moved && pointer) memcpy(moved, pointer, size < available ? size : available);
    return moved;
  }
  void *memory = real_realloc(pointer, size);
  end_call(started, size, 1);
  return memory;
}

void free(void *pointer) {
  if (!pointer || is_early(pointer)) return;
  uint64_t started = start_call();
  real_free(pointer);
  end_call(started, 0, 0);
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
  uint64_t started = start_call();
  int failed = real_posix_memalign(memory, alignment, size);
  end_call(started, size, 1);
  return failed;
}

void *aligned_alloc(size_t alignment, size_t size) {
  uint64_t started = start_call();
  void *memory = real_aligned_alloc(alignment, size);
  end_call(started, size, 1);
  return memory;
}

void *memalign(size_t alignment, size_t size) {
  uint64_t started = start_call();
  void *memory = real_memalign(alignment, size);
  end_call(started, size, 1);
  return memory;
}

void fp8bench_probe_switch(int to) { atomic_store(&switched_on, to); }

void fp8bench_probe_read(uint64_t *into) {
  into[0] = atomic_load(&allocations);
  into[1] = atomic_load(&releases);
  into[2] = atomic_load(&bytes);
  into[3] = atomic_load(&nanoseconds);
}

/* Returns the nanoseconds that would be counted for this number of empty calls: the cost of reading the clock. */
uint64_t fp8bench_probe_cost(int times) {
  uint64_t total = 0;
  for (int call = 0; call < times; call++) {
    uint64_t started = now();
    total += now() - started;
  }
  return total;
}
