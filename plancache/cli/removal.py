"""What the commands that remove share: show what would go, ask, act, say what went."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plancache.cli.command import UsageError, print_json, settings_to_change
from plancache.cli.tables import count, duration, milliseconds, shorten, size, table
from plancache.description import decode
from plancache.entry import MALFORMED, split_preimage

if TYPE_CHECKING:
    from plancache.settings import Settings
    from plancache.store.retention import Removal, Removed, Stored

LINES = 20
"""So many plans are shown one by one; of more, two fewer and a count of the rest."""

_COLUMNS = (">size", ">build ms", ">hits", ">age", "key", "graph")
_GRAPH_WIDTH = 70


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="remove plans that a program is building or loading now, too")
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and end")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def settings_of_removal(args: argparse.Namespace) -> Settings:
    """Refuses where it could not ask, before anything is looked for."""
    if not (args.dry_run or args.yes) and (args.json or not sys.stdin.isatty()):
        why = "--json prints no questions" if args.json else "there is no terminal to ask on"
        raise UsageError(f"{why}: say --yes to remove, or --dry-run to see what would go")
    return settings_to_change(args, dry_run=args.dry_run)


def graphs_of(stored: Iterable[Stored]) -> dict[str, str]:
    """What they compute, by key; one whose row is damaged has no place in it, and can be removed all the same."""
    graphs = {}
    for one in stored:
        with suppress(*MALFORMED):
            graphs[hex_of(one.key)] = decode(split_preimage(one.preimage)[0]).summary
    return graphs


def hex_of(key: object) -> str:
    """A key as people see it; whatever else SQLite has in its place as Python shows it."""
    return key.hex() if isinstance(key, bytes) else repr(key)


# ---- show


def text(removal: Removal, graphs: Mapping[str, str]) -> str:
    """The plans that would go, the largest first, cut to a number of lines."""
    chosen = sorted(removal.chosen, key=lambda one: one.size_bytes, reverse=True)
    shown = chosen if len(chosen) <= LINES else chosen[: LINES - 2]
    parts = [table(_COLUMNS, [_row(one, graphs) for one in shown])] if shown else []
    if len(shown) < len(chosen):
        rest = chosen[len(shown) :]
        parts.append(f"and {count(len(rest), 'plan')} more, {size(sum(one.size_bytes for one in rest))}")
    return "\n".join(parts)


def _row(one: Stored, graphs: Mapping[str, str]) -> tuple[str, ...]:
    graph = shorten(graphs.get(hex_of(one.key), "(cannot be read)"), _GRAPH_WIDTH)
    age = duration(time.time() - one.created_at)
    return size(one.size_bytes), milliseconds(one.build_s), str(one.hits), age, hex_of(one.key)[:12], graph


# ---- ask


def agreed(args: argparse.Namespace, question: str) -> bool:
    """Whether to go on. Nothing but y and yes is a yes."""
    if args.yes:
        return True
    print(f"\n{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# ---- tell


def facts(removal: Removal, removed: Removed, graphs: Mapping[str, str], settings: Settings, *, dry_run: bool) -> dict[str, Any]:
    return {
        "directory": str(settings.directory),
        "dry_run": dry_run,
        "removed": [_fact(one, graphs) for one in removed.entries],
        "skipped": [_fact(one, graphs) for one in removed.skipped],
        "changed": [_fact(one, graphs) for one in removed.changed],
        "freed_bytes": removed.freed_bytes,
        "file_shrunk_bytes": removed.returned_bytes,
        "kept_bytes": removal.kept_bytes,
    }


def _fact(one: Stored, graphs: Mapping[str, str]) -> dict[str, Any]:
    key = hex_of(one.key)
    return {"key": key, "graph": graphs.get(key), "bytes": one.size_bytes}


def outcome(removed: Removed, settings: Settings) -> str:
    """What really went, and what stayed and why."""
    shrunk = f", the file is {size(removed.returned_bytes)} smaller" if removed.returned_bytes else ""
    went = f"{count(len(removed.entries), 'plan')}, {size(removed.freed_bytes)}" if removed.entries else "no plans"
    lines = [f"removed {went}{shrunk}, in {settings.directory}"]
    if removed.skipped:
        lines.append(f"skipped {_named(removed.skipped)}: a program is building or loading there now; wait for it, or say --force")
    if removed.changed:
        lines.append(f"left {_named(removed.changed)}: gone, or built anew, since they were looked at")
    return "\n".join(lines)


def _named(stored: Sequence[Stored]) -> str:
    keys = ", ".join(hex_of(one.key)[:12] for one in stored[:4])
    return f"{count(len(stored), 'plan')} ({keys}{', ...' if len(stored) > 4 else ''})"


def finish(args: argparse.Namespace, removal: Removal, removed: Removed, graphs: Mapping[str, str], settings: Settings, **more: Any) -> int:
    """Prints the outcome; exit code 1 where something that was to go was skipped."""
    if args.json:
        print_json(facts(removal, removed, graphs, settings, dry_run=args.dry_run) | more)
    else:
        print(f"\n{outcome(removed, settings)}")
    return 1 if removed.skipped else 0


def foretell(args: argparse.Namespace, removal: Removal, graphs: Mapping[str, str], settings: Settings, **more: Any) -> int:
    """Prints what a dry run found."""
    from plancache.store.retention import Removed

    if args.json:
        print_json(facts(removal, Removed.foretold(removal), graphs, settings, dry_run=True) | more)
    else:
        number = count(len(removal.chosen), "plan")
        print(f"\nwould remove {number}, {size(removal.freed_bytes)}, and keep {size(removal.kept_bytes)}, in {settings.directory}")
    return 0


def refused() -> int:
    print("nothing was removed")
    return 1
