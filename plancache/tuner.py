"""Tuning what is stored: one process a key, the heuristic's plan first, the proven winner kept with all that was learned."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache import __version__
from plancache.autotune import Outcome, Race, Tuning
from plancache.capture import quietly
from plancache.conditions import conditions, is_quiet
from plancache.description import decode, family
from plancache.entry import Built, Candidate, Entry, unpack
from plancache.errors import CorruptEntryError, OperandError, ProofError
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
    """What became of one. `entry`: the tuned one, or None where `reason` says why there is none."""

    key: PlanKey
    before: Entry | None
    entry: Entry | None
    seconds: float
    reason: str

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
    """A graph between the first look and the decision; `race` is None where another process tuned it: `found`."""

    job: Job
    bench: Workbench
    race: Race | None
    heuristic: Entry | None
    found: Entry | None
    seconds: float


class Tuner:
    """Tunes plans for one device, with children that compile ahead."""

    def __init__(
        self, levels: Levels, target: DeviceTarget, variables: Mapping[str, str], tuning: Tuning, *, refresh: bool = False
    ) -> None:
        self._levels = levels
        self._target = target
        self._variables = variables
        self._tuning = tuning
        self._refresh = refresh
        self._builders = target.builders(variables, tuning.jobs)
        folder = levels.lock_folder()
        # a lock of its own: a tuning takes longer than any build, and only those who wait for it are to wait
        self._flight = SingleFlight(
            None if folder is None else folder.with_name("tuning"),
            timeout_s=threading.TIMEOUT_MAX,
            on_fault=lambda error: _log.warning("%s", error),
        )

    def tune(self, jobs: Iterable[Job]) -> Iterator[Tuned]:
        """All compile side by side, and are looked at as they are ready; when nothing compiles any more they are decided.

        Those that another process tunes at the moment come last, when no lock is held.
        """
        until = time.monotonic() + (self._tuning.total_budget_s or math.inf)
        taken: list[Job] = []
        waiting = iter(jobs)
        while batch := list(islice(waiting, _AHEAD)):
            with ExitStack() as locks:
                screened = []
                for job, bench in self._as_ready(batch):
                    if time.monotonic() > until:
                        yield Tuned(job.key, job.entry, None, 0.0, "the budget for all graphs was spent")
                    elif not locks.enter_context(self._flight.attempt(job.key.digest)):
                        taken.append(job)
                    else:
                        screened.append(self._screened(job, bench))
                for work in screened:
                    yield self._decided(work)
        for job in taken:
            yield self._tune_later(job)

    def _as_ready(self, batch: list[Job]) -> Iterator[tuple[Job, Workbench]]:
        """Jobs with their benches, those whose candidates are built first."""
        ahead = [(job, self._bench(job)) for job in batch]
        for _, bench in sorted(ahead, key=lambda pair: -pair[1].compiling()):
            bench.start_compiling()  # the longest first, or one is waited for at the end
        while ahead:
            yield ahead.pop(next((at for at, (_, bench) in enumerate(ahead) if bench.ready()), 0))

    def _tune_later(self, job: Job) -> Tuned:
        if not self._tuning.wait:
            return Tuned(job.key, job.entry, None, 0.0, "another process tunes it")
        with self._flight.building(job.key.digest):
            return self._decided(self._screened(job, self._bench(job)))

    def _bench(self, job: Job) -> Workbench:
        signature = job.key.components["signature"]
        bench = Workbench(self._target.backend, self._builders, signature, job.constraints, self._tuning, job.inputs)
        if bench.compiling() <= _FEW:
            bench.start_compiling()  # at once: its turn comes first
        return bench

    def _screened(self, job: Job, bench: Workbench) -> _Work:
        """What is left of a graph's candidates after a first look; the heuristic's plan is stored by then."""
        started = time.monotonic()
        found = None if self._refresh else self._stored_tuned(job.key)  # another process may have tuned it meanwhile
        if found is not None:
            return _Work(job, bench, None, job.entry, found, 0.0)
        heuristic = job.entry or self._heuristic(job, bench)
        race = Race(bench, self._tuning, denied=self._denied(job), first=self._recipes(job.key))
        race.screen()
        with quietly():
            race.set_aside()
            bench.set_aside()
        return _Work(job, bench, race, heuristic, None, time.monotonic() - started)

    def _decided(self, work: _Work) -> Tuned:
        """The winner, proven and stored."""
        job, race, started = work.job, work.race, time.monotonic() - work.seconds
        if race is None:
            return Tuned(job.key, work.heuristic, work.found, work.seconds, "")
        before = self._conditions()
        outcome = race.decide()
        after = self._conditions()
        self._deny(job, outcome)
        release(outcome.contestants, self._target.backend)
        work.bench.set_aside()
        if outcome.winner is None:
            return Tuned(job.key, work.heuristic, None, time.monotonic() - started, self._without_winner(outcome, job.key))
        entry = self._entry(job, outcome, before, after)
        self._levels.put(entry, replace_equal=True)
        return Tuned(job.key, work.heuristic, entry, time.monotonic() - started, "")

    def _heuristic(self, job: Job, bench: Workbench) -> Entry | None:
        """The heuristic's first plan, stored at once so that others can go on with it; None where none can be built."""
        for option in bench.options():
            try:
                built = bench.start(option).result()
                bench.load(built)
            except Exception as error:  # the next one is the heuristic's choice then
                _log.debug("%s: %s", option.candidate.name, error)
                continue
            entry = self._made(job, built, quality="heuristic")
            self._levels.put(entry, replace_equal=False)
            return entry
        return None

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
            if entry.quality == "tuned":
                return entry
        return None

    def _without_winner(self, outcome: Outcome, key: PlanKey) -> str:
        if outcome.heuristic_is_wrong and outcome.heuristic is not None:
            self._levels.forget(key.digest)
            raise ProofError(key.hex, f"the heuristic's plan {outcome.heuristic.candidate.name}: {outcome.heuristic.reason}")
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

    def _denied(self, job: Job) -> Callable[[Candidate], str | None]:
        denials = self._levels.denials()
        if not denials:
            return lambda _: None
        return lambda candidate: denials.get(self._denial(job, candidate))

    def _deny(self, job: Job, outcome: Outcome) -> None:
        for one in outcome.wrong:
            summary = decode(job.key.components["signature"]).summary
            _log.warning("%s is denied for graphs like %s: %s", one.candidate.name, summary, one.reason)
            reason = f"{one.candidate.name}, {summary}: {one.reason}"
            self._levels.record("denied", self._denial(job, one.candidate), reason)

    def _denial(self, job: Job, candidate: Candidate) -> bytes:
        libraries, device = self._target.backend.libraries, self._target.device
        return denial(job.key, libraries.cudnn_version, device.sm_version, candidate)


def denial(key: PlanKey, cudnn_version: int, sm_version: int, candidate: Candidate) -> bytes:
    """Under what a candidate is denied: the graph's family, cuDNN's version, compute capability, engine and knobs."""
    parts = [
        hashlib.sha256(family(decode(key.components["signature"]))).hexdigest(),
        cudnn_version,
        sm_version,
        candidate.engine,
        sorted(candidate.knobs.items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def by_uid(reading: Reading, inputs: Mapping[Any, Any]) -> dict[int, Any]:
    """A caller's inputs, given by tensor, uid or name, by canonical uid. Raises `OperandError` for one that is not the graph's."""
    known: dict[Any, int] = {}
    for number, tensor in enumerate(reading.tensors, 1):
        known[tensor] = known[tensor.uid] = known[tensor.name] = number
    strangers = [name for name in inputs if name not in known]
    if strangers:
        raise OperandError(f"inputs: {strangers[0]!r} is no tensor of this graph; give buffers by tensor, uid or name")
    return {known[name]: buffer for name, buffer in inputs.items()}


def stored_jobs(levels: Levels, target: DeviceTarget, variables: Mapping[str, str], *, refresh: bool) -> Iterator[Job]:
    """The stored plans that may run here, untuned ones only unless all are to be done again."""
    for listed in levels.listing():
        found = next(levels.rows(listed.key), None)
        try:
            entry = None if found is None else unpack(found.row)
        except CorruptEntryError:
            continue
        if entry is None or (entry.quality == "tuned" and not refresh):
            continue
        parts = entry.key.components
        if Place(*entry.key.preimages[1:6]) == target.place and json.loads(parts["variables"]) == dict(variables):
            yield Job(entry.key, entry, Constraints(**json.loads(parts["constraints"])), {})
