"""Tuning what is stored: one process a key, the heuristic's plan first, the proven winner kept with all that was learned."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from plancache.autotune import Race, Tuning
from plancache.building import denial, made
from plancache.capture import quietly
from plancache.conditions import conditions, is_quiet
from plancache.description import decode
from plancache.entry import Candidate, Entry, unpack, usable
from plancache.errors import CorruptEntryError, ProofError, StoreError
from plancache.jobs import HUNG, Job, Recipe, Tuned, hung, recipes
from plancache.jury import Outcome
from plancache.key import PlanKey
from plancache.singleflight import SingleFlight
from plancache.store.levels import STRIKES
from plancache.workbench import Workbench, release

if TYPE_CHECKING:
    from plancache.store.database import Verdict
    from plancache.store.levels import Levels
    from plancache.target import DeviceTarget

_AHEAD = 64
"""So many graphs are being compiled while one is timed: those that need no compiling come first."""

_FEW = 2

_log = logging.getLogger("plancache.tuner")


class Isolation(NamedTuple):
    """What a child process that tunes for another one is given.

    `on_risk`: entered for each step that it may not outlive, with the step's name, the plan's key, and the candidates by the
    digest that `building.denial` makes. `fallen`: those that ended an earlier child, with the reason. `own_processes`: on
    this GPU, which are no disturbance.
    """

    on_risk: Callable[[str, PlanKey, Mapping[bytes, str]], AbstractContextManager[None]]
    fallen: Mapping[bytes, str]
    own_processes: int


class _Start(NamedTuple):
    """A graph that is being built for. `replayed`: what won in an earlier environment, tried alone with `only` these beside it."""

    job: Job
    bench: Workbench
    recipes: list[Recipe]
    replayed: str | None
    only: frozenset[str] | None


class _Work(NamedTuple):
    """A graph between the first look and the decision."""

    start: _Start
    race: Race
    heuristic: Entry | None
    seconds: float


class Tuner:
    """Tunes plans for one device, with children that compile ahead.

    `refresh`: tuned ones too. `on_fault`: told what the cache could not do. `on_step`: called twice for each plan: when it was
    looked at, and when it was decided. `isolation`: where this process is a child that may end.
    """

    def __init__(
        self,
        levels: Levels,
        target: DeviceTarget,
        variables: Mapping[str, str],
        tuning: Tuning,
        *,
        refresh: bool = False,
        on_fault: Callable[[str, StoreError], None],
        on_step: Callable[[], object] = lambda: None,
        isolation: Isolation | None = None,
    ) -> None:
        self._levels = levels
        self._target = target
        self._variables = variables
        self._tuning = tuning
        self._refresh = refresh
        self._on_fault = on_fault
        self._on_step = on_step
        self._isolation = isolation
        self._denied: dict[bytes, str] = {}
        self._struck: dict[bytes, Verdict] = {}
        self._builders = target.builders(variables, tuning.jobs)
        self._builders.limit_s = tuning.candidate_limit_s
        folder = levels.lock_folder()
        # a lock of its own: a tuning takes longer than any build, and only those who wait for it are to wait
        self._flight = SingleFlight(
            None if folder is None else folder.with_name("tuning"),
            timeout_s=threading.TIMEOUT_MAX,
            on_fault=lambda error: on_fault("lock", error),
        )

    def tune(self, jobs: Iterable[Job]) -> Iterator[Tuned]:
        """All compile side by side, and are looked at as they are ready; when nothing compiles any more they are decided.

        Those that another process tunes at the moment come last, when no lock is held. What one fails of is told of it, and
        the others go on.
        """
        self._denied, self._struck = self._levels.denials(), self._levels.struck()  # once: each reads all that is known
        until = math.inf if self._tuning.total_budget_s is None else time.monotonic() + self._tuning.total_budget_s
        taken: list[Job] = []
        waiting = iter(jobs)
        while batch := list(islice(waiting, _AHEAD)):
            with ExitStack() as locks:
                mine: list[Job] = []
                for job in batch:
                    free = locks.enter_context(self._flight.attempt(job.key.digest))
                    (mine if free else taken).append(job)
                yield from self._all(mine, until)
        for job in taken:
            if not self._tuning.wait:
                yield self._done(Tuned(job.key, job.entry, None, 0.0, "another process tunes it", elsewhere=True), steps=2)
                continue
            with self._flight.building(job.key.digest):
                yield from self._all([job], until)

    def _all(self, jobs: list[Job], until: float) -> Iterator[Tuned]:
        """Tunes those whose locks are held."""
        untuned = []
        for job in jobs:
            found = None if self._refresh else self._stored_tuned(job.key)  # another process may have tuned it meanwhile
            if found is None:
                untuned.append(job)
            else:
                yield self._done(Tuned(job.key, job.entry, found, 0.0, "another process tuned it", elsewhere=True), steps=2)
        screened = []
        for job, start in self._as_ready(untuned):
            if time.monotonic() >= until:
                yield self._done(Tuned(job.key, job.entry, None, 0.0, "the budget for all graphs was spent"), steps=2)
                continue
            work = start if isinstance(start, Tuned) else _or_failed(job, partial(self._screened, start))
            if isinstance(work, Tuned):
                yield self._done(work, steps=2)
            else:
                screened.append(work)
                self._on_step()
        for work in screened:
            yield self._done(_or_failed(work.start.job, partial(self._decided, work)))

    def _done(self, tuned: Tuned, steps: int = 1) -> Tuned:
        for _ in range(steps):
            self._on_step()
        return tuned

    def _as_ready(self, jobs: list[Job]) -> Iterator[tuple[Job, _Start | Tuned]]:
        """Jobs with their benches, those whose candidates are built first."""
        known = self._recipes(jobs)
        ahead: list[_Start] = []
        for job in jobs:
            start = _or_failed(job, partial(self._start, job, known.get(job.key, [])))
            if isinstance(start, Tuned):
                yield job, start
            else:
                ahead.append(start)
        for start in sorted(ahead, key=lambda start: -start.bench.compiling(self._wanted(start))):
            start.bench.start_compiling(self._wanted(start))  # the longest first, or one is waited for at the end
        while ahead:
            start = ahead.pop(next((at for at, start in enumerate(ahead) if start.bench.ready()), 0))
            yield start.job, start

    def _start(self, job: Job, known: list[Recipe]) -> _Start:
        signature = job.key.components["signature"]
        bench = Workbench(self._target.backend, self._builders, signature, job.constraints, self._tuning, job.inputs)
        with self._at_risk("plan", job, []):
            options = bench.options()
        allowed = [option.candidate for option in options if self._barred(job, option.candidate) is None]
        start = _Start(job, bench, known, *self._replay(known, allowed))
        if bench.compiling(self._wanted(start)) <= _FEW:
            bench.start_compiling(self._wanted(start))  # at once: its turn comes first
        return start

    def _replay(self, known: list[Recipe], allowed: list[Candidate]) -> tuple[str | None, frozenset[str] | None]:
        """What won before an upgrade, where that is known and is among the candidates, and those that are tried then: that
        one and the heuristic's first choice; where they are the same, one more to compare it with."""
        name = next((recipe.name for recipe in known if recipe.tuned and recipe.upgraded), None)
        mine = next((candidate for candidate in allowed if candidate.name == name), None)
        if mine is None or self._refresh or not self._tuning.replay:
            return None, None
        others = [candidate for candidate in allowed if candidate is not mine]
        if mine is allowed[0]:
            others.sort(key=lambda candidate: candidate.engine == mine.engine)
        return mine.name, frozenset(candidate.name for candidate in (mine, *others[:1]))

    def _wanted(self, start: _Start) -> Callable[[Candidate], bool]:
        """Whether a candidate takes part."""
        return lambda one: (start.only is None or one.name in start.only) and self._barred(start.job, one) is None

    def _screened(self, start: _Start) -> _Work:
        """What is left of a graph's candidates after a first look; the heuristic's plan is stored by then."""
        started = time.monotonic()
        heuristic = start.job.entry or self._heuristic(start)
        race = self._race(start)
        with quietly():
            race.set_aside()
            start.bench.set_aside()
        return _Work(start, race, heuristic, time.monotonic() - started)

    def _race(self, start: _Start) -> Race:
        job = start.job
        race = Race(
            start.bench,
            self._tuning,
            denied=partial(self._barred, job),
            first=[recipe.name for recipe in start.recipes],
            only=start.only,
            watch=lambda step, candidates: self._at_risk(step, job, candidates),
            singly=self._isolation is not None,
        )
        for one in race.contestants:
            if self._isolation and denial(job.key, one.candidate) in self._isolation.fallen:
                one.result = "failed"
        race.screen()
        return race

    @contextmanager
    def _at_risk(self, step: str, job: Job, candidates: Sequence[Candidate]) -> Iterator[None]:
        """While something is done that this process may not outlive. Of several nobody could tell which one it was."""
        digests = {denial(job.key, candidate): candidate.name for candidate in candidates}
        with ExitStack() as stack:
            if len(digests) == 1:
                stack.enter_context(self._levels.mark(next(iter(digests)), "build" if step == "build" else "load"))
            if self._isolation is not None:
                stack.enter_context(self._isolation.on_risk(step, job.key, digests))
            yield

    def _decided(self, work: _Work) -> Tuned:
        """The winner, proven and stored."""
        start, started = work.start, time.monotonic() - work.seconds
        job = start.job
        before = self._conditions()
        outcome = self._outcome(start, work.race)
        if start.only is not None and not _stands(start.replayed, outcome):
            _log.info("%s is not what it was for %s: all candidates are tried", start.replayed, job.key.hex[:16])
            whole = start._replace(only=None)
            whole.bench.start_compiling(self._wanted(whole))
            outcome = self._outcome(whole, self._race(whole))
        after = self._conditions()
        start.bench.set_aside()
        if outcome.winner is None:
            reason = self._without_winner(outcome, job, work.heuristic)
            return Tuned(job.key, work.heuristic, None, time.monotonic() - started, reason)
        entry = self._entry(job, outcome, before, after)
        self._keep(entry, replace_equal=True)
        return Tuned(job.key, work.heuristic, entry, time.monotonic() - started)

    def _outcome(self, start: _Start, race: Race) -> Outcome:
        outcome = race.decide()
        self._condemn(start.job, outcome)
        release(outcome.contestants, self._target.backend)
        return outcome

    def _heuristic(self, start: _Start) -> Entry | None:
        """The heuristic's first plan, stored at once so that others can go on with it; None where none can be built."""
        job, bench = start.job, start.bench
        for option in bench.options():
            candidate = option.candidate
            if self._barred(job, candidate):
                continue
            try:
                with self._at_risk("build", job, [candidate]):
                    future = bench.start(option)
                built = future.result()
                with self._at_risk("load", job, [candidate]):
                    bench.load(built)
            except Exception as error:  # the next one is the heuristic's choice then
                _log.debug("%s: %s", candidate.name, error)
                continue
            entry = made(built, job.key, self._target, quality="heuristic")
            self._keep(entry, replace_equal=False)
            return entry
        return None

    def _keep(self, entry: Entry, *, replace_equal: bool) -> None:
        if self._target.unknown or "unknown" in entry.requirements.values():  # what it needs could not be checked when it is loaded
            return
        try:
            self._levels.put(entry, replace_equal=replace_equal)
        except StoreError as error:
            self._on_fault("write", error)

    def _conditions(self) -> dict[str, Any]:
        own = 1 if self._isolation is None else self._isolation.own_processes
        return conditions(self._target.device.ordinal, own_processes=own + self._builders.count)

    def _entry(self, job: Job, outcome: Outcome, before: dict[str, Any], after: dict[str, Any]) -> Entry:
        assert outcome.winner is not None
        assert outcome.winner.built is not None
        return made(
            outcome.winner.built,
            job.key,
            self._target,
            quality="tuned",
            proof=outcome.proof,
            tolerance=outcome.tolerance,
            trials=outcome.trials(),
            conditions={"measure": self._tuning.measure, "before": before, "after": after, "quiet": is_quiet(before, after)},
        )

    def _stored_tuned(self, key: PlanKey) -> Entry | None:
        for found in self._levels.rows(key.digest):
            try:
                entry = unpack(found.row, key)
            except CorruptEntryError:
                continue
            if entry.quality == "tuned" and usable(entry, self._target.backend.here) is None:
                return entry
        return None

    def _without_winner(self, outcome: Outcome, job: Job, heuristic: Entry | None) -> str:
        """Why the heuristic's plan stays. Where it was shown wrong it goes, and `ProofError` is raised."""
        wrong = outcome.heuristic if outcome.heuristic_is_wrong else None
        name, reason = (wrong.candidate.name, wrong.reason) if wrong is not None else ("", "")
        if wrong is None and heuristic is not None:
            name, reason = heuristic.engine, self._denied.get(denial(job.key, heuristic.recipe), "")
        if reason:
            self._levels.forget(job.key.digest, reason)
            raise ProofError(job.key.hex, f"the heuristic's plan {name}: {reason}")
        failed = [one for one in outcome.contestants if one.reason]
        return f"no candidate was proven; the heuristic's plan stays ({failed[-1].reason if failed else 'there is no other'})"

    # ---- what is known of candidates

    def _recipes(self, jobs: list[Job]) -> dict[PlanKey, list[Recipe]]:
        try:
            return recipes(self._levels, [job.key for job in jobs])
        except StoreError as error:
            _log.debug("no recipes: %s", error)
            return {}

    def _barred(self, job: Job, candidate: Candidate) -> str | None:
        """Why a candidate is not to be tried: shown wrong, or processes ended in it. None where it is."""
        fallen = self._isolation.fallen if self._isolation is not None else {}
        if not (self._denied or self._struck or fallen):  # as nearly always, and then no digest is made
            return None
        digest = denial(job.key, candidate)
        found = fallen.get(digest) or self._denied.get(digest)
        verdict = self._struck.get(digest)
        if found is None and verdict is not None:
            ended = f"{verdict.count} processes ended while they built or ran it"
            what = verdict.reason if verdict.reason.startswith(HUNG) else ended
            found = f"{what}; to try once more: plancache rm --verdicts {digest.hex()[:16]}"
        return found

    def _condemn(self, job: Job, outcome: Outcome) -> None:
        """Records what was shown wrong, and what hung in a child that compiled it."""
        summary = decode(job.key.components["signature"]).summary if outcome.wrong else ""
        for one in outcome.wrong:
            digest, reason = denial(job.key, one.candidate), f"{one.candidate.name}, {summary}: {one.reason}"
            _log.warning("%s is denied for graphs like %s: %s", one.candidate.name, summary, one.reason)
            self._denied[digest] = reason
            self._levels.record("denied", digest, reason)
        for one in outcome.contestants:
            if one.hung:
                one.reason = hung("build", self._tuning.candidate_limit_s)
                self._levels.record("struck", denial(job.key, one.candidate), one.reason, count=STRIKES)


def _stands(replayed: str | None, outcome: Outcome) -> bool:
    """Whether what was replayed is right, and not slower than the heuristic's first choice."""
    return outcome.winner is not None and any(
        one.candidate.name == replayed and one.result in ("won", "tied") for one in outcome.contestants
    )


T = TypeVar("T")


def _or_failed(job: Job, step: Callable[[], T]) -> T | Tuned:
    """What a step brings, or how it failed."""
    started = time.monotonic()
    try:
        return step()
    except Exception as error:  # one graph's, whatever it is; the others go on
        _log.debug("tuning %s failed", job.key.hex[:16], exc_info=True)
        return Tuned(job.key, job.entry, None, time.monotonic() - started, str(error) or type(error).__name__, error)
