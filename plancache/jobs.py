"""What is to be tuned, what is known of it from elsewhere, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.description import decode
from plancache.entry import MALFORMED, Entry, split_preimage, unpack, usable
from plancache.errors import CorruptEntryError, OperandError
from plancache.key import Constraints, Place, PlanKey

if TYPE_CHECKING:
    from plancache.signature import Reading
    from plancache.store.levels import Levels
    from plancache.target import DeviceTarget

_UPGRADED = {"driver", "cudnn", "frontend"}


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


class Recipe(NamedTuple):
    """The candidate that is stored for a graph in another environment. `upgraded`: from that one to this one only versions
    changed, not the GPU nor what its caller allows."""

    name: str
    tuned: bool
    upgraded: bool
    created_at: float


HUNG = "hung: "
"""How the reason of a verdict begins where a process did not end by itself."""


def hung(step: str, limit_s: float) -> str:
    return f"{HUNG}nothing came of its {step} within {limit_s:g} s"


def recipes(levels: Levels, keys: Iterable[PlanKey]) -> dict[PlanKey, list[Recipe]]:
    """What is stored for the same graphs in other environments, tuned ones first, the newest first. Raises `StoreError`."""
    wanted: dict[bytes, list[PlanKey]] = {}
    for key in keys:
        wanted.setdefault(key.components["signature"], []).append(key)
    found: dict[PlanKey, list[Recipe]] = {}
    for listed in levels.listing():
        try:
            theirs = PlanKey(split_preimage(listed.preimage))
            for key in wanted.get(theirs.components["signature"], ()):
                facts = json.loads(listed.facts)
                changed = {difference.component for difference in key.difference(theirs)}
                if changed:
                    tuned, when = facts["quality"] == "tuned", float(facts["created_at"])
                    recipe = Recipe(str(facts["recipe"][0]), tuned, changed <= _UPGRADED, when)
                    found.setdefault(key, []).append(recipe)
        except MALFORMED:  # found out where it is asked for
            continue
    return {key: sorted(some, key=lambda one: (not one.tuned, -one.created_at)) for key, some in found.items()}


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
    return Job(entry.key, entry, constraints_of(entry.key), {})


def constraints_of(key: PlanKey) -> Constraints:
    return Constraints(**json.loads(key.components["constraints"]))
