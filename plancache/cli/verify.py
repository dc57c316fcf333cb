"""`plancache verify`: checks everything that is stored, and names the cure of what is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plancache.cli.command import Command, UsageError, nothing_stored, print_json, settings_to_look
from plancache.cli.removal import hex_of
from plancache.cli.tables import count

if TYPE_CHECKING:
    from plancache.settings import Settings
    from plancache.stored import Finding

_EVERY = 100  # so many more, and the terminal shows how far it is


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", action="store_true", help="load those meant for this GPU into cuDNN as well")


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache
    from plancache.errors import DeviceError

    settings, checked = settings_to_look(args), _Progress(sys.stderr.write if sys.stderr.isatty() else None)
    with PlanCache(settings=settings) as cache:
        try:
            findings = cache.verify(load=args.load, on_entry=checked.one)
        except DeviceError as error:
            raise UsageError(f"--load loads plans into this machine's GPU; leave it out where there is none ({error})") from error
        checked.done()
    if args.json:
        print_json({"checked": checked.number, "findings": [_fact(finding, settings) for finding in findings]})
    else:
        _print(findings, checked.number, settings)
    return 1 if findings else 0


class _Progress:
    """Counts entries, on one line of a terminal where there are many."""

    def __init__(self, write: Callable[[str], object] | None) -> None:
        self.number = 0
        self._write = write

    def one(self) -> None:
        self.number += 1
        if self._write is not None and self.number % _EVERY == 0:
            self._write(f"\r{self.number} checked")

    def done(self) -> None:
        if self._write is not None and self.number >= _EVERY:
            self._write("\r\x1b[K")


def _print(findings: list[Finding], checked: int, settings: Settings) -> None:
    for finding in findings:
        fact = _fact(finding, settings)
        print(f"{finding.path if not finding.key else fact['key'][:12]}: {fact['problem']}\n  cure: {fact['cure']}")
    if not checked and not findings:
        print(nothing_stored(settings))
    else:
        problems = f"\n{count(len(findings), 'problem')} found" if findings else "no problems found"
        print(f"{problems}, {count(checked, 'plan')} checked")


def _fact(finding: Finding, settings: Settings) -> dict[str, Any]:
    problem = " ".join(finding.problem.removeprefix(f"{finding.path}: ").split())
    key = hex_of(finding.key)
    return {"file": str(finding.path), "key": key or None, "problem": problem, "cure": _cure(finding, key, settings)}


def _cure(finding: Finding, key: str, settings: Settings) -> str:
    if finding.level == "sealed":
        return f"seal or export it anew, and put that in the place of {finding.path}; what cannot be read is built anew meanwhile"
    if key and not isinstance(finding.key, bytes):
        return f"it has no key to name it by: plancache purge --cache-dir {settings.directory} removes it, with all else"
    if key:
        return f"plancache rm {key[:12]} --cache-dir {settings.directory}; it is built anew when it is asked for"
    return damaged_cure(settings)


def damaged_cure(settings: Settings) -> str:
    """What becomes of a damaged database, and how to help."""
    name = settings.database.name
    return (
        f"the next program that opens it to store plans moves it to {name}.damaged and begins a new file; "
        f"to do so now: mv {settings.database}* /tmp/"
    )


COMMAND = Command(
    "verify",
    "check all that is stored",
    "Checksums, sizes and keys of every plan, and the pages of the database. Changes nothing; exit code 1 where something is wrong. "
    "Needs neither a GPU nor cuDNN, but for --load.",
    "plancache verify\nplancache verify --load --json",
    _configure,
    _run,
)
