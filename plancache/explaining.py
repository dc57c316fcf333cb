"""Why a key is answered here, or is not: what is stored under it, what is known of it, and the entry that comes nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from plancache.description import decode, family
from plancache.entry import MALFORMED, Entry, split_preimage, unpack, usable
from plancache.errors import CorruptEntryError, GraphStateError
from plancache.key import Constraints, PlanKey, make_key
from plancache.lazy import lazy
from plancache.outline import Outline, outline
from plancache.signature import Uncacheable
from plancache.store.levels import STRIKES, Found, Levels
from plancache.words import Contrast, contrasts

if TYPE_CHECKING:
    from plancache.store import database
    from plancache.store.database import Verdict
    from plancache.target import DeviceTarget

State = Literal[
    "usable",
    "missing",
    "elsewhere",  # stored for another environment
    "unusable",  # it needs what is not here
    "corrupt",
    "quarantined",
    "struck",
    "unsupported",
    "denied",
    "uncacheable",
    "refused",  # the graph is planned already, empty, or its dims do not fit
    "unknown",  # what plans depend on is not known
]

Likeness = Literal["graph", "family", "operations", "components"]
"""What the nearest entry has in common: the graph itself, all of it but extents, its operations, or other components of the key."""

_MISSED = {
    "graph": "its graph is stored for another environment or other constraints",
    "family": "it is stored in another size",
    "operations": "its operations are stored with other tensors or parameters",
    "components": "nothing like it is stored",
}
_FAR = 1000  # tensors: of a graph that has another number of them
_FEW = 3  # differences that the reason names; all of them are listed


@dataclass(frozen=True)
class Nearest:
    """The stored entry that comes nearest to a key, and all that they differ in. `denied`: why its engine is built no more."""

    key: str
    level: str
    graph: str | None
    engine: str | None
    quality: str | None
    likeness: Likeness
    differences: tuple[Contrast, ...]
    denied: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "differences": [contrast._asdict() for contrast in self.differences]}


@dataclass(frozen=True)
class Explanation:
    """Why a graph, or a stored entry, is answered here or is not.

    `key`: its hex digits, None for a graph that cannot be cached. `graph`: None where no more than a key is known.
    `reason`: None where it is usable. `level`, `engine`, `quality`: of the plan that answers.
    """

    state: State
    key: str | None
    graph: str | None
    reason: str | None = None
    level: str | None = None
    engine: str | None = None
    quality: str | None = None
    nearest: Nearest | None = None

    def __str__(self) -> str:
        """One line, with the first differences."""
        told = "usable" if self.reason is None else " ".join(self.reason.split())
        return f"{self.graph or self.key or 'a graph'}: {told}{f': {_first(self.nearest.differences)}' if self.nearest else ''}"

    @property
    def usable(self) -> bool:
        """Whether a request is answered without a build."""
        return self.state == "usable"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as `plancache explain --json` prints it."""
        return {"usable": self.usable, **vars(self), "nearest": self.nearest and self.nearest.to_dict()}


class Explainer:
    """Explains keys for one device by what is stored, which is listed once.

    `key_of`: the key of a graph, as a request has it. `held`: the entry of a key whose plan is in memory, or None.
    """

    def __init__(
        self,
        levels: Levels,
        target: DeviceTarget,
        variables: Mapping[str, str],
        key_of: Callable[[Any], PlanKey],
        held: Callable[[bytes], Entry | None],
    ) -> None:
        self._levels = levels
        self._target = target
        self._variables = variables
        self._key_of = key_of
        self._held = held

    @lazy
    def _index(self) -> _Index:
        return _Index(self._levels)

    def explain(self, graph_or_key: Any) -> Explanation:
        """`of` a graph, or an object with a `graph`; `stored` of a key. What `plan` refuses is explained too."""
        if isinstance(graph_or_key, str | PlanKey):
            return self.stored(graph_or_key)
        try:
            key = self._key_of(getattr(graph_or_key, "graph", graph_or_key))
        except Uncacheable as error:
            return Explanation("uncacheable", None, None, f"it cannot be cached: {error.reason}")
        except (GraphStateError, ValueError) as error:
            return Explanation("refused", None, None, str(error))
        return self.of(key)

    def of(self, key: PlanKey) -> Explanation:
        """Why a request with this key is a hit or a miss. Raises `StoreError` where what is stored cannot be read."""
        held = self._held(key.digest)
        if held is not None:
            return _answered("memory", held)
        if self._target.unknown:
            return _not("unknown", key, f"{self._target.unknown}: nothing that is stored is used")
        obstacle: Explanation | None = None
        for found in self._levels.copies(key.digest):
            state, told = self._judge(found, key)
            if isinstance(told, Entry):
                return _answered(found.level, told)
            obstacle = obstacle or _not(state, key, told)
        verdict = None if obstacle else self._binding(self._levels.verdicts(key.digest))
        if verdict is not None:
            return _not(_state_of(verdict), key, _said(verdict))
        return obstacle or self._missing(key)

    def stored(self, digest: str | PlanKey) -> Explanation:
        """Whether the entry of a key, or whose key starts with these hex digits, answers its graph here.

        Raises `LookupError` where nothing is known under it, or more than one thing.
        """
        text = (digest.hex if isinstance(digest, PlanKey) else digest).lower()
        if not text:
            raise LookupError("give at least one hex digit of a key; 'plancache ls' lists them")
        found = {one.digest: one for one in reversed(self._index.stored) if one.digest.hex().startswith(text)}
        known = [verdict for verdict in self._levels.verdicts() if verdict.key.hex().startswith(text)]
        digests = found.keys() | {verdict.key for verdict in known}
        if len(digests) != 1:
            cure = "'plancache ls' lists them; for a graph that is not stored name the function that yields it, package.module:function"
            raise LookupError(f"{len(digests) or 'no'} stored entries have a key that starts with {text!r}; {cure}")
        (one,) = found.values() or (None,)
        if one is not None:
            return self._of_stored(one)
        verdict = self._binding(known)
        (key,) = digests
        if verdict is None:
            return Explanation("missing", key.hex(), None, "no plan is stored under it, and nothing that is known of it counts here")
        return Explanation(_state_of(verdict), key.hex(), None, _said(verdict))

    def _of_stored(self, one: _Stored) -> Explanation:
        if one.key is None or one.key.digest != one.digest:
            return Explanation("corrupt", one.digest.hex(), None, "its row is not what was written; 'plancache verify' says more")
        *here, _ = make_key(one.key.preimages[0], self._target.place, self._variables, Constraints()).preimages
        asked = PlanKey((*here, one.key.preimages[-1]))  # what a request here has, under the same constraints
        if asked == one.key:
            return self.of(asked)
        near = self._beside(one, asked, "graph")
        reason = "it is for another environment"
        if self.of(asked).usable:
            reason += f"; here its graph is answered by {asked.hex[:12]}"
        return Explanation("elsewhere", one.key.hex, near.graph, reason, nearest=near)

    def _judge(self, found: Found, key: PlanKey) -> tuple[State, Entry | str]:
        """The entry of a row, or why it is not used."""
        try:
            entry = unpack(found.row, key)
        except CorruptEntryError as error:
            return "corrupt", f"{error}; it is built anew"
        if (key.digest, found.row.checksum) in self._levels.known_bad():
            verdicts = [one for one in self._levels.verdicts(key.digest) if one.checksum == found.row.checksum]
            said = "; ".join(map(_said, verdicts)) or "it did not load in this process"
            return _state_of(verdicts[-1]) if verdicts else "quarantined", f"{said}; it is built anew"
        reason = usable(entry, self._target.backend.here)
        return ("usable", entry) if reason is None else ("unusable", f"{reason}; it is built anew")

    def _binding(self, verdicts: Sequence[Verdict]) -> Verdict | None:
        """The first verdict that a build here would meet."""
        from plancache.building import WITHOUT_GPU

        here = not self._target.device.is_file
        for verdict in verdicts:
            known = verdict.kind in ("unsupported", "denied") or (verdict.kind == WITHOUT_GPU and not here)
            if known or (verdict.kind == "struck" and not verdict.checksum and verdict.count >= STRIKES and here):
                return verdict
        return None

    # ---- what comes nearest

    def _missing(self, key: PlanKey) -> Explanation:
        found = self._index.nearest(key)
        if found is None:
            return _not("missing", key, "nothing is stored")
        one, likeness = found
        near = self._beside(one, key, likeness)
        return _not("missing", key, _MISSED[likeness], near)

    def _beside(self, one: _Stored, key: PlanKey, likeness: Likeness) -> Nearest:
        """A stored entry beside the key that was asked for."""
        from plancache.building import denials_of
        from plancache.listing import Listed

        assert one.key is not None  # what cannot be read is near to nothing
        fact: dict[str, Any] = {}
        denied = None
        with suppress(CorruptEntryError):
            listed = Listed.of(*one.row[1:])
            fact = listed.to_dict()
            denied = denials_of(self._levels, key)(listed.recipe) if likeness in ("graph", "family") else None
        differences = contrasts(key, one.key)
        engine, quality = fact.get("engine"), fact.get("quality")
        return Nearest(one.digest.hex(), one.level, _summary(one.key), engine, quality, likeness, differences, denied)


class _Stored(NamedTuple):
    """A row that is stored; without a key where its preimage cannot be read."""

    level: str
    digest: bytes
    key: PlanKey | None
    row: database.Listed


_Pair = tuple[_Stored, PlanKey]


class _Index:
    """What is stored, oldest first in each level, to find what comes nearest to a key."""

    def __init__(self, levels: Levels) -> None:
        self.stored = [_Stored(level, row.key, _key_of(row.preimage), row) for level, _, rows in levels.listings() for row in rows]
        self._readable: list[_Pair] = [(one, one.key) for one in self.stored if one.key is not None]
        self._outlines: dict[bytes, Outline | None] = {}
        self._families: dict[bytes, bytes | None] = {}

    def nearest(self, key: PlanKey) -> tuple[_Stored, Likeness] | None:
        """An entry of the same graph, else of the same family, else what has the most equal components, the same operations first."""
        if not self._readable:
            return None
        signature = key.preimages[0]
        same = [pair for pair in self._readable if pair[1].preimages[0] == signature]
        if same:
            return self._closest(same, key), "graph"
        mine = self._outline(signature)
        outlines = ((pair, self._outline(pair[1].preimages[0])) for pair in self._readable)
        alike = [pair for pair, theirs in outlines if mine and theirs and theirs.operations == mine.operations]
        kin = [pair for pair in alike if self._family(pair[1].preimages[0]) == self._family(signature)]
        if kin:
            return self._closest(kin, key), "family"
        most = max(_equal(pair, key) for pair in self._readable)
        near = [pair for pair in alike if _equal(pair, key) == most]
        return (self._closest(near, key), "operations") if near else (self._closest(self._readable, key), "components")

    def _closest(self, pairs: Sequence[_Pair], key: PlanKey) -> _Stored:
        """What has the most equal components, of those what has the most equal tensors, of those the newest."""
        most = max(_equal(pair, key) for pair in pairs)
        nearest = [pair for pair in reversed(pairs) if _equal(pair, key) == most]
        return min(nearest, key=lambda pair: self._distance(key.preimages[0], pair[1].preimages[0]))[0]

    def _distance(self, mine: bytes, theirs: bytes) -> int:
        ours, others = self._outline(mine), self._outline(theirs)
        if ours is None or others is None or len(ours.tensors) != len(others.tensors):
            return _FAR
        return sum(tensor != other for tensor, other in zip(ours.tensors, others.tensors, strict=True))

    def _outline(self, signature: bytes) -> Outline | None:
        if signature not in self._outlines:
            self._outlines[signature] = _outline(signature)
        return self._outlines[signature]

    def _family(self, signature: bytes) -> bytes | None:
        if signature not in self._families:
            self._families[signature] = _family(signature)
        return self._families[signature]


def _equal(pair: _Pair, key: PlanKey) -> int:
    return len(key.preimages) - len(key.difference(pair[1]))


def _key_of(preimage: object) -> PlanKey | None:
    try:
        return PlanKey(split_preimage(preimage))  # type: ignore[arg-type]  # SQLite takes any type in any column
    except MALFORMED:
        return None


def _outline(signature: bytes) -> Outline | None:
    try:
        return outline(signature)
    except MALFORMED:
        return None


def _family(signature: bytes) -> bytes | None:
    try:
        return family(decode(signature))
    except MALFORMED:
        return None


def _summary(key: PlanKey) -> str | None:
    try:
        return outline(key.preimages[0]).summary
    except MALFORMED:
        return None


# ---- words


def _answered(level: str, entry: Entry) -> Explanation:
    return Explanation("usable", entry.key.hex, _summary(entry.key), None, level, entry.engine, entry.quality)


def _not(state: State, key: PlanKey, reason: str, nearest: Nearest | None = None) -> Explanation:
    return Explanation(state, key.hex, _summary(key), reason, nearest=nearest)


def _first(differences: Sequence[Contrast]) -> str:
    rest = len(differences) - _FEW
    return "; ".join(map(str, differences[:_FEW])) + (f"; and {rest} more" if rest > 0 else "")


def _state_of(verdict: Verdict) -> State:
    return verdict.kind.split()[0]  # type: ignore[return-value]  # `unsupported without a GPU` too


def _said(verdict: Verdict) -> str:
    times = f"{verdict.count} {'process' if verdict.count == 1 else 'processes'}"
    return {
        "quarantined": f"it is not used any more ({verdict.reason})",
        "struck": f"{times} ended while they {'loaded' if verdict.checksum else 'built'} it ({verdict.reason})",
        "denied": f"it was shown wrong, and is not built any more ({verdict.reason})",
    }.get(verdict.kind, f"cuDNN has no plan for it: {verdict.reason}")
