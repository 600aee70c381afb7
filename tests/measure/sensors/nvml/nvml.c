/* A libnvidia-ml.so.1 for tests: NVML's functions over devices whose power is a formula and whose energy its integral.

   The devices, the clock and the faults stand in a file (state.h) that FP8BENCH_TEST_NVML names. The file is mapped
   when the library is first used. Nothing here is NVIDIA's: names and layouts are those of the public interface. */

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#ifdef OLD_DRIVER
#define OLD 1
#else
#define OLD 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define SECOND 1e9
#define PIECE_NS 5000000L
#define NOT_AVAILABLE UINT64_MAX

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    LIBRARY_FAILED = 12, GPU_IS_LOST = 15,
};

/* A device, or one of its MIG instances: what a handle points to. */
typedef struct { int device, instance; } Handle;

static State *state;
static Handle handles[MAX_DEVICES][MAX_INSTANCES + 1];
static const char *names[MAX_FUNCTIONS];

__attribute__((constructor)) static void map_state(void) {
    const char *path = getenv("FP8BENCH_TEST_NVML");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED || ((State *)memory)->size != (int64_t)sizeof(State)) return;
    state = memory;
    for (int d = 0; d < MAX_DEVICES; d++)
        for (int i = 0; i <= MAX_INSTANCES; i++) handles[d][i] = (Handle){d, i - 1};
}

static int64_t now_ns(void) {
    if (state->is_virtual) return state->now_ns;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* ---- the power, and its integral from the clock's zero on ---- */

/* The last change before an instant; NULL before all of them. */
static const Change *change_before(double seconds) {
    int64_t count = *(volatile int64_t *)&state->changes, oldest = count > MAX_CHANGES ? count - MAX_CHANGES + 64 : 0;
    for (int64_t number = count - 1; number >= oldest; number--) {
        const Change *change = &state->change[number % MAX_CHANGES];
        if ((double)change->at_ns / SECOND <= seconds) return change;
    }
    return NULL;
}

static double watts_at(const Device *one, double seconds) {
    double turns = seconds * one->hertz + one->phase;
    switch (one->curve) {
    case SQUARE: return turns - floor(turns) < 0.5 ? one->high : one->low;
    case TOLD: {
        const Change *change = change_before(seconds);
        return change ? change->watts : one->low;
    }
    case SINE: return (one->high + one->low) / 2 + (one->high - one->low) / 2 * sin(2 * M_PI * turns);
    default: return one->high;
    }
}

static double joules_at(const Device *one, double seconds) {
    double swing = one->high - one->low, start = one->phase, turns = seconds * one->hertz + start;
    switch (one->curve) {
    case SQUARE: {
        double high = floor(turns) / 2 + fmin(turns - floor(turns), 0.5);
        double high_before = floor(start) / 2 + fmin(start - floor(start), 0.5);
        return one->low * seconds + swing * (high - high_before) / one->hertz;
    }
    case SINE: {
        double waves = (cos(2 * M_PI * start) - cos(2 * M_PI * turns)) / (2 * M_PI * one->hertz);
        return (one->high + one->low) / 2 * seconds + swing / 2 * waves;
    }
    case TOLD: {
        const Change *change = change_before(seconds);
        if (!change) return one->low * seconds;
        return change->joules + change->watts * (seconds - (double)change->at_ns / SECOND);
    }
    default: return one->high * seconds;
    }
}

/* The same number for the same index, evenly spread from 0 to 1. */
static double spread(uint64_t index) {
    index = (index ^ (index >> 33)) * 0xff51afd7ed558ccdULL;
    index = (index ^ (index >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return (double)((index ^ (index >> 33)) >> 11) / 9007199254740992.0;
}

static int64_t update_ns(const Device *one, int64_t number) {
    return one->offset_ns + number * one->period_ns + (int64_t)((double)one->jitter_ns * spread((uint64_t)number));
}

static uint64_t counter_mj(const Device *one) {
    int64_t now = now_ns(), number = (now - one->offset_ns) / one->period_ns;
    if (update_ns(one, number) > now) number--;
    double joules = joules_at(one, (double)update_ns(one, number) / SECOND);
    int64_t drop = now >= one->drop_at_ns ? one->drop_mj : 0;
    return (uint64_t)(one->base_mj + (int64_t)(joules * 1e3) - drop);
}

static unsigned instant_mw(const Device *one) {
    return (unsigned)(1e3 * watts_at(one, (double)(now_ns() / one->sensor_ns * one->sensor_ns) / SECOND));
}

static unsigned average_mw(const Device *one) {
    double end = (double)(now_ns() / one->sensor_ns * one->sensor_ns) / SECOND;
    double length = (double)one->average_ns / SECOND;
    return (unsigned)(1e3 * (joules_at(one, end) - joules_at(one, end - length)) / length);
}

/* ---- what every call goes through ---- */

static int number_of(const char *function) {
    int number = 0;
    while (number < MAX_FUNCTIONS - 1 && names[number] && strcmp(names[number], function)) number++;
    if (!names[number]) names[number] = function;
    return number;
}

static int struck(const char *function) {
    if (state->is_virtual) state->now_ns += state->call_ns;
    int64_t call = state->calls[number_of(function)]++;
    for (int f = 0; f < state->faults; f++) {
        const Fault *one = &state->fault[f];
        if (strcmp(one->function, function) || call < one->first || call > one->last) continue;
        /* In pieces, because a test may take the delay back. */
        const struct timespec piece = {0, PIECE_NS};
        for (int64_t slept = 0; slept < *(volatile const int64_t *)&one->delay_ns; slept += PIECE_NS)
            nanosleep(&piece, NULL);
        if (one->code) return (int)one->code;
    }
    return SUCCESS;
}

static int refused(const char *function) {
    if (!state) return LIBRARY_FAILED;
    int code = struck(function);
    return code ? code : state->inits <= state->shutdowns ? UNINITIALIZED : SUCCESS;
}

static int refused_for(const char *function, const Handle *handle) {
    int code = refused(function);
    if (code) return code;
    if (!handle) return INVALID_ARGUMENT;
    return now_ns() >= state->device[handle->device].lost_at_ns ? GPU_IS_LOST : SUCCESS;
}

static int text(char *to, unsigned size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

#define BEGIN do { int code_ = refused(__func__); if (code_) return code_; } while (0)
#define BEGIN_DEVICE(handle) \
    do { int code_ = refused_for(__func__, handle); if (code_) return code_; } while (0); \
    const Device *one = &state->device[(handle)->device]; (void)one
/* What NVML does not know of a MIG instance, only of the whole device. */
#define WHOLE_ONLY(handle) do { if ((handle)->instance >= 0) return NOT_SUPPORTED; } while (0)

/* ---- for tests ---- */

EXPORT const char *fp8bench_function(int number) { return names[number]; }
EXPORT double fp8bench_joules(int device, double from, double to) {
    return joules_at(&state->device[device], to) - joules_at(&state->device[device], from);
}
EXPORT double fp8bench_watts(int device, double at) { return watts_at(&state->device[device], at); }

/* ---- the library ---- */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!state) return LIBRARY_FAILED;
    int code = struck(__func__);
    if (!code) state->inits++;
    return code;
}

EXPORT int nvmlShutdown(void) {
    BEGIN;
    state->shutdowns++;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    (void)code;
    return "said by the library of the tests";
}

EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    BEGIN;
    return text(to, size, "570.00.1");
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    BEGIN;
    *version = 12080;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN;
    *count = (unsigned)state->devices;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **handle) {
    BEGIN;
    if (index >= state->devices) return INVALID_ARGUMENT;
    *handle = &handles[index][0];
    return refused_for("lost", *handle);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **handle) {
    BEGIN;
    for (int d = 0; d < state->devices; d++) {
        const Device *one = &state->device[d];
        for (int i = -1; i < one->instances; i++)
            if (!strcmp(uuid, i < 0 ? one->uuid : one->instance[i].uuid)) {
                *handle = &handles[d][i + 1];
                return refused_for("lost", *handle);
            }
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetName(Handle *handle, char *to, unsigned size) {
    BEGIN_DEVICE(handle);
    return text(to, size, one->name);
}

EXPORT int nvmlDeviceGetUUID(Handle *handle, char *to, unsigned size) {
    BEGIN_DEVICE(handle);
    return text(to, size, handle->instance < 0 ? one->uuid : one->instance[handle->instance].uuid);
}

EXPORT int nvmlDeviceGetVbiosVersion(Handle *handle, char *to, unsigned size) {
    BEGIN_DEVICE(handle);
    return text(to, size, "96.00.00.00.01");
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;

EXPORT int nvmlDeviceGetPciInfo_v3(Handle *handle, Pci *pci) {
    BEGIN_DEVICE(handle);
    memset(pci, 0, sizeof *pci);
    sscanf(one->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return text(pci->bus_id, sizeof pci->bus_id, one->pci);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(Handle *handle, unsigned long long *millijoules) {
    BEGIN_DEVICE(handle);
    WHOLE_ONLY(handle);
    *millijoules = counter_mj(one);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(Handle *handle, unsigned *milliwatts) {
    BEGIN_DEVICE(handle);
    WHOLE_ONLY(handle);
    *milliwatts = average_mw(one);
    return SUCCESS;
}

static unsigned long long held_back_ns(const Device *one, int which) {
    return (unsigned long long)(one->violation[which] * (double)now_ns());
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    int type, code;
    union { unsigned ui; unsigned long long ull; } value;
} Field;

static int field_value(const Device *one, Field *field) {
    enum { UNSIGNED = 1, UNSIGNED_LONG_LONG = 3 };
    char name[32];
    snprintf(name, sizeof name, "field %u", field->field);
    field->type = UNSIGNED;
    if (OLD) return NOT_SUPPORTED;
    switch (field->field) {
    case 185: field->value.ui = average_mw(one); break;
    case 186: field->value.ui = instant_mw(one); break;
    case 269: case 270: case 271:
        field->type = UNSIGNED_LONG_LONG;
        field->value.ull = held_back_ns(one, 2 + (int)field->field - 269);
        break;
    default: return NOT_SUPPORTED;
    }
    for (int f = 0; f < state->faults; f++)
        if (!strcmp(state->fault[f].function, name)) return (int)state->fault[f].code;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetFieldValues(Handle *handle, int count, Field *fields) {
    BEGIN_DEVICE(handle);
    WHOLE_ONLY(handle);
    for (int f = 0; f < count; f++) fields[f].code = field_value(one, &fields[f]);
    return SUCCESS;
}

typedef struct { unsigned long long reference_ns, violation_ns; } Violation;

EXPORT int nvmlDeviceGetViolationStatus(Handle *handle, unsigned policy, Violation *violation) {
    BEGIN_DEVICE(handle);
    WHOLE_ONLY(handle);
    if (policy > 1) return NOT_SUPPORTED;
    *violation = (Violation){(unsigned long long)now_ns(), held_back_ns(one, (int)policy)};
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } Memory;

EXPORT int nvmlDeviceGetMemoryInfo(Handle *handle, Memory *memory) {
    BEGIN_DEVICE(handle);
    if (handle->instance >= 0) {
        const Instance *part = &one->instance[handle->instance];
        *memory = (Memory){(unsigned long long)part->memory_total,
                           (unsigned long long)(part->memory_total - part->memory_used),
                           (unsigned long long)part->memory_used};
        return SUCCESS;
    }
    unsigned long long used = (unsigned long long)(one->memory_used + one->memory_reserved);
    *memory = (Memory){(unsigned long long)one->memory_total, (unsigned long long)one->memory_total - used, used};
    return SUCCESS;
}

static int milliwatts(Handle *handle, const char *function, int64_t value, unsigned *to) {
    int code = refused_for(function, handle);
    if (code) return code;
    WHOLE_ONLY(handle);
    *to = (unsigned)value;
    return SUCCESS;
}
#define LIMIT(function, field) \
    EXPORT int function(Handle *handle, unsigned *to) { \
        return milliwatts(handle, #function, handle ? state->device[handle->device].field : 0, to); \
    }
LIMIT(nvmlDeviceGetEnforcedPowerLimit, enforced_cap_mw)
LIMIT(nvmlDeviceGetPowerManagementLimit, cap_mw)
LIMIT(nvmlDeviceGetPowerManagementDefaultLimit, default_cap_mw)

enum { CLOCK_SM = 1, CLOCK_MEM = 2 };

EXPORT int nvmlDeviceGetClockInfo(Handle *handle, unsigned type, unsigned *mhz) {
    BEGIN_DEVICE(handle);
    if (type != CLOCK_SM && type != CLOCK_MEM) return INVALID_ARGUMENT;
    *mhz = (unsigned)(type == CLOCK_SM ? one->sm_mhz : one->memory_mhz);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(Handle *handle, unsigned type, unsigned *mhz) {
    BEGIN_DEVICE(handle);
    if (type != CLOCK_SM && type != CLOCK_MEM) return INVALID_ARGUMENT;
    *mhz = (unsigned)(type == CLOCK_SM ? one->max_sm_mhz : one->max_memory_mhz);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(Handle *handle, unsigned sensor, unsigned *celsius) {
    BEGIN_DEVICE(handle);
    if (sensor) return INVALID_ARGUMENT;
    *celsius = (unsigned)one->celsius;
    return SUCCESS;
}

static int reasons(const char *function, Handle *handle, unsigned long long *mask) {
    int code = refused_for(function, handle);
    if (code) return code;
    const Device *one = &state->device[handle->device];
    int64_t now = now_ns();
    int more = now >= one->more_from_ns && now < one->more_until_ns;
    *mask = (unsigned long long)(one->reasons | (more ? one->more_reasons : 0));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(Handle *handle, unsigned long long *mask) {
    return reasons(__func__, handle, mask);
}

EXPORT int nvmlDeviceGetPersistenceMode(Handle *handle, unsigned *on) {
    BEGIN_DEVICE(handle);
    *on = (unsigned)one->persistence;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEccMode(Handle *handle, unsigned *now, unsigned *pending) {
    BEGIN_DEVICE(handle);
    *now = *pending = (unsigned)one->ecc;
    return SUCCESS;
}

typedef struct { unsigned gpu, memory; } Utilization;

EXPORT int nvmlDeviceGetUtilizationRates(Handle *handle, Utilization *rates) {
    BEGIN_DEVICE(handle);
    WHOLE_ONLY(handle);
    *rates = (Utilization){(unsigned)one->busy_percent, (unsigned)one->memory_busy_percent};
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static int processes(const char *function, Handle *handle, unsigned *count, Process *to) {
    int code = refused_for(function, handle);
    if (code) return code;
    const Device *one = &state->device[handle->device];
    unsigned room = *count;
    *count = (unsigned)one->processes;
    if (room < one->processes) return INSUFFICIENT_SIZE;
    for (int p = 0; p < one->processes; p++) {
        int64_t bytes = one->process_bytes[p];
        to[p] = (Process){(unsigned)one->pid[p], bytes < 0 ? NOT_AVAILABLE : (unsigned long long)bytes, UINT32_MAX,
                          UINT32_MAX};
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(Handle *handle, unsigned *count, Process *to) {
    return processes(__func__, handle, count, to);
}

/* ---- MIG ---- */

EXPORT int nvmlDeviceGetMigMode(Handle *handle, unsigned *now, unsigned *pending) {
    BEGIN_DEVICE(handle);
    if (one->mig < 0) return NOT_SUPPORTED;
    *now = *pending = (unsigned)one->mig;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(Handle *handle, unsigned *count) {
    BEGIN_DEVICE(handle);
    *count = one->mig > 0 ? MAX_INSTANCES : 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Handle *handle, unsigned index, Handle **instance) {
    BEGIN_DEVICE(handle);
    if (index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (one->mig < 1 || index >= one->instances) return NOT_FOUND;
    *instance = &handles[handle->device][index + 1];
    return SUCCESS;
}

/* ---- what older drivers lack ---- */

#ifndef OLD_DRIVER

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Handle *handle, unsigned long long *mask) {
    return reasons(__func__, handle, mask);
}

typedef struct { unsigned version, sensor; int celsius; } Temperature;

EXPORT int nvmlDeviceGetTemperatureV(Handle *handle, Temperature *temperature) {
    BEGIN_DEVICE(handle);
    if (temperature->version != (sizeof(Temperature) | 1u << 24)) return 25;
    if (temperature->sensor) return INVALID_ARGUMENT;
    temperature->celsius = (int)one->celsius;
    return SUCCESS;
}

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

EXPORT int nvmlDeviceGetMemoryInfo_v2(Handle *handle, MemoryV2 *memory) {
    BEGIN_DEVICE(handle);
    if (memory->version != (sizeof(MemoryV2) | 2u << 24)) return 25;
    const Instance *part = handle->instance >= 0 ? &one->instance[handle->instance] : NULL;
    memory->total = (unsigned long long)(part ? part->memory_total : one->memory_total);
    memory->reserved = (unsigned long long)(part ? 0 : one->memory_reserved);
    memory->used = (unsigned long long)(part ? part->memory_used : one->memory_used);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Handle *handle, unsigned *count, Process *to) {
    return processes(__func__, handle, count, to);
}

#endif
