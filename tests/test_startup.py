"""A program's start-up goes through the cache: `startup` in its code, `plancache run` and `plancache record` around it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from faking import finish, opened_on_gpu, product, start
from test_intercept import PREPARED, ROADS_FILE

from plancache import startup
from plancache.errors import SettingsError
from plancache.manifest import Manifest
from plancache.starting import Startup


def prepared(scratch: Path, script: str) -> str:
    return PREPARED.format(tests=str(ROADS_FILE.parent), scratch=str(scratch)) + textwrap.dedent(script)


def in_child(scratch: Path, script: str) -> list[str]:
    return finish(start(prepared(scratch, script)))[0].splitlines()


PROGRAM = """
    cache = opened({cache!r}, tag="serve")
    with plancache.startup("serve", cache=cache) as this:
        graphs = roads.Graphs()
        for make in (graphs.convolution, graphs.attention, graphs.convolution):
            make()[0].build()
    print(this.loaded, this.built, this.left, this.saved_s > 0, this.manifest)
    cache.close()
"""


def test_the_second_start_loads_what_the_first_one_built(tmp_path: Path) -> None:
    """Numbers and manifest are those of the program: two graphs, one of them asked for twice."""
    script = PROGRAM.format(cache=str(tmp_path / "cache"))
    first, second = (in_child(tmp_path, script) for _ in range(2))
    manifest = tmp_path / "cache" / "manifests" / "serve.plans"
    assert first == [f"1 2 0 True {manifest}"]
    assert second == [f"3 0 0 True {manifest}"]
    assert sorted(wanted.count for wanted in Manifest.read(manifest).graphs) == [2, 4]
    assert oct(manifest.parent.stat().st_mode & 0o777) == "0o700"


def test_ranks_build_each_graph_once(tmp_path: Path) -> None:
    """Four processes at once on an empty cache: two builds in all, and one manifest that counts all four."""
    script = prepared(tmp_path, PROGRAM.format(cache=str(tmp_path / "cache")))
    ranks = [start(script) for _ in range(4)]
    told = [finish(rank)[0].split() for rank in ranks]
    assert sum(int(built) for _, built, *_ in told) == 2
    assert sum(int(loaded) for loaded, *_ in told) == 10
    manifest = Manifest.read(tmp_path / "cache" / "manifests" / "serve.plans")
    assert sorted(wanted.count for wanted in manifest.graphs) == [4, 8]


def test_a_start_without_builds_names_graph_and_manifest(tmp_path: Path) -> None:
    """`build="forbid"` raises at the first graph that is not there."""
    script = f"""
        try:
            with plancache.startup("serve", directory={str(tmp_path / "cache")!r}, device=roads.DEVICE, build="forbid"):
                roads.Graphs().convolution()[0].build()
        except plancache.errors.PlanNotFoundError as error:
            print(error.summary.partition(" ")[0], *error.__notes__, sep="\\n")
    """
    summary, note = in_child(tmp_path, script)
    assert summary == "conv_fprop+bias+relu"
    assert note.endswith(str(tmp_path / "cache" / "manifests" / "serve.plans"))


def test_a_start_that_fails_notes_what_it_asked_for(tmp_path: Path) -> None:
    """The manifest is written, and the exception is the program's own."""
    cache, _ = opened_on_gpu(tmp_path / "cache", strict=True)
    with cache, pytest.raises(ZeroDivisionError), startup("serve", cache=cache) as this:
        cache.plan(product())
        raise ZeroDivisionError
    assert (this.loaded, this.built) == (0, 1)
    assert len(Manifest.read(this.manifest).graphs) == 1


def test_one_start_within_another_shares_its_cache(tmp_path: Path) -> None:
    """Both manifests have what the inner one asked for; only the outer one's has the rest."""
    cache, _ = opened_on_gpu(tmp_path / "cache", strict=True)
    with cache, startup("outer", cache=cache) as outer:
        cache.plan(product(1))
        with startup("inner") as inner:
            cache.plan(product(2))
    assert inner.cache is outer.cache is cache
    assert (outer.built, inner.built) == (2, 1)
    assert [len(Manifest.read(one.manifest).graphs) for one in (outer, inner)] == [2, 1]


def test_starts_of_one_name_end_each_for_itself(tmp_path: Path) -> None:
    """One within the other, as threads may have it: the inner one's end is not the outer one's."""
    cache, _ = opened_on_gpu(tmp_path / "cache", strict=True)
    with cache, startup("serve", cache=cache) as outer:
        with startup("serve") as inner:
            cache.plan(product(1))
        with startup("other") as after:
            cache.plan(product(2))
    assert inner.cache is after.cache is outer.cache
    assert (outer.built, inner.built, after.built) == (2, 1, 1)


def test_what_was_fetched_ahead_answers_without_the_file(tmp_path: Path) -> None:
    """Rows that go after they were fetched are hits all the same, once; and what another program asked for is not fetched."""
    for tag, size in (("serve", 1), ("serve", 2), ("other", 3)):
        cache, machine = opened_on_gpu(tmp_path, strict=True, tag=tag)
        with cache:
            cache.plan(product(size))
    cache, _ = opened_on_gpu(tmp_path, machine, strict=True)
    with cache:
        cache.fetch_ahead("serve")
        assert len(cache._ahead) == 2
        with closing(sqlite3.connect(tmp_path / "plans-1.sqlite3")) as connection, connection:
            connection.execute("DELETE FROM entries")
        origins = [cache.plan(product(size)).origin for size in (1, 2, 3)]
        assert origins == ["local", "local", "built"]


def test_a_place_that_takes_no_manifest_is_no_hindrance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The program runs, its plans come from the cache, and the log says what was not noted."""
    (tmp_path / "manifests").touch()
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache, startup("serve", cache=cache):
        assert cache.plan(product()).origin == "built"
    assert "what serve asks for is not noted" in caplog.text


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "x" * 101, "two words"])
def test_a_name_that_makes_no_file_is_refused(name: str) -> None:
    """Before anything is opened."""
    with pytest.raises(SettingsError, match="the name of a program is letters"), startup(name):
        pytest.fail("not reached")


def test_the_summary_is_one_line(tmp_path: Path) -> None:
    """It says what was loaded, built, spent, saved and left, and where the manifest is."""
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        this = Startup("serve", tmp_path / "serve.plans", loaded=40, built=2, left=1, spent_s=1.25, saved_s=30.04, cache=cache)
    expected = f"serve: 40 plans loaded, 2 built, 1.25 s spent on them, 30.0 s saved, 1 left to the frontend; {this.manifest}"
    assert this.summary() == expected


# ---- around a program -----------------------------------------------------------------------------------------------

SERVE = """
import os, subprocess, sys, tempfile
sys.path.insert(0, {tests!r})
import roads
from plancache.compiler import provide_driver
provide_driver(roads.DEVICE.driver_version, tempfile.mkdtemp(dir={scratch!r}))
roads.Graphs().convolution()[0].build()
if sys.argv[1:] == ["parent"]:
    subprocess.run([sys.executable, __file__], check=True)
import own  # what the environment's own sitecustomize made
print(os.getpid(), own.SEEN, "sitecustomize" in sys.modules)
sys.exit(7 if sys.argv[1:] else 0)
"""

OWN = """
import sys, types
sys.modules["own"] = types.ModuleType("own")
sys.modules["own"].SEEN = "own"
import plancache.intercept
def with_a_device_file():  # where there is no GPU
    import roads
    return plancache.PlanCache(device=roads.DEVICE, strict=True)
plancache.intercept._default_cache = with_a_device_file
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OWN)
    path = tmp_path / "serve.py"
    path.write_text(SERVE.format(tests=str(ROADS_FILE.parent), scratch=str(tmp_path)))
    return path


def launched(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plancache", "--cache-dir", str(program.parent / "cache"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(program.parent / "site"), "PLANCACHE_LOG": "info"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_program_runs_through_the_cache_unchanged(program: Path) -> None:
    """With its child processes; its own sitecustomize, output and exit code are its own. The second time nothing is built."""
    for builds in ("0 hits (0 stored, 0 sealed), 1 builds", "1 hits (1 stored, 0 sealed), 0 builds"):
        done = launched(program, "run", "--", sys.executable, str(program), "parent")
        assert done.returncode == 7, done.stderr
        assert [line.split()[1:] for line in done.stdout.splitlines()] == [["own", "True"]] * 2
        assert len({line.split()[0] for line in done.stdout.splitlines()}) == 2
        assert done.stderr.count("1 hits (1 stored, 0 sealed), 0 builds") == (1 if builds.startswith("0") else 2)
        assert builds in done.stderr


def test_a_broken_sitecustomize_is_no_hindrance(program: Path) -> None:
    """Python says what is wrong with it, as ever, and the program goes through the cache."""
    own = program.parent / "site" / "sitecustomize.py"
    own.write_text(own.read_text() + 'raise RuntimeError("broken")\n')
    done = launched(program, "run", "--", sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: broken" in done.stderr
    assert "1 builds" in done.stderr


def test_a_programs_graphs_are_recorded(program: Path) -> None:
    """By all of its processes into one manifest, which `check` finds usable."""
    manifest = program.parent / "serve.plans"
    done = launched(program, "record", "-o", str(manifest), "--", sys.executable, str(program), "parent")
    assert done.returncode == 7, done.stderr
    (wanted,) = Manifest.read(manifest).graphs
    assert wanted.count == 2
    checked = launched(program, "check", str(manifest), "--device", "h200", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["usable"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "there is no program to run; name one after --"),
        (["run", "--", "no-such-program"], "there is no program 'no-such-program' to run"),
        (["record", "--", "true"], "the following arguments are required: -o/--output"),
    ],
)
def test_what_cannot_be_run_is_wrong_usage(program: Path, arguments: list[str], message: str) -> None:
    """Exit code 2, one line with the cure."""
    done = launched(program, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_program_plans_by_hand_is_recorded_too(program: Path) -> None:
    """A program with a cache of its own, under `record`; one that plans nothing leaves no manifest, and the log says so."""
    program.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\nimport plancache, roads\n"
        "with plancache.PlanCache(device=roads.DEVICE, strict=True) as cache:\n"
        "    graphs = roads.Graphs()\n"
        "    for _ in range(int(sys.argv[2])): cache.plan(graphs.convolution()[0])\n"
    )
    for count, said in ((2, ""), (0, "no graph was asked for")):
        manifest = program.parent / f"{count}.plans"
        tests = str(ROADS_FILE.parent)
        done = launched(program, "record", "-o", str(manifest), "--", sys.executable, str(program), tests, str(count))
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        assert manifest.exists() is bool(count)
    (wanted,) = Manifest.read(program.parent / "2.plans").graphs
    assert wanted.count == 2


def test_a_manifest_that_cannot_be_written_is_said_before_the_program_runs(program: Path) -> None:
    """Exit code 1, and nothing ran."""
    done = launched(program, "record", "-o", str(program.parent / "none" / "serve.plans"), "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (1, "")
    assert "its directory is not there" in done.stderr
