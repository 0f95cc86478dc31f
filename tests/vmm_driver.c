// The VMM calls of a CUDA driver in host memory, by the rules that CUDA documents: memory is a memfd, a shareable handle
// a descriptor of it, an address range a mapping that cannot be touched before access to it was given.
//
// Built as libcuda.so.1 for a process that has no GPU. Where CUDA's own header is here the compiler checks that each
// call is declared as NVIDIA declares it.
#define _GNU_SOURCE
#include <fcntl.h>
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
typedef struct { int type, id; } CUmemLocation;
typedef struct { int type, requestedHandleTypes; CUmemLocation location; void* win32HandleMetaData; char flags[8]; } CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#endif

enum { MOST = 64, GRAIN = 2 << 20, OK = 0, INVALID = 1, NOT_INITIALIZED = 3, INJECTED = 999 };

struct Memory { int fd; size_t size; int refs; };
struct Range { char* at; size_t size; int memory; int access; };

static struct Memory memories[MOST];
static struct Range ranges[MOST];
static int ready;
static char failing[64];

#define ENTER(name)                                        \
  if (!ready) return NOT_INITIALIZED;                      \
  if (!strcmp(failing, name)) return failing[0] = 0, INJECTED

// -- what tests ask ---------------------------------------------------------------------------------------------------

void vmm_fail(const char* name) { strncpy(failing, name, sizeof failing - 1); }

int vmm_left(void) {
  int left = 0;
  for (int n = 0; n < MOST; n++) left += (memories[n].refs > 0) + (ranges[n].at != NULL);
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
  *text = (int)error == INJECTED ? "injected" : (int)error == NOT_INITIALIZED ? "not initialized" : "invalid argument";
  return OK;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = (CUcontext)&ready;
  return device ? INVALID : OK;
}

CUresult cuCtxSetCurrent(CUcontext context) { return context == (CUcontext)&ready ? OK : INVALID; }

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
  struct Range* range = range_of(at);
  if (!range) return INVALID;
  *base = (CUdeviceptr)range->at;
  *size = range->size;
  return OK;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute what, CUdeviceptr at) {
  ENTER("cuPointerGetAttribute");
  if (what != 10 || !range_of(at)) return INVALID;
  *(int*)out = 0;  // no IPC handle can name VMM memory
  return OK;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  memcpy(to, (void*)from, size);
  return OK;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  memcpy((void*)to, from, size);
  return OK;
}
