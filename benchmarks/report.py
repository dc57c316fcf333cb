"""One figure as the benchmarks report it, and the table of all."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A measured figure, the bound it is asked to keep (`<=` or `>=`), and how it came about."""

    name: str
    value: float
    unit: str
    bound: str | None = None
    note: str = ""

    @property
    def kept(self) -> bool | None:
        if self.bound is None:
            return None
        relation, limit = self.bound.split()
        return self.value <= float(limit) if relation == "<=" else self.value >= float(limit)


def print_table(figures: Sequence[Figure]) -> None:
    """Ratios first, then the rest, each beside its bound."""
    ordered = sorted(figures, key=lambda figure: figure.unit != "x")
    width = max(len(figure.name) for figure in ordered)
    for figure in ordered:
        verdict = {None: "", True: "kept", False: "MISSED"}[figure.kept]
        print(f"{figure.name:{width}} {figure.value:10,.2f} {figure.unit:5} {figure.bound or '':9} {verdict:7} {figure.note}")


def medians(rounds: int, variants: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each variant over interleaved rounds, so that drift hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            samples[name].append(measure())
    return {name: statistics.median(values) for name, values in samples.items()}


def per_call_us(call: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds of one call, over a batch."""
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls * 1e6


def in_fresh_process(module: str, *arguments: str) -> str:
    """The last line that `python -m module arguments` prints."""
    # modules are compiled once, as an installation does it, not at every start
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = f"{tempfile.gettempdir()}/plancache-bench-pycache-{os.getpid()}"
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return done.stdout.strip().splitlines()[-1]


@contextmanager
def compute_cache(folder: Path | None) -> Iterator[None]:
    """Child processes keep the driver's compute cache there, or in an empty folder of their own."""
    with tempfile.TemporaryDirectory(prefix="plancache-nv-") as empty:
        before = os.environ.get("CUDA_CACHE_PATH")
        os.environ["CUDA_CACHE_PATH"] = str(folder or empty)
        try:
            yield
        finally:
            os.environ.pop("CUDA_CACHE_PATH")
            if before is not None:
                os.environ["CUDA_CACHE_PATH"] = before
