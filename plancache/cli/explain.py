"""`plancache explain`: why a graph, or a stored plan, is answered here without a build, or is not."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

from plancache.cli import usability
from plancache.cli.command import Command, print_json, settings_to_look, uncollected
from plancache.cli.tables import count, engine, pairs
from plancache.cli.target import graphs_of, load
from plancache.cli.warm import first_line

if TYPE_CHECKING:
    from plancache.explaining import Explanation, Nearest

_LIKENESS = {
    "graph": "the same graph",
    "family": "the same operations in another size",
    "operations": "the same operations",
    "components": "another graph",
}
_LIFTED = ("struck", "unsupported", "denied")


def _configure(parser: argparse.ArgumentParser) -> None:
    what = "a function that yields graphs, package.module:function; or the first hex digits of a stored plan's key"
    parser.add_argument("what", metavar="GRAPHS|KEY", help=what)
    file = "a device file, or the name of a shipped one such as h200: explain for that GPU, which need not be here"
    parser.add_argument("--device", metavar="FILE", help=file)


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings, is_key = settings_to_look(args), ":" not in args.what
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # what the function prints is not JSON
        items: list[Any] = [args.what] if is_key else list(graphs_of(args.what, load(args.what)))
        with PlanCache(settings=settings, device=usability.device_of(args)) as cache, uncollected():
            found = list(cache.explanations(items))
    names = [getattr(item, "name", None) for item in items]
    if args.json:
        facts = [{"name": name, **one.to_dict()} for name, one in zip(names, found, strict=True)]
        print_json(facts[0] if is_key else facts)
    else:
        print("\n\n".join(_text(name, one) for name, one in zip(names, found, strict=True)))
    usable = sum(one.usable for one in found)
    if not (args.json or is_key):
        print(f"\nusable here: {usable} of {count(len(found), 'graph')}, in {settings.directory}")
    return 0 if usable == len(found) else 1


def _text(name: str | None, one: Explanation) -> str:
    heading = name or one.graph or one.key or "a graph"
    rows = [("key", one.key[:16])] if one.key else []
    if name and one.graph:
        rows.append(("graph", one.graph))
    if one.usable:
        rows.append(("usable", f"yes: {_plan(one)}"))
    else:
        lift = f"; to try it again: plancache rm --verdicts {one.key[:12]}" if one.key and one.state in _LIFTED else ""
        rows.append(("usable", f"no, {one.state}: {first_line(one.reason or '')}{lift}"))
    if one.nearest:
        rows += _nearest(one.nearest, one)
    return f"{heading}\n{pairs(rows)}"


def _nearest(near: Nearest, one: Explanation) -> list[tuple[str, str]]:
    which = "" if near.key == one.key else f"{near.key[:12]}, {_LIKENESS[near.likeness]} ({_plan(near)}): {near.graph}"
    rows = [("nearest", which)] if which else []
    differences = [contrast for contrast in near.differences if contrast[:2] != ("signature", "graph")]  # as just said
    rows += [("" if index else "differs", str(contrast)) for index, contrast in enumerate(differences)]
    return rows + ([("denied", f"its engine was shown wrong: {near.denied}")] if near.denied else [])


def _plan(one: Explanation | Nearest) -> str:
    return ", ".join([str(one.level), engine(one.engine or "(cannot be read)"), str(one.quality)])


COMMAND = Command(
    "explain",
    "say why a graph is answered here without a build, or is not",
    "Of a miss it names the stored plan that comes nearest and all that differs. Nothing is built or loaded; with a device file it needs "
    "no GPU. Exit code 1 where something is not usable here.",
    "plancache explain serving.shapes:all_graphs\nplancache explain 329592ce9e31 --device h100.json",
    _configure,
    _run,
)
