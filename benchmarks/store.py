"""A store of 100,000 entries: fetching from it beside one of 10, and a prune to half of it while 8 processes read.

The databases are made in one transaction each, from rows that `pack` made: seeded noise that leaves 20 kB of each 75 kB
plan, with build times that differ. 100,000 rows take 2.8 GB and about a minute.

Each reader looks an entry up, checks and unpacks it, and rests for 2 ms, which is 300 a second: more readers than
processors that never rest measure how long each waits for a processor. The same is measured before the prune.
"""

from __future__ import annotations

import os
import random
import select
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Figure

ENTRIES = 100_000
NOISE_BYTES, BLOB_BYTES = 20_000, 75_000  # plans compress 3.7 times
READERS = 8
REST_S = 0.002
ALONE_S = 5.0
"""Seconds that the readers are measured before the prune begins."""


def measure(directory: Path, rounds: int, *, entries: int = ENTRIES) -> list[Figure]:
    """Fetch-check-unpack from a large store beside a small one, a scan, and a prune of half of it beside readers."""
    sample = _sample(directory / "sample")
    few, many = directory / "few.sqlite3", directory / "many.sqlite3"
    make_store(few, sample, 10)
    started = time.perf_counter()
    make_store(many, sample, entries)
    made = Figure(f"making a store of {entries:,}", time.perf_counter() - started, "s", None, f"{many.stat().st_size / 1e9:.2f} GB")
    return [*_fetch(few, many, sample, entries, rounds), *_look(many, entries), *_prune(many, entries), made]


# ---- making stores --------------------------------------------------------------------------------------------------


def _sample(directory: Path) -> Any:
    from plancache import Device, PlanCache, graphs

    with PlanCache(directory, device=Device.from_file("h200"), strict=True) as cache:
        return cache.plan(graphs.conv_bias_relu(batch=8, in_channels=64, out_channels=64, height=28, width=28).graph).entry


def make_keys(sample: Any, count: int) -> Iterator[Any]:
    """Keys of `count` entries, all alike but for their signatures."""
    from plancache.key import PlanKey

    first, *others = sample.key.preimages
    for number in range(count):
        yield PlanKey((first + b"%d" % number, *others))


def make_store(path: Path, sample: Any, count: int) -> None:
    """A database of `count` entries in the form that the cache writes it in."""
    from plancache.entry import QUALITIES, pack
    from plancache.store.database import Database

    database = Database(path, lock_timeout_s=60)
    database.upgrade()
    database.close()
    noise = random.Random(count)

    def rows() -> Iterator[tuple[Any, ...]]:
        for number, key in enumerate(make_keys(sample, count)):
            blob = noise.randbytes(NOISE_BYTES) + bytes(BLOB_BYTES - NOISE_BYTES)
            entry = replace(sample, key=key, blob=blob, timings_s={"build": noise.uniform(0.01, 10)}, created_at=1e9 + number)
            yield (*pack(entry), QUALITIES.index(entry.quality), entry.build_s, entry.created_at)

    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA journal_mode = OFF")  # nobody else is here, and a crash costs a minute
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows())
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
    _settle(path)


def _settle(path: Path) -> None:
    """The file is on the disk, and in the page cache as well."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while file.read(1 << 24):
            pass


# ---- fetching and scanning ------------------------------------------------------------------------------------------


def _fetch(few: Path, many: Path, sample: Any, entries: int, rounds: int) -> list[Figure]:
    """One look-up in each database in turn, of keys in random order."""
    from plancache.entry import unpack
    from plancache.store.database import Database

    databases = {path: Database(path, lock_timeout_s=60) for path in (few, many)}
    order = random.Random(1)
    keys = {few: list(make_keys(sample, 10)), many: order.sample(list(make_keys(sample, entries)), min(entries, 1500 * rounds))}
    times_us: dict[Path, list[float]] = {few: [], many: []}
    for number in range(1500 * rounds):
        for path, database in databases.items():
            key = keys[path][number % len(keys[path])]
            digest = key.digest
            started = time.perf_counter()
            row = database.get(digest)
            assert row is not None
            unpack(row, key)
            times_us[path].append((time.perf_counter() - started) * 1e6)
    for database in databases.values():
        database.close()
    small, large = (_Percentiles.of(times_us[path]) for path in (few, many))
    name = f"fetch, check, unpack 75 kB: {entries:,} entries"
    return [
        Figure(f"{name} / 10 entries, p50", large.p50 / small.p50, "x", "<= 1.3", f"{len(times_us[many])} each, in turn, page cache warm"),
        Figure(f"{name}, p50", large.p50, "us", "<= 250", f"10 entries: {small.p50:.0f} us"),
        Figure(f"{name}, p99", large.p99, "us", "<= 2000", f"10 entries: {small.p99:.0f} us"),
    ]


def _look(path: Path, entries: int) -> list[Figure]:
    """A scan of all rows and a choice among them; and the look whether there is too much, which every store may cost."""
    from plancache.store.database import Database
    from plancache.store.retention import choose, retain, scan

    database = Database(path, lock_timeout_s=60)
    started = time.perf_counter()
    stored = scan(database)
    scanned = time.perf_counter()
    choose(stored, max_bytes=sum(one.size_bytes for one in stored) // 2, now=time.time())
    chosen = time.perf_counter()
    looks_us = []
    for _ in range(2000):
        before = time.perf_counter()
        retain(database, 1 << 50)
        looks_us.append((time.perf_counter() - before) * 1e6)
    database.close()
    return [
        Figure(f"scan of {entries:,} entries", scanned - started, "s"),
        Figure("choosing half of them", chosen - scanned, "s"),
        Figure("retain() with nothing to do, p50", _Percentiles.of(looks_us).p50, "us", "<= 50"),
    ]


class _Percentiles(NamedTuple):
    p50: float
    p99: float
    p999: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> _Percentiles:
        ordered = sorted(values)
        return cls(*(ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99, 0.999, 1)))


# ---- pruning beside readers -----------------------------------------------------------------------------------------


def _prune(path: Path, entries: int) -> list[Figure]:
    from plancache.store.database import Database
    from plancache.store.retention import choose, remove, scan

    database = Database(path, lock_timeout_s=60)
    stored = scan(database)
    removal = choose(stored, max_bytes=sum(one.size_bytes for one in stored) // 2, now=time.time())
    going = {one.key for one in removal.chosen}
    staying = path.with_name("staying.keys")
    staying.write_bytes(b"".join(one.key for one in stored if one.key not in going))
    before_bytes, most_wal_bytes = path.stat().st_size, 0
    wal = path.with_name(path.name + "-wal")

    def watch(_: bytes) -> bool:
        nonlocal most_wal_bytes
        most_wal_bytes = max(most_wal_bytes, wal.stat().st_size)
        return False

    with _reading(path, staying) as finish:
        alone_from = time.monotonic()
        time.sleep(ALONE_S)
        prune_from = time.monotonic()
        removed = remove(database, removal, skip=watch)
        prune_to = time.monotonic()
        looks = finish()
    database.close()
    alone, beside = looks.between(alone_from, prune_from), looks.between(prune_from, prune_to)
    after_bytes, seconds = path.stat().st_size, prune_to - prune_from
    assert len(removed.entries) == len(removal.chosen)
    rate = f"{len(alone) / ALONE_S:,.0f} look-ups a second before, {len(beside) / seconds:,.0f} meanwhile"
    name = f"prune beside {READERS} readers"
    a, b = _Percentiles.of(alone), _Percentiles.of(beside)
    return [
        Figure(f"{name}: a reader's look-up, p99", b.p99, "ms", "<= 20", f"before it {a.p99:.1f} ms; {rate}"),
        Figure(f"{name}: a reader's look-up, p50", b.p50, "ms", None, f"before it {a.p50:.2f} ms"),
        Figure(f"{name}: a reader's look-up, p99.9", b.p999, "ms", None, f"before it {a.p999:.1f} ms; the longest {b.most:.0f} ms"),
        Figure(f"{name}: readers' errors and misses", looks.faults, "", "<= 0"),
        Figure(
            f"{name}: of the file / of the rows removed",
            (before_bytes - after_bytes) / removed.freed_bytes,
            "x",
            ">= 1",
            f"{before_bytes / 1e9:.2f} to {after_bytes / 1e9:.2f} GB",
        ),
        Figure(
            f"{name}: half of {entries:,}", seconds, "s", None, f"{os.cpu_count()} processors; WAL {most_wal_bytes / 1e6:.0f} MB at most"
        ),
    ]


class _Looks:
    """Look-ups of all readers: when each began, and its milliseconds."""

    def __init__(self) -> None:
        self.began, self.took_ms, self.faults = array("d"), array("d"), 0

    def between(self, start: float, end: float) -> list[float]:
        return [took for began, took in zip(self.began, self.took_ms, strict=True) if start <= began < end]


@contextmanager
def _reading(path: Path, staying: Path) -> Iterator[Callable[[], _Looks]]:
    """Readers that are under way; the call given ends them and returns what they measured."""
    command = [sys.executable, "-m", "benchmarks.store", "read", str(path), str(staying)]
    readers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for number in range(READERS)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        yield partial(_finish, readers, path.parent)
    finally:
        for reader in readers:
            if reader.poll() is None:
                reader.kill()
            reader.communicate()


def _finish(readers: list[subprocess.Popen[str]], folder: Path) -> _Looks:
    looks = _Looks()
    for number, reader in enumerate(readers):
        faults, _ = reader.communicate("stop\n")
        assert reader.returncode == 0
        looks.faults += int(faults)
        measured = array("d", (folder / f"{number}.looks").read_bytes())
        looks.began += measured[0::2]
        looks.took_ms += measured[1::2]
    return looks


def _read(path: Path, staying: Path, number: int) -> None:
    """Looks up entries that stay, in random order, until a line comes; prints how many were missing or raised."""
    from plancache.entry import unpack
    from plancache.errors import PlancacheError
    from plancache.store.database import Database

    database = Database(path, lock_timeout_s=60)
    digests = staying.read_bytes()
    order, looks, faults = random.Random(number), array("d"), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        at = order.randrange(len(digests) // 32) * 32
        began = time.monotonic()
        try:
            row = database.get(digests[at : at + 32])
            if row is None:
                raise LookupError("an entry that stays is missing")
            unpack(row)
        except (PlancacheError, LookupError) as error:
            print(error, file=sys.stderr)
            faults += 1
        looks.extend((began, (time.monotonic() - began) * 1e3))
        if len(looks) == 200:  # imports and the first pages are not what is measured
            print("reading", flush=True)
        time.sleep(REST_S)
    path.with_name(f"{number}.looks").write_bytes(looks.tobytes())
    print(faults)


if __name__ == "__main__":
    assert sys.argv[1] == "read"
    _read(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
