"""`plancache import`: merges bundles into the local store."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.cli import usability
from plancache.cli.command import Command, print_json, refuse_unusable, settings_to_change
from plancache.cli.tables import count

if TYPE_CHECKING:
    from plancache.carrying import Imported


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", metavar="BUNDLE", nargs="+", help="a sealed file, as 'plancache export' and 'plancache seal' make it")
    parser.add_argument("--dry-run", action="store_true", help="check it and say what can be used, and end")
    usability.add_device(parser)


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings = settings_to_change(args, dry_run=args.dry_run)
    done = []
    with PlanCache(settings=settings, device=usability.device_of(args)) as cache:
        if not args.dry_run:
            refuse_unusable(cache)
        for bundle in args.bundles:
            done.append(cache.import_bundle(Path(bundle).absolute(), dry_run=args.dry_run))
            if not args.json:
                print(f"{bundle}: {_text(done[-1], args)}\n{usability.text(done[-1].usability)}")
    if args.json:
        print_json([{**one._asdict(), "path": str(one.path), "usability": asdict(one.usability)} for one in done])
    elif sum(one.removed for one in done):
        limit = f"to keep to the limit ({settings.max_bytes} bytes, PLANCACHE_MAX_BYTES)"
        print(f"\nremoved {count(sum(one.removed for one in done), 'plan')} that save the least build time per byte, {limit}")
    return 0


def _text(imported: Imported, args: argparse.Namespace) -> str:
    if args.dry_run:
        return f"{count(imported.entries, 'plan')}, all whole; nothing was stored"
    kept = imported.entries - imported.stored - imported.refused
    parts = [f"{imported.stored} stored", *([f"{kept} no better than what is here"] if kept else [])]
    if imported.refused:
        parts.append(f"{imported.refused} known to be bad here ('plancache ls --verdicts')")
    return f"{count(imported.entries, 'plan')}, {', '.join(parts)}"


COMMAND = Command(
    "import",
    "merge bundles into the store",
    "A better plan (tuned before heuristic before compiled) takes the place of a lesser one, an equal one stays. Every plan is checked "
    "before the first is stored: of a bundle that is not whole nothing is taken. Take bundles from people whose code you would run. "
    "Needs neither a GPU nor cuDNN; with one it says how many of the plans can be used here.",
    "plancache import plans.sqlite3\nplancache import plans.sqlite3 --dry-run --device h200",
    _configure,
    _run,
)
