"""Building without a GPU: the child, its stand-in for the driver, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from samples import matmul

from plancache import Constraints, graphs
from plancache.compiler import Compiler, c_compiler, compile_stub
from plancache.environment import Libraries, load_frontend, mapped_libraries
from plancache.errors import ClosedError, CompilerError
from plancache.key import Place
from plancache.signature import read


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture
def compiler(device):
    compiler = Compiler(device, Place.of(device, Libraries.loaded()).cudnn)
    yield compiler
    compiler.close()


def signature(device) -> bytes:
    return read(graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14).graph, device).signature


def test_one_child_builds_and_this_process_never_loads_the_stand_in(compiler, device):
    """Two builds come from one child; no libcuda is mapped here, and no temporary folder is left behind."""
    before = mapped_libraries("libcuda")
    first, second = compiler.build(signature(device), Constraints(), {}), compiler.build(signature(device), Constraints(), {})
    assert first.recipe == second.recipe
    assert mapped_libraries("libcuda") == before
    child = compiler._child
    assert Path(child.folder).is_dir()
    compiler.close()
    assert child.process.returncode == 0
    assert not Path(child.folder).exists()


def test_a_child_that_dies_is_an_error_for_one_graph(compiler, device):
    """A crash in cuDNN ends the child; the error says how, and the next graph gets a new one."""
    compiler.build(signature(device), Constraints(), {})
    os.kill(compiler._child.process.pid, signal.SIGSEGV)
    compiler._child.process.wait()
    assert compiler.build(signature(device), Constraints(), {}).blob  # one that died between builds is replaced
    os.kill(compiler._child.process.pid, signal.SIGSTOP)
    child = compiler._child
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(CompilerError, match=r"killed by signal 9.*not affected"):
        _build_with(compiler, child, device)
    assert compiler.build(signature(device), Constraints(), {}).blob


def _build_with(compiler: Compiler, child: Any, device) -> None:
    """A build whose child dies while it is asked: it is alive when the request is sent."""
    original, compiler._running = compiler._running, lambda _: child
    try:
        compiler.build(signature(device), Constraints(), {})
    finally:
        compiler._running = original


def test_an_answer_is_never_taken_for_another_requests(compiler, device, monkeypatch):
    """After an interrupt the child is ended, so that its late answer cannot be read as the next one's; answers name their request."""
    other = read(matmul(), device).signature
    first = compiler.build(signature(device), Constraints(), {})

    def interrupted(_pipe):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("plancache.children.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiler.build(other, Constraints(), {})
    assert compiler.build(signature(device), Constraints(), {}).recipe == first.recipe
    with monkeypatch.context() as patched:
        patched.setattr("plancache.compiler._digest", lambda *_: "another")
        with pytest.raises(CompilerError, match="another request"):
            compiler.build(other, Constraints(), {})
    assert compiler.build(signature(device), Constraints(), {}).recipe == first.recipe


def test_a_child_that_loads_another_cudnn_builds_nothing(device):
    """Keys name this process's cuDNN: a child that finds another one says so in place of building."""
    compiler = Compiler(device, b'{"version":92801}')
    with pytest.raises(CompilerError, match="another cuDNN"):
        compiler.build(signature(device), Constraints(), {})
    compiler.close()


def test_a_python_that_cannot_be_started_is_named(device, monkeypatch):
    """No interpreter to start: one clear error each time, and no descriptor or folder is left behind."""
    compiler = Compiler(device, b"")
    made = signature(device)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for executable in (None, "", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(CompilerError, match="cannot start Python"):
            compiler.build(made, Constraints(), {})
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_closed_compiler_builds_nothing(compiler, device):
    """A build that comes after close starts no child."""
    compiler.close()
    with pytest.raises(ClosedError):
        compiler.build(signature(device), Constraints(), {})
    assert compiler._child is None


def test_what_a_library_prints_does_not_get_between_the_answers(device, tmp_path, monkeypatch):
    """A child that prints at start-up builds all the same."""
    (tmp_path / "sitecustomize.py").write_text("import os, sys; print('noise', flush=True); os.write(1, b'noise')")
    monkeypatch.syspath_prepend(str(tmp_path))
    compiler = Compiler(device, Place.of(device, Libraries.loaded()).cudnn)
    assert compiler.build(signature(device), Constraints(), {}).blob
    compiler.close()


def test_closing_does_not_wait_for_a_forked_worker(compiler, device):
    """A worker that was forked holds the child's pipe too; closing ends the child all the same, in bounded time."""
    compiler.build(signature(device), Constraints(), {})
    child = compiler._child
    held = os.dup(child._pipes[0].fileno())  # what a forked worker keeps
    compiler.close()
    assert child.process.returncode is not None
    os.close(held)


def test_cudnns_refusal_comes_through_as_its_own_error(compiler, device):
    """An unsupported graph raises cuDNN's exception here; a bad constraint is an error that lists the names."""
    import cudnn

    made = read(matmul(), device).signature
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        compiler.build(made, Constraints(required_behavior_notes=("REQUIRES_FILTER_INT8x32_REORDER",)), {})
    with pytest.raises(CompilerError, match="TENSOR_CORE"):
        compiler.build(made, Constraints(barred_numerical_notes=("NO_SUCH_NOTE",)), {})


def test_a_changed_variable_gets_a_child_of_its_own(compiler, device):
    """A child runs under the variables of the key that it builds for, so one started under others is not asked."""
    compiler.build(signature(device), Constraints(), {})
    first = compiler._child
    built = compiler.build(signature(device), Constraints(), {"NVIDIA_TF32_OVERRIDE": "0"})
    assert compiler._child is not first
    assert first.process.returncode == 0
    assert built.blob


@pytest.mark.skipif(has_driver(), reason="the driver's library is here, so none has to be made")
def test_without_driver_and_compiler_both_cures_are_named():
    """Neither libcuda nor a C compiler: the error names both ways out."""
    script = "from plancache.compiler import provide_driver; provide_driver(13000, '/nowhere')"
    environment = {**os.environ, "PATH": "/nowhere", "CC": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "install a C compiler" in done.stderr
    assert "NVIDIA driver's library" in done.stderr


def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    """A broken C compiler is an error with its own words."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no headers here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert c_compiler() == str(broken)
    with pytest.raises(CompilerError, match="no headers here"):
        compile_stub(str(tmp_path / "libcuda.so.1"), 13000)


STAND_IN = """
import ctypes, sys

stub, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
print(stub.cuInit(0), stub.cuDriverGetVersion(ctypes.byref(version)), version.value)
"""


def test_the_stand_in_says_that_there_is_no_device(tmp_path):
    """The stand-in reports the device file's driver version and CUDA_ERROR_NO_DEVICE (in a process of its own: once
    loaded, it would be this one's driver)."""
    library = str(tmp_path / "libcuda.so.1")
    compile_stub(library, 12345)
    done = subprocess.run([sys.executable, "-c", STAND_IN, library], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "0", "12345"]


UNCHANGED = """
import sys
from plancache.compiler import provide_driver

provide_driver(13000, sys.argv[1])
import cudnn
from plancache import Constraints
from plancache.backend import CudnnBackend
from plancache.environment import Device
from samples import matmul
from changes import snapshot

backend = CudnnBackend(Device.from_file("h200"))
graph = matmul()
graph.nodes[0].inputs["A"].surplus = "what plancache does not know"
before = snapshot(graph)
for constraints in (Constraints(), Constraints()):
    executable, tensors, layouts, _ = backend.build_unchanged(graph, constraints)
    assert [tensor.name for tensor in tensors] == ["a", "b", "matmul.0::C"]
    assert [tensor is graph._tensor_by_uid[tensor.uid] for tensor in tensors] == [True] * 3
    assert layouts[2].dim == (8, 64, 16)
    name = executable._graph.get_plan_name_at_index(executable._graph._plan_index)
assert snapshot(graph) == before
try:
    backend.build_unchanged(graph, Constraints(barred_engines=(name.partition("_")[0],)))
except cudnn.cudnnGraphNotSupportedError:
    print("refused")
"""


@pytest.mark.skipif(has_driver(), reason="the stand-in is only made where there is no driver")
def test_an_uncacheable_graph_is_built_as_it_is_under_the_constraints(tmp_path):
    """A graph that cannot be cached is built on a clone, as often as asked, and what is barred stays barred."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", UNCHANGED, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("refused\n")


def test_a_build_that_hangs_can_be_aborted(compiler, device):
    """The child is killed from another thread, the build fails at once, and the next one gets a new child."""
    compiler.build(signature(device), Constraints(), {})
    os.kill(compiler._child.process.pid, signal.SIGSTOP)  # it hangs
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(compiler.build, signature(device), Constraints(), {})
        while not compiler._guard.locked():
            threading.Event().wait(0.01)
        compiler.abort()
        with pytest.raises(CompilerError, match="killed by signal 9"):
            hanging.result(timeout=60)
    assert compiler.build(signature(device), Constraints(), {}).blob


def test_a_candidate_is_built_by_engine_and_knobs(compiler, device):
    """What one build chose, another one builds again from its recipe."""
    first = compiler.build(signature(device), Constraints(), {})
    other = first.candidates[-1]
    assert other != first.recipe
    built = compiler.build(signature(device), Constraints(), {}, other)
    assert built.recipe == other
    assert built.operands == first.operands


def test_a_candidate_that_the_constraints_bar_is_not_built(compiler, device):
    """Building by engine and knobs heeds notes and engines as building by the heuristics does."""
    matmul_signature = read(matmul(), device).signature
    compiled = compiler.build(matmul_signature, Constraints(), {}).recipe
    for barred in (Constraints(barred_behavior_notes=("RUNTIME_COMPILATION",)), Constraints(barred_engines=(f"eng{compiled.engine}",))):
        with pytest.raises((CompilerError, load_frontend().cudnnGraphNotSupportedError)):
            compiler.build(matmul_signature, barred, {}, compiled)
    assert compiler.build(matmul_signature, Constraints(deterministic=True), {}, compiled).recipe == compiled


def test_a_build_that_takes_too_long_ends_its_child(compiler, device):
    """The caller says how long: the child is killed, whatever it does, and the next build has a new one."""
    compiler.build(signature(device), Constraints(), {})
    child = compiler._child
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        compiler.build(signature(device), Constraints(), {}, limit_s=0.2)
    assert child.process.returncode == -signal.SIGKILL and not Path(child.folder).exists()
    assert compiler.build(signature(device), Constraints(), {}, limit_s=600).blob


OPTIONS = """
import sys, cudnn
from plancache.backend import CudnnBackend
from plancache.compiler import provide_driver
from plancache.environment import Device
from plancache.key import MODES, Constraints
from plancache.signature import read

device = Device.from_file("h200")
provide_driver(device.driver_version, sys.argv[1])
backend = CudnnBackend(device)
kinds = cudnn.data_type
graph = cudnn.pygraph(io_data_type=kinds.HALF, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)
dim = [32, 64, 28, 28]
stride = [64 * 28 * 28, 1, 64 * 28, 64]
around = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
loss, weight = graph.tensor(dim, stride), graph.tensor([64, 64, 3, 3], [576, 1, 192, 64])
image = graph.conv_dgrad(loss=loss, filter=weight, **around)
image.set_dim(dim).set_stride(stride).set_output(True)
signature = read(graph, device).signature
_, options = backend.options(signature, Constraints(), MODES)
barred = backend.planned(signature, Constraints(deterministic=True), MODES)
for engine in {option.candidate.engine for option in options}:
    option = next(option for option in options if option.candidate.engine == engine)
    try:
        barred.build(option.candidate)
        allowed = True
    except Exception as error:
        assert "Deselecting" in str(error), error
        allowed = False
    print(engine, option.deterministic, allowed)
"""


def test_engines_whose_results_vary_are_told_from_the_others(tmp_path):
    """On a real convolution's gradient, which has both: an engine is deterministic where cuDNN builds it with the others barred."""
    done = subprocess.run([sys.executable, "-c", OPTIONS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert {deterministic for _, deterministic, _ in told} == {"True", "False"}
    assert all(deterministic == allowed for _, deterministic, allowed in told)
