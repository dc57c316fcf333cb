"""`plancache warm`: plans graphs before they are needed, with or without a GPU."""

from __future__ import annotations

import argparse
import logging
import queue
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.cli import rewarming, tune
from plancache.cli.command import Command, UsageError, print_json, settings_of, source_of
from plancache.cli.progress import Progress, terminal
from plancache.cli.tables import count, engine, milliseconds
from plancache.cli.target import graphs_of, load, refuse_slip

if TYPE_CHECKING:
    from plancache.cache import PlanCache
    from plancache.entry import Entry
    from plancache.environment import Device
    from plancache.jobs import Tuned
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
    entry: Entry | None = field(default=None, repr=False)

    def line(self, number: int) -> str:
        shown = "-" if self.engine is None else engine(self.engine)
        return f"{number:3}  {self.origin:<8}  {milliseconds(self.seconds):>6}  {shown:<6}  {self.name}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "entry"}


def _configure(parser: argparse.ArgumentParser) -> None:
    what = "a manifest, as 'plancache record' writes it; or a function that yields graphs, or objects with a .graph"
    parser.add_argument("target", metavar="MANIFEST|MODULE:FUNCTION", nargs="?", help=what)
    stored = "all graphs that are stored for another cuDNN, driver or device than the one here"
    parser.add_argument("--stored", action="store_true", help=stored)
    file = "a device file, or the name of a shipped one such as h200: plan for that GPU, which need not be here"
    parser.add_argument("--device", metavar="FILE", help=file)
    jobs = "child processes that build side by side for a device file (default: 1)"
    parser.add_argument("--jobs", metavar="N", type=_jobs, default=1, help=jobs)
    parser.add_argument("--tune", action="store_true", help="on a GPU: tune what was planned, as 'plancache tune' does")


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 1 or more")
    return int(text)


class _Result(NamedTuple):
    outcomes: Sequence[_Outcome]
    unkept: int
    tuned: Sequence[Tuned] = ()
    compared: Sequence[rewarming.Compared] = ()

    @property
    def failed(self) -> int:
        return sum(outcome.origin == "failed" for outcome in self.outcomes) + sum(one.error is not None for one in self.tuned)


def _run(args: argparse.Namespace) -> int:
    _refuse_nonsense(args)
    settings = _settings(args)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # progress, and what the function prints, is not JSON
        source = None if args.stored else _source(args.target)
        device = _device(args.device)
        result = _warm(args, settings, device, source)
        for part in (tune.text(result.tuned, 0) if result.tuned else "", rewarming.text(result.compared) if result.compared else ""):
            print(f"\n{part}\n" if part else "", end="")
    if args.json:
        facts = {"device": device.model, "failed": result.failed, "not_stored": result.unkept}
        facts |= {"graphs": [outcome.to_dict() for outcome in result.outcomes]}
        facts |= {"tuned": [tune.fact(one) for one in result.tuned]} if args.tune else {}
        print_json(facts | ({"compared": [one.to_dict() for one in result.compared]} if args.stored else {}))
    return 1 if result.failed or result.unkept else 0


def _warm(args: argparse.Namespace, settings: Settings, device: Device, source: Iterable[Any] | None) -> _Result:
    """Plans the graphs of a source, or those that are stored for other environments, and tunes them where asked."""
    from plancache.cache import PlanCache

    started = time.perf_counter()
    with ExitStack() as stack:
        place = device if device.is_file else None
        caches = [stack.enter_context(PlanCache(settings=settings, device=place)) for _ in range(args.jobs)]
        known = caches[0].stored_elsewhere() if source is None else []
        items = [one.wanted for one in known] if source is None else source
        planning = stack.enter_context(closing(_plan_all(caches, items)))  # it ends before the caches are closed
        outcomes = _print_all(planning, len(items) if isinstance(items, Sequence) else None)
        unkept = sum(outcome.origin == "built" for outcome in outcomes) - sum(cache.statistics().stored for cache in caches)
        seconds, entries = time.perf_counter() - started, [outcome.entry for outcome in outcomes]
        total = f"{count(len(outcomes), 'graph')} for {device.model} in {seconds:.1f} s"
        print(f"\n{total}: {_ways(outcomes, unkept)}; {settings.directory}")
        before = caches[0].statistics().faults["write"]
        tuned = rewarming.tune(caches[0], [entry for entry in entries if entry]) if args.tune else []
        unkept += caches[0].statistics().faults["write"] - before
    return _Result(outcomes, unkept, tuned, rewarming.compare(known, entries, tuned) if known else [])


def _refuse_nonsense(args: argparse.Namespace) -> None:
    if args.stored == (args.target is not None):
        raise UsageError("give one of a manifest, package.module:function and --stored")
    if args.tune and args.device is not None:
        cure = "run this on a machine with that GPU, without --device"
        raise UsageError(f"--tune runs plans, which takes the GPU itself: there is nothing to tune for a device file; {cure}")
    if args.jobs > 1 and args.device is None:
        raise UsageError("--jobs is for device files: for a GPU this process builds one graph after the other; leave it out")


def _source(target: str) -> Iterable[Any]:
    """The graphs of a manifest, or of a function, which is called when the first one is asked for."""
    if Path(target).is_file() or (":" not in target and ("/" in target or target.endswith((".json", ".plans")))):
        from plancache.manifest import Manifest

        return Manifest.read(target).graphs
    return graphs_of(target, load(target))


def _settings(args: argparse.Namespace) -> Settings:
    """The settings, said where they keep warming from bringing anything. Raises `UsageError` where builds are barred."""
    settings = settings_of(args)
    if settings.build == "forbid":
        source = source_of(settings, "build")
        cure = f"unset it for this command: env -u {source} plancache warm {args.target or '--stored'}"
        raise UsageError(f"builds are barred ({source}=forbid), and warming is building; {cure}")
    if settings.mode != "readwrite":
        looked_up = ", nor is anything looked up" if settings.mode == "off" else ""
        _log.warning("the cache is %s (%s): what is built is not kept%s", settings.mode, source_of(settings, "mode"), looked_up)
    return settings


def _ways(outcomes: Sequence[_Outcome], unkept: int) -> str:
    ways = Counter(outcome.origin for outcome in outcomes) + Counter({"not stored": unkept})
    return ", ".join(f"{number} {way}" for way, number in ways.items()) or "there are none"


def _print_all(outcomes: Iterator[_Outcome], total: int | None) -> list[_Outcome]:
    """Prints each as it comes, and below them how far it is where that is known."""
    done: list[_Outcome] = []
    told: dict[str, int] = {}
    progress = Progress(total or 0, terminal() if total else None, word="planned")
    try:
        for number, outcome in enumerate(outcomes, 1):
            progress.end()
            if not done:
                print("  #  ORIGIN          MS  ENGINE  GRAPH")
            done.append(outcome)
            print(outcome.line(number), flush=True)
            if outcome.reason is not None:
                first = told.setdefault(outcome.reason, number)
                print(f"     {first_line(outcome.reason) if first == number else f'as number {first}'}", flush=True)
            progress.step()
            progress.one()
    finally:
        progress.end()
    return done


def _device(name: str | None) -> Device:
    from plancache.environment import Device, load_frontend

    load_frontend()  # what is missing is told before the function runs
    if name is None:
        return Device.current()
    refuse_slip(name)
    return Device.from_file(name)


def _plan_all(caches: Sequence[PlanCache], items: Iterable[Any]) -> Generator[_Outcome, None, None]:
    """Plans one graph after the other, or as many side by side as there are caches, each of which has a child to build in."""
    numbered = enumerate(items, 1)
    if len(caches) == 1:
        for number, item in numbered:
            yield _planned(caches[0], number, item)
        return
    from concurrent.futures import ThreadPoolExecutor

    free: queue.SimpleQueue[PlanCache] = queue.SimpleQueue()
    for cache in caches:
        free.put(cache)

    def planned(one: tuple[int, Any]) -> _Outcome:
        cache = free.get()
        try:
            return _planned(cache, *one)
        finally:
            free.put(cache)

    with ThreadPoolExecutor(len(caches)) as pool:  # after Ctrl-C what is under way is finished and stored
        yield from pool.map(planned, numbered)


def _planned(cache: PlanCache, number: int, item: Any) -> _Outcome:
    """Plans a graph. An error that every graph would meet is raised."""
    from plancache.environment import load_frontend
    from plancache.errors import DeviceError, DeviceFileError, LibraryError, PlancacheError
    from plancache.manifest import Wanted

    unsupported = load_frontend().cudnnGraphNotSupportedError
    name = item.summary if isinstance(item, Wanted) else getattr(item, "name", None)
    before, started = cache.statistics().uncacheable, time.perf_counter()
    try:
        plan = cache.plan_wanted(item) if isinstance(item, Wanted) else cache.plan(getattr(item, "graph", item), build="allow")
    except (DeviceError, DeviceFileError, LibraryError):
        raise
    except (RuntimeError, ValueError, PlancacheError, unsupported) as error:  # this graph's answer; the next one's turn comes
        return _Outcome(name or f"graph {number}", "failed", time.perf_counter() - started, reason=str(error))
    seconds, entry = time.perf_counter() - started, plan.entry
    if entry is None:
        reasons = ", ".join(cache.statistics().uncacheable - before)
        return _Outcome(name or f"graph {number}", "uncached", seconds, reason=f"it cannot be cached: {reasons}")
    return _Outcome(name or entry.description.summary, plan.origin, seconds, entry.key.hex, entry.engine, entry=entry)


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
    "The graphs of a manifest are made again from their signatures; a function is imported (the current directory counts) and called "
    "without arguments. What is planned is stored, what is stored already is skipped. --stored, after an upgrade of cuDNN, driver or "
    "device, builds anew what the store knows and compares the times. Exit code 1 where one could not be planned.",
    "plancache warm serve.json --device h200 --jobs 2\n"
    "plancache warm plancache.graphs:examples --device h200\n"
    "plancache warm --stored --tune",
    _configure,
    _run,
)
