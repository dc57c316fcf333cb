"""`plancache rm`: takes plans out of the store, or lifts what is known beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from plancache.cli import removal, verdicts
from plancache.cli.command import Command, UsageError, nothing_stored, print_json, refuse_unusable, settings_to_change
from plancache.cli.tables import count, size

if TYPE_CHECKING:
    from plancache.store.database import Verdict


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("keys", metavar="KEY", nargs="+", help="the first hex digits of a plan's key, as 'plancache ls' shows them")
    lift = "leave the plans, and lift what is known beside them about these keys (quarantined, unsupported, struck, denied)"
    parser.add_argument("--verdicts", action="store_true", help=lift)
    removal.add_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    if args.verdicts:
        return _lift(args)
    from plancache.cache import PlanCache

    settings = removal.settings_of_removal(args)
    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        stored = cache.to_prune(everything=True).chosen
        if not stored:
            raise LookupError(f"{nothing_stored(settings)}; --cache-dir names another directory")
        graphs = removal.graphs_of(stored)
        chosen = cache.to_remove(*args.keys)
        if not args.json:
            print(removal.text(chosen, graphs))
        if args.dry_run:
            return removal.foretell(args, chosen, graphs, settings)
        if not removal.agreed(args, f"remove {count(len(chosen.chosen), 'plan')}, {size(chosen.freed_bytes)}?"):
            return removal.refused()
        return removal.finish(args, chosen, cache.take_out(chosen, force=args.force), graphs, settings)


def _lift(args: argparse.Namespace) -> int:
    """Asks nothing: no plan goes, and what is lifted is found out again."""
    from plancache.cache import PlanCache

    if args.force:
        raise UsageError("--force goes with plans, not with --verdicts: lifting is never in anybody's way")
    settings = settings_to_change(args, dry_run=args.dry_run)
    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        graphs, known = removal.graphs_of(cache.to_prune(everything=True).chosen), cache.verdicts()
        chosen = list(dict.fromkeys(verdict for key in args.keys for verdict in _about(key.lower(), known)))
        lifted = 0 if args.dry_run else cache.lift(chosen)
    if args.json:
        print_json({"dry_run": args.dry_run, "lifted": lifted, "verdicts": verdicts.facts(chosen, graphs)})
    else:
        print(verdicts.text(chosen, graphs))
        done = f"would lift {count(len(chosen), 'verdict')}" if args.dry_run else f"lifted {count(lifted, 'verdict')}"
        print(f"\n{done}, so that what it was about is tried again")
    return 0


def _about(key: str, known: Iterable[Verdict]) -> list[Verdict]:
    """What is known about the one key that starts with these digits. Raises `LookupError`."""
    found = [verdict for verdict in known if key and verdict.key.hex().startswith(key)]
    keys = {verdict.key for verdict in found}
    if len(keys) != 1:
        start = f"keys that start with {key!r}"
        what = f"{len(keys)} {start} are known about: give more digits" if keys else f"nothing is known about {start}"
        raise LookupError(f"{what}; 'plancache ls --verdicts' lists what is")
    return found


COMMAND = Command(
    "rm",
    "remove single plans, or lift what is known beside them",
    "Shows the plans, asks, and removes them from the local store (sealed files are never changed). Exit code 1 where one was skipped.",
    "plancache rm 329592ce9e31\nplancache rm 3295 a07b --dry-run\nplancache rm --verdicts 329592ce9e31",
    _configure,
    _run,
)
