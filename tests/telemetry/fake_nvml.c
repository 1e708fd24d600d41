/* A libnvidia-ml.so.1 that plays back the profile in the file $FAKE_NVML, for tests.
 *
 *   device GPU-a            a device begins; "device GPU-a mig" for one that MIG slices, "device GPU-a lost" for one
 *                           that fell off the bus, "device GPU-a denied" for one that this process may not use: no
 *                           call gets its handle
 *   energy 1000 1500 !15    what the first, second, … call returns; the last one repeats
 *   power ~40:250000        preceded by "~40:", the call takes 40 ms; "!15" fails with that error code
 *
 * Names: energy (mJ), instant and power (mW), utilization (%), memory (bytes), clock (MHz), temperature (C),
 * throttle (bits), processes (that compute on it), cores (bits: those of its NUMA node), mode (compute mode), peers
 * (status of its access to all others), name (one word). What a device does not name is not supported. With -DOLD_DRIVER newer functions are absent.
 * "handle !15" is what a look for it by its UUID returns, "count !999", of the first device, what counting them does.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, MAX_VALUES = 64 };

typedef struct { int error, slow_ms; unsigned long long number; } Value;
typedef struct { char name[16]; int count, next; Value values[MAX_VALUES]; } Row;
typedef struct { char uuid[96], name[96]; int mig, lost, denied, rows; Row row[12]; } Device;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; int type, result; union { double d; unsigned u; unsigned long long ull; } value; } FieldValue;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;

static Device devices[8];
static int count;

static Value parse(const char *text) {
  Value value = {0};
  if (*text == '~') {
    value.slow_ms = atoi(text + 1);
    text = strchr(text, ':') + 1;
  }
  if (*text == '!') value.error = atoi(text + 1);
  else value.number = strtoull(text, NULL, 10);
  return value;
}

static void parse_line(char *line) {
  char *word = strtok(line, " \n");
  if (!word) return;
  if (!strcmp(word, "device")) {
    Device *device = &devices[count++];
    memset(device, 0, sizeof *device);
    strcpy(device->uuid, strtok(NULL, " \n"));
    word = strtok(NULL, " \n");
    device->mig = word && !strcmp(word, "mig");
    device->lost = word && !strcmp(word, "lost");
    device->denied = word && !strcmp(word, "denied");
    return;
  }
  Device *device = &devices[count - 1];
  if (!strcmp(word, "name")) {
    strcpy(device->name, strtok(NULL, " \n"));
    return;
  }
  Row *row = &device->row[device->rows++];
  strcpy(row->name, word);
  while ((word = strtok(NULL, " \n"))) row->values[row->count++] = parse(word);
}

static int next(Device *device, const char *name, unsigned long long *number) {
  for (int i = 0; i < device->rows; i++) {
    Row *row = &device->row[i];
    if (strcmp(row->name, name)) continue;
    Value value = row->values[row->next];
    if (row->next + 1 < row->count) row->next++;
    struct timespec pause = {value.slow_ms / 1000, value.slow_ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
    *number = value.number;
    return value.error;
  }
  return NOT_SUPPORTED;
}

static int next_unsigned(Device *device, const char *name, unsigned *number) {
  unsigned long long found = 0;
  int error = next(device, name, &found);
  *number = (unsigned)found;
  return error;
}

int nvmlInitWithFlags(unsigned flags) {
  char line[4096];
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  (void)flags;
  if (!file) return DRIVER_NOT_LOADED;
  count = 0;
  while (fgets(line, sizeof line, file)) parse_line(line);
  fclose(file);
  return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  const char *cuda = getenv("FAKE_CUDA");  /* 12080: CUDA 12.8 */
  if (!cuda) return NOT_SUPPORTED;
  *version = atoi(cuda);
  return SUCCESS;
}

static int call(Device *device, const char *name) {
  unsigned long long number;
  int error = next(device, name, &number);
  return error == NOT_SUPPORTED ? SUCCESS : error;
}

int nvmlDeviceGetCount_v2(unsigned *found) { *found = (unsigned)count; return call(&devices[0], "count"); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
  if (index >= (unsigned)count) return INVALID_ARGUMENT;
  if (devices[index].lost) return GPU_IS_LOST;
  if (devices[index].denied) return NO_PERMISSION;
  *device = &devices[index];
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
  for (int i = 0; i < count; i++)
    if (!strcmp(devices[i].uuid, uuid)) { *device = &devices[i]; return call(*device, "handle"); }
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
  snprintf(uuid, length, "%s", device->uuid);
  return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
  snprintf(name, length, "%s", *device->name ? device->name : "Imaginary GPU");
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *length, void *processes) {
  unsigned running = 0;
  int error = next_unsigned(device, "processes", &running);
  (void)processes;
  if (error == SUCCESS && running > *length) error = INSUFFICIENT_SIZE;  /* the caller asks again with more room */
  *length = running;
  return error;
}

int nvmlDeviceGetCpuAffinity(Device *device, unsigned size, unsigned long long *words) {
  memset(words, 0, size * sizeof *words);
  return next(device, "cores", words);
}

int nvmlDeviceGetComputeMode(Device *device, unsigned *mode) { return next_unsigned(device, "mode", mode); }

int nvmlDeviceGetP2PStatus(Device *device, Device *other, int index, unsigned *status) {
  (void)other;
  return index ? INVALID_ARGUMENT : next_unsigned(device, "peers", status);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *mw) { return next_unsigned(device, "power", mw); }

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *found) {
  found->memory = 0;
  return next_unsigned(device, "utilization", &found->gpu);
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
  int error = next(device, "memory", &memory->used);
  memory->total = 80ULL << 30;
  memory->free = memory->total - memory->used;
  return error;
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *mhz) {
  return type == 1 ? next_unsigned(device, "clock", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
  (void)sensor;
  return next_unsigned(device, "temperature", celsius);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
  return next(device, "throttle", reasons);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *mj) { return next(device, "energy", mj); }

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
  return next(device, "throttle", reasons);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
  *current = *pending = (unsigned)device->mig;
  return SUCCESS;
}

int nvmlDeviceGetFieldValues(Device *device, int length, FieldValue *values) {
  for (int i = 0; i < length; i++) {
    values[i].type = 1;
    values[i].result = values[i].field == 186 ? next_unsigned(device, "instant", &values[i].value.u) : NOT_SUPPORTED;
  }
  return SUCCESS;
}
#endif
