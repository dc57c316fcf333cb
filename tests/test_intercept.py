"""Unchanged code goes through the cache: on every road it sees what it saw without, on an empty cache and on a full one."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from faking import finish, start
from roads import ROADS
from zoo import ZOO

from plancache.standin import StandIn

ROADS_FILE = Path(__file__).with_name("roads.py")


class Seen(NamedTuple):
    """What programs saw, by road; and what the cache did for each."""

    plain: dict[str, Any]
    empty: dict[str, Any]
    full: dict[str, Any]
    cold: dict[str, dict[str, Any]]
    warm: dict[str, dict[str, Any]]


def _follow(cache: str, scratch: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROADS_FILE), cache, *cases]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    scratch, cache = tmp_path_factory.mktemp("scratch"), str(tmp_path_factory.mktemp("cache"))
    plain, empty, full = (_follow(directory, scratch) for directory in ("", cache, cache))
    results = [json.loads(done.stdout) for done in (plain, empty, full)]
    return Seen(*results, _served(empty), _served(full))


def _served(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the cache did, by road: a line of its own beside what the frontend and its libraries say."""
    found: dict[str, Any] = json.loads(next(line for line in done.stderr.splitlines() if line.startswith('{"')))
    return found


@pytest.mark.parametrize("road", ROADS)
def test_a_road_looks_as_it_did(seen: Seen, road: str) -> None:
    """Plan lists, sizes, notes, resolved tensors and exceptions are those of the frontend alone, whatever the cache holds."""
    assert seen.empty[road] == seen.plain[road]
    assert seen.full[road] == seen.plain[road]


LEFT = {
    "attention_leaves": "a plan is picked by its index",
    "policies": "all plans are built, to pick one by its index",
    "a_plan_that_was_not_built": "another plan's workspace is asked for",
    "by_index": "a plan is picked by its index",
    "selected": "a plan is picked by its index",
    "a_filter_that_leaves_nothing": "it cannot be built",
    "replayed": "a plan is added",
    "engines": "get_engine_count() is called",
    "other_plans_notes": "another plan's notes are asked for",
    "serialized": "serialize() is called",
    "keys_and_texts": "key() is called",
    "uids_that_are_refused": "uids that cuDNN refuses",
    "changed_and_then_lowered": "already changed its tensors",
    "supported_under_filters": "no plan is known to pass its filters",
    "a_limit_and_the_own_road": "get_engine_count() is called",
    "barred_after_it_was_built": "a plan is added",
    "options_and_limits_that_do_not_count": "get_engine_count() is called",
    "backend_plans_first": "create_execution_plans() is called",
    "extents_cannot_be_changed_after": "key() is called",
    "filters": "a workspace limit that is set before validate()",
    "nothing_to_plan": "the graph is empty",
    "late_flag": "a flag that was set late",
    "own_kernel_cache": "the graph brings its own kernel cache",
}
"""Roads on which some graph goes the frontend's own, and why."""

REFUSED = {"refused_when_validated", "changed_and_no_longer_valid", "dims_that_do_not_fit", "nothing_to_plan"}


@pytest.mark.parametrize("road", ROADS)
def test_a_full_cache_builds_nothing(seen: Seen, road: str) -> None:
    """Plans come from the cache; a graph that goes the frontend's own road is counted, with the reason, and no other does."""
    warm, reason = seen.warm[road], LEFT.get(road)
    assert warm["builds"] == 0
    assert any(reason in told for told in warm["fell"]) if reason else not warm["fell"]
    assert warm["hits"] or reason or road in REFUSED | {"looked_at_too_early"}


def test_an_empty_cache_builds_each_graph_once(seen: Seen) -> None:
    """What one road has stored the next one finds, under the same modes and filters."""
    assert seen.cold["five_steps"]["builds"] == 3
    assert seen.cold["one_step"] == {"hits": 2, "builds": 0, "fell": {}}
    assert seen.cold["other_modes"]["builds"] == 4  # of five: the frontend's own modes are those of the steps


@pytest.mark.stress
def test_graphs_of_every_kind_look_as_they_did(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    """Some of the zoo, or all of it: each step, with every tensor as it leaves it, is that of the frontend alone."""
    names = random.sample(list(ZOO), scale(5, len(ZOO)))
    directory = str(tmp_path / "cache")
    plain, empty, full = (_follow(cache, tmp_path, *names) for cache in ("", directory, directory))
    expected, served = json.loads(plain.stdout), _served(full)
    assert json.loads(empty.stdout) == expected
    assert json.loads(full.stdout) == expected
    assert {name for name in names if served[name]["builds"]} == set()
    assert {name for name in names if not served[name]["hits"] and not served[name]["fell"] and type(expected[name][-1]) is list} == set()


# ---- operands -------------------------------------------------------------------------------------------------------


class Graph:
    """One that a weak reference can hold."""


class Native:
    """cuDNN's graph, which notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _execute_with_raw_ptrs(self, address: int, count: int, *rest: int) -> None:
        self.seen.append((list((ctypes.c_uint64 * count).from_address(address)), *rest))

    def _execute(self, pack: dict[int, int], *rest: Any) -> None:
        self.seen.append((pack, *rest))

    def populate_cuda_graph(self, _: Any, pack: dict[int, int], *rest: Any) -> None:
        self.seen.append((pack, *rest))


def seated(uids: tuple[int, ...], operands: tuple[int, ...]) -> tuple[StandIn, Native]:
    """A stand-in for a graph whose tensors have these uids, in canonical order, with a plan that binds these operands."""
    tensors = [SimpleNamespace(uid=uid) for uid in uids]
    course = SimpleNamespace(request=SimpleNamespace(tensors=tensors), plans=("only",))
    native = Native()
    standin = StandIn(Graph(), course)  # type: ignore[arg-type]
    standin.seat(SimpleNamespace(operands=operands, workspace_size=64), native, 0)  # type: ignore[arg-type]
    return standin, native


@pytest.mark.parametrize("uids", [(1, 2, 3, 4), (40, 30, 20, 10), (7, 3, 11, 5), (2, 1, 4, 3)])
def test_buffers_reach_the_operands_that_they_are_for(uids: tuple[int, ...]) -> None:
    """The program's buffers come by its own uids, ascending; cuDNN takes them by the copy's. The second tensor is no operand."""
    operands = (1, 3, 4)
    standin, native = seated(uids, operands)
    mine = [uids[operand - 1] for operand in operands]
    assert standin._get_variant_pack_uids_sorted() == sorted(mine)
    pointers = [1000 + uid for uid in sorted(mine)]
    given = (ctypes.c_uint64 * 3)(*pointers)
    standin._execute_with_raw_ptrs(ctypes.addressof(given), 3, 17, 23, 0)
    assert native.seen.pop() == ([1000 + uid for uid in mine], 17, 23, -1)
    pack = {uid: 1000 + uid for uid in uids}  # a buffer more than is needed is ignored
    standin._execute_plan_at_index(pack, 17, 0, 23, mine[:1], [[1]], [[1]])
    expected = {operand: 1000 + uid for operand, uid in zip(operands, mine, strict=True)}
    assert native.seen.pop() == (expected, 17, 23, [operands[0]], [[1]], [[1]])
    standin.populate_cuda_graph(23, pack, 17, 5)
    assert native.seen.pop() == (expected, 17, 5)


# ---- on and off -----------------------------------------------------------------------------------------------------

PREPARED = """
import gc, sys, tempfile, threading, weakref
sys.path.insert(0, {tests!r})
import roads
from plancache.compiler import provide_driver
provide_driver(roads.DEVICE.driver_version, tempfile.mkdtemp(dir={scratch!r}))
import plancache
def opened(directory, **options):
    return plancache.PlanCache(directory, device=roads.DEVICE, strict=True, **options)
"""


def in_child(scratch: Path, script: str, **environment: str) -> str:
    """What a script prints that plans graphs with the frontend."""
    from textwrap import dedent

    prepared = PREPARED.format(tests=str(ROADS_FILE.parent), scratch=str(scratch))
    return finish(start(prepared + dedent(script), **environment))[0]


def test_a_served_graph_is_gone_when_its_program_drops_it(tmp_path: Path) -> None:
    """Neither built nor loaded ones hang in a cycle, which would free cuDNN's objects at some garbage collection, in a capture maybe."""
    script = f"""
        gc.disable()
        graphs = roads.Graphs()
        for _ in range(2):
            with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
                graph, tensor = graphs.convolution()
                graph.build()
                gone = weakref.ref(graph)
                del graph, tensor
                print(gone() is None, cache.statistics().builds)
    """
    assert in_child(tmp_path, script).splitlines() == ["True 1", "True 0"]


def test_the_newest_cache_serves_and_each_graph_stays_with_its_own(tmp_path: Path) -> None:
    """Installed twice: the inner one serves; a graph that was begun before goes on where it began; then nothing is served."""
    script = f"""
        graphs = roads.Graphs()
        outer, inner = opened({str(tmp_path / "outer")!r}), opened({str(tmp_path / "inner")!r})
        begun = graphs.convolution()[0]
        with plancache.installed(outer):
            begun.validate()
            with plancache.installed(inner):
                begun.build()
                graphs.convolution()[0].build()
            begun = graphs.convolution()[0]
            begun.validate()
        begun.build()
        graphs.convolution()[0].build()
        for cache in (outer, inner):
            with cache:
                print(cache.statistics().builds, cache.statistics().hits)
        try:
            plancache.uninstall()
        except plancache.errors.SettingsError as error:
            print(error)
    """
    lines = in_child(tmp_path, script).splitlines()
    assert lines == ["1 1", "1 0", "plancache is not installed in this process; call plancache.install() first"]


def test_what_is_planned_by_hand_meanwhile_is_not_served_twice(tmp_path: Path) -> None:
    """`PlanCache.plan` works on graphs of its own, which no interceptor sees; and both roads share what is stored."""
    script = f"""
        graphs = roads.Graphs()
        with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
            print(cache.plan(graphs.convolution()[0]).origin, cache.statistics().builds)
            graphs.convolution()[0].build()
            print(cache.statistics().hits, cache.statistics().builds, dict(cache.statistics().fell_through))
    """
    assert in_child(tmp_path, script).splitlines() == ["built 1", "1 1 {}"]


def test_threads_build_each_graph_once(tmp_path: Path) -> None:
    """Eight threads with the same graph of their own: one builds, the others load."""
    script = f"""
        graphs = roads.Graphs()
        with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
            barrier, sizes = threading.Barrier(8), []
            def work():
                barrier.wait()
                graph = graphs.convolution()[0]
                graph.build()
                sizes.append(graph.get_workspace_size())
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(len(set(sizes)), len(sizes), cache.statistics().builds, cache.statistics().hits)
    """
    assert in_child(tmp_path, script).split() == ["1", "8", "1", "7"]


def test_the_frontend_is_wrapped_when_it_is_imported_later(tmp_path: Path) -> None:
    """`install` before `import cudnn` imports nothing, and serves all the same."""
    script = f"""
        cache = opened({str(tmp_path / "cache")!r})
        plancache.install(cache)
        print("cudnn" in sys.modules)
        roads.Graphs().convolution()[0].build()
        print(cache.statistics().builds)
        plancache.uninstall()
        cache.close()
    """
    assert in_child(tmp_path, script).split() == ["False", "1"]


def test_builds_can_be_forbidden(tmp_path: Path) -> None:
    """The first build raises, and names the graph; nothing goes the frontend's own road to build it."""
    script = f"""
        graphs = roads.Graphs()
        with opened({str(tmp_path / "cache")!r}, build="forbid") as cache, plancache.installed(cache):
            try:
                graphs.convolution()[0].build()
            except plancache.errors.PlanNotFoundError as error:
                print(error)
            print(dict(cache.statistics().fell_through))
    """
    said, fell = in_child(tmp_path, script).splitlines()
    assert said.startswith("no stored plan for conv_fprop+bias+relu [8x64x28x28, ")
    assert fell == "{}"


@pytest.mark.parametrize("road", ["policy", "by_index", "selected", "own_kernel_cache"])
def test_builds_of_the_frontends_own_are_forbidden_too(tmp_path: Path, road: str) -> None:
    """What the cache leaves to the frontend would be built: the error says why it was left, and how to allow it."""
    script = f"""
        graphs = roads.Graphs()
        def policy(graph): graph.create_execution_plans(); graph.build_plans(graphs.cudnn.build_plan_policy.ALL)
        def by_index(graph): graph.create_execution_plans(); graph.build_plan_at_index(1)
        def selected(graph): graph.create_execution_plans(); graph.select_plan(1); graph.build_plans()
        def own_kernel_cache(graph): graph.build()
        with opened({str(tmp_path / "cache")!r}, build="forbid") as cache, plancache.installed(cache):
            own = dict(kernel_cache=graphs.cudnn.create_kernel_cache()) if {road!r} == "own_kernel_cache" else {{}}
            try:
                {road}(graphs.convolution(**own)[0])
            except plancache.errors.UncacheableGraphError as error:
                print(error)
            print(dict(cache.statistics().fell_through), cache.statistics().builds)
    """
    said, fell = in_child(tmp_path, script).splitlines()
    assert said.startswith("this graph cannot be cached: ")
    assert said.endswith("allow builds for this program (build='allow', PLANCACHE_BUILD=allow)")
    assert said.removeprefix("this graph cannot be cached: ").partition(";")[0] in fell


def test_workers_that_are_forked_while_others_plan(tmp_path: Path) -> None:
    """Four threads plan, one forks: every child plans too, and nothing that was held by another thread keeps it."""
    script = f"""
        import os, signal
        graphs, over = roads.Graphs(), threading.Event()
        with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
            graphs.convolution()[0].build()
            def work():
                while not over.is_set():
                    graphs.convolution()[0].build()
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads: thread.start()
            ended = []
            for _ in range(20):
                child = os.fork()
                if not child:
                    signal.alarm(30)
                    graphs.convolution()[0].build()
                    os._exit(cache.statistics().builds - 1)  # the parent built one
                ended.append(os.waitpid(child, 0)[1])
            over.set()
            for thread in threads: thread.join()
            print(ended)
    """
    assert in_child(tmp_path, script).strip() == str([0] * 20)


def test_a_refused_blob_is_built_anew(tmp_path: Path) -> None:
    """A stored plan that cuDNN does not load is one warning, a build, and a plan that works."""
    script = f"""
        import warnings
        graphs = roads.Graphs()
        with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
            graphs.convolution()[0].build()
        with plancache.PlanCache({str(tmp_path / "cache")!r}, device=roads.DEVICE) as cache, plancache.installed(cache):
            real = cache._targets.current().backend
            load, refused = real.load_native, []
            def refuse(entry, handle):
                if not refused:
                    refused.append(entry)
                    raise RuntimeError("no such plan")
                return load(entry, handle)
            real.load_native = refuse
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", plancache.errors.PlancacheWarning)
                graph = graphs.convolution()[0]
                graph.build()
            print(graph.get_workspace_size(), cache.statistics().builds, dict(cache.statistics().faults))
    """
    assert in_child(tmp_path, script).split(maxsplit=2) == ["0", "1", "{'load': 1}\n"]


def test_a_block_ends_well_where_it_was_uninstalled(tmp_path: Path) -> None:
    """`installed` serves from its own cache and ends without a word, whoever uninstalled it meanwhile."""
    script = f"""
        cache = opened({str(tmp_path / "cache")!r})
        with plancache.installed(cache):
            plancache.uninstall()
            roads.Graphs().convolution()[0].build()
        print(cache.statistics().builds)
    """
    assert in_child(tmp_path, script).split() == ["0"]


def test_a_strict_cache_raises_its_faults(tmp_path: Path) -> None:
    """One that cannot store says so, and builds nothing by the frontend's own road; one that is not strict goes on."""
    script = f"""
        import warnings
        warnings.simplefilter("ignore", plancache.errors.PlancacheWarning)
        graphs = roads.Graphs()
        for strict in (True, False):
            with plancache.PlanCache({str(tmp_path / "cache")!r}, device=roads.DEVICE, strict=strict) as cache, plancache.installed(cache):
                def put(*_, **__):
                    raise plancache.errors.StoreError("the disk is full")
                cache._levels.put = put
                try:
                    graphs.convolution()[0].build()
                except plancache.errors.StoreError as error:
                    print(error)
                print(cache.statistics().builds, dict(cache.statistics().faults), dict(cache.statistics().fell_through))
    """
    lines = in_child(tmp_path, script).splitlines()
    assert lines == ["the disk is full", "1 {'write': 1} {}", "1 {'write': 1} {}"]


def test_a_graph_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    """Whatever the reason, and only where the frontend takes the graph."""
    script = f"""
        graphs = roads.Graphs()
        with opened({str(tmp_path / "cache")!r}) as cache, plancache.installed(cache):
            def request(*_):
                raise RuntimeError("no such device")
            cache.request = request
            graphs.convolution()[0].build()
            graph = graphs.empty()
            graph.matmul(graph.tensor([8, 16, 32]), graph.tensor([8, 33, 64]))
            try:
                graph.validate()
            except ValueError:
                print(dict(cache.statistics().fell_through))
    """
    assert in_child(tmp_path, script) == "{'it cannot be read: no such device': 1}\n"
