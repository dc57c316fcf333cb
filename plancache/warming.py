"""Graphs made again from their signatures: those of a manifest, and those that are stored for other environments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.checking import unknown_to_frontend
from plancache.entry import MALFORMED, QUALITIES
from plancache.errors import UncacheableGraphError
from plancache.key import Constraints, Place
from plancache.manifest import Wanted
from plancache.signature import Uncacheable, read

if TYPE_CHECKING:
    from plancache.listing import Listed
    from plancache.target import DeviceTarget

_CURE = "plan it from the program that describes it"


class Known(NamedTuple):
    """A graph that is stored for another environment, and its best entry there, of equal ones the newest."""

    wanted: Wanted
    entry: Listed


def graph_of(wanted: Wanted, target: DeviceTarget) -> Any:
    """A `cudnn.pygraph` with this signature, not planned yet. Raises `UncacheableGraphError` where this frontend makes none."""
    obstacle = unknown_to_frontend(wanted.description)
    if obstacle is not None:
        raise UncacheableGraphError(obstacle, _CURE)
    try:
        graph = target.backend.copy(wanted.description)
        same = read(graph, target.device).signature == wanted.signature
    except Uncacheable as error:
        raise UncacheableGraphError(error.reason, _CURE) from None
    except (ValueError, LookupError, TypeError) as error:
        raise UncacheableGraphError(f"it cannot be made again ({type(error).__name__}: {error})", _CURE) from None
    if not same:
        raise UncacheableGraphError("made again it is another graph", _CURE)
    return graph


def elsewhere(entries: Iterable[Listed], place: Place, variables: Mapping[str, str]) -> list[Known]:
    """What the entries of other environments than this one are for, each graph once, in the order of a manifest."""
    best: dict[tuple[bytes, Constraints], Known] = {}
    for known in _known(entries):
        key = known.entry.key
        if Place(*key.preimages[1:6]) == place and json.loads(key.components["variables"]) == dict(variables):
            continue
        other = best.get(known.wanted.identity)
        if other is None or _rank(known.entry) >= _rank(other.entry):
            best[known.wanted.identity] = known
    return sorted(best.values(), key=lambda known: (known.wanted.summary, known.wanted.digest, known.wanted.constraints.encoded))


def _known(entries: Iterable[Listed]) -> Iterator[Known]:
    for entry in entries:
        with suppress(*MALFORMED):  # constraints of a later version
            constraints = Constraints(**json.loads(entry.key.components["constraints"]))
            yield Known(Wanted(entry.key.components["signature"], constraints), entry)


def _rank(entry: Listed) -> tuple[int, float]:
    return QUALITIES.index(entry.facts["quality"]), entry.facts["created_at"]
