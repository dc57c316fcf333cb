"""What a cache did, in numbers, and what warming brought."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from plancache.plan import Plan


@dataclass
class Statistics:
    """What a cache did since it was opened. `uncacheable` counts graphs by reason, `faults` cache faults by kind."""

    memory_hits: int = 0
    local_hits: int = 0
    misses: int = 0
    builds: int = 0
    build_s: float = 0.0
    load_s: float = 0.0
    saved_s: float = 0.0
    uncacheable: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class Failure(NamedTuple):
    """A graph that `warm` could not plan, by its place in the iteration, and why."""

    position: int
    error: Exception


class Warmed(NamedTuple):
    """What `warm` brought: the plans, and the failures."""

    plans: tuple[Plan, ...]
    failures: tuple[Failure, ...]
