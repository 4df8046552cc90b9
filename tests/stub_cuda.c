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
