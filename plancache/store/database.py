"""Rows in and out of the SQLite file of a cache directory.

Reading goes through `sqlite3` with the statements below, which a test holds equal to those that `schema` declares:
importing SQLAlchemy costs more than all look-ups of a start-up together. Writing goes through SQLAlchemy.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakSet, finalize

from plancache.entry import QUALITIES, Entry, Row, pack
from plancache.errors import StoreError
from plancache.settings import make_private

HEAD = "0001_entries"
"""The schema revision that this version reads and writes."""

SELECT_REVISION = "SELECT version_num FROM alembic_version"
SELECT_ENTRY = "SELECT entries.key, entries.preimage, entries.facts, entries.payload, entries.checksum FROM entries WHERE entries.key = ?"
SELECT_LISTING = (
    "SELECT entries.key, entries.preimage, entries.facts, length(entries.payload) AS size_bytes,"
    " coalesce(uses.hits, 0) AS hits, uses.last_used_at"
    " FROM entries LEFT OUTER JOIN uses ON uses.key = entries.key ORDER BY entries.created_at, entries.key"
)
COUNT_USE = (
    "INSERT INTO uses (key, hits, last_used_at) VALUES (?, ?, ?) ON CONFLICT (key)"
    " DO UPDATE SET hits = (uses.hits + excluded.hits), last_used_at = excluded.last_used_at"
)

_BUSY_TIMEOUT_S = 30.0
_MIGRATION = threading.Lock()  # Alembic's context is a module global: one upgrade at a time in a process


class Listed(NamedTuple):
    """A row without its payload."""

    key: bytes
    preimage: bytes
    facts: bytes
    size_bytes: int
    hits: int
    last_used_at: float | None


class Database:
    """One SQLite file. Connections belong to a thread and a process; `close` closes those of this process."""

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        self.path = path
        self._lock_timeout_s = lock_timeout_s
        self._local = threading.local()
        self._opened: WeakSet[_Reader] = WeakSet()
        self._inherited: list[_Reader] = []
        self._engine: Any = None
        self._guard = threading.Lock()

    # ---- reading

    def get(self, key: bytes) -> Row | None:
        """The row under a key, or None. Raises `StoreError`."""
        with _faults(self.path), self._reading() as connection:
            row = connection.execute(SELECT_ENTRY, (key,)).fetchone() if connection else None
        return Row(*row) if row else None

    def listing(self) -> Iterator[Listed]:
        """All rows without their payloads, oldest first. Raises `StoreError`."""
        with _faults(self.path), self._reading() as connection:
            rows = connection.execute(SELECT_LISTING).fetchall() if connection else []
        return map(Listed._make, rows)

    def revision(self) -> str | None:
        """The schema revision of the file, or None where there is no file or no table yet."""
        with _faults(self.path):
            if not self.path.exists():
                return None
            connection = self._connect()
            try:
                return _revision(connection)
            finally:
                connection.close()

    # ---- writing

    def put(self, entry: Entry, *, replace_equal: bool = False, condemned: bytes | None = None) -> bool:
        """Stores an entry in one transaction; False where one at least as good is there. Raises `StoreError`.

        `condemned`: checksum of a stored row that was found unfit, and is replaced whatever its quality.
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
        self.upgrade()
        with _faults(self.path), self._write_lock(), self._writer().begin() as connection:
            return bool(connection.execute(schema.insert_entry(replace_equal=replace_equal), values).rowcount)

    def count_uses(self, hits: Mapping[bytes, int], now: float) -> None:
        """Adds to use counters, all in one transaction. Raises `StoreError`."""
        with _faults(self.path), self._reading() as connection:
            if connection is None:
                return
            connection.execute("PRAGMA busy_timeout = 200")  # counts are not worth waiting for
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(COUNT_USE, [(key, count, now) for key, count in hits.items()])
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def upgrade(self) -> None:
        """Makes or upgrades the file's tables, under a lock that all processes share. Raises `StoreError`."""
        if self.revision() == HEAD:
            return
        with _faults(self.path), _MIGRATION, self._write_lock():
            revision = self.revision()
            if revision is None:
                self._prepare()  # new files only: one of a later version is not to be touched
            if revision != HEAD:
                _migrate(self._writer())

    def _prepare(self) -> None:
        connection = self._connect("rwc")
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before WAL and the first table, or space never returns
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()

    # ---- connections

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """This thread's connection, which nobody closes meanwhile; None while there is nothing to read."""
        reader = self._reader()
        if reader is None:
            yield None
            return
        with reader.lock:
            yield reader.connection

    def _reader(self) -> _Reader | None:
        local = self._local
        reader: _Reader | None = getattr(local, "reader", None)
        if reader is not None:
            if reader.process == os.getpid():
                return reader
            self._inherited.append(reader)  # from before a fork: kept, since closing it here would harm the parent's
        if not self.path.exists():
            return None
        connection = self._connect()
        if _revision(connection) != HEAD:
            connection.close()
            return None
        local.reader = _Reader(connection)
        with self._guard:
            self._opened.add(local.reader)
        return local.reader  # type: ignore[no-any-return]  # threading.local is untyped

    def _connect(self, mode: str = "rw") -> sqlite3.Connection:
        address = f"file:{quote(str(self.path))}?mode={mode}"
        connection = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: a power cut can lose the last commits, not the file
        return connection

    def _writer(self) -> Any:
        if self._engine is None:
            from sqlalchemy import create_engine, event
            from sqlalchemy.pool import NullPool

            engine = create_engine("sqlite://", creator=lambda: self._connect("rwc"), poolclass=NullPool)
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
            self._engine = engine
        return self._engine

    def _write_lock(self) -> Any:
        from filelock import FileLock

        make_private(self.path.parent)
        return FileLock(self.path.with_name("write.lock"), timeout=self._lock_timeout_s, poll_interval=0.01)

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


class _Reader:
    """A thread's connection, closed when its thread ends, by the process that opened it only."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.process = os.getpid()
        self.lock = threading.Lock()  # closing a connection that is in use crashes
        self.close = finalize(self, _close, connection, self.process, self.lock)
        self.close.atexit = False


def _close(connection: sqlite3.Connection, process: int, lock: threading.Lock) -> None:
    if process == os.getpid():
        with lock:
            connection.close()


def _revision(connection: sqlite3.Connection) -> str | None:
    try:
        row = connection.execute(SELECT_REVISION).fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        return None
    return str(row[0]) if row else None


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


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """SQLite's, the lock's and the system's errors as `StoreError` that names the file."""
    try:
        yield
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {error}") from error
    except Exception as error:
        # SQLAlchemy wraps sqlite3's errors and Alembic has its own; neither may be imported just to be named here
        if not type(error).__module__.startswith(("sqlalchemy.", "alembic.")):
            raise
        raise StoreError(f"{path}: {getattr(error, 'orig', None) or error}") from error
