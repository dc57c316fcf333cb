"""A store of 100,000 entries: fetching from it beside one of 10, and a prune to half of it while 8 processes read.

The databases are made in one transaction each, from rows that `pack` made: seeded noise that leaves about 20 kB of each
75 kB plan, with build times and ages that differ. 100,000 rows take about 2.8 GB and a minute.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

NOISE_BYTES, BLOB_BYTES = 20_000, 75_000  # plans compress 3.7 times


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
            blob = noise.randbytes(NOISE_BYTES)
            blob += bytes(BLOB_BYTES - len(blob))
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
