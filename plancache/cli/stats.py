"""`plancache stats`: how much is stored, what it saved, and what lies beside it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plancache.cli.command import Command, print_json, settings_to_look, source_of
from plancache.cli.tables import pairs, size, span
from plancache.environment import version_text

if TYPE_CHECKING:
    from plancache.listing import Listed
    from plancache.settings import Settings
    from plancache.store.database import Verdict
    from plancache.stored import Shelf


def _configure(parser: argparse.ArgumentParser) -> None:
    pass


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache

    settings = settings_to_look(args)
    with PlanCache(settings=settings) as cache:
        shelves, verdicts, damaged_bytes = cache.shelves(), cache.verdicts(), cache.damaged_bytes()
    facts = _facts(settings, shelves, verdicts, damaged_bytes)
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
    devices = Counter((fact["device"], fact["cudnn_version"]) for fact in facts)
    return {
        "entries": len(facts),
        "stored_bytes": sum(fact["stored_bytes"] for fact in facts),
        "build_s": sum(fact["build_s"] for fact in facts),
        "hits": sum(fact["hits"] for fact in facts),
        "saved_s": sum(fact["hits"] * fact["build_s"] for fact in facts),
        "qualities": dict(Counter(fact["quality"] for fact in facts)),
        "devices": [{"device": device, "cudnn_version": cudnn, "entries": n} for (device, cudnn), n in devices.most_common()],
    }


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
    for sealed in facts["sealed_files"]:
        print(f"\nsealed: {sealed['path']}\n{pairs([*_rows(sealed), ('file', size(sealed['file_bytes']))])}")


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["entries"]:
        return [("plans", "none")]
    devices = [f"{row['entries']} for {row['device']}, cuDNN {version_text(row['cudnn_version'])}" for row in facts["devices"]]
    return [
        ("plans", f"{facts['entries']}, {size(facts['stored_bytes'])}"),
        ("quality", _counted(facts["qualities"])),
        *[("devices" if not index else "", text) for index, text in enumerate(devices)],
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
    "Sealed files and bundles are told one by one. Needs neither a GPU nor cuDNN.",
    "plancache stats\nplancache stats --json | jq .saved_s",
    _configure,
    _run,
)
