"""How far a command is, on one line of a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from plancache.cli.tables import duration


def terminal() -> Callable[[str], object] | None:
    """What writes to the terminal that stderr is; None where it is none."""
    return sys.stderr.write if sys.stderr.isatty() else None


class Progress:
    """How many are done, in this word, and about how long the others take. `steps`: of each one, that count alike."""

    def __init__(
        self,
        total: int,
        write: Callable[[str], object] | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        word: str,
        steps: int = 1,
    ) -> None:
        self._total = total
        self._all_steps = total * steps
        self._write = write
        self._clock = clock
        self._word = word
        self._started = clock()
        self._done = self._steps = 0
        self._show()

    def step(self) -> None:
        """One of the steps of one was taken."""
        self._steps += 1
        self._show()

    def one(self) -> None:
        """One is done."""
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._write is None:
            return
        left_s = (self._clock() - self._started) * (self._all_steps - self._steps) / self._steps if self._steps else None
        left = "" if left_s is None else f", about {duration(left_s)} left"
        self._write(f"\r\x1b[K{self._done} of {self._total} {self._word}{left}")

    def end(self) -> None:
        """Takes the line away; the next step shows it again."""
        if self._write is not None:
            self._write("\r\x1b[K")
