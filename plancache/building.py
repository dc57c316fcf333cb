"""A miss: what is known of a key beforehand, the build, and what was denied since and may not be handed out."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plancache import __version__
from plancache.description import decode, family
from plancache.entry import Built, Candidate, Entry
from plancache.environment import load_frontend
from plancache.errors import DeniedError, GraphStateError, StruckError
from plancache.key import MODES, Constraints, PlanKey
from plancache.store.levels import STRIKES, Levels

if TYPE_CHECKING:
    from plancache.signature import Reading
    from plancache.store.database import Verdict
    from plancache.target import DeviceTarget

WITHOUT_GPU = "unsupported without a GPU"

_log = logging.getLogger("plancache.cache")


def refuse_known(known: list[Verdict], key: PlanKey, target: DeviceTarget) -> None:
    """Raises what is known to be the outcome of building this key."""
    for verdict in known:
        if verdict.kind == "unsupported" or (verdict.kind == WITHOUT_GPU and target.device.is_file):
            raise load_frontend().cudnnGraphNotSupportedError(verdict.reason)
        if verdict.kind == "struck" and not verdict.checksum and verdict.count >= STRIKES and not target.device.is_file:
            raise StruckError(key.hex, f"{verdict.count} processes ended while they built it ({verdict.reason})")


def check_outputs(graph: Any) -> None:
    """Raises `GraphStateError` for a graph that computes nothing."""
    if all(tensor.is_virtual for node in graph._nodes for tensor in node.outputs.values()):
        raise GraphStateError("no tensor of the graph is an output; call set_output(True) on what the graph computes")


def build(
    levels: Levels,
    reading: Reading,
    key: PlanKey,
    target: DeviceTarget,
    constraints: Constraints,
    variables: dict[str, str],
    make: Callable[[], Built] | None = None,
) -> Entry:
    """The heuristics' first choice that is not denied, built. Raises cuDNN's own error, or `DeniedError`.

    `make`: builds that choice where the copy is planned already.
    """
    here = not target.device.is_file
    try:
        with levels.mark(key.digest, "build") if here else nullcontext():  # a crash in the child is not ours
            target.backend.check_copy(reading)
            built = make() if make else target.builder.build(reading.signature, constraints, variables)
    except load_frontend().cudnnGraphNotSupportedError as error:
        if not target.unknown and not target.backend.is_of_the_device(error):
            levels.record("unsupported" if here else WITHOUT_GPU, key.digest, str(error))
        raise
    denied = denials_of(levels, key)
    reason = denied(built.recipe)
    if reason is not None:
        with levels.mark(key.digest, "build") if here else nullcontext():
            built = _another(built, reason, denied, key, target, constraints)
    return made(built, key, target, quality="heuristic" if here else "compiled")


def made(built: Built, key: PlanKey, target: DeviceTarget, **more: Any) -> Entry:
    """What was built here and now, as an entry."""
    provenance = {"plancache": __version__, "cudnn": target.backend.libraries.cudnn_version}
    return Entry.of(built, key=key, created_at=time.time(), provenance=provenance, **more)


def _another(
    first: Built, reason: str, denied: Callable[[Candidate], str | None], key: PlanKey, target: DeviceTarget, constraints: Constraints
) -> Built:
    """The next choice that is not denied and can be built. Without a GPU choices are not known in this process."""
    if not target.device.is_file:
        # not by engine and knobs: cuDNN checks notes that are barred only on the list that its heuristics made
        planned = target.backend.planned(key.components["signature"], constraints, MODES)
        unsupported = load_frontend().cudnnGraphNotSupportedError
        for candidate in planned.candidates:
            if denied(candidate) is not None:
                continue
            try:
                built = planned.build(candidate)
            except (RuntimeError, unsupported) as error:  # its answer; the next one's turn comes
                if target.backend.is_of_the_device(error):
                    raise
                _log.debug("%s: %s", candidate.name, error)
                continue
            _log.info("%s is denied (%s); built %s in its place", first.recipe.name, reason, candidate.name)
            return built
    raise DeniedError(key.hex, first.recipe.name, reason, denial(key, first.recipe).hex())


# ---- what was shown wrong


def denials_of(levels: Levels, key: PlanKey) -> Callable[[Candidate], str | None]:
    """Says of a candidate for this key why it is denied, or None."""
    denials = levels.denials()
    if not denials:  # as nearly always, and then no digest is made
        return lambda _: None
    return lambda candidate: denials.get(denial(key, candidate))


def denial(key: PlanKey, candidate: Candidate) -> bytes:
    """Under what a candidate is denied or struck: the graph's family, cuDNN's version, compute capability, engine and knobs."""
    cudnn, device = (json.loads(key.components[name]) for name in ("cudnn", "device"))
    parts = [
        _family(key.components["signature"]),
        cudnn["version"],
        device["deviceVer"] // 10,
        candidate.engine if candidate.engine >= 0 else candidate.name,  # some engines have no number of their own
        sorted(candidate.knobs.items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


@lru_cache(maxsize=64)
def _family(signature: bytes) -> str:
    return hashlib.sha256(family(decode(signature))).hexdigest()
