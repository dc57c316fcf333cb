"""Removes plans of one GPU model, or of graphs with a word in their summary, from a cache directory.

A starting point for a rule of your own: choose among `PlanCache.entries()`, then `PlanCache.remove(*keys)`. Plans that a
program is building or loading now are skipped. For the usual rules (age, size, use) there is `plancache prune`.

    python scripts/purge_cache.py --device "NVIDIA H100"            # shows what would go
    python scripts/purge_cache.py --graph sdpa --yes
"""

from __future__ import annotations

import argparse
import sys

from plancache import PlanCache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", metavar="DIR", help="the cache directory (default: $PLANCACHE_DIR, else the user's)")
    parser.add_argument("--device", metavar="MODEL", help="plans for this GPU model, such as 'NVIDIA H200'")
    parser.add_argument("--graph", metavar="WORD", help="plans whose graph has this in its summary, such as sdpa")
    parser.add_argument("--yes", action="store_true", help="remove them; without it they are only shown")
    args = parser.parse_args()
    if args.device is None and args.graph is None:
        parser.error("say what is to go: --device MODEL, --graph WORD, or both for what is of both")

    with PlanCache(args.cache_dir) as cache:
        facts = [entry.to_dict() for entry in cache.entries()]
        chosen = [fact for fact in facts if args.device in (None, fact["device"]) and (args.graph or "") in fact["graph"]]
        for fact in chosen:
            print(f"{fact['key'][:12]}  {fact['device']}  {fact['graph']}")
        if not chosen:
            print(f"nothing to remove in {cache.settings.directory}")
            return 0
        removed = cache.remove(*(fact["key"] for fact in chosen), dry_run=not args.yes)
    word = "removed" if args.yes else "would remove"
    print(f"{word} {len(removed.entries)} plans, {removed.freed_bytes / 1e3:.0f} kB; {len(removed.skipped)} are in use and stay")
    return 1 if removed.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
