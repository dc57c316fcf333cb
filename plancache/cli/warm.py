"""`plancache warm`: plans graphs before they are needed, with or without a GPU."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from plancache.cli.command import Command, UsageError, print_json, settings_of, source_of
from plancache.cli.tables import count, engine, milliseconds
from plancache.cli.target import graphs_of, load, refuse_slip

if TYPE_CHECKING:
    from plancache.cache import PlanCache
    from plancache.environment import Device
    from plancache.settings import Settings

_log = logging.getLogger("plancache.cli")


@dataclass(frozen=True)
class _Outcome:
    """What became of one graph. `origin`: as of a plan, or `failed`; `key` is None where nothing is cached."""

    name: str
    origin: str
    seconds: float
    key: str | None = None
    engine: str | None = None
    reason: str | None = None

    def line(self, number: int) -> str:
        shown = "-" if self.engine is None else engine(self.engine)
        return f"{number:3}  {self.origin:<8}  {milliseconds(self.seconds):>6}  {shown:<6}  {self.name}"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function that yields graphs, or objects with a .graph")
    file = "a device file, or the name of a shipped one such as h200: plan for that GPU, which need not be here"
    parser.add_argument("--device", metavar="FILE", help=file)


def _run(args: argparse.Namespace) -> int:
    settings, started = _settings(args), time.perf_counter()
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # progress, and what the function prints, is not JSON
        function = load(args.target)
        device = _device(args.device)
        from plancache.cache import PlanCache

        with PlanCache(settings=settings, device=device if device.is_file else None) as cache:
            outcomes = _print_all(_plan_all(cache, graphs_of(args.target, function)))
            unkept = sum(outcome.origin == "built" for outcome in outcomes) - cache.statistics().stored
    failed = sum(outcome.origin == "failed" for outcome in outcomes)
    if args.json:
        print_json({"device": device.model, "failed": failed, "not_stored": unkept, "graphs": [asdict(outcome) for outcome in outcomes]})
    else:
        ways = Counter(outcome.origin for outcome in outcomes) + Counter({"not stored": unkept})
        what = ", ".join(f"{number} {way}" for way, number in ways.items())
        print(
            f"\n{count(len(outcomes), 'graph')} for {device.model} in {time.perf_counter() - started:.1f} s: {what}; {settings.directory}"
        )
    return 1 if failed or unkept else 0


def _settings(args: argparse.Namespace) -> Settings:
    """The settings, said where they keep warming from bringing anything. Raises `UsageError` where builds are barred."""
    settings = settings_of(args)
    if settings.build == "forbid":
        source = source_of(settings, "build")
        cure = f"unset it for this command: env -u {source} plancache warm {args.target}"
        raise UsageError(f"builds are barred ({source}=forbid), and warming is building; {cure}")
    if settings.mode != "readwrite":
        looked_up = ", nor is anything looked up" if settings.mode == "off" else ""
        _log.warning("the cache is %s (%s): what is built is not kept%s", settings.mode, source_of(settings, "mode"), looked_up)
    return settings


def _print_all(outcomes: Iterator[_Outcome]) -> list[_Outcome]:
    """Prints each as it comes."""
    done: list[_Outcome] = []
    told: dict[str, int] = {}
    for number, outcome in enumerate(outcomes, 1):
        if not done:
            print("  #  ORIGIN          MS  ENGINE  GRAPH")
        done.append(outcome)
        print(outcome.line(number), flush=True)
        if outcome.reason is not None:
            first = told.setdefault(outcome.reason, number)
            print(f"     {first_line(outcome.reason) if first == number else f'as number {first}'}", flush=True)
    return done


def _device(name: str | None) -> Device:
    from plancache.environment import Device, load_frontend

    load_frontend()  # what is missing is told before the function runs
    if name is None:
        return Device.current()
    refuse_slip(name)
    return Device.from_file(name)


def _plan_all(cache: PlanCache, items: Iterator[Any]) -> Iterator[_Outcome]:
    """Plans one graph after the other. An error that every graph would meet is raised."""
    from plancache.environment import load_frontend
    from plancache.errors import DeviceError, DeviceFileError, LibraryError, PlancacheError

    unsupported = load_frontend().cudnnGraphNotSupportedError
    for number, item in enumerate(items, 1):
        name = getattr(item, "name", None)
        before, started = cache.statistics().uncacheable, time.perf_counter()
        try:
            plan = cache.plan(getattr(item, "graph", item), build="allow")
        except (DeviceError, DeviceFileError, LibraryError):
            raise
        except (RuntimeError, ValueError, PlancacheError, unsupported) as error:  # this graph's answer; the next one's turn comes
            yield _Outcome(name or f"graph {number}", "failed", time.perf_counter() - started, reason=str(error))
            continue
        seconds = time.perf_counter() - started
        assert plan is not None  # only build="lookup" returns none
        if plan.entry is None:
            reasons = ", ".join(cache.statistics().uncacheable - before)
            yield _Outcome(name or f"graph {number}", "uncached", seconds, reason=f"it cannot be cached: {reasons}")
        else:
            entry = plan.entry
            yield _Outcome(name or entry.description.summary, plan.origin, seconds, entry.key.hex, entry.engine)


def first_line(reason: str) -> str:
    """cuDNN's reason in one line: its first, and the first check that failed (the rest follows from that)."""
    head, _, rest = reason.strip().partition("\n")
    if head.count("(") > head.count(")"):
        head = head[: head.rindex("(")].rstrip()
    check = next((line.partition("Reason:")[2].strip() for line in rest.splitlines() if "Reason:" in line), "")
    return f"{head}; first check that failed: {check}" if check else head


COMMAND = Command(
    "warm",
    "plan graphs before they are needed",
    "The function is imported (the current directory counts) and called without arguments; the graphs it yields are planned and stored. "
    "Exit code 1 where one could not be.",
    "plancache warm plancache.graphs:examples --device h200\nplancache warm serving.shapes:all_graphs",
    _configure,
    _run,
)
