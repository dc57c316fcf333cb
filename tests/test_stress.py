"""Many at once, killed at any moment, and changed in any bit: one build a graph, nothing lost, nothing wrong loaded."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faking import MadeUp, finish, opened_on_gpu, product, start
from samples import make_entry

from plancache import Device, PlanCache, graphs
from plancache.entry import Entry, Row, unpack
from plancache.key import COMPONENTS, PlanKey
from plancache.store.database import SELECT_ENTRY, Database

pytestmark = pytest.mark.stress

Scale = Callable[[int, int], int]
FILE = "plans-1.sqlite3"
LOCK_TIMEOUT_S = 60.0


def sql(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def crowd(count: int) -> list[Any]:
    """Graphs of several kinds, more than half of them convolutions that are built in milliseconds."""
    kinds = list(graphs.mixed(max(1, count * 2 // 5)))
    small = [graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=7 + i, width=14) for i in range(count - len(kinds))]
    return [example.graph for example in kinds + small]


# ---- many at once ---------------------------------------------------------------------------------------------------

CROWD = """
    import json, random, sys
    from test_stress import crowd
    from plancache import Device, PlanCache

    asked = crowd(int(sys.argv[2]))
    if int(sys.argv[3]) % 2:
        random.shuffle(asked)
    print("ready", flush=True)
    sys.stdin.readline()
    with PlanCache(sys.argv[1], device=Device.from_file("h200"), strict=True) as cache:
        origins = [cache.plan(graph).origin for graph in asked]
        print(json.dumps([origins, cache.statistics().builds]))
"""


def test_a_crowd_of_processes_makes_one_build_a_graph(tmp_path: Path, scale: Scale) -> None:
    """Half of them ask in one order, half in any: one build a graph in all, the first opening included, and no error."""
    count, processes = scale(4, 20), scale(8, 16)
    children = [start(CROWD, tmp_path, count, number) for number in range(processes)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [json.loads(finish(child, timeout_s=900)[0].splitlines()[-1]) for child in children]
    assert sum(builds for _, builds in said) == count
    assert Counter(origin for origins, _ in said for origin in origins) == {"built": count, "local": count * (processes - 1)}
    assert sql(tmp_path / FILE, "SELECT count(*) FROM entries") == [(count,)]


def test_a_crowd_of_threads_makes_one_build_a_graph(tmp_path: Path, device: Device, scale: Scale) -> None:
    """The same between threads of one process."""
    count, threads = scale(4, 20), 64
    asked = [crowd(count) for _ in range(threads)]
    origins: list[str] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(threads)
    with PlanCache(tmp_path, device=device, strict=True) as cache:

        def ask(described: list[Any]) -> None:
            try:
                barrier.wait()
                origins.extend([cache.plan(graph).origin for graph in described])
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=ask, args=(described,)) for described in asked]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert failures == []
        assert cache.statistics().builds == count
    assert Counter(origins) == {"built": count, "memory": count * (threads - 1)}


# ---- kill -9 --------------------------------------------------------------------------------------------------------


def put_for_ever(directory: Path, report: Callable[[str, bytes], None]) -> None:
    """Stores made-up entries, one after the other, each under a key of its own."""
    database = Database(directory / FILE, lock_timeout_s=LOCK_TIMEOUT_S)
    while True:
        blob = random.randbytes(random.randrange(1_000, 200_000))
        entry = make_entry(key=PlanKey((os.urandom(16), *[b""] * (len(COMPONENTS) - 1))), blob=blob)
        database.put(entry)
        report(entry.key.hex, blob)


def plan_for_ever(directory: Path, report: Callable[[str, bytes], None]) -> None:
    """Opens, plans anew what is stored, and closes, again and again, as a program on a GPU."""
    while True:
        cache, _ = opened_on_gpu(directory, strict=True, lock_timeout_s=LOCK_TIMEOUT_S)
        with cache:
            for size in random.sample(range(1, 9), 4):
                plan = cache.plan(product(size), refresh=True)
                assert plan.entry is not None
                report(plan.entry.key.hex, b"")


class Writer(NamedTuple):
    pid: int
    pipe: int
    ends_at: float


def forked(write: Callable[[Path, Callable[[str, bytes], None]], None], directory: Path, chance: random.Random) -> Writer:
    """A process that writes until it is killed; it says what was stored, or what went wrong, after the fact."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Writer(pid, reading, time.monotonic() + chance.expovariate(1.5))
    try:
        last = time.monotonic()

        def report(key: str, blob: bytes) -> None:
            nonlocal last
            took, last = time.monotonic() - last, time.monotonic()
            what = "late" if took > LOCK_TIMEOUT_S else "stored"
            os.write(writing, f"{what} {key} {hashlib.sha256(blob).hexdigest()}\n".encode())

        random.seed(os.urandom(8))
        write(directory, report)
    except BaseException as error:
        os.write(writing, f"failed {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def killed(write: Callable[[Path, Callable[[str, bytes], None]], None], directory: Path, kills: int) -> list[list[str]]:
    """What three writers at a time said before each was killed, until so many were."""
    chance = random.Random(os.urandom(8))
    said: list[list[str]] = []
    cache, _ = opened_on_gpu(directory.with_name("before"), strict=True)
    with cache:
        cache.plan(product())  # all is imported before the first fork, and writers are at work at once
    running = [forked(write, directory, chance) for _ in range(3)]
    for _ in range(kills * 20):
        writer = min(running, key=lambda one: one.ends_at)
        running.remove(writer)
        said += lines_until(writer)
        kills -= 1
        if kills > 2 or (kills > -200 and not said):  # on a busy machine the first ones die before they say anything
            running.append(forked(write, directory, chance))
        if not running:
            break
    return said


def lines_until(writer: Writer) -> list[list[str]]:
    """Reads what a writer says until its time has come, kills it, and reads the rest."""
    killer = threading.Timer(max(0.0, writer.ends_at - time.monotonic()), os.kill, (writer.pid, signal.SIGKILL))
    killer.start()
    with os.fdopen(writer.pipe) as pipe:
        said = [line.split() for line in pipe]
    killer.join()
    os.waitpid(writer.pid, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # a timer's thread, in between
def test_what_was_stored_outlives_kill_9_of_its_writers(tmp_path: Path, scale: Scale) -> None:
    """Every entry that a writer called stored is there, whole, whenever it or another one was killed; nobody waited long."""
    said = killed(put_for_ever, tmp_path, scale(25, 300))
    assert {line[0] for line in said} == {"stored"}, [line for line in said if line[0] != "stored"]
    assert len(said) > scale(5, 300)
    assert sql(tmp_path / FILE, "PRAGMA integrity_check") == [("ok",)]
    with closing(Database(tmp_path / FILE, lock_timeout_s=5)) as database:
        for _, key, digest in said:
            row = database.get(bytes.fromhex(key))
            assert row is not None
            assert hashlib.sha256(unpack(row).blob).hexdigest() == digest
        for listed in database.listing():
            row = database.get(listed.key)
            assert row is not None
            unpack(row)  # what was stored and not told is whole too
        assert database.put(make_entry())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_caches_that_are_killed_harm_no_other(tmp_path: Path, scale: Scale) -> None:
    """Whole caches, from opening to closing, killed at any moment: what they stored hits, and no lock is left."""
    said = killed(plan_for_ever, tmp_path, scale(12, 150))
    assert {line[0] for line in said} == {"stored"}, [line for line in said if line[0] != "stored"]
    assert sql(tmp_path / FILE, "PRAGMA integrity_check") == [("ok",)]
    stored = {key for _, key, _ in said}
    cache, backend = opened_on_gpu(tmp_path, strict=True, lock_timeout_s=1)
    with cache:
        plans = [cache.plan(product(size), refresh=cache.plan(product(size), build="lookup") is None) for size in range(1, 9)]
        found = {plan.entry.key.hex for plan in plans if plan.entry and plan.origin != "built"}
        assert stored <= found
        assert all(plan.entry and plan.entry.blob in (*backend.loaded, *backend.builds) for plan in plans)


WRITER = """
    import random, sys
    from test_stress import crowd
    from plancache import Device, PlanCache

    print("begins", flush=True)
    with PlanCache(sys.argv[1], device=Device.from_file("h200"), strict=True) as cache:
        for graph in random.sample(crowd(8), 8):
            print(cache.plan(graph).entry.key.hex, flush=True)
"""


def test_builders_that_are_killed_lose_nothing_that_they_handed_out(tmp_path: Path, device: Device, scale: Scale) -> None:
    """Real builds, two processes at a time on one new directory: each plan that was handed out is a hit afterwards."""
    chance, told = random.Random(os.urandom(8)), set()
    for _ in range(scale(2, 15)):
        pair: list[subprocess.Popen[str]] = [start(WRITER, tmp_path) for _ in range(2)]
        for child in pair:
            assert child.stdout is not None
            assert child.stdout.readline() == "begins\n"
        for child in pair:
            threading.Event().wait(chance.uniform(0, 4))
            child.kill()
        for child in pair:
            out, err = child.communicate()
            assert err == ""
            told |= {line for line in out.splitlines() if len(line) == 64}
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        plans = [cache.plan(graph) for graph in crowd(8)]
        hits = {plan.entry.key.hex for plan in plans if plan.entry and plan.origin == "local"}
        assert told <= hits
    assert sql(tmp_path / FILE, "PRAGMA integrity_check") == [("ok",)]


# ---- changed bits ---------------------------------------------------------------------------------------------------


class Recording(MadeUp):
    """Records each blob that it is asked to load with its key."""

    asked: list[tuple[bytes, bytes]]

    def load(self, entry: Entry) -> object:
        self.asked = [*getattr(self, "asked", []), (entry.key.digest, entry.blob)]
        return super().load(entry)


def opened(directory: Path, **options: Any) -> tuple[PlanCache, Recording]:
    cache, plain = opened_on_gpu(directory, **options)
    recording = Recording(plain)  # type: ignore[arg-type]  # it has the two facts that are taken over
    target = cache._targets.current()
    target.backend = target.builder = recording  # type: ignore[assignment]
    return cache, recording


class Pristine(NamedTuple):
    """A database of made-up plans: its bytes, the graphs, and each blob by key in the order of the graphs."""

    data: bytes
    graphs: list[Any]
    blobs: dict[bytes, bytes]


def pristine(directory: Path, count: int) -> Pristine:
    asked = [product(size) for size in range(1, count + 1)]
    cache, _ = opened(directory, strict=True)
    with cache:
        plans = [cache.plan(graph) for graph in asked]
        blobs = {plan.entry.key.digest: plan.entry.blob for plan in plans if plan.entry}
    sql(directory / FILE, "PRAGMA wal_checkpoint(TRUNCATE)")
    assert sql(directory / FILE, "SELECT count(*) FROM entries") == [(count,)]
    return Pristine((directory / FILE).read_bytes(), asked, blobs)


def renewed(directory: Path, data: bytes) -> Path:
    """A directory that holds a database with these bytes and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    (directory / FILE).write_bytes(data)
    return directory


def flipped(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


DERIVED = ("quality = 0", "build_s = build_s + 1e9", "created_at = -created_at")  # never lets a worse entry win a look-up


def change_a_row(connection: sqlite3.Connection, key: bytes, chance: random.Random) -> str:
    """Changes one bit of a row, or cuts it short, or changes what is derived; returns which column."""
    column = chance.choice(["key", "preimage", "facts", "payload", "payload", "payload", "checksum", "derived"])
    if column == "derived":
        connection.execute(f"UPDATE entries SET {chance.choice(DERIVED)} WHERE key = ?", (key,))
        return column
    (value,) = connection.execute(f"SELECT {column} FROM entries WHERE key = ?", (key,)).fetchone()
    changed = flipped(value, chance) if chance.random() < 0.75 else value[: chance.randrange(len(value))]
    connection.execute(f"UPDATE entries SET {column} = ? WHERE key = ?", (changed, key))
    return column


@pytest.mark.filterwarnings("ignore::plancache.errors.PlancacheWarning")
def test_no_changed_row_reaches_the_device(tmp_path: Path, scale: Scale) -> None:
    """Bits flipped and values cut short in any column: every change is found, and the next process finds all plans."""
    chance, rows = random.Random(os.urandom(8)), 50
    original = pristine(tmp_path / "pristine", rows)
    changes: Counter[str] = Counter()
    for _ in range(scale(400, 10_000) // rows):
        directory = renewed(tmp_path / "changed", original.data)
        with closing(sqlite3.connect(directory / FILE)) as connection, connection:
            columns = [change_a_row(connection, key, chance) for key in original.blobs]
        cache, recording = opened(directory)
        with cache:
            origins = [cache.plan(graph).origin for graph in original.graphs]
            assert cache.statistics().faults["corrupt"] == sum(column not in ("key", "derived") for column in columns)
        assert origins == ["local" if column == "derived" else "built" for column in columns]
        assert [one for one in recording.asked if one[1] not in recording.builds] == [
            item for item, column in zip(original.blobs.items(), columns, strict=True) if column == "derived"
        ]
        cache, _ = opened(directory, strict=True)
        with cache:
            assert {cache.plan(graph).origin for graph in original.graphs} == {"local"}
        changes.update(columns)
    assert changes.keys() == {"key", "preimage", "facts", "payload", "checksum", "derived"}


def change_the_file(data: bytes, chance: random.Random) -> bytes:
    """One bit flipped, in most cases; else cut short, or a page or a sector of it overwritten."""
    way, at = chance.random(), chance.randrange(len(data))
    if way < 0.7:
        return flipped(data, chance)
    if way < 0.85:
        return data[:at]
    size = chance.choice((512, 4096))
    start_of = at // size * size
    filler = chance.choice((bytes(size), b"\xff" * size, chance.randbytes(size)))
    return data[:start_of] + filler[: len(data) - start_of] + data[start_of + size :]


@pytest.mark.filterwarnings("ignore::plancache.errors.PlancacheWarning")
def test_no_changed_page_reaches_the_device(tmp_path: Path, scale: Scale) -> None:
    """Damage anywhere in the file: right plans, no other exception, and a store that hits again or says that it cannot be used."""
    chance = random.Random(os.urandom(8))
    original = pristine(tmp_path / "pristine", 10)
    outcomes: Counter[str] = Counter()
    for _ in range(scale(60, 1_000)):
        data = change_the_file(original.data, chance)
        directory = renewed(tmp_path / "changed", data)
        cache, recording = opened(directory)
        with cache:
            plans = [cache.plan(graph) for graph in original.graphs]
            said = set(cache.statistics().faults)
        foreign = [one for one in recording.asked if one[1] not in recording.builds]
        assert set(foreign) <= set(original.blobs.items())
        assert all(plan.origin in ("built", "local") for plan in plans)
        for _ in range(1 + ("damaged" in said)):  # what was found in a file before it was put aside is not in the new one
            cache, _ = opened(directory)
            with cache:
                after = {cache.plan(graph).origin for graph in original.graphs}
                faults = dict(cache.statistics().faults)
        assert after == {"local"} or faults, (said, after)
        built = sum(plan.origin == "built" for plan in plans)
        ended = "hits again" if after == {"local"} else f"not to be used: {sorted(faults)}"
        outcomes[f"{'unharmed' if not built else 'put aside' if 'damaged' in said else 'built anew'}, {ended}"] += 1
    print(dict(outcomes))
    assert sum(number for outcome, number in outcomes.items() if outcome.startswith("unharmed")) > 0
    assert sum(number for outcome, number in outcomes.items() if outcome.endswith("hits again")) > scale(60, 1_000) * 0.9


@pytest.mark.filterwarnings("ignore::plancache.errors.PlancacheWarning")
def test_what_was_changed_is_built_anew_by_cudnn(tmp_path: Path, device: Device, scale: Scale) -> None:
    """The same with real builds: each changed row is built anew, stored, and a hit for the next process."""
    chance, count = random.Random(os.urandom(8)), scale(3, 50)
    asked = [graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=7 + i, width=14).graph for i in range(count)]
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        keys = [plan.entry.key.digest for graph in asked if (plan := cache.plan(graph)).entry]
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        columns = [change_a_row(connection, key, chance) for key in keys]
    with PlanCache(tmp_path, device=device) as cache:
        expected = ["local" if column == "derived" else "built" for column in columns]
        assert [cache.plan(graph).origin for graph in asked] == expected
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        assert {cache.plan(graph).origin for graph in asked} == {"local"}
    for key in keys:
        unpack(Row(*sql(tmp_path / FILE, SELECT_ENTRY, key)[0]))
