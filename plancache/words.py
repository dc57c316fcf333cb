"""A key's components in words, and what two keys differ in so that a person can read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from plancache.description import Description, decode
from plancache.encoding import Enum
from plancache.entry import MALFORMED
from plancache.environment import cuda_version, version_text
from plancache.key import PlanKey

Part = tuple[str, str, str]
"""What of a component differs, here, and as it is stored; without a name where the component is one value."""

_ORDER = ("signature", "constraints", "model", "cudnn", "driver", "frontend", "variables", "device")
_BUILD_ID_DIGITS = 8


class Contrast(NamedTuple):
    """Something in which a request here and a stored entry differ, in words."""

    component: str
    part: str
    here: str
    stored: str

    def __str__(self) -> str:
        return f"{self.component}{' ' if self.part else ''}{self.part}: {self.here} here, {self.stored} stored"


def contrasts(here: PlanKey, stored: PlanKey) -> tuple[Contrast, ...]:
    """What two keys differ in, component by component, those that people know best first. A preimage that cannot be read is said
    to be so."""
    found = []
    for name, mine, theirs in sorted(here.difference(stored), key=lambda difference: _ORDER.index(difference.component)):
        try:
            parts = list(_CONTRASTS[name](mine, theirs))
        except MALFORMED:
            parts = [("", "another one", "one that cannot be read")]
        found += [Contrast(name, *part) for part in parts]
    return tuple(found)


# ---- the environment and the constraints ----------------------------------------------------------------------------


def _whole(say: Callable[[Any], str]) -> Callable[[bytes, bytes], Iterator[Part]]:
    def parts(mine: bytes, theirs: bytes) -> Iterator[Part]:
        yield "", say(json.loads(mine)), say(json.loads(theirs))

    return parts


def _by_name(absent: str) -> Callable[[bytes, bytes], Iterator[Part]]:
    def parts(mine: bytes, theirs: bytes) -> Iterator[Part]:
        yield from _members(json.loads(mine), json.loads(theirs), absent)

    return parts


def _members(mine: Mapping[str, Any], theirs: Mapping[str, Any], absent: str) -> Iterator[Part]:
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield name, _said(mine.get(name), absent), _said(theirs.get(name), absent)


def _said(value: Any, absent: str = "none") -> str:
    if value is None:
        return absent
    if isinstance(value, Enum):
        return value.member
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cudnn(mine: bytes, theirs: bytes) -> Iterator[Part]:
    """The version; of the same version the libraries that were built differently."""
    ours, others = json.loads(mine), json.loads(theirs)
    if ours["version"] == others["version"]:
        yield from _members(_builds(ours), _builds(others), "not there")
    else:
        yield "", version_text(ours["version"]), version_text(others["version"])


def _builds(cudnn: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"build {build_id[:_BUILD_ID_DIGITS]}" for name, build_id in cudnn["builds"].items()}


# ---- the signature --------------------------------------------------------------------------------------------------


def _signature(mine: bytes, theirs: bytes) -> Iterator[Part]:
    """Tensor by tensor and operation by operation; of graphs of another kind only what they are."""
    ours, others = decode(mine), decode(theirs)
    if ours.operations != others.operations or len(ours.tensors) != len(others.tensors):
        yield "graph", ours.summary, others.summary
        return
    yield from _members(ours.context, others.context, "not set")
    yield from _members(ours.options, others.options, "not set")
    names = tensor_names(ours)
    for uid, (tensor, other) in enumerate(zip(ours.tensors, others.tensors, strict=True), 1):
        yield from _of(names[uid], _tensor(tensor, other))
    for number, (node, other) in enumerate(zip(ours.nodes, others.nodes, strict=True), 1):
        yield from _of(f"operation {number} ({ours.operations[number - 1]})", _node(node, other))


def _of(whose: str, parts: Iterator[Part]) -> Iterator[Part]:
    return ((f"{whose} {_FIELDS.get(part, part)}", here, stored) for part, here, stored in parts)


_FIELDS = {"data_type": "type", "dim": "dims", "stride": "strides", "is_virtual": "virtual", "pass_by_value": "value"}


def tensor_names(description: Description) -> dict[int, str]:
    """What people call the tensors, by number: `tensor 2 (weight)`, after the first port that they are at."""
    ports: dict[int, str] = {}
    for node in description.nodes:
        for port, uid in (*node["inputs"].items(), *node["outputs"].items()):
            ports.setdefault(uid, port)
    return {uid: f"tensor {uid} ({ports[uid]})" if uid in ports else f"tensor {uid}" for uid in range(1, len(description.tensors) + 1)}


def _tensor(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Part]:
    for name in mine:
        if mine[name] == theirs[name]:
            continue
        if name in ("dim", "stride"):
            yield name, _extents(name, mine[name]), _extents(name, theirs[name])
        else:
            yield name, _said(mine[name]), _said(theirs[name])


def _extents(name: str, extents: Sequence[int]) -> str:
    return ("x" if name == "dim" else ",").join(map(str, extents)) or "none"


def _node(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Part]:
    yield from _members(mine["params"], theirs["params"], "not set")
    for name in ("inputs", "outputs"):
        yield from _members(mine[name], theirs[name], "not there")
    if mine["compute_data_type"] != theirs["compute_data_type"]:
        yield "computes in", _said(mine["compute_data_type"], "not set"), _said(theirs["compute_data_type"], "not set")


_CONTRASTS: dict[str, Callable[[bytes, bytes], Iterator[Part]]] = {
    "signature": _signature,
    "device": _by_name("not known"),
    "model": _whole(str),
    "driver": _whole(lambda version: f"CUDA {cuda_version(version)}"),
    "cudnn": _cudnn,
    "frontend": _whole(str),
    "variables": _by_name("not set"),
    "constraints": _by_name("none"),
}
