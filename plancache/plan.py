"""A plan that is ready to run: binds operands, finds its workspace and stream, executes.

The backend takes bare pointers and checks nothing, so every operand is checked here, against the lowered layout.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from plancache.entry import Entry, Layout
from plancache.errors import NotExecutableError, OperandError, WorkspaceError

ALIGNMENT_BYTES = 16
"""cuDNN's default alignment of operands, for which plans are built."""

_TORCH_TYPES = {
    "BFLOAT16": "bfloat16",
    "BOOLEAN": "bool",
    "DOUBLE": "float64",
    "FLOAT": "float32",
    "FP4_E2M1": "float4_e2m1fn_x2",
    "FP8_E4M3": "float8_e4m3fn",
    "FP8_E5M2": "float8_e5m2",
    "FP8_E8M0": "float8_e8m0fnu",
    "HALF": "float16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
}
_ARRAY_TYPES = {  # __cuda_array_interface__ spells no other
    "HALF": "<f2",
    "FLOAT": "<f4",
    "DOUBLE": "<f8",
    "INT8": "|i1",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "|u1",
    "BOOLEAN": "|b1",
}
_SCALARS = {"FLOAT": "<f", "DOUBLE": "<d", "HALF": "<e", "INT32": "<i", "INT64": "<q", "INT8": "<b", "UINT8": "<B", "BOOLEAN": "<?"}


class Executable(Protocol):
    """A plan loaded for one thread; `buffers` and `addresses` come in the order of the entry's operands."""

    def run(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int, stream: int) -> None: ...

    def runner(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int) -> Callable[[int], None]: ...


class Loaded:
    """A plan of one cache and device: its executable in each thread, its workspace on each stream."""

    def __init__(self, load: Callable[[], Executable], *, device: int | None, workspace_size: int, entry: Entry | None) -> None:
        self.load = load
        self.device = device
        self.workspace_size = workspace_size
        self.entry = entry
        self.closed = False
        self._local = threading.local()
        self._workspaces: dict[int, Any] = {}
        self._raw_stream: Callable[[int | None], int] | None = None

    def stream(self) -> int:
        """torch's current CUDA stream on the plan's device as a handle, or the default stream (0) where torch is not in use."""
        if self._raw_stream is None:
            torch = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_initialized():
                return 0
            self._raw_stream = torch._C._cuda_getCurrentRawStream  # 40 times faster than a Stream object
        return self._raw_stream(self.device)

    def executable(self) -> Executable:
        """This thread's executable, loaded at first use."""
        found: Executable | None = getattr(self._local, "executable", None)
        if found is None or self.closed:
            if self.closed:
                raise NotExecutableError("the cache of this plan is closed; keep the PlanCache open while its plans run")
            if self.device is None:
                raise NotExecutableError("this plan was made for a device file and cannot run here; plan on the GPU itself to execute")
            found = self._local.executable = self.load()
        return found

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
            if torch.cuda.is_current_stream_capturing():
                raise WorkspaceError(
                    "the workspace cannot be allocated while a stream is capturing; "
                    "execute or bind once on that stream before the capture, or pass workspace="
                )
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
                buffer = torch.empty(self.workspace_size, dtype=torch.uint8, device=f"cuda:{self.device}")
            self._workspaces[stream] = buffer
        return buffer, buffer.data_ptr()

    def close(self) -> None:
        """Drops executables and workspaces."""
        self.closed = True
        self._local = threading.local()
        self._workspaces.clear()


class Operand(NamedTuple):
    """What execution must bind, in the words of the graph that was planned: allocate outputs from it.

    `dim` and `stride` in elements, as lowering resolved them; `data_type` by the frontend's name; `by_value`: a
    scalar that is read on the host when the plan is launched.
    """

    name: str
    uid: int
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: str
    is_output: bool
    by_value: bool


class _Slot:
    """One operand's place and everything that is checked of a buffer for it."""

    def __init__(self, index: int, tensor: Any, operand: Operand, device: int | None, reordered: bool) -> None:
        self.index = index
        self.tensor = tensor
        self.operand = operand
        self.uid, self.by_value = operand.uid, operand.by_value
        self.shape, self.stride = operand.dim, operand.stride
        self.dtype = self._torch_type()
        self.device = -1 if operand.by_value else device
        # packed or reordered bytes: the buffer's own extents say nothing, so only its size is checked
        self.by_size = operand.data_type.startswith("FP4") or reordered

    def _torch_type(self) -> Any:
        """torch's type of this operand, where torch is in use yet."""
        return getattr(sys.modules.get("torch"), _TORCH_TYPES.get(self.operand.data_type, ""), None)

    def accept(self, buffer: Any) -> tuple[Any, int]:
        """A buffer that is not plainly as declared and its address, or `OperandError` that says what is wrong with it."""
        if self.dtype is None:  # planned before torch was imported
            self.dtype = self._torch_type()
        if self.by_value and isinstance(buffer, int | float):
            buffer = self._scalar(buffer)
            return buffer, ctypes.addressof(buffer)
        return buffer, self._address(buffer)

    def _address(self, buffer: Any) -> int:
        if self.by_value:
            return self._host_address(buffer)
        if hasattr(buffer, "data_ptr") and hasattr(buffer, "stride"):
            return self._tensor_address(buffer)
        interface = getattr(buffer, "__cuda_array_interface__", None)
        if interface is not None:
            return self._array_address(interface)
        if type(buffer) is int:
            raise self._error("an address cannot be checked", "pass the tensor itself")
        raise self._error(f"got a {type(buffer).__name__}", "pass a torch tensor, or an object with __cuda_array_interface__")

    def _tensor_address(self, buffer: Any) -> int:
        if buffer.get_device() != self.device:
            raise self._error(f"it is on {buffer.device}, the plan runs on cuda:{self.device}", f".to('cuda:{self.device}')")
        if buffer.dtype is not self.dtype:
            raise self._error(f"dtype is {buffer.dtype}", f"expected {self.operand.data_type} ({self.dtype})")
        if self.by_size:
            if not buffer.is_contiguous() or buffer.numel() * buffer.element_size() < self._bytes(buffer.element_size()):
                raise self._error("it is not contiguous, or too small", f"expected {self._bytes(buffer.element_size())} bytes in one piece")
        else:
            self._check_layout(tuple(buffer.shape), tuple(buffer.stride()))
        return self._aligned(buffer.data_ptr())

    def _array_address(self, interface: Mapping[str, Any]) -> int:
        expected = _ARRAY_TYPES.get(self.operand.data_type)
        kind, shape, strides = interface.get("typestr", "unknown"), tuple(interface.get("shape", ())), interface.get("strides")
        if kind != expected:
            raise self._error(f"type is {kind}", f"expected {self.operand.data_type} ({expected})")
        address, readonly = interface["data"]
        if readonly and self.operand.is_output:
            raise self._error("it is read-only", "pass a buffer that can be written")
        size = int(kind[2:])
        if strides and (len(strides) != len(shape) or any(step % size for step in strides)):
            raise self._error(f"strides of {strides} bytes do not fit shape {shape} of {size}-byte elements", "pass a copy")
        self._check_layout(shape, tuple(step // size for step in strides) if strides else row_major(shape))
        return self._aligned(int(address))

    def _host_address(self, buffer: Any) -> int:
        if not hasattr(buffer, "get_device") or buffer.dtype is not self.dtype or buffer.get_device() != -1 or buffer.numel() != 1:
            needed = f"a number, or a CPU tensor of one {self.operand.data_type} element"
            raise self._error(f"got {_described(buffer)}", f"it is read on the host: pass {needed}")
        return int(buffer.data_ptr())

    def _scalar(self, value: Any) -> Any:
        """A host buffer that holds a number."""
        kind = self.operand.data_type
        try:
            data = _bfloat16(value) if kind == "BFLOAT16" else struct.pack(_SCALARS[kind], value)
        except KeyError:
            raise self._error(f"a number cannot be written as {kind}", "pass a CPU tensor of one element") from None
        except (struct.error, OverflowError) as error:
            raise self._error(f"{value!r} is no {kind} ({error})", "pass a number of that type") from None
        return ctypes.create_string_buffer(data, len(data))

    def _check_layout(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """Extents of 1 may be left out or added, and their strides say nothing; all else must be as declared."""
        if _essence(shape, stride) != _essence(self.shape, self.stride):
            raise self._error(f"shape {shape}, strides {stride}", f"expected shape {self.shape}, strides {self.stride} in elements")

    def _aligned(self, address: int) -> int:
        if not address:
            raise self._error("it has no memory", "pass a tensor with storage on the plan's device")
        if address % ALIGNMENT_BYTES:
            raise self._error(f"its address {address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes", "pass a copy (.clone())")
        return address

    def _bytes(self, element_size: int) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count // 2 if self.operand.data_type.startswith("FP4") else count * element_size

    def _error(self, problem: str, cure: str) -> OperandError:
        return OperandError(f"operand {self.operand.name!r} (uid {self.uid}): {problem}; {cure}")


class Plan:
    """A ready plan for the graph that it was asked for with. `origin`: `memory`, `local` or `built`."""

    def __init__(self, loaded: Loaded, tensors: Sequence[Any], layouts: Sequence[Layout], graph: Any, origin: str) -> None:
        """`tensors`: the caller's, in the order of the entry's operands, with their lowered `layouts`; `graph`: the caller's."""
        self._loaded = loaded
        self.origin = origin
        # as they are now: the caller may renumber, rename and change them
        self._frozen = [(tensor, tensor.uid, tensor.name, bool(tensor.is_pass_by_value), _reordered(tensor)) for tensor in tensors]
        self._layouts = layouts
        self._outputs = frozenset(id(tensor) for node in graph._nodes for tensor in node.outputs.values())
        self._bound = dict(graph._data_bindings)  # buffers that the caller described the graph with, by uid

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """What an execution must bind, in the words of the graph that was planned."""
        return tuple(
            Operand(name, uid, layout.dim, layout.stride, layout.data_type or "NOT_SET", id(tensor) in self._outputs, by_value)
            for (tensor, uid, name, by_value, _), layout in zip(self._frozen, self._layouts, strict=True)
        )

    @cached_property
    def _slots(self) -> dict[Any, _Slot]:
        """Slots by tensor, uid and, where only one has it, name."""
        frozen = zip(self._frozen, self.operands, strict=True)
        device = self._loaded.device
        slots = [_Slot(index, own[0], operand, device, own[4]) for index, (own, operand) in enumerate(frozen)]
        names = [slot.operand.name for slot in slots]
        found: dict[Any, _Slot] = {}
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
        executable = self._loaded.executable()
        buffers, addresses = self._check(operands)
        if stream is None:
            stream = self._loaded.stream()
        space, address = self._loaded.workspace(stream) if workspace is None else self._given(workspace)
        executable.run(buffers, addresses, space, address, stream)

    def bind(self, operands: Mapping[Any, Any], workspace: Any = None) -> Callable[..., None]:
        """A function that runs the plan on these operands, checked once and kept alive: for hot loops.

        It takes `stream=` as `execute` does and belongs to the thread that bound it. Reading and writing the buffers'
        contents between calls is what it is for; resizing or freeing them is not.
        """
        executable, loaded = self._loaded.executable(), self._loaded
        buffers, addresses = self._check(operands)
        given = None if workspace is None else self._given(workspace)
        thread, ident = threading.get_ident(), threading.get_ident
        runners: dict[int, Callable[[int], None]] = {}

        def runner_on(stream: int) -> Callable[[int], None]:
            space, address = given or loaded.workspace(stream)
            runners[stream] = executable.runner(buffers, addresses, space, address)
            return runners[stream]

        def run(*, stream: int | None = None) -> None:
            if ident() != thread or loaded.closed:
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

    def _foreign(self, name: Any, slot: _Slot | None) -> OperandError:
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
            raise WorkspaceError(f"workspace must be {needed}; got {_described(workspace)}")
        if address % ALIGNMENT_BYTES:
            raise WorkspaceError(f"workspace must be aligned to {ALIGNMENT_BYTES} bytes")
        return workspace, address

    def __repr__(self) -> str:
        entry = self.entry
        return f"<Plan {entry.description.summary}, {entry.engine}, {self.origin}>" if entry else "<Plan without the cache>"


def _bfloat16(value: float) -> bytes:
    """A number as bfloat16, rounded to nearest even as torch does."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value == value:  # a NaN keeps its upper half
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)


def _reordered(tensor: Any) -> bool:
    return getattr(tensor.reordering_type, "name", "NONE") != "NONE"


def _essence(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(extent, step) for extent, step in zip(shape, stride, strict=True) if extent != 1]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense buffer, last extent fastest."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _described(buffer: Any) -> str:
    if hasattr(buffer, "dtype") and hasattr(buffer, "shape"):
        return f"{buffer.dtype} {tuple(buffer.shape)} on {getattr(buffer, 'device', '?')}"
    return repr(buffer)[:60]
