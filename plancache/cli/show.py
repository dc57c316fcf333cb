"""`plancache show`: everything of one stored plan."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

from plancache.cli import trials
from plancache.cli.command import Command, nothing_stored, print_json, settings_to_look, uncollected
from plancache.cli.graph import operations, print_graph, tensors
from plancache.cli.tables import count, duration, milliseconds, pairs, shorten, size, table
from plancache.environment import cuda_version, version_text

if TYPE_CHECKING:
    from plancache.entry import Entry
    from plancache.listing import Listed
    from plancache.store.tags import Tagged

_QUALITIES = {
    "compiled": "compiled (built without a GPU, by the heuristics' choice)",
    "heuristic": "heuristic (the heuristics' choice)",
    "tuned": "tuned (the fastest of those that were timed)",
}
_VALUE_WIDTH = 70


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEYPREFIX", help="the first hex digits of the plan's key, as 'plancache ls' shows them")
    parser.add_argument("--all", action="store_true", help="of a tuned plan, show those candidates too that lost early")


def _run(args: argparse.Namespace) -> int:
    from plancache.stored import StoredPlans

    settings = settings_to_look(args)
    with closing(StoredPlans(settings, None, None)) as plans, uncollected():
        entries = plans.entries()
        if not entries:
            raise LookupError(f"{nothing_stored(settings)}; --cache-dir names another directory")
        entry = plans.entry(args.key)
        listed = next((listed for listed in entries if listed.key == entry.key), None)
        tagged = [tagged for tagged in plans.tags() if tagged.key == entry.key.digest]
    if listed is None:
        raise LookupError(f"plan {entry.key.hex[:16]} is stored under a key that is not its own; 'plancache verify' says more")
    if args.json:
        print_json(_facts(entry, listed))
    else:
        _print(entry, listed, tagged, everything=args.all)
    return 0


def _facts(entry: Entry, listed: Listed) -> dict[str, Any]:
    digests = entry.key.component_digests
    return {
        **listed.to_dict(),
        "operations": operations(entry),
        "tensors": tensors(entry),
        "operands": list(entry.operands),
        "recipe": entry.recipe._asdict(),
        "candidates": [candidate._asdict() for candidate in entry.candidates],
        "behavior_notes": list(entry.behavior_notes),
        "requirements": dict(entry.requirements),
        "timings_s": dict(entry.timings_s),
        "proof": entry.proof,
        "tolerance": entry.tolerance,
        "trials": trials.facts(entry),
        "conditions": dict(entry.conditions),
        "provenance": dict(entry.provenance),
        "components": {name: {"sha256": digests[name], "value": _value(name, data)} for name, data in entry.key.components.items()},
    }


def _value(name: str, preimage: bytes) -> Any:
    return None if name == "signature" else json.loads(preimage)  # the graph itself is shown in its place


# ---- for people


def _print(entry: Entry, listed: Listed, tagged: Sequence[Tagged], *, everything: bool) -> None:
    fact = listed.to_dict()
    print(pairs([("key", entry.key.hex), ("graph", fact["graph"])], indent=""))
    print_graph(entry)
    _section("plan", _plan(entry, fact))
    if entry.recipe.knobs:
        _section("knobs", [(name, str(value)) for name, value in entry.recipe.knobs.items()])
    if entry.requirements:
        _section("requirements", list(entry.requirements.items()))
    _section("history", _history(entry, fact) + _programs(tagged))
    _print_components(entry, fact)
    if entry.trials:
        _section("tuning", [("date", _moment(entry.created_at)), *trials.conditions(entry.conditions)])
        print(f"\n{trials.text(entry, everything=everything)}")
    else:
        _print_candidates(entry)


def _section(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{title}\n{pairs(rows)}")


def _plan(entry: Entry, fact: dict[str, Any]) -> list[tuple[str, str]]:
    steps = ", ".join(f"{step} {milliseconds(seconds)}" for step, seconds in entry.timings_s.items())
    tolerance = "" if entry.tolerance is None else f", tolerance {entry.tolerance:g}"
    return [
        ("quality", _QUALITIES[entry.quality]),
        ("proof", ("none (nothing was run)" if entry.proof == "none" else entry.proof) + tolerance),
        ("engine", entry.engine),
        *([] if fact["time_us"] is None else [("run time", f"{fact['time_us']:.1f} us")]),
        ("workspace", size(entry.workspace_size)),
        ("notes", ", ".join(entry.behavior_notes) or "none"),
        ("size", f"{size(fact['plan_bytes'])}, stored as {size(fact['stored_bytes'])}"),
        ("build time", f"{milliseconds(entry.build_s)} ms ({steps})"),
    ]


def _history(entry: Entry, fact: dict[str, Any]) -> list[tuple[str, str]]:
    last = "" if fact["last_used_at"] is None else f", last {_moment(fact['last_used_at'])}"
    made_by = [f"{name} {_version(name, value)}" for name, value in entry.provenance.items()]
    return [("built", f"{_moment(entry.created_at)} by {', '.join(made_by)}"), ("hits", f"{fact['hits']}{last}")]


def _programs(tagged: Sequence[Tagged]) -> list[tuple[str, str]]:
    """Which programs asked for it, a line each, the last one first."""
    ordered = sorted(tagged, key=lambda one: -one.last_used_at)
    lines = [f"{one.tag}: {count(one.hits, 'hit')}, last {_moment(one.last_used_at)}" for one in ordered]
    return [("" if index else "programs", line) for index, line in enumerate(lines)]


def _version(name: str, value: Any) -> str:
    return version_text(value) if name == "cudnn" and type(value) is int else str(value)


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S} ({duration(time.time() - at)} ago)"


def _print_candidates(entry: Entry) -> None:
    rows = [("*" if candidate == entry.recipe else "", str(index), candidate.name) for index, candidate in enumerate(entry.candidates)]
    print(f"\ncandidates ({count(len(rows), 'engine configuration')} in cuDNN's order, * is the one built)")
    print(table(("", ">#", "engine and knobs"), rows, indent="  "))


def _print_components(entry: Entry, fact: dict[str, Any]) -> None:
    digests = entry.key.component_digests
    rows = [(name, digests[name][:16], _component(name, data, fact)) for name, data in entry.key.components.items()]
    print("\nkey: SHA-256 over these components (--json has them in full)")
    print(table(("component", "sha-256", "value"), rows, indent="  "))


def _component(name: str, preimage: bytes, fact: dict[str, Any]) -> str:
    value = _value(name, preimage)
    if name == "signature":
        return fact["graph"]  # type: ignore[no-any-return]  # a JSON value
    if name == "cudnn":
        return f"{version_text(value['version'])} ({count(len(value['builds']), 'library', 'libraries')} by build id)"
    if name == "driver":
        return f"CUDA {cuda_version(value)}"
    if name == "device":
        return f"compute capability {value['deviceVer'] / 100:.1f}, {value['multiProcessorCount']} SMs, and other limits"
    if isinstance(value, dict):
        set_ones = [f"{key}={setting}" for key, setting in value.items() if setting not in (None, False, [])]
        return shorten(" ".join(set_ones), _VALUE_WIDTH) or "none"
    return str(value)


COMMAND = Command(
    "show",
    "show one stored plan in full",
    "Its graph, recipe, candidates, timings, proof and key; of a tuned plan also what each candidate took. Needs neither a GPU nor cuDNN.",
    "plancache show 329592ce9e31\nplancache show 3295 --json | jq .recipe",
    _configure,
    _run,
)
