"""Rows in and out of the SQLite file of a cache directory.

Reading goes through `sqlite3` with the statements below, which a test holds equal to those that `schema` declares:
importing SQLAlchemy costs more than all look-ups of a start-up together. Writing goes through SQLAlchemy.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from plancache.entry import QUALITIES, Entry, Row, pack
from plancache.errors import StoreError
from plancache.settings import make_private
from plancache.store.connection import HEAD, Reader, connect, faults, has_table, identity, number, readable, refuse_sealed, revision_of
from plancache.store.gate import INSIDE
from plancache.store.tags import Tagged, count_tag, read_tagged, read_tags

SELECT_ENTRY = "SELECT entries.key, entries.preimage, entries.facts, entries.payload, entries.checksum FROM entries WHERE entries.key = ?"
SELECT_LISTING = (
    "SELECT entries.key, entries.preimage, entries.facts, length(entries.payload) AS size_bytes,"
    " coalesce(uses.hits, 0) AS hits, uses.last_used_at, entries.created_at"
    " FROM entries LEFT OUTER JOIN uses ON uses.key = entries.key"
)
COUNT_USE = (
    "INSERT INTO uses (key, hits, last_used_at) VALUES (?, ?, ?) ON CONFLICT (key)"
    " DO UPDATE SET hits = (uses.hits + excluded.hits), last_used_at = excluded.last_used_at"
)
_VERDICT = "SELECT verdicts.kind, verdicts.key, verdicts.checksum, verdicts.reason, verdicts.count, verdicts.created_at FROM verdicts"
SELECT_VERDICTS = f"{_VERDICT} ORDER BY verdicts.created_at, verdicts.kind, verdicts.key"
SELECT_VERDICTS_OF = f"{_VERDICT} WHERE verdicts.key = ?"

_JOURNALS = ("-wal", "-shm")
_VERDICT_TYPES = (str, bytes, bytes, str, int, float)  # SQLite takes any type in any column; others are not believed
_BUSY_TIMEOUT_S = 30.0
_MIGRATION = threading.Lock()  # Alembic's context is a module global: one upgrade at a time in a process
os.register_at_fork(after_in_child=_MIGRATION._at_fork_reinit)  # type: ignore[attr-defined]  # whoever holds it is not in the child


class Listed(NamedTuple):
    """A row without its payload."""

    key: bytes
    preimage: bytes
    facts: bytes
    size_bytes: int
    hits: int
    last_used_at: float | None


class Verdict(NamedTuple):
    """What is known beside the entries, on a key or on one stored row of it.

    `kind`: `quarantined` (the row of this checksum is not used), `unsupported` (cuDNN has no plan; `reason` is its
    answer) and `unsupported without a GPU` (for builds without one), `struck` (`count` processes ended while they
    loaded that row, or built that key), `denied` (shown wrong).
    """

    kind: str
    key: bytes
    checksum: bytes
    reason: str
    count: int  # type: ignore[assignment]  # hides the tuple's method, which nobody needs
    created_at: float


class Database:
    """One SQLite file. Connections belong to a thread and a process; `close` closes those of this process.

    `wal`: whether a new file takes a WAL, which network file systems cannot hold; `lock_folder`: where writers lock each
    other out, by default beside the file.
    """

    def __init__(self, path: Path, *, lock_timeout_s: float, wal: bool = True, lock_folder: Path | None = None) -> None:
        self.path = path
        self._lock_folder = lock_folder or path.parent
        self._lock_timeout_s = lock_timeout_s
        self._wal = wal
        self._local = threading.local()
        self._opened: WeakSet[Reader] = WeakSet()
        self._inherited: list[Reader] = []
        self._engine: Any = None
        self._guard = threading.Lock()

    # ---- reading

    def get(self, key: bytes) -> Row | None:
        """The row under a key, or None. Raises `StoreError`."""
        with faults(self.path), self._reading() as connection:
            row = connection.execute(SELECT_ENTRY, (key,)).fetchone() if connection else None
        if row is None and self._moved():  # another process put a new file in its place
            with faults(self.path), self._reading() as connection:
                row = connection.execute(SELECT_ENTRY, (key,)).fetchone() if connection else None
        return Row(*row) if row else None

    def listing(self) -> Iterator[Listed]:
        """All rows without their payloads, oldest first. Raises `StoreError`."""
        with faults(self.path), self._reading() as connection:
            return in_order(connection.execute(SELECT_LISTING).fetchall()) if connection else iter(())

    def verdicts(self, key: bytes | None = None) -> list[Verdict]:
        """What is known beside the entries, on one key or on all; nothing in a file from before there were verdicts."""
        with faults(self.path), self._reading() as connection:
            if connection is None or not has_table(connection, "verdicts"):
                return []
            rows = connection.execute(SELECT_VERDICTS) if key is None else connection.execute(SELECT_VERDICTS_OF, (key,))
            return [Verdict(*row) for row in rows if tuple(map(type, row)) == _VERDICT_TYPES]

    def tags(self) -> list[Tagged]:
        """Which programs asked for which keys. Raises `StoreError`."""
        with faults(self.path), self._reading() as connection:
            return read_tags(connection) if connection else []

    def tagged(self, tag: str) -> list[Row]:
        """The entries that a program asked for, in one query. Raises `StoreError`."""
        with faults(self.path), self._reading() as connection:
            return read_tagged(connection, tag) if connection else []

    def damage(self) -> list[str]:
        """What is wrong with the file's pages, line by line. Raises `StoreError` where it cannot even be looked at."""
        with faults(self.path), self._reading() as connection:
            found = connection.execute("PRAGMA quick_check").fetchall() if connection else []
        return [str(line) for (line,) in found if line != "ok"]

    def revision(self) -> str | None:
        """The schema revision of the file, or None where there is no file or no table yet."""
        with faults(self.path), INSIDE:
            if not self.path.exists():
                return None
            connection = self._connect()
            try:
                return revision_of(connection)
            finally:
                connection.close()

    # ---- writing

    def put(self, entry: Entry, *, replace_equal: bool = False, condemned: bytes | None = None, tag: str | None = None) -> bool:
        """Stores an entry in one transaction; False where one at least as good is there. Raises `StoreError`.

        `condemned`: checksum of a stored row that was found unfit, and is replaced whatever its quality. `tag`: who asked.
        """
        from plancache.store import schema

        row = pack(entry)
        values = {
            **row._asdict(),
            "quality": QUALITIES.index(entry.quality),
            "build_s": entry.build_s,
            "created_at": entry.created_at,
            "condemned": condemned,
        }
        with self._writing() as connection:
            if tag is not None:
                connection.execute(schema.count_tag(), {"key": row.key, "tag": tag, "hits": 0, "last_used_at": entry.created_at})
            return bool(connection.execute(schema.insert_entry(replace_equal=replace_equal), values).rowcount)

    def record(self, verdict: Verdict) -> None:
        """Stores a verdict; where there is one, its count grows. Raises `StoreError`."""
        from plancache.store import schema

        with self._writing() as connection:
            connection.execute(schema.record_verdict(), verdict._asdict())

    def lift(self, verdicts: Iterable[Verdict]) -> int:
        """Forgets verdicts; returns how many there were. Raises `StoreError`."""
        from sqlalchemy import tuple_

        from plancache.store import schema

        table = schema.verdicts
        which = [(verdict.kind, verdict.key, verdict.checksum) for verdict in verdicts]
        with self._writing() as connection:
            return int(connection.execute(table.delete().where(tuple_(table.c.kind, table.c.key, table.c.checksum).in_(which))).rowcount)

    def count_uses(self, hits: Mapping[bytes, int], now: float, tag: str | None = None) -> None:
        """Adds to use counters, those of `tag` too, all in one transaction. Raises `StoreError`."""
        with faults(self.path), self._reading() as connection:
            if connection is None:
                return
            connection.execute("PRAGMA busy_timeout = 200")  # counts are not worth waiting for
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(COUNT_USE, [(key, count, now) for key, count in hits.items()])
                if tag is not None:
                    count_tag(connection, hits, now, tag)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def upgrade(self) -> str:
        """Makes or upgrades the file's tables, under a lock that all processes share; returns its revision. Raises `StoreError`.

        A file of a later version stays as it is.
        """
        revision = self._revision_to_write()
        if revision is not None:
            return revision
        with faults(self.path), _MIGRATION, self._write_lock(), INSIDE:
            revision = self._revision_to_write()
            if revision is None:
                if self.revision() is None:
                    self._prepare()  # new files only
                _migrate(self._writer())
                revision = HEAD
        return revision

    def _revision_to_write(self) -> str | None:
        """The file's revision where rows can be written as it is, else None. Raises `StoreError` where they must not."""
        with faults(self.path), INSIDE:
            if not self.path.exists():
                return None
            connection = self._connect()
            try:
                revision = self._judged(connection)
                return revision if revision is not None and number(revision) >= number(HEAD) else None
            finally:
                connection.close()

    def _judged(self, connection: sqlite3.Connection) -> str | None:
        """The file's revision, None where it has no tables yet. Raises `StoreError` for a file that is not to be used."""
        refuse_sealed(connection, self.path)
        revision = revision_of(connection)
        if revision is not None:
            readable(connection, revision)
        return revision

    def _prepare(self) -> None:
        connection = self._connect("mode=rwc")
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before WAL and the first table, or space never returns
            connection.execute(f"PRAGMA journal_mode = {'WAL' if self._wal else 'DELETE'}")
        finally:
            connection.close()

    # ---- a damaged file

    def move_aside(self) -> tuple[Path, int] | None:
        """Puts a damaged file out of the way, so that a new one is begun; returns where it is and its bytes.

        One is kept: an older one goes. None where another process did it already. Raises `StoreError`.
        """
        aside = self._aside
        opened = getattr(getattr(self._local, "reader", None), "file", None)
        with faults(self.path), self._write_lock():
            found = identity(self.path)
            if found is None or opened not in (None, found):
                self._forget_reader()
                return None
            size = self.path.stat().st_size
            for suffix in (*_JOURNALS, ""):  # SQLite does not remove a WAL beside a file that has moved
                with suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + suffix).replace(aside.with_name(aside.name + suffix))
        self._forget_reader()
        return aside, size

    @property
    def _aside(self) -> Path:
        return self.path.with_name(f"{self.path.name}.damaged")

    def aside_bytes(self) -> int | None:
        """The size of the damaged file that was put out of the way, its journal included; None where there is none."""
        try:
            sizes = [file.stat().st_size for file in (self._aside, *map(self._beside_aside, _JOURNALS)) if file.exists()]
        except OSError:  # removed meanwhile
            return None
        return sum(sizes) if sizes else None

    def discard_aside(self) -> int:
        """Removes the damaged file that was put out of the way; returns the bytes freed. Raises `StoreError`."""
        with faults(self.path), self._write_lock():
            size = self.aside_bytes() or 0
            for file in (*map(self._beside_aside, _JOURNALS), self._aside):
                file.unlink(missing_ok=True)
        return size

    def _beside_aside(self, suffix: str) -> Path:
        return self._aside.with_name(self._aside.name + suffix)

    def _forget_reader(self) -> None:
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is not None:
            self._local.reader = None
            reader.close()

    def _moved(self) -> bool:
        """Whether this thread's connection is to a file that lies no longer at the path; it is dropped then."""
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is None or reader.file == identity(self.path):
            return False
        self._forget_reader()
        return True

    # ---- connections

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """This thread's connection, which nobody closes meanwhile; None while there is nothing to read."""
        with INSIDE:
            reader = self._reader()
            if reader is None:
                yield None
                return
            with reader.lock:
                yield reader.connection

    def _reader(self) -> Reader | None:
        local = self._local
        reader: Reader | None = getattr(local, "reader", None)
        if reader is not None:
            if reader.process == os.getpid():
                return reader
            self._inherited.append(reader)  # from before a fork: kept, since closing it here would harm the parent's
        if not self.path.exists():
            return None
        connection = self._connect()
        try:
            judged = self._judged(connection)
        except BaseException:
            connection.close()
            raise
        if judged is None:
            connection.close()
            return None
        reader = local.reader = Reader(connection, self.path)
        with self._guard:
            self._opened.add(reader)
        return reader

    def _connect(self, options: str = "mode=rw") -> sqlite3.Connection:
        # synchronous: with WAL a power cut can lose the last commits, not the file
        return connect(self.path, options, "synchronous = NORMAL", busy_timeout_s=min(_BUSY_TIMEOUT_S, self._lock_timeout_s))

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """An SQLAlchemy connection in an immediate transaction, under the lock that all writers share."""
        self.upgrade()
        with faults(self.path), self._write_lock(), INSIDE, self._writer().begin() as connection:
            refuse_sealed(connection.connection.driver_connection, self.path)  # since it was looked at
            yield connection

    def _writer(self) -> Any:
        if self._engine is None:
            from sqlalchemy import create_engine, event
            from sqlalchemy.pool import NullPool

            engine = create_engine("sqlite://", creator=lambda: self._connect("mode=rwc"), poolclass=NullPool)
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
            self._engine = engine
        return self._engine

    def _write_lock(self) -> Any:
        from filelock import FileLock

        make_private(self.path.parent)
        return FileLock(self._lock_folder / "write.lock", timeout=self._lock_timeout_s, poll_interval=0.01)

    def after_fork(self) -> None:
        """Makes locks anew that another thread may have held when this process was forked."""
        self._guard = threading.Lock()
        self._inherited += list(self._opened)
        self._opened = WeakSet()

    def close(self) -> None:
        """Closes the connections that this process opened."""
        with self._guard:
            readers, self._opened = list(self._opened), WeakSet()
        for reader in readers:
            reader.close()
        self._local = threading.local()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None


def in_order(rows: list[tuple[Any, ...]]) -> Iterator[Listed]:
    """The rows of a listing, oldest first, let go of one by one: thousands of them take tens of megabytes."""
    rows.sort(key=_age, reverse=True)
    while rows:
        yield Listed._make(rows.pop()[:-1])


def _age(row: tuple[Any, ...]) -> tuple[float, bytes]:
    key, created_at = row[0], row[-1]  # of any type, in a damaged row
    return created_at if isinstance(created_at, int | float) else 0.0, key if isinstance(key, bytes) else b""


def _migrate(engine: Any) -> None:
    from importlib.util import find_spec

    from alembic import command
    from alembic.config import Config

    spec = find_spec("plancache.migrations")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError("plancache.migrations is not installed; install plancache (pip install .) rather than its folder")
    config = Config()
    config.set_main_option("script_location", spec.submodule_search_locations[0].replace("%", "%%"))
    with engine.connect() as connection:
        config.attributes["connection"] = connection  # a connection, not an address: addresses hide passwords
        command.upgrade(config, "head")
