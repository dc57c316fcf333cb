"""Spans of time and sizes as people type them, for argparse."""

from __future__ import annotations

import argparse
import re

from plancache.settings import VARIABLES

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """`30d`, `12h`, `90min`, `45s`, `2w`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    if found is None or found[2] not in _SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no span of time: give a number and s, min, h, d or w, such as 30d, 12h or 90min")
    return float(found[1]) * _SECONDS[found[2]]


def size_bytes(text: str) -> int:
    """`500MB`, `2GB`, as in PLANCACHE_MAX_BYTES."""
    try:
        return int(VARIABLES["max_bytes"][1](text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give a number of bytes, such as 500MB or 2GB") from None
