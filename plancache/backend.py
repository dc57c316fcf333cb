"""cuDNN: candidates of a copy, build, serialize, load, run; handles per thread.

Only copies (`copies`) are built, loaded and executed. Sources: the frontend's `_pygraph.py` (1.32), and
what was measured of it (docs/environment.md).
"""

from __future__ import annotations

import copy as copying
import ctypes
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import finalize

from plancache.capture import Releases, quietly
from plancache.copies import BUILDING, Copies, member
from plancache.entry import Built, Candidate, Layout
from plancache.environment import Device, Here, Libraries, current_ordinal, load_frontend, loaded_or_near, version_text
from plancache.errors import DeviceFileError
from plancache.executable import Executable
from plancache.key import Constraints
from plancache.signature import canonical_order, clone

_PYTHON_PLAN = b"CUDNN_FE_PYPLAN\0"
_STEPS = ("lower", "plan", "build", "serialize")
_DEVICE_TROUBLE = (
    "out of memory|ALLOC|CUDA_ERROR|CUDA_DRIVER|CUDART|cudaError|CUDA error|CUDNN_STATUS_EXECUTION_FAILED|PREREQUISITE_MISSING"
)
_LARGEST_TO_RAISE_IT = 31 << 20  # bytes: freeing a block of up to 32 MB raises glibc's thresholds to it (mallopt(3))


class Option(NamedTuple):
    """A candidate that tuning may try. `runtime_compiled`: building it compiles, which takes seconds and no device."""

    candidate: Candidate
    deterministic: bool
    runtime_compiled: bool


class Planned:
    """A copy and its candidates, which are built one after the other. `places`: of the candidates in the plan list, by name.

    `plans`: the whole list, as the frontend ranks it; `native`: cuDNN's graph, which runs what was built last.
    """

    def __init__(self, backend: CudnnBackend, copy: Any, seconds: Sequence[float]) -> None:
        self._backend = backend
        self._copy = copy
        self._seconds = seconds
        self.candidates: list[Candidate] = []
        self.places: dict[str, int] = {}
        self.plans = tuple(_candidate(copy, index) for index in range(copy.get_execution_plan_count()))
        for index, candidate in enumerate(self.plans):
            if candidate.name not in self.places:  # the heuristics name some twice
                self.places[candidate.name] = index
                self.candidates.append(candidate)

    def compiles(self, candidate: Candidate) -> bool:
        """Whether building a candidate of the backend compiles. Python engines of the frontend are built where they run."""
        index = self.places[candidate.name]
        ours = self._copy._engine_for(self._copy.plans[index]) is None
        return ours and "RUNTIME_COMPILATION" in _notes(self._copy, index)

    @property
    def native(self) -> Any:
        return self._copy._lowered_graph

    @property
    def layouts(self) -> dict[int, Layout]:
        """Lowered tensors by canonical uid."""
        return {uid: _layout(self._copy, tensor) for uid, tensor in sorted(self._copy._tensor_by_uid.items())}

    def build_first(self, constraints: Constraints) -> Built:
        """Builds and serializes the heuristic's first choice that the constraints allow. Raises cuDNN's own error."""
        with BUILDING, self._backend._on_device():
            clock = [time.perf_counter()]
            _limit(self._copy, constraints)
            _filter(self._copy, constraints)
            self._copy.check_support()
            self._copy.build_plans()
            clock.append(time.perf_counter())
            blob = self._copy.serialize(as_bytes=True)
            clock.append(time.perf_counter())
            seconds = [*self._seconds, *(after - before for before, after in pairwise(clock))]
            return self._backend._built(self._copy, blob, dict(zip(_STEPS, seconds, strict=True)), self.plans)

    def own_notes(self, candidate: Candidate) -> tuple[Any, ...] | None:
        """The numerical notes of a Python engine of the frontend, which declares them; None for an engine of the backend."""
        plan = self._copy.plans[self.places[candidate.name]]
        return None if self._copy._engine_for(plan) is None else self._copy._notes_of(plan, "numerical")

    def build(self, candidate: Candidate) -> Built:
        """Builds and serializes a candidate. Raises cuDNN's own error."""
        with BUILDING, self._backend._on_device():
            clock = [time.perf_counter()]
            self._copy.build_plan_at_index(self.places[candidate.name])
            clock.append(time.perf_counter())
            blob = self._copy.serialize(as_bytes=True)
            clock.append(time.perf_counter())
            seconds = [*self._seconds, *(after - before for before, after in pairwise(clock))]
            return self._backend._built(self._copy, blob, dict(zip(_STEPS, seconds, strict=True)), (candidate,))


class CudnnBackend(Copies):
    """cuDNN for one device, or for a device file: then it can only say what would be built, and be asked by a child."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        cudnn = load_frontend()
        if device.cudnn_version is not None and device.cudnn_version != cudnn.backend_version():
            theirs, mine = version_text(device.cudnn_version), version_text(cudnn.backend_version())
            raise DeviceFileError(
                f"the device file comes from cuDNN {theirs}, here {mine} is loaded; install that one (pip install "
                f"'nvidia-cudnn-cu13=={theirs}.*'), or write a file with this one on the GPU (plancache doctor --write-device FILE)"
            )
        self.libraries = Libraries.loaded()
        self.here = Here(self.libraries)
        self.releases = Releases()
        self._local = threading.local()
        self._nvrtc: list[Any] = []
        _let_malloc_keep_pages()

    # ---- building

    def build(
        self,
        signature: bytes,
        constraints: Constraints,
        variables: Mapping[str, str],  # noqa: ARG002  # as in force
        candidate: Candidate | None = None,
    ) -> Built:
        """Builds a candidate, or the heuristic's first choice that the constraints allow, and serializes it.

        Raises cuDNN's own error where it has no plan.
        """
        from plancache.description import decode

        with BUILDING, self._on_device():
            handle = None if self.device.is_file else self.handle()
            copy = self.copy(decode(signature), handle=handle)
            clock = [time.perf_counter()]
            if candidate is None:
                self._plan(copy, constraints, clock, constraints.modes)
                copy.build_plans()
            else:
                self._plan_candidate(copy, constraints, candidate, clock)
                copy.build_plan_at_index(copy.get_execution_plan_count() - 1)
            clock.append(time.perf_counter())
            blob = copy.serialize(as_bytes=True)  # at once: a loaded graph that is serialized again loses its tensor table
            clock.append(time.perf_counter())
            seconds = [after - before for before, after in pairwise(clock)]
            every = tuple(_candidate(copy, index) for index in range(copy.get_execution_plan_count()))
            return self._built(copy, blob, dict(zip(_STEPS, seconds, strict=True)), every)

    def planned(self, signature: bytes, constraints: Constraints, modes: Sequence[str], handle: Any = None) -> Planned:
        """A copy for which the heuristics have named their candidates in these modes; on a caller's handle, or this thread's."""
        from plancache.description import decode

        with BUILDING, self._on_device():
            copy = self.copy(decode(signature), handle=None if self.device.is_file else handle or self.handle())
            clock = [time.perf_counter()]
            self._plan(copy, constraints, clock, modes)
        return Planned(self, copy, [after - before for before, after in pairwise(clock)])

    def options(self, signature: bytes, constraints: Constraints, modes: Sequence[str]) -> tuple[Planned, list[Option]]:
        """The candidates that the heuristics name in these modes and the constraints allow, in their order, each once."""
        planned = self.planned(signature, constraints, modes)
        steady: dict[int, bool] = {}  # by engine: the note is the engine's, whatever its knobs
        for candidate in planned.candidates:
            if candidate.engine not in steady:
                steady[candidate.engine] = self._is_deterministic(signature, planned, candidate)
        return planned, [Option(candidate, steady[candidate.engine], planned.compiles(candidate)) for candidate in planned.candidates]

    def _is_deterministic(self, signature: bytes, planned: Planned, candidate: Candidate) -> bool:
        """Whether an engine lacks the note NONDETERMINISTIC, which has no getter: a copy that has only this engine, with
        default knobs, is supported until the note is barred. About 1 ms."""
        from plancache.description import decode

        cudnn = load_frontend()
        own = planned.own_notes(candidate)
        if own is not None:
            return member(cudnn, "numerical_note", "NONDETERMINISTIC") not in own
        with BUILDING, self._on_device():
            copy = self.copy(decode(signature), handle=None if self.device.is_file else self.handle())
            try:
                _lower(copy, Constraints(), [])
                copy.create_execution_plan(candidate.engine, {})
                copy.check_support()
                _filter(copy, Constraints(deterministic=True))
                copy.check_support()
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
                return False
        return True

    def build_unchanged(self, graph: Any, constraints: Constraints) -> tuple[Executable, list[Any], list[Layout], int]:
        """Builds an uncacheable graph as its caller made it, on a clone: executable, tensors, layouts and workspace bytes."""
        scratch, _ = clone(graph)
        for name, value in vars(scratch).items():
            if isinstance(value, list | dict | set):  # planning writes into them
                vars(scratch)[name] = copying.copy(value)
        scratch._tensor_by_uid = {tensor.uid: tensor for tensor in canonical_order(scratch)}
        scratch._data_bindings = {}
        with BUILDING, self._on_device():
            if self.device.is_file:
                scratch._cpp_graph_kwargs.update(device_property=self.properties(), sm_version=self.device.sm_version)
            else:
                scratch._handle = self.handle()
            self._plan(scratch, constraints, [], constraints.modes)
            scratch.build_plans()
        uids = tuple(scratch._variant_pack_uids() or ())
        callers = {tensor.uid: tensor for tensor in canonical_order(graph)}
        layouts = [_layout(scratch, scratch._tensor_by_uid[uid]) for uid in uids]
        return Executable(scratch, uids, scratch._handle), [callers[uid] for uid in uids], layouts, int(scratch.get_workspace_size())

    def _plan_candidate(self, copy: Any, constraints: Constraints, candidate: Candidate, clock: list[float]) -> None:
        cudnn = load_frontend()
        _lower(copy, constraints, clock)
        copy.create_execution_plan(candidate.engine, {member(cudnn, "knob_type", name): value for name, value in candidate.knobs.items()})
        _filter(copy, constraints)
        copy.check_support()
        clock.append(time.perf_counter())

    def _plan(self, copy: Any, constraints: Constraints, clock: list[float], modes: Sequence[str]) -> None:
        cudnn = load_frontend()
        _lower(copy, constraints, clock)
        copy.create_execution_plans([member(cudnn, "heur_mode", mode) for mode in modes])
        _filter(copy, constraints)
        copy.check_support()
        clock.append(time.perf_counter())

    def _built(self, copy: Any, blob: bytes, timings_s: Mapping[str, float], candidates: tuple[Candidate, ...]) -> Built:
        chosen = copy._plan_index
        notes = _notes(copy, chosen)
        return Built(
            blob=blob,
            workspace_size=int(copy.get_workspace_size()),
            operands=tuple(copy._variant_pack_uids() or ()),
            layouts={uid: _layout(copy, tensor) for uid, tensor in sorted(copy._tensor_by_uid.items())},
            recipe=_candidate(copy, chosen),
            candidates=candidates,
            behavior_notes=notes,
            requirements=self._requirements(blob, notes),
            timings_s=timings_s,
        )

    def _requirements(self, blob: bytes, notes: tuple[str, ...]) -> dict[str, str]:
        names: tuple[str, ...] = ("cublasLt",) if "CUBLASLT_DEPENDENCY" in notes else ()
        if blob.startswith(_PYTHON_PLAN):
            names += ("nvidia-cutlass-dsl", "apache-tvm-ffi", "machine")
        return {name: self.here[name] or "unknown" for name in names}

    # ---- loading

    def load(self, built: Built) -> Executable:
        """Loads a checked plan for this thread and device. Raises whatever cuDNN raises."""
        cudnn = load_frontend()
        handle = self.handle()
        graph = cudnn.pygraph(handle=handle)
        if "RUNTIME_COMPILATION" in built.behavior_notes:
            self._keep_nvrtc()
        # With a handle: without one plans of some engines are refused, once others were loaded in the process. A load
        # with one runs a warm-up that captures and allocates, which a capture in another thread must not notice.
        with self._on_device(), quietly():
            if built.blob.startswith(_PYTHON_PLAN):
                with BUILDING:
                    graph.deserialize(handle, built.blob, enforce_precompiled=True)
            else:
                graph.deserialize(handle, built.blob)
        return Executable(graph, built.operands, handle)

    def load_native(self, built: Built, handle: int | None) -> Any:
        """cuDNN's own graph object with a checked plan of the backend's, on a caller's handle; without a GPU on none.

        Raises whatever cuDNN raises.
        """
        graph_of = load_frontend()._pybind_module.backend_graph
        if "RUNTIME_COMPILATION" in built.behavior_notes:
            self._keep_nvrtc()
        if handle is None:
            graph = graph_of(device_property=self.properties())
            graph.deserialize(built.blob)
            return graph
        graph = graph_of(handle=handle)
        with self._on_device(), quietly():
            graph.deserialize(handle, built.blob)
        return graph

    def _keep_nvrtc(self) -> None:
        """Keeps NVRTC mapped. cuDNN opens and closes it at each load of a runtime-compiled plan, which takes 17 ms where
        nobody else holds it, as torch does; the load itself takes 2."""
        if not self._nvrtc:
            path = loaded_or_near("libnvrtc", self.libraries.folder)
            self._nvrtc.append(ctypes.CDLL(path) if path else None)

    def check_loads(self, blob: bytes) -> None:
        """Loads a plan without a device, and drops it. Raises whatever cuDNN raises."""
        if not blob.startswith(_PYTHON_PLAN):
            load_frontend().pygraph(device_property=self.properties()).deserialize(blob)

    @staticmethod
    def is_of_the_device(error: Exception) -> bool:
        """Whether an error says nothing of the plan: out of memory, or a CUDA error, an earlier one too."""
        return isinstance(error, MemoryError) or re.search(_DEVICE_TROUBLE, str(error), re.IGNORECASE) is not None

    def handle(self) -> Any:
        """This thread's cuDNN handle of this device; released when the thread ends."""
        seat: _Seat | None = getattr(self._local, "seat", None)
        if seat is None:
            cudnn = load_frontend()
            with self._on_device(), quietly():  # it allocates
                seat = self._local.seat = _Seat(cudnn.create_handle())
            finalize(seat, self.releases.add_handle, partial(self._destroy, seat.handle)).atexit = False
        return seat.handle

    def _destroy(self, handle: Any) -> None:
        with self._on_device():
            load_frontend().destroy_handle(handle)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Makes the device current in this thread for the time of a block."""
        ordinal = self.device.ordinal
        if ordinal is None or ordinal == current_ordinal():
            yield
            return
        import torch

        with torch.cuda.device(ordinal):
            yield

    def close(self) -> None:
        """Frees what was released, and the handles made here."""
        self._local = threading.local()
        self.releases.drain()


class _Seat:
    """A thread's handle: this object goes when the thread ends."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


def _let_malloc_keep_pages() -> None:
    """Lets glibc keep up to 64 MB that are freed, as after any large buffer that a program frees.

    A load inflates some MB and frees them; pages that went back to the system are faulted in anew at the next load,
    which is two fifths of the time that a norm's plan takes (docs/environment.md).
    """
    bytes(_LARGEST_TO_RAISE_IT)


def _lower(copy: Any, constraints: Constraints, clock: list[float]) -> None:
    copy.validate()
    copy.build_operation_graph()
    clock.append(time.perf_counter())
    _limit(copy, constraints)


def _limit(copy: Any, constraints: Constraints) -> None:
    """Bars plans by name and by workspace."""
    if constraints.barred_engines:
        copy.deselect_engines(list(constraints.barred_engines))
    limits = [limit for limit in (constraints.workspace_limit_bytes, copy._workspace_limit) if limit is not None]
    if limits:
        copy.deselect_workspace_greater_than(min(limits))


def _filter(copy: Any, constraints: Constraints) -> None:
    """Bars plans by their notes. The list keeps them, whatever names them; building one fails."""
    cudnn = load_frontend()
    barred = constraints.barred_numerical_notes + (("NONDETERMINISTIC",) if constraints.deterministic else ())
    for select, kind, names in (
        (copy.deselect_numeric_notes, "numerical_note", barred),
        (copy.select_numeric_notes, "numerical_note", constraints.required_numerical_notes),
        (copy.deselect_behavior_notes, "behavior_note", constraints.barred_behavior_notes),
        (copy.select_behavior_notes, "behavior_note", constraints.required_behavior_notes),
    ):
        if names:
            select([member(cudnn, kind, name) for name in names])


def _notes(copy: Any, index: int) -> tuple[str, ...]:
    return tuple(note.name for note in copy.get_behavior_notes_for_plan_at_index(index))


def _candidate(copy: Any, index: int) -> Candidate:
    try:
        engine, knobs = copy.get_engine_and_knobs_at_index(index)
    except NotImplementedError:  # the backend chooses among engines that it does not list
        engine, knobs = -1, {}
    return Candidate(copy.get_plan_name_at_index(index), int(engine), {knob.name: int(value) for knob, value in knobs.items()})


def _layout(copy: Any, tensor: Any) -> Layout:
    kind = tensor.data_type
    if kind is None and tensor.uid in copy._cpp_tensors:
        kind = copy._cpp_tensors[tensor.uid].get_data_type()
    return Layout(tuple(tensor.dim), tuple(tensor.stride), None if kind is None else kind.name)
