"""What tuning learned of each candidate, as bars, and the state of the GPU while it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plancache.cli.tables import count, milliseconds, shorten, size, terminal_width

if TYPE_CHECKING:
    from plancache.entry import Entry, Trial

_IN_FULL = ("won", "tied", "slower", "wrong")
_ORDER = (*_IN_FULL, "pruned", "failed", "skipped")
_COLUMNS = ("result", ">us", ">build ms", ">workspace")
_FEW = 8
"""So many candidates are all shown; of more, those that lost early are counted."""

_BAR = range(10, 41)  # columns, as the terminal allows; the engine's name gets twice as much
_NOT_KNOWN = "not known"


def facts(entry: Entry) -> list[dict[str, Any]]:
    """As `--json` prints them, fastest first."""
    return [trial._asdict() for trial in entry.trials]


def text(entry: Entry, *, everything: bool) -> str:
    """Candidates a line, the winner first, with bars as long as their times."""
    trials = sorted(entry.trials, key=_place)
    results = Counter(trial.result for trial in trials)
    said = ", ".join(f"{number} {result}" for result, number in sorted(results.items(), key=lambda pair: _rank(pair[0])))
    shown = trials if everything or len(trials) <= _FEW else [trial for trial in trials if trial.result in _IN_FULL]
    lines = [f"candidates ({count(len(trials), 'engine configuration')}: {said})", *_lines(shown, terminal_width())]
    left = Counter(trial.result for trial in trials) - Counter(trial.result for trial in shown)
    if left:
        rest = ", ".join(f"{number} {result}" for result, number in left.items())
        lines.append(f"  and {rest}: --all shows them")
    return "\n".join(lines)


def _rank(result: str) -> int:
    return _ORDER.index(result) if result in _ORDER else len(_ORDER)


def _place(trial: Trial) -> tuple[Any, ...]:
    return _rank(trial.result), trial.time_us is None, trial.time_us or 0.0, trial.rank


def _lines(trials: Sequence[Trial], width: int | None) -> list[str]:
    """Aligned columns, a bar, and the engine with the reason; what is longer than the terminal is cut there."""
    header = [name.lstrip(">").upper() for name in _COLUMNS]
    rows = [_cells(trial) for trial in trials]
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    left = None if width is None else width - 2 - sum(widths) - 2 * len(widths)
    bar = _BAR[len(_BAR) // 3] if left is None else min(max(left // 3, _BAR[0]), _BAR[-1])
    longest = max((trial.time_us or 0.0 for trial in trials), default=0.0)

    def line(cells: Sequence[str], drawn: str, name: str) -> str:
        aligned = [
            cell.rjust(wide) if column.startswith(">") else cell.ljust(wide)
            for column, cell, wide in zip(_COLUMNS, cells, widths, strict=True)
        ]
        whole = "  ".join(["", *aligned, drawn.ljust(bar), name])
        return (whole if width is None else shorten(whole, width)).rstrip()

    lines = [line(header, "", "ENGINE AND KNOBS")]
    for trial, cells in zip(trials, rows, strict=True):
        length = 0 if trial.time_us is None else max(1, round(bar * trial.time_us / longest)) if longest else 0
        lines.append(line(cells, "█" * length, f"{trial.name}{_reason(trial)}"))
    return lines


def _cells(trial: Trial) -> tuple[str, ...]:
    built = "-" if trial.workspace_size is None else milliseconds(trial.build_s)
    return trial.result, _time(trial), built, "-" if trial.workspace_size is None else size(trial.workspace_size)


def _time(trial: Trial) -> str:
    """The median, and half the width of where it lies with 95 percent confidence."""
    if trial.time_us is None:
        return "-"
    if trial.low_us is None or trial.high_us is None:
        return f"{trial.time_us:.1f}"
    return f"{trial.time_us:.1f} ±{(trial.high_us - trial.low_us) / 2:.1f}"


def _reason(trial: Trial) -> str:
    return f": {' '.join(trial.reason.split())}" if trial.reason else ""


# ---- the state of the GPU


def conditions(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, before and after where they differ."""
    before, after = found.get("before") or {}, found.get("after") or {}
    both = {name: [state[name] for state in (before, after) if name in state] for name in (*before, *after)}
    quiet = {True: "yes", False: "no: the times are doubtful"}.get(bool(found.get("quiet")), "") if both else _NOT_KNOWN
    return [
        ("measured", {"eager": "single runs, each with a cold L2", "graph": "replays of a CUDA graph"}.get(found.get("measure", ""), "-")),
        ("SM clock", _clock(both, "sm_clock_mhz", both.get("sm_clock_max_mhz"))),
        ("memory clock", _clock(both, "memory_clock_mhz")),
        ("throttled", _any(both, "throttled")),
        ("other processes", _number(both, "other_processes")),
        ("MIG", _any(both, "mig")),
        ("quiet", quiet),
    ]


def _clock(both: Mapping[str, Sequence[Any]], name: str, most: Sequence[Any] | None = None) -> str:
    values = list(dict.fromkeys(both.get(name, ())))
    of = f" (at most {most[0]})" if most and values else ""
    return " to ".join(map(str, values)) + f" MHz{of}" if values else _NOT_KNOWN


def _any(both: Mapping[str, Sequence[Any]], name: str) -> str:
    return ("yes" if any(both[name]) else "no") if name in both else _NOT_KNOWN


def _number(both: Mapping[str, Sequence[Any]], name: str) -> str:
    return str(max(both[name]) or "none") if name in both else _NOT_KNOWN
