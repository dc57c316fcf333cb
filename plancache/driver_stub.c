/* Stands in for libcuda.so.1 where cuDNN plans for a device file on a machine without a driver.
 *
 * cuDNN's runtime-compiling engines are linked against libcuda.so.1, but only ask it for names, versions and kernel
 * attributes while they compile. cuInit says that there is no device (100, CUDA_ERROR_NO_DEVICE), so nothing can be
 * run. Built with -DDRIVER_VERSION=<the device file's driverVer>; plancache/compiler.py says how it is loaded.
 */
#include <stddef.h>

#define SUCCEEDS(name) int name(void) { return 0; }
#define GIVES_HANDLE(name) int name(void **out) { if (out) *out = (void *)0x1000; return 0; }
#define GIVES_NUMBER(name, number) int name(int *out) { if (out) *out = (number); return 0; }
#define GIVES_TEXT(name, text) int name(int error, const char **out) { (void)error; if (out) *out = (text); return 0; }

int cuInit(unsigned int flags) { (void)flags; return 100; }

SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxPopCurrent)
SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuDeviceGet)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLaunchKernelEx)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuLinkAddData)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate)
SUCCEEDS(cuLinkDestroy)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuStreamGetCtx)
SUCCEEDS(cuTensorMapEncodeIm2col)
SUCCEEDS(cuTensorMapEncodeTiled)

GIVES_HANDLE(cuCtxGetCurrent)
GIVES_HANDLE(cuKernelGetFunction)
GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuLibraryLoadData)
GIVES_HANDLE(cuLibraryLoadFromFile)
GIVES_HANDLE(cuModuleGetFunction)
GIVES_HANDLE(cuModuleLoadData)

GIVES_NUMBER(cuDeviceGetCount, 1)
GIVES_NUMBER(cuDriverGetVersion, DRIVER_VERSION)
GIVES_NUMBER(cuKernelGetAttribute, 0)
GIVES_NUMBER(cuOccupancyMaxPotentialClusterSize, 8)

GIVES_TEXT(cuGetErrorName, "CUDA_ERROR_NO_DEVICE")
GIVES_TEXT(cuGetErrorString, "no device: plancache's driver stub")
