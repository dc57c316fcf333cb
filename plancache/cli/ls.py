"""`plancache ls`: what is stored, or what is known beside it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.cli.command import Command, UsageError, nothing_stored, print_json, settings_to_look, uncollected
from plancache.cli.filters import add_filters, filter_of
from plancache.cli.tables import count, duration, engine, milliseconds, size, table, terminal_width
from plancache.cli.verdicts import KINDS, facts, graphs_by_key, is_of, text
from plancache.environment import version_text

if TYPE_CHECKING:
    from plancache.listing import Filter
    from plancache.settings import Settings
    from plancache.stored import StoredPlans

_Fact = dict[str, Any]
"""An entry as `--json` prints it."""


class _Column(NamedTuple):
    """How a column is headed (`>`: to the right), what it shows of an entry, and by what it is sorted."""

    title: str
    show: Callable[[_Fact], str]
    rank: Callable[[_Fact], Any]


def _of(name: str, title: str, show: Callable[[Any], str]) -> _Column:
    return _Column(title, lambda fact: "-" if fact[name] is None else show(fact[name]), lambda fact: (fact[name] is not None, fact[name]))


def _since(name: str, title: str) -> _Column:
    now = time.time()
    return _of(name, title, lambda at: duration(now - at))._replace(rank=lambda fact: -(fact[name] or 0.0))


def _columns(own: str = "") -> dict[str, _Column]:
    """By the names that --columns and --sort take. `own`: the file of the cache directory."""
    return {
        "key": _of("key", "key", lambda key: key[:12]),
        "graph": _of("graph", "graph", str),
        "engine": _of("engine", "engine", engine),
        "quality": _of("quality", "quality", str),  # their ranks are in the order of the alphabet
        "proof": _of("proof", "proof", str),
        "time": _of("time_us", ">us", "{:.1f}".format),
        "size": _of("stored_bytes", ">size", size),
        "plan": _of("plan_bytes", ">plan", size),
        "workspace": _of("workspace_bytes", ">workspace", size),
        "build": _of("build_s", ">build ms", milliseconds),
        "hits": _of("hits", ">hits", str),
        "age": _since("created_at", ">age"),
        "used": _since("last_used_at", ">used"),
        "device": _of("device", "device", str),
        "cudnn": _of("cudnn_version", "cudnn", version_text),
        "frontend": _of("frontend_version", "frontend", str),
        "tags": _of("tags", "tags", ", ".join),
        "where": _of("sealed_in", "where", lambda path: "directory" if path in ("", own) else path),
    }


_NAMES = tuple(_columns())
_USUAL = ("key", "graph", "engine", "quality", "size", "build", "hits", "age", "device", "cudnn")


def _configure(parser: argparse.ArgumentParser) -> None:
    what = f"list what is known beside the plans instead, all of it or of one kind: {', '.join(KINDS)}"
    parser.add_argument("--verdicts", metavar="KIND", nargs="?", const="all", choices=("all", *KINDS), help=what)
    parser.add_argument("--columns", metavar="A,B", type=_several, help=f"show these columns: {', '.join(_NAMES)}")
    order = "sort by a column, descending with --sort=-COLUMN (default: as they were built)"
    parser.add_argument("--sort", metavar="COLUMN", type=_order, help=order)
    add_filters(parser)


def _several(text: str) -> tuple[str, ...]:
    return tuple(_known(name.strip()) for name in text.split(","))


def _order(text: str) -> tuple[str, bool]:
    """A column, and whether the order is descending."""
    return _known(text.removeprefix("-")), text.startswith("-")


def _known(name: str) -> str:
    if name not in _NAMES:
        raise argparse.ArgumentTypeError(f"there is no column {name!r}: there are {', '.join(_NAMES)}")
    return name


def _run(args: argparse.Namespace) -> int:
    from plancache.listing import Filter
    from plancache.stored import StoredPlans

    settings, wanted = settings_to_look(args), filter_of(args)
    if args.verdicts and (args.columns or args.sort or wanted != Filter()):
        raise UsageError("--verdicts lists what is known beside the plans: it takes no columns, order or filters")
    with closing(StoredPlans(settings, None, None)) as plans, uncollected():
        if args.verdicts:
            _list_verdicts(plans, args, settings)
            return 0
        found = _look(plans, wanted)
        if args.sort:
            column, descending = args.sort
            found.facts.sort(key=_columns()[column].rank, reverse=descending)
        if args.json:
            _print_json(found.facts)
        else:
            _print(found, args.columns, settings)
    return 0


class _Found(NamedTuple):
    """The entries that are wanted, of how many, and the sealed files that were looked into.

    `sealed_in` of an entry: the sealed file that it lies in, else empty.
    """

    facts: list[_Fact]
    total: int
    sealed: list[str]


def _look(plans: StoredPlans, wanted: Filter) -> _Found:
    now, total = time.time(), 0
    facts: list[_Fact] = []
    sealed: list[str] = []
    for level, path, entries in plans.listings():
        sealed_in = str(path) if level == "sealed" else ""
        sealed += [sealed_in] if sealed_in else []
        for entry in entries:
            total += 1
            if wanted(entry, now):
                facts.append(fact := entry.to_dict())
                fact["sealed_in"] = sealed_in
    return _Found(facts, total, sealed)


def _print_json(found: Sequence[_Fact]) -> None:
    """One entry a line: indenting thousands takes longer than all else. `sealed_in` is there for entries of sealed files only."""
    lines = [
        json.dumps({name: value for name, value in fact.items() if (name, value) != ("sealed_in", "")}, ensure_ascii=False)
        for fact in found
    ]
    print("[\n" + ",\n".join(lines) + "\n]" if lines else "[]")


def _print(found: _Found, chosen: Sequence[str] | None, settings: Settings) -> None:
    if not found.total:
        print(f"{nothing_stored(settings)}; programs that plan through plancache put them there, and so does 'plancache warm'")
        return
    own = str(settings.database)
    bundles = [path for path in found.sealed if path != own]
    if found.facts:
        names = chosen or (*_USUAL, *(("where",) if bundles else ()))
        columns = [_columns(own)[name] for name in names]
        rows = [[column.show(fact) for column in columns] for fact in found.facts]
        shrink = names.index("graph") if "graph" in names else 0
        print(table([column.title for column in columns], rows, width=terminal_width(), shrink=shrink))
        print()
    them = f" and {count(len(bundles), 'bundle')}" if bundles else ""
    where = f"in {settings.directory}{' (sealed)' if own in found.sealed else ''}{them}"
    stored_bytes, all_of_them = size(sum(fact["stored_bytes"] for fact in found.facts)), count(found.total, "plan")
    if not found.facts:
        print(f"none of {all_of_them} fits, {where}")
    else:
        print(f"{'' if len(found.facts) == found.total else f'{len(found.facts)} of '}{all_of_them}, {stored_bytes}, {where}")


def _list_verdicts(plans: StoredPlans, args: argparse.Namespace, settings: Settings) -> None:
    verdicts = [verdict for verdict in plans.verdicts() if is_of(verdict, args.verdicts)]
    graphs = graphs_by_key(plans.entries())
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
    "plancache ls\n"
    "plancache ls --operation conv_fprop --shape '8x*x*x*' --sort=-build\n"
    "plancache ls --tag resnet50-serve --columns key,graph,hits,used\n"
    "plancache ls --json | jq -r '.[] | [.key, .graph] | @tsv'\n"
    "plancache ls --verdicts unsupported",
    _configure,
    _run,
)
