"""Candidates -> timings -> a winner that is proven. What runs on the GPU is behind `Bench`; here is the choice.

Builds go on side by side; each candidate is looked at once as soon as it is there, and dropped where it cannot win. The
others run in rounds, interleaved, and each round keeps those that are still near the best.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from plancache.entry import Built, Candidate
from plancache.errors import SettingsError
from plancache.jury import Bench, Contestant, Jury, Outcome, Watch, loaded
from plancache.key import MODES

_PRUNED_AT = 3.0  # times the best: clocks, caches and noise never make up for that
_FIRST_RUN_US = 50_000.0
_ROUNDS = ((4, 1.4), (8, 1.15), (16, 1.08), (32, 1.05), (80, 1.045), (120, 1.0))  # runs, and who stays, times the best


@dataclass(frozen=True)
class Tuning:
    """How plans are tuned; never part of a key.

    `budget_s`: seconds a graph's builds and timings may take; the best so far is kept. `total_budget_s`: of all graphs of one
    `tune`. `modes`: heuristic modes that name candidates. `measure`: `eager`, or `graph` for replays of a CUDA graph.
    `tie_margin`: candidates closer than about that are tied, and the fixed order decides (less workspace, deterministic, the
    heuristic's order). `tolerance`: between outputs, relative to the values around, beyond one step of the type; by default
    what type and reduction length allow. `jobs`: child processes that compile, by default one a core up to 8; 0 compiles in
    this process. `wait`: for another process that tunes the same plan; otherwise go on with the heuristic's.

    `replay`: after an upgrade of cuDNN, its frontend or the driver, what won on this GPU before is tried against the
    heuristic's first choice alone, and kept where it is right and not slower; otherwise, and on a refresh, all are tried.

    `isolate`: tune in a child process, so that a candidate that hangs or crashes ends the child and not this process: it is
    recorded and skipped, and a new child goes on. Inputs are made up then, and the cache directory must be writable.
    `candidate_limit_s`: seconds that a candidate may take in one step before it counts as hanging: to compile in a child
    process; to load and to run as well where tuning is isolated (nothing can end what hangs in this process).
    """

    budget_s: float = 120.0
    total_budget_s: float | None = None
    modes: tuple[str, ...] = MODES
    measure: Literal["eager", "graph"] = "eager"
    tie_margin: float = 0.02
    tolerance: float | None = None
    jobs: int | None = None
    wait: bool = True
    replay: bool = True
    isolate: bool = False
    candidate_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.modes, str) or not self.modes or not set(self.modes) <= set(MODES):
            raise SettingsError(f"modes must be some of {', '.join(MODES)}, not {self.modes!r}")
        object.__setattr__(self, "modes", tuple(self.modes))
        if self.measure not in ("eager", "graph"):
            raise SettingsError(f"measure must be 'eager' or 'graph', not {self.measure!r}")
        for name in ("wait", "replay", "isolate"):
            if type(getattr(self, name)) is not bool:
                raise SettingsError(f"{name} must be True or False, not {getattr(self, name)!r}")
        longest = threading.TIMEOUT_MAX
        bounds = {"budget_s": math.inf, "total_budget_s": math.inf, "tie_margin": 0.5, "tolerance": 1.0, "candidate_limit_s": longest}
        for name, most in bounds.items():
            value = getattr(self, name)
            if value is None and name in ("total_budget_s", "tolerance"):
                continue
            least = 1 if name == "candidate_limit_s" else 0  # nothing is done in no time, and what hangs is not tried again
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise SettingsError(f"{name} must be a number from {least} to {most:g}, not {value!r}")
        if self.jobs is not None and (type(self.jobs) is not int or self.jobs < 0):
            raise SettingsError(f"jobs must be a whole number of processes, not {self.jobs!r}")


class Race:
    """One graph's candidates, from the first build to the proof. `screen` may go on beside builds, `decide` wants a quiet GPU.

    `denied`: why a candidate is not to be tried; `first`: names of candidates that won before, which are built first;
    `only`: names of the candidates that take part, where not all do; `watch`: see `jury.Watch`; `singly`: it watches single
    runs in the race too, each of which is waited for.
    """

    def __init__(
        self,
        bench: Bench,
        tuning: Tuning,
        *,
        denied: Callable[[Candidate], str | None] = lambda _: None,
        first: Sequence[str] = (),
        only: Collection[str] | None = None,
        watch: Watch = lambda _, __: nullcontext(),
        singly: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._watch = watch
        self._singly = singly
        self._tuning = tuning
        self._first = first
        self._clock = clock
        self.contestants = [Contestant(option, rank) for rank, option in enumerate(bench.options())]
        for one in self.contestants:
            one.reason = denied(one.candidate) or ""
            if only is not None and one.candidate.name not in only and not one.reason:
                one.reason = "left out: what won in an earlier environment was tried alone"

    def screen(self) -> None:
        """Builds, loads and looks at each: what fails or is far behind the best is out."""
        until = self._clock() + self._tuning.budget_s
        waiting = [one for one in self.contestants if not one.reason]
        waiting.sort(key=lambda one: (one.candidate.name not in self._first, one.rank))
        pending = {self._started(one): one for one in waiting}
        best = math.inf
        while pending:
            done, _ = wait(pending, timeout=max(0.0, until - self._clock()), return_when=FIRST_COMPLETED)
            if not done and math.isfinite(best):
                break
            if not done:  # the budget is spent, and there is nothing yet: the next one is waited for
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: pending[future].rank):
                one = pending.pop(future)
                best = min(best, self._look(one, future, best))
        for future, one in pending.items():
            future.cancel()
            one.reason = "the budget was spent"

    def _started(self, one: Contestant) -> Future[Built]:
        with self._watch("build", [one.candidate]):
            return self._bench.start(one.option)

    def _look(self, one: Contestant, future: Future[Built], best: float) -> float:
        """The time of a candidate's first runs, or infinity where it fails."""
        try:
            one.built = future.result()
            with self._watch("load", [one.candidate]):
                one.runnable = self._bench.load(one.built)
            with self._watch("run", [one.candidate]):
                seen = self._bench.time_us([one.runnable], 1)[0][0]
                if seen < max(best * _PRUNED_AT, _FIRST_RUN_US):  # the first run loads the kernel, and libraries with it
                    seen = min(self._bench.time_us([one.runnable], 3)[0])
        except Exception as error:  # whatever a candidate raises takes it out
            one.fail(error)
            return math.inf
        one.times_us = [seen]
        if seen > best * _PRUNED_AT:
            one.result, one.reason = "pruned", "far slower at its first run"
        else:
            one.result = "running"
        return seen

    def set_aside(self) -> None:
        """Lets go of what is loaded; it is loaded again when it is needed."""
        for one in self.contestants:
            one.runnable = None

    def decide(self) -> Outcome:
        """Races those that are left, and proves the winner."""
        until = self._clock() + self._tuning.budget_s
        jury = Jury(self._bench, self.contestants, self._tuning.tolerance, self._watch)
        running = [one for one in self.contestants if one.result == "running"]
        while running:
            running = [one for one in running if loaded(self._bench, one, self._watch)]
            self._race(running, until)
            finished = [one for one in running if one.result == "running"]
            winner = jury.prove(_preferred(finished, self._tuning.tie_margin))
            if winner is not None:
                return jury.outcome(winner)
            running = [one for one in self.contestants if one.result in ("slower", "pruned")]  # those that are left race anew
            for one in running:
                one.result = "running"
        return jury.outcome(None)

    def _race(self, running: list[Contestant], until: float) -> None:
        """Rounds that keep those near the best, with more runs each time. One round is always run."""
        for one in running:
            one.times_us.clear()  # the first look was at other clocks
        for number, (runs, stays) in enumerate(_ROUNDS):
            if not running or (number and (self._clock() > until or len(running) == 1)):
                return
            self._time(running, runs)
            best = min(one.level_us() for one in running)
            for one in running:
                if one.level_us() > best * stays and number < len(_ROUNDS) - 1:
                    one.result, one.reason = ("pruned" if number == 0 else "slower"), f"slower after {len(one.times_us)} runs"
            running = [one for one in running if one.result == "running"]

    def _time(self, running: list[Contestant], runs: int) -> None:
        for some, times in [([one], 1) for _ in range(runs) for one in running] if self._singly else [(running, runs)]:
            with self._watch("race", [one.candidate for one in some]):
                found = self._bench.time_us([one.runnable for one in some], times)
            for one, more in zip(some, found, strict=True):
                one.times_us += more


def tune(bench: Bench, tuning: Tuning, **options: Any) -> Outcome:
    """Races the candidates of one graph and proves the winner; `options` as of `Race`."""
    race = Race(bench, tuning, **options)
    race.screen()
    return race.decide()


def _preferred(finished: list[Contestant], margin: float) -> list[Contestant]:
    """The finishers, the winner first: ties in the fixed order, then the others by time."""
    if not finished:
        return []
    best = min(finished, key=lambda one: one.median_us)
    bound = best.median_us * _boundary([one.median_us / best.median_us for one in finished], margin)
    high = best.interval_us()[1]
    tied = [one for one in finished if one.median_us <= bound or one.interval_us()[0] <= high]
    others = [one for one in finished if one not in tied]
    for one in tied:
        one.result = "tied"
    for one in others:
        one.result, one.reason = "slower", f"slower after {len(one.times_us)} runs"
    return sorted(tied, key=Contestant.preference) + sorted(others, key=lambda one: one.median_us)


def _boundary(ratios: list[float], margin: float) -> float:
    """Where ties end: in the middle of the widest stretch without a candidate, up to two and a half times the margin.

    At a fixed boundary a candidate that lies on it falls on either side from run to run, and another one wins.
    """
    high = 1 + margin * 2.5
    stretches = [(max(below, 1.0), min(above, high)) for below, above in pairwise([*sorted(ratios), math.inf])]
    width, start = max((end - start, start) for start, end in stretches)
    return start + max(0.0, width) / 2
