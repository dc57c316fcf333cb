"""The device and the libraries of this process or of a device file, as plain facts.

Sources: the properties are those of `cudnn.create_device_properties(ordinal).serialize()`; which of them cuDNN
compares when it loads a plan, and which variables change results, was measured (docs/environment.md).
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from plancache.errors import DeviceError, DeviceFileError, LibraryError
from plancache.lazy import lazy

LIMITS = (
    "maxGridSize",
    "maxBlockSize",
    "regsPerBlock",
    "multiProcessorCount",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
    "maxRegistersPerSM",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "deviceVer",
)
"""Device properties that cuDNN compares when it loads a plan (ARCH_MISMATCH where one differs)."""

REQUIRED = (*LIMITS, "driverVer", "deviceName")

FRONTENDS = ((1, 32), (1, 33))
"""Tested frontends: from the first version up to, not including, the second."""

_RESULT_CHANGING = ("NVIDIA_TF32_OVERRIDE", "CUDNN_", "CUBLAS_", "CUBLASLT_", "CUTE_DSL_", "FROST_")
"""Beginnings of environment variables that can change what cuDNN plans or computes."""

_LOG_OR_PLACE = frozenset("LOG LOGS LOGINFO LOGERR LOGWARN LOGDEST LOGLEVEL LOGGING PATH DIR HOME ROOT FILE FOLDER".split())


@dataclass(frozen=True)
class Device:
    """A GPU: its properties by cuDNN's names, and the cuDNN version that they were written down with (such as 91900).

    `ordinal`: the CUDA device index in this process; None for a device file. Of a GPU of this process only the
    properties that a key needs are known, straight from the driver; `described` asks cuDNN for all of them.
    """

    properties: Mapping[str, Any] = field(repr=False)
    cudnn_version: int | None
    ordinal: int | None = None

    @classmethod
    def current(cls, ordinal: int | None = None) -> Device:
        """The CUDA device that is current in this thread, or the one named. Raises `DeviceError` where there is none."""
        return _read_device(current_ordinal() if ordinal is None else ordinal)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Device:
        """A device file: JSON with `cudnn_version` and `properties`, or the bare properties.

        A bare name such as `h200` takes the file that the package ships. Raises `DeviceFileError`.
        """
        text = _device_text(path)
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DeviceFileError(f"device file {path} is not JSON ({error}); {_WRITE_ONE}") from None
        wrapped = isinstance(data, dict) and "properties" in data
        properties = data["properties"] if wrapped else data
        missing = [name for name in REQUIRED if not isinstance(properties, dict) or name not in properties]
        if missing:
            raise DeviceFileError(f"device file {path} lacks {', '.join(missing)}; {_WRITE_ONE}")
        for name in ("deviceVer", "driverVer", "multiProcessorCount"):
            if type(properties[name]) is not int:
                raise DeviceFileError(f"device file {path}: {name} must be a whole number, not {properties[name]!r}; {_WRITE_ONE}")
        version = data.get("cudnn_version") if wrapped else None
        if version is not None and type(version) is not int:
            raise DeviceFileError(f"device file {path}: cudnn_version must be a whole number such as 91900, not {version!r}")
        return cls(properties, version)

    @property
    def is_file(self) -> bool:
        return self.ordinal is None

    @property
    def model(self) -> str:
        """The device's name, such as `NVIDIA H200`."""
        return str(self.properties["deviceName"])

    @lazy
    def sm_version(self) -> int:
        """Compute capability times ten: 90 for 9.0."""
        return int(self.properties["deviceVer"]) // 10

    @property
    def driver_version(self) -> int:
        """The CUDA driver API version, such as 13000."""
        return int(self.properties["driverVer"])

    @lazy
    def properties_json(self) -> str:
        """The properties as cuDNN reads them."""
        return json.dumps(self.properties, separators=(",", ":"))

    def described(self) -> Device:
        """This device as a device file describes it, with all of cuDNN's properties."""
        if self.ordinal is None:
            return self
        cudnn = load_frontend()
        try:
            properties = json.loads(cudnn.create_device_properties(self.ordinal).serialize())
        except RuntimeError as error:
            raise DeviceError(f"cuDNN cannot tell the properties of CUDA device {self.ordinal} ({error})") from error
        return Device(properties, cudnn.backend_version())

    def to_json(self) -> str:
        """The text of a device file."""
        device = self.described()
        return json.dumps({"cudnn_version": device.cudnn_version, "properties": dict(device.properties)}, indent=1) + "\n"

    def is_described_by(self, device_property: Any) -> bool:
        """Whether cuDNN's property object is of a device on which the same plans are valid."""
        try:
            theirs = json.loads(device_property.serialize())
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        return all(theirs.get(name) == self.properties[name] for name in REQUIRED)


def _device_text(path: str | os.PathLike[str]) -> str:
    file = Path(path)
    shipped = _SHIPPED / f"{os.fspath(path)}.json"
    if re.fullmatch(r"[\w-]+", os.fspath(path)) and not file.exists() and shipped.exists():
        file = shipped
    try:
        return file.read_text()
    except OSError as error:
        names = ", ".join(sorted(entry.stem for entry in _SHIPPED.glob("*.json")))
        raise DeviceFileError(f"cannot read device file {path}: {error.strerror}; the package ships {names}") from None
    except ValueError:
        raise DeviceFileError(f"device file {path!r} is not text, or no path; {_WRITE_ONE}") from None


_WRITE_ONE = "write one on that GPU with 'plancache doctor --write-device FILE'"
_SHIPPED = Path(__file__).parent / "devices"


# ---- libraries of this process --------------------------------------------------------------------------------------


def load_frontend() -> Any:
    """The `cudnn` module. Raises `LibraryError` that says what is missing and how to get it."""
    try:
        import cudnn
    except ImportError as error:
        raise LibraryError(f"cannot import cudnn ({error}); pip install nvidia-cudnn-frontend") from error
    except (OSError, AssertionError) as error:  # the frontend loads libcudnn when it is imported
        raise LibraryError(f"libcudnn cannot be loaded ({error}); {_GET_CUDNN}") from error
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        raise LibraryError(f"libcudnn cannot be loaded ({error}); {_GET_CUDNN}") from error
    return cudnn


_GET_CUDNN = (
    "pip install 'plancache[cudnn]', install torch with CUDA, or put the folder of libcudnn.so.9 on LD_LIBRARY_PATH; "
    "'plancache doctor' shows what was found where"
)


def current_ordinal() -> int:
    """The CUDA device that is current in this thread. Raises `DeviceError` where there is none."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.version.cuda:
            return int(torch.cuda.current_device())
        load_frontend()
        from cudnn.frost.device import ambient_device

        return int(ambient_device())
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise DeviceError(f"no CUDA device to plan for ({error}); {_NO_GPU}") from error


_NO_GPU = "on a machine without a GPU pass device=plancache.Device.from_file(...), or --device FILE"

_ATTRIBUTES = {  # CUdevice_attribute in cuda.h, by cuDNN's name for the property
    "maxGridSize": (5, 6, 7),
    "maxBlockSize": (2, 3, 4),
    "regsPerBlock": (12,),
    "multiProcessorCount": (16,),
    "maxSharedMemoryPerBlock": (8,),
    "maxSharedMemoryPerBlockOptin": (97,),
    "reservedSharedMemoryPerBlock": (111,),
    "maxRegistersPerSM": (82,),
    "maxThreadsPerBlock": (1,),
    "maxThreadsPerSM": (39,),
}
_COMPUTE_CAPABILITY = 75, 76


def _read_device(ordinal: int) -> Device:
    """A GPU as the driver describes it: 0.1 ms, where asking cuDNN loads libraries that a hit may not need."""
    import ctypes  # 3 ms, which commands without a GPU do not need

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no CUDA driver ({error}); {_NO_GPU}") from None

    def ask(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise DeviceError(f"CUDA device {ordinal} does not answer ({function} returned {code}); {_NO_GPU}")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        ask("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    handle, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(handle), ordinal)
    ask("cuDriverGetVersion", ctypes.byref(version))
    ask("cuDeviceGetName", name, len(name), handle)
    values = {key: [attribute(number) for number in numbers] for key, numbers in _ATTRIBUTES.items()}
    properties: dict[str, Any] = {key: value if len(value) > 1 else value[0] for key, value in values.items()}
    major, minor = map(attribute, _COMPUTE_CAPABILITY)
    properties |= {"deviceVer": major * 100 + minor * 10, "driverVer": version.value, "deviceName": name.value.decode()}
    return Device(properties, None, ordinal)


class Library(NamedTuple):
    """A shared library: where it is, and its ELF build id (None where it has none)."""

    path: str
    build_id: str | None


def mapped_libraries(name: str) -> list[str]:
    """Paths of the shared libraries `name`.so[.version] mapped into this process, sorted."""
    with open("/proc/self/maps") as maps:
        paths = {line[line.index("/") :].rstrip("\n") for line in maps if name in line and "/" in line}
    return sorted(path for path in paths if _is_library(path, name))


def _is_library(path: str, name: str) -> bool:
    found, _, version = path.rpartition("/")[2].partition(".so")
    return found == name and version.replace(".", "").isdigit() == bool(version)


def build_id(path: str) -> str | None:
    """The GNU build id in an ELF file's notes (elf.h: PT_NOTE 4, NT_GNU_BUILD_ID 3), as hex."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            if header[:6] != b"\x7fELF\x02\x01":
                return None
            (offset,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
            file.seek(offset)
            table = file.read(size * count)
            for at in range(0, size * count, size):
                kind, start, length = struct.unpack_from("<I4xQ16xQ", table, at)
                if kind == 4:
                    file.seek(start)
                    if found := _build_id_note(file.read(min(length, 1 << 16))):
                        return found
    except (OSError, struct.error):
        pass
    return None


def _build_id_note(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + (name_size + 3 & ~3)
        if kind == 3 and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[start : start + size].hex()
        at = start + (size + 3 & ~3)
    return None


def cudnn_libraries() -> tuple[dict[str, Library], str | None]:
    """The libcudnn libraries beside the loaded one, by name; and why they are not known for certain, or None."""
    mapped = mapped_libraries("libcudnn")
    if len(mapped) != 1:
        found = " and ".join(mapped) or "none"
        return {}, f"{found} mapped as libcudnn.so: which one cuDNN's frontend uses is not known"
    folder = mapped[0].rpartition("/")[0]
    files = {name: f"{folder}/{file}" for file in sorted(os.listdir(folder)) if (name := _cudnn_name(file))}  # noqa: PTH208  # faster
    libraries = {name: Library(path, build_id(path)) for name, path in files.items()}
    nameless = [library.path for library in libraries.values() if library.build_id is None]
    return libraries, f"{nameless[0]} has no ELF build id" if nameless else None


def _cudnn_name(file: str) -> str | None:
    """`libcudnn_ops` for libcudnn_ops.so.9, the name that libraries are loaded by; None for other files."""
    name, _, version = file.partition(".so.")
    return name if name.startswith("libcudnn") and version.isdigit() else None


class Libraries(NamedTuple):
    """cuDNN and its frontend as loaded in this process; `unknown` says what could not be found out, or is None."""

    cudnn_version: int
    frontend_version: str
    cudnn: Mapping[str, Library]
    unknown: str | None

    @classmethod
    def loaded(cls) -> Libraries:
        cudnn = load_frontend()
        return cls(cudnn.backend_version(), str(cudnn.__version__), *cudnn_libraries())

    @property
    def frontend_tested(self) -> bool:
        """Whether plancache knows this frontend's graphs."""
        return FRONTENDS[0] <= _version(self.frontend_version) < FRONTENDS[1]

    @property
    def folder(self) -> str | None:
        """The folder that libcudnn was loaded from."""
        return next((str(Path(library.path).parent) for library in self.cudnn.values()), None)


def version_text(cudnn_version: int) -> str:
    """`9.19.0` for 91900."""
    return f"{cudnn_version // 10000}.{cudnn_version // 100 % 100}.{cudnn_version % 100}"


def cuda_version(number: int) -> str:
    """`13.0` for 13000 (CUDA_VERSION in cuda.h)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@lru_cache(maxsize=1)
def variables_of_this_process() -> dict[str, str]:
    """The result-changing variables when this process first planned: cuDNN reads some of them once."""
    return result_changing_variables()


class Here(Mapping[str, "str | None"]):
    """What an entry can require beyond its key, found out when asked; None where it is not there."""

    NAMES = ("cublasLt", "nvidia-cutlass-dsl", "apache-tvm-ffi", "machine")

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries
        self._found: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> str | None:
        if name not in self._found:
            found = self._find(name)
            if found is None:
                return None  # a library may still be loaded later
            self._found[name] = found
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    def _find(self, name: str) -> str | None:
        if name == "machine":
            return os.uname().machine
        if name == "cublasLt":
            path = loaded_or_near("libcublasLt", self._libraries.folder)
            return path and build_id(path)
        if name in self.NAMES:
            from importlib import metadata

            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                return None
        return None


def loaded_or_near(name: str, cudnn_folder: str | None) -> str | None:
    """The library that cuDNN uses: the one mapped, else the one in the packages beside cuDNN's, which it looks in."""
    mapped = mapped_libraries(name)
    if len(mapped) == 1:
        return mapped[0]
    if mapped or cudnn_folder is None:
        return None
    packages = Path(cudnn_folder).parent.parent
    near = [str(path) for folder in ("cu13", "cublas", "cuda_nvrtc") for path in packages.glob(f"{folder}/lib/{name}.so.*")]
    found = [path for path in near if _is_library(path, name)]
    return found[0] if len(found) == 1 else None


def result_changing_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that can change what cuDNN plans or computes, as set now (logs and places apart)."""
    environ = os.environ if environ is None else environ
    names = [name for name in environ if name.startswith(_RESULT_CHANGING)]
    return {name: environ[name] for name in sorted(names) if _LOG_OR_PLACE.isdisjoint(name.split("_"))}
