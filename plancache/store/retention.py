"""Which stored entries go, and giving their space back: scan, choose, remove.

A `Removal` is frozen and knows what it frees, so that a dry run costs no more than the scan. Removing works in short
transactions, between which the lock that writers share is free: readers and other writers go on meanwhile.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plancache.store.connection import faults, has_table, refuse_sealed
from plancache.store.gate import INSIDE

if TYPE_CHECKING:
    from plancache.store.database import Database

SELECT_SIZES = (
    "SELECT entries.key, length(entries.preimage) + length(entries.facts) + length(entries.payload) AS size_bytes,"
    " entries.build_s, entries.created_at, coalesce(uses.hits, 0) AS hits, uses.last_used_at, entries.checksum"
    " FROM entries LEFT OUTER JOIN uses ON uses.key = entries.key"  # as they lie in the file: sorting takes twice as long again
)
SELECT_STORED = SELECT_SIZES.replace(" FROM", ", entries.preimage FROM", 1)
DELETE_ENTRY = "DELETE FROM entries WHERE entries.key = ? AND entries.checksum IS ?"
DELETE_USES = "DELETE FROM uses WHERE uses.key = ?"
DELETE_TAGS = "DELETE FROM tags WHERE tags.key = ?"
DELETE_VERDICTS = "DELETE FROM verdicts WHERE verdicts.key = ? AND verdicts.kind IN ('quarantined', 'struck')"
"""What is known about the row; that cuDNN has no plan, or a wrong one, stays known."""

_SELECT_PAGES = "SELECT page_count, freelist_count, page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"

_DOWN_TO = 0.9
_VACUUM_PAGES = 512  # 25 to 50 ms, in which no other writer gets its turn
_PAUSE = 0.5  # of the time that the batch took
_LEAST_PAUSE_S = 0.015  # writers look for the lock every 10 ms
_CHECKPOINT_WAIT_MS = 200  # for readers; writers wait as long


@dataclass(frozen=True)
class Stored:
    """A scanned row without its payload. `size_bytes`: of preimage, facts and payload, as they lie in the store."""

    key: bytes
    size_bytes: int
    build_s: float
    created_at: float
    hits: int
    last_used_at: float | None
    checksum: bytes = field(repr=False)
    preimage: bytes = field(default=b"", repr=False)

    @property
    def saved_s_per_byte(self) -> float:
        """What keeping it is worth: build seconds saved per byte, one use more than were counted."""
        return (self.hits + 1) * self.build_s / max(1, self.size_bytes)


@dataclass(frozen=True)
class Removal:
    """What is to go, and the bytes of what stays."""

    chosen: tuple[Stored, ...]
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        return _bytes(self.chosen)


@dataclass(frozen=True)
class Removed:
    """What went. `skipped`: in use or in flight. `changed`: gone or replaced since the scan. `returned_bytes`: by which the
    file shrank; free pages that were in it before count too."""

    entries: tuple[Stored, ...]
    skipped: tuple[Stored, ...] = ()
    changed: tuple[Stored, ...] = ()
    returned_bytes: int = 0

    @classmethod
    def foretold(cls, removal: Removal) -> Removed:
        """What a removal would bring if nothing were in use."""
        return cls(removal.chosen)

    @property
    def freed_bytes(self) -> int:
        return _bytes(self.entries)


def _bytes(stored: tuple[Stored, ...]) -> int:
    return sum(one.size_bytes for one in stored)


# ---- scan and choose ------------------------------------------------------------------------------------------------


def scan(database: Database, *, preimages: bool = True) -> tuple[Stored, ...]:
    """All rows without their payloads; 100,000 take 2 s and, with their preimages, 0.3 GB. Raises `StoreError`."""
    with faults(database.path), database._reading() as connection:
        if connection is None:
            return ()
        return tuple(_stored(*row) for row in connection.execute(SELECT_STORED if preimages else SELECT_SIZES))


def _stored(
    key: bytes, size_bytes: Any, build_s: Any, created_at: Any, hits: Any, used_at: Any, checksum: bytes, preimage: Any = b""
) -> Stored:
    """A row; where a damaged one holds what is no number, it is worth nothing, so that it goes and others can."""
    size_bytes, build_s, created_at, hits = (
        value if isinstance(value, int | float) else 0 for value in (size_bytes, build_s, created_at, hits)
    )
    used_at = used_at if isinstance(used_at, int | float) else None
    return Stored(key, size_bytes, build_s, created_at, hits, used_at, checksum, preimage if isinstance(preimage, bytes) else b"")


def choose(
    stored: tuple[Stored, ...],
    *,
    max_bytes: int | None = None,
    older_than_s: float | None = None,
    unused_since_s: float | None = None,
    matching: Callable[[Stored], bool] | None = None,
    everything: bool = False,
    now: float,
) -> Removal:
    """What any of the filters removes; and of the rest what is over `max_bytes`, the least build seconds saved per byte first,
    of equals the older first.

    A time in the future, as a clock that was set back leaves it, counts as now.
    """

    def goes(one: Stored) -> bool:
        used_at = max(one.created_at, one.last_used_at or one.created_at)
        return (
            everything
            or (older_than_s is not None and now - one.created_at > max(0.0, older_than_s))
            or (unused_since_s is not None and now - used_at > max(0.0, unused_since_s))
            or (matching is not None and matching(one))
        )

    chosen: list[Stored] = []
    kept: list[Stored] = []
    for one in stored:
        (chosen if goes(one) else kept).append(one)
    kept_bytes = sum(one.size_bytes for one in kept)
    if max_bytes is not None and kept_bytes > max_bytes:
        for one in sorted(kept, key=lambda one: (one.saved_s_per_byte, min(one.created_at, now))):
            if kept_bytes <= max_bytes:
                break
            chosen.append(one)
            kept_bytes -= one.size_bytes
    return Removal(tuple(chosen), kept_bytes)


# ---- remove ---------------------------------------------------------------------------------------------------------


def never(_: bytes) -> bool:
    return False


def remove(database: Database, removal: Removal, *, skip: Callable[[bytes], bool] = never, batch: int = 64) -> Removed:
    """Deletes what was chosen and gives its space back to the file system, batch by batch. Raises `StoreError`.

    Rows that another process replaced since the scan stay, and those for which `skip` is true: asked just before each batch
    of `batch` rows. What was done when it is interrupted is done; what is left of the space is given back by the next removal.
    """
    with faults(database.path), database._reading() as there:
        if there is None:
            return Removed((), changed=removal.chosen)
    with faults(database.path):
        turns = _Turns(database)
        removed, skipped, changed = list[Stored](), list[Stored](), list[Stored]()
        returned_bytes = _give_back(turns)  # what an interrupted removal left
        ordered = sorted(removal.chosen, key=lambda one: -one.created_at)  # from the end of the file, whose pages move
        for start in range(0, len(ordered), batch):
            todo: list[Stored] = []
            for one in ordered[start : start + batch]:
                (skipped if skip(one.key) else todo).append(one)
            if todo:
                gone = _delete(turns, todo)
                removed += (one for one in todo if one in gone)
                changed += (one for one in todo if one not in gone)
                # now and not at the end: SQLite seeks each last page in its list of free ones, which is quick while that is
                # short (15,000 rows of 27 kB: 4 s of processor time against 18 s, and 18 grows with the square)
                returned_bytes += _give_back(turns)
        with turns.next() as connection:
            connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_WAIT_MS}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # a reader that stays makes it partial
    return Removed(tuple(removed), tuple(skipped), tuple(changed), returned_bytes)


class _Turns:
    """This removal's turns among the writers of all processes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = database._write_lock()
        self._pause_until = 0.0

    @contextmanager
    def next(self) -> Iterator[sqlite3.Connection]:
        """A connection under the writers' lock, after a pause in which readers have the processor and writers the lock."""
        time.sleep(max(0.0, self._pause_until - time.monotonic()))
        with self._lock, INSIDE:
            started = time.monotonic()
            # opened each time: another file may have taken the place of the one of the last turn, or a seal be waiting for it
            with closing(self._database._connect()) as connection:
                refuse_sealed(connection, self._database.path)
                connection.execute("PRAGMA secure_delete = OFF")  # some builds of SQLite write zeros over all that goes
                yield connection
            ended = time.monotonic()
        self._pause_until = ended + max(_LEAST_PAUSE_S, _PAUSE * (ended - started))


def _delete(turns: _Turns, todo: list[Stored]) -> set[Stored]:
    """Deletes rows and what is known about them; returns those that were still there, unchanged."""
    with turns.next() as connection, _transaction(connection):
        gone = {one for one in todo if connection.execute(DELETE_ENTRY, (one.key, one.checksum)).rowcount}
        keys = [(one.key,) for one in gone]
        connection.executemany(DELETE_USES, keys)
        for table, statement in (("verdicts", DELETE_VERDICTS), ("tags", DELETE_TAGS)):
            if has_table(connection, table):
                connection.executemany(statement, keys)
    return gone


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _give_back(turns: _Turns) -> int:
    """Gives all free pages back to the file system. Returns bytes."""
    returned_bytes, free = 0, 1
    while free:
        with turns.next() as connection:
            before, _, page_bytes = _pages(connection)
            # not execute(), nor its fetchall(): the statement's rows have no columns, and each call frees one page
            connection.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            after, free, _ = _pages(connection)
        returned_bytes += max(0, before - after) * page_bytes
        if after >= before:  # none was free, or the file cannot shrink and they will be used again
            break
    return returned_bytes


def _pages(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Pages of the file, those of them that are free, and bytes of a page."""
    count, free, size_bytes = connection.execute(_SELECT_PAGES).fetchone()
    return count, free, size_bytes


# ---- automatic ------------------------------------------------------------------------------------------------------


def retain(database: Database, max_bytes: int, *, keep: bytes = b"") -> Removed | None:
    """Where what is stored takes more than `max_bytes` of the file, removes down to 90 percent of it; else None, in 20 us.

    `keep`: a key that stays whatever it is worth, such as the one just stored. Raises `StoreError`.
    """
    with faults(database.path), database._reading() as connection:
        if connection is None:
            return None
        count, free, page_bytes = _pages(connection)
    used_bytes = (count - free) * page_bytes
    if used_bytes <= max_bytes:
        return None
    stored = scan(database, preimages=False)
    # pages, indexes and other tables take their share: rows are reduced in the proportion that the file is
    rows_bytes = int(_bytes(stored) * _DOWN_TO * max_bytes / used_bytes)
    others = tuple(one for one in stored if one.key != keep)
    kept_bytes = _bytes(stored) - _bytes(others)
    return remove(database, choose(others, max_bytes=max(0, rows_bytes - kept_bytes), now=time.time()))
