"""What needs no GPU: importing, a repeated request, fetching an entry."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.report import Figure, in_fresh_process, per_call_us


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Import time, a repeated `plan` of a three-node graph, and fetch-check-unpack of a 75 kB entry."""
    imports = [float(in_fresh_process("benchmarks.anywhere", "import")) for _ in range(max(5, rounds))]
    return [
        Figure("import plancache", statistics.median(imports), "ms", "<= 20"),
        *_repeated(directory / "repeated", rounds),
        *_fetch(directory / "fetch"),
    ]


def _repeated(directory: Path, rounds: int) -> list[Figure]:
    from plancache import Device, PlanCache, graphs

    with PlanCache(directory, device=Device.from_file("h200"), strict=True) as cache:
        graph = graphs.conv_bias_relu(batch=8, in_channels=64, out_channels=64, height=28, width=28).graph
        cache.plan(graph)
        batches = [per_call_us(lambda: cache.plan(graph)) for _ in range(rounds * 3)]
    return [
        Figure("repeated plan() of a three-node graph", statistics.median(batches), "us", "<= 200", f"best batch {min(batches):.0f} us")
    ]


def _fetch(directory: Path, count: int = 10) -> list[Figure]:
    """Entries of 75 kB that compress as plans do (3.7 times), read by their keys in turn."""
    from dataclasses import replace

    from plancache import Device, PlanCache, graphs
    from plancache.entry import unpack
    from plancache.key import PlanKey
    from plancache.store.database import Database

    with PlanCache(directory, device=Device.from_file("h200"), strict=True) as cache:
        entry = cache.plan(graphs.conv_bias_relu(batch=8, in_channels=64, out_channels=64, height=28, width=28).graph).entry
    database = Database(directory / "fetch.sqlite3", lock_timeout_s=60)
    keys = []
    for number in range(count):
        key = PlanKey((entry.key.preimages[0] + b"%d" % number, *entry.key.preimages[1:]))
        noise = os.urandom(20_000)
        database.put(replace(entry, key=key, blob=noise + bytes(75_000 - len(noise))))
        keys.append(key)
    times = []
    for number in range(3000):
        key = keys[number % count]
        started = time.perf_counter()
        unpack(database.get(key.digest), key)
        times.append((time.perf_counter() - started) * 1e6)
    database.close()
    times.sort()
    return [
        Figure("fetch, check and unpack a 75 kB entry, p50", times[len(times) // 2], "us", "<= 250"),
        Figure("fetch, check and unpack a 75 kB entry, p99", times[len(times) * 99 // 100], "us"),
    ]


if __name__ == "__main__":
    assert sys.argv[1] == "import"
    started_at = time.perf_counter()
    import plancache  # noqa: F401  # what is timed

    print((time.perf_counter() - started_at) * 1e3)
