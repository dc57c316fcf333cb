"""Explanations: of a hit what answers, of a miss what is known and what the nearest stored plan differs in, in words."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faking import opened_on_gpu
from samples import make_entry

from plancache import Constraints, Device, PlanCache, graphs
from plancache.building import WITHOUT_GPU, denial
from plancache.cli import main
from plancache.entry import Entry, pack
from plancache.explaining import Explanation
from plancache.key import PlanKey
from plancache.store.database import Database, Verdict
from plancache.store.levels import Levels
from plancache.store.sealed import seal
from plancache.words import contrasts

MODULE = """
from plancache import graphs

def two():
    print("a word of the program's own")
    yield graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=14, width=14)
    yield graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=20, width=14).graph
"""


def convolution(height: int = 14, **changes: Any) -> Any:
    """A graph whose plan is built in milliseconds; of one family with those of a height that is two times something odd."""
    sizes = {"batch": 2, "in_channels": 32, "out_channels": 32, "height": height, "width": 14}
    return graphs.conv_bias_relu(**sizes | changes).graph


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Path:
    """A cache directory with one plan."""
    directory = tmp_path_factory.mktemp("explain") / "cache"
    with PlanCache(directory, device=device, strict=True) as cache:
        cache.plan(convolution())
    return directory


@pytest.fixture
def directory(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


Explain = Callable[..., Explanation]


@pytest.fixture
def explain(directory: Path, device: Device) -> Explain:
    """Explains in a cache of its own, as a later process does."""

    def explain(graph_or_key: Any, *, on: Device = device, **options: Any) -> Explanation:
        with PlanCache(directory, device=on, mode="readonly") as cache:
            return cache.explain(graph_or_key, **options)

    return explain


@pytest.fixture
def database(directory: Path) -> Iterator[Database]:
    with closing(Database(directory / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        yield database


@pytest.fixture
def entry(directory: Path, device: Device) -> Entry:
    """The stored one."""
    with PlanCache(directory, device=device, mode="readonly") as cache:
        return cache.entry(cache.entries()[0].key)


def rekeyed(entry: Entry, **components: bytes) -> Entry:
    """An entry under the same key but for some components."""
    return replace(entry, key=PlanKey(tuple((entry.key.components | components).values())))


def changed(device: Device, **properties: Any) -> Device:
    return Device({**device.properties, **properties}, device.cudnn_version)


def said(found: Explanation) -> list[str]:
    assert found.nearest is not None
    return [str(contrast) for contrast in found.nearest.differences]


def run(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / "plans-1.sqlite3", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# ---- hits -----------------------------------------------------------------------------------------------------------


def test_a_hit_says_which_plan_answers_and_from_where(explain: Explain, entry: Entry) -> None:
    """Level, engine and quality are those of the stored plan, and nothing is in the way."""
    expected = Explanation("usable", entry.key.hex, entry.description.summary, None, "local", entry.engine, "compiled")
    assert explain(convolution()) == expected
    assert expected.usable
    assert str(expected) == f"{entry.description.summary}: usable"


def test_a_plan_that_is_in_memory_only_answers_too(cache_dir: Path, device: Device) -> None:
    """What a program built where nothing can be stored is a hit in that program."""
    with PlanCache(cache_dir / "none", device=device, mode="readonly") as cache:
        assert cache.explain(convolution()).state == "missing"
        cache.plan(convolution())
        assert cache.explain(convolution()).level == "memory"
        assert cache.statistics().hits == 0


def test_a_plan_in_a_sealed_file_answers(explain: Explain, directory: Path) -> None:
    """The level is named."""
    seal(directory / "plans-1.sqlite3", lock_timeout_s=20)
    assert explain(convolution()).level == "sealed"


def test_explaining_changes_nothing(explain: Explain, directory: Path) -> None:
    """No build, no use counted, no file touched."""
    before = {file.name: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    for graph in (convolution(), convolution(15)):
        explain(graph)
    assert {file.name: file.read_bytes() for file in directory.rglob("*") if file.is_file() if file.name in before} == before


# ---- misses ---------------------------------------------------------------------------------------------------------


def test_where_nothing_is_stored_there_is_nothing_near(cache_dir: Path, device: Device) -> None:
    """An empty cache is told as that."""
    with PlanCache(cache_dir / "none", device=device, mode="readonly") as cache:
        found = cache.explain(convolution())
    assert (found.state, found.reason, found.nearest) == ("missing", "nothing is stored", None)


def test_another_driver_is_named_with_both_versions(explain: Explain, device: Device, entry: Entry) -> None:
    """The nearest plan is that of the same graph, and only what really differs is told."""
    found = explain(convolution(), on=changed(device, driverVer=12080))
    assert found.nearest is not None
    assert (found.state, found.usable, found.nearest.likeness, found.nearest.key) == ("missing", False, "graph", entry.key.hex)
    assert (found.nearest.engine, found.nearest.quality, found.nearest.level) == (entry.engine, "compiled", "local")
    assert said(found) == ["driver: CUDA 12.8 here, CUDA 13.0 stored"]
    assert str(found).endswith("for another environment or other constraints: driver: CUDA 12.8 here, CUDA 13.0 stored")


def test_another_gpu_is_named_before_its_limits(explain: Explain, device: Device) -> None:
    """People know models; each limit follows by cuDNN's name."""
    found = explain(convolution(), on=changed(device, deviceName="NVIDIA H100", multiProcessorCount=114))
    assert said(found) == ["model: NVIDIA H100 here, NVIDIA H200 stored", "device multiProcessorCount: 114 here, 132 stored"]


def test_another_cudnn_is_named_with_both_versions(explain: Explain, database: Database, directory: Path, entry: Entry) -> None:
    """As versions are written, without the build ids that go with them."""
    run(directory, "DELETE FROM entries")
    database.put(rekeyed(entry, cudnn=entry.key.components["cudnn"].replace(b"91900", b"91400").replace(b"7b1d", b"0000")))
    assert said(explain(convolution())) == ["cudnn: 9.19.0 here, 9.14.0 stored"]


def test_another_build_of_the_same_cudnn_is_named_by_library(explain: Explain, database: Database, directory: Path, entry: Entry) -> None:
    """The library and the beginnings of both build ids; one that is missing is said to be."""
    cudnn = json.loads(entry.key.components["cudnn"])
    here = cudnn["builds"].pop("libcudnn_adv"), cudnn["builds"]["libcudnn_ops"]
    cudnn["builds"]["libcudnn_ops"] = "0123456789"
    run(directory, "DELETE FROM entries")
    database.put(rekeyed(entry, cudnn=json.dumps(cudnn).encode()))
    assert said(explain(convolution())) == [
        f"cudnn libcudnn_adv: build {here[0][:8]} here, not there stored",
        f"cudnn libcudnn_ops: build {here[1][:8]} here, build 01234567 stored",
    ]


def test_constraints_and_variables_are_named(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, with what is not set said so."""
    limited = Constraints(workspace_limit_bytes=0, deterministic=True, barred_engines=("eng7", "eng0"))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert said(explain(convolution(), constraints=limited)) == [
        "constraints barred_engines: eng0, eng7 here, none stored",
        "constraints deterministic: yes here, no stored",
        "constraints workspace_limit_bytes: 0 here, none stored",
        "variables NVIDIA_TF32_OVERRIDE: 0 here, not set stored",
    ]


def test_another_size_is_told_tensor_by_tensor(explain: Explain) -> None:
    """Which tensor, after the port that it is at, and which dims and strides."""
    found = explain(convolution(22))
    assert found.nearest is not None and found.nearest.likeness == "family"
    assert said(found)[:2] == [
        "signature tensor 1 (image) dims: 2x32x22x14 here, 2x32x14x14 stored",
        "signature tensor 1 (image) strides: 9856,1,448,32 here, 6272,1,448,32 stored",
    ]
    assert not any("weight" in text for text in said(found))
    assert str(found).endswith("and 5 more")


def test_another_type_and_another_parameter_are_told(explain: Explain) -> None:
    """The same operations with other tensors are no family, and what differs is told all the same."""
    found = explain(convolution(data_type="HALF"))
    assert found.nearest is not None and found.nearest.likeness == "operations"
    assert "signature io_data_type: HALF here, BFLOAT16 stored" in said(found)
    assert "signature tensor 2 (weight) type: HALF here, BFLOAT16 stored" in said(found)
    assert "signature operation 1 (conv_fprop) padding: 0, 0 here, 1, 1 stored" in said(explain(convolution(padding=0)))


def test_another_graph_is_told_as_a_whole(explain: Explain) -> None:
    """Tensor by tensor would say nothing where the operations are others."""
    found = explain(graphs.batched_matmul(batch=1, m=32, n=32, k=32).graph)
    assert found.nearest is not None and found.nearest.likeness == "components"
    (text,) = said(found)
    assert text.startswith("signature graph: matmul [1x32x32, 1x32x32] bfloat16 here, conv_fprop+bias+relu [2x32x14x14,")


def test_the_same_graph_elsewhere_comes_before_its_family_here(explain: Explain, database: Database, entry: Entry) -> None:
    """A plan of the graph itself says more than one of another size, whatever else is equal."""
    database.put(rekeyed(entry, driver=b"12080", frontend=b'"1.30.0"', signature=_signature(22)))
    near = explain(convolution(22)).nearest
    assert near is not None and near.likeness == "graph"
    assert [contrast.component for contrast in near.differences] == ["driver", "frontend"]


def test_of_several_the_one_that_differs_least_is_told(explain: Explain, database: Database, entry: Entry, device: Device) -> None:
    """Fewest components, then fewest tensors, then the newest."""
    on = changed(device, driverVer=12080)
    for driver, created_at in ((b"12090", 5.0), (b"12060", 9.0)):
        database.put(replace(rekeyed(entry, driver=driver), created_at=created_at))
    database.put(replace(rekeyed(entry, driver=b"12000", frontend=b'"1.30.0"'), created_at=99.0))
    run(database.path.parent, f"DELETE FROM entries WHERE created_at = {entry.created_at!r}")
    assert said(explain(convolution(), on=on)) == ["driver: CUDA 12.8 here, CUDA 12.6 stored"]


def test_of_a_family_the_nearest_size_is_told(explain: Explain, database: Database, entry: Entry) -> None:
    """What has the most equal tensors, not what was built last."""
    far = rekeyed(entry, signature=_signature(14, in_channels=96, out_channels=96))
    database.put(replace(far, created_at=entry.created_at + 5))
    near = explain(convolution(22)).nearest
    assert near is not None and (near.likeness, near.key) == ("family", entry.key.hex)
    near = explain(convolution(22, in_channels=96, out_channels=96)).nearest
    assert near is not None and (near.likeness, near.key) == ("family", far.key.hex)


def _signature(height: int, **changes: Any) -> bytes:
    """That of another convolution."""
    from plancache.signature import read

    return read(convolution(height, **changes), Device.from_file("h200")).signature


def test_rows_whose_keys_cannot_be_read_are_near_to_nothing(explain: Explain, directory: Path) -> None:
    """They are left out, and block no other."""
    run(directory, "INSERT INTO entries SELECT x'00', x'07', facts, payload, checksum, quality, build_s, created_at FROM entries")
    assert explain(convolution(22)).state == "missing"
    run(directory, "UPDATE entries SET preimage = x'07', key = x'0102' WHERE key != x'00'")
    assert explain(convolution()).reason == "nothing is stored"


def test_a_component_that_cannot_be_read_is_said_to_be_so(entry: Entry) -> None:
    """A stored preimage may hold anything."""
    (contrast,) = contrasts(entry.key, rekeyed(entry, cudnn=b"[").key)
    assert str(contrast) == "cudnn: another one here, one that cannot be read stored"


def test_many_are_explained_with_one_listing(directory: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is read once, however many graphs miss."""
    listings: list[object] = []
    real = Levels.listings
    monkeypatch.setattr(Levels, "listings", lambda levels: listings.append(levels) or real(levels))
    with PlanCache(directory, device=device, mode="readonly") as cache:
        found = list(cache.explanations([convolution(height) for height in (14, 15, 16, 22)]))
    assert [one.usable for one in found] == [True, False, False, False]
    assert len(listings) == 1


# ---- what is known of a key -----------------------------------------------------------------------------------------


def test_a_corrupt_row_is_told(explain: Explain, directory: Path) -> None:
    """With what is wrong with it; it is not called missing."""
    run(directory, "UPDATE entries SET payload = x'00'")
    found = explain(convolution())
    assert found.state == "corrupt" and "does not match its checksum" in str(found.reason)


def test_what_an_entry_needs_and_is_not_here_is_told(explain: Explain, database: Database, entry: Entry) -> None:
    """What `usable` said."""
    database.put(replace(entry, requirements={"machine": "riscv64"}), replace_equal=True)
    found = explain(convolution())
    assert found.state == "unusable" and str(found.reason).startswith("it needs machine riscv64, here is ")


@pytest.mark.parametrize(
    ("kind", "reason", "state"),
    [
        ("quarantined", "load: RuntimeError: no", "quarantined"),
        ("struck", "load: process 7 died", "struck"),
        ("quarantined", "entry does not match its checksum", "usable"),
    ],
)
def test_a_row_that_is_not_used_any_more_is_told(
    explain: Explain, database: Database, entry: Entry, kind: str, reason: str, state: str
) -> None:
    """A bad checksum was that of other bytes: these are whole."""
    for _ in range(2):
        database.record(Verdict(kind, entry.key.digest, pack(entry).checksum, reason, 1, 1.0))
    found = explain(convolution())
    assert found.state == state
    assert found.usable or reason in str(found.reason)


@pytest.mark.parametrize(("kind", "on_file", "on_gpu"), [("unsupported", True, True), (WITHOUT_GPU, True, False), ("struck", False, True)])
def test_a_verdict_on_the_key_is_told_where_it_counts(cache_dir: Path, device: Device, kind: str, on_file: bool, on_gpu: bool) -> None:
    """What builds without a GPU were told binds them only; a build that ended processes is skipped where it runs in ours."""
    for on, opened in ((on_file, lambda: PlanCache(cache_dir, device=device)), (on_gpu, lambda: opened_on_gpu(cache_dir)[0])):
        with opened() as cache:
            key = cache.explain(convolution()).key
            assert key is not None
            for _ in range(2):
                cache._levels.record(kind, bytes.fromhex(key), "no engine\nfor it")
            found = cache.explain(convolution())
            assert found.state == (kind.split()[0] if on else "missing")
            assert not on or "no engine" in str(found.reason)
            assert cache.explain(key).state == found.state


def test_a_denied_engine_of_the_nearest_plan_is_told(directory: Path, device: Device, entry: Entry) -> None:
    """Its graph would be built with another one."""
    with PlanCache(directory, device=device) as cache:
        cache._levels.record("denied", denial(entry.key, entry.recipe), "it was wrong")
        near = cache.explain(convolution(), constraints=Constraints(deterministic=True)).nearest
    assert near is not None and near.denied == "it was wrong"


def test_a_graph_that_is_not_cached_is_told(explain: Explain) -> None:
    """What cannot be copied, and what `plan` refuses, is an explanation and no error."""
    import cudnn

    filtered = convolution()
    filtered._workspace_limit = 5
    assert "plan filters" in str(explain(filtered).reason) and explain(filtered).state == "uncacheable"
    assert explain(cudnn.pygraph()).state == "refused" and explain(cudnn.pygraph()).key is None


# ---- stored keys ----------------------------------------------------------------------------------------------------


def test_a_stored_key_is_explained_by_its_first_digits(explain: Explain, entry: Entry) -> None:
    """As a request for its graph is."""
    assert explain(entry.key.hex[:9].upper()) == explain(entry.key) == explain(convolution())


def test_a_stored_key_of_elsewhere_differs_from_here(explain: Explain, database: Database, entry: Entry) -> None:
    """Its own differences are told, and which plan answers its graph here."""
    other = rekeyed(entry, driver=b"12080", constraints=entry.key.components["constraints"])
    database.put(other)
    found = explain(other.key)
    assert (found.state, found.key, said(found)) == ("elsewhere", other.key.hex, ["driver: CUDA 13.0 here, CUDA 12.8 stored"])
    assert str(found.reason) == f"it is for another environment; here its graph is answered by {entry.key.hex[:12]}"


def test_a_stored_key_keeps_its_constraints(explain: Explain, directory: Path, device: Device) -> None:
    """It is explained as the request that it was built for."""
    constraints = Constraints(deterministic=True)
    with PlanCache(directory, device=device) as cache:
        planned = cache.plan(convolution(), constraints=constraints).entry
    assert planned is not None
    assert explain(planned.key).usable


def test_a_row_under_another_key_than_its_own_is_told(explain: Explain, directory: Path) -> None:
    """Nothing can find it."""
    run(directory, "UPDATE entries SET key = x'0102'")
    assert explain("0102").state == "corrupt"


def test_an_empty_key_is_a_lookup_error(explain: Explain) -> None:
    """It is not the beginning of all of them."""
    with pytest.raises(LookupError, match="at least one hex digit"):
        explain("")


@pytest.mark.parametrize("text", ["zz", "plan"])
def test_a_key_that_nothing_has_is_a_lookup_error_with_the_cure(explain: Explain, text: str) -> None:
    """A graph that was never stored is found by the function that yields it."""
    with pytest.raises(LookupError, match=r"^no stored entries have a key that starts with .*package\.module:function"):
        explain(text)


def test_an_ambiguous_key_is_a_lookup_error(explain: Explain, database: Database, entry: Entry) -> None:
    """One beginning, two plans."""
    keys = [rekeyed(entry, driver=b"%d" % number) for number in range(17)]
    for other in keys:
        database.put(other)
    digits = [other.key.hex[0] for other in keys]
    twice = next(digit for digit in digits if digits.count(digit) > 1)
    with pytest.raises(LookupError, match=r"^\d+ stored entries"):
        explain(twice)


def test_an_entry_of_no_graph_is_explained_all_the_same(explain: Explain, database: Database, directory: Path) -> None:
    """Its components cannot be read; the differences say so."""
    run(directory, "DELETE FROM entries")
    database.put(make_entry())
    found = explain(make_entry().key)
    assert found.state == "elsewhere" and found.graph is None
    assert "device: another one here, one that cannot be read stored" in said(found)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    (tmp_path / "explained.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PLANCACHE_DIR", str(directory))

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["explain", *arguments])
        return (code, *capsys.readouterr())

    return command


def test_the_command_explains_each_graph_and_sums_up(command: Callable[..., Any], entry: Entry) -> None:
    """What is usable, what is not and why, with the nearest plan and its differences a line each; exit code 1."""
    code, out, err = command("explained:two", "--device", "h200")
    assert code == 1 and err == ""
    lines = out.splitlines()
    assert "  usable  yes: local, eng" in out and "usable here: 1 of 2 graphs" in lines[-1]
    assert "  usable   no, missing: " in out
    assert f"  nearest  {entry.key.hex[:12]}, the same operations" in out
    assert any(line.strip().startswith("differs  signature tensor 1 (image) dims: 2x32x20x14 here, 2x32x14x14 stored") for line in lines)


def test_the_command_prints_an_array_for_graphs_and_an_object_for_a_key(command: Callable[..., Any], entry: Entry) -> None:
    """JSON is free of the program's own words, and has everything."""
    code, out, err = command("explained:two", "--device", "h200", "--json")
    first, second = json.loads(out)
    assert code == 1 and "a word of the program's own" in err
    assert (first["usable"], first["state"], first["key"], first["level"]) == (True, "usable", entry.key.hex, "local")
    assert first["name"].startswith("conv_bias_relu") and first["nearest"] is None
    assert second["name"] is None and second["nearest"]["key"] == entry.key.hex
    assert second["nearest"]["differences"][0] == {
        "component": "signature",
        "part": "tensor 1 (image) dims",
        "here": "2x32x20x14",
        "stored": "2x32x14x14",
    }
    code, out, _ = command(entry.key.hex[:12], "--device", "h200", "--json")
    assert code == 0 and json.loads(out)["usable"] is True


def test_the_command_names_the_cure_of_a_verdict(command: Callable[..., Any], database: Database, entry: Entry) -> None:
    """What is not tried again can be lifted."""
    key = rekeyed(entry, driver=b"1").key.digest
    database.record(Verdict("unsupported", key, b"", "no engine", 1, 1.0))
    code, out, _ = command(key.hex()[:12], "--device", "h200")
    assert code == 1
    assert f"no, unsupported: cuDNN has no plan for it: no engine; to try it again: plancache rm --verdicts {key.hex()[:12]}" in out


@pytest.mark.parametrize(
    "arguments", [("zz", "--device", "h200"), ("explained:three", "--device", "h200"), ("explained:two", "--device", "h300.json")]
)
def test_what_cannot_be_explained_is_one_line(command: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """No such key, no such function, no such device."""
    code, out, err = command(*arguments)
    assert code in (1, 2) and out.replace("a word of the program's own\n", "") == ""
    assert err.startswith("plancache: error: ") and err.count("\n") == 1
