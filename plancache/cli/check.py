"""`plancache check`: says whether a program can start here without building, and why not."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from plancache.cli import usability
from plancache.cli.command import Command, print_json, settings_to_look
from plancache.cli.tables import count, shorten, table
from plancache.cli.warm import first_line

if TYPE_CHECKING:
    from plancache.checking import Checked

_GRAPH_WIDTH = 70


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help="a file that 'plancache record' or PlanCache.record has written")
    file = "a device file, or the name of a shipped one such as h200: check for that GPU, which need not be here"
    parser.add_argument("--device", metavar="FILE", help=file)


def _run(args: argparse.Namespace) -> int:
    settings = settings_to_look(args)
    from plancache.manifest import Manifest

    manifest = Manifest.read(args.manifest)
    from plancache.cache import PlanCache

    with PlanCache(settings=settings, device=usability.device_of(args)) as cache:
        check = cache.check(manifest)
    if args.json:
        facts = {"manifest": args.manifest, "device": check.device, "usable": check.usable, "missing": len(check.missing)}
        print_json({**facts, "graphs": [checked.to_dict() for checked in check.graphs]})
    else:
        if check.missing:
            print(table(("graph", "why not"), [_row(checked) for checked in check.missing]) + "\n")
        print(f"usable here: {check.usable} of {count(len(check.graphs), 'graph')} for {check.device}, in {settings.directory}")
        if check.missing:
            print(f"'{_cure(args)}' builds what is missing")
    return 1 if check.missing else 0


def _row(checked: Checked) -> tuple[str, str]:
    from plancache.key import Constraints

    limited = "" if checked.wanted.constraints == Constraints() else " (constrained)"
    return shorten(checked.wanted.summary, _GRAPH_WIDTH - len(limited)) + limited, first_line(checked.reason or "")


def _cure(args: argparse.Namespace) -> str:
    where = {"--device": args.device, "--cache-dir": args.cache_dir}
    return shlex.join(["plancache", "warm", args.manifest, *(word for name, value in where.items() if value for word in (name, value))])


COMMAND = Command(
    "check",
    "say whether a program's graphs are stored and usable here",
    "Nothing is built and no plan is loaded. With a device file it needs no GPU, so that CI can gate a deploy; PLANCACHE_BUILD=forbid is "
    "its twin at run time. Exit code 1 where a graph is missing.",
    "plancache check serve.json\nplancache check serve.json --device h200 --json",
    _configure,
    _run,
)
