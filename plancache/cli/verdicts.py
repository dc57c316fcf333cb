"""What is known beside the entries, as `plancache ls --verdicts` and `plancache rm --verdicts` show it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plancache.cli.tables import duration, table, terminal_width

if TYPE_CHECKING:
    from plancache.listing import Listed
    from plancache.store.database import Verdict

KINDS = ("quarantined", "unsupported", "struck", "denied")
_COLUMNS = ("kind", "key", "graph", "reason", ">count", ">age")


def is_of(verdict: Verdict, kind: str) -> bool:
    """Whether a verdict is of a kind; `unsupported` is also what only builds without a GPU are told."""
    return kind == "all" or verdict.kind.split()[0] == kind


def graphs_by_key(entries: Sequence[Listed]) -> dict[str, str]:
    return {entry.key.hex: entry.description.summary for entry in entries}


def facts(verdicts: Sequence[Verdict], graphs: Mapping[str, str]) -> list[dict[str, Any]]:
    """As `--json` prints them; `graph` is None where no entry of that key is stored."""
    return [
        {**verdict._asdict(), "key": verdict.key.hex(), "checksum": verdict.checksum.hex() or None, "graph": graphs.get(verdict.key.hex())}
        for verdict in verdicts
    ]


def text(verdicts: Sequence[Verdict], graphs: Mapping[str, str]) -> str:
    from plancache.cli.warm import first_line

    now = time.time()
    rows = [
        (
            fact["kind"],
            fact["key"][:12],
            fact["graph"] or "-",
            " ".join(first_line(fact["reason"]).split()),
            str(fact["count"]),
            duration(now - fact["created_at"]),
        )
        for fact in facts(verdicts, graphs)
    ]
    return table(_COLUMNS, rows, width=terminal_width(), shrink=_COLUMNS.index("reason"))
