"""Connections to SQLite files that may be damaged, of another version, or somebody else's work."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote
from weakref import finalize

from plancache.entry import MAX_BLOB_BYTES
from plancache.errors import DamagedStoreError, SealedError, StoreError
from plancache.store.gate import INSIDE

HEAD = "0003_tags"
"""The schema revision that this version reads and writes."""

SELECT_REVISION = "SELECT version_num FROM alembic_version"
SELECT_MIN_READER = "SELECT max(min_reader) FROM compatibility"
_SELECT_STRANGE = "SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%' LIMIT 1"
_SELECT_TABLE = "SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1"
_SELECT_TABLE_NAMED = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"

_LARGEST_ROW_BYTES = MAX_BLOB_BYTES + (16 << 20)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What `sqlite3` raises: the second where SQLite's message quotes a damaged schema that is no text."""


def connect(path: Path, options: str, *pragmas: str, busy_timeout_s: float) -> sqlite3.Connection:
    """A connection in autocommit, for any thread; `options` of SQLite's URI, such as `mode=rw`. Nothing in the file is run."""
    address = f"file:{quote(str(path))}?{options}"
    connection = sqlite3.connect(address, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_ROW_BYTES)  # a lying row cannot ask for gigabytes
    connection.text_factory = _text
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", *pragmas):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _text(data: bytes) -> str:
    return data.decode(errors="replace")  # a text that is none is a wrong value of one row, not an error of the statement


def revision_of(connection: sqlite3.Connection) -> str | None:
    """The schema revision of a file; None where it has no tables yet. Raises `StoreError` for a file that is not plancache's."""
    connection.execute("BEGIN")  # all of one moment: another process may be making the tables
    try:
        return _revision_of(connection)
    finally:
        connection.execute("ROLLBACK")


def _revision_of(connection: sqlite3.Connection) -> str | None:
    strange = connection.execute(_SELECT_STRANGE).fetchone()
    if strange:
        raise StoreError(f"it has a view, trigger or virtual table, {strange[0]!r}, which plancache never makes; {_MOVE}")
    try:
        row = connection.execute(SELECT_REVISION).fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        row = None
    if row is None and connection.execute(_SELECT_TABLE).fetchone():
        raise StoreError(f"it is a database of another program; {_MOVE}")
    return str(row[0]) if row else None


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Whether there is a table: a file of the past lacks those of later revisions, until something is built."""
    return connection.execute(_SELECT_TABLE_NAMED, (name,)).fetchone() is not None


_MOVE = "move the file away, or name another directory (PLANCACHE_DIR)"


def readable(connection: sqlite3.Connection, revision: str) -> None:
    """Raises `StoreError` for a file of a later version that this one must not read.

    Migrations that only add keep `min_reader`, so that several installed versions share a file; a breaking one
    takes a new file name.
    """
    if number(revision) <= number(HEAD):
        return
    try:
        (needed,) = connection.execute(SELECT_MIN_READER).fetchone()
    except sqlite3.OperationalError:
        needed = None
    if not isinstance(needed, int) or needed > number(HEAD):
        raise StoreError(
            f"a newer plancache made it (revision {revision}, this one reads up to {HEAD}); "
            "install that version, or name another directory (PLANCACHE_DIR)"
        )


def number(revision: str) -> int:
    """The place of a revision in their line: 2 for `0002_verdicts`."""
    head = revision.partition("_")[0]
    return int(head) if head.isdigit() else 1 << 30  # unknown: later than all


SEALED_ID = int.from_bytes(b"PlCs")
"""The `application_id` of a sealed file, at offset 68 of its header (SQLite file format, 1.3)."""


def refuse_sealed(connection: sqlite3.Connection, path: Path) -> None:
    """Raises `SealedError` for a sealed file: it is never written again, and read without locks."""
    if connection.execute("PRAGMA application_id").fetchone() == (SEALED_ID,):
        raise SealedError(path, "it is sealed", "what is built stays in memory; to write there again: plancache seal --undo")


class Reader:
    """A thread's connection, closed when its thread ends, by the process that opened it only."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.process = os.getpid()
        self.file = identity(path)
        self.lock = threading.Lock()  # closing a connection that is in use crashes
        self.close = finalize(self, _close, connection, self.process, self.lock)
        self.close.atexit = False


def _close(connection: sqlite3.Connection, process: int, lock: threading.Lock) -> None:
    if process == os.getpid():
        with INSIDE, lock:
            connection.close()


def identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at a path, or None."""
    try:
        status = os.stat(path)  # noqa: PTH116  # on the way to a hit
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """SQLite's, the lock's and the system's errors as `StoreError` that names the file; damage as `DamagedStoreError`."""
    try:
        yield
    except StoreError as error:
        if type(error) is not StoreError or str(path) in str(error):
            raise
        raise StoreError(f"{path}: {error}") from error
    except (*ERRORS, OSError) as error:
        raise _told(path, error, error) from error
    except Exception as error:
        # SQLAlchemy wraps sqlite3's errors and Alembic has its own; neither may be imported just to be named here
        if not type(error).__module__.startswith(("sqlalchemy.", "alembic.")):
            raise
        raise _told(path, error, getattr(error, "orig", None)) from error


def _told(path: Path, error: Exception, cause: BaseException | None) -> StoreError:
    return (DamagedStoreError if is_damage(cause) else StoreError)(f"{path}: {message(cause or error)}")


def message(error: BaseException) -> str:
    """What an error says; in words where SQLite's are no text."""
    return error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)


def is_damage(error: BaseException | None) -> bool:
    """Whether an error of SQLite says that the file itself is broken."""
    return isinstance(error, UnicodeDecodeError) or (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF in _DAMAGE
