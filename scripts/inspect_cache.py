"""Prints what a cache directory holds, by GPU model, and what its plans have saved.

A starting point: `PlanCache.entries()` needs neither a GPU nor cuDNN, and each entry's `to_dict()` has all that
`plancache ls --json` prints. Copy this, and sum up what matters to you.

    python scripts/inspect_cache.py
    python scripts/inspect_cache.py --cache-dir /mnt/plans --graphs
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from plancache import PlanCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", metavar="DIR", help="the cache directory (default: $PLANCACHE_DIR, else the user's)")
    parser.add_argument("--graphs", action="store_true", help="list the graphs too, those that saved most first")
    args = parser.parse_args()

    by_device: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with PlanCache(args.cache_dir, mode="readonly") as cache:
        for entry in cache.entries():
            fact = entry.to_dict()
            by_device[fact["device"]].append(fact)
        print(cache.settings.directory)
    for device, facts in by_device.items():
        stored_kb = sum(fact["stored_bytes"] for fact in facts) / 1e3
        print(f"{device}: {len(facts)} plans, {stored_kb:.0f} kB, {sum(map(saved_s, facts)):.1f} s of building saved")
        if args.graphs:
            for fact in sorted(facts, key=saved_s, reverse=True):
                print(f"  {saved_s(fact):8.1f} s  {fact['hits']:6} hits  {fact['graph']}")
    if not by_device:
        print("no plans are stored there")


def saved_s(fact: dict[str, Any]) -> float:
    return float(fact["hits"] * fact["build_s"])


if __name__ == "__main__":
    main()
