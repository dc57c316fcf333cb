"""`plancache ls`: what is stored."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plancache.cli.command import Command, nothing_stored, print_json, settings_of
from plancache.cli.tables import count, duration, engine, milliseconds, size, table
from plancache.environment import version_text

if TYPE_CHECKING:
    from plancache.listing import Listed

_COLUMNS = ("key", "graph", "engine", "quality", ">size", ">build ms", ">hits", ">age", "device", "cudnn")


def _configure(parser: argparse.ArgumentParser) -> None:
    pass


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings = settings_of(args)
    with PlanCache(settings=settings) as cache:
        entries = cache.entries()
    if args.json:
        print_json([entry.to_dict() for entry in entries])
    elif not entries:
        print(f"{nothing_stored(settings)}; programs that plan through plancache put them there, and so does 'plancache warm'")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table(_COLUMNS, _rows(entries), width=width, shrink=_COLUMNS.index("graph")))
        total = sum(entry.size_bytes for entry in entries)
        print(f"\n{count(len(entries), 'plan')}, {size(total)}, in {settings.directory}")
    return 0


def _rows(entries: Sequence[Listed]) -> list[tuple[str, ...]]:
    now = time.time()
    return [
        (
            fact["key"][:12],
            fact["graph"],
            engine(fact["engine"]),
            fact["quality"],
            size(fact["stored_bytes"]),
            milliseconds(fact["build_s"]),
            str(fact["hits"]),
            duration(now - fact["created_at"]),
            fact["device"],
            version_text(fact["cudnn_version"]),
        )
        for fact in (entry.to_dict() for entry in entries)
    ]


COMMAND = Command(
    "ls",
    "list the stored plans",
    "Sizes are as stored (compressed). Needs neither a GPU nor cuDNN.",
    "plancache ls\nplancache ls --json | jq -r '.[] | [.key, .graph] | @tsv'",
    _configure,
    _run,
)
