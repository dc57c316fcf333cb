"""`plancache ls`: what is stored, or what is known beside it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plancache.cli.command import Command, nothing_stored, print_json, settings_to_look
from plancache.cli.tables import count, duration, engine, milliseconds, size, table, terminal_width
from plancache.cli.verdicts import KINDS, facts, graphs_by_key, is_of, text
from plancache.environment import version_text

if TYPE_CHECKING:
    from plancache.settings import Settings
    from plancache.store.database import Verdict
    from plancache.stored import Shelf

_COLUMNS = ("key", "graph", "engine", "quality", ">size", ">build ms", ">hits", ">age", "device", "cudnn")


def _configure(parser: argparse.ArgumentParser) -> None:
    what = f"list what is known beside the plans instead, all of it or of one kind: {', '.join(KINDS)}"
    parser.add_argument("--verdicts", metavar="KIND", nargs="?", const="all", choices=("all", *KINDS), help=what)


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings = settings_to_look(args)
    with PlanCache(settings=settings) as cache:
        shelves = cache.shelves()
        verdicts = cache.verdicts() if args.verdicts else []
    if args.verdicts:
        _list_verdicts(shelves, [verdict for verdict in verdicts if is_of(verdict, args.verdicts)], args, settings)
    elif args.json:
        print_json([fact for shelf in shelves for fact in _facts(shelf)])
    else:
        _print(shelves, settings)
    return 0


def _facts(shelf: Shelf) -> list[dict[str, Any]]:
    """`sealed_in` is there for entries of sealed files only."""
    where = {"sealed_in": str(shelf.path)} if shelf.level == "sealed" else {}
    return [entry.to_dict() | where for entry in shelf.entries]


def _print(shelves: Sequence[Shelf], settings: Settings) -> None:
    entries = [entry for shelf in shelves for entry in shelf.entries]
    sealed = [shelf for shelf in shelves if shelf.level == "sealed"]
    if not entries:
        print(f"{nothing_stored(settings)}; programs that plan through plancache put them there, and so does 'plancache warm'")
        return
    bundles = [shelf for shelf in sealed if shelf.path != settings.database]
    rows = [row + ((_place(shelf, settings),) if bundles else ()) for shelf in shelves for row in _rows(shelf)]
    columns = (*_COLUMNS, "where") if bundles else _COLUMNS
    print(table(columns, rows, width=terminal_width(), shrink=_COLUMNS.index("graph")))
    total = sum(entry.size_bytes for entry in entries)
    own = " (sealed)" if len(bundles) < len(sealed) else ""
    them = f" and {count(len(bundles), 'bundle')}" if bundles else ""
    print(f"\n{count(len(entries), 'plan')}, {size(total)}, in {settings.directory}{own}{them}")


def _place(shelf: Shelf, settings: Settings) -> str:
    return "directory" if shelf.path == settings.database else str(shelf.path)


def _rows(shelf: Shelf) -> list[tuple[str, ...]]:
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
        for fact in _facts(shelf)
    ]


def _list_verdicts(shelves: Sequence[Shelf], verdicts: Sequence[Verdict], args: argparse.Namespace, settings: Settings) -> None:
    graphs = graphs_by_key([entry for shelf in shelves for entry in shelf.entries])
    if args.json:
        print_json(facts(verdicts, graphs))
    elif not verdicts:
        kind = "" if args.verdicts == "all" else f" that is {args.verdicts}"
        print(f"nothing{kind} is known beside the plans in {settings.directory}")
    else:
        print(text(verdicts, graphs))
        print("\nto lift them, so that what they are about is tried again: plancache rm --verdicts KEY")


COMMAND = Command(
    "ls",
    "list the stored plans",
    "Sizes are as stored (compressed). Needs neither a GPU nor cuDNN.",
    "plancache ls\nplancache ls --json | jq -r '.[] | [.key, .graph] | @tsv'\nplancache ls --verdicts unsupported",
    _configure,
    _run,
)
