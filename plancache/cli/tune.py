"""`plancache tune`: upgrades stored plans in place, by trying cuDNN's engine configurations on this machine's GPU."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from plancache.cli import amounts
from plancache.cli.command import Command, UsageError, print_json, refuse_unusable, settings_to_change, source_of
from plancache.cli.progress import Progress, terminal
from plancache.cli.tables import count, engine, shorten, span, table, terminal_width

if TYPE_CHECKING:
    from plancache.autotune import Tuning
    from plancache.cache import PlanCache
    from plancache.entry import Entry
    from plancache.jobs import Tuned
    from plancache.settings import Settings

_COLUMNS = ("graph", "engine", "-> engine", ">us", ">-> us", ">gain", "proof", ">s")
_GRAPH_WIDTH = 70


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("keys", metavar="KEY", nargs="*", help="the first hex digits of a plan's key; by default all untuned plans")
    parser.add_argument("--operation", metavar="NAME", help="only graphs with this operation, such as matmul or conv_fprop")
    parser.add_argument("--refresh", action="store_true", help="tune again what is tuned already")
    parser.add_argument("--budget", metavar="S", type=_seconds, help="seconds that one graph's builds and timings may take (default: 120)")
    parser.add_argument("--total-budget", metavar="S", type=_seconds, help="seconds for all graphs; the others stay as they are")
    measure = "time single runs, or replays of a CUDA graph (default: eager)"
    parser.add_argument("--measure", choices=("eager", "graph"), default="eager", help=measure)
    parser.add_argument("--jobs", metavar="N", type=_jobs, help="child processes that compile (default: one a core, up to 8)")
    isolate = "tune in a child process: a candidate that hangs or crashes ends that one only, and is skipped from then on"
    parser.add_argument("--isolate", action="store_true", help=isolate)
    limit = "seconds after which a step of a candidate counts as hanging, in child processes (default: 60)"
    parser.add_argument("--candidate-limit", metavar="S", type=_seconds, help=limit)
    parser.add_argument("--dry-run", action="store_true", help="show what would be tuned, and end")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # of `warm`: told why it makes no sense here


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else amounts.seconds(text)


def _jobs(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 0 (compile in this one) or more")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    settings, tuning = _settings(args), _tuning(args)
    from plancache.cache import PlanCache

    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        chosen = _chosen(cache, args)
        if args.dry_run or not chosen:
            return _foretell(args, chosen, settings)
        progress = Progress(len(chosen), terminal(), word="tuned", steps=2)  # looked at, and decided
        done: list[Tuned] = []

        def on_done(tuned: Tuned) -> None:
            done.append(tuned)
            progress.one()

        try:
            cache.tune(chosen, tuning=tuning, refresh=args.refresh, on_done=on_done, on_step=progress.step)
        finally:  # what is done is stored, and told where the others are interrupted
            progress.end()
            unkept = cache.statistics().faults["write"]
            _tell(args, done, unkept)
    return 1 if unkept or any(tuned.error for tuned in done) else 0


def _settings(args: argparse.Namespace) -> Settings:
    if args.device is not None:
        cure = "run this on a machine with that GPU, without --device"
        raise UsageError(f"tuning runs plans, which takes the GPU itself: there is nothing to tune for a device file; {cure}")
    settings = settings_to_change(args, dry_run=args.dry_run)
    if settings.build == "forbid":
        source = source_of(settings, "build")
        raise UsageError(f"builds are barred ({source}=forbid), and tuning builds; for this command: env -u {source} plancache tune")
    return settings


def _tuning(args: argparse.Namespace) -> Tuning:
    from plancache.autotune import Tuning
    from plancache.errors import SettingsError

    own = {"budget_s": args.budget, "total_budget_s": args.total_budget, "jobs": args.jobs, "measure": args.measure}
    own |= {"isolate": args.isolate, "candidate_limit_s": args.candidate_limit}
    try:
        return Tuning(**{name: value for name, value in own.items() if value is not None})
    except SettingsError as error:
        raise UsageError(str(error)) from None


# ---- what is tuned


def _chosen(cache: PlanCache, args: argparse.Namespace) -> list[Entry]:
    entries = cache.to_tune(*(key.lower() for key in args.keys), refresh=args.refresh)
    if args.operation is None:
        return entries
    found = [entry for entry in entries if args.operation in entry.description.operations]
    if entries and not found:
        there = ", ".join(sorted({name for entry in entries for name in entry.description.operations}))
        raise LookupError(f"none of {count(len(entries), 'plan')} to tune has the operation {args.operation!r}; there are {there}")
    return found


def _foretell(args: argparse.Namespace, chosen: Sequence[Entry], settings: Settings) -> int:
    if args.json:
        plans = [{"key": one.key.hex, "graph": one.description.summary, "engine": one.engine, "quality": one.quality} for one in chosen]
        print_json({"dry_run": args.dry_run, "plans": plans, "tuned": 0, "failed": 0, "mean_gain": None})
        return 0
    if chosen:
        rows = [(one.key.hex[:12], one.description.summary, engine(one.engine), one.quality) for one in chosen]
        print(table(("key", "graph", "engine", "quality"), rows, width=terminal_width(), shrink=1))
        print(f"\nwould tune {count(len(chosen), 'plan')} in {settings.directory}")
    else:
        again = "" if args.refresh else "; --refresh tunes again what is tuned"
        what = "these plans are tuned" if args.keys else "no untuned plans for this GPU are stored"
        print(f"nothing to tune: {what} in {settings.directory} ({source_of(settings, 'directory')}){again}")
    return 0


# ---- what came of it


def _tell(args: argparse.Namespace, done: Sequence[Tuned], unkept: int) -> None:
    if args.json:
        gains = [tuned.gain for tuned in done if tuned.gain is not None]
        failed, won = sum(tuned.error is not None for tuned in done), sum(tuned.entry is not None for tuned in done)
        counts = {"dry_run": False, "tuned": won, "failed": failed, "not_stored": unkept, "mean_gain": _geometric_mean(gains)}
        print_json({**counts, "plans": [fact(tuned) for tuned in done]})
    elif done:
        print(text(done, unkept))


def fact(tuned: Tuned) -> dict[str, Any]:
    before, after = _times_us(tuned)
    entry = tuned.entry
    return {
        "key": tuned.key.hex,
        "graph": tuned.summary,
        "engine_before": None if tuned.before is None else tuned.before.engine,
        "engine": None if entry is None else entry.engine,
        "time_before_us": before,
        "time_us": after,
        "gain": tuned.gain,
        "proof": None if entry is None else entry.proof,
        "seconds": tuned.seconds,
        "failed": tuned.error is not None,
        "reason": tuned.reason or None,
    }


def _times_us(tuned: Tuned) -> tuple[float | None, float | None]:
    """Of the plan that was there and of the tuned one, as they were timed side by side."""
    if tuned.entry is None:
        return None, None
    times = {trial.name: trial.time_us for trial in tuned.entry.trials}
    return None if tuned.before is None else times.get(tuned.before.engine), times.get(tuned.entry.engine)


def text(done: Sequence[Tuned], unkept: int) -> str:
    won = [tuned for tuned in done if tuned.entry is not None]
    parts = []
    if won:
        parts.append(table(_COLUMNS, [_row(tuned) for tuned in won], width=terminal_width(), shrink=0) + "\n")
    parts += [_failure(tuned) for tuned in done if tuned.error is not None]
    parts.append(_sum(done, won, unkept))
    return "\n".join(parts)


def _row(tuned: Tuned) -> tuple[str, ...]:
    assert tuned.entry is not None
    first = "-" if tuned.before is None else tuned.before.engine
    before, after = _times_us(tuned)
    names = [first, tuned.entry.engine]
    if engine(names[0]) != engine(names[1]) or names[0] == names[1]:  # else the knobs tell them apart
        names = [engine(name) for name in names]
    gain = "-" if tuned.gain is None else f"{tuned.gain:.2f}x"
    return shorten(tuned.summary, _GRAPH_WIDTH), *names, _us(before), _us(after), gain, tuned.entry.proof, f"{tuned.seconds:.1f}"


def _us(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.1f}"


def _failure(tuned: Tuned) -> str:
    return f"failed: {tuned.key.hex[:12]} {shorten(tuned.summary, _GRAPH_WIDTH)}\n  {' '.join(tuned.reason.split())}"


def _sum(done: Sequence[Tuned], won: Sequence[Tuned], unkept: int) -> str:
    gains = [tuned.gain for tuned in won if tuned.gain is not None]
    mean = _geometric_mean(gains)
    said = [f"{count(len(won), 'plan')} tuned in {span(sum(tuned.seconds for tuned in done))}"]
    if mean is not None:
        said[0] += f", {mean:.2f} times as fast as before (geometric mean)"
    stayed = Counter(tuned.reason for tuned in done if tuned.entry is None and tuned.error is None)
    said += [f"{number} {'stays as it is' if number == 1 else 'stay as they are'}: {reason}" for reason, number in stayed.most_common()]
    failed = sum(tuned.error is not None for tuned in done)
    said += [f"{failed} failed"] if failed else []
    said += [f"{count(unkept, 'plan')} could not be stored"] if unkept else []
    return "; ".join(said)


def _geometric_mean(gains: Iterable[float]) -> float | None:
    logarithms = [math.log(gain) for gain in gains]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


COMMAND = Command(
    "tune",
    "tune stored plans on this machine's GPU",
    "The candidates of each graph are built, raced and compared, and the proven winner takes the stored plan's place; needs torch. "
    "Exit code 1 where one failed.",
    "plancache tune\nplancache tune 329592ce9e31 --refresh --budget 300\nplancache tune --operation matmul --total-budget 10min",
    _configure,
    _run,
)
