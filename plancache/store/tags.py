"""Which programs asked for which keys: statements and rows of the `tags` table, which lies beside the entries."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

from plancache.entry import Row
from plancache.store.connection import has_table

SELECT_TAGS = "SELECT tags.key, tags.tag, tags.hits, tags.last_used_at FROM tags"
SELECT_TAGGED = (
    "SELECT entries.key, entries.preimage, entries.facts, entries.payload, entries.checksum"
    " FROM entries JOIN tags ON tags.key = entries.key WHERE tags.tag = ?"
)
COUNT_TAG = (
    "INSERT INTO tags (key, tag, hits, last_used_at) VALUES (?, ?, ?, ?) ON CONFLICT (key, tag)"
    " DO UPDATE SET hits = (tags.hits + excluded.hits), last_used_at = excluded.last_used_at"
)
_TYPES = (bytes, str, int, float)  # SQLite takes any type in any column; others are not believed


class Tagged(NamedTuple):
    """A program that asked for a key: the plan was built or tuned for it, or loaded by it `hits` times."""

    key: bytes
    tag: str
    hits: int
    last_used_at: float


def read_tags(connection: sqlite3.Connection) -> list[Tagged]:
    """All of them; none where the file has no such table."""
    if not has_table(connection, "tags"):
        return []
    return [Tagged(*row) for row in connection.execute(SELECT_TAGS) if tuple(map(type, row)) == _TYPES]


def read_tagged(connection: sqlite3.Connection, tag: str) -> list[Row]:
    """The entries that a program asked for."""
    return [Row(*row) for row in connection.execute(SELECT_TAGGED, (tag,))] if has_table(connection, "tags") else []


def count_tag(connection: sqlite3.Connection, hits: Mapping[bytes, int], now: float, tag: str) -> None:
    """Adds to a program's use counters, where the file has them."""
    if has_table(connection, "tags"):
        connection.executemany(COUNT_TAG, [(key, tag, count, now) for key, count in hits.items()])
