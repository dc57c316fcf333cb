"""What `plancache warm` adds to planning: tuning what was planned, and comparing it with what was stored before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.cli.progress import Progress, terminal
from plancache.cli.tables import count, shorten, span, table

if TYPE_CHECKING:
    from plancache.cache import PlanCache
    from plancache.entry import Entry
    from plancache.jobs import Tuned
    from plancache.warming import Known

_COLUMNS = ("graph", ">build s", ">-> s", ">us", ">-> us", ">gain")
_GRAPH_WIDTH = 70


class Compared(NamedTuple):
    """A graph that was built anew: seconds of its builds before and now, and microseconds of its runs where it is tuned."""

    graph: str
    build_before_s: float
    build_s: float
    time_before_us: float | None
    time_us: float | None

    @property
    def gain(self) -> float | None:
        """How many times as fast it runs, where both were tuned."""
        return self.time_before_us / self.time_us if self.time_before_us and self.time_us else None

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "gain": self.gain}


def tune(cache: PlanCache, entries: Sequence[Entry]) -> list[Tuned]:
    """Tunes what is not tuned of these."""
    untuned = list({entry.key: entry for entry in entries if entry.quality != "tuned"}.values())
    progress = Progress(len(untuned), terminal(), word="tuned", steps=2)
    try:
        return cache.tune(untuned, on_done=lambda _: progress.one(), on_step=progress.step) if untuned else []
    finally:
        progress.end()


def compare(known: Sequence[Known], planned: Sequence[Entry | None], tuned: Sequence[Tuned]) -> list[Compared]:
    """What was stored beside what was planned in its place, one for one, or tuned."""
    winners = {one.key: one.entry for one in tuned if one.entry is not None}
    compared = []
    for (wanted, before), entry in zip(known, planned, strict=True):
        if entry is not None:
            now, facts = winners.get(entry.key, entry), before.to_dict()
            compared.append(Compared(wanted.summary, facts["build_s"], now.build_s, facts["time_us"], _time_us(now)))
    return compared


def _time_us(entry: Entry) -> float | None:
    """Of the tuned plan, as `Listed` has it of stored ones."""
    times = {trial.name: trial.time_us for trial in entry.trials}
    return times.get(entry.engine) if entry.quality == "tuned" else None


def text(compared: Sequence[Compared]) -> str:
    """A table, and the sum."""
    before_s, now_s = (sum(times) for times in zip(*((one.build_before_s, one.build_s) for one in compared), strict=True))
    said = f"built in {span(now_s)}, where it took {span(before_s)} before"
    gains = [one.gain for one in compared if one.gain]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        slower = sum(gain < 1 for gain in gains)
        said += f"; {count(len(gains), 'graph')} tuned before and now: {mean:.2f} times as fast (geometric mean), {slower} slower"
    return f"{table(_COLUMNS, [_row(one) for one in compared])}\n\n{said}"


def _row(one: Compared) -> tuple[str, ...]:
    times = ("-" if time_us is None else f"{time_us:.1f}" for time_us in (one.time_before_us, one.time_us))
    gain = "-" if one.gain is None else f"{one.gain:.2f}x"
    return shorten(one.graph, _GRAPH_WIDTH), f"{one.build_before_s:.2f}", f"{one.build_s:.2f}", *times, gain
