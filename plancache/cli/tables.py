"""Plain text for people: aligned tables, and numbers with their units."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; None where it is a file or a pipe."""
    if not sys.stdout.isatty():
        return None
    import shutil  # 3 ms, as much as a hundred rows of 'plancache ls'

    return shutil.get_terminal_size().columns


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, shrink: int = 0, indent: str = "") -> str:
    """Rows under a header line; a column whose name starts with `>` is aligned to the right.

    `width`: of the terminal; where the table is wider, the column `shrink` is cut as far as that helps.
    """
    header = [name.lstrip(">").upper() for name in columns]
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    if width is not None:
        surplus = len(indent) + sum(widths) + 2 * (len(widths) - 1) - width
        widths[shrink] = max(len(header[shrink]), min(widths[shrink], 20), widths[shrink] - max(0, surplus))
        rows = [[*row[:shrink], shorten(row[shrink], widths[shrink]), *row[shrink + 1 :]] for row in rows]
    line = "  ".join(f"{{:{'>' if name.startswith('>') else '<'}{wide}}}" for name, wide in zip(columns, widths, strict=True)).format
    return "\n".join([f"{indent}{line(*row)}".rstrip() for row in (header, *rows)])


def pairs(rows: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """Names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {value}".rstrip() for name, value in rows)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def size(count: float) -> str:
    """Bytes with three digits: `830 B`, `13.3 kB`, `1.25 GB`."""
    if count < 1000:
        return f"{count:.0f} B"
    unit = next(unit for unit in _UNITS if (count := count / 1000) < 999.5 or unit == _UNITS[-1])
    return f"{count:#.3g}".rstrip(".") + f" {unit}"


_UNITS = ("kB", "MB", "GB", "TB")


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 9.95 else f"{ms:.1f}"


def duration(seconds: float) -> str:
    """A span of time in its largest unit: `12 s`, `5 min`, `3 h`, `8 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, int(seconds))} s"


def span(seconds: float) -> str:
    """A sum of short times: `830 ms`, `12.4 s`, `3 h`."""
    if seconds < 1:
        return f"{milliseconds(seconds)} ms" if seconds else "0 s"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def engine(name: str) -> str:
    """The engine of a plan's name, without its knobs: `eng7` of `eng7_k24=21`."""
    found = re.match(r"eng\d+(?=_)", name)
    return found.group() if found else name


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
