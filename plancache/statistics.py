"""What a cache did, in numbers, and what warming brought."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from plancache.plan import Plan


@dataclass
class Statistics:
    """What a cache did since it was opened.

    `stored` counts builds that a later process will find, `uncacheable` graphs by reason, `fell_through` graphs of an intercepted
    program that went the frontend's own road by reason, `faults` cache faults by kind.
    `live_plans` and `live_bytes` are those in memory now; bytes as they are accounted for, workspaces included.
    """

    memory_hits: int = 0
    local_hits: int = 0
    sealed_hits: int = 0
    misses: int = 0
    builds: int = 0
    stored: int = 0
    build_s: float = 0.0
    load_s: float = 0.0
    saved_s: float = 0.0
    live_plans: int = 0
    live_bytes: int = 0
    uncacheable: Counter[str] = field(default_factory=Counter)
    fell_through: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def hits(self) -> int:
        """Plans that needed no build."""
        return self.memory_hits + self.local_hits + self.sealed_hits

    def summary(self) -> str:
        """One line."""
        text = f"{self.hits} hits ({self.local_hits} stored, {self.sealed_hits} sealed), {self.builds} builds in {self.build_s:.1f} s"
        text += f", {self.saved_s:.1f} s saved"
        for name, counted in (
            ("uncacheable", self.uncacheable),
            ("left to the frontend", self.fell_through),
            ("faults", self.faults),
        ):
            text += f", {sum(counted.values())} {name}" if counted else ""
        return text


class Failure(NamedTuple):
    """A graph that `warm` could not plan, by its place in the iteration, and why."""

    position: int
    error: Exception


class Warmed(NamedTuple):
    """What `warm` brought: the plans, and the failures."""

    plans: tuple[Plan, ...]
    failures: tuple[Failure, ...]
