"""Signature, environment and constraints -> key; the difference between two keys.

A key is SHA-256 over named components. Each component keeps its own preimage and digest, so that a hit is compared
with what it stands for and a miss can be explained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from plancache.environment import LIMITS, Device, Libraries
from plancache.errors import SettingsError
from plancache.lazy import lazy

KEY_VERSION = 1
MODES = ("A", "B", "FALLBACK")
"""cuDNN's heuristic modes whose plans can be kept."""

COMPONENTS = ("signature", "device", "model", "driver", "cudnn", "frontend", "variables", "constraints")


@dataclass(frozen=True)
class Constraints:
    """What the caller allows a plan to be. Part of the key.

    `workspace_limit_bytes`: the most workspace that a plan may need. `deterministic`: bars engines whose results
    vary from run to run (numerical note NONDETERMINISTIC). `barred_engines`: plan-name parts such as `eng7`, as
    `deselect_engines` takes them. Notes are names of `cudnn.numerical_note` and `cudnn.behavior_note`: a plan must
    have the required ones and must not have the barred ones. `modes`: cuDNN's heuristic modes that name plans, in order.
    """

    workspace_limit_bytes: int | None = None
    deterministic: bool = False
    barred_engines: tuple[str, ...] = ()
    barred_numerical_notes: tuple[str, ...] = ()
    required_numerical_notes: tuple[str, ...] = ()
    barred_behavior_notes: tuple[str, ...] = ()
    required_behavior_notes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("A", "FALLBACK")

    def __post_init__(self) -> None:
        limit = self.workspace_limit_bytes
        if limit is not None and (type(limit) is not int or limit < 0):
            raise SettingsError(f"workspace_limit_bytes must be a whole number of bytes, 0 or more, not {limit!r}")
        if type(self.deterministic) is not bool:
            raise SettingsError(f"deterministic must be True or False, not {self.deterministic!r}")
        for field in fields(self):
            if field.name.endswith(("engines", "notes")):
                object.__setattr__(self, field.name, _names(field.name, getattr(self, field.name)))
        if isinstance(self.modes, str) or not self.modes or not set(self.modes) <= set(MODES):
            raise SettingsError(f"modes must be some of {', '.join(MODES)}, not {self.modes!r}")
        object.__setattr__(self, "modes", tuple(dict.fromkeys(self.modes)))

    @lazy
    def encoded(self) -> bytes:
        """Canonical JSON; without modes where they are cuDNN's own default."""
        given = asdict(self)
        if self.modes == ("A", "FALLBACK"):
            del given["modes"]
        return _canonical(given)


def _names(field: str, value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if not all(isinstance(name, str) and name for name in names):
        raise SettingsError(f"{field} must be a tuple of names, not {value!r}")
    return tuple(sorted(set(names)))


class Difference(NamedTuple):
    """One component in which two keys differ, and both preimages."""

    component: str
    mine: bytes
    theirs: bytes


class PlanKey:
    """What a stored plan answers to: named components, and one digest over all of them."""

    def __init__(self, preimages: tuple[bytes, ...]) -> None:
        self.preimages = preimages

    @lazy
    def digest(self) -> bytes:
        """SHA-256 over the key's version and each component's name and digest."""
        parts = [b"plancache-key:%d\0" % KEY_VERSION]
        parts += [name.encode() + b"\0" + _sha256(preimage) for name, preimage in zip(COMPONENTS, self.preimages, strict=True)]
        return hashlib.sha256(b"".join(parts)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanKey) and self.preimages == other.preimages

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<PlanKey {self.hex[:16]}>"

    @property
    def hex(self) -> str:
        return self.digest.hex()

    @property
    def components(self) -> dict[str, bytes]:
        """Preimage by component name."""
        return dict(zip(COMPONENTS, self.preimages, strict=True))

    @property
    def component_digests(self) -> dict[str, str]:
        """SHA-256 by component name, as hex."""
        return {name: _sha256(preimage).hex() for name, preimage in self.components.items()}

    def difference(self, other: PlanKey) -> list[Difference]:
        """The components in which two keys differ."""
        pairs = zip(COMPONENTS, self.preimages, other.preimages, strict=True)
        return [Difference(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


@lru_cache(maxsize=256)
def _sha256_small(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _sha256(data: bytes) -> bytes:
    return _sha256_small(data) if len(data) < 4096 else hashlib.sha256(data).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Place(NamedTuple):
    """Where a plan is to run: the environment components of its key that stay the same in a process."""

    device: bytes
    model: bytes
    driver: bytes
    cudnn: bytes
    frontend: bytes

    @classmethod
    def of(cls, device: Device, libraries: Libraries) -> Place:
        return cls(
            device=_canonical({name: device.properties[name] for name in LIMITS}),
            model=_canonical(device.model),
            driver=_canonical(device.driver_version),
            **cls.of_libraries(libraries),
        )

    @staticmethod
    def of_libraries(libraries: Libraries) -> dict[str, bytes]:
        """The components that say which cuDNN and frontend are loaded, by name."""
        builds = {name: library.build_id for name, library in libraries.cudnn.items()}
        return {
            "cudnn": _canonical({"version": libraries.cudnn_version, "builds": builds}),
            "frontend": _canonical(libraries.frontend_version),
        }


def make_key(signature: bytes, place: Place, variables: Mapping[str, str], constraints: Constraints) -> PlanKey:
    """The key of one graph in one place under one set of constraints."""
    return PlanKey((signature, *place, _canonical(variables) if variables else b"{}", constraints.encoded))
