"""A plan that is ready to run: binds operands, finds its workspace and stream, executes."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize

from plancache.capture import Releases, is_capturing
from plancache.entry import Entry, Layout
from plancache.errors import CaptureError, NotExecutableError, OperandError, WorkspaceError
from plancache.lazy import lazy

if TYPE_CHECKING:
    from plancache.operands import Operand, Slot

_HOST_BYTES = 200_000  # of a live plan, as reported (pytorch#104701)


class Executable(Protocol):
    """A plan loaded for one thread; `buffers` and `addresses` come in the order of the entry's operands."""

    def run(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int, stream: int) -> None: ...

    def runner(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int) -> Callable[[int], None]: ...


class _Seat:
    """A thread's executable of a plan: this object goes when the thread ends, or the plan."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.process = os.getpid()


class Loaded:
    """A plan of one cache and device: its executable in each thread, its workspace on each stream."""

    def __init__(
        self,
        load: Callable[[], Executable],
        *,
        device: int | None,
        workspace_size: int,
        entry: Entry | None,
        releases: Releases,
    ) -> None:
        self.load = load
        self.device = device
        self.workspace_size = workspace_size
        self.entry = entry
        self.closed = False
        self._releases = releases
        self._local = threading.local()
        self._workspaces: dict[int, Any] = {}
        self._raw_stream: Callable[[int | None], int] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that it is accounted for: host memory of its executable as reported for such plans, and workspaces."""
        blob = len(self.entry.blob) if self.entry else 0
        return max(_HOST_BYTES, 2 * blob) + len(self._workspaces) * self.workspace_size

    def stream(self) -> int:
        """torch's current CUDA stream on the plan's device as a handle, or the default stream (0) where torch is not in use."""
        if self._raw_stream is None:
            torch = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_initialized():
                return 0
            self._raw_stream = torch._C._cuda_getCurrentRawStream  # 40 times faster than a Stream object
        return self._raw_stream(self.device)

    def seat(self) -> _Seat:
        """This thread's executable, loaded at first use."""
        found: _Seat | None = getattr(self._local, "seat", None)
        if found is None or self.closed:
            return self._load()
        if found.process != os.getpid():
            raise NotExecutableError("CUDA does not outlive a fork: start workers with 'spawn', or plan in the worker itself")
        return found

    def _load(self) -> _Seat:
        if self.closed:
            raise NotExecutableError("this plan or its cache is closed; keep the PlanCache open while its plans run")
        if self.device is None:
            raise NotExecutableError("this plan was made for a device file and cannot run here; plan on the GPU itself to execute")
        if is_capturing():
            raise CaptureError("this thread has not loaded the plan, and its stream is capturing; run the plan once before the capture")
        seat = self._local.seat = _Seat(self.load())
        finalize(seat, self._releases.add_executable, seat.executable).atexit = False
        return seat

    def workspace(self, stream: int) -> tuple[Any, int]:
        """A workspace of this plan on a stream and its address; it never shrinks and is not allocated during capture."""
        if not self.workspace_size:
            return None, 0
        buffer = self._workspaces.get(stream)
        if buffer is None:
            torch = sys.modules.get("torch")
            if torch is None:
                raise WorkspaceError(
                    f"this plan needs a workspace of {self.workspace_size} bytes; pass workspace= a device buffer of that size"
                )
            if is_capturing(stream):
                raise WorkspaceError(
                    "the workspace cannot be allocated while a stream is capturing; "
                    "execute or bind once on that stream before the capture, or pass workspace="
                )
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
                buffer = torch.empty(self.workspace_size, dtype=torch.uint8, device=f"cuda:{self.device}")
            self._workspaces[stream] = buffer
        return buffer, buffer.data_ptr()

    def closed_twin(self) -> Loaded:
        """What a plan that was closed by itself holds in place of this."""
        twin = Loaded(self.load, device=self.device, workspace_size=self.workspace_size, entry=self.entry, releases=self._releases)
        twin.closed = True
        return twin

    def close(self) -> None:
        """Drops executables and workspaces."""
        self.closed = True
        self._local = threading.local()
        self._workspaces.clear()


class Plan:
    """A ready plan for the graph that it was asked for with. `origin`: `memory`, `local` or `built`."""

    def __init__(self, loaded: Loaded, tensors: Sequence[Any], layouts: Sequence[Layout], graph: Any, origin: str) -> None:
        """`tensors`: the caller's, in the order of the entry's operands, with their lowered `layouts`; `graph`: the caller's."""
        self._loaded = loaded
        self.origin = origin
        # as they are now: the caller may renumber, rename and change them
        self._frozen = [(tensor, tensor.uid, tensor.name, bool(tensor.is_pass_by_value), tensor.reordering_type) for tensor in tensors]
        self._layouts = layouts
        self._outputs = frozenset(id(tensor) for node in graph._nodes for tensor in node.outputs.values())
        self._bound = dict(graph._data_bindings)  # buffers that the caller described the graph with, by uid

    @lazy
    def operands(self) -> tuple[Operand, ...]:
        """What an execution must bind, in the words of the graph that was planned."""
        from plancache.operands import Operand  # not before something is run: a start-up plans first

        return tuple(
            Operand(name, uid, layout.dim, layout.stride, layout.data_type or "NOT_SET", id(tensor) in self._outputs, by_value)
            for (tensor, uid, name, by_value, _), layout in zip(self._frozen, self._layouts, strict=True)
        )

    @lazy
    def _slots(self) -> dict[Any, Slot]:
        """Slots by tensor, uid and, where only one has it, name."""
        from plancache.operands import Slot

        frozen = zip(self._frozen, self.operands, strict=True)
        device = self._loaded.device
        slots = [Slot(index, own[0], operand, device, own[4]) for index, (own, operand) in enumerate(frozen)]
        names = [slot.operand.name for slot in slots]
        found: dict[Any, Slot] = {}
        for slot in slots:
            found[slot.tensor] = found[slot.uid] = slot
            if names.count(slot.operand.name) == 1:
                found[slot.operand.name] = slot
        return found

    @property
    def entry(self) -> Entry | None:
        """The stored entry behind this plan; None for a graph that was built without the cache."""
        return self._loaded.entry

    @property
    def workspace_size(self) -> int:
        """Bytes of workspace that an execution needs."""
        return self._loaded.workspace_size

    def execute(self, operands: Mapping[Any, Any], workspace: Any = None, *, stream: int | None = None) -> None:
        """Runs the plan, asynchronously, on torch's current stream or the CUDA stream handle given.

        `operands`: buffer by tensor, uid or name of the graph that was planned, every one of `Plan.operands`: torch
        tensors on the plan's device (or objects with `__cuda_array_interface__`), of the declared dtype, shape and
        strides, 16-byte aligned; by-value scalars as numbers or CPU tensors. `workspace`: a device buffer of at least
        `workspace_size` bytes; without one the plan keeps one per stream, from torch. Raises `OperandError`,
        `WorkspaceError`, `NotExecutableError`, before cuDNN is called.
        """
        seat = self._loaded.seat()
        buffers, addresses = self._check(operands)
        if stream is None:
            stream = self._loaded.stream()
        space, address = self._loaded.workspace(stream) if workspace is None else self._given(workspace)
        seat.executable.run(buffers, addresses, space, address, stream)

    def bind(self, operands: Mapping[Any, Any], workspace: Any = None) -> Callable[..., None]:
        """A function that runs the plan on these operands, checked once and kept alive: for hot loops.

        It takes `stream=` as `execute` does and belongs to the thread that bound it. Reading and writing the buffers'
        contents between calls is what it is for; resizing or freeing them is not.
        """
        seat, loaded = self._loaded.seat(), self._loaded
        buffers, addresses = self._check(operands)
        given = None if workspace is None else self._given(workspace)
        thread, ident, process = threading.get_ident(), threading.get_ident, os.getpid
        runners: dict[int, Callable[[int], None]] = {}

        def runner_on(stream: int) -> Callable[[int], None]:
            space, address = given or loaded.workspace(stream)
            runners[stream] = seat.executable.runner(buffers, addresses, space, address)
            return runners[stream]

        def run(*, stream: int | None = None) -> None:
            if ident() != thread or loaded.closed or process() != seat.process:
                raise NotExecutableError("a bound plan runs in the thread that bound it, while its cache is open; bind it again here")
            if stream is None:
                stream = loaded.stream()
            (runners.get(stream) or runner_on(stream))(stream)

        if sys.modules.get("torch") is not None:
            runner_on(loaded.stream())  # so that a capture that follows finds its workspace
        return run

    def _check(self, operands: Mapping[Any, Any]) -> tuple[list[Any], list[int]]:
        """The buffers and their addresses in the entry's order: the hot path of every execution."""
        slots = self._slots
        count = len(self._layouts)
        buffers: list[Any] = [None] * count
        addresses = [0] * count
        if not hasattr(operands, "items"):
            raise OperandError(f"operands must be a mapping from tensor, uid or name to buffer, not a {type(operands).__name__}")
        for name, buffer in operands.items():
            slot = slots.get(name)
            if slot is None or slot.uid != slot.tensor.uid:
                raise self._foreign(name, slot)
            address = 0
            try:
                if (
                    buffer.dtype is slot.dtype
                    and buffer.shape == slot.shape
                    and buffer.stride() == slot.stride
                    and buffer.get_device() == slot.device
                ):
                    address = buffer.data_ptr()
            except (AttributeError, TypeError):
                pass  # no torch tensor
            if not address or address & 15:  # ALIGNMENT_BYTES - 1
                buffer, address = slot.accept(buffer)
            if addresses[slot.index]:
                raise OperandError(f"operand {slot.operand.name!r} (uid {slot.uid}) is given twice")
            buffers[slot.index] = buffer
            addresses[slot.index] = address
        for uid, buffer in self._bound.items():
            slot = slots.get(uid)
            if slot is not None and not addresses[slot.index]:
                buffers[slot.index], addresses[slot.index] = slot.accept(buffer)
        if 0 in addresses:
            missing = [
                f"{operand.name!r} (uid {operand.uid})" for operand, address in zip(self.operands, addresses, strict=True) if not address
            ]
            raise OperandError(f"missing operands: {', '.join(missing)}; bind every tensor of Plan.operands")
        return buffers, addresses

    def _foreign(self, name: Any, slot: Slot | None) -> OperandError:
        if slot is not None:
            return OperandError(
                f"tensor {slot.operand.name!r} had uid {slot.uid} when it was planned and has {slot.tensor.uid} now; "
                "plan the graph again after changing it"
            )
        known = ", ".join(f"{operand.name!r} (uid {operand.uid})" for operand in self.operands)
        what = repr(name) if isinstance(name, int | str) else f"tensor {getattr(name, 'name', name)!r}"
        why = "a tensor of another graph, an intermediate, or a constant"
        return OperandError(f"{what} is no operand of this plan ({why}); its operands are {known}")

    def _given(self, workspace: Any) -> tuple[Any, int]:
        """A workspace of the caller's, checked, and its address."""
        try:
            if workspace.get_device() == self._loaded.device and workspace.nbytes >= self.workspace_size and workspace.is_contiguous():
                address = workspace.data_ptr()
                if not address & 15:  # ALIGNMENT_BYTES - 1
                    return workspace, address
        except (AttributeError, TypeError):
            pass  # no torch tensor
        from plancache.operands import ALIGNMENT_BYTES, described

        interface = getattr(workspace, "__cuda_array_interface__", None)
        if hasattr(workspace, "data_ptr"):
            size, address = workspace.numel() * workspace.element_size(), int(workspace.data_ptr())
            fits = workspace.get_device() == self._loaded.device and workspace.is_contiguous()
        elif interface is not None:
            size, address = math.prod(interface["shape"]) * int(interface["typestr"][2:]), int(interface["data"][0])
            fits = not interface.get("strides")
        else:
            kind = type(workspace).__name__
            raise WorkspaceError(f"workspace must be a torch tensor, or an object with __cuda_array_interface__, not a {kind}")
        if not fits or size < self.workspace_size:
            needed = f"{self.workspace_size} contiguous bytes on cuda:{self._loaded.device}"
            raise WorkspaceError(f"workspace must be {needed}; got {described(workspace)}")
        if address % ALIGNMENT_BYTES:
            raise WorkspaceError(f"workspace must be aligned to {ALIGNMENT_BYTES} bytes")
        return workspace, address

    def close(self) -> None:
        """Lets go of the plan: it can no longer run. The cache may keep it for others; plan the graph again to run it."""
        self._loaded = self._loaded.closed_twin()

    def __repr__(self) -> str:
        entry = self.entry
        return f"<Plan {entry.description.summary}, {entry.engine}, {self.origin}>" if entry else "<Plan without the cache>"
