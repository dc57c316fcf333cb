"""The plans that are loaded in this process: found by key and device, the least recently used let go of first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plancache.plan import Loaded

_EVERY = 8  # so many more plans, and their bytes are summed up: a sum over all at each would be quadratic

Place = tuple[bytes, int | None]
"""A key's digest, and the device's ordinal."""


class LivePlans:
    """Loaded plans, up to `max_bytes` of what they are accounted for. One that a program still holds goes on running."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._plans: dict[Place, Loaded] = {}  # in the order of use
        self._guard = threading.Lock()

    def get(self, place: Place) -> Loaded | None:
        plan = self._plans.get(place)
        if plan is not None:
            with self._guard:
                if self._plans.pop(place, None) is not None:
                    self._plans[place] = plan
        return plan

    def add(self, place: Place, plan: Loaded) -> None:
        """Keeps a plan, and lets go of others where they are too many; the newest one always stays."""
        with self._guard:
            self._plans.pop(place, None)
            self._plans[place] = plan
            if len(self._plans) % _EVERY == 0:
                self._let_go()

    def _let_go(self) -> None:
        surplus = self.size_bytes - self._max_bytes
        while surplus > 0 and len(self._plans) > 1:
            oldest = next(iter(self._plans))
            surplus -= self._plans.pop(oldest).size_bytes

    def drop(self, digest: bytes) -> None:
        """Lets go of a key's plans on all devices."""
        with self._guard:
            for place in [place for place in self._plans if place[0] == digest]:
                del self._plans[place]

    def holds(self, digest: bytes) -> bool:
        return any(place[0] == digest for place in list(self._plans))

    @property
    def size_bytes(self) -> int:
        return sum(plan.size_bytes for plan in list(self._plans.values()))

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        with self._guard:
            self._plans.clear()

    def after_fork(self) -> None:
        """Makes the lock anew that another thread may have held when this process was forked."""
        self._guard = threading.Lock()
