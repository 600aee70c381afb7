/* What the library is told and what it tells: one struct in a file that it and a test map at the same time.

   library.py mirrors it field by field. Only 8-byte numbers and texts of whole 8 bytes, so that nothing is padded. */

#include <stdint.h>

#define MAX_DEVICES 4
#define MAX_INSTANCES 4
#define MAX_PROCESSES 4
#define MAX_FAULTS 4
#define MAX_FUNCTIONS 64
#define MAX_VIOLATIONS 5
#define MAX_CHANGES 32768
#define FOREVER INT64_MAX

/* The power curves: what the energy is the exact integral of. TOLD is what whoever runs on the device says it takes. */
enum { CONSTANT, SQUARE, SINE, TOLD };

typedef struct {
    char uuid[96];
    int64_t memory_total, memory_used;
} Instance;

typedef struct {
    char name[96], uuid[96], pci[32];
    /* Power over the time of the clock: from `low` to `high` watts, `hertz` times a second, shifted by `phase` turns. */
    int64_t curve;
    double low, high, hertz, phase;
    /* The energy counter changes every `period_ns`, up to `jitter_ns` late, first at `offset_ns`; it falls by
       `drop_mj` at `drop_at_ns`. */
    int64_t period_ns, jitter_ns, offset_ns, base_mj, drop_at_ns, drop_mj;
    /* The power sensor has a new value every `sensor_ns`; the average is over `average_ns`. */
    int64_t sensor_ns, average_ns;
    /* From then on every call about it says 'GPU is lost'. */
    int64_t lost_at_ns;
    /* Clocks are held back for `reasons`, and from one instant to another for `more_reasons` too. */
    int64_t reasons, more_reasons, more_from_ns, more_until_ns;
    int64_t sm_mhz, memory_mhz, max_sm_mhz, max_memory_mhz, celsius;
    int64_t cap_mw, default_cap_mw, enforced_cap_mw;
    int64_t ecc, mig, persistence, busy_percent, memory_busy_percent;
    int64_t memory_total, memory_used, memory_reserved;
    /* Share of the time that a limit (power, thermal, then fields 269, 270, 271) holds the clocks back. */
    double violation[MAX_VIOLATIONS];
    int64_t processes, pid[MAX_PROCESSES], process_bytes[MAX_PROCESSES];
    int64_t instances;
    Instance instance[MAX_INSTANCES];
} Device;

typedef struct {
    /* A function's name, or 'field N' for one value of nvmlDeviceGetFieldValues. */
    char function[64];
    /* Calls `first` to `last` of that function (from 0) take `delay_ns` longer, and return `code` unless it is 0. */
    int64_t code, first, last, delay_ns;
} Fault;

/* From `at_ns` on the power is `watts`; before that, since the clock's zero, `joules` were taken. */
typedef struct { int64_t at_ns; double joules, watts; } Change;

typedef struct {
    int64_t size;
    /* With a virtual clock time is `now_ns`, and every call takes `call_ns` of it. */
    int64_t is_virtual, now_ns, call_ns;
    int64_t inits, shutdowns;
    int64_t devices, faults;
    Device device[MAX_DEVICES];
    Fault fault[MAX_FAULTS];
    int64_t calls[MAX_FUNCTIONS];
    /* Those of the curve TOLD, the latest ones of so many; until the first one the power is `low`. */
    int64_t changes;
    Change change[MAX_CHANGES];
} State;
