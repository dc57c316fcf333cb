"""`check`: says of each graph of a manifest what a request would meet, without building or loading anything."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faking import MadeUp, opened_on_gpu, product
from samples import make_entry, matmul

from plancache import Constraints, PlanCache
from plancache.building import WITHOUT_GPU, denial
from plancache.checking import Checked
from plancache.cli import main
from plancache.description import decode, signature_of
from plancache.entry import Candidate
from plancache.environment import Device
from plancache.errors import ManifestError, PlanNotFoundError
from plancache.key import PlanKey, make_key
from plancache.manifest import Manifest, Wanted
from plancache.signature import read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")
PLAIN = Constraints()
LIMITED = Constraints(workspace_limit_bytes=0)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[tuple[PlanCache, MadeUp]]:
    cache, backend = opened_on_gpu(tmp_path)
    with cache:
        yield cache, backend


@pytest.fixture
def cache(gpu: tuple[PlanCache, MadeUp]) -> PlanCache:
    return gpu[0]


def wanted(size: int = 16, constraints: Constraints = PLAIN, **more: Any) -> Wanted:
    return Wanted(read(product(size), DEVICE).signature, constraints, **more)


def key_of(cache: PlanCache, one: Wanted, **place: bytes) -> PlanKey:
    """Its key here, or with other components of the environment."""
    return make_key(one.signature, cache._targets.current().place._replace(**place), {}, one.constraints)


def store(cache: PlanCache, one: Wanted, place: dict[str, bytes] | None = None, **changes: Any) -> None:
    cache._levels.put(make_entry(key=key_of(cache, one, **place or {}), operands=(1,), **changes), replace_equal=True)


def check_of(cache: PlanCache, *graphs: Wanted) -> list[Checked]:
    return list(cache.check(Manifest.of(graphs)).graphs)


def reopened(cache: PlanCache) -> tuple[PlanCache, MadeUp]:
    """Another process's view of the same directory."""
    return opened_on_gpu(cache.settings.directory)


# ---- what is usable -------------------------------------------------------------------------------------------------


def test_what_was_planned_is_usable_and_the_rest_was_never_built(gpu: tuple[PlanCache, MadeUp]) -> None:
    """Level, engine and quality of what answers; and nothing is built, loaded or counted for it."""
    cache, _ = gpu
    cache.plan(product(1))
    again, backend = reopened(cache)
    with again:
        check = again.check(Manifest.of([wanted(1), wanted(2)]))
        missing, found = check.graphs
        assert (found.state, found.reason, found.level) == ("usable", None, "local")
        assert (found.engine, found.quality) == ("eng7_k24=21", "heuristic")
        assert (missing.state, missing.reason, missing.differences) == ("missing", "never built here", ())
        assert (check.usable, check.missing, check.device) == (1, (missing,), "NVIDIA H200")
        assert backend.builds == backend.loaded == []
        assert not again.statistics().hits + again.statistics().misses


def test_the_same_graph_under_other_constraints_is_another_one(cache: PlanCache) -> None:
    """And the reason says which constraints are stored."""
    store(cache, wanted())
    usable, limited = sorted(check_of(cache, wanted(), wanted(constraints=LIMITED)), key=lambda one: one.state != "usable")
    assert usable.state == "usable"
    assert (limited.state, limited.reason) == (
        "elsewhere",
        "built for another environment: constraints workspace_limit_bytes: 0 here, none stored",
    )


def test_sealed_files_count(cache: PlanCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan in a bundle is usable, by its level."""
    store(cache, wanted())
    cache.close()
    assert main(["seal", "--cache-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    reader, _ = opened_on_gpu(tmp_path / "empty", bundles=[tmp_path / "plans-1.sqlite3"])
    with reader:
        (one,) = check_of(reader, wanted())
    assert (one.state, one.level) == ("usable", "sealed")


# ---- what is missing, and why ---------------------------------------------------------------------------------------

ELSEWHERE = {
    "model": ({"model": b'"NVIDIA H100"'}, "model: NVIDIA H200 here, NVIDIA H100 stored"),
    "driver": ({"driver": b"12080"}, "driver: CUDA 13.0 here, CUDA 12.8 stored"),
    "cudnn": ({"cudnn": b'{"builds":{},"version":92000}'}, "cudnn: 9.19.0 here, 9.20.0 stored"),
    "frontend": ({"frontend": b'"1.30.0"'}, "frontend: "),
}


@pytest.mark.parametrize(("place", "said"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_plan_for_another_environment_says_which(cache: PlanCache, place: dict[str, bytes], said: str) -> None:
    """The component that differs, with both values."""
    store(cache, wanted(), place)
    (one,) = check_of(cache, wanted())
    assert one.state == "elsewhere"
    assert one.reason is not None
    assert one.reason.startswith(f"built for another environment: {said}")
    assert [contrast.component for contrast in one.differences] == list(place)


def test_the_nearest_of_several_is_compared(cache: PlanCache) -> None:
    """The one that differs in the fewest components, and of those the newest."""
    store(cache, wanted(), {"driver": b"12080", "model": b'"NVIDIA H100"'}, created_at=9.0)
    store(cache, wanted(), {"driver": b"12060"}, created_at=2.0)
    store(cache, wanted(), {"driver": b"12040"}, created_at=3.0)
    (one,) = check_of(cache, wanted())
    assert one.reason == "built for another environment: driver: CUDA 13.0 here, CUDA 12.4 stored"


def test_a_variable_that_differs_is_named(cache: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set here and was not set there."""
    store(cache, wanted())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    cache._targets.current().variables = {"NVIDIA_TF32_OVERRIDE": "0"}
    (one,) = check_of(cache, wanted())
    assert one.reason == "built for another environment: variables NVIDIA_TF32_OVERRIDE: 0 here, not set stored"


def test_what_an_entry_needs_and_is_not_here_is_named(cache: PlanCache) -> None:
    """As `usable` says it."""
    store(cache, wanted(), requirements={"machine": "sparc"})
    (one,) = check_of(cache, wanted())
    assert one.state == "unusable"
    assert one.reason is not None
    assert one.reason.startswith("it needs machine sparc, here is ")


def test_a_damaged_row_is_named(cache: PlanCache, tmp_path: Path) -> None:
    """It is not usable, though it is there."""
    store(cache, wanted())
    with sqlite3.connect(tmp_path / "plans-1.sqlite3") as connection:
        connection.execute("UPDATE entries SET payload = zeroblob(length(payload))")
    connection.close()
    (one,) = check_of(cache, wanted())
    assert (one.state, one.level) == ("corrupt", "local")
    assert "does not match its checksum" in str(one.reason)


def verdict(kind: str, reason: str, times: int = 1, *, of_row: bool = False) -> Callable[[PlanCache, Wanted], None]:
    def record(cache: PlanCache, one: Wanted) -> None:
        key = key_of(cache, one).digest
        checksum = b""
        if of_row:
            store(cache, one)
            (found,) = cache._levels.rows(key)
            checksum = found.row.checksum
        for _ in range(times):
            cache._levels.record(kind, key, reason, checksum)

    return record


VERDICTS = {
    "unsupported": (verdict("unsupported", "no engine"), "unsupported", "cuDNN has no plan for it: no engine"),
    "unsupported only without a GPU": (verdict(WITHOUT_GPU, "no engine"), "missing", "never built here"),
    "quarantined": (verdict("quarantined", "load: refused", of_row=True), "quarantined", "load: refused"),
    "struck once": (verdict("struck", "build: killed"), "missing", "never built here"),
    "struck twice": (verdict("struck", "build: killed", 2), "struck", "2 processes ended with it (build: killed)"),
    "its row struck": (verdict("struck", "load: killed", 2, of_row=True), "struck", "2 processes ended with it (load: killed)"),
}


@pytest.mark.filterwarnings("ignore:.*is skipped")
@pytest.mark.parametrize(("record", "state", "reason"), VERDICTS.values(), ids=VERDICTS)
def test_what_is_known_of_a_key_is_told(cache: PlanCache, record: Callable[..., None], state: str, reason: str) -> None:
    """Verdicts that a request here would meet, and no others."""
    record(cache, wanted())
    again, _ = reopened(cache)
    with again:
        (one,) = check_of(again, wanted())
        if state != "unsupported":
            with pytest.raises(PlanNotFoundError):
                again.plan(product(), build="forbid")
    assert (one.state, one.reason) == (state, reason)


def test_an_unsupported_graph_of_a_device_file_is_told(device: Device, tmp_path: Path) -> None:
    """What a build without a GPU found out counts where there is none."""
    one = wanted()
    with PlanCache(tmp_path, device=device) as cache:
        store(cache, wanted(1))  # a file to write into
        cache._levels.record(WITHOUT_GPU, key_of(cache, one).digest, "no engine")
        (found,) = check_of(cache, one)
    assert (found.state, found.reason) == ("unsupported", "cuDNN has no plan for it: no engine")


def test_a_recipe_that_was_denied_since_is_told(cache: PlanCache) -> None:
    """The one that the manifest lays down, or that was chosen for this graph in another environment."""
    recipe, other = Candidate("eng9", 9, {}), make_entry().recipe
    locked, moved = wanted(recipe=recipe), wanted(8)
    store(cache, moved, {"driver": b"12080"})
    for one, candidate in ((locked, recipe), (moved, other)):
        cache._levels.record("denied", denial(key_of(cache, one), candidate), f"{candidate.name}: wrong")
    assert {one.reason for one in check_of(cache, locked, moved)} == {"eng9: wrong", f"{other.name}: wrong"}
    assert {one.state for one in check_of(cache, locked, moved)} == {"denied"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("MATMUL", "MATMUL_OF_TOMORROW", "no operation MATMUL_OF_TOMORROW"), ("HALF", "QUARTER", "no value data_type.QUARTER")],
)
def test_a_graph_that_this_frontend_cannot_make_is_told(cache: PlanCache, old: str, new: str, said: str) -> None:
    """An operation or a value of a later frontend; its manifest is read all the same."""
    text = Manifest.of([wanted()]).text().replace(f'"{old}"', f'"{new}"')
    description = decode(wanted().signature)
    changed = json.loads(text)["graphs"][0]
    from plancache.jsonform import description_of

    later = Wanted(signature_of(description_of(changed)))
    assert later.description != description
    (one,) = check_of(cache, *Manifest.parse(Manifest.of([later]).text(), "x"))
    assert one.state == "foreign"
    assert said in str(one.reason)
    assert str(one.reason).endswith("use the one it was recorded with")


@pytest.mark.filterwarnings("ignore:nvidia-cudnn-frontend 9.9.9")
def test_where_nothing_is_cached_nothing_is_usable(gpu: tuple[PlanCache, MadeUp]) -> None:
    """A frontend that was not tested, libraries that are not known: a stored plan is not used, and check says so."""
    cache, backend = gpu
    store(cache, wanted())
    cache._targets.current().unknown = "two libcudnn"
    (one,) = check_of(cache, wanted())
    assert (one.state, one.reason) == ("uncacheable", "nothing is cached here: two libcudnn")
    cache._targets.current().unknown = None
    backend.libraries = backend.libraries._replace(frontend_version="9.9.9")
    (one,) = check_of(cache, wanted())
    assert (one.state, one.reason) == ("uncacheable", "nothing is cached here: nvidia-cudnn-frontend 9.9.9 is not tested")


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real plan in `cache` and manifests of it, and of it and another one."""
    folder = tmp_path_factory.mktemp("warmed")
    with PlanCache(folder / "cache", device=DEVICE, strict=True) as cache, cache.record(folder / "one.json"):
        cache.plan(matmul())
    Manifest.read(folder / "one.json").merged(Manifest.of([wanted(3)])).write(folder / "two.json")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_the_command_says_how_many_are_usable(warmed: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """Without a GPU; 0 where all are, 1 where one is missing, with its reason and the cure."""
    where = ("--device", "h200", "--cache-dir", warmed / "cache")
    assert run("check", warmed / "one.json", *where) == (0, f"usable here: 1 of 1 graph for NVIDIA H200, in {warmed / 'cache'}\n", "")
    code, out, err = run("check", warmed / "two.json", *where)
    lines = out.splitlines()
    assert (code, err) == (1, "")
    assert lines[0].split() == ["GRAPH", "WHY", "NOT"]
    assert lines[1] == "matmul [8x64x32, 8x32x24] half  never built here"
    assert lines[-2:] == [
        f"usable here: 1 of 2 graphs for NVIDIA H200, in {warmed / 'cache'}",
        f"'plancache warm {warmed / 'two.json'} --device h200 --cache-dir {warmed / 'cache'}' builds what is missing",
    ]


def test_the_command_prints_json(warmed: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """An object, with every graph of the manifest."""
    code, out, _ = run("check", warmed / "two.json", "--device", "h200", "--cache-dir", warmed / "cache", "--json")
    found = json.loads(out)
    assert code == 1
    assert (found["device"], found["usable"], found["missing"]) == ("NVIDIA H200", 1, 1)
    assert sorted(found["graphs"][0]) == sorted(
        ["graph", "sha256", "count", "state", "key", "reason", "level", "engine", "quality", "differences"]
    )
    assert {one["state"]: one["reason"] for one in found["graphs"]} == {"usable": None, "missing": "never built here"}


def test_a_manifest_is_taken_by_its_path_too(warmed: Path) -> None:
    """`PlanCache.check` reads the file itself, and says what is wrong with it."""
    with PlanCache(warmed / "cache", device=DEVICE, mode="readonly") as cache:
        assert (cache.check(warmed / "two.json").usable, cache.check(str(warmed / "one.json")).missing) == (1, ())
        with pytest.raises(ManifestError, match="No such file"):
            cache.check(warmed / "none.json")


def test_the_command_changes_nothing(warmed: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """Where there is no cache yet, none is made."""
    code, out, _ = run("check", warmed / "one.json", "--device", "h200", "--cache-dir", tmp_path / "none")
    assert (code, out.splitlines()[1].split("  ")[-1]) == (1, "never built here")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_database_is_an_error_and_stays_where_it_is(
    warmed: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """Looking puts nothing aside."""
    (tmp_path / "plans-1.sqlite3").write_bytes(b"no database" * 1000)
    code, _, err = run("check", warmed / "one.json", "--device", "h200", "--cache-dir", tmp_path)
    assert code == 1
    assert "plans-1.sqlite3" in err
    assert [file.name for file in tmp_path.iterdir()] == ["plans-1.sqlite3"]


def test_the_command_refuses_a_bad_manifest_in_one_line(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """Exit code 1, the file, the line and the cure; and no traceback."""
    bad = tmp_path / "bad.json"
    bad.write_text(Manifest.of([wanted()]).text().replace('"count": 1', '"count": "1"'))
    code, out, err = run("check", bad, "--device", "h200")
    assert (code, out) == (1, "")
    assert err.startswith(f"plancache: error: manifest {bad}, line 5: graph 1 is garbled: its count is '1'; undo the change")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["gpu", "h20"])
def test_the_command_says_what_is_wrong_with_a_device(warmed: Path, run: Callable[..., tuple[int, str, str]], name: str) -> None:
    """No such device file, or a slip in the name of one that is shipped."""
    code, _, err = run("check", warmed / "one.json", "--device", name)
    assert (code, err.count("\n")) == ({"gpu": 1, "h20": 2}[name], 1)
    assert "h200" in err
