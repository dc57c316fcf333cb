"""Tuning what is stored: one process a key, the heuristic's plan first, the proven winner kept with all that was learned."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from plancache import __version__
from plancache.autotune import Outcome, Race, Tuning
from plancache.building import denial, denials_of
from plancache.capture import quietly
from plancache.conditions import conditions, is_quiet
from plancache.description import decode
from plancache.entry import Built, Candidate, Entry, unpack, usable
from plancache.errors import CorruptEntryError, OperandError, ProofError, StoreError
from plancache.key import Constraints, Place, PlanKey
from plancache.singleflight import SingleFlight
from plancache.workbench import Workbench, release

if TYPE_CHECKING:
    from plancache.signature import Reading
    from plancache.store.levels import Levels
    from plancache.target import DeviceTarget

_AHEAD = 64
"""So many graphs are being compiled while one is timed: those that need no compiling come first."""

_FEW = 2

_log = logging.getLogger("plancache.tuner")


class Job(NamedTuple):
    """A plan to tune: its key, the untuned entry where there is one, and the caller's inputs by canonical uid."""

    key: PlanKey
    entry: Entry | None
    constraints: Constraints
    inputs: Mapping[int, Any]


class Tuned(NamedTuple):
    """What became of one. `entry`: the tuned one, or None where `reason` says why there is none.

    `error`: where it failed, by which tuning this one plan ended. `elsewhere`: another process tunes it, or has.
    """

    key: PlanKey
    before: Entry | None
    entry: Entry | None
    seconds: float
    reason: str = ""
    error: Exception | None = None
    elsewhere: bool = False

    @property
    def summary(self) -> str:
        """The graph in one line."""
        return decode(self.key.components["signature"]).summary

    @property
    def gain(self) -> float | None:
        """How many times faster than the heuristic's first plan, both timed side by side."""
        if self.entry is None or self.before is None:
            return None
        times = {trial.name: trial.time_us for trial in self.entry.trials}
        first, won = times.get(self.before.recipe.name), times.get(self.entry.recipe.name)
        return first / won if first and won else None


class _Work(NamedTuple):
    """A graph between the first look and the decision."""

    job: Job
    bench: Workbench
    race: Race
    heuristic: Entry | None
    seconds: float


class Tuner:
    """Tunes plans for one device, with children that compile ahead.

    `refresh`: tuned ones too. `on_fault`: told what the cache could not do. `on_step`: called twice for each plan: when it was
    looked at, and when it was decided.
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
    ) -> None:
        self._levels = levels
        self._target = target
        self._variables = variables
        self._tuning = tuning
        self._refresh = refresh
        self._on_fault = on_fault
        self._on_step = on_step
        self._builders = target.builders(variables, tuning.jobs)
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
        for job, bench in self._as_ready(untuned):
            if time.monotonic() >= until:
                yield self._done(Tuned(job.key, job.entry, None, 0.0, "the budget for all graphs was spent"), steps=2)
                continue
            work = bench if isinstance(bench, Tuned) else _or_failed(job, partial(self._screened, job, bench))
            if isinstance(work, Tuned):
                yield self._done(work, steps=2)
            else:
                screened.append(work)
                self._on_step()
        for work in screened:
            yield self._done(_or_failed(work.job, partial(self._decided, work)))

    def _done(self, tuned: Tuned, steps: int = 1) -> Tuned:
        for _ in range(steps):
            self._on_step()
        return tuned

    def _as_ready(self, jobs: list[Job]) -> Iterator[tuple[Job, Workbench | Tuned]]:
        """Jobs with their benches, those whose candidates are built first."""
        ahead: list[tuple[Job, Workbench]] = []
        for job in jobs:
            bench = _or_failed(job, partial(self._bench, job))
            if isinstance(bench, Tuned):
                yield job, bench
            else:
                ahead.append((job, bench))
        for _, bench in sorted(ahead, key=lambda pair: -pair[1].compiling()):
            bench.start_compiling()  # the longest first, or one is waited for at the end
        while ahead:
            yield ahead.pop(next((at for at, (_, bench) in enumerate(ahead) if bench.ready()), 0))

    def _bench(self, job: Job) -> Workbench:
        signature = job.key.components["signature"]
        bench = Workbench(self._target.backend, self._builders, signature, job.constraints, self._tuning, job.inputs, self._barred(job))
        if bench.compiling() <= _FEW:
            bench.start_compiling()  # at once: its turn comes first
        return bench

    def _screened(self, job: Job, bench: Workbench) -> _Work:
        """What is left of a graph's candidates after a first look; the heuristic's plan is stored by then."""
        started = time.monotonic()
        heuristic = job.entry or self._heuristic(job, bench)
        race = Race(
            bench,
            self._tuning,
            denied=self._barred(job),
            first=self._recipes(job.key),
            watch=lambda candidate: self._levels.mark(denial(job.key, self._target, candidate), "load"),
        )
        race.screen()
        with quietly():
            race.set_aside()
            bench.set_aside()
        return _Work(job, bench, race, heuristic, time.monotonic() - started)

    def _decided(self, work: _Work) -> Tuned:
        """The winner, proven and stored."""
        job, started = work.job, time.monotonic() - work.seconds
        before = self._conditions()
        outcome = work.race.decide()
        after = self._conditions()
        self._deny(job, outcome)
        release(outcome.contestants, self._target.backend)
        work.bench.set_aside()
        if outcome.winner is None:
            reason = self._without_winner(outcome, job, work.heuristic)
            return Tuned(job.key, work.heuristic, None, time.monotonic() - started, reason)
        entry = self._entry(job, outcome, before, after)
        self._keep(entry, replace_equal=True)
        return Tuned(job.key, work.heuristic, entry, time.monotonic() - started)

    def _heuristic(self, job: Job, bench: Workbench) -> Entry | None:
        """The heuristic's first plan, stored at once so that others can go on with it; None where none can be built."""
        barred = self._barred(job)
        for option in bench.options():
            if barred(option.candidate):
                continue
            try:
                with self._levels.mark(denial(job.key, self._target, option.candidate), "load"):
                    built = bench.start(option).result()
                    bench.load(built)
            except Exception as error:  # the next one is the heuristic's choice then
                _log.debug("%s: %s", option.candidate.name, error)
                continue
            entry = self._made(job, built, quality="heuristic")
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
        return conditions(self._target.device.ordinal, own_processes=1 + self._builders.count)

    def _entry(self, job: Job, outcome: Outcome, before: dict[str, Any], after: dict[str, Any]) -> Entry:
        assert outcome.winner is not None
        assert outcome.winner.built is not None
        return self._made(
            job,
            outcome.winner.built,
            quality="tuned",
            proof=outcome.proof,
            tolerance=outcome.tolerance,
            trials=outcome.trials(),
            conditions={"measure": self._tuning.measure, "before": before, "after": after, "quiet": is_quiet(before, after)},
        )

    def _made(self, job: Job, built: Built, **more: Any) -> Entry:
        provenance = {"plancache": __version__, "cudnn": self._target.backend.libraries.cudnn_version}
        return Entry.of(built, key=job.key, created_at=time.time(), provenance=provenance, **more)

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
            name, reason = heuristic.engine, denials_of(self._levels, job.key, self._target)(heuristic.recipe) or ""
        if reason:
            self._levels.forget(job.key.digest, reason)
            raise ProofError(job.key.hex, f"the heuristic's plan {name}: {reason}")
        failed = [one for one in outcome.contestants if one.reason]
        return f"no candidate was proven; the heuristic's plan stays ({failed[-1].reason if failed else 'there is no other'})"

    # ---- what was learned before

    def _recipes(self, key: PlanKey) -> list[str]:
        """Names of what was chosen for the same graph in other environments, tuned ones first."""
        signature, found = key.components["signature"], []
        for listed in self._levels.listing():
            if listed.key != key.digest and signature in listed.preimage[: len(signature) + 8]:
                facts = json.loads(listed.facts)
                found.append((facts.get("quality") != "tuned", facts["recipe"][0]))
        return [name for _, name in sorted(found)]

    def _barred(self, job: Job) -> Callable[[Candidate], str | None]:
        """Says why a candidate is not to be tried: shown wrong, or processes ended in it."""
        denied, struck = denials_of(self._levels, job.key, self._target), self._levels.struck()

        def reason(candidate: Candidate) -> str | None:
            found = denied(candidate)
            if found is None and struck:
                verdict = struck.get(denial(job.key, self._target, candidate))
                found = verdict and (
                    f"{verdict.count} processes ended while they built or ran it; "
                    f"to try once more: plancache rm --verdicts {verdict.key.hex()[:16]}"
                )
            return found

        return reason

    def _deny(self, job: Job, outcome: Outcome) -> None:
        for one in outcome.wrong:
            summary = decode(job.key.components["signature"]).summary
            _log.warning("%s is denied for graphs like %s: %s", one.candidate.name, summary, one.reason)
            reason = f"{one.candidate.name}, {summary}: {one.reason}"
            self._levels.record("denied", denial(job.key, self._target, one.candidate), reason)


T = TypeVar("T")


def _or_failed(job: Job, step: Callable[[], T]) -> T | Tuned:
    """What a step brings, or how it failed."""
    started = time.monotonic()
    try:
        return step()
    except Exception as error:  # one graph's, whatever it is; the others go on
        _log.debug("tuning %s failed", job.key.hex[:16], exc_info=True)
        return Tuned(job.key, job.entry, None, time.monotonic() - started, str(error) or type(error).__name__, error)


def by_uid(reading: Reading, inputs: Mapping[Any, Any]) -> dict[int, Any]:
    """A caller's inputs, given by tensor, uid or name, by canonical uid. Raises `OperandError` for one that is not the graph's."""
    known: dict[Any, int] = {}
    for number, tensor in enumerate(reading.tensors, 1):
        known[tensor] = known[tensor.uid] = known[tensor.name] = number
    strangers = [name for name in inputs if name not in known]
    if strangers:
        raise OperandError(f"inputs: {strangers[0]!r} is no tensor of this graph; give buffers by tensor, uid or name")
    return {known[name]: buffer for name, buffer in inputs.items()}


def stored_entries(levels: Levels, target: DeviceTarget, variables: Mapping[str, str], *, refresh: bool) -> Iterator[Entry]:
    """The stored plans that may run here, untuned ones only unless all are to be done again."""
    for digest in dict.fromkeys(listed.key for listed in levels.listing()):
        found = next(levels.rows(digest), None)
        try:
            entry = None if found is None else unpack(found.row)
        except CorruptEntryError:
            continue
        if entry is not None and (refresh or entry.quality != "tuned") and is_of(entry, target, variables):
            yield entry


def is_of(entry: Entry, target: DeviceTarget, variables: Mapping[str, str]) -> bool:
    """Whether an entry is for this device and environment, and may run here."""
    same = Place(*entry.key.preimages[1:6]) == target.place and json.loads(entry.key.components["variables"]) == dict(variables)
    return same and usable(entry, target.backend.here) is None


def job_of(entry: Entry) -> Job:
    return Job(entry.key, entry, Constraints(**json.loads(entry.key.components["constraints"])), {})
