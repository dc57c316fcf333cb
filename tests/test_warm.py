"""Warming from signatures: a manifest's graphs are built as the program's own, side by side, resumably; `--stored` after an upgrade."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faking import opened_on_gpu, product
from samples import make_entry, matmul
from zoo import ZOO

from plancache import Constraints, PlanCache
from plancache.backend import CudnnBackend
from plancache.cli import main, rewarming
from plancache.cli import warm as warm_command
from plancache.description import decode, signature_of
from plancache.entry import Entry, Trial
from plancache.environment import Device
from plancache.errors import ProofError, UncacheableGraphError
from plancache.jobs import Tuned
from plancache.key import PlanKey, make_key
from plancache.manifest import Manifest, Wanted
from plancache.signature import Uncacheable, read
from plancache.target import DeviceTarget
from plancache.warming import elsewhere, graph_of

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")
LIMITED = Constraints(workspace_limit_bytes=0)
SIZES = (1, 2, 3)


def wanted(graph: Any, constraints: Constraints | None = None) -> Wanted:
    return Wanted(read(graph, DEVICE).signature, constraints or Constraints())


def no_engine() -> Any:
    """cuDNN has no engine for these types."""
    kinds = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=kinds.HALF, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)
    image = graph.tensor(dim=[1, 7, 3, 3], stride=[63, 9, 3, 1], data_type=kinds.INT8)
    weight = graph.tensor(dim=[5, 7, 3, 3], stride=[63, 9, 3, 1], data_type=kinds.DOUBLE)
    graph.conv_fprop(image=image, weight=weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    return graph


def key_of(cache: PlanCache, one: Wanted) -> PlanKey:
    return make_key(one.signature, cache._targets.current().place, {}, one.constraints)


def of_tomorrow() -> Wanted:
    """A graph with an operation that this frontend does not have."""
    description = decode(wanted(matmul()).signature)
    return Wanted(signature_of(replace(description, nodes=({**description.nodes[0], "node_type": "MATMUL_OF_TOMORROW"},))))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small products."""
    file = tmp_path_factory.mktemp("manifest") / "serve.json"
    Manifest.of(wanted(product(size)) for size in SIZES).write(file)
    return file


@pytest.fixture(scope="module")
def warmed(manifest: Path) -> Path:
    """A cache directory that was warmed from it."""
    directory = manifest.parent / "cache"
    assert main(["warm", str(manifest), "--device", "h200", "--cache-dir", str(directory)]) == 0
    return directory


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    for name in [name for name in os.environ if name.startswith(("PLANCACHE_", "NVIDIA_TF32"))]:
        monkeypatch.delenv(name)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def keys(directory: Path) -> set[str]:
    with PlanCache(directory, device=DEVICE, mode="readonly") as cache:
        return {entry.key.hex for entry in cache.entries()}


# ---- graphs from signatures -----------------------------------------------------------------------------------------


def test_every_graph_of_the_zoo_is_made_again() -> None:
    """The graph that a signature gives has that signature, so that its plan is the one that the program will ask for."""
    target = DeviceTarget(DEVICE)
    made = 0
    for name, case in ZOO.items():
        with suppress(Uncacheable):
            one = wanted(case.make())
            assert read(graph_of(one, target), DEVICE).signature == one.signature, name
            made += 1
    assert made > 300
    target.close()


def test_a_warmed_graph_is_a_hit_for_the_program_that_describes_it(warmed: Path) -> None:
    """With builds barred, and under the name and uids that the program gives."""
    with PlanCache(warmed, device=DEVICE, build="forbid", strict=True) as cache:
        for size in SIZES:
            assert cache.plan(product(size)).origin == "local"


def test_constraints_come_with_a_graph(tmp_path: Path) -> None:
    """What is built is built under the constraints that the program had asked for."""
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    backend.copy = CudnnBackend(DEVICE).copy  # type: ignore[attr-defined]
    with cache:
        entry = cache.plan_wanted(wanted(product(), LIMITED)).entry
        assert entry is not None
        assert json.loads(entry.key.components["constraints"])["workspace_limit_bytes"] == 0
        assert cache.plan(product(), constraints=LIMITED).origin == "memory"


def test_one_that_cannot_be_made_again_is_a_failure_and_the_others_go_on(warmed: Path, device: Device) -> None:
    """`PlanCache.warm` takes a manifest; an operation of another frontend, a tensor that is not there."""
    description = decode(wanted(matmul()).signature)
    hollow = Wanted(signature_of(replace(description, nodes=({**description.nodes[0], "outputs": {"C": 9}},))))
    with PlanCache(warmed, device=device, mode="readonly") as cache:
        result = cache.warm([of_tomorrow(), hollow, wanted(product(1)), product(2)])
    assert [plan.origin for plan in result.plans] == ["local", "local"]
    first, second = (failure.error for failure in result.failures)
    assert [failure.position for failure in result.failures] == [0, 1]
    assert isinstance(first, UncacheableGraphError) and "no operation MATMUL_OF_TOMORROW" in str(first)
    assert isinstance(second, UncacheableGraphError) and "cannot be made again" in str(second)


def test_a_manifest_is_warmed_by_its_path_too(warmed: Path, manifest: Path, device: Device) -> None:
    """`PlanCache.warm` reads the file itself."""
    with PlanCache(warmed, device=device, mode="readonly") as cache:
        assert [plan.origin for plan in cache.warm(manifest).plans] == ["local"] * 3


# ---- the command ----------------------------------------------------------------------------------------------------


def test_what_is_stored_is_skipped(run: Run, manifest: Path, warmed: Path) -> None:
    """A second warm builds nothing, and says so."""
    code, out, err = run("warm", manifest, "--device", "h200", "--cache-dir", warmed)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in lines[1:4]] == ["local"] * 3
    assert lines[1].endswith("matmul [8x64x32, 8x32x16] half")
    assert lines[-1].startswith("3 graphs for NVIDIA H200 in ") and ": 3 local; " in lines[-1]


def test_children_side_by_side_build_the_same(run: Run, manifest: Path, warmed: Path, tmp_path: Path) -> None:
    """With `--jobs 2` the same keys are stored, and listed in the manifest's order."""
    code, out, _ = run("warm", manifest, "--device", "h200", "--cache-dir", tmp_path, "--jobs", "2", "--json")
    found = json.loads(out)
    assert (code, found["failed"], found["not_stored"]) == (0, 0, 0)
    assert [one["name"] for one in found["graphs"]] == [one.summary for one in Manifest.read(manifest)]
    assert {one["origin"] for one in found["graphs"]} == {"built"}
    assert keys(tmp_path) == keys(warmed)


def test_one_that_cannot_be_built_is_listed_with_the_reason(run: Run, warmed: Path, tmp_path: Path) -> None:
    """cuDNN's own, or why it cannot be made again; the others go on, and the exit code is 1."""
    file = tmp_path / "m.json"
    Manifest.of([wanted(no_engine()), of_tomorrow(), wanted(product(1))]).write(file)
    code, out, _ = run("warm", file, "--device", "h200", "--cache-dir", warmed)
    assert code == 1
    assert "first check that failed: is_supported_datatype" in out
    assert "has no operation MATMUL_OF_TOMORROW; use the one it was recorded with" in out
    assert "3 graphs for NVIDIA H200" in out.splitlines()[-1] and ": 2 failed, 1 local; " in out.splitlines()[-1]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_warm_leaves_a_good_store_and_can_be_resumed(manifest: Path, tmp_path: Path, run: Run, jobs: str) -> None:
    """Ctrl-C after the first plan: 130, what was listed is stored and whole, and the next run builds the rest."""
    more = Manifest.read(manifest).merged(Manifest.of(wanted(product(size)) for size in range(4, 12)))
    more.write(tmp_path / "m.json")
    arguments = [str(tmp_path / "m.json"), "--device", "h200", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "plancache", "warm", *arguments, "--jobs", jobs]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    listed = [child.stdout.readline() for _ in range(2)]
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    listed += out.splitlines()
    assert (child.returncode, err) == (130, "plancache: interrupted\n")
    built = sum(" built " in line for line in listed)
    assert 1 <= built <= len(keys(tmp_path / "cache")) < len(more)
    assert run("verify", "--cache-dir", tmp_path / "cache")[0] == 0
    code, out, _ = run("check", *arguments)
    assert (code, f"usable here: {len(keys(tmp_path / 'cache'))} of 11 graphs" in out) == (1, True)
    smaller = Manifest.of(list(more)[:2])
    smaller.write(tmp_path / "m.json")
    code, out, _ = run("warm", *arguments)
    assert code == 0 and " local " in out.splitlines()[1]


NONSENSE = {
    "nothing": ([], "give one of a manifest, package.module:function and --stored"),
    "two": (["m.json", "--stored"], "give one of a manifest"),
    "tuning a file": (["m.json", "--tune", "--device", "h200"], "--tune runs plans, which takes the GPU itself"),
    "jobs on a GPU": (["m.json", "--jobs", "2"], "--jobs is for device files"),
    "no jobs": (["m.json", "--jobs", "0"], "'0' is no number of processes"),
}


@pytest.mark.parametrize(("arguments", "said"), NONSENSE.values(), ids=NONSENSE)
def test_what_makes_no_sense_is_refused(run: Run, arguments: list[str], said: str) -> None:
    """One line, exit code 2."""
    code, out, err = run("warm", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_bad_manifest_is_refused_before_anything_is_built(run: Run, tmp_path: Path, manifest: Path) -> None:
    """One that is not there, and one that was changed; nothing is stored."""
    bad = tmp_path / "bad.json"
    bad.write_text(manifest.read_text().replace('"dim": [8, 64, 32]', '"dim": [8, 64, 64]'))
    for file, said in ((tmp_path / "none.json", "No such file"), (bad, "line 5: graph 1 is garbled: what it describes does not match")):
        code, out, err = run("warm", file, "--device", "h200", "--cache-dir", tmp_path / "cache")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert said in err
    assert not (tmp_path / "cache").exists()


def test_the_progress_of_a_manifest_is_shown_below_the_list(
    run: Run, manifest: Path, warmed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many are planned, and what is left; it goes before each line, and at the end."""
    said: list[str] = []
    monkeypatch.setattr(warm_command, "terminal", lambda: said.append)
    run("warm", manifest, "--device", "h200", "--cache-dir", warmed)
    shown = [text.removeprefix("\r\x1b[K") for text in said]
    assert shown[0] == "0 of 3 planned"
    assert [text.partition(",")[0] for text in shown if text][-1] == "3 of 3 planned"
    assert shown[-1] == ""
    assert shown.count("") == 4


def test_what_was_planned_is_tuned_where_asked(run: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: untuned plans only, each once; results are told, and one that failed makes the exit code 1."""
    cache, backend = opened_on_gpu(tmp_path)
    backend.copy = CudnnBackend(DEVICE).copy  # type: ignore[attr-defined]
    first, second, third = Manifest.read(manifest)
    cache._levels.put(tuned_entry(5.0, key=key_of(cache, third), operands=(1,)), replace_equal=True)
    asked: list[str] = []

    def tune(entries: Sequence[Entry], on_done: Callable[[Tuned], object], on_step: Callable[[], object]) -> list[Tuned]:
        asked.extend(entry.description.summary for entry in entries)
        done = [
            Tuned(entries[0].key, entries[0], tuned_entry(4.0, key=entries[0].key), 1.0),
            Tuned(entries[1].key, entries[1], None, 1.0, "it hung", ProofError(entries[1].key.hex, "it hung")),
        ]
        for one in done:
            on_step()
            on_step()
            on_done(one)
        return done

    monkeypatch.setattr(cache, "tune", tune)
    monkeypatch.setattr("plancache.cache.PlanCache", lambda **_: cache)
    monkeypatch.setattr(warm_command, "_device", lambda _: cache._targets.current().device)
    code, out, _ = run("warm", manifest, "--tune")
    assert asked == [first.summary, second.summary]
    assert code == 1
    assert ": 2 built, 1 local; " in out
    assert "1 plan tuned in 2.0 s" in out and "1 failed" in out and "it hung" in out


# ---- after an upgrade -----------------------------------------------------------------------------------------------


def test_stored_graphs_are_built_anew_for_another_environment(run: Run, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored for the old one is built for the new one, under the same constraints, and compared; a second run builds nothing."""
    directory = manifest.parent / "upgraded"
    with PlanCache(directory, device=DEVICE, strict=True) as cache:
        cache.plan(product(1), constraints=LIMITED)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    where = ("--device", "h200", "--cache-dir", directory)
    code, out, _ = run("warm", "--stored", *where, "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["origin"] for one in found["graphs"]] == ["built"]
    assert [list(one) for one in found["compared"]] == [["graph", "build_before_s", "build_s", "time_before_us", "time_us", "gain"]]
    assert len(keys(directory)) == 2
    with PlanCache(directory, device=DEVICE, build="forbid") as cache:
        assert cache.plan(product(1), constraints=LIMITED).origin == "local"
    code, out, _ = run("warm", "--stored", *where)
    lines = out.splitlines()
    assert code == 0 and ": 1 local; " in lines[3]
    assert lines[5].split() == ["GRAPH", "BUILD", "S", "->", "S", "US", "->", "US", "GAIN"]
    assert lines[-1].startswith("built in ") and lines[-1].endswith(" before")


def test_stored_says_where_there_is_nothing(run: Run, warmed: Path) -> None:
    """All that is stored is for this environment."""
    code, out, _ = run("warm", "--stored", "--device", "h200", "--cache-dir", warmed)
    assert code == 0
    assert ": there are none; " in out.splitlines()[-1]


def tuned_entry(time_us: float, **changes: Any) -> Any:
    entry = make_entry()
    trial = Trial(entry.engine, 7, {}, 0, 0.1, 0, time_us, time_us, time_us, 9, "won", "")
    return make_entry(quality="tuned", trials=(trial,), **changes)


def test_the_best_entry_of_other_environments_is_compared(tmp_path: Path, device: Device) -> None:
    """A tuned one rather than a later untuned one; of equal ones the newest; entries of this environment are not among them."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        place = cache._targets.current().place
        for driver, make, created_at in (("1", tuned_entry, 1.0), ("2", tuned_entry, 2.0), ("3", make_entry, 3.0)):
            key = make_key(wanted(matmul()).signature, place._replace(driver=driver.encode()), {}, LIMITED)
            time = (10.0 * created_at,) if make is tuned_entry else ()
            cache._levels.put(make(*time, key=key, created_at=created_at), replace_equal=True)
        key = make_key(wanted(product(1)).signature, place, {}, Constraints())
        cache._levels.put(make_entry(key=key), replace_equal=True)
        (known,) = cache.stored_elsewhere()
        assert known.wanted == wanted(matmul(), LIMITED)
        assert known.entry.key.components["driver"] == b"2"
        assert len(elsewhere(cache.entries(), place, {"CUDNN_X": "1"})) == 2
        (compared,) = rewarming.compare([known], [tuned_entry(16.0, timings_s={"build": 0.5})], [])
    assert compared[1:] == (0.75, 0.5, 20.0, 16.0)
    assert compared.gain == 1.25


def test_gains_and_losses_are_told_graph_by_graph_and_in_all() -> None:
    """Build seconds of all; run times of those that were tuned both times; a plan tuned in this run counts as it is now."""
    slower = rewarming.Compared("b", 1.0, 2.5, 10.0, 20.0)
    faster = rewarming.Compared("a", 2.0, 0.5, 10.0, 5.0)
    lines = rewarming.text([faster, slower, rewarming.Compared("c", 1.0, 1.0, None, 5.0)]).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["a", "2.00", "0.50", "10.0", "5.0", "2.00x"],
        ["b", "1.00", "2.50", "10.0", "20.0", "0.50x"],
        ["c", "1.00", "1.00", "-", "5.0", "-"],
    ]
    told = "2 graphs tuned before and now: 1.00 times as fast (geometric mean), 1 slower"
    assert lines[-1] == f"built in 4.0 s, where it took 4.0 s before; {told}"


def test_a_plan_that_was_tuned_in_this_run_is_compared_as_it_is_now(tmp_path: Path, device: Device) -> None:
    """The tuned entry stands for the one that was planned before it; a graph that failed has no line."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        place = cache._targets.current().place
        cache._levels.put(
            tuned_entry(10.0, key=make_key(wanted(matmul()).signature, place._replace(driver=b"1"), {}, LIMITED)), replace_equal=True
        )
        (known,) = cache.stored_elsewhere()
    planned, won = make_entry(), tuned_entry(5.0)
    tuned = Tuned(planned.key, planned, won, 1.0)
    (compared,) = rewarming.compare([known, known], [planned, None], [tuned])
    assert compared.gain == 2.0
