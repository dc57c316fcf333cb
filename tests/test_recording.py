"""Recordings: what a program planned, from any thread, is in its manifest at the end, whatever that end was."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faking import MadeUp, opened_on_gpu, product
from samples import matmul, scaled

from plancache import Constraints, PlanCache
from plancache.environment import Device
from plancache.errors import ManifestError, PlanNotFoundError, UncacheableGraphError
from plancache.manifest import Manifest, Wanted
from plancache.signature import read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[tuple[PlanCache, MadeUp]]:
    cache, backend = opened_on_gpu(tmp_path / "cache", strict=True)
    with cache:
        yield cache, backend


@pytest.fixture
def cache(gpu: tuple[PlanCache, MadeUp]) -> PlanCache:
    return gpu[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.json"


def signature(graph: object) -> bytes:
    return read(graph, DEVICE).signature


def by_signature(file: Path) -> dict[bytes, Wanted]:
    return {one.signature: one for one in Manifest.read(file)}


def test_hits_and_misses_are_recorded_with_counts_and_build_seconds(cache: PlanCache, file: Path) -> None:
    """The same graph asked for again, from memory, is one more; what was planned before and after is not in it."""
    cache.plan(product(1))
    with cache.record(file) as recording:
        for graph in (product(2), product(3), product(2)):
            entry = cache.plan(graph).entry
        assert [one.count for one in recording.manifest] == [2, 1]
    cache.plan(product(4))
    found = by_signature(file)
    assert entry is not None
    assert {key: (one.count, one.build_s, one.recipe) for key, one in found.items()} == {
        signature(product(2)): (2, entry.build_s, None),
        signature(product(3)): (1, entry.build_s, None),
    }


def test_one_graph_under_two_constraints_is_two(cache: PlanCache, file: Path) -> None:
    """The cache's own constraints count as well as those of a request."""
    limited = Constraints(workspace_limit_bytes=0)
    with cache.record(file):
        cache.plan(product())
        cache.plan(product(), constraints=limited)
    assert {one.constraints for one in Manifest.read(file)} == {Constraints(), limited}


def test_recipes_are_recorded_where_asked(cache: PlanCache, file: Path) -> None:
    """`lock` keeps the engine and knobs of what answered, of a hit too."""
    cache.plan(product())
    with cache.record(file, lock=True):
        entry = cache.plan(product()).entry
    assert entry is not None
    assert [one.recipe for one in Manifest.read(file)] == [entry.recipe]


def test_what_was_asked_for_in_vain_is_recorded_too(cache: PlanCache, file: Path) -> None:
    """A program that may not build asks for its graphs all the same, and so does one that only looks."""
    with cache.record(file):
        assert cache.plan(product(1), build="lookup") is None
        with pytest.raises(PlanNotFoundError):
            cache.plan(product(2), build="forbid")
    assert {key: (one.count, one.build_s) for key, one in by_signature(file).items()} == {
        signature(product(1)): (1, None),
        signature(product(2)): (1, None),
    }


def test_uncacheable_graphs_are_counted_not_recorded(gpu: tuple[PlanCache, MadeUp], file: Path) -> None:
    """Those without a signature, and those whose copy turns out to be another graph, which were counted as asked for."""
    from plancache.signature import Uncacheable

    cache, backend = gpu

    def differ(_: object) -> None:
        raise Uncacheable("its copy lowers differently")

    with cache.record(file) as recording:
        cache.plan(product(1))
        odd = product(2)
        odd._nodes[0].params["surprise"] = object
        with pytest.raises(UncacheableGraphError):
            cache.plan(odd, build="forbid")
        backend.check_copy = differ  # type: ignore[method-assign]
        backend.build_unchanged = lambda *_: (object(), [], [], 0)  # type: ignore[attr-defined]
        cache.plan(product(3))
    assert by_signature(file).keys() == {signature(product(1))}
    assert list(recording.uncacheable.values()) == [1, 1]
    assert "its copy lowers differently" in recording.uncacheable


def test_all_threads_are_recorded(cache: PlanCache, file: Path) -> None:
    """No count is lost between them, however often they take turns."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with cache.record(file) as recording:
            cache.plan(product())
            known = signature(product())

            def ask() -> None:
                cache.plan(product())
                for _ in range(2_000):
                    recording.asked(known, Constraints())

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [one.count for one in Manifest.read(file)] == [8_005]


def test_it_is_written_when_the_block_raises(cache: PlanCache, file: Path) -> None:
    """What the program raised goes on, and what it had asked for is kept."""
    with pytest.raises(KeyboardInterrupt), cache.record(file):
        cache.plan(product())
        raise KeyboardInterrupt
    assert by_signature(file).keys() == {signature(product())}


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_file(cache: PlanCache, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where both fail, the block's error is raised and the file's is in the log; alone the file's is raised."""
    for error, expected in ((ZeroDivisionError, ZeroDivisionError), (None, ManifestError)):
        file.unlink(missing_ok=True)
        with pytest.raises(expected), cache.record(file):
            file.write_text("somebody else's")
            if error:
                raise error
    assert "what was recorded is lost" in caplog.text


def test_recordings_open_at_once_each_have_all(cache: PlanCache, tmp_path: Path) -> None:
    """An inner one ends without ending the outer one."""
    with cache.record(tmp_path / "outer.json"):
        with cache.record(tmp_path / "inner.json"):
            cache.plan(product(1))
        cache.plan(product(2))
    assert by_signature(tmp_path / "inner.json").keys() == {signature(product(1))}
    assert by_signature(tmp_path / "outer.json").keys() == {signature(product(1)), signature(product(2))}


def test_a_second_run_adds_to_the_first(cache: PlanCache, file: Path) -> None:
    """Runs with other shapes fill one manifest."""
    for sizes in ((1, 2), (2, 3)):
        with cache.record(file):
            for size in sizes:
                cache.plan(product(size))
    assert sorted(one.count for one in Manifest.read(file)) == [1, 1, 2]


def test_a_file_that_could_not_take_it_is_refused_at_once(cache: PlanCache, tmp_path: Path) -> None:
    """Not hours later: another text, a directory that is not there."""
    (tmp_path / "README").write_text("hello")
    with pytest.raises(ManifestError, match="cut off or garbled"):
        cache.record(tmp_path / "README")
    with pytest.raises(ManifestError, match=r"its directory is not there; make it first: mkdir -p .*none"):
        cache.record(tmp_path / "none" / "m.json")


def test_a_forked_child_writes_only_what_it_asked_for_itself(cache: PlanCache, file: Path) -> None:
    """What the parent had asked for is not counted twice, though both leave the block."""
    with cache.record(file) as recording:
        cache.plan(product(1))
        child = os.fork()
        if not child:
            code = 1
            try:
                recording.asked(signature(scaled(1.5)), Constraints())
                recording.__exit__(None, None, None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert by_signature(file).keys() == {signature(scaled(1.5))}
    assert {key: one.count for key, one in by_signature(file).items()} == {signature(scaled(1.5)): 1, signature(product(1)): 1}


def test_a_child_that_asked_for_nothing_writes_nothing(cache: PlanCache, file: Path) -> None:
    """A worker that was forked inside the block and leaves it does not write its parent's requests."""
    with cache.record(file) as recording:
        cache.plan(product(1))
        child = os.fork()
        if not child:
            code = 1
            try:
                recording.__exit__(None, None, None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert not file.exists()


def test_real_plans_for_a_device_file_are_recorded(device: Device, file: Path, tmp_path: Path) -> None:
    """With cuDNN: the manifest holds the entry's own signature, build time and recipe."""
    with PlanCache(tmp_path / "cache", device=device, strict=True) as cache, cache.record(file, lock=True):
        entry = cache.plan(matmul()).entry
    assert entry is not None
    (one,) = Manifest.read(file)
    assert (one.signature, one.recipe) == (entry.key.components["signature"], entry.recipe)
    assert one.build_s == round(entry.build_s, 3)
