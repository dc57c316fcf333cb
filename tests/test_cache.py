"""The path of a request, on real cuDNN for the device file and real SQLite."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from typing import Any

import pytest
from samples import make_entry, matmul

from plancache import Constraints, Device, PlanCache, graphs
from plancache.backend import CudnnBackend
from plancache.capture import Releases
from plancache.entry import Entry, Row, pack
from plancache.errors import (
    ClosedError,
    CorruptEntryError,
    GraphStateError,
    NotExecutableError,
    PlancacheWarning,
    PlanNotFoundError,
    SettingsError,
    StoreError,
    UncacheableGraphError,
)
from plancache.store.database import SELECT_ENTRY


def convolution(height: int = 14) -> Any:
    """A graph whose plan is built in milliseconds: its engine is precompiled."""
    return graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=height, width=14).graph


@pytest.fixture
def cache(cache_dir, device):
    with PlanCache(cache_dir, device=device, strict=True) as cache:
        yield cache


def rows_of(cache: PlanCache) -> list[Row]:
    with sqlite3.connect(cache.settings.database) as connection:
        keys = connection.execute("SELECT key FROM entries").fetchall()
        found = [Row(*connection.execute(SELECT_ENTRY, key).fetchone()) for key in keys]
    connection.close()
    return found


def overwrite(cache: PlanCache, column: str, value: Any) -> None:
    connection = sqlite3.connect(cache.settings.database)
    with connection:
        connection.execute(f"UPDATE entries SET {column} = ?", (value,))
    connection.close()


# ---- hits and misses


def test_a_second_call_makes_no_build(cache):
    """An equal graph, described anew, is answered from memory."""
    assert [cache.plan(convolution()).origin, cache.plan(convolution()).origin] == ["built", "memory"]
    statistics = cache.statistics()
    assert (statistics.builds, statistics.misses, statistics.memory_hits) == (1, 1, 1)


def test_a_second_cache_loads_what_the_first_stored(cache, device):
    """What one cache built, another one on the same directory gets from the store, with the same bytes."""
    built = cache.plan(convolution())
    with PlanCache(cache.settings.directory, device=device, strict=True) as other:
        loaded = other.plan(convolution())
        assert (loaded.origin, other.statistics().builds) == ("local", 0)
        assert loaded.entry.blob == built.entry.blob
        assert loaded.entry.key == built.entry.key
        assert loaded.operands == built.operands


def test_the_callers_graph_stays_as_it_was(cache):
    """A build leaves the graph described, unplanned, with its tensors' own values."""
    graph = convolution()
    before = {id(t): dict(t.__dict__) for t in graph.tensors.values()}
    cache.plan(graph)
    assert {id(t): dict(t.__dict__) for t in graph.tensors.values()} == before
    assert not graph._planning_done
    assert graph._lowered_graph is None


def test_refresh_builds_anew_and_replaces(cache):
    """`refresh` makes a build although the plan is there, and its entry takes the place of the old one."""
    first = cache.plan(convolution()).entry
    again = cache.plan(convolution(), refresh=True)
    assert again.origin == "built"
    assert again.entry.created_at > first.created_at
    assert [listed.facts["created_at"] for listed in cache.entries()] == [again.entry.created_at]


def test_lookup_and_forbid_never_build(cache, device):
    """On a miss `lookup` gives None and `forbid` an error that names graph and cure; on a hit both give the plan."""
    assert cache.plan(convolution(), build="lookup") is None
    with pytest.raises(PlanNotFoundError, match=r"conv_fprop\+bias\+relu .*plancache warm"):
        cache.plan(convolution(), build="forbid")
    assert cache.statistics().builds == 0
    assert cache.entries() == []
    cache.plan(convolution())
    with PlanCache(cache.settings.directory, device=device, build="forbid") as other:
        assert other.plan(convolution()).origin == "local"
        assert other.plan(convolution(), build="lookup").origin == "memory"


def test_constraints_and_variables_are_part_of_the_question(cache, monkeypatch):
    """Another constraint, or a result-changing variable set between two calls, asks for another plan."""
    large = graphs.conv_bias_relu(batch=32, in_channels=128, out_channels=128, height=56, width=56).graph
    free = cache.plan(large)
    lean = cache.plan(large, constraints=Constraints(workspace_limit_bytes=0))
    assert free.workspace_size > 0 == lean.workspace_size
    assert cache.plan(convolution()).origin == "built"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert cache.plan(convolution()).origin == "built"
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    assert cache.plan(convolution()).origin == "memory"
    assert len(cache.entries()) == 4


def test_an_entry_says_how_it_was_made(cache):
    """A device-less entry is `compiled`, proven by nothing, and names engine, operands and the seconds of its steps."""
    entry = cache.plan(convolution()).entry
    assert (entry.quality, entry.proof, entry.tolerance) == ("compiled", "none", None)
    assert entry.recipe in entry.candidates
    assert set(entry.timings_s) == {"lower", "plan", "build", "serialize"}
    assert entry.build_s > 0
    assert len(entry.operands) == 4
    assert cache.entry(entry.key.hex[:8]).blob == entry.blob
    with pytest.raises(LookupError, match="plancache ls"):
        cache.entry("zz")


def test_use_counts_are_written_when_the_cache_closes(cache, device):
    """Hits from the store are counted per entry, not while they happen."""
    cache.plan(convolution())
    for _ in range(2):
        with PlanCache(cache.settings.directory, device=device, strict=True) as other:
            other.plan(convolution())
            assert other.entries()[0].hits in (0, 1)
    assert cache.entries()[0].hits == 2


# ---- what is refused


def test_empty_and_planned_graphs_are_refused(cache):
    """A graph without operations, or one that was planned, is an error that says what to hand over."""
    import cudnn

    with pytest.raises(GraphStateError, match="empty"):
        cache.plan(cudnn.pygraph())
    with pytest.raises(GraphStateError, match=r"expected a cudnn\.pygraph"):
        cache.plan("graph")
    planned = convolution()
    planned._planning_done = True
    with pytest.raises(GraphStateError, match="already planned"):
        cache.plan(planned)


def test_an_uncacheable_graph_is_counted_and_needs_the_gpu(cache):
    """A graph with a callable is counted with its reason; for a device file it cannot be built at all."""
    import cudnn

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16)
    q, k, v = (graph.tensor([1, 2, 128, 64]) for _ in range(3))
    graph.sdpa(q=q, k=k, v=v, is_inference=True, score_mod=lambda inner, score: inner.relu(score))
    with pytest.raises(UncacheableGraphError, match=r"callable.*on the GPU itself"):
        cache.plan(graph)
    assert cache.plan(graph, build="lookup") is None
    assert cache.statistics().uncacheable == {"sdpa has a callable, score_mod": 2}


def test_an_unsupported_graph_gives_cudnns_own_error(cache):
    """Where cuDNN has no plan its own exception comes through, and nothing is stored."""
    import cudnn

    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        cache.plan(matmul(), constraints=Constraints(required_behavior_notes=("REQUIRES_FILTER_INT8x32_REORDER",)))
    assert cache.entries() == []


def test_plans_for_a_device_file_do_not_run(cache):
    """`execute` and `bind` of a plan for a device file are clear errors; what it holds can be inspected."""
    plan = cache.plan(convolution())
    assert len(plan.entry.blob) > 1000
    for call in (plan.execute, plan.bind):
        with pytest.raises(NotExecutableError, match="device file"):
            call({})


# ---- faults of the cache


def test_a_corrupt_row_is_built_anew_and_replaced(cache_dir, device):
    """A row with a wrong checksum is a warning and a miss; the new entry takes its place, whatever its quality was."""
    with PlanCache(cache_dir, device=device) as cache:
        good = cache.plan(convolution()).entry
        overwrite(cache, "payload", b"not what the checksum is over")
        overwrite(cache, "quality", 2)
    with PlanCache(cache_dir, device=device) as cache:
        with pytest.warns(PlancacheWarning, match="does not match its checksum"):
            assert cache.plan(convolution()).origin == "built"
        assert cache.statistics().faults == {"corrupt": 1}
    with PlanCache(cache_dir, device=device, strict=True) as cache:
        assert cache.plan(convolution()).origin == "local"
        assert rows_of(cache)[0].key == good.key.digest


def test_strict_mode_raises_cache_faults(cache, device):
    """With `strict` a corrupt row raises in place of the warning."""
    cache.plan(convolution())
    overwrite(cache, "facts", b"{}")
    with PlanCache(cache.settings.directory, device=device, strict=True) as other, pytest.raises(CorruptEntryError):
        other.plan(convolution())


def test_an_entry_that_may_not_run_here_is_built_anew(cache, device):
    """A requirement that this process does not meet makes a miss; an entry no worse that does takes its place."""
    entry = cache.plan(convolution()).entry
    needy = pack(replace(entry, requirements={"cublasLt": "another build"}))
    for column in ("facts", "checksum"):
        overwrite(cache, column, getattr(needy, column))
    for expected in ("built", "local"):
        with PlanCache(cache.settings.directory, device=device, strict=True) as other:
            assert other.plan(convolution()).origin == expected


def test_a_better_entry_for_elsewhere_is_left_alone(cache, device):
    """A tuned entry that may not run here is not replaced by a lesser one that does."""
    entry = cache.plan(convolution()).entry
    tuned = pack(replace(entry, requirements={"cublasLt": "another build"}, quality="tuned"))
    for column, value in (("facts", tuned.facts), ("checksum", tuned.checksum), ("quality", 2)):
        overwrite(cache, column, value)
    with PlanCache(cache.settings.directory, device=device, strict=True) as other:
        assert other.plan(convolution()).origin == "built"
    assert [listed.facts["quality"] for listed in cache.entries()] == ["tuned"]


def test_a_directory_that_is_a_file_still_gives_plans(tmp_path, device):
    """A warning, and right plans kept in memory."""
    directory = tmp_path / "cache"
    directory.write_text("in the way")
    with PlanCache(directory, device=device) as cache:
        with pytest.warns(PlancacheWarning, match="not a directory"):
            assert cache.plan(convolution()).origin == "built"
        assert cache.plan(convolution()).origin == "memory"
    with PlanCache(directory, device=device, strict=True) as cache, pytest.raises(StoreError):
        cache.plan(convolution())
    assert directory.read_text() == "in the way"


def test_a_database_of_garbage_is_moved_aside_and_a_new_one_begun(cache_dir, device):
    """One warning that says what was lost and where it is; the plan is stored, and the next process hits."""
    file = cache_dir / "plans-1.sqlite3"
    file.write_bytes(b"garbage" * 1000)
    with PlanCache(cache_dir, device=device) as cache:
        with pytest.warns(PlancacheWarning, match=r"7,000 bytes of stored plans were moved to .*plans-1\.sqlite3\.damaged") as caught:
            assert cache.plan(convolution()).origin == "built"
        assert len(caught) == 1
    assert file.with_name("plans-1.sqlite3.damaged").read_bytes() == b"garbage" * 1000
    with PlanCache(cache_dir, device=device, strict=True) as cache:
        assert cache.plan(convolution()).origin == "local"


def test_mode_off_stores_nothing_and_readonly_only_reads(cache_dir, device):
    """`off` neither reads nor writes, `readonly` hits without writing."""
    with PlanCache(cache_dir, device=device, strict=True, mode="off") as cache:
        cache.plan(convolution())
    assert list(cache_dir.iterdir()) == []
    with PlanCache(cache_dir, device=device, strict=True) as cache:
        cache.plan(convolution())
    before = {path: path.read_bytes() for path in cache_dir.rglob("*.sqlite3")}
    with PlanCache(cache_dir, device=device, strict=True, mode="readonly") as cache:
        assert [cache.plan(convolution()).origin, cache.plan(convolution(28)).origin] == ["local", "built"]
    assert {path: path.read_bytes() for path in cache_dir.rglob("*.sqlite3")} == before


def test_an_unknown_fact_about_cudnn_switches_persistence_off(cache_dir, device, monkeypatch):
    """Where cuDNN's libraries are not known for certain, plans stay in memory, and one warning says so."""
    monkeypatch.setattr("plancache.environment.build_id", lambda _: None)
    with PlanCache(cache_dir, device=device) as cache:
        with pytest.warns(PlancacheWarning, match="no ELF build id") as caught:
            assert [cache.plan(convolution()).origin, cache.plan(convolution()).origin] == ["built", "memory"]
        assert len(caught) == 1
    assert not (cache_dir / "plans-1.sqlite3").exists()


def test_a_frontend_that_was_not_tested_caches_nothing(cache_dir, device, monkeypatch):
    """Outside the tested range a graph may hold what this version cannot see: nothing is cached, one warning."""
    import cudnn

    monkeypatch.setattr(cudnn, "__version__", "1.99.0")
    with PlanCache(cache_dir, device=device) as cache:
        with pytest.warns(PlancacheWarning, match="outside the tested range") as caught:
            assert cache.plan(convolution(), build="lookup") is None
            assert cache.plan(convolution(), build="lookup") is None
        assert len(caught) == 1
        assert cache.statistics().uncacheable == {"nvidia-cudnn-frontend 1.99.0 is not tested": 2}


class _Refusing:
    """A backend of a GPU whose loads fail until told otherwise: for what a healthy GPU does not do on demand."""

    def __init__(self, device: Device, backend: Any) -> None:
        self.device, self.libraries, self.here = device, backend.libraries, backend.here
        self.check_copy = backend.check_copy
        self.refuses = True
        self.loads = 0

    def build(self, *_: Any) -> Entry:
        self.refuses = False
        return make_entry(blob=b"fresh", operands=(1,))

    def load(self, *_: Any) -> object:
        self.loads += 1
        if self.refuses:
            raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")
        return object()

    def close(self) -> None: ...

    releases = Releases()
    is_of_the_device = staticmethod(CudnnBackend.is_of_the_device)


def test_a_stored_plan_that_does_not_load_is_built_anew_and_replaced(cache_dir, device, backend):
    """What cuDNN refuses to load is a warning and a build, whose entry takes the old one's place."""
    gpu = Device(device.properties, None, 0)

    def opened(**options: Any) -> PlanCache:
        cache = PlanCache(cache_dir, device=gpu, **options)
        target = cache._targets._of(gpu)
        target.backend = target.builder = _Refusing(gpu, backend)
        return cache

    with opened(strict=True) as cache:
        assert cache.plan(matmul()).origin == "built"
    with opened() as cache:
        with pytest.warns(PlancacheWarning, match="does not load"):
            assert cache.plan(matmul()).origin == "built"
        assert cache.statistics().faults == {"load": 1}


# ---- many at once


def test_warm_reports_a_graph_that_fails_and_goes_on(cache):
    """`warm` takes graphs and examples, plans what it can and lists the others with cuDNN's reason."""
    import cudnn

    hopeless = cudnn.pygraph(io_data_type=cudnn.data_type.INT64, compute_data_type=cudnn.data_type.INT64)
    hopeless.matmul(hopeless.tensor([1, 8, 8]), hopeless.tensor([1, 8, 8])).set_output(True)
    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14)
    warmed = cache.warm([convolution(), hopeless, example])
    assert [plan.origin for plan in warmed.plans] == ["built", "built"]
    assert [failure.position for failure in warmed.failures] == [1]
    assert isinstance(warmed.failures[0].error, cudnn.cudnnGraphNotSupportedError | RuntimeError)


# ---- what a caller can get wrong


def test_arguments_of_the_wrong_kind_are_refused_where_they_are_given(cache, cache_dir):
    """A misspelt choice or a value of another type is an error at once, that says what it may be."""
    graph = convolution()
    for options, says in (
        ({"mode": "read-only"}, "mode must be one of 'readwrite', 'readonly', 'off'"),
        ({"build": "Forbid"}, "build must be one of"),
        ({"strict": "0"}, "strict must be one of"),
        ({"lock_timeout_s": -5}, "lock_timeout_s must be a number of seconds"),
        ({"lock_timeout_s": "3"}, "lock_timeout_s must be a number of seconds"),
        ({"device": "h200"}, r"Device\.from_file"),
        ({"constraints": {}}, r"plancache\.Constraints"),
        ({"settings": cache.settings}, "not both"),
    ):
        with pytest.raises(SettingsError, match=says):
            PlanCache(cache_dir, **options)
    with pytest.raises(SettingsError, match="build must be"):
        cache.plan(graph, build="forbidden")
    with pytest.raises(SettingsError, match="several graphs"):
        cache.warm(graph)


def test_a_graph_without_an_output_is_refused(cache):
    """A graph that computes nothing anyone can read is an error that names set_output."""
    import cudnn

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)
    graph.matmul(graph.tensor([1, 8, 8]), graph.tensor([1, 8, 8]))
    with pytest.raises(GraphStateError, match="set_output"):
        cache.plan(graph)


def test_a_closed_cache_says_so_and_closes_every_plan_it_gave(cache_dir, device):
    """After close planning is an error, and so is every plan, one that a refresh replaced included."""
    cache = PlanCache(cache_dir, device=device, strict=True)
    plans = [cache.plan(convolution()), cache.plan(convolution(), refresh=True)]
    cache.close()
    assert all(plan._loaded.closed for plan in plans)
    with pytest.raises(ClosedError, match="is closed"):
        cache.plan(convolution())


def test_variables_that_change_after_the_first_plan_switch_the_cache_off(cache_dir, device, backend, monkeypatch):
    """Builds in this process are made under the variables that cuDNN may have read once: later ones are not believed."""
    gpu = Device(device.properties, None, 0)
    with PlanCache(cache_dir, device=gpu) as cache:
        target = cache._targets._of(gpu)
        target.backend = target.builder = _Refusing(gpu, backend)
        assert cache.plan(matmul()).origin == "built"
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        with pytest.warns(PlancacheWarning, match="NVIDIA_TF32_OVERRIDE changed"):
            assert cache.plan(matmul(), build="lookup") is None
        assert len(cache.entries()) == 1
    with PlanCache(cache_dir, device=gpu) as cache:  # nor does a new cache in this process believe them
        target = cache._targets._of(gpu)
        target.backend = target.builder = _Refusing(gpu, backend)
        with pytest.warns(PlancacheWarning, match="NVIDIA_TF32_OVERRIDE changed"):
            assert cache.plan(matmul(), build="lookup") is None


def test_closing_while_other_threads_read_is_no_crash(cache_dir, device):
    """Threads that look up plans while the cache is closed get a plan, a miss or a clear error."""
    with PlanCache(cache_dir, device=device, strict=True) as cache:
        cache.plan(convolution())
    for _ in range(5):
        cache, failures = PlanCache(cache_dir, device=device), []

        def read(cache: PlanCache = cache, failures: list = failures) -> None:
            try:
                for _ in range(200):
                    list(cache._levels.local.listing())
                    cache._levels.local.get(bytes(32))
            except StoreError:
                pass  # closed meanwhile
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        cache.close()
        for thread in threads:
            thread.join()
        cache._levels.local.close()
        assert not failures


def test_a_plan_that_is_made_while_the_cache_closes_is_not_handed_out(cache_dir, device, backend):
    """A load or a build that ends after close gives an error, no plan that nobody would close."""
    gpu = Device(device.properties, None, 0)
    for stored in (False, True):
        cache = PlanCache(cache_dir, device=gpu, strict=True)
        target = cache._targets._of(gpu)
        target.backend = target.builder = slow = _Refusing(gpu, backend)
        slow.refuses = False
        slow.load = lambda *_, cache=cache: cache.close()
        with pytest.raises(ClosedError, match="was closed while"):
            cache.plan(matmul())
        assert [loaded.closed for loaded in cache._live] in ([], [True])
        if not stored:
            with PlanCache(cache_dir, device=gpu, strict=True) as other:
                target = other._targets._of(gpu)
                target.backend = target.builder = _Refusing(gpu, backend)
                assert other.plan(matmul()).origin == "built"
