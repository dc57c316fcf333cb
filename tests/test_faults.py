"""Faults of the whole cache: the caller gets a right plan and one warning, and the next process finds a good store."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faking import finish, opened_on_gpu, product, start
from samples import matmul

from plancache import Constraints, Device, PlanCache, graphs
from plancache.backend import CudnnBackend
from plancache.cli import main
from plancache.compiler import Compiler
from plancache.entry import Row, checksum, pack
from plancache.errors import PlancacheWarning, StoreError, StruckError
from plancache.key import Place
from plancache.store.connection import HEAD, connect
from plancache.store.database import SELECT_ENTRY
from plancache.store.sealed import seal

NOBODY = 65534
FILE = "plans-1.sqlite3"
DAMAGED = f"{FILE}.damaged"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become, or give files to, another user")

Open = Callable[..., PlanCache]


def convolution(height: int = 14) -> Any:
    """A graph whose plan is built in milliseconds: its engine is precompiled."""
    return graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=height, width=14).graph


HEIGHTS = (14, 28, 56)


class _Shared:
    """One compiler child for the tests of this file: starting it takes seconds."""

    def __init__(self, compiler: Compiler) -> None:
        self.build = compiler.build

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def compiler(device: Device, backend: CudnnBackend) -> Iterator[_Shared]:
    with closing(Compiler(device, Place.of(device, backend.libraries).cudnn)) as compiler:
        yield _Shared(compiler)


@pytest.fixture(scope="module")
def opened(device: Device, compiler: _Shared) -> Open:
    """Opens a cache for the device file, with real cuDNN in a child that all of them share."""

    def open_one(directory: Path, **options: Any) -> PlanCache:
        cache = PlanCache(directory, device=device, **options)
        cache._targets._of(device).builder = compiler  # type: ignore[assignment]
        return cache

    return open_one


@pytest.fixture(scope="module")
def stored(opened: Open, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with plans for all heights but the last, made once; copy it."""
    directory = tmp_path_factory.mktemp("stored")
    with opened(directory, strict=True) as cache:
        for height in HEIGHTS[:2]:
            assert cache.plan(convolution(height)).origin == "built"
    return directory


@pytest.fixture
def directory(stored: Path, tmp_path: Path) -> Path:
    """A directory of this test's own with two stored plans, closed."""
    copy = tmp_path / "cache"
    shutil.copytree(stored, copy)
    copy.chmod(0o700)
    return copy


@contextmanager
def one_warning(says: str) -> Iterator[None]:
    """Checks that a block gives one warning, of plancache, that says this."""
    with pytest.warns(PlancacheWarning) as caught:
        yield
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1, said
    assert re.search(says, said[0]), said


def origins(cache: PlanCache, heights: tuple[int, ...] = HEIGHTS[:2]) -> list[str]:
    return [cache.plan(convolution(height)).origin for height in heights]


def assert_hits(opened: Open, directory: Path, heights: tuple[int, ...] = HEIGHTS[:2]) -> None:
    """The next process finds every plan, without a fault, in a file that SQLite finds nothing wrong with."""
    with opened(directory, strict=True, build="forbid") as cache:
        assert origins(cache, heights) == ["local"] * len(heights)
    assert sql(directory, "PRAGMA integrity_check") == [("ok",)]


def sql(directory: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def row_of(directory: Path, key: bytes) -> Row:
    return Row(*sql(directory, SELECT_ENTRY, key)[0])


def write(directory: Path, row: Row) -> None:
    sql(directory, "UPDATE entries SET preimage = ?, facts = ?, payload = ?, checksum = ? WHERE key = ?", *row[1:], row.key)


def resealed(row: Row) -> Row:
    """A row with the checksum that its content has: somebody recomputed it."""
    return row._replace(checksum=checksum(*row[:4]))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# ---- the place ------------------------------------------------------------------------------------------------------


def test_a_read_only_directory_with_nothing_gives_plans_from_memory(opened, tmp_path):
    """One warning that names the cure; nothing is written; once the cure is applied plans are stored."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o555)
    with one_warning(r"is not writable.*chmod u\+wx"), opened(directory) as cache:
        assert origins(cache) == ["built", "built"]
        assert origins(cache) == ["memory", "memory"]
        assert (cache.statistics().stored, dict(cache.statistics().faults)) == (0, {"place": 1})
    assert list(directory.iterdir()) == []
    directory.chmod(0o755)
    with opened(directory, strict=True) as cache:
        assert origins(cache) == ["built", "built"]
    assert_hits(opened, directory)


def test_a_read_only_directory_with_an_unsealed_file_is_refused_with_the_cure(opened, directory):
    """What is not sealed may change while it is read: one warning names `plancache seal`, and the file stays as it is."""
    before = files(directory)
    directory.chmod(0o555)
    with one_warning(r"plans-1\.sqlite3: .*not sealed.*plancache seal"), opened(directory) as cache:
        assert origins(cache) == ["built", "built"]
    directory.chmod(0o755)
    assert files(directory) == before
    assert_hits(opened, directory)


def test_a_read_only_directory_with_a_sealed_file_hits_and_keeps_the_rest_in_memory(opened, directory, recwarn):
    """A hit needs no write: no warning, no file; what is not in there is built and kept in memory."""
    seal(directory / FILE, lock_timeout_s=20)
    (directory / "write.lock").unlink()
    before = files(directory)
    directory.chmod(0o555)
    for _ in range(2):
        with opened(directory, strict=True) as cache:
            assert origins(cache, HEIGHTS) == ["sealed", "sealed", "built"]
            assert origins(cache, HEIGHTS) == ["memory"] * 3
            assert cache.statistics().stored == 0
    assert files(directory) == before
    assert not recwarn.list


AS_NOBODY = f"""
    import ctypes, json, os, pwd, sys, warnings
    from pathlib import Path
    import plancache, cudnn
    import filelock, platform, sqlalchemy, zstandard
    from faking import opened_on_gpu, product  # before, since nobody may be unable to read the interpreter's library
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
    os.environ["HOME"] = "/"
    from plancache.errors import PlancacheWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache, _ = opened_on_gpu(sys.argv[1])
        with cache:
            origins = [cache.plan(product()).origin for _ in range(2)]
    print(json.dumps([origins, [str(w.message) for w in caught if issubclass(w.category, PlancacheWarning)]]))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are this user's alone."""
    made = Path(tempfile.mkdtemp(prefix="plancache-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@needs_root
@pytest.mark.parametrize("sealed", [False, True])
def test_what_root_made_is_used_by_others_only_where_it_is_sealed(shared, sealed):
    """A user gets right plans in root's directory: from a sealed file hits, else built, with one warning; nothing changes."""
    directory = shared / "cache"
    cache, _ = opened_on_gpu(directory, strict=True)
    with cache:
        cache.plan(product())
    if sealed:
        seal(directory / FILE, lock_timeout_s=20)
    directory.chmod(0o755)
    (directory / FILE).chmod(0o444 if sealed else 0o644)
    before = files(directory)
    out, _ = finish(start(AS_NOBODY, directory))
    planned, warned = json.loads(out.splitlines()[-1])
    assert planned == ["sealed" if sealed else "built", "memory"]
    assert len(warned) == (not sealed)
    assert sealed or "belongs to root" in warned[0] or "not sealed" in warned[0]
    assert files(directory) == before


@needs_root
def test_root_uses_nothing_of_another_user(shared, opened, stored):
    """Being root gets nobody past ownership: one warning with both cures, a right plan, and their files as they were."""
    directory = shared / "cache"
    shutil.copytree(stored, directory)
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    before = files(directory)
    with one_warning("belongs to nobody.*chown -R root"), opened(directory) as cache:
        assert origins(cache) == ["built", "built"]
        assert origins(cache) == ["memory", "memory"]
    assert files(directory) == before
    for path in (directory, *directory.rglob("*")):
        os.chown(path, 0, 0)
    assert_hits(opened, directory)


def test_a_full_database_stores_no_more_and_harms_nothing(opened, directory, monkeypatch):
    """SQLite's own limit on pages: one warning, right plans, hits go on; with room again the plan is stored."""

    def limited(*given: Any, **more: Any) -> sqlite3.Connection:
        connection = connect(*given, **more)
        connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the file's own size, where that is more
        return connection

    with monkeypatch.context() as patch:
        patch.setattr("plancache.store.database.connect", limited)
        with one_warning("full"), opened(directory) as cache:
            assert origins(cache, HEIGHTS) == ["local", "local", "built"]
            assert origins(cache, HEIGHTS) == ["memory"] * 3
            assert (cache.statistics().stored, dict(cache.statistics().faults)) == (0, {"write": 1})
    assert_hits(opened, directory)
    with opened(directory, strict=True) as cache:
        assert origins(cache, HEIGHTS) == ["local", "local", "built"]
    assert_hits(opened, directory, HEIGHTS)


NO_ROOM = """
    import json, os, resource, sys, warnings
    from faking import opened_on_gpu, product

    limit = int(sys.argv[2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache, backend = opened_on_gpu(sys.argv[1])
        backend.blob_bytes = 30_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with cache:
            origins = [cache.plan(product(size)).origin for size in (1, 2, 3)]
            origins += [cache.plan(product(size)).origin for size in (1, 2, 3)]
    print(json.dumps([origins, [str(w.message) for w in caught], dict(cache.statistics().faults)]))
"""


@pytest.mark.parametrize("limit", [0, 4096, 40_000, 70_000])
@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_stores_no_more_and_harms_nothing(tmp_path, limit, begun):
    """No file may grow beyond some bytes: right plans, one warning, and what was stored is found once there is room.

    Without room for the 32 kB of SQLite's index of its journal nothing can be read either.
    """
    if begun:
        cache, _ = opened_on_gpu(tmp_path, strict=True)
        with cache:
            cache.plan(product(1))
    out, _ = finish(start(NO_ROOM, tmp_path, limit))
    planned, warned, _faults = json.loads(out.splitlines()[-1])
    assert planned == ["local" if begun and limit > 32768 else "built", "built", "built"] + ["memory"] * 3
    assert len(warned) == 1, warned
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        found = [cache.plan(product(size)).origin for size in (1, 2, 3)]
        assert found[0] == "local" or not begun
    assert sql(tmp_path, "PRAGMA integrity_check") == [("ok",)]
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert [cache.plan(product(size)).origin for size in (1, 2, 3)] == ["local"] * 3


ON_THE_NETWORK = """
    import json, os, sys, warnings
    from pathlib import Path
    from plancache.store import place
    place.network_mount = lambda path, **_: place.Mount("/home", "nfs4") if str(path).startswith(str(Path(sys.argv[1]).parent)) else None
    from faking import opened_on_gpu, product

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache, backend = opened_on_gpu(sys.argv[1])
        with cache:
            print("ready", flush=True)
            sys.stdin.readline()
            origins = [cache.plan(product(size)).origin for size in range(1, 6)]
            folder = str(cache._levels.lock_folder())
    print(json.dumps([origins, [str(w.message) for w in caught], folder, len(backend.builds)]))
"""


def test_on_a_network_mount_there_is_no_wal_and_locks_are_this_machines(tmp_path, monkeypatch):
    """Two processes make one build a graph under locks in a local folder; one warning names the mount and the cure."""
    directory, runtime = tmp_path / "home" / "cache", tmp_path / "run"
    runtime.mkdir(mode=0o700)
    directory.parent.mkdir()
    children = [start(ON_THE_NETWORK, directory, XDG_RUNTIME_DIR=str(runtime)) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    said = [json.loads(finish(child)[0].splitlines()[-1]) for child in children if child.stdin.write("go\n") and not child.stdin.flush()]
    assert sum(builds for *_, builds in said) == 5
    for _, warned, folder, _ in said:
        assert len(warned) == 1
        assert re.search(r"network file system \(nfs4 at /home\).*PLANCACHE_DIR", warned[0])
        assert Path(folder).is_relative_to(runtime)
    assert sql(directory, "PRAGMA journal_mode") == [("delete",)]
    assert not [path for path in directory.rglob("*") if path.name.endswith(("-wal", "-shm")) or path.parent.name == "locks"]
    monkeypatch.setattr("plancache.store.place.network_mount", lambda *_, **__: None)
    cache, _ = opened_on_gpu(directory, strict=True)
    with cache:
        assert [cache.plan(product(size)).origin for size in range(1, 6)] == ["local"] * 5


# ---- the file -------------------------------------------------------------------------------------------------------


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2 + 100]


def without_its_first_page(data: bytes) -> bytes:
    return bytes(4096) + data[4096:]


def with_its_tables_damaged(data: bytes) -> bytes:
    return data[:100] + b"\xff" * 900 + data[1000:]


def with_all_pages_but_the_first_damaged(data: bytes) -> bytes:
    return data[:4096] + b"\xa5" * (len(data) - 4096)


def cut_short(data: bytes) -> bytes:
    return data[:60]


@pytest.mark.parametrize(
    "damage", [truncated, without_its_first_page, with_its_tables_damaged, with_all_pages_but_the_first_damaged, cut_short]
)
def test_a_damaged_file_is_put_aside_and_the_loss_said(opened, directory, damage):
    """Right plans, one warning that says what was lost and where it is; a new file is begun and hits."""
    data = damage((directory / FILE).read_bytes())
    (directory / FILE).write_bytes(data)
    with one_warning(rf"{len(data):,} bytes of stored plans were moved to .*{DAMAGED}"), opened(directory) as cache:
        assert origins(cache, HEIGHTS) == ["built"] * 3
        assert origins(cache, HEIGHTS) == ["memory"] * 3
    assert (directory / DAMAGED).read_bytes() == data
    assert_hits(opened, directory, HEIGHTS)


def test_one_damaged_file_is_kept(opened, directory):
    """The second one takes the first one's place: a disk that fails does not fill up."""
    for filler in (b"first", b"second"):
        (directory / FILE).write_bytes(filler * 1000)
        with one_warning("were moved to"), opened(directory) as cache:
            assert origins(cache) == ["built", "built"]
    assert (directory / DAMAGED).read_bytes() == b"second" * 1000
    assert [path.name for path in directory.iterdir() if "damaged" in path.name] == [DAMAGED]
    assert_hits(opened, directory)


LOCKER = """
    import sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute(sys.argv[2])
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("lock", "expected"), [("BEGIN IMMEDIATE", "local"), ("BEGIN EXCLUSIVE", "built")])
def test_a_database_that_another_process_locks_delays_by_a_bound(opened, directory, lock, expected):
    """SQLite's locks, held by a program that hangs: right plans, one warning, and not one timeout after the other."""
    sql(directory, "PRAGMA journal_mode = DELETE")  # where an exclusive lock keeps readers out too
    locker = start(LOCKER, directory / FILE, lock)
    assert locker.stdout.readline() == "locked\n"
    started = time.monotonic()
    with one_warning("locked"), opened(directory, lock_timeout_s=0.3) as cache:
        assert origins(cache, HEIGHTS) == [expected, expected, "built"]
        assert origins(cache, HEIGHTS) == ["memory"] * 3
    assert time.monotonic() - started < 30
    finish(locker)
    assert_hits(opened, directory)


def test_a_write_lock_that_is_never_given_back_delays_by_a_bound(opened, directory):
    """Hits need no lock; a build waits for it as long as the timeout, is handed out all the same, and one warning says so."""
    with open(directory / "write.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with one_warning("lock"), opened(directory, lock_timeout_s=0.3) as cache:
            assert origins(cache, HEIGHTS) == ["local", "local", "built"]
            assert dict(cache.statistics().faults) == {"write": 1}
    assert_hits(opened, directory)


def test_a_file_from_the_future_stays_as_it_is(opened, directory):
    """One warning names its revision and the cure; plans are right, and not a byte changes."""
    sql(directory, "UPDATE alembic_version SET version_num = '9999_moons'")
    sql(directory, "UPDATE compatibility SET min_reader = 9999")
    before = files(directory)
    with one_warning("newer plancache made it.*9999_moons.*PLANCACHE_DIR"), opened(directory) as cache:
        assert origins(cache) == ["built", "built"]
        assert origins(cache) == ["memory", "memory"]
    assert files(directory) == before
    sql(directory, f"UPDATE alembic_version SET version_num = '{HEAD}'")
    assert_hits(opened, directory)


@pytest.mark.parametrize("past", sorted(Path(__file__).with_name("databases").glob("*.sqlite3")), ids=lambda path: path.stem)
def test_a_file_of_the_past_is_used_and_upgraded_by_the_first_build(opened, directory, past, recwarn):
    """Its plans are hits before and after it is upgraded, and nothing in it is lost."""
    rows = sql(directory, "SELECT * FROM entries")
    for path in directory.glob(f"{FILE}*"):
        path.unlink()
    shutil.copy(past, directory / FILE)
    (directory / FILE).chmod(0o600)
    before = sql(directory, "SELECT * FROM entries")
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as connection:
        connection.executemany(f"INSERT INTO entries VALUES ({', '.join('?' * len(rows[0]))})", rows)
    with opened(directory, strict=True) as cache:
        assert origins(cache, HEIGHTS) == ["local", "local", "built"]
    assert sql(directory, "SELECT version_num FROM alembic_version") == [(HEAD,)]
    assert set(before) <= set(sql(directory, "SELECT * FROM entries"))
    assert_hits(opened, directory, HEIGHTS)
    assert not recwarn.list


# ---- rows -----------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def a_flipped_payload(row: Row, _: Row) -> Row:
    return row._replace(payload=flipped(row.payload))


def flipped_facts(row: Row, _: Row) -> Row:
    return row._replace(facts=flipped(row.facts))


def a_flipped_preimage(row: Row, _: Row) -> Row:
    return row._replace(preimage=flipped(row.preimage))


def a_flipped_checksum(row: Row, _: Row) -> Row:
    return row._replace(checksum=flipped(row.checksum))


def a_truncated_payload(row: Row, _: Row) -> Row:
    return row._replace(payload=row.payload[:-7])


def an_empty_payload(row: Row, _: Row) -> Row:
    return row._replace(payload=b"")


def a_truncated_payload_with_its_checksum(row: Row, _: Row) -> Row:
    return resealed(row._replace(payload=row.payload[:-7]))


def anothers_payload(row: Row, other: Row) -> Row:
    return row._replace(payload=other.payload)


def anothers_payload_and_checksum(row: Row, other: Row) -> Row:
    return row._replace(payload=other.payload, checksum=other.checksum)


def all_of_another_under_this_key(row: Row, other: Row) -> Row:
    return other._replace(key=row.key)


def all_of_another_under_this_key_with_its_checksum(row: Row, other: Row) -> Row:
    return resealed(other._replace(key=row.key))


def a_frame_that_lies_about_its_size(row: Row, _: Row) -> Row:
    """It states the size that is expected and holds more."""
    import zstandard

    blob = zstandard.decompress(row.payload)
    frame = bytearray(zstandard.compress(blob + bytes(1000)))
    assert frame[4] & 0xE0 == 0x60  # one segment, a size in two bytes
    frame[5:7] = (len(blob) - 256).to_bytes(2, "little")
    return resealed(row._replace(payload=bytes(frame)))


def a_frame_that_asks_for_gigabytes(row: Row, _: Row) -> Row:
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + row.payload[7:]
    facts = {**json.loads(row.facts), "blob_bytes": 1 << 40}
    return resealed(row._replace(payload=frame, facts=json.dumps(facts).encode()))


CHANGES = [
    a_flipped_payload,
    flipped_facts,
    a_flipped_preimage,
    a_flipped_checksum,
    a_truncated_payload,
    an_empty_payload,
    a_truncated_payload_with_its_checksum,
    anothers_payload,
    anothers_payload_and_checksum,
    all_of_another_under_this_key,
    all_of_another_under_this_key_with_its_checksum,
    a_frame_that_lies_about_its_size,
    a_frame_that_asks_for_gigabytes,
]


def keys_of(opened: Open, directory: Path, heights: tuple[int, ...] = HEIGHTS[:2]) -> list[bytes]:
    with opened(directory, strict=True, build="forbid", mode="readonly") as cache:
        return [cache.plan(convolution(height)).entry.key.digest for height in heights]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_row_is_built_anew_and_replaced_and_bars_no_other(opened, directory, change):
    """One warning and a right plan; the other row is a hit; the store is whole again for the next process."""
    mine, other = keys_of(opened, directory)
    row = row_of(directory, mine)
    changed = change(row, row_of(directory, other))
    assert changed != row
    write(directory, changed)
    with one_warning("does not match its checksum|cannot be read"), opened(directory) as cache:
        assert origins(cache) == ["built", "local"]
        assert dict(cache.statistics().faults) == {"corrupt": 1}
    new = row_of(directory, mine)
    assert new not in (row, changed)
    assert new.checksum == checksum(*new[:4])
    assert_hits(opened, directory)


@pytest.mark.parametrize("column", ["preimage", "facts", "payload", "checksum"])
@pytest.mark.parametrize("value", ["text", "\ud800 no UTF-8", 7, 1.5, b""], ids=repr)
def test_a_value_of_another_type_is_built_anew_and_replaced(opened, directory, column, value):
    """SQLite takes any type in any column: such a row is one warning and a miss, and does not stay."""
    mine, _ = keys_of(opened, directory)
    if isinstance(value, str) and not value.isprintable():
        sql(directory, f"UPDATE entries SET {column} = CAST(x'ff00fe' AS TEXT) WHERE key = ?", mine)
    else:
        sql(directory, f"UPDATE entries SET {column} = ? WHERE key = ?", value, mine)
    with one_warning("."), opened(directory) as cache:
        assert origins(cache) == ["built", "local"]
    assert_hits(opened, directory)


GOOD_UPDATES = "INSERT INTO uses (key, hits, last_used_at) SELECT key, 1, 1.0 FROM entries WHERE true ON CONFLICT DO NOTHING"
STRANGE = {
    "a key that is text": "UPDATE entries SET key = 'a text' WHERE key = :key",
    "a key that is a number": "UPDATE entries SET key = 5 WHERE key = :key",
    "a text that is no UTF-8": "UPDATE entries SET facts = CAST(x'ff00fe' AS TEXT) WHERE key = :key",
    "facts that are a number": "UPDATE entries SET facts = 5 WHERE key = :key",
    "facts that are another JSON": "UPDATE entries SET facts = x'5b5d' WHERE key = :key",
    "a preimage that is text": "UPDATE entries SET preimage = 'x' WHERE key = :key",
    "hits that are text": "UPDATE uses SET hits = 'many' WHERE key = :key",
    "a last use that is text": "UPDATE uses SET last_used_at = 'yesterday' WHERE key = :key",
    "a last use beyond all time": "UPDATE uses SET last_used_at = 1e300 WHERE key = :key",
    "a time that is text": "UPDATE entries SET created_at = 'yesterday' WHERE key = :key",
}
STRANGE_FACTS: dict[str, dict[str, Any]] = {
    "a time that is text": {"created_at": "yesterday"},
    "a time beyond all time": {"created_at": 1e300},
    "no time at all": {"created_at": None},
    "seconds that are text": {"timings_s": {"build": "long"}},
    "an engine that is a number": {"recipe": [5, 5, {}]},
    "a quality that is a list": {"quality": []},
    "a workspace that is text": {"workspace_size": "large"},
}


def commands(directory: Path, key: bytes) -> Iterator[list[str]]:
    for command in (["ls"], ["show", key.hex()[:12]]):
        yield [*command, "--cache-dir", str(directory)]
        yield [*command, "--json", "--cache-dir", str(directory)]


def assert_told_without_a_traceback(directory: Path, keys: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """Listing commands leave a strange row out or say what is wrong with it; the good row is there."""
    mine, other = keys
    for arguments in commands(directory, mine):
        assert main(arguments) in (0, 1), arguments
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert arguments[0] != "ls" or other.hex()[:12] in said.out
    for arguments in commands(directory, other):
        assert main(arguments) == 0
        assert other.hex()[:12] in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::plancache.errors.PlancacheWarning")
@pytest.mark.parametrize("strange", STRANGE)
def test_listings_and_lookups_survive_strange_rows(opened, directory, strange, capsys):
    """Text keys, numbers where bytes belong: `ls`, `show`, `entries` and `entry` give a clear error or leave the row out."""
    keys = keys_of(opened, directory)
    sql(directory, GOOD_UPDATES)
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as connection:
        assert connection.execute(STRANGE[strange], {"key": keys[0]}).rowcount == 1
    with opened(directory) as cache:
        assert keys[1] in [listed.key.digest for listed in cache.entries()]
        assert cache.entry(keys[1].hex()).key.digest == keys[1]
        try:
            cache.entry(keys[0].hex())
        except (StoreError, LookupError) as error:
            assert str(error)
        assert set(origins(cache)) <= {"built", "local"}
    assert_told_without_a_traceback(directory, keys, capsys)
    with opened(directory) as cache:
        assert origins(cache) == ["local", "local"]


@pytest.mark.filterwarnings("ignore::plancache.errors.PlancacheWarning")
@pytest.mark.parametrize("strange", STRANGE_FACTS)
@pytest.mark.parametrize("sealed", [False, True], ids=["without", "with its checksum"])
def test_listings_survive_strange_facts(opened, directory, strange, sealed, capsys):
    """Facts of the wrong type, the checksum recomputed or not, are told or left out; the other row is listed."""
    keys = keys_of(opened, directory)
    row = row_of(directory, keys[0])
    row = row._replace(facts=json.dumps({**json.loads(row.facts), **STRANGE_FACTS[strange]}).encode())
    write(directory, resealed(row) if sealed else row)
    assert_told_without_a_traceback(directory, keys, capsys)
    with opened(directory) as cache:
        assert origins(cache)[1] == "local"


@pytest.mark.parametrize(
    "strange",
    [
        "UPDATE verdicts SET count = 'many'",
        "UPDATE verdicts SET reason = x'ff00'",
        "UPDATE verdicts SET reason = 5",
        "UPDATE verdicts SET key = 'text'",
        "UPDATE verdicts SET reason = CAST(x'ff00' AS TEXT)",
    ],
)
def test_strange_verdicts_bar_nothing(opened, directory, strange):
    """A verdict of the wrong types is not believed, and plans are hits and built as ever."""
    mine, _ = keys_of(opened, directory)
    for kind in ("struck", "quarantined", "unsupported without a GPU"):
        values = kind, b"\x01" * 32 if kind == "quarantined" else mine, b"\x02" * 32, "load: x", 1, 1.0
        sql(directory, "INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", *values)
    sql(directory, strange)
    with opened(directory, strict=True) as cache:
        assert origins(cache, HEIGHTS)[:2] == ["local", "local"]
    with opened(directory, strict=True) as cache:
        assert origins(cache, HEIGHTS) == ["local"] * 3


# ---- what cuDNN refuses ---------------------------------------------------------------------------------------------


def refuse(*blobs: bytes) -> Callable[[bytes], None]:
    def load(blob: bytes) -> None:
        if not blobs or blob in blobs:
            raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")

    return load


def quarantined(directory: Path) -> list[str]:
    return [reason for (reason,) in sql(directory, "SELECT reason FROM verdicts WHERE kind = 'quarantined' ORDER BY created_at")]


def test_garbage_with_a_right_checksum_is_refused_built_anew_and_quarantined(tmp_path):
    """What cuDNN does not load is replaced and its bytes are never tried again; after a second such blob none is stored."""
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
    garbage = pack(replace(entry, blob=b"garbage" * 30))
    write(tmp_path, garbage)
    for round_, refused in enumerate([[b"garbage" * 30], []]):
        cache, backend = opened_on_gpu(tmp_path)
        backend.when_loaded = refuse(*refused)
        with one_warning("does not load .*INTERNAL_ERROR"), cache:
            assert cache.plan(product()).origin == "built"
            assert cache.statistics().stored == (round_ == 0)
        assert len(quarantined(tmp_path)) == round_ + 1
        assert all(reason.startswith("load: RuntimeError") for reason in quarantined(tmp_path))
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:  # two were refused: there is nothing to load, nothing to warn of, and nothing is stored
        assert cache.plan(product()).origin == "built"
        assert backend.loaded == backend.builds
        assert cache.statistics().stored == 0
        assert cache.plan(product(17)).origin == "built"
        assert cache.statistics().stored == 1


def test_the_garbage_does_not_come_back(tmp_path):
    """A quarantined blob that is copied in again, from a backup say, is not loaded."""
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
    bad = row_of(tmp_path, entry.key.digest)
    cache, backend = opened_on_gpu(tmp_path)
    backend.when_loaded = refuse()
    with one_warning("does not load"), cache:
        cache.plan(product())
    write(tmp_path, bad)
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "built"
        assert backend.loaded == backend.builds


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cudaErrorIllegalAddress"),
    ],
    ids=str,
)
@pytest.mark.parametrize("build_works", [True, False])
def test_trouble_of_the_device_condemns_no_plan(tmp_path, error, build_works):
    """Out of memory, or an earlier kernel's error, at load: the row stays as it was, and is a hit once that is over."""
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
    before = row_of(tmp_path, entry.key.digest)
    cache, backend = opened_on_gpu(tmp_path)

    def fail(*_: object) -> None:
        raise error

    backend.when_loaded = fail
    if not build_works:
        backend.when_built = fail
    with one_warning("for no fault of its own"), cache:
        if build_works:
            assert cache.plan(product()).origin == "built"
        else:
            with pytest.raises(type(error)):
                cache.plan(product())
        backend.when_loaded = lambda _: None
        assert cache.plan(product()).origin == ("memory" if build_works else "local")
    assert row_of(tmp_path, entry.key.digest) == before
    assert sql(tmp_path, "SELECT * FROM verdicts") == []
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"
    assert backend.loaded == [entry.blob]


# ---- bundles --------------------------------------------------------------------------------------------------------


def bundle_of(directory: Path, name: str) -> Path:
    """A sealed copy of a directory's file."""
    bundle = directory.parent / name
    shutil.copy(directory / FILE, bundle)
    bundle.chmod(0o600)
    seal(bundle, lock_timeout_s=20)
    bundle.with_name("write.lock").unlink()
    return bundle


def test_bundles_are_asked_in_order_behind_the_local_store(opened, directory, tmp_path, monkeypatch):
    """The first bundle that has a plan answers, local plans come before all, and nothing needs a write."""
    keys = keys_of(opened, directory)
    full = bundle_of(directory, "full")
    sql(directory, "DELETE FROM entries WHERE key = ?", keys[1])
    marked = replace(entry_of(opened, directory, keys[0]), provenance={"from": "half"})
    write(directory, pack(marked))
    half = bundle_of(directory, "half")
    local = tmp_path / "local"
    local.mkdir(mode=0o555)
    for order, source in (((half, full), "half"), ((full, half), None)):
        monkeypatch.setenv("PLANCACHE_BUNDLES", os.pathsep.join(map(str, order)))
        with one_warning("not writable"), opened(local) as cache:
            plans = [cache.plan(convolution(height)) for height in HEIGHTS[:2]]
            assert [plan.origin for plan in plans] == ["sealed", "sealed"]
            assert plans[0].entry.provenance.get("from") == source
    assert list(local.iterdir()) == []
    with opened(local, mode="readonly", strict=True) as cache:  # where nobody wants to store there is nothing to warn of
        assert origins(cache) == ["sealed", "sealed"]
    with opened(directory, strict=True) as cache:
        assert origins(cache) == ["local", "sealed"]


def entry_of(opened: Open, directory: Path, key: bytes) -> Any:
    with opened(directory, strict=True) as cache:
        return cache.entry(key.hex())


def not_there(bundle: Path) -> None:
    bundle.unlink()


def no_database(bundle: Path) -> None:
    bundle.chmod(0o600)
    bundle.write_bytes(b"garbage" * 1000)
    bundle.chmod(0o444)


def cut_in_half(bundle: Path) -> None:
    bundle.chmod(0o600)
    bundle.write_bytes(truncated(bundle.read_bytes()))
    bundle.chmod(0o444)


def with_bad_pages(bundle: Path) -> None:
    bundle.chmod(0o600)
    bundle.write_bytes(with_all_pages_but_the_first_damaged(bundle.read_bytes()))
    bundle.chmod(0o444)


def writable_for_all(bundle: Path) -> None:
    bundle.chmod(0o666)


def a_folder(bundle: Path) -> None:
    bundle.unlink()
    bundle.mkdir()


@pytest.mark.parametrize("spoil", [not_there, no_database, cut_in_half, with_bad_pages, writable_for_all, a_folder])
def test_behind_a_bad_bundle_the_next_one_answers(opened, directory, tmp_path, spoil):
    """One warning that names the file; it stays as it is, and the good one behind it gives hits."""
    bad, good = bundle_of(directory, "bad"), bundle_of(directory, "good")
    spoil(bad)
    before = bad.read_bytes() if bad.is_file() else None
    with one_warning(str(bad)), opened(tmp_path / "local", bundles=(bad, good)) as cache:
        assert origins(cache) == ["sealed", "sealed"]
        assert set(cache.statistics().faults) == {"sealed"} or set(cache.statistics().faults) == {"read"}
    assert (bad.read_bytes() if bad.is_file() else None) == before
    with opened(tmp_path / "local", bundles=(good,), strict=True) as cache:
        assert origins(cache) == ["sealed", "sealed"]


def spoilt_bundle(directory: Path, key: bytes) -> Path:
    row = row_of(directory, key)
    write(directory, row._replace(payload=flipped(row.payload)))
    bundle = bundle_of(directory, "spoilt")
    write(directory, row)
    return bundle


def test_a_corrupt_row_of_a_bundle_is_skipped_and_the_bundle_stays(opened, directory, tmp_path):
    """One warning; the next bundle's good copy of the very same row answers; the bundle is not written to."""
    mine, _ = keys_of(opened, directory)
    spoilt, good = spoilt_bundle(directory, mine), bundle_of(directory, "good")
    before = spoilt.read_bytes()
    with one_warning("does not match its checksum"), opened(tmp_path / "local", bundles=(spoilt, good)) as cache:
        assert origins(cache) == ["sealed", "sealed"]
        assert cache.statistics().builds == 0
    with one_warning("does not match its checksum"), opened(tmp_path / "local", bundles=(spoilt,)) as cache:
        assert origins(cache) == ["built", "sealed"]
    assert spoilt.read_bytes() == before
    with opened(tmp_path / "local", bundles=(spoilt,), strict=True) as cache:
        assert origins(cache) == ["local", "sealed"]


def test_a_corrupt_local_row_is_answered_by_its_good_copy_in_a_bundle(opened, directory):
    """The row and its copy have the same key and checksum; only the one whose bytes are wrong is skipped, and the other stays good."""
    mine, _ = keys_of(opened, directory)
    good = bundle_of(directory, "good")
    row = row_of(directory, mine)
    write(directory, row._replace(payload=flipped(row.payload)))
    with one_warning("does not match its checksum"), opened(directory, bundles=(good,)) as cache:
        assert origins(cache) == ["sealed", "local"]
        assert cache.statistics().builds == 0
    write(directory, row)  # it was restored from a backup
    assert_hits(opened, directory)


# ---- locks ----------------------------------------------------------------------------------------------------------


BUILDER = """
    import sys, threading, time
    from faking import opened_on_gpu, product

    cache, backend = opened_on_gpu(sys.argv[1], lock_timeout_s=float(sys.argv[2]), strict=True)

    def wait():
        print("building", flush=True)
        if sys.stdin.readline() == "":
            raise SystemExit("left alone")

    backend.when_built = wait
    with cache:
        print(cache.plan(product()).origin, flush=True)
"""


def builders(directory: Path, count: int, timeout_s: float) -> list[subprocess.Popen[str]]:
    return [start(BUILDER, directory, timeout_s) for _ in range(count)]


def test_a_builder_that_is_killed_is_followed_by_one_other(tmp_path):
    """kill -9 in the midst of a build: one waiter builds, the others find what it stored, and the key is not held for struck."""
    (victim,) = builders(tmp_path, 1, 100)
    assert victim.stdout.readline() == "building\n"
    waiting = builders(tmp_path, 3, 100)
    victim.kill()
    victim.communicate()
    for child in waiting:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = sorted(finish(child)[0].split()[-1] for child in waiting)
    assert said == ["built", "local", "local"]
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"
    assert not list((tmp_path / "marks").iterdir())


def test_a_builder_that_hangs_delays_by_a_bound_and_one_more_goes_on_at_a_time(tmp_path):
    """Past the timeout one other builds, says whom it waited for, and stores; those behind it find that."""
    (hanging,) = builders(tmp_path, 1, 100)
    assert hanging.stdout.readline() == "building\n"
    others = builders(tmp_path, 3, 3)
    started = time.monotonic()
    for child in others:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [finish(child) for child in others]
    assert sorted(out.split()[-1] for out, _ in said) == ["built", "local", "local"]
    assert sum(out.count("building") for out, _ in said) == 1
    assert time.monotonic() - started < 60
    hanging.stdin.write("go\n")
    hanging.stdin.flush()
    assert finish(hanging)[0].split()[-1] == "built"
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"


def test_waiting_for_a_builder_that_hangs_is_logged(tmp_path, caplog):
    """The warning names the process that holds the lock and how long it was waited for."""
    (hanging,) = builders(tmp_path, 1, 100)
    assert hanging.stdout.readline() == "building\n"
    cache, _ = opened_on_gpu(tmp_path, lock_timeout_s=0.2)
    with cache:
        assert cache.plan(product()).origin == "built"
    assert f"process {hanging.pid} " in caplog.text
    hanging.kill()
    hanging.communicate()


# ---- forks ----------------------------------------------------------------------------------------------------------


def in_a_fork(do: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What a forked child's call returned; fails where it hangs or dies."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        answer: Any = None
        try:
            answer = do()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + timeout_s
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
            pytest.fail(f"the forked child was still running after {timeout_s} s")
        threading.Event().wait(0.02)
    with os.fdopen(reading) as pipe:
        return json.loads(pipe.read())


@pytest.mark.parametrize("used", [False, True])
def test_both_sides_of_a_fork_go_on(tmp_path, device, used):
    """The child hits and builds by a compiler child of its own, and the parent goes on with its own."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        assert cache.plan(convolution()).origin == "built"
        before = cache if used else PlanCache(tmp_path, device=device, strict=True)

        def child() -> list[Any]:
            planned = origins(before, HEIGHTS[:2])
            own = before._targets._of(device).builder._child.process.pid
            before.close()
            return [planned, own]

        planned, pid = in_a_fork(child)
        assert planned == ["local", "built"]
        assert not Path(f"/proc/{pid}").exists()
        builder = cache._targets._of(device).builder
        assert isinstance(builder, Compiler)
        assert builder._child is not None
        assert pid != builder._child.process.pid
        assert origins(cache, HEIGHTS) == ["memory", "local", "built"]
        assert before.plan(convolution(HEIGHTS[2])).origin == ("memory" if used else "local")
        before.close()
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        assert origins(cache, HEIGHTS) == ["local"] * 3


def locks_of(cache: PlanCache) -> list[Any]:
    """Every lock that a thread may hold while it plans."""
    from plancache import backend
    from plancache.store import database

    local, target = cache._levels.local, next(iter(cache._targets._targets.values()))
    assert local is not None
    assert local.get(bytes(32)) is None  # this thread has a reader from here on
    return [
        cache._guard, cache._report._guard, cache._levels._guard, cache._targets._guard, cache._plans._guard, target.builder._guard,
        local._guard, local._local.reader.lock, cache._single_flight()._lock(b"\0")._threads, database._MIGRATION, backend.BUILDING,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # that is what is tested
def test_a_fork_while_another_thread_holds_the_caches_locks_does_not_hang_the_child(tmp_path, device):
    """Whatever another thread held at the fork, its lock is new in the child: it hits, builds, stores and closes."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        cache.plan(convolution())
        for lock in locks_of(cache):
            held, done = threading.Event(), threading.Event()

            def hold(lock: Any = lock, held: threading.Event = held, done: threading.Event = done) -> None:
                with lock:
                    held.set()
                    done.wait()

            thread = threading.Thread(target=hold)
            thread.start()
            held.wait()

            def child() -> list[str]:
                planned = origins(cache, (14, random.Random(os.getpid()).randrange(100, 10_000)))
                cache.statistics()
                cache.close()
                return planned

            try:
                assert in_a_fork(child) == ["local", "built"]
            finally:
                done.set()
                thread.join()
        assert cache.plan(convolution()).origin == "memory"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # that is what is tested
def test_a_fork_in_the_midst_of_the_first_opening_does_not_hang_the_child(tmp_path, device, monkeypatch):
    """The upgrade of a new file holds a lock of the whole module: a child that is forked then makes the file by itself."""
    from plancache.store import database

    reached, go_on = threading.Event(), threading.Event()
    migrate, parent = database._migrate, os.getpid()

    def slowly(engine: Any) -> None:
        if os.getpid() == parent:
            reached.set()
            go_on.wait()
        migrate(engine)

    monkeypatch.setattr(database, "_migrate", slowly)
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        thread = threading.Thread(target=cache.plan, args=(convolution(),))
        thread.start()
        reached.wait()
        other = tmp_path / "other"

        def child() -> list[str]:
            with PlanCache(other, device=device, strict=True) as mine:
                return [*origins(mine, (14,)), str(mine.statistics().stored)]

        try:
            assert in_a_fork(child) == ["built", "1"]
        finally:
            go_on.set()
            thread.join()
        assert cache.plan(convolution()).origin == "memory"


# ---- crashes --------------------------------------------------------------------------------------------------------


CRASH = """
    import os, signal, sys
    from faking import opened_on_gpu, product

    cache, backend = opened_on_gpu(sys.argv[1], strict=True)
    how = {"abort": os.abort, "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}[sys.argv[3]]
    if sys.argv[2] == "build":
        backend.when_built = how
    else:
        backend.when_loaded = lambda _: how()
    with cache:
        cache.plan(product())
"""


def crash(directory: Path, phase: str, how: str = "abort") -> None:
    finish(start(CRASH, directory, phase, how), -(signal.SIGABRT if how == "abort" else signal.SIGKILL))


def test_a_graph_that_ends_two_processes_is_not_built_a_third_time_until_it_is_refreshed(tmp_path):
    """The third is told so by an error; other graphs are planned; a refresh that works lifts it for all."""
    for _ in range(2):
        crash(tmp_path, "build")
    for _ in range(2):
        cache, backend = opened_on_gpu(tmp_path, strict=True)
        with cache:
            with pytest.raises(StruckError, match=r"2 processes ended.*build: process \d+ died.*plancache rm --verdicts"):
                cache.plan(product())
            assert cache.plan(product(), build="lookup") is None
            assert cache.plan(product(2)).origin in ("built", "local")
            assert len(backend.builds) <= 1
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product(), refresh=True).origin == "built"
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert [cache.plan(product()).origin, cache.plan(product(2)).origin] == ["local", "local"]
    assert sql(tmp_path, "SELECT * FROM verdicts") == []


def test_a_struck_graph_is_built_once_the_verdict_is_lifted(tmp_path):
    """Who knows that the cause is gone takes the verdict away."""
    for _ in range(2):
        crash(tmp_path, "build")
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        with pytest.raises(StruckError) as caught:
            cache.plan(product())
        cache._levels.lift(cache._levels.verdicts(bytes.fromhex(caught.value.digest)))
        assert cache.plan(product()).origin == "built"
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"


def test_a_stored_plan_that_ends_two_processes_is_skipped_said_so_and_replaced(tmp_path):
    """The third process does not load it: it builds anew, one warning says why, and the next one hits."""
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        bad = cache.plan(product()).entry
    for _ in range(2):
        crash(tmp_path, "load")
    cache, backend = opened_on_gpu(tmp_path)
    with cache, one_warning(rf"{bad.key.hex[:16]} is skipped.*2 processes ended"):
        assert cache.plan(product()).origin == "built"
    assert bad.blob not in backend.loaded
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"
    assert bad.blob not in backend.loaded


@pytest.mark.parametrize("phase", ["build", "load"])
def test_one_kill_of_a_healthy_process_skips_nothing(tmp_path, phase):
    """The system's own killing is not cuDNN's crash: after one the plan is built and loaded as ever, and the mark is counted."""
    if phase == "load":
        cache, _ = opened_on_gpu(tmp_path, strict=True)
        with cache:
            cache.plan(product())
    crash(tmp_path, phase, "kill")
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == ("built" if phase == "build" else "local")
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert cache.plan(product()).origin == "local"


def test_a_mark_that_cannot_be_counted_now_does_not_hide_what_is_known(tmp_path):
    """A process died, and the write lock is held: what is known of other plans counts all the same, and hits are hits."""
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        bad = cache.plan(product()).entry
        cache.plan(product(2))
    for _ in range(2):
        crash(tmp_path, "load")
    cache, _ = opened_on_gpu(tmp_path, strict=True)
    with cache:
        cache.plan(product(2))  # counts the second
    finish(start(CRASH.replace("product()", "product(3)"), tmp_path, "build", "abort"), -signal.SIGABRT)
    with open(tmp_path / "write.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache, backend = opened_on_gpu(tmp_path, lock_timeout_s=0.2)
        with pytest.warns(PlancacheWarning), cache:
            assert cache.plan(product(2)).origin == "local"
            assert cache.plan(product()).origin == "built"
    assert bad.blob not in backend.loaded
    cache, backend = opened_on_gpu(tmp_path)
    with cache, pytest.warns(PlancacheWarning, match="is skipped"):
        assert cache.plan(product()).origin == "built"
    assert sql(tmp_path, "SELECT count(*) FROM verdicts WHERE kind = 'struck'") == [(1,)]  # that of the third graph


# ---- unsupported ----------------------------------------------------------------------------------------------------

HOPELESS = Constraints(required_behavior_notes=("REQUIRES_FILTER_INT8x32_REORDER",))

ASKS_IN_VAIN = """
    import sys
    import cudnn
    from faking import opened_on_gpu, product

    cache, backend = opened_on_gpu(sys.argv[1], strict=True)

    def refuse():
        print("asked", flush=True)
        raise cudnn.cudnnGraphNotSupportedError("no engine of mine")

    backend.when_built = refuse
    print("ready", flush=True)
    sys.stdin.readline()
    with cache:
        try:
            cache.plan(product())
        except cudnn.cudnnGraphNotSupportedError as error:
            print("told", error, flush=True)
"""


def test_eight_processes_find_out_once_that_a_graph_is_not_supported(tmp_path):
    """cuDNN is asked by one; all of them get its own error."""
    children = [start(ASKS_IN_VAIN, tmp_path) for _ in range(8)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = "".join(finish(child)[0] for child in children)
    assert (said.count("asked"), said.count("told no engine of mine")) == (1, 8)


def test_that_a_graph_is_not_supported_is_found_out_anew_by_a_refresh(opened, tmp_path):
    """Without a GPU too, real cuDNN's answer is kept for later processes; a refresh asks again."""
    import cudnn

    with opened(tmp_path, strict=True) as cache, pytest.raises(cudnn.cudnnGraphNotSupportedError) as first:
        cache.plan(matmul(), constraints=HOPELESS)
    asked: list[int] = []
    with opened(tmp_path, strict=True) as cache:
        build = cache._targets.current().builder.build
        counted = type("Counted", (), {"build": lambda *given: (asked.append(1), build(*given[1:]))[1], "close": lambda _: None})
        cache._targets.current().builder = counted()
        with pytest.raises(cudnn.cudnnGraphNotSupportedError) as second:
            cache.plan(matmul(), constraints=HOPELESS)
        assert (str(second.value), asked) == (str(first.value), [])
        with pytest.raises(cudnn.cudnnGraphNotSupportedError):
            cache.plan(matmul(), constraints=HOPELESS, refresh=True)
        assert asked == [1]
        assert cache.plan(matmul()).origin == "built"


@pytest.mark.parametrize("message", ["CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "cudaErrorIllegalAddress"])
def test_out_of_memory_is_not_taken_for_unsupported(tmp_path, message):
    """It passes through as cuDNN says it, nothing is kept of it, and the next call builds."""
    import cudnn

    cache, backend = opened_on_gpu(tmp_path, strict=True)

    def fail() -> None:
        raise cudnn.cudnnGraphNotSupportedError(message)

    with cache:
        backend.when_built = fail
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=message):
            cache.plan(product())
        assert cache._levels.local.verdicts() == []
        backend.when_built = lambda: None
        assert cache.plan(product()).origin == "built"


def test_what_is_not_supported_without_a_gpu_may_be_with_one(opened, tmp_path):
    """A GPU of the same kind asks for itself; the device-less answer goes on binding device-less builds only."""
    import cudnn

    def ask(cache: PlanCache) -> Any:
        return cache.plan(matmul(), constraints=HOPELESS)

    with opened(tmp_path, strict=True) as cache, pytest.raises(cudnn.cudnnGraphNotSupportedError):
        ask(cache)
    assert [kind for (kind,) in sql(tmp_path, "SELECT kind FROM verdicts")] == ["unsupported without a GPU"]
    cache, backend = opened_on_gpu(tmp_path, strict=True)
    with cache:
        assert ask(cache).origin == "built"
        assert len(backend.builds) == 1
    with opened(tmp_path, strict=True) as cache:
        assert ask(cache).origin == "local"


# ---- the clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-40 * 365 * 86400.0, 40 * 365 * 86400.0, -1.0, float(-(1 << 33))])
def test_a_clock_that_is_set_changes_nothing(opened, directory, jump_s, monkeypatch, capsys):
    """Set back or forward between store, hit and listing: hits are hits, uses are counted, and listings show them."""
    keys = keys_of(opened, directory)
    real = time.time
    for shift in (jump_s, 0.0, -jump_s):
        monkeypatch.setattr(time, "time", lambda shift=shift: max(0.0, real() + shift))
        with opened(directory, strict=True) as cache:
            assert origins(cache) == ["local", "local"]
            assert len(cache.entries()) == 2
        for arguments in commands(directory, keys[0]):
            assert main(arguments) == 0
            assert keys[0].hex()[:12] in capsys.readouterr().out
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + jump_s))
    with opened(directory, strict=True) as cache:
        assert cache.plan(convolution(), refresh=True).origin == "built"  # an older time is no worse entry
    monkeypatch.undo()
    assert_hits(opened, directory)
    assert {listed[0] for listed in sql(directory, "SELECT hits FROM uses")} >= {4}


# ---- interrupts and ends --------------------------------------------------------------------------------------------


INTERRUPTED = """
    import json, sys
    from plancache import Device, PlanCache, graphs

    def five():
        return [graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=height, width=14).graph for height in range(7, 12)]

    device, through = Device.from_file("h200"), False
    print("begins", flush=True)
    try:
        with PlanCache(sys.argv[1], device=device, strict=True) as cache:
            while True:
                for graph in five():
                    cache.plan(graph, refresh=True)
                print("round", flush=True)
    except KeyboardInterrupt:
        through = True
    with PlanCache(sys.argv[1], device=device, strict=True, lock_timeout_s=20) as cache:  # this process goes on
        print(json.dumps([through, [cache.plan(graph).origin for graph in five()]]), flush=True)
"""


def test_ctrl_c_at_any_moment_leaves_no_lock_and_a_good_store(tmp_path, opened, scale):
    """KeyboardInterrupt comes through to the caller; that process plans on, and so does the next one."""
    chance = random.Random(os.urandom(8))
    for _ in range(scale(4, 20)):
        child = start(INTERRUPTED, tmp_path)
        assert child.stdout.readline() == "begins\n"
        threading.Event().wait(chance.uniform(0, 4))
        os.kill(child.pid, signal.SIGINT)
        out, err = finish(child)
        through, planned = json.loads(out.splitlines()[-1])
        assert through, err
        assert set(planned) <= {"built", "local"}
        assert "Traceback" not in err
        assert sql(tmp_path, "PRAGMA integrity_check") == [("ok",)]
        for path in [tmp_path / "write.lock", *(tmp_path / "locks").iterdir()]:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with opened(tmp_path, strict=True, build="forbid") as cache:
        sizes = range(7, 12)
        found = [graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=size, width=14).graph for size in sizes]
        assert [cache.plan(graph).origin for graph in found] == ["local"] * 5


LEFT_OPEN = """
    import gc, json, os, sys
    from plancache import Device, PlanCache, graphs

    graph = graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=14, width=14).graph
    other = graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=28, width=14).graph
    cache = PlanCache(sys.argv[1], device=Device.from_file("h200"), strict=True)
    plans = [cache.plan(graph), cache.plan(other, refresh=True), cache.plan(graph)]
    child = cache._targets.current().builder._child
    print(json.dumps([[plan.origin for plan in plans], child.process.pid, child.folder]), flush=True)
    if sys.argv[2] == "dropped":
        del cache, plans, child
        gc.collect()
        print(json.dumps("alive"), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("way", ["dropped", "exit"])
def test_a_cache_that_nobody_closes_ends_its_child_and_writes_its_counts(directory, opened, way):
    """Dropped, or at a process's end: no child, no folder, no slot file is left, the use is counted, nothing is said on stderr."""
    opening = start(LEFT_OPEN, directory, way, PYTHONDEVMODE="1")
    planned, pid, folder = json.loads(opening.stdout.readline())
    assert planned == ["local", "built", "memory"]
    if way == "dropped":
        assert opening.stdout.readline() == '"alive"\n'
        assert not Path(f"/proc/{pid}").exists()
    _, err = finish(opening)
    assert err == ""
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(folder).exists()
    mine, _ = keys_of(opened, directory)
    assert sql(directory, "SELECT hits FROM uses WHERE key = ?", mine) == [(1,)]
    assert not (directory / "marks").exists() or not list((directory / "marks").iterdir())
    assert_hits(opened, directory)


def test_the_log_has_one_line_that_sums_up_at_exit(directory):
    """`PLANCACHE_LOG=info`: one summary, at the end, on stderr, however the cache ended."""
    for way in ("dropped", "exit"):
        opening = start(LEFT_OPEN, directory, way, PLANCACHE_LOG="info")
        _, err = finish(opening)
        assert len(re.findall(r"2 hits \(1 stored, 0 sealed\), 1 builds in .* saved$", err, re.MULTILINE)) == 1, err
        assert "Traceback" not in err
        assert "WARNING" not in err


def test_dropping_a_cache_here_ends_its_child(directory, device):
    """A cache that goes out of scope in a program that lives on takes its compiler child with it."""
    cache = PlanCache(directory, device=device, strict=True)
    assert cache.plan(convolution(HEIGHTS[2])).origin == "built"
    builder = cache._targets.current().builder
    assert isinstance(builder, Compiler)
    assert builder._child is not None
    process = builder._child.process
    del cache
    gc.collect()
    assert process.poll() is not None
