"""One graph on one GPU for tuning: its buffers, its candidates built side by side, run and timed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from plancache.backend import CudnnBackend, Option, Planned
from plancache.capture import quietly
from plancache.entry import Built, Candidate
from plancache.errors import WorkspaceError
from plancache.inputs import empty, output_uids, partly_written, poison, synthesize, torch_in_use
from plancache.key import Constraints
from plancache.proof import tolerance

if TYPE_CHECKING:
    from plancache.autotune import Tuning
    from plancache.compiler import Compiler
    from plancache.description import Description
    from plancache.environment import Device

_MOST_JOBS = 8  # each makes a CUDA context, one after the other
_LEAST_FLUSH_BYTES = 256 << 20
"""What is written between runs: more than any L2, and long enough for the host to be ahead of the GPU."""


class Builders:
    """Child processes that compile candidates for a device, side by side; made when they are first needed."""

    def __init__(self, device: Device, cudnn: bytes, variables: Mapping[str, str], jobs: int | None) -> None:
        """`cudnn`: which one the keys name, as `Place.cudnn` says it. A child that builds one for `limit_s` is killed."""
        cores = len(os.sched_getaffinity(0))
        self.jobs = min(_MOST_JOBS, max(1, cores - 2)) if jobs is None else jobs
        self._device = device
        self._cudnn = cudnn
        self._variables = variables
        self._local = threading.local()
        self._compilers: list[Compiler] = []
        self._pool: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()
        self.limit_s: float | None = None
        self.flush: Any = None  # what is written over between runs: one for all graphs of a tuning

    def start(self, signature: bytes, constraints: Constraints, option: Option, planned: Planned) -> Future[Built]:
        """Begins to build a candidate: in a child where it compiles, else at once, here, which takes milliseconds."""
        if option.runtime_compiled and self.jobs:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="plancache-build")
            return self._pool.submit(self._in_child, signature, constraints, option)
        future: Future[Built] = Future()
        try:
            future.set_result(planned.build(option.candidate))
        except Exception as error:  # the future's, as it would be of a child's build
            future.set_exception(error)
        return future

    @property
    def count(self) -> int:
        """Children that were started."""
        return len(self._compilers)

    def _in_child(self, signature: bytes, constraints: Constraints, option: Option) -> Built:
        return self._compiler().build(signature, constraints, self._variables, option.candidate, self.limit_s)

    def _compiler(self) -> Compiler:
        """This thread's child process."""
        compiler: Compiler | None = getattr(self._local, "compiler", None)
        if compiler is None:
            from plancache.compiler import Compiler

            with self._guard:
                compiler = self._local.compiler = Compiler(self._device, self._cudnn)
                self._compilers.append(compiler)
        return compiler

    def close(self) -> None:
        """Drops what has not begun, and ends the children; one that still builds is killed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for compiler in self._compilers:
                compiler.abort()
            self._pool.shutdown(wait=True)
        for compiler in self._compilers:
            compiler.close()


class Runnable:
    """A loaded candidate on the bench's buffers."""

    def __init__(self, run: Callable[[int], None], executable: Any, workspace: Any) -> None:
        self.run = run
        self._keep = executable, workspace


class Workbench:
    """Implements `jury.Bench`. `inputs`: by canonical uid; what is missing is synthesized. Outputs are the bench's own."""

    def __init__(
        self,
        backend: CudnnBackend,
        builders: Builders,
        signature: bytes,
        constraints: Constraints,
        tuning: Tuning,
        inputs: Mapping[int, Any],
    ) -> None:
        from plancache.description import decode

        self._backend = backend
        self._builders = builders
        self._signature = signature
        self._constraints = constraints
        self._tuning = tuning
        self._given = inputs
        self._description: Description = decode(signature)
        self._torch = torch_in_use()
        self._buffers: dict[int, Any] = {}
        self._outputs: list[int] = []
        self._workspace: Any = None
        self._random = random.Random(0)
        self._planned: Planned | None = None
        self._options: list[Option] = []
        self._started: dict[str, Future[Built]] = {}

    # ---- candidates

    def options(self) -> Sequence[Option]:
        if self._planned is None:
            self._planned, self._options = self._backend.options(self._signature, self._constraints, self._tuning.modes)
        return self._options

    def compiling(self, wanted: Callable[[Candidate], bool]) -> int:
        """How many of the wanted candidates are compiled, in seconds each, rather than taken from what cuDNN ships."""
        return len(self._to_compile(wanted))

    def _to_compile(self, wanted: Callable[[Candidate], bool]) -> list[Option]:
        return [option for option in self.options() if option.runtime_compiled and wanted(option.candidate)]

    def start_compiling(self, wanted: Callable[[Candidate], bool]) -> None:
        """Begins to build those that compile, where children do, so that they are there when this graph's turn comes."""
        if self._builders.jobs:
            for option in self._to_compile(wanted):
                self.start(option)

    def ready(self) -> bool:
        """Whether nothing is being compiled for it any more."""
        return all(future.done() for future in self._started.values())

    def start(self, option: Option) -> Future[Built]:
        name = option.candidate.name
        if name not in self._started:
            assert self._planned is not None
            self._started[name] = self._builders.start(self._signature, self._constraints, option, self._planned)
        return self._started[name]

    def load(self, built: Built) -> Runnable:
        if not self._buffers:
            self._make_buffers(built)
        executable = self._backend.load(built)
        workspace, address = self._space(built.workspace_size)
        buffers = [self._buffers[uid] for uid in built.operands]
        run = executable.runner(buffers, [buffer.data_ptr() for buffer in buffers], workspace, address)
        if self._tuning.measure == "graph":
            run = self._captured(run)
        return Runnable(run, executable, workspace)

    def set_aside(self) -> None:
        """Lets go of buffers and workspace; they are made again, with the same values, when something is loaded."""
        self._buffers, self._workspace = {}, None

    def _make_buffers(self, built: Built) -> None:
        device = self._backend.device.ordinal
        written = output_uids(self._description)
        made = synthesize(self._description, built.operands, built.layouts, device)
        self._outputs = [uid for uid in built.operands if uid in written]
        outputs = {uid: empty(self._torch, built.layouts[uid], device) for uid in self._outputs}
        self._buffers = {**made, **self._given, **outputs}

    def _space(self, size: int) -> tuple[Any, int]:
        """The bench's workspace, which grows; those that were loaded before keep the smaller one."""
        if not size:
            return None, 0
        if self._workspace is None or self._workspace.nbytes < size:
            try:
                self._workspace = self._torch.empty(size, dtype=self._torch.uint8, device=f"cuda:{self._backend.device.ordinal}")
            except self._torch.OutOfMemoryError as error:
                raise WorkspaceError(f"no memory for a workspace of {size:,} bytes") from error
        return self._workspace, self._workspace.data_ptr()

    def _captured(self, run: Callable[[int], None]) -> Callable[[int], None]:
        """Replays of a CUDA graph that holds one run."""
        torch = self._torch
        run(self._stream())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(self._stream())
        return lambda _: graph.replay()

    def _stream(self) -> int:
        return int(self._torch._C._cuda_getCurrentRawStream(self._backend.device.ordinal))

    # ---- running

    def time_us(self, runnables: Sequence[Runnable], runs: int) -> list[list[float]]:
        """Between two events on the stream, each behind a write over more than the L2, in an order that is drawn for each round.

        The write also keeps the GPU busy while the host enqueues, so that its own time does not count.
        """
        torch, stream = self._torch, self._stream()
        flush = self._flush()
        marks: list[list[tuple[Any, Any]]] = [[] for _ in runnables]
        order = list(range(len(runnables)))
        for _ in range(runs):
            self._random.shuffle(order)
            for at in order:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                begin.record()
                runnables[at].run(stream)
                end.record()
                marks[at].append((begin, end))
        torch.cuda.synchronize()
        return [[begin.elapsed_time(end) * 1e3 for begin, end in own] for own in marks]

    def _flush(self) -> Any:
        if self._builders.flush is None:
            cache = self._torch.cuda.get_device_properties(self._backend.device.ordinal).L2_cache_size
            size = max(2 * cache, _LEAST_FLUSH_BYTES)
            self._builders.flush = self._torch.empty(size, dtype=self._torch.uint8, device=f"cuda:{self._backend.device.ordinal}")
        return self._builders.flush

    def outputs(self, runnable: Runnable, poison_byte: int) -> Mapping[int, Any]:
        for uid in self._outputs:
            poison(self._torch, self._buffers[uid], poison_byte)
        runnable.run(self._stream())
        self._torch.cuda.synchronize()
        return {uid: self._copied(self._buffers[uid]) for uid in self._outputs}

    def _copied(self, buffer: Any) -> Any:
        if buffer.dtype != self._torch.bool:
            return buffer.clone()
        return buffer.view(self._torch.uint8).clone().view(self._torch.bool)  # cloned as such its bytes become 0 and 1

    def partly_written(self) -> frozenset[int]:
        return partly_written(self._description)

    def bounds(self) -> Mapping[int, float]:
        types = {uid: self._description.tensors[uid - 1]["data_type"] for uid in self._outputs}
        return {uid: tolerance(self._description, kind.member if kind else "FLOAT") for uid, kind in types.items()}


def release(contestants: Sequence[Any], backend: CudnnBackend) -> None:
    """Frees what tuning loaded, where no capture can notice."""
    with quietly():
        for one in contestants:
            one.runnable = None
            one.seen.clear()
    backend.releases.drain()
