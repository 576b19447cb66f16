/* A library that answers like NVIDIA's NVML, for tests on machines without a GPU.

PLAYED_DRIVER is the driver's version; without it the library fails to start, as it does without a
loaded kernel module. PLAYED_GPUS lists the devices as memory_gb:mig:numa, separated by commas;
a negative number stands for "not supported". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };
typedef struct { long memory_gb; int mig, numa; } Device;
static Device devices[16];
static int num_devices;

int nvmlInitWithFlags(unsigned flags) {
    char *list = getenv("PLAYED_GPUS"), copy[512] = "", *item, *rest = copy;
    (void)flags;
    if (!getenv("PLAYED_DRIVER")) return DRIVER_NOT_LOADED;
    if (list) strncpy(copy, list, sizeof copy - 1);
    for (num_devices = 0; (item = strtok_r(rest, ",", &rest)); num_devices++) {
        Device *d = &devices[num_devices];
        sscanf(item, "%ld:%d:%d", &d->memory_gb, &d->mig, &d->numa);
    }
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "%s", getenv("PLAYED_DRIVER")); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = num_devices; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &devices[index]; return OK; }
int nvmlDeviceGetName(void *d, char *text, unsigned n) { snprintf(text, n, "Played %ld GB", ((Device *)d)->memory_gb); return OK; }
int nvmlDeviceGetUUID(void *d, char *text, unsigned n) { snprintf(text, n, "GPU-%ld", (long)((Device *)d - devices)); return OK; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *total) { *total = (unsigned long long)((Device *)d)->memory_gb << 30; return OK; }
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) {
    if (((Device *)d)->mig < 0) return NOT_SUPPORTED;
    *now = *later = ((Device *)d)->mig;
    return OK;
}
int nvmlDeviceGetNumaNodeId(void *d, int *node) { *node = ((Device *)d)->numa; return *node < 0 ? NOT_SUPPORTED : OK; }
