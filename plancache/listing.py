"""Stored entries as listings show them, without their plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plancache.description import Description, decode
from plancache.entry import MALFORMED, Trial, check_facts, is_time, split_preimage
from plancache.errors import CorruptEntryError
from plancache.key import PlanKey


@dataclass(frozen=True)
class Listed:
    """A stored entry as listings show it, without its plan."""

    key: PlanKey
    facts: Mapping[str, Any] = field(repr=False)
    size_bytes: int
    hits: int
    last_used_at: float | None

    @classmethod
    def of(cls, preimage: bytes, facts: bytes, size_bytes: int, hits: int, last_used_at: float | None) -> Listed:
        try:
            listed = cls(
                PlanKey(split_preimage(preimage)),
                json.loads(facts),
                size_bytes,
                hits if type(hits) is int else 0,  # SQLite takes any type in any column
                last_used_at if is_time(last_used_at) else None,
            )
            check_facts(listed.facts)
            listed.to_dict()
        except MALFORMED as error:
            raise CorruptEntryError(f"a stored entry cannot be read: {error}; it is built anew when it is asked for") from error
        return listed

    @cached_property
    def description(self) -> Description:
        return decode(self.key.components["signature"])

    @property
    def _time_us(self) -> float | None:
        """The median run time that tuning measured, in microseconds."""
        if self.facts["quality"] != "tuned":
            return None
        learned = json.loads(self.facts["learned"]) if "learned" in self.facts else self.facts
        trials = [Trial(*trial) for trial in learned.get("trials", ())]
        return next((trial.time_us for trial in trials if trial.name == self.facts["recipe"][0]), None)

    def to_dict(self) -> dict[str, Any]:
        """The entry as `plancache ls --json` prints it."""
        components = self.key.components
        return {
            "key": self.key.hex,
            "graph": self.description.summary,
            "quality": self.facts["quality"],
            "engine": self.facts["recipe"][0],
            "proof": self.facts.get("proof", "none"),
            "time_us": self._time_us,
            "device": json.loads(components["model"]),
            "cudnn_version": json.loads(components["cudnn"])["version"],
            "frontend_version": json.loads(components["frontend"]),
            "workspace_bytes": self.facts["workspace_size"],
            "plan_bytes": self.facts["blob_bytes"],
            "stored_bytes": self.size_bytes,
            "build_s": sum(self.facts["timings_s"].values()),
            "created_at": self.facts["created_at"],
            "hits": self.hits,
            "last_used_at": self.last_used_at,
        }
