"""What tests of the command line share: a command runs in this process, and its exit code and output are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def is_one_line(text: str) -> bool:
    return text.startswith("plancache: error: ") and text.count("\n") == 1 and text.endswith("\n")
