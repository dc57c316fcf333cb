"""Sealed files: read-only databases that images, read-only mounts and bundles carry, and how a database becomes one.

A sealed file has a rollback journal's form and no journal, says in its header that it is sealed, and is never written
again: another one takes its place by rename. So it can be opened immutable, without locks and without a file beside it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from plancache.entry import Row
from plancache.errors import SealedError
from plancache.store.connection import ERRORS, SEALED_ID, Reader, connect, faults, is_damage, message
from plancache.store.database import SELECT_ENTRY, SELECT_LISTING, Database, Listed, in_order
from plancache.store.gate import INSIDE
from plancache.store.tags import Tagged, read_tags

_IMMUTABLE = "mode=ro&immutable=1"
_BESIDE = ("-wal", "-journal", "-shm")
_ENTRIES = {"key", "preimage", "facts", "payload", "checksum", "created_at"}
_USES = {"key", "hits", "last_used_at"}
_TAGS = {"key", "tag", "hits", "last_used_at"}
_ALONE_S = 1.0  # a process that opens the file for a moment is waited for; one that keeps it open is not

_STOP = "stop the programs that use it ('fuser -v {}' lists them), and seal it then"
_AGAIN = "copy it here again, or seal or export it anew"


def is_sealed(path: Path) -> bool:
    """Whether a file is sealed: its header says so, and no journal lies beside it. False where there is no file."""
    with faults(path):
        real = Path(os.path.realpath(path))
        if _beside(real):  # in use: not even opened, since closing it would drop the locks of this process's connections
            return False
        try:
            return _form(real).sealed
        except (FileNotFoundError, NotADirectoryError):
            return False


# ---- reading


class SealedFile:
    """One sealed file, for any thread. Raises `SealedError`, which names the cure, for what is not one or not to be trusted.

    A file that takes its place by rename is seen by those that open it from then on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inherited: list[Reader] = []
        self._reader: Reader | None = self._open()

    def get(self, key: bytes) -> Row | None:
        """The row under a key, or None. Raises `StoreError`."""
        with self._reading() as connection:
            row = connection.execute(SELECT_ENTRY, (key,)).fetchone()
        return Row(*row) if row else None

    def listing(self) -> Iterator[Listed]:
        """All rows without their payloads, oldest first; without uses where the file has no counts. Raises `StoreError`."""
        with self._reading() as connection:
            if not _is_table(connection, "uses", _USES):
                _shadow_uses(connection)
            return in_order(connection.execute(SELECT_LISTING).fetchall())

    def tags(self) -> list[Tagged]:
        """Which programs asked for which keys; none where the file does not say. Raises `StoreError`."""
        with self._reading() as connection:
            return read_tags(connection) if _is_table(connection, "tags", _TAGS, ("key", "tag")) else []

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with INSIDE:
            reader = self._current()
        try:
            with INSIDE, reader.lock:  # nobody closes it meanwhile
                yield reader.connection
        except ERRORS as error:
            raise _unreadable(self.path, error) from error

    def close(self) -> None:
        """Closes the connection, if this process opened it. A later look-up opens it again."""
        reader = self._own()
        self._reader = None
        if reader is not None:
            reader.close()

    def _own(self) -> Reader | None:
        reader = self._reader
        if reader is None or reader.process == os.getpid():
            return reader
        self._inherited.append(reader)  # from before a fork: neither used nor closed here
        self._reader = None
        return None

    def _current(self) -> Reader:
        reader = self._own()
        if reader is None:
            self._reader = reader = self._open()
        return reader

    def _open(self) -> Reader:
        with faults(self.path):
            real = Path(os.path.realpath(self.path))  # SQLite's journals lie beside what a link names
            _refuse_foreign(self.path, real)
            _refuse_unsealed(self.path, real)
            connection = connect(real, _IMMUTABLE, busy_timeout_s=0)
            try:
                _refuse_content(self.path, connection)
            except BaseException:
                connection.close()
                raise
            return Reader(connection, real)


class _Form(NamedTuple):
    """What a file's header says (SQLite file format, 1.3), and how long the file is."""

    database: bool
    sealed: bool
    stated_bytes: int
    size_bytes: int


def _form(path: Path) -> _Form:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe does not make it wait
    try:
        header, size = os.read(descriptor, 100), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    database = len(header) == 100 and header.startswith(b"SQLite format 3\0")
    sealed = database and header[18:20] == b"\1\1" and header[68:72] == SEALED_ID.to_bytes(4)  # 1: a rollback journal
    page_bytes = int.from_bytes(header[16:18])
    return _Form(database, sealed, (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(header[28:32]), size)


def _beside(path: Path) -> str | None:
    """The name of a journal, or of an index of one, beside a file."""
    return next((name for suffix in _BESIDE if os.path.lexists(name := f"{path}{suffix}")), None)


def _refuse_foreign(path: Path, real: Path) -> None:
    from plancache.store.place import distrust

    folder = real.parent
    problem = distrust(real, sealed=True) or (distrust(folder, sealed=True) if _is_dubious(folder) else None)
    if problem and not real.exists():
        raise SealedError(path, "there is no such file", "name one that 'plancache seal' made, or none")
    if problem:
        reason, _, cure = problem.partition("; ")
        raise SealedError(path, reason, cure)


def _is_dubious(folder: Path) -> bool:
    """A short look at what `distrust` looks at. In root's sticky folders, such as /tmp, nobody can move another's file."""
    status = os.stat(folder)  # noqa: PTH116  # on the way to a hit
    if status.st_uid == 0 and status.st_mode & stat.S_ISVTX:
        return False
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _refuse_unsealed(path: Path, real: Path) -> None:
    cure = f"seal it where it can be written: plancache seal --cache-dir {real.parent}"
    beside = _beside(real)
    if beside:
        raise SealedError(path, f"{beside} lies beside it: it is not sealed, or a program writes there", f"stop that program, then {cure}")
    try:
        form = _form(real)
    except OSError as error:
        raise SealedError(path, f"it cannot be read ({error.strerror})", f"let its owner chmod a+r {real}") from error
    if not form.database:
        raise SealedError(path, "it is no SQLite database", _AGAIN)
    if not form.sealed:
        raise SealedError(path, "it is not sealed", cure)
    if form.size_bytes < form.stated_bytes:
        raise SealedError(path, f"it is truncated: {form.size_bytes} bytes of {form.stated_bytes}", _AGAIN)


def _refuse_content(path: Path, connection: sqlite3.Connection) -> None:
    try:
        if connection.execute("PRAGMA application_id").fetchone() != (SEALED_ID,):  # what lies there now is another file
            raise SealedError(path, "it was replaced while it was opened", "try again")
        if not _is_table(connection, "entries", _ENTRIES):
            raise SealedError(path, "it has no table of entries that this version reads", "seal or export it with this version")
    except ERRORS as error:
        raise _unreadable(path, error) from error


def _is_table(connection: sqlite3.Connection, name: str, columns: set[str], key: tuple[str, ...] = ("key",)) -> bool:
    """Whether the file has an ordinary table with these stored columns and an index for its primary key.

    Views and virtual tables have no such index. That is asked of SQLite too, since the rows of sqlite_master may lie.
    """
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ? AND rootpage > 0", (name,)).fetchone():
        return False
    found = connection.execute(f"PRAGMA main.table_xinfo({name})").fetchall()
    stored = {column for _, column, _, _, _, _, hidden in found if not hidden}
    primary = tuple(column for _, column, _, _, _, place, _ in found if place)
    indexes = connection.execute(f"PRAGMA main.index_list({name})").fetchall()
    return columns <= stored and primary == key and any(origin == "pk" for _, _, _, origin, _ in indexes)


def _shadow_uses(connection: sqlite3.Connection) -> None:
    """An empty table in the place of the file's counts: temporary tables come first when a statement names one."""
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS uses (key BLOB PRIMARY KEY, hits INTEGER, last_used_at REAL)")


def _unreadable(path: Path, error: Exception) -> SealedError:
    return SealedError(path, f"it cannot be read ({message(error)})", _AGAIN)


# ---- sealing and unsealing


def seal(path: Path, *, lock_timeout_s: float) -> int:
    """Seals a database in place and returns the number of its entries; one that is sealed stays as it is.

    No other connection may be open. A crash leaves the old file or the new one. Raises `StoreError`.
    """
    real = _existing(path)
    with faults(path):
        if _sealed_now(path, real):  # perhaps in a place where there can be no lock
            _tidy(path, real)
            return _count(path, real)
        with _locked(path, real, lock_timeout_s):
            if _sealed_now(path, real):
                return _count(path, real)
            with _alone(path, real, lock_timeout_s) as connection, _copy(path, real, connection) as made:
                _finish(made, SEALED_ID, "DELETE", 0o444)
                count = _count(path, made)
                _take_place(path, real, made, connection)
                return count


def unseal(path: Path, *, lock_timeout_s: float) -> None:
    """Makes a sealed file a database that takes writes again; one that is not sealed stays as it is. Raises `StoreError`."""
    from plancache.store.place import network_mount

    real = _existing(path)
    with faults(path):
        if not _sealed_now(path, real):
            return
        with _locked(path, real, lock_timeout_s):
            if not _sealed_now(path, real):
                return
            journal_mode = "DELETE" if network_mount(real.parent) else "WAL"
            with closing(connect(real, _IMMUTABLE, busy_timeout_s=0)) as connection, _copy(path, real, connection) as made:
                _finish(made, 0, journal_mode, 0o600)
                made.replace(real)
            with suppress(OSError):  # as below
                _sync(real.parent)


def publish(made: Path, real: Path) -> None:
    """Seals a database that nobody has open, and puts it where it is to be, in the place of what lies there."""
    _finish(made, SEALED_ID, "DELETE", 0o444)
    made.replace(real)
    with suppress(OSError):  # as below
        _sync(real.parent)


def _existing(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_file() or not real.stat().st_size:
        raise SealedError(path, "there is no database", "programs that plan through plancache make it, and so does 'plancache warm'")
    return real


def _sealed_now(path: Path, real: Path) -> bool:
    """Whether a file is sealed. Raises for one that says so and has a journal, which would be read into it."""
    if is_sealed(real):
        return True
    beside = _beside(real)
    if beside and _claims(real):
        reason = f"it is sealed, but {beside} lies beside it: of another file, or of a program that writes there all the same"
        raise SealedError(path, reason, f"stop that program, and move {beside} away")
    return False


def _claims(real: Path) -> bool:
    """What its header says, read by SQLite: its closing spares the locks of this process's other connections."""
    with closing(connect(real, _IMMUTABLE, busy_timeout_s=0)) as connection:
        return bool(connection.execute("PRAGMA application_id").fetchone() == (SEALED_ID,))


def _count(path: Path, real: Path) -> int:
    with closing(connect(real, _IMMUTABLE, busy_timeout_s=0)) as connection:
        _refuse_content(path, connection)
        return int(connection.execute("SELECT count(*) FROM entries").fetchone()[0])


@contextmanager
def _locked(path: Path, real: Path, timeout_s: float) -> Iterator[None]:
    """The lock that all writers of this database share."""
    lock = Database(real, lock_timeout_s=timeout_s)._write_lock()
    try:
        lock.acquire()
    except TimeoutError as error:
        raise SealedError(path, f"another program has been writing there for {timeout_s:g} s", "stop it, or try again later") from error
    except OSError as error:
        cure = "copy it to where it can be written, and do it there"
        raise SealedError(path, f"{real.parent} cannot be written ({error.strerror})", cure) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _alone(path: Path, real: Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """A connection that keeps all others out until it is closed. Raises where one is open anywhere, idle or not."""
    with closing(connect(real, "mode=rw", busy_timeout_s=min(timeout_s, _ALONE_S))) as connection:
        connection.execute("PRAGMA main.locking_mode = EXCLUSIVE")
        try:
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")  # the lock stays
        except ERRORS as error:
            raise _failed(path, real, error) from error
        yield connection


@contextmanager
def _copy(path: Path, real: Path, connection: sqlite3.Connection) -> Iterator[Path]:
    """A compact copy beside the file, under a name that is always the same, so that no crash leaves more than one."""
    made = _copy_of(real)
    _remove(made)
    try:
        try:
            connection.execute("VACUUM INTO ?", (str(made),))
        except ERRORS as error:
            raise _failed(path, real, error) from error
        yield made
    finally:
        with suppress(OSError):  # the next one removes what is left
            _remove(made)


def _failed(path: Path, real: Path, error: Exception) -> SealedError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_BUSY:
        return SealedError(path, "it is open elsewhere", _STOP.format(real))
    cures = {
        sqlite3.SQLITE_FULL: f"make room for a second copy in {real.parent}",
        sqlite3.SQLITE_READONLY: f"do it as its owner, where it can be written (ls -l {real})",
    }
    cure = cures.get(code, f"plancache doctor --cache-dir {real.parent} may know more")
    if is_damage(error):
        cure = f"move it away, and plans are built anew: mv {real} /tmp/"
    return SealedError(path, f"it cannot be copied ({message(error)})", cure)


def _copy_of(real: Path) -> Path:
    return real.with_name(f"{real.name}.new")


def _tidy(path: Path, real: Path) -> None:
    """Removes the copy of one that was killed, unless somebody is at it."""
    if os.path.lexists(_copy_of(real)):
        with suppress(OSError), _locked(path, real, 0):
            _remove(_copy_of(real))


def _finish(made: Path, application_id: int, journal_mode: str, mode: int) -> None:
    with closing(connect(made, "mode=rw", busy_timeout_s=0)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # it is synced below
        connection.execute("PRAGMA journal_mode = MEMORY")
        if connection.execute("PRAGMA auto_vacuum").fetchone() != (2,):  # a copy is as its source: this one came from elsewhere
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("VACUUM")
        connection.execute(f"PRAGMA application_id = {application_id}")
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
    made.chmod(mode)
    _sync(made)


def _take_place(path: Path, real: Path, made: Path, connection: sqlite3.Connection) -> None:
    """Puts the copy where the database is. Until the rename the database takes its journal back on any failure.

    Whoever opened it meanwhile waits for its lock, then reads the old file, and SQLite lets nobody write a file that moved.
    """
    (before,) = connection.execute("PRAGMA main.journal_mode").fetchone()
    try:
        if connection.execute("PRAGMA main.journal_mode = DELETE").fetchone() != ("delete",):  # takes the WAL into the file
            raise SealedError(path, "its journal cannot be closed", _STOP.format(real))
        for suffix in _BESIDE:  # what a process that was killed left, and what this connection keeps while it is alone
            Path(f"{real}{suffix}").unlink(missing_ok=True)
        made.replace(real)
    except BaseException:
        if made.exists():
            with suppress(*ERRORS):  # a rollback journal does as well, only slower
                connection.execute(f"PRAGMA main.journal_mode = {before}")
        raise
    with suppress(OSError):  # not all file systems can sync a folder, and what was asked for is done
        _sync(real.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    for suffix in ("", *_BESIDE):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
