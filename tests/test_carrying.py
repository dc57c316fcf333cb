"""Bundles: what export puts into them and leaves out, what import takes, what a crash leaves, and how many plans may run here."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commands import Result
from faking import finish, start
from samples import make_entry, matmul
from test_place import may_mount

from plancache import carrying as module
from plancache.building import denial
from plancache.cache import PlanCache
from plancache.carrying import DOUBTFUL, Exported, Imported
from plancache.cli import main
from plancache.encoding import encode
from plancache.entry import Candidate, Entry, Row, pack, unpack
from plancache.environment import Device
from plancache.errors import DeviceError, DeviceFileError, PlanNotFoundError, SealedError, StoreError
from plancache.key import Constraints, Place, PlanKey
from plancache.manifest import Manifest, Wanted
from plancache.store.connection import HEAD
from plancache.store.database import Database, Verdict
from plancache.store.sealed import SealedFile, is_sealed, seal
from plancache.target import DeviceTarget


def signature(mode: str) -> bytes:
    """Of a graph of one pointwise operation."""
    tensor = [None, (2, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]
    node = ["POINTWISE", None, {"mode": mode}, {"IN_0": 1}, {"OUT_0": 1}]
    return encode(1) + encode([None] * 6) + encode([None] * 3) + encode([tensor]) + encode([node])


HERE = (b'{"deviceVer":900}', b'"NVIDIA H200"', b"13000", b'{"builds":{},"version":91900}', b'"1.32.0"', b"{}")
PLANS = 6


def key_of(number: int, environment: tuple[bytes, ...] = HERE, mode: str = "relu") -> PlanKey:
    return PlanKey((signature(mode), *environment, b'{"workspace_limit_bytes":%d}' % number))


def numbered(number: int, **changes: Any) -> Entry:
    """An entry of its own for each number."""
    blob = random.Random(number).randbytes(3000)
    return make_entry(**{"key": key_of(number), "created_at": float(number), "blob": blob} | changes)


def stored_in(folder: Path, *entries: Entry) -> Path:
    """A cache directory with these entries."""
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        module._store(database, ((pack(entry), entry) for entry in entries))  # by the rules of `put`, and at once
    return folder


@pytest.fixture
def folder(cache_dir: Path) -> Path:
    """A cache directory with a few plans, which were used."""
    folder = stored_in(cache_dir / "from", *map(numbered, range(PLANS)))
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        database.count_uses({key_of(0).digest: 7}, 5.0, "a-program")
        database.record(Verdict("unsupported", b"another", b"", "cuDNN says no", 1, 1.0))
    return folder


@pytest.fixture
def bundle(cache_dir: Path) -> Path:
    """Where a bundle is to be, alone in its folder."""
    (cache_dir / "out").mkdir(mode=0o700)
    return cache_dir / "out" / "bundle.sqlite3"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's settings counts, nor a GPU that it may have."""
    for name in list(os.environ):
        if name.startswith(("PLANCACHE_", "CUDNN_", "CUBLAS")):
            monkeypatch.delenv(name)

    def none() -> int:
        raise DeviceError("no GPU")

    monkeypatch.setattr("plancache.target.current_ordinal", none)


def export(folder: Path, bundle: Path, entries: Any = None, *, device: Device | None = None, **options: Any) -> Exported:
    with PlanCache(folder, device=device, mode="readonly") as cache:
        return cache.export_bundle(bundle, entries, **options)


def take(folder: Path, bundle: Path, *, device: Device | None = None, **options: Any) -> Imported:
    with PlanCache(folder, device=device, strict=True, **options) as cache:
        return cache.import_bundle(bundle)


def rows(path: Path) -> dict[bytes, Row]:
    store: Any = SealedFile(path) if is_sealed(path) else Database(path, lock_timeout_s=20)
    with closing(store):
        return {listed.key: row for listed in store.listing() if (row := store.get(listed.key)) is not None}


def in_store(folder: Path) -> dict[bytes, Row]:
    return rows(folder / "plans-1.sqlite3")


def packed(*entries: Entry) -> dict[bytes, Row]:
    return {entry.key.digest: pack(entry) for entry in entries}


def sql(path: Path, *statements: str, values: tuple[object, ...] = ()) -> Any:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            found = connection.execute(statement, values if "?" in statement else ()).fetchall()
    return found


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return run


def is_one_line(text: str) -> bool:
    return text.startswith("plancache: error: ") and text.count("\n") == 1 and text.endswith("\n")


# ---- export ---------------------------------------------------------------------------------------------------------


def test_a_bundle_is_a_sealed_file_with_the_rows_and_nothing_else(folder: Path, bundle: Path) -> None:
    """Byte for byte the rows of the store; no counts, tags or verdicts; read-only, and alone in its folder."""
    exported = export(folder, bundle)
    assert rows(bundle) == in_store(folder) == packed(*map(numbered, range(PLANS)))
    assert (exported.path, exported.entries, exported.left_out) == (bundle, PLANS, {})
    assert exported.size_bytes == bundle.stat().st_size
    assert is_sealed(bundle)
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o444
    assert names(bundle.parent) == [bundle.name]
    for table in ("uses", "verdicts", "tags"):
        assert sql(bundle, f"SELECT count(*) FROM {table}") == [(0,)]
    assert sql(bundle, "SELECT version_num FROM alembic_version") == [(HEAD,)]


def test_the_same_plans_make_the_same_bytes(folder: Path, bundle: Path) -> None:
    """An image's layer with the bundle stays as it is where no plan changed."""
    export(folder, bundle)
    before = bundle.read_bytes()
    export(folder, bundle)
    assert bundle.read_bytes() == before


def test_some_of_the_plans(folder: Path, bundle: Path) -> None:
    """By key, or as they are listed; a key that is not stored is not there."""
    with PlanCache(folder, mode="readonly") as cache:
        exported = cache.export_bundle(bundle, [key_of(1), cache.entries()[2], cache.entry(key_of(3)), key_of(99)])
    assert exported.entries == 3
    assert rows(bundle) == packed(*map(numbered, (1, 2, 3)))


def test_of_several_levels_the_best_is_taken(folder: Path, cache_dir: Path, bundle: Path) -> None:
    """As a look-up goes, except that a better plan in a sealed file comes before a lesser one in the directory."""
    other = stored_in(cache_dir / "other", numbered(0, blob=b"of equal quality"), numbered(1, quality="tuned"), numbered(9))
    seal(other / "plans-1.sqlite3", lock_timeout_s=20)
    with PlanCache(folder, bundles=[other / "plans-1.sqlite3"], mode="readonly") as cache:
        assert cache.export_bundle(bundle).entries == PLANS + 1
    assert rows(bundle) == packed(*map(numbered, range(PLANS))) | packed(numbered(1, quality="tuned"), numbered(9))


def record(folder: Path, kind: str, entry: Entry, reason: str, times: int = 1) -> None:
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        for _ in range(times):
            database.record(Verdict(kind, entry.key.digest, pack(entry).checksum, reason, 1, 1.0))


BUSY = {"measure": "events", "before": {}, "after": {"other_processes": 1}, "quiet": False}
UNFIT = {
    "doubtful": DOUBTFUL,
    "quarantined": "quarantined or struck",
    "wrong": "quarantined or struck",
    "struck": "quarantined or struck",
    "denied": "denied",
    "damaged": "damaged",
}


@pytest.fixture(params=UNFIT)
def unfit(request: pytest.FixtureRequest, folder: Path) -> str:
    """Plan 2 is not good to be carried, in a way for which this is the reason."""
    entry, kind = numbered(2), request.param
    if kind == "doubtful":
        stored_in(folder, numbered(2, quality="tuned", conditions=BUSY))
    elif kind == "struck":
        record(folder, "struck", entry, "load: process 1 died", times=2)
    elif kind == "denied":
        odd = numbered(2, quality="tuned", recipe=Candidate("eng9_k1=1", 9, {"K1": 1}))
        stored_in(folder, odd)
        with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
            database.record(Verdict("denied", denial(odd.key, odd.recipe), b"", "eng9 was shown wrong", 1, 1.0))
    elif kind == "damaged":
        sql(folder / "plans-1.sqlite3", "UPDATE entries SET payload = x'00' WHERE key = ?", values=(entry.key.digest,))
    else:
        record(folder, "quarantined", entry, "wrong: it computes 3" if kind == "wrong" else "load: cuDNN refused it")
    return UNFIT[kind]


def test_what_is_not_good_is_left_out_and_counted(folder: Path, bundle: Path, unfit: str, run: Callable[..., Result]) -> None:
    """Quarantined, struck twice, denied, damaged, or timed while the GPU was busy: the others are exported, and the command says so."""
    exported = export(folder, bundle)
    assert exported.left_out == {unfit: 1}
    assert rows(bundle) == packed(*(numbered(number) for number in range(PLANS) if number != 2))
    said = run("export", bundle, "--cache-dir", folder)
    assert said.code == 0
    assert f"left out 1 plan: 1 {unfit}" in said.out
    assert ("--doubtful takes those along" in said.out) == (unfit == DOUBTFUL)


def test_a_good_copy_in_another_level_is_carried(folder: Path, cache_dir: Path, bundle: Path, unfit: str) -> None:
    """What is wrong with a row is of that row, and its key is not counted as left out."""
    good = numbered(2, blob=b"another blob, of the heuristics' engine")
    other = stored_in(cache_dir / "other", good)
    seal(other / "plans-1.sqlite3", lock_timeout_s=20)
    with PlanCache(folder, bundles=[other / "plans-1.sqlite3"], mode="readonly") as cache:
        exported = cache.export_bundle(bundle)
    assert (exported.left_out, exported.entries) == ({}, PLANS), unfit
    assert rows(bundle)[good.key.digest] == pack(good)


def test_doubtful_ones_come_along_where_that_is_asked_for(folder: Path, bundle: Path, run: Callable[..., Result]) -> None:
    """A winner of a race on a quiet GPU always does, and one of which nothing is known."""
    quiet, unknown = BUSY | {"quiet": True}, {}
    tuned = [numbered(number, quality="tuned", conditions=conditions) for number, conditions in enumerate((BUSY, quiet, unknown))]
    stored_in(folder, *tuned)
    assert export(folder, bundle).entries == PLANS - 1
    said = run("export", bundle, "--doubtful", "--cache-dir", folder)
    assert (said.code, "left out" in said.out) == (0, False)
    assert rows(bundle) == packed(*tuned, *map(numbered, range(3, PLANS)))


def test_one_strike_leaves_nothing_out(folder: Path, bundle: Path) -> None:
    """As a look-up does: a process may have ended for another reason."""
    record(folder, "struck", numbered(2), "load: process 1 died")
    assert export(folder, bundle).entries == PLANS


@pytest.mark.parametrize("conditions", [{}, BUSY])
def test_nothing_to_export_is_an_error_and_no_file(cache_dir: Path, bundle: Path, conditions: dict[str, Any]) -> None:
    """An empty store, or one of which all is left out: the reason is in the error."""
    folder = stored_in(cache_dir / "from", *([numbered(0, conditions=conditions)] if conditions else []))
    reason = f"left out: 1 {DOUBTFUL}" if conditions else "'plancache ls' lists"
    with pytest.raises(LookupError, match=f"nothing to export; {reason}"):
        export(folder, bundle)
    assert names(bundle.parent) == []


def test_the_command_filters(folder: Path, bundle: Path, run: Callable[..., Result]) -> None:
    """By the beginnings of keys and by what 'ls' filters by; a plan must fit all that is given."""
    seven, eight = (key_of(number, mode="tanh") for number in (7, 8))
    stored_in(folder, numbered(1, quality="tuned"), numbered(7, key=seven), numbered(8, key=eight, quality="tuned"))
    expected = {
        ("--quality", "tuned"): {1, 8},
        ("--quality", "tuned", "--quality", "heuristic"): {*range(PLANS), 7, 8},
        ("--operation", "tanh"): {7, 8},
        ("--operation", "tanh", "--quality", "tuned"): {8},
        ("--min-hits", "7"): {0},
        (key_of(0).hex[:16].upper(), seven.hex): {0, 7},
        (key_of(0).hex, seven.hex, "--operation", "relu"): {0},
    }
    for arguments, numbers in expected.items():
        said = run("export", bundle, *arguments, "--json", "--cache-dir", folder)
        assert said.code == 0, said.err
        wanted = {key_of(number, mode="tanh" if number > PLANS else "relu").digest for number in numbers}
        assert rows(bundle).keys() == wanted, arguments
        assert json.loads(said.out)["entries"] == len(numbers)


def test_the_command_takes_what_a_program_asked_for(folder: Path, bundle: Path, run: Callable[..., Result]) -> None:
    """By the tag of the program."""
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        database.count_uses({key_of(0).digest: 1, key_of(3).digest: 1}, 9.0, "another")
    for tag, numbers in (("a-program", {0}), ("another", {0, 3})):
        said = run("export", bundle, "--tag", tag, "--cache-dir", folder)
        assert said.code == 0, said.err
        assert rows(bundle).keys() == {key_of(number).digest for number in numbers}


def test_the_command_takes_what_a_manifest_names(bundle: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """The graphs of it under their constraints, for every environment; what is not stored is counted."""
    limited, none, other = Constraints(workspace_limit_bytes=5), Constraints(), (*HERE[:2], b"12080", *HERE[3:])
    keys = [PlanKey((signature("relu"), *place, of.encoded)) for place in (HERE, other) for of in (limited, none)]
    folder = stored_in(cache_dir / "from", *(numbered(0, key=key) for key in keys), numbered(1))
    manifest = cache_dir / "serve.json"
    Manifest.of([Wanted(signature("relu"), limited), Wanted(signature("tanh"), limited)]).write(manifest)
    said = run("export", bundle, "--manifest", manifest, "--cache-dir", folder)
    assert said.code == 0, said.err
    assert rows(bundle).keys() == {keys[0].digest, keys[2].digest}
    assert f"without a stored plan: 1 of 2 graphs of {manifest}; 'plancache check {manifest}' says why\n" in said.out
    assert json.loads(run("export", bundle, "--manifest", manifest, "--json", "--cache-dir", folder).out)["graphs_without_a_plan"] == 1
    manifest.write_text("{")
    said = run("export", bundle, "--manifest", manifest, "--cache-dir", folder)
    assert (said.code, is_one_line(said.err)) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ffff0000",), "no stored entries have a key that starts with 'ffff0000'; 'plancache ls' lists them"),
        (("",), "no stored entries have a key that starts with ''"),
        (("--operation", "conv"), "none of 6 stored plans fits; 'plancache ls' lists them, with the same filters"),
        (("--quality", "tuned"), "none of 6 stored plans fits"),
        ((key_of(0).hex, "--tag", "b"), "none of 6 stored plans fits"),
    ],
)
def test_filters_that_mean_nothing_are_told(folder: Path, bundle: Path, run: Callable[..., Result], arguments: Any, message: str) -> None:
    """One line, exit code 1, and no file."""
    said = run("export", bundle, *arguments, "--cache-dir", folder)
    assert said.code == 1
    assert is_one_line(said.err)
    assert message in said.err
    assert names(bundle.parent) == []


def test_an_ambiguous_beginning_is_told(cache_dir: Path, bundle: Path, run: Callable[..., Result]) -> None:
    """With how many keys it is the beginning of."""
    entries = [numbered(number) for number in range(17)]  # two of them begin alike
    digits = [entry.key.hex[0] for entry in entries]
    often = max(digits, key=digits.count)
    said = run("export", bundle, often, "--cache-dir", stored_in(cache_dir / "from", *entries))
    assert said.code == 1
    assert f"{digits.count(often)} stored entries have a key that starts with '{often}'" in said.err


# ---- where a bundle may lie -----------------------------------------------------------------------------------------


def place_refused(kind: str, folder: Path, bundle: Path) -> Path:
    if kind == "folder":
        return bundle.parent
    if kind == "nowhere":
        return bundle.parent / "none" / "bundle.sqlite3"
    if kind == "own":
        return folder / "plans-1.sqlite3"
    if kind == "own by a link":
        (bundle.parent / "link").symlink_to(folder)
        return bundle.parent / "link" / "plans-1.sqlite3"
    if kind == "pipe":
        os.mkfifo(bundle)
    elif kind == "journal":
        Path(f"{bundle}-wal").touch()
    elif kind == "sealed cache":
        seal(stored_in(bundle.parent, numbered(77)) / "plans-1.sqlite3", lock_timeout_s=20)
        return bundle.parent / "plans-1.sqlite3"
    else:
        bundle.write_text("my thesis")
    return bundle


REFUSED = {
    "folder": r"it is a directory; name a file in it, such as .*/out/plans.sqlite3",
    "pipe": "it is no ordinary file; name another place",
    "nowhere": r"there is no directory .*/out/none; mkdir -p .*/out/none",
    "own": "it is this cache's own database; name another file",
    "own by a link": "it is this cache's own database; name another file",
    "journal": "a database with a journal lies there, and a program may be at it; name another file",
    "sealed cache": r"what lies there is no bundle; .*--force",
    "text": r"what lies there is no bundle; .*--force",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_place_that_cannot_be_used_is_refused_with_the_cure(folder: Path, bundle: Path, run: Callable[..., Result], kind: str) -> None:
    """One line; what lies there stays as it is. --force replaces a file, never the cache's own or one with a journal."""
    path = place_refused(kind, folder, bundle)
    before = path.read_bytes() if path.is_file() else None
    said = run("export", path, "--cache-dir", folder)
    assert said.code == 1
    assert is_one_line(said.err)
    assert re.search(REFUSED[kind], said.err)
    assert (path.read_bytes() if path.is_file() else None) == before
    forced = run("export", path, "--force", "--cache-dir", folder)
    assert forced.code == (0 if "--force" in REFUSED[kind] else 1)
    assert len(in_store(folder)) == PLANS
    if forced.code == 0:
        assert len(rows(path)) == PLANS


def test_an_older_bundle_is_replaced_and_a_link_stays_a_link(folder: Path, bundle: Path, cache_dir: Path) -> None:
    """Who has the old one open reads it to the end."""
    export(folder, bundle, [key_of(0)])
    link = cache_dir / "link.sqlite3"
    link.symlink_to(bundle)
    with closing(SealedFile(link)) as old:
        assert export(folder, link).entries == PLANS
        assert [row.key for row in old.listing()] == [key_of(0).digest]
    assert link.is_symlink()
    assert len(rows(bundle)) == PLANS


# ---- what it says of who made it ------------------------------------------------------------------------------------

NAMED = """
import sys
from samples import matmul
from plancache import Device, PlanCache
with PlanCache(sys.argv[1], device=Device.from_file("h200"), tag="a-program", strict=True) as cache:
    cache.plan(matmul())
with PlanCache(sys.argv[1], device=Device.from_file("h200"), tag="a-program", strict=True) as cache:
    assert cache.plan(matmul()).origin == "local"
    print(cache.export_bundle(sys.argv[2]).entries)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a plan that cuDNN built, made by a user and in folders with names of their own."""
    home = tmp_path_factory.mktemp("home-of-somebody")
    place = {"HOME": str(home), "USER": "somebody", "LOGNAME": "somebody", "TMPDIR": str(home)}
    out, _ = finish(start(NAMED, home / "a-directory", home / "real.sqlite3", **place))
    assert out == "1\n"
    return home / "real.sqlite3"


def test_a_bundle_names_no_place_person_or_program(real: Path) -> None:
    """Neither the file's bytes nor the plan itself hold a path, host, user or program name, or how often it was used."""
    (row,) = rows(real).values()
    entry, data = unpack(row), real.read_bytes()
    strangers = [str(real.parent), real.parent.name, "somebody", "a-directory", "a-program", str(Path.cwd()), "site-packages"]
    for content in (data, entry.blob):
        assert [name for name in strangers if name.encode() in content] == []
    words = set(re.findall(r"[\w.-]+", (row.facts + row.preimage).decode(errors="replace")))
    assert words & {getpass.getuser(), os.uname().nodename} == set()
    assert sql(real, "SELECT count(*) FROM uses UNION ALL SELECT count(*) FROM tags") == [(0,), (0,)]


def test_a_carried_plan_is_a_hit_elsewhere_in_place_and_imported(real: Path, cache_dir: Path, device: Device) -> None:
    """Without a build: from the bundle where it lies, and from the store that it was merged into."""
    with PlanCache(cache_dir / "one", device=device, bundles=[real], build="forbid", strict=True) as cache:
        assert cache.plan(matmul()).origin == "sealed"
        assert (cache.statistics().builds, cache.statistics().sealed_hits) == (0, 1)
    assert take(cache_dir / "two", real, device=device)[1:5] == (1, 1, 0, 0)
    with PlanCache(cache_dir / "two", device=device, build="forbid", strict=True) as cache:
        assert cache.plan(matmul()).origin == "local"
        with pytest.raises(PlanNotFoundError):
            cache.plan(matmul(compute_data_type=None))


IN_PLACE = """
import json, sys
from samples import matmul
from plancache import Device, PlanCache
with PlanCache(device=Device.from_file("h200")) as cache:
    print(json.dumps([cache.plan(matmul()).origin, cache.statistics().builds, dict(cache.statistics().faults)]))
"""


@may_mount
def test_a_bundle_is_read_in_place_from_a_read_only_mount(real: Path, cache_dir: Path) -> None:
    """Nothing is written beside it, and nobody minds that nothing can be."""
    (cache_dir / "mount").mkdir()
    mount = 'mount -t tmpfs -o mode=755 none "$1"; cp "$2" "$1"; mount -o remount,ro "$1"'
    shell = f'set -e; {mount}; "$PYTHON" -W error -c "$PROGRAM"; ls -A "$1"'
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHON": sys.executable,
        "PROGRAM": IN_PLACE,
        "PLANCACHE_BUNDLES": str(cache_dir / "mount" / real.name),
        "PLANCACHE_DIR": str(cache_dir / "mount" / "none"),
        "PLANCACHE_BUILD": "forbid",
        "PLANCACHE_MODE": "readonly",
    }
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(cache_dir / "mount"), str(real)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    said, *listing = done.stdout.splitlines()
    assert json.loads(said) == ["sealed", 0, {}]
    assert listing == [real.name]


# ---- import ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(folder: Path, bundle: Path) -> Path:
    """A bundle with all plans of `folder`."""
    export(folder, bundle)
    return bundle


def test_import_keeps_the_better_plan(made: Path, cache_dir: Path) -> None:
    """New ones are stored, a lesser one gives way, an equal and a better one stay; what was counted and known here stays too."""
    equal, lesser, better = numbered(0, blob=b"mine"), numbered(1, quality="compiled"), numbered(2, quality="tuned")
    mine = numbered(50)
    folder = stored_in(cache_dir / "to", equal, lesser, better, mine)
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        database.count_uses({lesser.key.digest: 3}, 9.0, "a-program")
        database.record(Verdict("unsupported", b"another", b"", "no", 1, 1.0))
    imported = take(folder, made)
    assert imported[:5] == (made, PLANS, PLANS - 2, 0, 0)
    assert in_store(folder) == packed(*map(numbered, range(PLANS))) | packed(equal, better, mine)
    with closing(Database(folder / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        assert [listed.hits for listed in database.listing() if listed.key == lesser.key.digest] == [3]
        assert len(database.verdicts()) == len(database.tags()) == 1
    assert take(folder, made).stored == 0


def test_an_empty_store_is_made(made: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """By the command; a second import of the same finds nothing better."""
    said = run("import", made, "--cache-dir", cache_dir / "to")
    assert said.code == 0
    assert f"{made}: 6 plans, 6 stored\n" in said.out
    assert in_store(cache_dir / "to") == rows(made)
    assert "6 plans, 0 stored, 6 no better than what is here\n" in run("import", made, "--cache-dir", cache_dir / "to").out


def test_several_bundles_are_merged_in_one_call(folder: Path, bundle: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """As JSON an array, an object for each."""
    other = bundle.with_name("other.sqlite3")
    export(folder, bundle, [key_of(0), key_of(1)])
    export(folder, other, [key_of(1), key_of(2)])
    said = run("import", bundle, other, "--json", "--cache-dir", cache_dir / "to")
    found = json.loads(said.out)
    assert [(one["path"], one["entries"], one["stored"]) for one in found] == [(str(bundle), 2, 2), (str(other), 2, 1)]
    assert in_store(cache_dir / "to") == packed(*map(numbered, range(3)))


@pytest.mark.parametrize("damage", ["payload = x'00'", "checksum = x'00'", "facts = x''", "preimage = 'text'"])
def test_a_good_plan_takes_the_place_of_a_damaged_one(made: Path, cache_dir: Path, damage: str) -> None:
    """Of equal quality too, whether somebody has looked at it or not."""
    folder = stored_in(cache_dir / "to", *map(numbered, range(PLANS)))
    sql(folder / "plans-1.sqlite3", f"UPDATE entries SET {damage} WHERE key = ?", values=(key_of(3).digest,))
    assert take(folder, made).stored == 1
    assert in_store(folder) == rows(made)


def test_a_quarantined_plan_is_replaced_and_never_taken(made: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """A row that did not load here gives way to other bytes of the same quality; the same bytes in a bundle are refused."""
    other = numbered(3, blob=b"other bytes")
    folder = stored_in(cache_dir / "to", other)
    record(folder, "quarantined", other, "load: cuDNN refused it")
    record(folder, "quarantined", numbered(4), "load: cuDNN refused it")
    said = run("import", made, "--cache-dir", folder)
    assert "6 plans, 5 stored, 1 known to be bad here ('plancache ls --verdicts')" in said.out
    assert in_store(folder) == packed(*(numbered(number) for number in range(PLANS) if number != 4))


def test_import_keeps_to_the_limit_and_says_so(made: Path, cache_dir: Path, run: Callable[..., Result], monkeypatch: Any) -> None:
    """What saves the least build time per byte goes, wherever it came from."""
    monkeypatch.setenv("PLANCACHE_MAX_BYTES", "90kB")
    blobs = [random.Random(number).randbytes(20_000) for number in range(10, 14)]
    folder = stored_in(cache_dir / "to", *(numbered(number, blob=blob) for number, blob in enumerate(blobs, 10)))
    said = run("import", made, "--cache-dir", folder)
    assert said.code == 0
    gone = PLANS + 4 - len(in_store(folder))
    assert gone > 0
    assert re.search(rf"removed {gone} plans? that save the least build time per byte, .*PLANCACHE_MAX_BYTES", said.out)


def test_a_dry_run_stores_nothing(made: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """It checks the bundle, says what can be used, and makes no directory."""
    said = run("import", made, "--dry-run", "--device", "h200", "--cache-dir", cache_dir / "to")
    assert said.code == 0
    assert "6 plans, all whole; nothing was stored\n0 of 6 can be used on NVIDIA H200, not:\n" in said.out
    assert not (cache_dir / "to").exists()
    break_row(made, "payload = x'00'")
    assert run("import", made, "--dry-run", "--cache-dir", cache_dir / "to").code == 1


def break_row(bundle: Path, change: str, number: int = PLANS - 1) -> None:
    """Changes a row, by default the last one to be read."""
    bundle.chmod(0o644)
    sql(bundle, f"UPDATE entries SET {change} WHERE key = ?", values=(key_of(number).digest,))
    bundle.chmod(0o444)


def edited(*statements: str) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        bundle.chmod(0o644)
        sql(bundle, *statements)
        bundle.chmod(0o444)

    return edit


def overwritten(bundle: Path) -> None:
    """A page in the middle of a plan, as a bad disk leaves it."""
    data = bundle.read_bytes()
    at = data.index(pack(numbered(4)).payload[1000:1100])
    bundle.chmod(0o644)
    bundle.write_bytes(data[:at] + b"\0" * 100 + data[at + 100 :])
    bundle.chmod(0o444)


def of_a_later_format(bundle: Path) -> None:
    facts = json.loads(pack(numbered(PLANS - 1)).facts)
    text = json.dumps(facts | {"format": facts["format"] + 1})
    bundle.chmod(0o644)
    sql(bundle, "UPDATE entries SET facts = ? WHERE key = ?", values=(text.encode(), key_of(PLANS - 1).digest))
    bundle.chmod(0o444)


ANEW = "copy it here again, or export it anew"
LATER = "import it with that version, or export it anew with this one"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not there": (Path.unlink, "there is no such file; name one"),
    "truncated": (lambda bundle: os.truncate(bundle, bundle.stat().st_size - 4096), r"truncated: \d+ bytes of \d+; copy it here again"),
    "cut in its header": (lambda bundle: os.truncate(bundle, 50), "no SQLite database; copy it here again"),
    "overwritten": (overwritten, f"does not match its checksum; {ANEW}; nothing of it was imported"),
    "another payload": (lambda bundle: break_row(bundle, "payload = x'00'"), f"does not match its checksum; {ANEW}"),
    "another blob's checksum": (lambda bundle: break_row(bundle, "checksum = randomblob(32)"), f"does not match its checksum; {ANEW}"),
    "under another key": (lambda bundle: break_row(bundle, "key = randomblob(32)"), f"does not match its checksum; {ANEW}"),
    "no bytes": (lambda bundle: break_row(bundle, "preimage = 7"), f"does not match its checksum; {ANEW}"),
    "of a later format": (of_a_later_format, f"a newer plancache made it .its entries have a later format.; {LATER}"),
    "of a later version": (
        edited("UPDATE alembic_version SET version_num = '9999_later'", "UPDATE compatibility SET min_reader = 9999"),
        f"a newer plancache made it .revision 9999_later.; {LATER}",
    ),
    "with other tables": (edited("DROP TABLE entries"), "no table of entries that this version reads; seal or export it with this"),
    "not sealed": (edited("PRAGMA application_id = 0"), "it is not sealed; seal it"),
    "open to others": (lambda bundle: bundle.chmod(0o666), "others may write in .*; chmod go-w"),
}


@pytest.mark.parametrize("kind", BAD)
def test_of_a_bundle_that_is_not_whole_nothing_is_taken(made: Path, cache_dir: Path, run: Callable[..., Result], kind: str) -> None:
    """One line with the cure, exit code 1; the store is as it was, though all rows but the last may be good."""
    change, message = BAD[kind]
    folder = stored_in(cache_dir / "to", numbered(0, quality="compiled"))
    change(made)
    before = in_store(folder)
    said = run("import", made, "--cache-dir", folder)
    assert said.code == 1
    assert is_one_line(said.err)
    assert re.search(message, said.err), said.err
    assert str(made) in said.err
    assert in_store(folder) == before


def test_every_plan_is_checked_before_the_first_is_stored(cache_dir: Path, bundle: Path) -> None:
    """Also where the bad one is in a later batch."""
    count = 2 * module._BATCH
    export(stored_in(cache_dir / "from", *map(numbered, range(count))), bundle)
    break_row(bundle, "payload = x'00'", count - 1)
    with pytest.raises(SealedError, match="does not match its checksum"):
        take(cache_dir / "to", bundle)
    assert not (cache_dir / "to").exists()


def test_a_later_version_that_only_added_is_read(made: Path, cache_dir: Path) -> None:
    """As a database of it is."""
    edited("UPDATE alembic_version SET version_num = '9999_later'", "ALTER TABLE entries ADD COLUMN more TEXT")(made)
    assert take(cache_dir / "to", made).stored == PLANS


def test_a_sealed_database_and_one_without_a_revision_are_bundles_too(folder: Path, cache_dir: Path) -> None:
    """What `plancache seal` made, and what has no table but that of the entries."""
    seal(folder / "plans-1.sqlite3", lock_timeout_s=20)
    wanted = in_store(folder)
    edited(*(f"DROP TABLE {table}" for table in ("alembic_version", "compatibility", "uses", "verdicts", "tags")))(
        folder / "plans-1.sqlite3"
    )
    take(cache_dir / "to", folder / "plans-1.sqlite3")
    assert in_store(cache_dir / "to") == wanted


@pytest.mark.parametrize("mode", ["readonly", "off"])
def test_nothing_is_imported_where_nothing_may_be_stored(
    made: Path, cache_dir: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Wrong usage, with the cure; from a program an error."""
    monkeypatch.setenv("PLANCACHE_MODE", mode)
    said = run("import", made, "--cache-dir", cache_dir / "to")
    assert said.code == 2
    assert f"the cache is {mode} (PLANCACHE_MODE), so nothing is changed there" in said.err
    with PlanCache(cache_dir / "to") as cache, pytest.raises(StoreError, match="nothing is imported; name another"):
        cache.import_bundle(made)
    assert not (cache_dir / "to").exists()


def test_a_sealed_store_takes_no_import(made: Path, folder: Path, run: Callable[..., Result]) -> None:
    """It is never written again: the error names the undo."""
    seal(folder / "plans-1.sqlite3", lock_timeout_s=20)
    said = run("import", made, "--cache-dir", folder)
    assert said.code == 1
    assert "it is sealed, and never changed; to change it: plancache seal --undo" in said.err


# ---- how many may run here ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(device: Device) -> Iterator[Place]:
    """Where the plans of the H200's device file run, with the cuDNN of this process."""
    target = DeviceTarget(device)
    yield target.place
    target.close()


def mixed(place: Place) -> list[Entry]:
    """Plans for several environments: two for this one, the others for reasons of which each is another one's number."""
    cudnn, limits = json.loads(place.cudnn), json.loads(place.device)
    others: dict[int, dict[str, Any]] = {
        7: {"cudnn": cudnn | {"version": 91400}, "driver": 12080, "device": limits | {"multiProcessorCount": 1}},
        6: {"model": "NVIDIA H100", "cudnn": cudnn | {"version": 91400}, "device": limits | {"multiProcessorCount": 114}},
        5: {"driver": 12080},
        4: {"frontend": "1.31.0"},
        3: {"device": limits | {"multiProcessorCount": 114}},
        2: {"variables": {"NVIDIA_TF32_OVERRIDE": "0"}},
        1: {"cudnn": cudnn | {"builds": cudnn["builds"] | {"libcudnn_ops": "0123456789abcdef"}}},
    }
    made = [numbered(number, key=key_of(number, (*place, b"{}"))) for number in (900, 901)]
    made.append(numbered(902, key=key_of(902, (*place, b"{}")), requirements={"machine": "riscv"}))
    for count, changes in others.items():
        named = {**place._asdict(), "variables": b"{}"} | {name: json.dumps(value).encode() for name, value in changes.items()}
        made += [numbered(number, key=key_of(number, tuple(named.values()))) for number in range(100 * count, 100 * count + count)]
    return made


def expected(device: Device, place: Place) -> dict[str, int]:
    cudnn, count = json.loads(place.cudnn), device.properties["multiProcessorCount"]
    version = ".".join(map(str, (cudnn["version"] // 10000, cudnn["version"] // 100 % 100, cudnn["version"] % 100)))
    build = cudnn["builds"]["libcudnn_ops"][:8]
    return {
        f"for cuDNN 9.14.0 (here {version})": 7,
        "for NVIDIA H100 (here NVIDIA H200)": 6,
        f"for driver CUDA 12.8 (here CUDA {device.driver_version // 1000}.{device.driver_version % 1000 // 10})": 5,
        f"for nvidia-cudnn-frontend 1.31.0 (here {json.loads(place.frontend)})": 4,
        f"for multiProcessorCount 114 (here {count})": 3,
        "for NVIDIA_TF32_OVERRIDE 0 (here not set)": 2,
        f"for cuDNN libcudnn_ops build 01234567 (here build {build})": 1,
        f"it needs machine riscv, here is {os.uname().machine}": 1,
    }


def test_both_commands_say_how_many_can_be_used_and_why_not_the_others(
    cache_dir: Path, bundle: Path, device: Device, place: Place, run: Callable[..., Result]
) -> None:
    """For a device file; by reason, the most frequent first. Where several things differ the one that tells most is named."""
    folder, reasons = stored_in(cache_dir / "from", *mixed(place)), expected(device, place)
    commands = [("export", bundle, "--cache-dir", folder), ("import", bundle, "--cache-dir", cache_dir / "to")]
    for command in commands:
        said = run(*command, "--device", "h200")
        lines = said.out.splitlines()
        at = lines.index("2 of 31 can be used on NVIDIA H200, not:")
        assert lines[at + 1 : at + 1 + len(reasons)] == [f"  {number}  {reason}" for reason, number in reasons.items()]
        found = json.loads(run(*command, "--device", "h200", "--json").out)
        (usability,) = [one["usability"] for one in (found if isinstance(found, list) else [found])]
        assert usability == {"entries": 31, "device": "NVIDIA H200", "usable": 2, "reasons": reasons, "unknown": None}


def test_what_is_said_to_be_usable_is_what_is_found(real: Path, cache_dir: Path, device: Device, monkeypatch: Any) -> None:
    """The count agrees with a look-up, under a variable that changes results too."""
    for value, usable in ((None, 1), ("0", 0)):
        if value is not None:
            monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
        with PlanCache(cache_dir, device=device, bundles=[real], strict=True) as cache:
            assert cache.import_bundle(real, dry_run=True).usability.usable == usable
            assert (cache.plan(matmul(), build="lookup") is not None) == bool(usable)


def test_without_a_gpu_it_says_that_it_cannot_be_judged(folder: Path, bundle: Path, cache_dir: Path, run: Callable[..., Result]) -> None:
    """And names the cure; both commands do their work all the same."""
    for command in (("export", bundle, "--cache-dir", folder), ("import", bundle, "--cache-dir", cache_dir / "to")):
        said = run(*command)
        assert said.code == 0
        assert "cannot be judged: there is no GPU here; a device file stands for one (--device FILE)\n" in said.out
    assert in_store(cache_dir / "to") == rows(bundle)
    found = json.loads(run("import", bundle, "--json", "--cache-dir", cache_dir / "to").out)[0]["usability"]
    assert (found["entries"], found["usable"], found["device"]) == (PLANS, None, None)


BARE = """
import sys
sys.modules.update(dict.fromkeys(("cudnn", "torch")))
"""
"""A process without cuDNN, which starts sooner."""

WITHOUT_CUDNN = (
    BARE
    + """
from plancache.cli import main
print(main(sys.argv[1:]))
"""
)


def test_neither_needs_cudnn(folder: Path, bundle: Path, cache_dir: Path) -> None:
    """On a machine that only carries: what is missing is said, and nothing fails."""
    for command in (("export", bundle, "--cache-dir", folder), ("import", bundle, "--cache-dir", cache_dir / "to")):
        out, _ = finish(start(WITHOUT_CUDNN, *command))
        assert "cannot be judged: cannot import cudnn" in out
        assert out.endswith("\n0\n")
    assert in_store(cache_dir / "to") == in_store(folder)


def test_a_device_file_that_cannot_be_used_is_told_before_anything_is_written(
    folder: Path, bundle: Path, cache_dir: Path, run: Callable[..., Result], device: Device
) -> None:
    """Of another cuDNN, mistyped, or not there."""
    other = cache_dir / "other.json"
    other.write_text(json.dumps({"cudnn_version": 91400, "properties": dict(device.properties)}))
    for name, message, code in (
        (other, "comes from cuDNN 9.14.0", 1),
        ("h20", "did you mean h200", 2),
        ("none.json", "cannot read device file", 1),
    ):
        said = run("export", bundle, "--device", name, "--cache-dir", folder)
        assert (said.code, message in said.err, is_one_line(said.err)) == (code, True, True)
        assert names(bundle.parent) == []
    export(folder, bundle)
    with pytest.raises(DeviceFileError):
        take(cache_dir / "to", bundle, device=Device.from_file(other))
    assert not (cache_dir / "to" / "plans-1.sqlite3").exists()


def test_the_doctor_says_it_of_bundles_that_are_read_in_place(
    cache_dir: Path, bundle: Path, device: Device, place: Place, run: Callable[..., Result], monkeypatch: Any
) -> None:
    """For the GPU that is here; without one that it cannot be judged."""
    export(stored_in(cache_dir / "from", *mixed(place)), bundle)
    monkeypatch.setenv("PLANCACHE_BUNDLES", str(bundle))
    assert "cannot be judged: there is no GPU here" in run("doctor", "--cache-dir", cache_dir / "to").out
    gpu = Device(device.properties, None, 0)
    monkeypatch.setattr("plancache.target.current_ordinal", lambda: 0)
    monkeypatch.setattr(Device, "current", lambda _=None: gpu)
    shown = json.loads(run("doctor", "--json", "--cache-dir", cache_dir / "to").out)["store"]["bundle bundle.sqlite3: usable"]
    assert (shown["usable"], shown["entries"], shown["reasons"]) == (2, 31, expected(device, place))


# ---- crashes, a full disk, interruptions ----------------------------------------------------------------------------

KILLED = (
    BARE
    + """
import os, signal, sys
from pathlib import Path
from plancache import carrying
from plancache.cli import main
from plancache.store import sealed

where, *arguments = sys.argv[1:]
number = getattr(signal, where.split()[0])

def dying(work, calls=[]):
    def die(*given, **more):
        calls.append(1)
        if len(calls) == int(where.split()[2]):
            os.kill(os.getpid(), number)
        return work(*given, **more)
    return die

module, _, name = where.split()[1].rpartition(".")
module = {"carrying": carrying, "sealed": sealed, "os": os, "Path": Path}[module]
setattr(module, name, dying(getattr(module, name)))
sys.exit(main(arguments))
"""
)

IN_EXPORT = {
    "before the first row": ("carrying._fit", 1),
    "between rows": ("carrying.unpack", 3),
    "before it is sealed": ("sealed._finish", 1),
    "while it is sealed": ("sealed._sync", 1),
    "before its place is taken": ("Path.replace", 1),
}
AFTER = {"after its place was taken": ("sealed._sync", 2)}


@pytest.mark.parametrize("where", [*IN_EXPORT, *AFTER])
@pytest.mark.parametrize(("kind", "older"), [("SIGKILL", False), ("SIGKILL", True), ("SIGINT", True)])
def test_an_export_that_ends_early_leaves_the_old_bundle_or_the_new_one(
    folder: Path, bundle: Path, where: str, kind: str, older: bool
) -> None:
    """Killed, or interrupted, which is exit code 130 and cleans up; what a killed one left the next export removes."""
    if older:
        export(folder, bundle, [key_of(0)])
    before = bundle.read_bytes() if older else None
    function, call = {**IN_EXPORT, **AFTER}[where]
    code = -signal.SIGKILL if kind == "SIGKILL" else 130
    _, err = finish(start(KILLED, f"{kind} {function} {call}", "export", bundle, "--cache-dir", folder), code)
    if where in AFTER:
        assert len(rows(bundle)) == PLANS
    else:
        assert (bundle.read_bytes() if bundle.exists() else None) == before
    if kind == "SIGINT":
        assert err == "plancache: interrupted\n"
        assert set(names(bundle.parent)) <= {bundle.name}
    assert len(in_store(folder)) == PLANS
    assert export(folder, bundle).entries == PLANS
    assert names(bundle.parent) == [bundle.name]


@pytest.mark.parametrize(("where", "batches"), [("unpack 30", 0), ("unpack 150", 0), ("_unfit 30", 0), ("_store 2", 1), ("_unfit 70", 1)])
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_an_import_that_ends_early_leaves_whole_batches(cache_dir: Path, bundle: Path, kind: str, where: str, batches: int) -> None:
    """While it is checked, before a batch and within one: what is there is whole, and the next import brings the rest."""
    entries, mine = [numbered(number) for number in range(100)], [numbered(3, quality="compiled"), numbered(200)]
    export(stored_in(cache_dir / "from", *entries), bundle)
    folder = stored_in(cache_dir / "to", *mine)
    code = -signal.SIGKILL if kind == "SIGKILL" else 130
    finish(start(KILLED, f"{kind} carrying.{where}", "import", bundle, "--cache-dir", folder), code)
    assert in_store(folder) == packed(*mine) | packed(*entries[: batches * module._BATCH])
    assert sql(folder / "plans-1.sqlite3", "PRAGMA integrity_check") == [("ok",)]
    take(folder, bundle)
    assert in_store(folder) == packed(*mine, *entries)


FULL = (
    BARE
    + """
import json, sys
from pathlib import Path
from plancache.cli import main
place = Path(sys.argv[1])
codes = [main(["export", str(place / "bundle.sqlite3"), "--cache-dir", sys.argv[2]])]
print(json.dumps([codes, sorted(str(file.relative_to(place)) for file in place.rglob("*"))]))
"""
)


def on_a_small_disk(program: str, size: str, disk: Path, *arguments: object) -> tuple[Any, str]:
    """What a program prints, as JSON, and its errors, where a folder is a disk of this size; nobody else sees it."""
    shell = f'set -e; mount -t tmpfs -o mode=700,size={size} none "$1"; exec "$PYTHON" -W error -c "$PROGRAM" "$@"'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHON": sys.executable, "PROGRAM": program}
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(disk), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@may_mount
@pytest.mark.parametrize("size", ["4k", "64k", "300k"])
def test_a_full_disk_in_the_middle_of_an_export_leaves_nothing(cache_dir: Path, bundle: Path, size: str) -> None:
    """Exit code 1 and one line that says where to make room."""
    folder = stored_in(cache_dir / "from", *(numbered(number, blob=random.randbytes(100_000)) for number in range(5)))
    ((codes, files), err) = on_a_small_disk(FULL, size, bundle.parent, folder)
    assert codes == [1]
    assert files == []
    assert is_one_line(err), err
    assert re.search(rf"bundle.sqlite3: it cannot be written \(.*\); make room in {bundle.parent}, or name another place", err)


FULL_STORE = (
    BARE
    + """
import json, sys
from pathlib import Path
from plancache import PlanCache
from plancache.cli import main
store = Path(sys.argv[1]) / "to"
code = main(["import", sys.argv[2], "--cache-dir", str(store)])
with PlanCache(store, mode="readonly", strict=True) as cache:
    print(json.dumps([code, len(cache.entries()), [finding.problem for finding in cache.verify()]]))
"""
)


@may_mount
@pytest.mark.parametrize(("size", "some"), [("300k", False), ("3m", True)])
def test_a_full_disk_in_the_middle_of_an_import_leaves_whole_batches(cache_dir: Path, bundle: Path, size: str, some: bool) -> None:
    """Exit code 1 and one line; the store can be read, and its plans are whole."""
    export(stored_in(cache_dir / "from", *(numbered(number, blob=random.randbytes(20_000)) for number in range(200))), bundle)
    (cache_dir / "disk").mkdir()
    ((code, entries, problems), err) = on_a_small_disk(FULL_STORE, size, cache_dir / "disk", bundle)
    assert (code, entries % module._BATCH, 0 < entries < 200, problems) == (1, 0, some, [])
    assert is_one_line(err), err
    assert "full" in err


# ---- others at the same time ----------------------------------------------------------------------------------------

EXPORTING = (
    BARE
    + """
import sys
from plancache import PlanCache
print("go", flush=True)
for _ in range(int(sys.argv[3])):
    with PlanCache(sys.argv[1], mode="readonly", strict=True) as cache:
        cache.export_bundle(sys.argv[2])
"""
)


def test_exports_to_one_name_at_once(folder: Path, bundle: Path) -> None:
    """Each is whole, whoever comes last; none takes the other's work for what was left by a killed one."""
    children = [start(EXPORTING, folder, bundle, 4) for _ in range(3)]
    for child in children:
        finish(child)
    assert rows(bundle) == in_store(folder)
    assert names(bundle.parent) == [bundle.name]


def test_what_another_export_is_making_is_left_alone_and_what_a_killed_one_left_is_not(folder: Path, bundle: Path) -> None:
    """They are told apart by a lock, which ends with its process."""
    with module._workshop(bundle) as busy:
        (left := bundle.with_name(f".{bundle.name}.x.new")).mkdir()
        (left / "half").write_text("half a bundle")
        export(folder, bundle)
        assert names(bundle.parent) == sorted([bundle.name, busy.name])
    assert names(bundle.parent) == [bundle.name]


@pytest.mark.parametrize("moment", ["made", "opened"])
def test_a_folder_that_another_export_took_for_a_left_one_is_made_anew(bundle: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Before it is locked it looks like one that was left: it may be gone once it was made, or once it was opened."""
    owner, name = (tempfile, "mkdtemp") if moment == "made" else (fcntl, "flock")
    work, taken = getattr(owner, name), []

    def and_take(*given: Any) -> Any:
        done = work(*given)
        if not taken:
            taken.extend(bundle.parent.glob(".*.new"))
            taken[0].rmdir()
        return done

    monkeypatch.setattr(owner, name, and_take)
    with module._workshop(bundle) as busy, pytest.raises(BlockingIOError), module._held(busy):
        pass
    assert len(taken) == 1
    assert names(bundle.parent) == []


PURGING = """
import sys
from test_carrying import numbered, stored_in
from plancache import PlanCache
from pathlib import Path
print("go", flush=True)
while not Path(sys.argv[2]).exists():
    with PlanCache(sys.argv[1], strict=True) as cache:
        cache.prune(everything=True)
    stored_in(Path(sys.argv[1]), *map(numbered, range(int(sys.argv[3]))))
"""


def test_an_export_during_a_purge_has_whole_plans(folder: Path, bundle: Path, cache_dir: Path) -> None:
    """Whatever goes and comes meanwhile: no error but that nothing is left, and every row of a bundle is that of a plan."""
    wanted, end = packed(*map(numbered, range(PLANS))), cache_dir / "end"
    purging = start(PURGING, folder, end, PLANS)
    assert purging.stdout is not None
    assert purging.stdout.readline() == "go\n"
    found = []
    while len(found) < 5:
        try:
            export(folder, bundle)
        except LookupError:
            continue
        found.append(rows(bundle))
    end.touch()
    finish(purging)
    assert all(each.items() <= wanted.items() for each in found)


IMPORTING = (
    BARE
    + """
import sys
from plancache import PlanCache
with PlanCache(sys.argv[1], strict=True) as cache:
    print("go", flush=True)
    sys.stdin.readline()
    print(cache.import_bundle(sys.argv[2]).stored)
"""
)


def test_imports_at_once_lose_nothing(cache_dir: Path, bundle: Path) -> None:
    """Of two bundles, one of them twice, into a store that nobody has made yet: all plans are there, and each was new once."""
    entries, other = [numbered(number) for number in range(200)], bundle.with_name("other.sqlite3")
    export(stored_in(cache_dir / "one", *entries[:150]), bundle)
    export(stored_in(cache_dir / "two", *entries[50:]), other)
    children = [start(IMPORTING, cache_dir / "to", path) for path in (bundle, other, bundle)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert sum(int(finish(child)[0]) for child in children) == 200
    assert in_store(cache_dir / "to") == packed(*entries)


WRITING = """
import sys
from pathlib import Path
from test_carrying import Database, closing, numbered
with closing(Database(Path(sys.argv[1]) / "plans-1.sqlite3", lock_timeout_s=20)) as database:
    number = 1000
    while not Path(sys.argv[2]).exists() or number < 1050:
        database.put(numbered(number))
        if number == 1000:
            print("go", flush=True)
        number += 1
    print(number)
"""


def test_an_import_into_a_store_that_another_process_writes(cache_dir: Path, bundle: Path) -> None:
    """Both go on: what the one builds and what the other brings is there."""
    entries, end = [numbered(number) for number in range(300)], cache_dir / "end"
    export(stored_in(cache_dir / "from", *entries), bundle)
    writing = start(WRITING, cache_dir / "to", end)
    assert writing.stdout is not None
    assert writing.stdout.readline() == "go\n"
    assert take(cache_dir / "to", bundle).stored == 300
    end.touch()
    last = int(finish(writing)[0])
    assert in_store(cache_dir / "to") == packed(*entries, *map(numbered, range(1000, last)))
