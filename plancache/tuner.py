"""Tuning what is stored: one process a key, the heuristic's plan first, the proven winner kept with all that was learned."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache import __version__
from plancache.autotune import Outcome, Tuning, tune
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
        """One after the other, in the order in which they are ready: all compile side by side meanwhile."""
        started = time.monotonic()
        ahead: list[tuple[Job, Workbench]] = []
        waiting = iter(jobs)
        while True:
            fresh = [(job, self._bench(job)) for job in islice(waiting, _AHEAD - len(ahead))]
            for _, bench in sorted(fresh, key=lambda pair: -pair[1].compiling()):
                bench.start_compiling()  # the longest first, or one is waited for at the end
            ahead += fresh
            if not ahead:
                return
            job, bench = ahead.pop(next((at for at, (_, bench) in enumerate(ahead) if bench.ready()), 0))
            spent = time.monotonic() - started
            if self._tuning.total_budget_s is not None and spent > self._tuning.total_budget_s:
                yield Tuned(job.key, job.entry, None, 0.0, "the budget for all graphs was spent")
                continue
            yield self._tune_one(job, bench)

    def _bench(self, job: Job) -> Workbench:
        signature = job.key.components["signature"]
        bench = Workbench(self._target, self._builders, signature, job.constraints, self._tuning, job.inputs)
        if bench.compiling() <= _FEW:
            bench.start_compiling()  # at once: its turn comes first
        return bench

    def _tune_one(self, job: Job, bench: Workbench) -> Tuned:
        started, key, first = time.monotonic(), job.key, job.entry
        if not self._tuning.wait and self._flight.busy(key.digest):
            return Tuned(key, first, None, 0.0, "another process tunes it")
        with self._flight.building(key.digest):
            found = None if self._refresh else self._stored_tuned(key)  # another process may have tuned it meanwhile
            if found is not None:
                return Tuned(key, first, found, time.monotonic() - started, "")
            first = first or self._heuristic(job, bench)
            before = self._conditions()
            outcome = tune(bench, self._tuning, denied=self._denied(job), first=self._recipes(key))
            after = self._conditions()
            self._deny(job, outcome)
            release(outcome.contestants, self._target)
            if outcome.winner is None:
                return Tuned(key, first, None, time.monotonic() - started, self._without_winner(outcome, key))
            entry = self._entry(job, outcome, before, after)
            self._levels.put(entry, replace_equal=True)
        return Tuned(key, first, entry, time.monotonic() - started, "")

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
