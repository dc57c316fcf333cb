"""Candidates -> timings -> a winner that is proven. What runs on the GPU is behind `Bench`; here is the choice.

Builds go on side by side; each candidate is looked at once as soon as it is there, and dropped where it cannot win. The
others run in rounds, interleaved, and each round keeps those that are still near the best.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from plancache.entry import Built, Candidate, Trial
from plancache.errors import SettingsError
from plancache.proof import disagreement, unwritten

if TYPE_CHECKING:
    from plancache.backend import Option

POISONS = (0xFF, 0x5A)
"""Bytes that outputs are filled with: what a plan left as it was shows in both."""

_PRUNED_AT = 3.0  # times the best: clocks, caches and noise never make up for that
_FIRST_RUN_US = 50_000.0
_ROUNDS = ((4, 1.4), (8, 1.15), (16, 1.08), (32, 1.05), (80, 1.045), (120, 1.0))  # runs, and who stays, times the best
_MODES = ("A", "B", "FALLBACK")


@dataclass(frozen=True)
class Tuning:
    """How plans are tuned; never part of a key.

    `budget_s`: seconds a graph's builds and timings may take; the best so far is kept. `total_budget_s`: of all graphs of one
    `tune`. `modes`: heuristic modes that name candidates. `measure`: `eager`, or `graph` for replays of a CUDA graph.
    `tie_margin`: candidates closer than about that are tied, and the fixed order decides (less workspace, deterministic, the
    heuristic's order). `tolerance`: between outputs, relative to the values around, beyond one step of the type; by default
    what type and reduction length allow. `jobs`: child processes that compile, by default one a core up to 8; 0 compiles in
    this process. `wait`: for another process that tunes the same plan; otherwise go on with the heuristic's.
    """

    budget_s: float = 120.0
    total_budget_s: float | None = None
    modes: tuple[str, ...] = _MODES
    measure: Literal["eager", "graph"] = "eager"
    tie_margin: float = 0.02
    tolerance: float | None = None
    jobs: int | None = None
    wait: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.modes, str) or not self.modes or not set(self.modes) <= set(_MODES):
            raise SettingsError(f"modes must be some of {', '.join(_MODES)}, not {self.modes!r}")
        object.__setattr__(self, "modes", tuple(self.modes))
        if self.measure not in ("eager", "graph"):
            raise SettingsError(f"measure must be 'eager' or 'graph', not {self.measure!r}")
        for name, most in (("budget_s", math.inf), ("total_budget_s", math.inf), ("tie_margin", 0.5), ("tolerance", 1.0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most):
                raise SettingsError(f"{name} must be a number from 0 to {most:g}, not {value!r}")
        if self.jobs is not None and (type(self.jobs) is not int or self.jobs < 0):
            raise SettingsError(f"jobs must be a whole number of processes, not {self.jobs!r}")


class Bench(Protocol):
    """One graph on one device: candidates that can be built, run and timed."""

    def options(self) -> Sequence[Option]: ...

    def start(self, option: Option) -> Future[Built]:
        """Begins to build a candidate."""

    def load(self, built: Built) -> Any:
        """Something to run. Raises whatever cuDNN raises."""

    def time_us(self, runnables: Sequence[Any], runs: int) -> list[list[float]]:
        """GPU times of each, interleaved, each run with a cold L2."""

    def outputs(self, runnable: Any, poison: int) -> Mapping[int, Any]:
        """What one run makes of outputs that were filled with a byte."""

    def bounds(self) -> Mapping[int, float]:
        """How far right results may be apart, by output."""

    def partly_written(self) -> frozenset[int]:
        """Outputs of which a right plan leaves parts as they were."""


@dataclass(eq=False)
class Contestant:
    """A candidate in the race."""

    option: Option
    rank: int
    built: Built | None = None
    runnable: Any = None
    times_us: list[float] = field(default_factory=list)
    result: str = "skipped"
    reason: str = ""
    seen: dict[int, Mapping[int, Any]] = field(default_factory=dict)  # outputs by poison

    @property
    def candidate(self) -> Candidate:
        return self.option.candidate

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    def level_us(self) -> float:
        """The lower quartile: while there are few runs, one that something else on the GPU slowed down must not decide."""
        return sorted(self.times_us)[len(self.times_us) // 4]

    def interval_us(self) -> tuple[float, float]:
        """Where the median lies with 95 percent confidence: order statistics (binomial)."""
        ordered = sorted(self.times_us)
        half = 0.98 * math.sqrt(len(ordered))
        low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
        return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]

    def preference(self) -> tuple[Any, ...]:
        """The fixed order that decides among ties."""
        assert self.built is not None
        knobs = tuple(sorted(self.candidate.knobs.items()))
        return self.built.workspace_size, not self.option.deterministic, self.rank, self.candidate.engine, knobs

    def trial(self) -> Trial:
        timed = len(self.times_us) > 1
        low, high = self.interval_us() if timed else (None, None)
        built = self.built
        return Trial(
            *self.candidate,
            rank=self.rank,
            build_s=round(sum(built.timings_s.values()), 4) if built else 0.0,
            workspace_size=built.workspace_size if built else None,
            time_us=round(self.median_us, 3) if self.times_us else None,
            low_us=low and round(low, 3),
            high_us=high and round(high, 3),
            runs=len(self.times_us),
            result=self.result,
            reason=self.reason,
        )


class Outcome(NamedTuple):
    """What tuning brought. `winner` is None where no candidate was proven.

    `wrong`: those that were shown wrong, to be denied. `heuristic_is_wrong`: the heuristic's first plan is among them.
    """

    winner: Contestant | None
    heuristic: Contestant | None
    contestants: tuple[Contestant, ...]
    proof: str
    tolerance: float | None
    wrong: tuple[Contestant, ...]
    heuristic_is_wrong: bool

    def trials(self) -> tuple[Trial, ...]:
        """What was learned of each, fastest first."""
        made = [contestant.trial() for contestant in self.contestants]
        return tuple(sorted(made, key=lambda trial: (trial.time_us is None, trial.time_us or 0.0, trial.rank)))


class Race:
    """One graph's candidates, from the first build to the proof. `screen` may go on beside builds, `decide` wants a quiet GPU.

    `denied`: why a candidate is not to be tried; `first`: names of candidates that won before, which are built first;
    `watch`: entered while a candidate is built in this process, and while it is loaded and run for the first time.
    """

    def __init__(
        self,
        bench: Bench,
        tuning: Tuning,
        *,
        denied: Callable[[Candidate], str | None] = lambda _: None,
        first: Sequence[str] = (),
        watch: Callable[[Candidate], AbstractContextManager[None]] = lambda _: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._watch = watch
        self._tuning = tuning
        self._first = first
        self._clock = clock
        self.contestants = [Contestant(option, rank) for rank, option in enumerate(bench.options())]
        for one in self.contestants:
            one.reason = denied(one.candidate) or ""

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
                with self._watch(one.candidate):
                    best = min(best, _look(self._bench, one, future, best))
        for future, one in pending.items():
            future.cancel()
            one.reason = "the budget was spent"

    def _started(self, one: Contestant) -> Future[Built]:
        with self._watch(one.candidate):
            return self._bench.start(one.option)

    def set_aside(self) -> None:
        """Lets go of what is loaded; it is loaded again when it is needed."""
        for one in self.contestants:
            one.runnable = None

    def decide(self) -> Outcome:
        """Races those that are left, and proves the winner."""
        until = self._clock() + self._tuning.budget_s
        jury = _Jury(self._bench, self.contestants, self._tuning.tolerance)
        running = [one for one in self.contestants if one.result == "running"]
        while running:
            running = [one for one in running if _loaded(self._bench, one)]
            _race(self._bench, running, until, self._clock)
            finished = [one for one in running if one.result == "running"]
            winner = jury.prove(_preferred(finished, self._tuning.tie_margin))
            if winner is not None:
                return jury.outcome(winner)
            running = [one for one in self.contestants if one.result in ("slower", "pruned")]  # those that are left race anew
            for one in running:
                one.result = "running"
        return jury.outcome(None)


def tune(bench: Bench, tuning: Tuning, **options: Any) -> Outcome:
    """Races the candidates of one graph and proves the winner; `options` as of `Race`."""
    race = Race(bench, tuning, **options)
    race.screen()
    return race.decide()


def _loaded(bench: Bench, one: Contestant) -> bool:
    """Whether there is something to run; what does not load is out."""
    if one.runnable is None and one.built is not None and one.result != "failed":
        try:
            one.runnable = bench.load(one.built)
        except Exception as error:  # whatever a candidate raises takes it out
            one.result, one.reason = "failed", _first_line(error)
    return one.runnable is not None


def _look(bench: Bench, one: Contestant, future: Future[Built], best: float) -> float:
    """The time of a candidate's first runs, or infinity where it fails."""
    try:
        one.built = future.result()
        one.runnable = bench.load(one.built)
        seen = bench.time_us([one.runnable], 1)[0][0]
        if seen < max(best * _PRUNED_AT, _FIRST_RUN_US):  # the first run loads the kernel, and libraries with it
            seen = min(bench.time_us([one.runnable], 3)[0])
    except Exception as error:  # whatever a candidate raises takes it out
        one.result, one.reason = "failed", _first_line(error)
        return math.inf
    one.times_us = [seen]
    if seen > best * _PRUNED_AT:
        one.result, one.reason = "pruned", "far slower at its first run"
    else:
        one.result = "running"
    return seen


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def _race(bench: Bench, running: list[Contestant], until: float, clock: Callable[[], float]) -> None:
    """Rounds that keep those near the best, with more runs each time. One round is always run."""
    for one in running:
        one.times_us.clear()  # the first look was at other clocks
    for number, (runs, stays) in enumerate(_ROUNDS):
        if not running or (number and (clock() > until or len(running) == 1)):
            return
        for one, times in zip(running, bench.time_us([one.runnable for one in running], runs), strict=True):
            one.times_us += times
        best = min(one.level_us() for one in running)
        for one in running:
            if one.level_us() > best * stays and number < len(_ROUNDS) - 1:
                one.result, one.reason = ("pruned" if number == 0 else "slower"), f"slower after {len(one.times_us)} runs"
        running = [one for one in running if one.result == "running"]


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


# ---- proof ----------------------------------------------------------------------------------------------------------


class _Jury:
    """Decides which of the finishers is right, by what their runs make of poisoned outputs."""

    def __init__(self, bench: Bench, entered: list[Contestant], tolerance: float | None) -> None:
        self._bench = bench
        self._entered = entered
        self._tolerance = tolerance
        self._bounds: Mapping[int, float] = {}
        self._proof_of = "none"
        self._wrong: list[Contestant] = []

    def prove(self, order: list[Contestant]) -> Contestant | None:
        """The first that is shown right, or None."""
        built = [one for one in self._entered if one.built is not None and one.result != "failed"]
        self._bounds = {uid: self._tolerance or bound for uid, bound in self._bench.bounds().items()}
        for one in order:
            proof = self._proof(one, self._others(one, self._heuristic, built), self._bounds)
            if proof is not None:
                one.result, one.reason, self._proof_of = "won", "", proof
                return one
        return None

    @property
    def _heuristic(self) -> Contestant | None:
        """The first that the heuristics name and that could be built and loaded."""
        return next((one for one in self._entered if one.built is not None and one.result != "failed"), None)

    def outcome(self, winner: Contestant | None) -> Outcome:
        wrong = tuple(one for one in self._wrong if one.result == "wrong")
        tolerance = max(self._bounds.values(), default=None) if winner else None
        heuristic = self._heuristic
        return Outcome(winner, heuristic, tuple(self._entered), self._proof_of, tolerance, wrong, heuristic in wrong)

    def _others(self, one: Contestant, heuristic: Contestant | None, built: list[Contestant]) -> Iterator[Contestant]:
        """Whom a plan is compared with: the heuristic's first plan, then other engines, then other knobs."""
        rest = [other for other in built if other not in (one, heuristic)]
        rest.sort(key=lambda other: other.candidate.engine == one.candidate.engine)
        if heuristic is not None and heuristic is not one:
            yield heuristic
        yield from rest

    def _proof(self, one: Contestant, others: Iterator[Contestant], bounds: Mapping[int, float]) -> str | None:
        """How a plan was shown right, or None."""
        if one in self._wrong or not self._writes_all(one):
            return None
        opponents: list[Contestant] = []
        for other in others:
            if other in self._wrong or not self._writes_all(other):
                continue
            if self._apart(one, other, bounds) is None:
                for opponent in opponents:  # two engines against one
                    self._condemn(opponent, f"{one.candidate.name} and {other.candidate.name} agree: {self._apart(opponent, one, bounds)}")
                return f"agrees with {other.candidate.name}"
            agreeing = next((opponent for opponent in opponents if self._apart(opponent, other, bounds) is None), None)
            if agreeing is not None:
                names = f"{agreeing.candidate.name} and {other.candidate.name}"
                self._condemn(one, f"{names} agree: {self._apart(one, agreeing, bounds)}")
                return None
            opponents.append(other)
        if opponents:
            one.result, one.reason = "wrong", f"disagrees with {opponents[0].candidate.name}, and nobody else agrees with either"
            return None
        return "every element written; no other plan to compare with"

    def _writes_all(self, one: Contestant) -> bool:
        if one in self._wrong or not _loaded(self._bench, one):
            return False
        try:
            left = unwritten(self._run(one, POISONS[0]), self._run(one, POISONS[1]), POISONS, partly=self._bench.partly_written())
        except Exception as error:  # a run that raises proves nothing, and takes the candidate out
            one.result, one.reason = "failed", _first_line(error)
            one.runnable = None
            self._wrong.append(one)
            return False
        if left is not None:
            self._condemn(one, left)
        return left is None

    def _run(self, one: Contestant, poison: int) -> Mapping[int, Any]:
        if poison not in one.seen:
            one.seen[poison] = self._bench.outputs(one.runnable, poison)
        return one.seen[poison]

    def _apart(self, one: Contestant, other: Contestant, bounds: Mapping[int, float]) -> str | None:
        return disagreement(self._run(one, POISONS[0]), self._run(other, POISONS[0]), bounds)

    def _condemn(self, one: Contestant, reason: str | None) -> None:
        one.result, one.reason = "wrong", reason or ""
        self._wrong.append(one)
