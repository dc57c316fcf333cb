"""Keeping out of the way of CUDA-graph captures: what loads, allocates or frees must not disturb one in any thread."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any


@contextmanager
def quietly() -> Iterator[None]:
    """Lets this thread allocate and free while another one captures in torch's default mode; both would fail otherwise."""
    exchange = _driver_function("cuThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def is_capturing(stream: int | None = None) -> bool:
    """Whether a CUDA stream, by its handle, or torch's current one is capturing."""
    if stream is None:
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    ask = _driver_function("cuStreamIsCapturing")
    status = ctypes.c_int(0)
    return ask is not None and ask(ctypes.c_void_p(stream), ctypes.byref(status)) == 0 and status.value != 0


@lru_cache(maxsize=4)
def _driver_function(name: str) -> Any:
    """A function of the CUDA driver, or None where there is no driver."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


class Releases:
    """What is no longer used, kept until a moment at which it can be freed quietly.

    A plan goes when its last user drops it, and a thread's executables when the thread ends: anywhere, in the midst of
    somebody's capture too. Finalizers only put things here; `drain` frees them. After a fork they are kept for good,
    since they are the parent's.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._executables: deque[Any] = deque()
        self._handles: deque[Callable[[], None]] = deque()

    def add_executable(self, executable: Any) -> None:
        self._executables.append(executable)

    def add_handle(self, destroy: Callable[[], None]) -> None:
        """A handle, as the function that destroys it: after all executables that were made with it."""
        self._handles.append(destroy)

    def drain(self) -> int:
        """Frees what has gathered; returns how many things that were."""
        count = len(self._executables) + len(self._handles)
        if not count or os.getpid() != self._process:
            return 0
        with quietly():
            self._executables.clear()
            while self._handles:
                self._handles.popleft()()
        return count
