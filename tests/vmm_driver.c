// The calls of a CUDA driver by which processes share memory, in host memory, by the rules that CUDA documents: memory is a
// memfd, a shareable handle a descriptor of it, an address range a mapping that cannot be touched before access to it was
// given; an IPC handle names a memfd of another process, and is opened in a context that is current.
//
// Built as libcuda.so.1 for a process that has no GPU. Where CUDA's own header is here the compiler checks that each
// call is declared as NVIDIA declares it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if __has_include(<cuda.h>)
#include <cuda.h>
#else
#include <stddef.h>
typedef int CUresult, CUdevice, CUpointer_attribute, CUmemAllocationHandleType;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct CUctx_st* CUcontext;
typedef struct CUevent_st* CUevent;
typedef struct CUstream_st* CUstream;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int type, requestedHandleTypes; CUmemLocation location; void* win32HandleMetaData; char flags[8]; } CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuEventDestroy cuEventDestroy_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuMemFree cuMemFree_v2
#define cuDeviceGetUuid cuDeviceGetUuid_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuIpcOpenMemHandle cuIpcOpenMemHandle_v2
#endif

enum { MOST = 64, GPUS = 2, GRAIN = 2 << 20, OK = 0, INVALID = 1, NOT_INITIALIZED = 3, NO_CONTEXT = 201, INJECTED = 999 };

struct Memory { int fd; size_t size; int refs; };
struct Range { char* at; size_t size; int memory; int access; };

static struct Memory memories[MOST];
static struct Range ranges[MOST];
struct Alloc { char* at; size_t size; int fd; int refs; struct Name { int pid, fd; size_t size; } name; };

static struct Alloc allocs[MOST];  // of cuMemAlloc, and of other processes by their IPC handles
static int contexts[GPUS];
static __thread CUcontext current[8];
static __thread int depth;
static int ready;
static char failing[64];

#define NEED_CONTEXT() \
  if (!depth) return NO_CONTEXT

#define ENTER(name)                                        \
  if (!ready) return NOT_INITIALIZED;                      \
  if (!strcmp(failing, name)) return failing[0] = 0, INJECTED

// -- what tests ask ---------------------------------------------------------------------------------------------------

void vmm_fail(const char* name) { strncpy(failing, name, sizeof failing - 1); }

int vmm_left(void) {
  int left = 0;
  for (int n = 0; n < MOST; n++) left += (memories[n].refs > 0) + (ranges[n].at != NULL) + (allocs[n].refs > 0);
  return left;
}

// -- the driver -------------------------------------------------------------------------------------------------------

static int new_memory(int fd) {
  struct stat about;
  if (fstat(fd, &about) || about.st_size % GRAIN || !about.st_size) return -1;
  for (int n = 0; n < MOST; n++)
    if (!memories[n].refs) return memories[n] = (struct Memory){fd, (size_t)about.st_size, 1}, n;
  return -1;
}

static struct Memory* memory_of(CUmemGenericAllocationHandle handle) {
  return handle && handle <= MOST && memories[handle - 1].refs > 0 ? &memories[handle - 1] : NULL;
}

static void let_go(struct Memory* memory) {
  if (!--memory->refs) close(memory->fd);
}

static struct Range* range_of(CUdeviceptr at) {
  for (int n = 0; n < MOST; n++)
    if (ranges[n].at && at >= (CUdeviceptr)ranges[n].at && at < (CUdeviceptr)ranges[n].at + ranges[n].size) return &ranges[n];
  return NULL;
}

CUresult cuInit(unsigned int flags) {
  ready = 1;
  return flags ? INVALID : OK;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = (int)error == INJECTED ? "injected" : (int)error == NOT_INITIALIZED ? "not initialized" : (int)error == NO_CONTEXT ? "invalid device context" : "invalid argument";
  return OK;
}

CUresult cuDeviceGetCount(int* count) {
  *count = GPUS;
  return OK;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= GPUS ? INVALID : OK;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  *uuid = (CUuuid){{(char)(0x90 + device), 1, 0, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11, 12, 0}};
  return device < 0 || device >= GPUS ? INVALID : OK;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  if (device < 0 || device >= GPUS) return INVALID;
  *context = (CUcontext)&contexts[device];
  return OK;
}

static int gpu_of(CUcontext context) {
  for (int n = 0; n < GPUS; n++)
    if (context == (CUcontext)&contexts[n]) return n;
  return -1;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  ENTER("cuCtxPushCurrent_v2");
  if (gpu_of(context) < 0 || depth == 8) return INVALID;
  current[depth++] = context;
  return OK;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  ENTER("cuCtxPopCurrent_v2");
  NEED_CONTEXT();
  *context = current[--depth];
  return OK;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (gpu_of(context) < 0) return INVALID;
  current[depth ? depth - 1 : depth++] = context;
  return OK;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = depth ? current[depth - 1] : NULL;
  return OK;
}

static int dropped;

CUresult cuEventDestroy(CUevent event) {
  NEED_CONTEXT();
  dropped++;
  return event ? OK : INVALID;
}

CUresult cuStreamDestroy(CUstream stream) {
  NEED_CONTEXT();
  dropped++;
  return stream ? OK : INVALID;
}

int vmm_dropped(void) { return dropped; }

// -- memory with IPC handles ------------------------------------------------------------------------------------------

static struct Alloc* alloc_of(CUdeviceptr at) {
  for (int n = 0; n < MOST; n++)
    if (allocs[n].refs && at >= (CUdeviceptr)allocs[n].at && at < (CUdeviceptr)allocs[n].at + allocs[n].size) return &allocs[n];
  return NULL;
}

static struct Alloc* new_alloc(int fd, size_t size, struct Name name) {
  char* at = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  for (int n = 0; n < MOST && at != MAP_FAILED; n++)
    if (!allocs[n].refs) return allocs[n] = (struct Alloc){at, size, fd, 1, name}, &allocs[n];
  return NULL;
}

CUresult cuMemAlloc(CUdeviceptr* at, size_t size) {
  NEED_CONTEXT();
  int fd = memfd_create("ipc", MFD_CLOEXEC);
  struct Alloc* made = ftruncate(fd, (off_t)size) ? NULL : new_alloc(fd, size, (struct Name){getpid(), fd, size});
  *at = made ? (CUdeviceptr)made->at : 0;
  return made ? OK : INVALID;
}

static void let_go_of(struct Alloc* alloc) {
  if (!--alloc->refs) munmap(alloc->at, alloc->size), close(alloc->fd);
}

CUresult cuMemFree(CUdeviceptr at) {
  NEED_CONTEXT();
  struct Alloc* alloc = alloc_of(at);
  if (!alloc || (CUdeviceptr)alloc->at != at || alloc->name.pid != getpid()) return INVALID;
  let_go_of(alloc);
  return OK;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  ENTER("cuIpcGetMemHandle");
  NEED_CONTEXT();
  struct Alloc* alloc = alloc_of(at);
  if (!alloc || (CUdeviceptr)alloc->at != at || alloc->name.pid != getpid()) return INVALID;
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &alloc->name, sizeof alloc->name);
  return OK;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* at, CUipcMemHandle handle, unsigned int flags) {
  ENTER("cuIpcOpenMemHandle_v2");
  struct Name name;
  char path[64];
  memcpy(&name, &handle, sizeof name);
  if (flags != 1) return INVALID;
  if (!depth || name.pid == getpid()) return NO_CONTEXT;
  for (int n = 0; n < MOST; n++)
    if (allocs[n].refs && !memcmp(&allocs[n].name, &name, sizeof name)) return allocs[n].refs++, *at = (CUdeviceptr)allocs[n].at, OK;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
  struct Alloc* made = new_alloc(open(path, O_RDWR | O_CLOEXEC), name.size, name);
  *at = made ? (CUdeviceptr)made->at : 0;
  return made ? OK : INVALID;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  ENTER("cuIpcCloseMemHandle");
  NEED_CONTEXT();
  struct Alloc* alloc = alloc_of(at);
  if (!alloc || (CUdeviceptr)alloc->at != at || alloc->name.pid == getpid()) return INVALID;
  let_go_of(alloc);
  return OK;
}

// -- memory made of chunks --------------------------------------------------------------------------------------------

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop, unsigned long long flags) {
  ENTER("cuMemCreate");
  if (flags || size % GRAIN || prop->type != 1 || prop->requestedHandleTypes != 1 || prop->location.type != 1) return INVALID;
  int fd = memfd_create("vmm", MFD_CLOEXEC), n = ftruncate(fd, (off_t)size) ? -1 : new_memory(fd);
  *handle = (CUmemGenericAllocationHandle)n + 1;
  return n < 0 ? INVALID : OK;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER("cuMemRelease");
  struct Memory* memory = memory_of(handle);
  if (!memory) return INVALID;
  let_go(memory);
  return OK;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* at) {
  ENTER("cuMemRetainAllocationHandle");
  struct Range* range = range_of((CUdeviceptr)at);
  if (!range || range->memory < 0) return INVALID;
  memories[range->memory].refs++;
  *handle = (CUmemGenericAllocationHandle)range->memory + 1;
  return OK;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  struct Memory* memory = memory_of(handle);
  if (!memory || type != 1 || flags) return INVALID;
  *(int*)out = dup(memory->fd);
  return OK;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os, CUmemAllocationHandleType type) {
  ENTER("cuMemImportFromShareableHandle");
  int fd = type == 1 ? dup((int)(size_t)os) : -1, n = fd < 0 ? -1 : new_memory(fd);
  if (n < 0 && fd >= 0) close(fd);
  *handle = (CUmemGenericAllocationHandle)n + 1;
  return n < 0 ? INVALID : OK;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  if (!size || size % GRAIN || alignment || at || flags) return INVALID;
  for (int n = 0; n < MOST; n++)
    if (!ranges[n].at) {
      char* found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (found == MAP_FAILED) return INVALID;
      ranges[n] = (struct Range){found, size, -1, 0};
      *out = (CUdeviceptr)found;
      return OK;
    }
  return INVALID;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  ENTER("cuMemAddressFree");
  struct Range* range = range_of(at);
  if (!range || range->memory >= 0 || range->at != (char*)at || range->size != size) return INVALID;
  munmap(range->at, size);
  range->at = NULL;
  return OK;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER("cuMemMap");
  struct Range* range = range_of(at);
  struct Memory* memory = memory_of(handle);
  if (!range || !memory || range->memory >= 0 || range->size != size || offset || flags || memory->size != size) return INVALID;
  if (mmap(range->at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) return INVALID;
  range->memory = (int)(memory - memories);
  memory->refs++;
  return OK;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  ENTER("cuMemUnmap");
  struct Range* range = range_of(at);
  if (!range || range->memory < 0 || range->at != (char*)at || range->size != size) return INVALID;
  if (mmap(range->at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return INVALID;
  let_go(&memories[range->memory]);
  range->memory = -1;
  return OK;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* what, size_t count) {
  ENTER("cuMemSetAccess");
  struct Range* range = range_of(at);
  if (!range || range->memory < 0 || range->size != size || count != 1) return INVALID;
  if (what->location.type != 1 || what->location.id || what->flags != 3) return INVALID;
  return mprotect(range->at, size, PROT_READ | PROT_WRITE) ? INVALID : OK;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr at) {
  ENTER("cuMemGetAddressRange_v2");
  NEED_CONTEXT();
  struct Range* range = range_of(at);
  struct Alloc* alloc = alloc_of(at);
  if (!range && !alloc) return INVALID;
  *base = (CUdeviceptr)(range ? range->at : alloc->at);
  *size = range ? range->size : alloc->size;
  return OK;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute what, CUdeviceptr at) {
  ENTER("cuPointerGetAttribute");
  if (what != 10 || (!range_of(at) && !alloc_of(at))) return INVALID;
  *(int*)out = !range_of(at);  // no IPC handle can name VMM memory
  return OK;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  NEED_CONTEXT();
  memcpy(to, (void*)from, size);
  return OK;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  NEED_CONTEXT();
  memcpy((void*)to, from, size);
  return OK;
}
