// SPDX-License-Identifier: Apache-2.0
// In place of NVIDIA's driver library: what Triton's launcher in C calls. It notes the last launch and runs nothing.
#include <cuda.h>
#include <stdint.h>

struct {
  uint64_t launches, programs, threads, stream, arguments[16];
} noted;
int argument_count;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  noted.launches++;
  noted.programs = config->gridDimX;
  noted.threads = config->blockDimX;
  noted.stream = (uint64_t)config->hStream;
  for (int i = 0; i < argument_count; i++) noted.arguments[i] = *(uint64_t *)arguments[i];
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult result, const char **text) { return *text = "no driver", CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr pointer) { return CUDA_ERROR_INVALID_VALUE; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) { return CUDA_SUCCESS; }

// Triton 3.7's module loads code as well, which does not happen here.
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuDriverGetVersion(int *version) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return CUDA_ERROR_NOT_SUPPORTED; }
