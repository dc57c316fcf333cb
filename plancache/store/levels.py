"""The stores in the order of look-up: the local database, then sealed files. Opened when they are first asked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plancache.entry import Entry, Row
from plancache.errors import CorruptEntryError, DamagedStoreError, SealedError, StoreError
from plancache.marks import Casualty, Marks, Phase
from plancache.settings import Settings, make_private
from plancache.store.database import Database, Listed, Verdict
from plancache.store.place import NAME_ANOTHER, Mount, distrust, examine, local_lock_folder, locks_work
from plancache.store.tags import Tagged

if TYPE_CHECKING:
    from plancache.store.sealed import SealedFile

STRIKES = 2
"""So many processes that ended in a risky step, and it is not tried again."""

_WRONG = "wrong:"  # how the reason begins of a row that computes the wrong thing

_REST_S = 60.0
"""After a fault of the local store it is left alone for so long: each look may have waited for a lock that nobody lets go of."""

_log = logging.getLogger("plancache.store")


class Found(NamedTuple):
    """A row, and the level that it was found in: `local` or `sealed`."""

    level: str
    row: Row


class Levels:
    """All stores of a cache. A store that cannot be used is one fault, and looked up no more."""

    def __init__(self, settings: Settings, on_fault: Callable[[str, StoreError], None], warn: Callable[[str, str], None]) -> None:
        self._settings = settings
        self._on_fault = on_fault
        self._warn = warn
        self._local: Database | None = None
        self._sealed: list[SealedFile] = []
        self._banned: dict[tuple[bytes, bytes], str | None] = {}  # why rows are not loaded, until that was said; by key and checksum
        self._corrupt: set[Row] = set()  # whole rows, since a good copy elsewhere has the same key and checksum
        self._denied: dict[bytes, str] = {}  # what could not be recorded
        self._suspects: set[bytes] = set()  # what was denied when the store was opened, or since then by this process
        self._condemned: dict[bytes, bytes] = {}  # local rows that a new build replaces, by key
        self._failed = False  # the local store could not be opened: it is asked no more
        self._rests_until = 0.0
        self._mount: Mount | None = None
        self._marks: Marks | None = None
        self._opened = False
        self._guard = threading.RLock()

    # ---- opening

    @property
    def local(self) -> Database | None:
        """The writable store; None where there is none."""
        self._open()
        return self._local

    def _open(self) -> None:
        if self._opened:
            return
        with self._guard:
            if self._opened:
                return
            if self._settings.mode != "off":
                self._open_directory()
                for bundle in self._settings.bundles:
                    self._open_sealed(bundle)
            self._opened = True

    def _open_directory(self) -> None:
        directory, file = self._settings.directory, self._settings.database
        standing = examine(directory)
        if standing.problem:
            self._on_fault("place", StoreError(standing.problem))
        elif standing.unwritable:
            if file.exists():
                self._open_sealed(file)
            elif self._settings.mode == "readwrite":
                self._on_fault("place", StoreError(standing.unwritable))
        else:
            self._mount = standing.mount
            self._open_database(file, wal=standing.mount is None)
            if standing.mount:
                self._warn(
                    "network",
                    f"{directory} is on a network file system ({standing.mount.kind} at {standing.mount.point}), where SQLite is slow and "
                    f"locks are not to be trusted: one builder a machine, no WAL; {NAME_ANOTHER}, on a local disk",
                )

    def _open_database(self, file: Path, *, wal: bool) -> None:
        self._failed = False
        if not self._trusts(file):
            return
        locks = None if wal else local_lock_folder(file.parent)  # one that network file systems can be trusted with
        database = Database(file, lock_timeout_s=self._settings.lock_timeout_s, wal=wal, lock_folder=locks)
        try:
            if self._settings.mode == "readwrite":
                self._marks = Marks(self._settings.directory / "marks")
                self._count_casualties(database, self._marks)
            for verdict in database.verdicts():
                if verdict.kind == "quarantined" and verdict.reason.startswith(("load:", _WRONG)):  # other bytes have the checksum to tell
                    self._banned[verdict.key, verdict.checksum] = None
                elif verdict.kind == "struck" and verdict.checksum and verdict.count >= STRIKES:
                    self._banned[verdict.key, verdict.checksum] = f"{verdict.count} processes ended while they loaded it ({verdict.reason})"
                elif verdict.kind == "denied":
                    self._suspects.add(verdict.key)
        except SealedError:
            database.close()
            self._open_sealed(file)
            return
        except StoreError as error:
            if not self._mended(database, error):
                self._failed = True
                self._on_fault("read", error)
        if self._trusts(file):  # once more, now that it is open
            self._local = database
        else:
            database.close()

    def _count_casualties(self, database: Database, marks: Marks) -> None:
        try:
            marks.casualties(lambda casualty: _strike(database, casualty))
        except (DamagedStoreError, SealedError):
            raise
        except StoreError as error:  # they stay for the next look, and a hit needs no write
            _log.info("marks of dead processes were not counted: %s", error)

    def _trusts(self, file: Path) -> bool:
        problem = distrust(file) if file.exists() else None
        if problem:
            self._on_fault("place", StoreError(problem))
        return not problem

    def _open_sealed(self, file: Path) -> None:
        from plancache.store.sealed import SealedFile

        try:
            self._sealed.append(SealedFile(file))
        except StoreError as error:
            self._on_fault("sealed", error)
            return
        if file == self._settings.database and self._settings.mode == "readwrite":
            _log.warning("%s is sealed: what is built stays in memory (PLANCACHE_MODE=readonly says that this is wanted)", file)

    def _mended(self, database: Database, error: StoreError) -> bool:
        """Whether a damaged file was put aside, so that a new one is begun."""
        if not isinstance(error, DamagedStoreError) or self._settings.mode != "readwrite":
            return False
        try:
            aside = database.move_aside()
        except StoreError as hindrance:
            _log.info("the damaged file stays: %s", hindrance)
            return False
        if aside is not None:
            self._on_fault(
                "damaged", StoreError(f"{error}; {aside[1]:,} bytes of stored plans were moved to {aside[0]}, a new file is begun")
            )
        return True

    def lock_folder(self) -> Path | None:
        """Where locks between processes lie: beside a local database; in a folder of this machine where locks do not work there."""
        if self._writable() is None:
            return None
        directory = self._settings.directory
        try:
            make_private(directory)
        except OSError as error:
            self._on_fault("place", StoreError(f"cannot make {directory}: {error}"))
            return None
        if self._mount is None and locks_work(directory):
            return directory / "locks"
        return local_lock_folder(directory)

    # ---- rows

    def rows(self, key: bytes) -> Iterator[Found]:
        """The rows under a key that are not known to be bad, in the order of levels."""
        self._open()
        for level, store in self._stores():
            if level == "local" and (self._failed or time.monotonic() < self._rests_until):
                continue
            try:
                row = store.get(key)
            except StoreError as error:
                if level == "sealed" or not self._mended(store, error):  # type: ignore[arg-type]  # the local one
                    if level == "local":
                        self._rests_until = time.monotonic() + _REST_S
                    self._on_fault("read", error)
                continue
            if row is None:
                continue
            found = Found(level, row)
            if (key, row.checksum) in self._banned:
                self._skip(found)
            elif not self._corrupt or row not in self._corrupt:
                yield found

    def copies(self, key: bytes) -> list[Found]:
        """The rows under a key in the order of levels, known to be bad or not. Raises `StoreError`."""
        self._open()
        return [Found(level, row) for level, store in self._stores() if (row := store.get(key)) is not None]

    def known_bad(self) -> frozenset[tuple[bytes, bytes]]:
        """The rows that are not loaded, whichever level they lie in, by key and checksum: quarantined, or processes ended in them."""
        self._open()
        return frozenset(self._banned)

    def _skip(self, found: Found) -> None:
        reason = self._banned.get((found.row.key, found.row.checksum))
        self.ban(found)
        if reason:
            self._warn("struck", f"{found.level} plan {found.row.key.hex()[:16]} is skipped: {reason}; it is built anew")

    def _stores(self) -> Iterator[tuple[str, Database | SealedFile]]:
        if self._local is not None:
            yield "local", self._local
        for sealed in self._sealed:
            yield "sealed", sealed

    def listing(self) -> Iterator[Listed]:
        """All rows without their payloads, level by level. Raises `StoreError`."""
        for _, _, rows in self.listings():
            yield from rows

    def listings(self) -> Iterator[tuple[str, Path, Iterator[Listed]]]:
        """The levels in the order of look-up, each with its file and rows."""
        self._open()
        for level, store in self._stores():
            yield level, store.path, self._keyed(store)

    def _keyed(self, store: Database | SealedFile) -> Iterator[Listed]:
        for row in store.listing():
            if isinstance(row.key, bytes):
                yield row
            else:  # SQLite takes any type in any column
                self._on_fault("corrupt", CorruptEntryError(f"{store.path}: a row whose key is {row.key!r} is left out"))

    def all_rows(self, wanted: Container[bytes] | None = None) -> Iterator[tuple[str, Path, bytes, Row | StoreError]]:
        """Every row (of these keys) of every level with its file and key, known to be bad or not; an error where one cannot be read."""
        self._open()
        for level, store in self._stores():
            try:
                keys = [listed.key for listed in store.listing() if wanted is None or listed.key in wanted]
            except StoreError as error:
                yield level, store.path, b"", error
                continue
            for key in keys:
                try:
                    row = store.get(key)
                except StoreError as error:
                    yield level, store.path, key, error
                    continue
                if row is not None:
                    yield level, store.path, key, row

    def tags(self) -> list[Tagged]:
        """Which programs asked for which keys, level by level. Raises `StoreError`."""
        self._open()
        return [tagged for _, store in self._stores() for tagged in store.tags()]

    def tagged(self, tag: str) -> Iterator[Found]:
        """The local entries that a program asked for, but those known to be bad. Nothing where they cannot be read."""
        self._open()
        try:
            rows = self._local.tagged(tag) if self._local is not None else []
        except StoreError as error:  # whoever needs one asks for it, and says what is wrong
            _log.debug("entries of %s were not read: %s", tag, error)
            rows = []
        for row in rows:
            if (row.key, row.checksum) not in self._banned and row not in self._corrupt:
                yield Found("local", row)

    def put(self, entry: Entry, *, replace_equal: bool) -> bool:
        """Stores an entry; False where there is no place for it. Raises `StoreError`."""
        database = self._writable()
        if database is None:
            return False
        digest = entry.key.digest
        try:
            database.put(entry, replace_equal=replace_equal, condemned=self._condemned.get(digest), tag=self._settings.tag)
        except DamagedStoreError as error:
            if not self._mended(database, error):
                raise
            database.put(entry, tag=self._settings.tag)
        self._condemned.pop(digest, None)
        self._retain(database, digest)
        return True

    def _retain(self, database: Database, newest: bytes) -> None:
        """Keeps the file to its limit after a put, which is done whatever happens here."""
        from plancache.store.retention import retain

        if not self._settings.max_bytes:
            return
        try:
            removed = retain(database, self._settings.max_bytes, keep=newest)
        except StoreError as error:
            _log.warning("what is stored could not be kept to its limit: %s", error)
            return
        if removed is not None:
            _log.info("%d plans removed, %d bytes, to keep to %d", len(removed.entries), removed.freed_bytes, self._settings.max_bytes)

    def _writable(self) -> Database | None:
        usable = self._settings.mode == "readwrite" and not self._failed and time.monotonic() >= self._rests_until
        return self.local if usable else None

    def count_uses(self, hits: Mapping[bytes, int]) -> None:
        """Adds to the use counters of the local store, and to those of this program's tag. Raises `StoreError`."""
        database = self._writable() if self._opened else None
        if database is not None:
            database.count_uses(hits, time.time(), self._settings.tag)

    # ---- what is known beside the rows

    def mark(self, key: bytes, phase: Phase, checksum: bytes = b"") -> AbstractContextManager[None]:
        """Marks a risky step as under way, where there is a place for that."""
        return nullcontext() if self._marks is None else self._marks.under_way(key, phase, checksum)

    def ban(self, found: Found) -> None:
        """Looks at a row, or a copy of it, no more in this process; a new build replaces it."""
        key, checksum = found.row.key, found.row.checksum
        self._banned[key, checksum] = None
        self._condemn(found)

    def ban_corrupt(self, found: Found) -> None:
        """Looks at a row that is not what its checksum says no more in this process; a new build replaces it."""
        self._corrupt.add(found.row)
        self._condemn(found)

    def _condemn(self, found: Found) -> None:
        if found.level == "local" and isinstance(found.row.checksum, bytes):  # one of another type gives way by itself
            self._condemned[found.row.key] = found.row.checksum

    def verdicts(self, key: bytes | None = None) -> list[Verdict]:
        """What the local store knows of a key, or of all, now; nothing where it cannot be read."""
        database = self.local
        try:
            asked = database is not None and not self._failed and time.monotonic() >= self._rests_until
            return database.verdicts(key) if database is not None and asked else []
        except StoreError as error:
            _log.debug("no verdicts: %s", error)
            return []

    def denials(self) -> dict[bytes, str]:
        """What was shown wrong, by the digest that `building.denial` makes, with the reason."""
        return self._denied | {verdict.key: verdict.reason for verdict in self.verdicts() if verdict.kind == "denied"}

    @property
    def has_suspects(self) -> bool:
        """Whether anything was denied, as far as is known without asking the store."""
        return bool(self._suspects)

    def denied(self, digest: bytes) -> str | None:
        """Why one is denied; the store is asked only where it was when the store was opened, and may have been lifted since."""
        return self.denials().get(digest) if digest in self._suspects else None

    def struck(self) -> dict[bytes, Verdict]:
        """What is not tried any more, since processes ended in it: by the key, or a candidate's digest, that was marked."""
        found = [verdict for verdict in self.verdicts() if verdict.kind == "struck" and not verdict.checksum]
        return {verdict.key: verdict for verdict in found if verdict.count >= STRIKES}

    def forget(self, key: bytes, reason: str) -> None:
        """Takes a key's entry out of the local store, since it was shown wrong; one in a sealed file is not used any more."""
        from plancache.store.retention import Removal, Stored, remove

        database = self._writable()
        row = None if database is None else database.get(key)
        if database is not None and row is not None:
            remove(database, Removal((Stored(key, len(row.payload), 0.0, 0.0, 0, None, row.checksum),), 0))
        for found in self.rows(key):
            self.ban(found)
            self.record("quarantined", key, f"{_WRONG} {reason}", found.row.checksum)

    def count_casualties(self) -> None:
        """Counts what processes ended in since this store was opened; that is done at each opening."""
        if self._local is not None and self._marks is not None:
            try:
                self._count_casualties(self._local, self._marks)
            except StoreError as error:
                _log.debug("marks of dead processes were not counted: %s", error)

    def record(self, kind: str, key: bytes, reason: str, checksum: bytes = b"", *, count: int = 1) -> None:
        """Notes a verdict where there is a place for it."""
        if kind == "denied":
            self._suspects.add(key)
        database = self._writable()
        if database is not None and isinstance(checksum, bytes):
            try:
                database.record(Verdict(kind, key, checksum, reason, count, time.time()))
                return
            except StoreError as error:
                _log.debug("not recorded, %s %s: %s", kind, key.hex()[:16], error)
        if kind == "denied":  # this process knows it all the same
            self._denied[key] = reason

    def lift(self, verdicts: list[Verdict]) -> None:
        """Forgets verdicts that have proven wrong."""
        database = self._writable()
        if database is not None and verdicts:
            try:
                database.lift(verdicts)
            except StoreError as error:
                _log.debug("not lifted: %s", error)

    # ---- life

    def after_fork(self) -> None:
        """Makes locks anew that another thread may have held when this process was forked."""
        self._guard = threading.RLock()
        if self._local is not None:
            self._local.after_fork()

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()
        for _, store in self._stores():
            store.close()


def _strike(database: Database, casualty: Casualty) -> None:
    reason = f"{casualty.phase}: process {casualty.pid} {casualty.ended}"
    database.record(Verdict("struck", casualty.key, casualty.checksum, reason, 1, time.time()))
