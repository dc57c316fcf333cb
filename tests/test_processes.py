"""Several processes and threads on one cache directory: one build per graph, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from plancache import Device, PlanCache, graphs
from plancache.singleflight import STRIPES, SingleFlight

CHILD = """
    import json, sys
    from plancache import Device, PlanCache, graphs

    described = [graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=size, width=14) for size in (14, 28, 56)]
    with PlanCache(sys.argv[1], device=Device.from_file("h200"), strict=True) as cache:
        origins = [cache.plan(example.graph).origin for example in described]
        print(json.dumps([origins, cache.statistics().builds]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_a_second_process_makes_no_build(cache_dir):
    """A fresh process on the directory of an earlier one loads every plan."""
    assert finish(start(CHILD, str(cache_dir))) == [["built"] * 3, 3]
    assert finish(start(CHILD, str(cache_dir))) == [["local"] * 3, 0]


def test_eight_processes_on_a_new_directory_build_each_graph_once(cache_dir):
    """Eight processes that start together, the first opening of the database included, make one build per graph in all."""
    reports = [finish(process) for process in [start(CHILD, str(cache_dir)) for _ in range(8)]]
    assert sum(builds for _, builds in reports) == 3
    assert all(set(origins) <= {"built", "local"} for origins, _ in reports)


def test_eight_threads_build_each_graph_once(cache_dir, device):
    """Threads of one process that ask for the same graphs share the builds too."""
    failures, origins = [], []
    with PlanCache(cache_dir, device=device, strict=True) as cache:

        def ask() -> None:
            try:
                for size in (14, 28):
                    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=size, width=14)
                    origins.append(cache.plan(example.graph).origin)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert cache.statistics().builds == 2
    assert sorted(origins) == ["built"] * 2 + ["memory"] * 14


HOLDER = """
    import sys, time
    from pathlib import Path
    from plancache.singleflight import SingleFlight

    with SingleFlight(Path(sys.argv[1]), timeout_s=60, on_fault=print).building(bytes(32)) as held:
        print(held, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of key 0 under tmp_path."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_a_killed_builder_frees_its_key_at_once(tmp_path, holder):
    """A waiter gets the lock of a holder that was killed -9 as soon as it is gone, long before the timeout."""
    flight = SingleFlight(tmp_path, timeout_s=60, on_fault=print)
    threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with flight.building(bytes(32)) as held:
        assert held
    assert time.monotonic() - started < 30
    assert holder.wait() == -signal.SIGKILL


def test_a_builder_that_hangs_delays_others_by_the_timeout(tmp_path, holder, caplog):
    """Past the timeout a waiter goes on without the lock, and the log says so; other keys are not held up."""
    assert holder.poll() is None
    flight = SingleFlight(tmp_path, timeout_s=0.2, on_fault=print)
    with flight.building(bytes([1] * 32)) as held:
        assert held
    with flight.building(bytes(32)) as held:
        assert not held
    assert "building it here too" in caplog.text
    assert len({key % STRIPES for key in range(256)}) == STRIPES


def test_a_place_without_locks_is_a_fault_and_no_obstacle(tmp_path):
    """Where the lock directory cannot be made, the fault is reported once per build and the build goes on."""
    (tmp_path / "locks").write_text("in the way")
    faults = []
    with SingleFlight(tmp_path / "locks", timeout_s=1, on_fault=faults.append).building(bytes(32)):
        assert len(faults) == 1


def test_the_device_file_stands_for_its_gpu_in_every_process():
    """Keys do not depend on the process: two fresh ones make the same key of the same graph."""
    script = """
        import json, sys
        from plancache import Constraints, Device, graphs
        from plancache.backend import CudnnBackend
        from plancache.key import Place, make_key
        from plancache.signature import read

        device = Device.from_file("h200")
        backend = CudnnBackend(device)
        place = Place.of(device, backend.libraries)
        signatures = [read(example.graph, device).signature for example in graphs.examples()]
        print(json.dumps([make_key(signature, place, {}, Constraints()).hex for signature in signatures]))
    """
    first, second = (finish(start(script)) for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)
    assert Device.from_file("h200").is_file
