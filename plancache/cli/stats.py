"""`plancache stats`: how much is stored, what it saved, and what lies beside it."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plancache.cli.command import Command, print_json, settings_to_look, source_of, uncollected
from plancache.cli.tables import duration, pairs, size, span, table
from plancache.environment import cuda_version, version_text

if TYPE_CHECKING:
    from plancache.listing import Listed
    from plancache.settings import Settings
    from plancache.store.database import Verdict
    from plancache.store.tags import Tagged
    from plancache.stored import Shelf


def _configure(parser: argparse.ArgumentParser) -> None:
    pass


def _run(args: argparse.Namespace) -> int:
    from plancache.stored import StoredPlans

    settings = settings_to_look(args)
    with closing(StoredPlans(settings, None, None)) as plans, uncollected():
        shelves, verdicts, damaged_bytes = plans.shelves(), plans.verdicts(), plans.damaged_bytes()
        entries = {entry.key: entry for shelf in reversed(shelves) for entry in shelf.entries}
        groups = {"environments": _environments(entries.values()), "tags": _tags(entries.values(), plans.tags())}
    facts = _facts(settings, shelves, verdicts, damaged_bytes) | groups
    if args.json:
        print_json(facts)
    else:
        _print(facts, settings)
    return 0


def _facts(settings: Settings, shelves: Sequence[Shelf], verdicts: Sequence[Verdict], damaged_bytes: int | None) -> dict[str, Any]:
    local = [entry for shelf in shelves if shelf.level == "local" for entry in shelf.entries]
    sealed = [shelf for shelf in shelves if shelf.level == "sealed"]
    damaged = None if damaged_bytes is None else {"path": f"{settings.database}.damaged", "bytes": damaged_bytes}
    return {
        "directory": str(settings.directory),
        "file_bytes": sum(_bytes_of(f"{settings.database}{suffix}") for suffix in ("", "-wal")),
        "max_bytes": settings.max_bytes,
        **_sums(local),
        "verdicts": dict(Counter(verdict.kind for verdict in verdicts)),
        "damaged_file": damaged,
        "sealed_files": [{"path": str(shelf.path), "file_bytes": _bytes_of(shelf.path), **_sums(shelf.entries)} for shelf in sealed],
    }


def _sums(entries: Sequence[Listed]) -> dict[str, Any]:
    facts = [entry.to_dict() for entry in entries]
    return {
        "stored_bytes": sum(fact["stored_bytes"] for fact in facts),
        **_seconds([(fact["build_s"], fact["hits"]) for fact in facts]),
        "qualities": dict(Counter(fact["quality"] for fact in facts)),
    }


def _seconds(built: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Of plans, by the seconds that their builds took and their hits."""
    return {
        "entries": len(built),
        "build_s": sum(build_s for build_s, _ in built),
        "hits": sum(hits for _, hits in built),
        "saved_s": sum(build_s * hits for build_s, hits in built),
    }


def _environments(entries: Iterable[Listed]) -> list[dict[str, Any]]:
    """What was built for which device and libraries; a plan in several files counts once, as it is looked up."""
    found = defaultdict(list)
    for entry in entries:
        fact = entry.to_dict()
        found[tuple(fact[name] for name in _ENVIRONMENT)].append((fact["build_s"], fact["hits"]))
    rows = [dict(zip(_ENVIRONMENT, place, strict=True)) | _seconds(built) for place, built in found.items()]
    return sorted(rows, key=lambda row: (-row["entries"], *(str(row[name]) for name in _ENVIRONMENT)))


_ENVIRONMENT = ("device", "driver_version", "cudnn_version", "frontend_version")


def _tags(entries: Iterable[Listed], tagged: Iterable[Tagged]) -> list[dict[str, Any]]:
    """What the programs asked for that have a name: with their own hits. A plan that several asked for counts for each."""
    build_s = {entry.key.digest: entry.to_dict()["build_s"] for entry in entries}
    found: dict[str, dict[bytes, int]] = defaultdict(Counter)
    last_used_at: dict[str, float] = {}
    for key, tag, hits, used_at in tagged:
        if key in build_s:
            found[tag][key] += hits
            last_used_at[tag] = max(used_at, last_used_at.get(tag, used_at))
    return [
        {"tag": tag, **_seconds([(build_s[key], hits) for key, hits in found[tag].items()]), "last_used_at": last_used_at[tag]}
        for tag in sorted(found)
    ]


def _bytes_of(path: str | Path) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


# ---- for people


def _print(facts: dict[str, Any], settings: Settings) -> None:
    print(f"{settings.directory} ({source_of(settings, 'directory')})")
    if all(sealed["path"] != str(settings.database) for sealed in facts["sealed_files"]):
        rows = [*_rows(facts), ("file", f"{size(facts['file_bytes'])}, {_limit(settings)}")]
        print(f"\nstored\n{pairs(rows)}")
    beside = []
    if facts["verdicts"]:
        beside.append(("verdicts", f"{_counted(facts['verdicts'])}; 'plancache ls --verdicts' says why"))
    if facts["damaged_file"]:
        damaged = facts["damaged_file"]
        beside.append(("damaged file", f"{size(damaged['bytes'])}, to be removed once nobody wants to look at it: rm {damaged['path']}*"))
    if beside:
        print(f"\nbeside them\n{pairs(beside)}")
    _print_groups(facts)
    for sealed in facts["sealed_files"]:
        print(f"\nsealed: {sealed['path']}\n{pairs([*_rows(sealed), ('file', size(sealed['file_bytes']))])}")


def _print_groups(facts: dict[str, Any]) -> None:
    """Seconds spent and saved, by environment and by program."""
    sums = (">plans", ">build time", ">hits", ">saved")
    if facts["environments"]:
        rows = [
            (row["device"], cuda_version(row["driver_version"]), version_text(row["cudnn_version"]), row["frontend_version"], *_cells(row))
            for row in facts["environments"]
        ]
        print(f"\nby environment\n{table(('device', 'cuda', 'cudnn', 'frontend', *sums), rows, indent='  ')}")
    if facts["tags"]:
        now = time.time()
        rows = [(row["tag"], *_cells(row), duration(now - row["last_used_at"])) for row in facts["tags"]]
        print(f"\nby program (PLANCACHE_TAG)\n{table(('tag', *sums, '>used'), rows, indent='  ')}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return str(row["entries"]), span(row["build_s"]), str(row["hits"]), span(row["saved_s"])


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["entries"]:
        return [("plans", "none")]
    return [
        ("plans", f"{facts['entries']}, {size(facts['stored_bytes'])}"),
        ("quality", _counted(facts["qualities"])),
        ("build time", f"{span(facts['build_s'])}, which these plans took to build"),
        ("hits", f"{facts['hits']}, which saved {span(facts['saved_s'])} of building" if facts["hits"] else "none yet"),
    ]


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers.items())


def _limit(settings: Settings) -> str:
    source = source_of(settings, "max_bytes")
    return f"of {size(settings.max_bytes)} at most ({source})" if settings.max_bytes else f"without a limit ({source})"


COMMAND = Command(
    "stats",
    "sum up what is stored and what it saved",
    "Also by environment and by program: the seconds that builds took and that hits saved. Sealed files and bundles are told one by one. "
    "Needs neither a GPU nor cuDNN.",
    "plancache stats\nplancache stats --json | jq .saved_s",
    _configure,
    _run,
)
