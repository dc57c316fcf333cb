"""A GPU that does on demand what a real one will not: refuse, run out of memory, crash. Used by tests and their children."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samples import make_entry

from plancache import Device, PlanCache
from plancache.backend import CudnnBackend
from plancache.capture import Releases
from plancache.entry import Entry


def product(size: int = 16) -> Any:
    """A graph of its own for each size."""
    import cudnn

    kinds = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=kinds.HALF, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)
    graph.matmul(graph.tensor([8, 64, 32]), graph.tensor([8, 32, 8 * size])).set_output(True)
    return graph


class MadeUp:
    """In place of cuDNN on a GPU. Builds blobs that are told apart, and records every blob that it is asked to load."""

    releases = Releases()
    is_of_the_device = staticmethod(CudnnBackend.is_of_the_device)

    def __init__(self, real: CudnnBackend) -> None:
        self.libraries, self.here = real.libraries, real.here
        self.builds: list[bytes] = []
        self.loaded: list[bytes] = []
        self.blob_bytes = 1000
        self.when_built: Callable[[], object] = lambda: None
        self.when_loaded: Callable[[bytes], object] = lambda _: None

    def check_copy(self, _: object) -> None: ...

    def build(self, signature: bytes, *_: object) -> Entry:
        self.when_built()
        digest = hashlib.sha256(signature + os.urandom(8)).digest()
        self.builds.append(random.Random(digest).randbytes(self.blob_bytes + 10 * digest[0]))
        return make_entry(blob=self.builds[-1], operands=(1,))

    def load(self, entry: Entry) -> object:
        self.loaded.append(entry.blob)
        if entry.blob not in self.builds:  # what was built here is the machine's own
            self.when_loaded(entry.blob)
        return object()

    def close(self) -> None: ...


def opened_on_gpu(directory: Path | str, backend: MadeUp | None = None, **options: Any) -> tuple[PlanCache, MadeUp]:
    """A cache for a made-up GPU."""
    gpu = Device(Device.from_file("h200").properties, None, 0)
    cache = PlanCache(directory, device=gpu, **options)
    target = cache._targets._of(gpu)
    made_up = backend or MadeUp(target.backend)
    target.backend = target.builder = made_up  # type: ignore[assignment]
    return cache, made_up


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A child that can import what tests share; a warning is an error in it unless the script says otherwise."""
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": tests, **environment}, **pipes)  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str], code: int = 0, timeout_s: float = 120) -> tuple[str, str]:
    """What a child said, once it has ended with this code."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, (process.returncode, out, err)
    return out, err
