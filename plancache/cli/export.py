"""`plancache export`: writes a bundle, a sealed file that carries plans to other machines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.cli import usability
from plancache.cli.command import Command, print_json, settings_to_look
from plancache.cli.filters import add_filters, filter_of
from plancache.cli.tables import count, size

if TYPE_CHECKING:
    from plancache.carrying import Exported
    from plancache.listing import Filter, Listed

_Graph = tuple[bytes, bytes]
"""A signature and constraints, encoded."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the file to write, such as plans.sqlite3")
    parser.add_argument("keys", metavar="KEY", nargs="*", help="only these plans, by the first hex digits of their keys")
    parser.add_argument("--manifest", metavar="FILE", help="only plans of the graphs that this manifest names")
    parser.add_argument("--doubtful", action="store_true", help="also tuned plans that were timed on a busy or throttled GPU")
    parser.add_argument("--force", action="store_true", help="replace what lies there, whatever it is")
    usability.add_device(parser)
    add_filters(parser)


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache
    from plancache.listing import Filter

    settings, matching = settings_to_look(args), filter_of(args)
    wanted = None if args.manifest is None else _wanted(args.manifest)
    filtered = bool(args.keys) or wanted is not None or matching != Filter()
    with PlanCache(settings=settings, device=usability.device_of(args)) as cache:
        stored = cache.entries() if filtered else []
        chosen = _chosen(stored, args.keys, matching, wanted) if filtered else None
        exported = cache.export_bundle(Path(args.bundle).absolute(), chosen, doubtful=args.doubtful, replace=args.force)
    lacking = len((wanted or set()) - {_graph(entry) for entry in stored})
    if args.json:
        facts = {"path": str(exported.path), "usability": asdict(exported.usability), "graphs_without_a_plan": lacking}
        print_json(exported._asdict() | facts)
    else:
        print(_text(exported))
        if lacking:
            total = f"{lacking} of {count(len(wanted or ()), 'graph')} of {args.manifest}"
            print(f"without a stored plan: {total}; 'plancache check {args.manifest}' says why")
    return 0


def _wanted(manifest: str) -> set[_Graph]:
    from plancache.manifest import Manifest

    return {(wanted.signature, wanted.constraints.encoded) for wanted in Manifest.read(manifest)}


def _graph(entry: Listed) -> _Graph:
    return entry.key.preimages[0], entry.key.preimages[-1]


def _chosen(stored: Sequence[Listed], starts: Sequence[str], matching: Filter, wanted: set[_Graph] | None) -> list[Listed]:
    """What fits all of it. Raises `LookupError` where nothing does, and for a beginning that is not that of one key."""
    keys = {entry.key.hex for entry in stored}
    for start in starts:
        found = [key for key in keys if start and key.startswith(start.lower())]
        if len(found) != 1:
            raise LookupError(f"{len(found) or 'no'} stored entries have a key that starts with {start!r}; 'plancache ls' lists them")
    beginnings, now = tuple(start.lower() for start in starts) or ("",), time.time()
    chosen = [
        entry
        for entry in stored
        if entry.key.hex.startswith(beginnings) and (wanted is None or _graph(entry) in wanted) and matching(entry, now)
    ]
    if not chosen:
        raise LookupError(f"none of {count(len(stored), 'stored plan')} fits; 'plancache ls' lists them, with the same filters")
    return chosen


def _text(exported: Exported) -> str:
    lines = [f"exported {count(exported.entries, 'plan')}, {size(exported.size_bytes)}, to {exported.path}"]
    if exported.left_out:
        from plancache.carrying import DOUBTFUL

        told = ", ".join(f"{number} {reason}" for reason, number in exported.left_out.items())
        cure = "; --doubtful takes those along" if DOUBTFUL in exported.left_out else ""
        lines.append(f"left out {count(sum(exported.left_out.values()), 'plan')}: {told}{cure}")
    return "\n".join([*lines, usability.text(exported.usability), "", f"to read it in place: PLANCACHE_BUNDLES={exported.path}"])


COMMAND = Command(
    "export",
    "write plans into a bundle, a read-only file that carries them to other machines",
    "Of everything, or of what fits all that is asked for, sealed files included. What is quarantined, struck or denied is left out, and "
    "what was timed on a GPU that was not quiet. A bundle holds no path, host, user or program name and no use counts; an older one is "
    "replaced when the new one is whole. Needs neither a GPU nor cuDNN; with one it says how many of the plans can be used there.",
    "plancache export plans.sqlite3 --manifest serve.json --device h200\n"
    "plancache export matmuls.sqlite3 --operation matmul --quality tuned",
    _configure,
    _run,
)
