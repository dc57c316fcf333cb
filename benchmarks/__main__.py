"""Runs what this machine can run, prints one table and, where asked, writes JSON."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import anywhere, pytorch, running, serving, startup, store, tuning
from benchmarks.report import Figure, print_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds a figure is the median of (default 7)")
    parser.add_argument(
        "--only", choices=("anywhere", "store", "running", "startup", "serving", "tuning", "pytorch"), help="one group of figures"
    )
    parser.add_argument(
        "--entries", type=int, default=store.ENTRIES, help="size of the large store (default 100,000: 2.8 GB on disk, some minutes)"
    )
    arguments = parser.parse_args()
    from plancache import Device
    from plancache.environment import Libraries
    from plancache.errors import DeviceError

    groups = {"anywhere": anywhere.measure, "store": partial(store.measure, entries=arguments.entries)}
    try:
        device = Device.current().model
        groups |= {
            "running": running.measure,
            "startup": startup.measure,
            "serving": serving.measure,
            "tuning": tuning.measure,
            "pytorch": pytorch.measure,
        }
    except DeviceError:
        device = "no GPU"
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as directory:
        for name, measure in groups.items():
            if arguments.only in (None, name):
                figures += measure(Path(directory) / name, arguments.rounds)
    libraries = Libraries.loaded()
    machine = {
        "device": device,
        "cudnn": libraries.cudnn_version,
        "frontend": libraries.frontend_version,
        "python": platform.python_version(),
    }
    print_table(figures)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "figures": [figure._asdict() for figure in figures]}, indent=1))
    return 0 if all(figure.kept in (None, True) for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
