"""The doctor's look at versions, libraries, the GPU and the means to build without one."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from plancache import __version__
from plancache.cli.libraries import places, search
from plancache.cli.report import Report
from plancache.cli.tables import size
from plancache.cli.target import SHIPPED, shipped_devices
from plancache.environment import FRONTENDS, Device, Libraries, build_id, cuda_version, loaded_or_near, mapped_libraries, version_text
from plancache.errors import CompilerError, DeviceError, LibraryError

_CUDNN = r"libcudnn\.so(\.\d+)*"
_HELPERS = {  # by name: the file; what is missing where it is absent; the package that brings it
    "libcublasLt": (r"libcublasLt\.so\.\d+", "engines that call cuBLASLt cannot be used", "nvidia-cublas"),
    "libnvrtc": (r"libnvrtc\.so\.\d+", "engines that are compiled at run time cannot be built", "nvidia-cuda-nvrtc"),
}


def load_libraries() -> Libraries | Exception:
    """cuDNN and its frontend, loaded; or why they cannot be."""
    try:
        return Libraries.loaded()
    except (ImportError, OSError, AssertionError) as error:  # LibraryError, and what the frontend's own search can raise
        return error


def look_at_versions(report: Report, libraries: Libraries | Exception) -> None:
    low, high = (".".join(map(str, bound)) for bound in FRONTENDS)
    report.section("versions")
    report.fact("plancache", __version__)
    report.fact("python", platform.python_version(), f"{platform.python_version()}  {sys.executable}")
    frontend = _installed("nvidia-cudnn-frontend")
    report.fact("frontend", frontend, f"nvidia-cudnn-frontend {frontend or 'not installed'}, tested with >={low},<{high}")
    if isinstance(libraries, Libraries):
        report.fact("cudnn", libraries.cudnn_version, version_text(libraries.cudnn_version))
        if not libraries.frontend_tested:
            report.problem(
                f"nvidia-cudnn-frontend {libraries.frontend_version} is not one that plancache was tested with, so nothing is cached; "
                f"pip install 'nvidia-cudnn-frontend>={low},<{high}'"
            )
    torch = _installed("torch")
    report.fact("torch", torch, torch or "not installed (needed by plancache.graphs' references, not by the cache)")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def look_at_libraries(report: Report, libraries: Libraries | Exception) -> None:
    report.section("libraries")
    copies = search(_CUDNN)
    if isinstance(libraries, Libraries):
        for name, library in libraries.cudnn.items():
            _library(report, name, library.path)
        if libraries.unknown:
            report.problem(f"{libraries.unknown}, so nothing is cached; leave one libcudnn, of NVIDIA's own, in reach")
        folder = libraries.folder
    else:
        _look_at_missing_cudnn(report, libraries)
        folder = None
    distinct = {build_id(copy.path) or copy.path: copy for copy in copies}
    if len(distinct) > 1:
        them = " and ".join(f"{copy.path} (from {copy.through})" for copy in distinct.values())
        report.problem(f"several libcudnn are in reach: {them}; keep one: uninstall the others, or take them off LD_LIBRARY_PATH")
    for name, (pattern, consequence, package) in _HELPERS.items():
        path = loaded_or_near(name, folder) or next((found.path for found in search(pattern)), None)
        _library(report, name, path)
        if path is None:
            report.warning(f"{name} is absent: {consequence}; pip install {package}, or install torch with CUDA")
    _library(report, "libcuda", driver_library())
    if os.environ.get("LD_LIBRARY_PATH"):
        report.fact("LD_LIBRARY_PATH", os.environ["LD_LIBRARY_PATH"])


def _library(report: Report, name: str, path: str | None) -> None:
    build = build_id(path) if path else None
    value = {"path": path, "build_id": build} if path else None
    report.fact(name, value, f"{build[:12] if build else 'no build id ':12}  {path}" if path else "absent")


def _look_at_missing_cudnn(report: Report, error: Exception) -> None:
    spec = importlib.util.find_spec("cudnn")
    origin = spec.origin if spec else None
    report.fact("frontend", origin, origin or "absent: there is no module cudnn")
    copies = search(_CUDNN)
    for number, copy in enumerate(copies, 1):
        name = "libcudnn" if number == 1 else f"libcudnn ({number})"
        report.fact(name, {"path": copy.path, "build_id": build_id(copy.path)}, f"not loaded, in {copy.through}: {copy.path}")
    if not copies:
        report.fact("libcudnn", None, f"absent: not in {places()}")
    where = f"libcudnn is at {' and '.join(copy.path for copy in copies)}" if copies else f"there is no libcudnn in {places()}"
    cure = "" if isinstance(error, LibraryError) else "; mend or remove it, or pip install --force-reinstall 'plancache[cudnn]'"
    report.problem(f"cuDNN cannot be used ({where}): {error}{cure}")
    if origin is not None and _installed("nvidia-cudnn-frontend"):
        installed = Path(str(metadata.distribution("nvidia-cudnn-frontend").locate_file("cudnn")))
        if Path(origin).parent.resolve() != installed.resolve():
            report.problem(f"{origin} hides the installed nvidia-cudnn-frontend; rename it, or take its folder off PYTHONPATH")


def driver_library() -> str | None:
    """The driver's library, loaded where it is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return next(iter(mapped_libraries("libcuda")), "libcuda.so.1")


def look_at_device(report: Report, libraries: Libraries | Exception, ordinal: int | None) -> None:
    report.section("device")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        report.fact("CUDA_VISIBLE_DEVICES", os.environ["CUDA_VISIBLE_DEVICES"])
    loaded = isinstance(libraries, Libraries)
    try:
        device = Device.current(0 if ordinal is None and not loaded else ordinal)  # which one is current, cuDNN's frontend says
    except DeviceError as error:
        report.fact("gpu", None, "none")
        if ordinal is not None:
            report.problem(f"{error}; name a device that is there with --device-ordinal, or leave it out")
        else:
            report.note(f"no GPU: plans can be built for a device file (plancache warm --device h200) and are run elsewhere: {error}")
        return
    report.fact("gpu", device.model, f"{device.model} (CUDA device {device.ordinal})")
    capability = device.sm_version
    report.fact("compute_capability", capability, f"{capability // 10}.{capability % 10}")
    report.fact("multiprocessors", device.properties["multiProcessorCount"])
    report.fact("driver_version", device.driver_version, f"CUDA {cuda_version(device.driver_version)}")
    if loaded:
        _look_at_description(report, device)


def _look_at_description(report: Report, device: Device) -> None:
    """What cuDNN says of a GPU that the driver has: it must be able to use it."""
    try:
        memory = device.described().properties.get("totalGlobalMem")
    except DeviceError as error:
        report.problem(f"{error}, though the driver has it; install a cuDNN for CUDA {cuda_version(device.driver_version)} or older")
    else:
        report.fact("memory_bytes", memory, "unknown" if memory is None else size(memory))


def _look_at_shipped(report: Report, libraries: Libraries | Exception) -> None:
    """A device file serves the cuDNN that it comes from."""
    for name in shipped_devices():
        version = Device.from_file(SHIPPED / f"{name}.json").cudnn_version
        text = "unknown" if version is None else version_text(version)
        report.fact(f"device file {name}", version, f"of cuDNN {text}")
        if isinstance(libraries, Libraries) and version not in (None, libraries.cudnn_version):
            report.note(
                f"device file {name} comes from cuDNN {text}, and {version_text(libraries.cudnn_version)} is loaded: for that GPU write "
                "another one where it is, with this cuDNN: plancache doctor --write-device FILE"
            )


def look_at_building(report: Report, libraries: Libraries | Exception) -> None:
    """Can plans be built for a device file here? Tries it where it takes a compiler."""
    from plancache.compiler import c_compiler, compile_stub

    report.section("building without a GPU")
    _look_at_shipped(report, libraries)
    driver = driver_library()
    if driver:
        report.fact("possible", True, f"yes, with the driver's library {driver}")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="plancache-") as folder:
            compile_stub(f"{folder}/libcuda.so.1", 13000)
    except CompilerError as error:
        report.fact("possible", False, "no")
        report.problem(str(error))
    else:
        report.fact("possible", True, f"yes, with a stand-in for the driver's library that {c_compiler()} compiles")
