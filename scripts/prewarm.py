"""Plans a program's graphs before it needs them: in a CI job without a GPU, or once on each machine.

A starting point: put your own shapes into `graphs()`. With --device the plans are built for the GPU of a device file
(`plancache doctor --write-device FILE` writes one), without it for the GPU of this machine. Then carry the directory.

    python scripts/prewarm.py --device h200 --cache-dir plans
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from plancache import Device, PlanCache
from plancache import graphs as library


def graphs() -> Iterator[Any]:
    """What the program will ask for: cudnn.pygraph objects, or objects with a `.graph`, as plancache.graphs makes them."""
    for batch in (1, 8):
        yield library.batched_matmul(batch=batch, m=128, n=64, k=256)
    yield library.conv_bias_relu(batch=1, in_channels=8, out_channels=8, height=8, width=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", metavar="DIR", help="the cache directory (default: $PLANCACHE_DIR, else the user's)")
    parser.add_argument("--device", metavar="FILE", help="a device file, or h200, which ships with us: the GPU need not be here")
    args = parser.parse_args()

    started = time.perf_counter()
    device = None if args.device is None else Device.from_file(args.device)
    with PlanCache(args.cache_dir, device=device) as cache:
        warmed, statistics = cache.warm(graphs()), cache.statistics()
        print(f"{len(warmed.plans)} plans in {time.perf_counter() - started:.1f} s, {statistics.builds} built; {cache.settings.directory}")
    for failure in warmed.failures:
        print(f"graph {failure.position + 1} has no plan: {str(failure.error).splitlines()[0]}", file=sys.stderr)
    return 1 if warmed.failures or statistics.stored < statistics.builds else 0


if __name__ == "__main__":
    sys.exit(main())
