"""What an execution must bind, and whether a buffer is that.

The backend takes bare pointers and checks nothing, so every buffer is held against the lowered layout of its operand.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from plancache.errors import OperandError
from plancache.signature import row_major

ALIGNMENT_BYTES = 16
"""cuDNN's default alignment of operands, for which plans are built."""

TORCH_TYPES = {
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


class Slot:
    """One operand's place and everything that is checked of a buffer for it."""

    def __init__(self, index: int, tensor: Any, operand: Operand, device: int | None, reordering: Any) -> None:
        self.index = index
        self.tensor = tensor
        self.operand = operand
        self.uid, self.by_value = operand.uid, operand.by_value
        self.shape, self.stride = operand.dim, operand.stride
        self.dtype = self._torch_type()
        self.device = -1 if operand.by_value else device
        # packed or reordered bytes: the buffer's own extents say nothing, so only its size is checked
        self.by_size = operand.data_type.startswith("FP4") or getattr(reordering, "name", "NONE") != "NONE"

    def _torch_type(self) -> Any:
        """torch's type of this operand, where torch is in use yet."""
        return getattr(sys.modules.get("torch"), TORCH_TYPES.get(self.operand.data_type, ""), None)

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
        self._check_layout(shape, tuple(step // size for step in strides) if strides else tuple(row_major(shape)))
        return self._aligned(int(address))

    def _host_address(self, buffer: Any) -> int:
        if not hasattr(buffer, "get_device") or buffer.dtype is not self.dtype or buffer.get_device() != -1 or buffer.numel() != 1:
            needed = f"a number, or a CPU tensor of one {self.operand.data_type} element"
            raise self._error(f"got {described(buffer)}", f"it is read on the host: pass {needed}")
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


def _bfloat16(value: float) -> bytes:
    """A number as bfloat16, rounded to nearest even as torch does."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value == value:  # a NaN keeps its upper half
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)


def _essence(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(extent, step) for extent, step in zip(shape, stride, strict=True) if extent != 1]


def described(buffer: Any) -> str:
    if hasattr(buffer, "dtype") and hasattr(buffer, "shape"):
        return f"{buffer.dtype} {tuple(buffer.shape)} on {getattr(buffer, 'device', '?')}"
    return repr(buffer)[:60]
