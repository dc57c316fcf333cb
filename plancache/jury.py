"""Who takes part in a race, and which of the finishers is right, by what their runs make of poisoned outputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from plancache.entry import Built, Candidate, Trial
from plancache.proof import disagreement, unwritten

if TYPE_CHECKING:
    from plancache.backend import Option

POISONS = (0xFF, 0x5A)
"""Bytes that outputs are filled with: what a plan left as it was shows in both."""

Phase = Literal["build", "load", "run", "race", "proof"]
Watch = Callable[[Phase, Sequence[Candidate]], AbstractContextManager[None]]
"""Entered for as long as something is done that a candidate may hang or crash in; `race` may be of several at once."""


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
    hung: bool = False  # the child that built it was killed for it

    @property
    def candidate(self) -> Candidate:
        return self.option.candidate

    def fail(self, error: Exception) -> None:
        """Takes it out, for whatever it raised."""
        self.result, self.reason = "failed", f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        self.hung = isinstance(error, TimeoutError)
        self.runnable = None

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


def loaded(bench: Bench, one: Contestant, watch: Watch) -> bool:
    """Whether there is something to run; what does not load is out."""
    if one.runnable is None and one.built is not None and one.result != "failed":
        try:
            with watch("load", [one.candidate]):
                one.runnable = bench.load(one.built)
        except Exception as error:  # whatever a candidate raises takes it out
            one.fail(error)
    return one.runnable is not None


class Jury:
    """Decides which of the finishers is right, by what their runs make of poisoned outputs."""

    def __init__(self, bench: Bench, entered: list[Contestant], tolerance: float | None, watch: Watch) -> None:
        self._bench = bench
        self._watch = watch
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
        if one in self._wrong or not loaded(self._bench, one, self._watch):
            return False
        try:
            left = unwritten(self._run(one, POISONS[0]), self._run(one, POISONS[1]), POISONS, partly=self._bench.partly_written())
        except Exception as error:  # a run that raises proves nothing, and takes the candidate out
            one.fail(error)
            self._wrong.append(one)
            return False
        if left is not None:
            self._condemn(one, left)
        return left is None

    def _run(self, one: Contestant, poison: int) -> Mapping[int, Any]:
        if poison not in one.seen:
            with self._watch("proof", [one.candidate]):
                one.seen[poison] = self._bench.outputs(one.runnable, poison)
        return one.seen[poison]

    def _apart(self, one: Contestant, other: Contestant, bounds: Mapping[int, float]) -> str | None:
        return disagreement(self._run(one, POISONS[0]), self._run(other, POISONS[0]), bounds)

    def _condemn(self, one: Contestant, reason: str | None) -> None:
        one.result, one.reason = "wrong", reason or ""
        self._wrong.append(one)
