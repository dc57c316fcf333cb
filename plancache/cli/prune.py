"""`plancache prune` and `plancache purge`: take out what need not be kept, or everything."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from plancache.cli import removal
from plancache.cli.amounts import seconds, size_bytes
from plancache.cli.command import Command, UsageError, nothing_stored, print_json, refuse_unusable
from plancache.cli.tables import count, size

if TYPE_CHECKING:
    from plancache.settings import Settings
    from plancache.store.retention import Removal

_FILTERS = "--max-bytes, --older-than, --unused-since, --stale or --all"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-bytes", metavar="N", type=size_bytes, help="what is over so much, the least build time saved per byte first")
    parser.add_argument("--older-than", metavar="D", type=seconds, help="what was built longer ago, such as 30d, 12h or 90min")
    parser.add_argument("--unused-since", metavar="D", type=seconds, help="what was last used, or built, longer ago")
    stale = "what no program can use here: for another cuDNN or frontend, or for this GPU model with another driver"
    parser.add_argument("--stale", action="store_true", help=stale)
    parser.add_argument("--all", action="store_true", help="all plans")
    removal.add_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    filters = {
        "max_bytes": args.max_bytes,
        "older_than_s": args.older_than,
        "unused_since_s": args.unused_since,
        "stale": args.stale,
        "everything": args.all,
    }
    if all(value is None or value is False for value in filters.values()):
        raise UsageError(f"say what is to go: {_FILTERS}; --dry-run shows it first")
    if args.max_bytes == 0:
        raise UsageError("--max-bytes 0 would remove all: say --all")
    from plancache.cache import PlanCache

    settings = removal.settings_of_removal(args)
    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        chosen = cache.to_prune(**filters)
        graphs = removal.graphs_of(chosen.chosen)
        if not chosen.chosen and not args.json:
            stay = f"nothing to remove: all of {size(chosen.kept_bytes)} stays, in {settings.directory}"
            print(stay if chosen.kept_bytes else nothing_stored(settings))
            return 0
        if not args.json:
            print(removal.text(chosen, graphs))
        if args.dry_run:
            return removal.foretell(args, chosen, graphs, settings)
        question = f"remove {count(len(chosen.chosen), 'plan')}, {size(chosen.freed_bytes)}, and keep {size(chosen.kept_bytes)}?"
        if not removal.agreed(args, question):
            return removal.refused()
        return removal.finish(args, chosen, cache.take_out(chosen, force=args.force), graphs, settings)


def _run_purge(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings = removal.settings_of_removal(args)
    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        chosen, known, damaged_bytes = cache.to_prune(everything=True), cache.verdicts(), cache.damaged_bytes()
        graphs = removal.graphs_of(chosen.chosen)
        beside = {"verdicts": len(known), "damaged_file_bytes": damaged_bytes}
        if not (chosen.chosen or known or damaged_bytes is not None):
            return _nothing_to_purge(args, chosen, settings, beside)
        if not args.json:
            print(_plan_of_purge(chosen, graphs, beside, settings))
        if args.dry_run:
            return removal.foretell(args, chosen, graphs, settings, **beside)
        if not removal.agreed(args, f"remove all of it from {settings.directory}?"):
            return removal.refused()
        removed = cache.take_out(chosen, force=args.force)
        cache.lift(cache.verdicts())  # some have gone with the plans they are about
        beside["damaged_file_bytes"] = None if damaged_bytes is None else cache.discard_damaged()
    code = removal.finish(args, chosen, removed, graphs, settings, **beside)
    if not args.json:
        print("\n".join([*(f"removed {what}" for what in _beside(beside, settings)), "", _whole_directory(settings)]))
    return code


def _plan_of_purge(chosen: Removal, graphs: dict[str, str], beside: dict[str, Any], settings: Settings) -> str:
    parts = [removal.text(chosen, graphs)] if chosen.chosen else []
    total = [f"{count(len(chosen.chosen), 'plan')}, {size(chosen.freed_bytes)}", *_beside(beside, settings)]
    return "\n\n".join([*parts, "in all: " + "; ".join(total)])


def _beside(beside: dict[str, Any], settings: Settings) -> list[str]:
    told = []
    if beside["verdicts"]:
        told.append(f"{count(beside['verdicts'], 'verdict')} on what did not work ('plancache ls --verdicts')")
    if beside["damaged_file_bytes"] is not None:
        told.append(f"the damaged file {settings.database.name}.damaged, {size(beside['damaged_file_bytes'])}")
    return told


def _nothing_to_purge(args: argparse.Namespace, chosen: Removal, settings: Settings, beside: dict[str, Any]) -> int:
    if args.json:
        from plancache.store.retention import Removed

        print_json(removal.facts(chosen, Removed(()), {}, settings, dry_run=args.dry_run) | beside)
    else:
        print(nothing_stored(settings))
        if settings.directory.exists():
            print(_whole_directory(settings))
    return 0


def _whole_directory(settings: Settings) -> str:
    return f"to remove the directory itself, while no program uses it: rm -r {settings.directory}"


COMMAND = Command(
    "prune",
    "remove plans that need not be kept",
    "Shows what would go, asks, and removes it from the local store (sealed files are never changed); the space is given back to the file "
    "system. Sizes are of plans with their metadata. Of several filters what any of them names goes. Exit code 1 where something was "
    "skipped because a program is at it.",
    "plancache prune --unused-since 30d --dry-run\nplancache prune --stale --yes\nplancache prune --max-bytes 500MB",
    _configure,
    _run,
)

PURGE = Command(
    "purge",
    "remove everything: plans, what is known beside them, a damaged file that was put aside",
    "Shows what would go, asks, and removes it (sealed files are never changed). Says how to remove the directory itself.",
    "plancache purge --dry-run\nplancache purge --yes",
    removal.add_arguments,
    _run_purge,
)
