"""Bundles: sealed files that carry entries from one store to others, and how many of them may run here."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plancache.entry import FORMAT, MALFORMED, QUALITIES, Entry, Row, decode_facts, split_preimage, unpack, usable
from plancache.environment import result_changing_variables
from plancache.errors import CorruptEntryError, DeviceError, LibraryError, SealedError, StoreError
from plancache.key import Constraints, PlanKey, make_key
from plancache.store.connection import message
from plancache.store.place import NAME_ANOTHER
from plancache.words import contrasts

if TYPE_CHECKING:
    from plancache.store.database import Database, Listed
    from plancache.store.levels import Levels
    from plancache.store.sealed import SealedFile
    from plancache.target import DeviceTarget, Targets

DOUBTFUL = "timed on a busy or throttled GPU"
"""Why a tuned entry is left out unless it is asked for: the race may have gone otherwise on a quiet one."""

_CALLED = {"model": "", "cudnn": "cuDNN", "driver": "driver", "frontend": "nvidia-cudnn-frontend", "device": "", "variables": ""}
"""The components of an environment; where several differ, the first tells people most."""

_BATCH = 64  # rows of one transaction: a few milliseconds in which other writers wait
_JOURNALS = ("-wal", "-journal", "-shm")


# ---- may they run here? ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usability:
    """How many of some entries may run on a device.

    `reasons`: why the others may not, with the number of each. `unknown`: why nobody can tell, and then `usable` is None.
    """

    entries: int
    device: str | None = None
    usable: int | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    unknown: str | None = None


class Judge:
    """Says of stored entries how many may run on the device of a cache. Raises `DeviceFileError` for one of another cuDNN."""

    def __init__(self, targets: Targets) -> None:
        self._target: DeviceTarget | None = None
        try:
            self._target = targets.current()
            self._unknown = self._target.unknown
        except DeviceError:
            self._unknown = "there is no GPU here; a device file stands for one (--device FILE)"
        except LibraryError as error:
            self._unknown = str(error)

    def __call__(self, rows: Iterable[Listed]) -> Usability:
        """Looks at keys and requirements; the plans themselves are not read."""
        if self._target is None or self._unknown:
            return Usability(sum(1 for _ in rows), unknown=self._unknown)
        _, *environment, _ = make_key(b"", self._target.place, result_changing_variables(), Constraints()).preimages
        reasons = Counter(_obstacle(row, environment, self._target.backend.here) for row in rows)
        device, count = self._target.device.model, sum(reasons.values())
        fit = reasons.pop(None, 0)
        return Usability(count, device, fit, {str(reason): number for reason, number in reasons.most_common()})


def _obstacle(row: Listed, environment: Sequence[bytes], here: Mapping[str, str | None]) -> str | None:
    """Why an entry may not run in an environment: no request has its key there, or it needs what is not there."""
    try:
        key = PlanKey(split_preimage(row.preimage))
        differences = contrasts(PlanKey((key.preimages[0], *environment, key.preimages[-1])), key)
        if differences:
            first = min(differences, key=lambda one: list(_CALLED).index(one.component))
            what = " ".join(filter(None, (_CALLED[first.component], first.part, first.stored)))
            return f"for {what} (here {first.here})"
        return usable(Entry(key=key, blob=b"", **decode_facts(row.facts)[0]), here)
    except MALFORMED:
        return "damaged"


# ---- out ------------------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """What a bundle got. `left_out`: why entries that were asked for are not in it, with the number of each."""

    path: Path
    entries: int
    size_bytes: int
    left_out: Mapping[str, int]
    usability: Usability


def export(
    levels: Levels, path: Path, keys: Container[bytes] | None, judge: Judge, *, doubtful: bool, replace: bool, own: Path
) -> Exported:
    """Writes a bundle of what is stored under these keys, or of everything; of several rows under a key the best.

    `own`: the cache's database, which no bundle replaces. What is known to be bad is left out, and what was timed on a GPU that was
    not quiet, unless `doubtful`. Until the bundle is whole, what was at the path is there. Raises `LookupError` where nothing
    is left, `SealedError` for a place that cannot be used.
    """
    from plancache.store.database import Database
    from plancache.store.sealed import publish

    real = Path(os.path.realpath(path))
    _refuse_place(path, real, own, replace=replace)
    left_out: dict[bytes, str] = {}
    flaw = partial(_flaw, bad=levels.known_bad(), denied=levels.denials(), doubtful=doubtful)
    try:
        with _workshop(real) as folder, closing(Database(folder / real.name, lock_timeout_s=0, wal=False)) as database:
            _store(database, _fit(levels, keys, flaw, left_out))
            usability = judge(database.listing())
            if not usability.entries:
                raise LookupError(f"there is nothing to export; {_left(left_out)}")
            database.close()
            publish(database.path, real)
    except SealedError:
        raise
    except (StoreError, OSError) as error:
        raise _unwritten(path, real, error) from error
    return Exported(path, usability.entries, real.stat().st_size, Counter(left_out.values()), usability)


def _fit(
    levels: Levels, keys: Container[bytes] | None, flaw: Callable[[Entry, Row], str], left_out: dict[bytes, str]
) -> Iterator[tuple[Row, Entry]]:
    """The rows that are good to be carried. Notes why others are not, by key; one that is good in another level does not count."""
    taken = set()
    for _, _, key, row in levels.all_rows(keys):
        reason = "damaged"
        with suppress(CorruptEntryError, *MALFORMED):
            if not isinstance(row, StoreError):
                entry = unpack(row)
                reason = flaw(entry, row)
                if not reason:
                    taken.add(key)
                    left_out.pop(key, None)
                    yield row, entry
        if reason and key not in taken:
            left_out[key] = reason


def _flaw(entry: Entry, row: Row, *, bad: Container[tuple[bytes, bytes]], denied: Container[bytes], doubtful: bool) -> str:
    """Why a row is not good to be carried, or nothing."""
    if (row.key, row.checksum) in bad:
        return "quarantined or struck"
    from plancache.building import denial

    if denied and denial(entry.key, entry.recipe) in denied:
        return "denied"
    if not doubtful and entry.conditions.get("quiet") is False:
        return DOUBTFUL
    return ""


def _left(left_out: Mapping[bytes, str]) -> str:
    told = ", ".join(f"{number} {reason}" for reason, number in Counter(left_out.values()).items())
    return f"left out: {told}" if told else "'plancache ls' lists what is stored, and 'plancache warm' plans graphs"


def _refuse_place(path: Path, real: Path, own: Path, *, replace: bool) -> None:
    from plancache.store.sealed import is_sealed

    if real.is_dir():
        raise SealedError(path, "it is a directory", f"name a file in it, such as {path / 'plans.sqlite3'}")
    if real.exists() and not real.is_file():
        raise SealedError(path, "it is no ordinary file", "name another place")
    if not real.parent.is_dir():
        raise SealedError(path, f"there is no directory {real.parent}", f"mkdir -p {real.parent}")
    if real == Path(os.path.realpath(own)):
        raise SealedError(path, "it is this cache's own database", "name another file ('plancache seal' makes that one read-only)")
    if any(os.path.lexists(f"{real}{suffix}") for suffix in _JOURNALS):
        raise SealedError(path, "a database with a journal lies there, and a program may be at it", "name another file")
    if real.exists() and not replace and not (is_sealed(real) and real.name != own.name):
        raise SealedError(path, "what lies there is no bundle", "name another file, or replace it all the same (--force)")


@contextmanager
def _workshop(real: Path) -> Iterator[Path]:
    """A private folder beside a bundle to make it in. It is locked: what a killed export left is told from one at work, and removed."""
    start = f".{real.name}."
    for stray in real.parent.glob(f"{glob.escape(start)}*.new"):
        with suppress(OSError), _held(stray):  # where folders cannot be locked, as on NFS, it stays
            shutil.rmtree(stray)
    while True:
        folder = Path(tempfile.mkdtemp(".new", start, real.parent))
        with ExitStack() as lock:
            try:
                lock.enter_context(_held(folder))
            except (FileNotFoundError, BlockingIOError):  # another export took it for one that was left
                continue
            except OSError:
                pass
            try:
                yield folder
                return
            finally:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks a folder; raises `OSError` where another process holds it, or it is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)  # noqa: PTH116  # raises where it was removed before it was locked
        yield
    finally:
        os.close(descriptor)


def _unwritten(path: Path, real: Path, error: Exception) -> SealedError:
    cause = getattr(error.__cause__, "orig", None) or error.__cause__ or error
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else message(cause)
    cure = f"make room in {real.parent}, or name another place that you may write to; nothing was left there"
    return SealedError(path, f"it cannot be written ({reason})", cure)


# ---- in -------------------------------------------------------------------------------------------------------------


class Imported(NamedTuple):
    """What became of a bundle's entries. `stored`: new here, or better than what was there; `refused`: known to be bad here;
    `removed`: by which the store was reduced to its limit afterwards, whoever brought them. All 0 where it was only looked at."""

    path: Path
    entries: int
    stored: int
    refused: int
    removed: int
    usability: Usability


def import_bundle(levels: Levels, path: Path, judge: Judge, *, max_bytes: int, dry_run: bool) -> Imported:
    """Merges a bundle into the local store: a better entry takes the place of a lesser, a good one that of a damaged.

    Every row is checked before the first is stored; a dry run ends there. Raises `SealedError` for a bundle that is not whole, and
    then nothing was changed; `StoreError` where there is no local store that can be written.
    """
    from plancache.store.retention import retain
    from plancache.store.sealed import SealedFile

    database, bad = levels._writable(), levels.known_bad()
    if database is None and not dry_run:
        raise StoreError(f"nothing can be stored here, so nothing is imported; {NAME_ANOTHER}")
    with closing(SealedFile(path)) as bundle:
        _refuse_later(bundle)
        keys = [listed.key for listed in bundle.listing()]
        usability = judge(bundle.listing())
        for _ in _checked(bundle, keys):
            pass
        if database is None or dry_run:
            return Imported(path, len(keys), 0, 0, 0, usability)
        stored = refused = 0
        rows = _checked(bundle, keys)
        while batch := list(islice(rows, _BATCH)):
            good = [(row, entry) for row, entry in batch if (row.key, row.checksum) not in bad]
            refused += len(batch) - len(good)
            stored += _store(database, good, partial(_unfit, database, bad))
    removed = retain(database, max_bytes) if max_bytes else None
    return Imported(path, len(keys), stored, refused, len(removed.entries) if removed else 0, usability)


def _checked(bundle: SealedFile, keys: Iterable[bytes]) -> Iterator[tuple[Row, Entry]]:
    """The rows of a bundle. Raises `SealedError` for the first that is not what was written."""
    for key in keys:
        row = bundle.get(key)
        try:
            if row is None:
                raise CorruptEntryError("an entry cannot be found under its own key")
            yield row, unpack(row)
        except CorruptEntryError as error:
            if row is not None and _is_later(row):
                raise _later(bundle, "its entries have a later format") from error
            raise SealedError(bundle.path, str(error), "copy it here again, or export it anew; nothing of it was imported") from error


def _refuse_later(bundle: SealedFile) -> None:
    from plancache.store.connection import SELECT_REVISION, readable

    with bundle._reading() as connection:
        try:
            found = connection.execute(SELECT_REVISION).fetchone()
        except sqlite3.OperationalError:  # made by other means: its rows say what they are
            found = None
        try:
            if found:
                readable(connection, str(found[0]))
        except StoreError as error:
            raise _later(bundle, f"revision {found[0]}") from error


def _is_later(row: Row) -> bool:
    try:
        return bool(json.loads(row.facts)["format"] > FORMAT)
    except MALFORMED:
        return False


def _later(bundle: SealedFile, what: str) -> SealedError:
    cure = "import it with that version, or export it anew with this one"
    return SealedError(bundle.path, f"a newer plancache made it ({what})", cure)


def _store(database: Database, rows: Iterable[tuple[Row, Entry]], unfit: Callable[[bytes], bytes | None] = lambda _: None) -> int:
    """Stores rows in one transaction by the rules of `Database.put`; returns how many were new, or better than what was there.

    `unfit`: the checksum of the row that is there under a key, where that is to give way whatever it is.
    """
    from plancache.store import schema

    statement, stored = schema.insert_entry(replace_equal=False), 0
    with database._writing() as connection:
        for row, entry in rows:
            derived = {"quality": QUALITIES.index(entry.quality), "build_s": entry.build_s, "created_at": entry.created_at}
            stored += connection.execute(statement, {**row._asdict(), **derived, "condemned": unfit(row.key)}).rowcount
    return stored


def _unfit(database: Database, bad: Container[tuple[bytes, bytes]], key: bytes) -> bytes | None:
    row = database.get(key)
    if row is None or (key, row.checksum) in bad:
        return row and row.checksum
    try:
        unpack(row)
    except CorruptEntryError:
        return row.checksum
    return None
