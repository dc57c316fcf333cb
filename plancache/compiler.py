"""Device-less builds, in a child process that plancache starts: `python -m plancache.compiler`.

cuDNN's runtime-compiling engines want libcuda.so.1. Where there is no driver, the child compiles a stub of it
(driver_stub.c) into a private temporary folder and loads that; the caller's process never sees it. A crash in cuDNN
ends the child and is an error for one graph.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn

from plancache.entry import Built, decode_facts, encode_facts
from plancache.environment import Device, load_frontend, result_changing_variables
from plancache.errors import CompilerError, PlancacheError
from plancache.key import Constraints

_STUB = Path(__file__).with_name("driver_stub.c")
_SIZES = struct.Struct("<II")


class Compiler:
    """Builds for a device file. One child serves all builds until `close`; a new one follows where variables changed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._child: subprocess.Popen[bytes] | None = None
        self._variables: dict[str, str] = {}
        self._guard = threading.Lock()

    def build(self, signature: bytes, constraints: Constraints) -> Built:
        """Builds a signature. Raises cuDNN's own error where it has no plan, `CompilerError` where the child fails."""
        request = json.dumps({"device": asdict(self._device), "constraints": asdict(constraints)}).encode()
        with self._guard:
            child = self._running()
            try:
                _send(child.stdin, request, signature)
                answer, blob = _receive(child.stdout)
            except (EOFError, OSError) as error:
                raise CompilerError(self._obituary()) from error
            except BaseException:  # interrupted: the answer would be taken for the next request's
                child.kill()
                self._stop()
                raise
        facts = json.loads(answer)
        if facts.pop("of") != _digest(request, signature):
            self.close()
            raise CompilerError("the process that builds without a GPU answered another request; it was ended, ask again")
        return _built_or_raise(facts, blob)

    def _running(self) -> subprocess.Popen[bytes]:
        variables = result_changing_variables()
        if self._child is not None and (self._child.poll() is not None or variables != self._variables):
            self._stop()
        if self._child is None:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-P", "-m", "plancache.compiler"]
            self._child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._variables = variables
        return self._child

    def _obituary(self) -> str:
        child = self._child
        self._stop()
        code = child.returncode if child else None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"the process that builds without a GPU {how}; its last words are on stderr. Other graphs are not affected"

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            child.wait()

    def close(self) -> None:
        """Ends the child."""
        with self._guard:
            self._stop()


def _built_or_raise(answer: dict[str, Any], blob: bytes) -> Built:
    if "facts" in answer:
        facts, _ = decode_facts(answer["facts"].encode())
        return Built(blob=blob, **facts)
    kind, message = answer["error"], answer["message"]
    if kind == "unsupported":
        raise load_frontend().cudnnGraphNotSupportedError(message)
    raise CompilerError(message)


# ---- the child ------------------------------------------------------------------------------------------------------


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests until there are none."""
    backends: dict[str, Any] = {}
    while True:
        try:
            request, signature = _receive(requests)
        except EOFError:
            return
        try:
            answer, blob = _answer(json.loads(request), signature, backends)
        except PlancacheError as error:
            answer, blob = {"error": "compiler", "message": str(error)}, b""
        except Exception as error:  # whatever cuDNN raises is this graph's answer, and the next one's turn comes
            unsupported = isinstance(error, load_frontend().cudnnGraphNotSupportedError)
            message = str(error) if unsupported else f"{type(error).__name__}: {error}"
            answer, blob = {"error": "unsupported" if unsupported else "compiler", "message": message}, b""
        _send(answers, json.dumps({**answer, "of": _digest(request, signature)}).encode(), blob)


def _answer(request: dict[str, Any], signature: bytes, backends: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    device = Device(**request["device"])
    backend = backends.get(device.properties_json)
    if backend is None:
        provide_driver(device.driver_version)
        from plancache.backend import CudnnBackend

        backend = backends[device.properties_json] = CudnnBackend(device)
    built = backend.build(signature, Constraints(**request["constraints"]))
    backend.check_loads(built.blob)
    return {"facts": encode_facts(built).decode()}, built.blob


def provide_driver(driver_version: int) -> None:
    """Loads libcuda.so.1, or a stub that reports this driver API version where there is none.

    Raises `CompilerError` that names both cures where there is no C compiler either.
    """
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    with tempfile.TemporaryDirectory(prefix="plancache-") as folder:
        library = f"{folder}/libcuda.so.1"
        compile_stub(library, driver_version)
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # stays mapped when its folder goes


def c_compiler() -> str | None:
    """The C compiler: $CC, cc, gcc or clang, whichever is found first."""
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    return next((found for found in map(shutil.which, names) if found), None)


def compile_stub(library: str, driver_version: int) -> None:
    """Compiles the driver stub to a path."""
    compiler = c_compiler()
    if compiler is None:
        raise CompilerError(
            "building without a GPU needs libcuda.so.1, which is not here, or a C compiler to make a stand-in for it; "
            "install a C compiler (apt-get install gcc) or the NVIDIA driver's library (libcuda.so.1)"
        )
    command = [compiler, "-shared", "-fPIC", "-O1", f"-DDRIVER_VERSION={driver_version}"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", library, str(_STUB)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(f"{compiler} cannot compile the driver stub: {done.stderr.strip()[-400:]}; install a working C compiler")


def _digest(request: bytes, signature: bytes) -> str:
    return hashlib.sha256(request + b"\0" + signature).hexdigest()


def _send(pipe: IO[bytes] | None, header: bytes, body: bytes) -> None:
    assert pipe is not None
    pipe.write(_SIZES.pack(len(header), len(body)) + header + body)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> tuple[bytes, bytes]:
    assert pipe is not None
    sizes = _SIZES.unpack(_exactly(pipe, _SIZES.size))
    return _exactly(pipe, sizes[0]), _exactly(pipe, sizes[1])


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _main() -> NoReturn:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what cuDNN prints must not get between the answers
    serve(sys.stdin.buffer, answers)
    sys.stdout.flush()
    os._exit(0)  # cuDNN's own exit handlers have nothing to release here, and can crash beside the stub


if __name__ == "__main__":
    _main()
