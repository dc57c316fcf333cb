"""Which graphs of a manifest are answered here without a build, and why the others are not. Nothing is built, nothing loaded."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plancache.building import WITHOUT_GPU, denial
from plancache.encoding import Enum
from plancache.entry import MALFORMED, Candidate, decode_facts, split_preimage, unpack, usable
from plancache.environment import load_frontend
from plancache.errors import CorruptEntryError
from plancache.key import PlanKey, make_key
from plancache.lazy import lazy
from plancache.manifest import Manifest, Wanted
from plancache.signature import Uncacheable
from plancache.store.levels import STRIKES, Levels
from plancache.words import Contrast, contrasts

if TYPE_CHECKING:
    from plancache.description import Description
    from plancache.store.database import Verdict
    from plancache.target import DeviceTarget

State = Literal[
    "usable", "missing", "elsewhere", "unusable", "corrupt", "quarantined", "struck", "unsupported", "denied", "uncacheable", "foreign"
]
"""`missing`: never built here. `elsewhere`: stored for another environment or other constraints. `unusable`: it needs what is not
here. `uncacheable`: nothing is cached here. `foreign`: this frontend cannot make the graph."""

_FEW = 3  # differences that a reason names; all of them are listed


@dataclass(frozen=True)
class Checked:
    """A graph of a manifest. `reason`: why it is not answered here, None where it is; by `level` and `engine` then.

    `differences`: from the stored plan of the same graph that comes nearest, where there is one.
    """

    wanted: Wanted
    state: State
    key: str
    reason: str | None = None
    level: str | None = None
    engine: str | None = None
    quality: str | None = None
    differences: tuple[Contrast, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """One graph as `plancache check --json` prints it."""
        own = {name: value for name, value in vars(self).items() if name not in ("wanted", "differences")}
        graph = {"graph": self.wanted.summary, "sha256": self.wanted.digest, "count": self.wanted.count}
        return {**graph, **own, "differences": [contrast._asdict() for contrast in self.differences]}


@dataclass(frozen=True)
class Check:
    """What became of each graph of a manifest, in its order."""

    device: str
    graphs: tuple[Checked, ...]

    @property
    def missing(self) -> tuple[Checked, ...]:
        """Those that would have to be built."""
        return tuple(one for one in self.graphs if one.state != "usable")

    @property
    def usable(self) -> int:
        return len(self.graphs) - len(self.missing)


class Checker:
    """Looks keys up as a request does, for one device and environment, which `check_environment` may refuse (`Uncacheable`)."""

    def __init__(
        self,
        levels: Levels,
        target: DeviceTarget,
        variables: dict[str, str],
        check_environment: Callable[[DeviceTarget, dict[str, str]], None],
    ) -> None:
        self._levels = levels
        self._target = target
        self._variables = variables
        self._check_environment = check_environment

    def check(self, manifest: Iterable[Wanted] | str | os.PathLike[str]) -> Check:
        """All graphs of a manifest, or of the one in a file. Raises `ManifestError`, `StoreError`."""
        if isinstance(manifest, str | os.PathLike):
            manifest = Manifest.read(manifest)
        obstacle, found = self._obstacle(), []
        for wanted in manifest:
            key = make_key(wanted.signature, self._target.place, self._variables, wanted.constraints)
            found.append((wanted, key, self._stored(wanted, key, obstacle)))
        missed = {key.preimages[0] for _, key, checked in found if checked is None}
        near = self._like(missed) if missed else {}
        graphs = tuple(checked or self._missing(wanted, key, near.get(wanted.signature, ())) for wanted, key, checked in found)
        return Check(self._target.device.model, graphs)

    def _obstacle(self) -> str | None:
        """Why nothing is cached here at all; None where it is."""
        try:
            self._check_environment(self._target, self._variables)
        except Uncacheable as error:
            return error.reason
        return self._target.unknown

    def _stored(self, wanted: Wanted, key: PlanKey, obstacle: str | None) -> Checked | None:
        """What the rows under a key are good for; None where there are none."""
        if obstacle:
            return Checked(wanted, "uncacheable", key.hex, f"nothing is cached here: {obstacle}")
        refused = None
        for found in self._levels.rows(key.digest):
            try:
                entry = unpack(found.row, key)
            except CorruptEntryError as error:
                refused = refused or Checked(wanted, "corrupt", key.hex, str(error), found.level)
                continue
            reason = usable(entry, self._target.backend.here)
            if reason is None:
                return Checked(wanted, "usable", key.hex, None, found.level, entry.engine, entry.quality)
            refused = refused or Checked(wanted, "unusable", key.hex, reason, found.level, entry.engine, entry.quality)
        return refused

    def _missing(self, wanted: Wanted, key: PlanKey, near: Sequence[tuple[PlanKey, bytes]]) -> Checked:
        """Why nothing is stored under a key."""
        foreign = unknown_to_frontend(wanted.description)
        if foreign:
            return Checked(wanted, "foreign", key.hex, foreign)
        differences: tuple[Contrast, ...] = ()
        if near:  # of those that differ in as few components the newest
            nearest, _ = min(reversed(near), key=lambda one: len(one[0].difference(key)))
            differences = tuple(sorted(contrasts(key, nearest), key=lambda contrast: contrast.component == "device"))
        for state, reason in self._known(wanted, key, near):
            return Checked(wanted, state, key.hex, reason, differences=differences)
        if differences:
            more = f" and {len(differences) - _FEW} more" if len(differences) > _FEW else ""
            reason = f"built for another environment: {', '.join(map(str, differences[:_FEW]))}{more}"
            return Checked(wanted, "elsewhere", key.hex, reason, differences=differences)
        return Checked(wanted, "missing", key.hex, "never built here")

    def _known(self, wanted: Wanted, key: PlanKey, near: Sequence[tuple[PlanKey, bytes]]) -> Iterator[tuple[State, str]]:
        """What lies beside the entries and stands against this key, or against the recipe that it had."""
        without_gpu = self._target.device.is_file
        for verdict in self._verdicts.get(key.digest, ()):
            if verdict.kind == "quarantined":
                yield "quarantined", verdict.reason
            elif verdict.kind == "struck" and verdict.count >= STRIKES and not (without_gpu and not verdict.checksum):
                yield "struck", f"{verdict.count} processes ended with it ({verdict.reason})"
            elif verdict.kind == "unsupported" or (verdict.kind == WITHOUT_GPU and without_gpu):
                yield "unsupported", f"cuDNN has no plan for it: {verdict.reason}"
        if self._denials:
            recipes = [*filter(None, [wanted.recipe]), *(recipe for _, facts in near for recipe in _recipe(facts))]
            for recipe in recipes:
                reason = self._denials.get(denial(key, recipe))
                if reason is not None:
                    yield "denied", reason

    @lazy
    def _verdicts(self) -> dict[bytes, list[Verdict]]:
        by_key = defaultdict(list)
        for verdict in self._levels.verdicts():
            by_key[verdict.key].append(verdict)
        return by_key

    @lazy
    def _denials(self) -> dict[bytes, str]:
        return self._levels.denials()

    def _like(self, signatures: set[bytes]) -> dict[bytes, list[tuple[PlanKey, bytes]]]:
        """The stored keys of these signatures with their facts, oldest first."""
        found: dict[bytes, list[tuple[PlanKey, bytes]]] = {}
        for row in self._levels.listing():
            if _signature(row.preimage) in signatures:
                with suppress(*MALFORMED):  # nothing can find such a row
                    preimages = split_preimage(row.preimage)
                    found.setdefault(preimages[0], []).append((PlanKey(preimages), row.facts))
        return found


def _signature(preimage: bytes) -> bytes:
    """The first part of a key's preimage, where it is one."""
    return preimage[4 : 4 + int.from_bytes(preimage[:4], "little")] if isinstance(preimage, bytes) else b""


def _recipe(facts: bytes) -> Iterator[Candidate]:
    try:
        yield decode_facts(facts)[0]["recipe"]
    except MALFORMED:
        return


# ---- can the frontend make it? --------------------------------------------------------------------------------------


def unknown_to_frontend(description: Description) -> str | None:
    """Why the frontend here cannot make a graph; None where it knows all of its operations and values."""
    cudnn = load_frontend()
    names = [f"operation {node['node_type']}" for node in description.nodes if node["node_type"] not in cudnn.NodeType.__members__]
    for kind, member in sorted(set(_enums([description.context, description.options, *description.tensors, *description.nodes]))):
        if member not in getattr(getattr(cudnn._pybind_module, kind, None), "__members__", ()):
            names.append(f"value {kind}.{member}")
    return f"the frontend here ({cudnn.__version__}) has no {names[0]}; use the one it was recorded with" if names else None


def _enums(value: Any) -> Iterator[Enum]:
    kind = type(value)
    if kind is Enum:
        yield value
    elif kind is dict or kind is list or kind is tuple:
        for part in value.values() if kind is dict else value:
            if part is not None and type(part) not in _PLAIN:
                yield from _enums(part)


_PLAIN = frozenset((bool, int, float, str, slice))
