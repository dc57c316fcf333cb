"""Stored entries as listings show them, without their plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from plancache.description import Description, decode
from plancache.entry import FORMAT, MALFORMED, Candidate, Trial, check_facts, is_time, split_preimage
from plancache.environment import version_text
from plancache.errors import CorruptEntryError
from plancache.key import PlanKey
from plancache.lazy import lazy
from plancache.outline import Outline, outline

_component = lru_cache(maxsize=256)(json.loads)  # most entries have the same ones
_FACTS = re.compile(  # as `entry.encode_facts` writes them, up to what is not listed
    rb'\{"format":%d,"blob_bytes":(\d{1,15}),"workspace_size":(\d{1,15}),"operands":[^{}]*,"layouts":\{[^{}]*\},'
    rb'"recipe":(\["([\w=-]+)",-?\d+,\{[^{}]*\}\]),[^{}]*"requirements":\{[^{}]*\},"timings_s":(\{[^{}]*\}),"quality":"(compiled|heuristic)",'
    rb'"created_at":([\d.]{1,20}),"provenance":\{[^{}]*\},"proof":"(none)"' % FORMAT
)


@dataclass(frozen=True)
class Listed:
    """A stored entry as listings show it, without its plan.

    `facts`: those of them that are listed, by the entry's names. `tags`: of the programs that asked for it.
    """

    key: PlanKey
    facts: Mapping[str, Any] = field(repr=False)
    size_bytes: int
    hits: int
    last_used_at: float | None
    tags: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        preimage: bytes,
        facts: bytes,
        size_bytes: int,
        hits: int,
        last_used_at: float | None,
        *,
        digest: bytes | None = None,
        tags: tuple[str, ...] = (),
    ) -> Listed:
        """The entry of a row; `digest`: the key that it is stored under. Raises `CorruptEntryError`."""
        try:
            listed = cls(
                PlanKey(split_preimage(preimage)),
                _facts(facts),
                size_bytes,
                hits if type(hits) is int else 0,  # SQLite takes any type in any column
                last_used_at if is_time(last_used_at) else None,
                tags,
            )
            listed.__dict__["_shown"] = listed._show(listed.key.digest if digest is None else digest)
        except MALFORMED as error:
            raise CorruptEntryError(f"a stored entry cannot be read: {error}; it is built anew when it is asked for") from error
        return listed

    @lazy
    def description(self) -> Description:
        return decode(self.key.components["signature"])

    @property
    def outline(self) -> Outline:
        """Its operations and tensors, as far as listings go; not kept, since that of thousands takes more memory than all else."""
        return outline(self.key.preimages[0])

    @property
    def recipe(self) -> Candidate:
        recipe = self.facts["recipe"]
        return Candidate(*(json.loads(recipe) if isinstance(recipe, bytes) else recipe))

    def _show(self, digest: bytes) -> dict[str, Any]:
        facts = self.facts
        _, _, model, driver, cudnn, frontend, _, _ = self.key.preimages  # in the order of key.COMPONENTS
        return {
            "key": digest.hex(),
            "graph": self.outline.summary,
            "quality": facts["quality"],
            "engine": facts["engine"],
            "proof": facts.get("proof", "none"),
            "time_us": facts["time_us"],
            "device": _component(model),
            "driver_version": _component(driver),
            "cudnn_version": _component(cudnn)["version"],
            "frontend_version": _component(frontend),
            "workspace_bytes": facts["workspace_size"],
            "plan_bytes": facts["blob_bytes"],
            "stored_bytes": self.size_bytes,
            "build_s": sum(facts["timings_s"].values()),
            "created_at": facts["created_at"],
            "hits": self.hits,
            "last_used_at": self.last_used_at,
            "tags": list(self.tags),
        }

    @lazy
    def _shown(self) -> dict[str, Any]:
        return self._show(self.key.digest)

    def to_dict(self) -> dict[str, Any]:
        """The entry as `plancache ls --json` prints it."""
        return dict(self._shown)


def _facts(data: bytes) -> dict[str, Any]:
    """What is listed of an entry's facts. Of most a regular expression finds it, at half of the time that their JSON takes."""
    plain = _FACTS.match(data)
    if plain is None:
        facts: dict[str, Any] = json.loads(data)
        check_facts(facts)
        time_us = _time_us(facts) if facts["quality"] == "tuned" else None
        return facts | {"engine": facts["recipe"][0], "time_us": time_us}
    blob_bytes, workspace_size, recipe, engine, timings_s, quality, created_at, proof = plain.groups()
    facts = {
        "blob_bytes": int(blob_bytes),
        "workspace_size": int(workspace_size),
        "recipe": recipe,
        "engine": engine.decode(),
        "timings_s": json.loads(timings_s),
        "quality": quality.decode(),
        "created_at": float(created_at),
        "proof": proof.decode(),
        "time_us": None,
    }
    if not all(map(is_time, (facts["created_at"], *facts["timings_s"].values()))):
        raise ValueError("its times are none")
    return facts


def _time_us(facts: Mapping[str, Any]) -> float | None:
    """The median run time that tuning measured for the winner, in microseconds."""
    learned = json.loads(facts["learned"]) if "learned" in facts else facts
    trials = [Trial(*trial) for trial in learned.get("trials", ())]
    return next((trial.time_us for trial in trials if trial.name == facts["recipe"][0]), None)


class Filter(NamedTuple):
    """Which entries are meant: those that all of it holds for; None and nothing hold for all.

    `operations`: all of them are in the graph, by the names that listings show. `data_type`, `shape`: of something that goes
    in or comes out; a shape such as `8x64x56x56`, where `*` is any extent. `cudnn`: a version or the beginning of one, such
    as `9.19`. `device`: a part of the model's name. `newer_than_s`, `older_than_s`: since it was built.
    """

    operations: tuple[str, ...] = ()
    data_type: str | None = None
    shape: str | None = None
    qualities: tuple[str, ...] = ()
    cudnn: str | None = None
    device: str | None = None
    tag: str | None = None
    newer_than_s: float | None = None
    older_than_s: float | None = None
    larger_than_bytes: int | None = None
    min_hits: int | None = None

    def __call__(self, listed: Listed, now: float) -> bool:
        shown = listed._shown
        age_s = now - shown["created_at"]
        return (
            (not self.qualities or shown["quality"] in self.qualities)
            and (self.cudnn is None or f"{version_text(shown['cudnn_version'])}.".startswith(f"{self.cudnn}."))
            and (self.device is None or self.device.lower() in shown["device"].lower())
            and (self.tag is None or self.tag in listed.tags)
            and (self.newer_than_s is None or age_s <= self.newer_than_s)
            and (self.older_than_s is None or age_s > self.older_than_s)
            and (self.larger_than_bytes is None or listed.size_bytes > self.larger_than_bytes)
            and (self.min_hits is None or listed.hits >= self.min_hits)
            and (not (self.operations or self.data_type or self.shape) or self._is_of(listed.outline))
        )

    def _is_of(self, graph: Outline) -> bool:
        return (
            set(self.operations) <= set(graph.operations)
            and (self.data_type is None or self.data_type.upper() in graph.data_types)
            and (self.shape is None or any(map(self._fits, graph.shapes)))
        )

    def _fits(self, shape: str) -> bool:
        pattern, extents = str(self.shape).split("x"), shape.split("x")
        return len(pattern) == len(extents) and all(one in ("*", extent) for one, extent in zip(pattern, extents, strict=True))
