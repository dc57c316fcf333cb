"""The state of a GPU while something is measured on it, from NVIDIA's management library where there is one."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

# nvml.h
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_TOO_SMALL = 7
_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # power cap, hardware, software and hardware thermal, power brake


def conditions(ordinal: int | None, *, own_processes: int = 1) -> dict[str, Any]:
    """Clocks in MHz, whether the GPU is throttled, other processes on it, MIG; what nobody can tell is left out.

    `ordinal`: CUDA's index of the device; `own_processes`: that use it for this program, children included.
    """
    library = _nvml()
    handle = _handle(library, ordinal) if library and ordinal is not None else None
    if library is None or handle is None:
        return {}
    sm, memory, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    reasons, count, mode = ctypes.c_ulonglong(), ctypes.c_uint(0), ctypes.c_uint()
    found: dict[str, Any] = {}
    if _tells(library, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK, ctypes.byref(sm)):
        found["sm_clock_mhz"] = sm.value
    if _tells(library, "nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK, ctypes.byref(memory)):
        found["memory_clock_mhz"] = memory.value
    if _tells(library, "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK, ctypes.byref(most)):
        found["sm_clock_max_mhz"] = most.value
    if _tells(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons)):
        found["throttled"] = bool(reasons.value & _THROTTLED)
    # With a buffer for none it answers that the buffer is too small, and the number.
    if _tells(library, "nvmlDeviceGetComputeRunningProcesses", handle, ctypes.byref(count), None, fine=(0, _TOO_SMALL)):
        found["other_processes"] = max(0, count.value - own_processes)
    if _tells(library, "nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(ctypes.c_uint())):
        found["mig"] = bool(mode.value)
    return found


def _tells(library: Any, function: str, *arguments: Any, fine: tuple[int, ...] = (0,)) -> bool:
    """Whether the library has a function (older ones lack some, newer ones may drop some) and it answered."""
    call = getattr(library, function, None)
    return call is not None and call(*arguments) in fine


def is_quiet(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether nothing was seen that makes timings doubtful."""
    return not any(state.get("throttled") or state.get("other_processes") for state in (before, after))


@lru_cache(maxsize=1)
def _nvml() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _handle(library: Any, ordinal: int) -> Any:
    """By PCI address: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not the library's."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.create_string_buffer(32)
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetPCIBusId(address, len(address), device):
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle)):
            return None
        return handle
    except (OSError, AttributeError):
        return None
