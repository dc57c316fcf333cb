"""What is stored: listed, looked at, checked, taken out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plancache.entry import Entry, Row, split_preimage, unpack, usable
from plancache.environment import Device, Libraries
from plancache.errors import CorruptEntryError, DeviceError, StoreError
from plancache.events import Event, Reporter
from plancache.key import COMPONENTS, Place, PlanKey
from plancache.memory import LivePlans
from plancache.settings import Settings
from plancache.singleflight import SingleFlight
from plancache.store.levels import Levels
from plancache.target import DeviceTarget, Targets

if TYPE_CHECKING:
    from plancache.carrying import Exported, Imported
    from plancache.listing import Listed
    from plancache.store import database
    from plancache.store.database import Database, Verdict
    from plancache.store.retention import Removal, Removed, Stored
    from plancache.store.tags import Tagged


class Shelf(NamedTuple):
    """One file of stored entries, oldest first. `level`: `local` or `sealed`."""

    level: str
    path: Path
    entries: tuple[Listed, ...]


class Finding(NamedTuple):
    """What is wrong with a stored entry, or with a whole file (`key` is empty then)."""

    level: str
    key: bytes
    problem: str
    path: Path


class StoredPlans:
    """The plans that are stored, and what is known beside them."""

    def __init__(self, settings: Settings, device: Device | None, on_event: Callable[[Event], object] | None) -> None:
        self.settings = settings
        self._report = Reporter(strict=settings.strict, on_event=on_event)
        self._levels = Levels(settings, self._report.fault, self._report.warn)
        self._targets = Targets(device, self._report.warn)
        self._plans = LivePlans(settings.max_live_bytes)
        self._flight: SingleFlight | None = None
        self._guard = threading.RLock()

    def entries(self) -> list[Listed]:
        """What is stored, oldest first, without the plans themselves. Needs neither a GPU nor cuDNN.

        A row that cannot be read is left out, with a warning.
        """
        return [listed for shelf in self.shelves() for listed in shelf.entries]

    def shelves(self) -> list[Shelf]:
        """What is stored, as `entries` has it, file by file in the order of look-up."""
        return [Shelf(level, path, tuple(entries)) for level, path, entries in self.listings()]

    def listings(self) -> Iterator[tuple[str, Path, Iterator[Listed]]]:
        """The same with the entries one by one, for those who keep none of thousands."""
        names: dict[bytes, tuple[str, ...]] = {}
        for tagged in sorted(self.tags(), key=lambda tagged: tagged.tag):
            names[tagged.key] = tuple(dict.fromkeys((*names.get(tagged.key, ()), tagged.tag)))
        for level, path, rows in self._levels.listings():
            yield level, path, self._listed(rows, names)

    def close(self) -> None:
        """Closes the files that were opened to look into them."""
        self._levels.close()

    def tags(self) -> list[Tagged]:
        """Which programs asked for which keys, by the names in their settings (`tag`), file by file."""
        return self._levels.tags()

    def _listed(self, rows: Iterable[database.Listed], names: Mapping[bytes, tuple[str, ...]]) -> Iterator[Listed]:
        from plancache.listing import Listed

        for row in rows:
            try:
                yield Listed.of(*row[1:], digest=row.key, tags=names.get(row.key, ()))
            except CorruptEntryError as error:
                self._report.fault("corrupt", error)

    def entry(self, digest: str | PlanKey) -> Entry:
        """The stored entry of a key, or whose key starts with these hex digits, checked. Raises `LookupError` for none or several."""
        digest = digest.hex if isinstance(digest, PlanKey) else digest
        if not digest:
            raise LookupError("give at least one hex digit of a key; 'plancache ls' lists them")
        keys = list(dict.fromkeys(row.key for row in self._levels.listing() if row.key.hex().startswith(digest.lower())))
        row = next((found.row for found in self._levels.rows(keys[0])), None) if len(keys) == 1 else None
        if row is None:
            count = len(keys) or "no"
            raise LookupError(f"{count} stored entries have a key that starts with {digest!r}; 'plancache ls' lists them")
        return unpack(row)

    def verify(self, *, load: bool = False, on_entry: Callable[[], object] = lambda: None) -> list[Finding]:
        """What is wrong with what is stored, sealed files included: checksums, sizes, keys, pages. Nothing is changed.

        `load`: those that may run on this device are loaded as well. `on_entry`: called after each, to show how far it is.
        """
        target = self._targets.current() if load else None
        findings = _verify(self._levels, None if target is None else partial(_try, target), on_entry)
        return list(dict.fromkeys(findings))  # of a file that is no database each way to read it says so

    def remove(self, *digests: str | PlanKey, force: bool = False, dry_run: bool = False) -> Removed:
        """Takes entries out of the local store, by key or the beginning of its hex digits. Raises `LookupError` for none.

        Those in use here or in flight anywhere are skipped unless forced.
        """
        return self.take_out(self.to_remove(*digests), force=force, dry_run=dry_run)

    def to_remove(self, *digests: str | PlanKey) -> Removal:
        """What `remove` would take out, to be shown before `take_out`. Raises `LookupError`."""
        from plancache.store.retention import Removal

        stored = self._scan()
        chosen = []
        for digest in digests:
            text = digest.hex if isinstance(digest, PlanKey) else digest.lower()
            found = [one for one in stored if text and _is_key(one.key) and one.key.hex().startswith(text)]
            if len(found) != 1:
                raise LookupError(f"{len(found) or 'no'} stored entries have a key that starts with {text!r}; 'plancache ls' lists them")
            chosen += found
        kept = sum(one.size_bytes for one in stored) - sum(one.size_bytes for one in set(chosen))
        return Removal(tuple(dict.fromkeys(chosen)), kept)

    def prune(
        self,
        *,
        max_bytes: int | None = None,
        older_than_s: float | None = None,
        unused_since_s: float | None = None,
        stale: bool = False,
        everything: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ) -> Removed:
        """Takes out of the local store what any of these names: what is over `max_bytes` (the least build seconds saved per
        byte first), built or last used longer ago, not usable with the libraries and device here, everything.

        Entries in use here or in flight anywhere are skipped unless forced. Space is given back to the file system.
        """
        removal = self.to_prune(
            max_bytes=max_bytes, older_than_s=older_than_s, unused_since_s=unused_since_s, stale=stale, everything=everything
        )
        return self.take_out(removal, force=force, dry_run=dry_run)

    def to_prune(
        self,
        *,
        max_bytes: int | None = None,
        older_than_s: float | None = None,
        unused_since_s: float | None = None,
        stale: bool = False,
        everything: bool = False,
    ) -> Removal:
        """What `prune` would take out, to be shown before `take_out`."""
        from plancache.store.retention import choose

        return choose(
            self._scan(),
            max_bytes=max_bytes,
            older_than_s=older_than_s,
            unused_since_s=unused_since_s,
            matching=self._stale() if stale else None,
            everything=everything,
            now=time.time(),
        )

    @property
    def has_local_store(self) -> bool:
        """Whether there is a local store, which entries can be taken out of; else a warning has said why not."""
        return self._levels.local is not None

    def _scan(self) -> tuple[Stored, ...]:
        from plancache.store.retention import scan

        return scan(self._levels.local) if self._levels.local is not None else ()

    def _stale(self) -> Callable[[Stored], bool]:
        try:
            place = self._targets.current().place
        except DeviceError:
            place = None
        return partial(_is_stale, Place.of_libraries(Libraries.loaded()), place)

    def take_out(self, removal: Removal, *, force: bool = False, dry_run: bool = False) -> Removed:
        """Removes what was chosen before; rows that were replaced since then stay. Skips as `remove` does. Raises `StoreError`."""
        from plancache.store.retention import Removed, never, remove

        if dry_run or not removal.chosen or self._levels.local is None:
            return Removed.foretold(removal)
        flight = self._single_flight()
        skip = never if force else lambda key: _is_key(key) and (self._plans.holds(key) or flight.busy(key))
        removed = remove(self._levels.local, removal, skip=skip)
        for one in removed.entries:
            self._plans.drop(one.key)
        return removed

    def export_bundle(
        self,
        path: str | os.PathLike[str],
        entries: Iterable[PlanKey | Listed | Entry] | None = None,
        *,
        doubtful: bool = False,
        replace: bool = False,
    ) -> Exported:
        """Writes a bundle, a sealed file to be carried: of all that is stored, or of some of what `entries` lists.

        What is known to be bad stays out; `doubtful`: what was timed on a busy or throttled GPU comes along. An older bundle
        is replaced, other files where `replace` says so. Raises `LookupError` where nothing is left, `SealedError`.
        """
        from plancache.carrying import Judge, export

        keys = None if entries is None else {(one if isinstance(one, PlanKey) else one.key).digest for one in entries}
        judge, own = Judge(self._targets), self.settings.database
        return export(self._levels, Path(path), keys, judge, doubtful=doubtful, replace=replace, own=own)

    def import_bundle(self, path: str | os.PathLike[str], *, dry_run: bool = False) -> Imported:
        """Merges a bundle into the local store: better entries take the place of lesser ones. Raises `SealedError` for one
        that is not whole, of which nothing is taken, and `StoreError` where nothing can be stored."""
        from plancache.carrying import Judge, import_bundle

        judge, max_bytes = Judge(self._targets), self.settings.max_bytes
        return import_bundle(self._levels, Path(path), judge, max_bytes=max_bytes, dry_run=dry_run)

    def verdicts(self) -> list[Verdict]:
        """What is known beside the entries: quarantined rows, unsupported graphs, strikes, denials; oldest first."""
        return self._levels.local.verdicts() if self._levels.local is not None else []

    def lift(self, verdicts: Iterable[Verdict]) -> int:
        """Forgets verdicts, and returns how many there were: what they are about is tried again. Raises `StoreError`."""
        chosen = list(verdicts)
        return self._levels.local.lift(chosen) if chosen and self._levels.local is not None else 0

    def damaged_bytes(self) -> int | None:
        """The size of the damaged file that was put aside, or None."""
        return self._levels.local.aside_bytes() if self._levels.local is not None else None

    def discard_damaged(self) -> int:
        """Removes the damaged file that was put aside; returns the bytes freed. Raises `StoreError`."""
        return self._levels.local.discard_aside() if self._levels.local is not None else 0

    def upgrade(self) -> tuple[str, str] | None:
        """Brings the database to this version's schema; returns the revisions before and after, or None where there is none yet.

        A file of a later version that this one may read stays as it is. Raises `StoreError`.
        """
        local = self._levels.local
        before = None if local is None else local.revision()
        return None if local is None or before is None else (before, local.upgrade())

    def _single_flight(self) -> SingleFlight:
        with self._guard:
            if self._flight is None:
                folder, timeout_s = self._levels.lock_folder(), self.settings.lock_timeout_s
                self._flight = SingleFlight(folder, timeout_s=timeout_s, on_fault=lambda error: self._report.fault("lock", error))
            return self._flight


def _verify(levels: Levels, load: Callable[[Entry], str | None] | None, on_entry: Callable[[], object]) -> Iterator[Finding]:
    if levels.local is not None:
        problems = _damage(levels.local)
        yield from (Finding("local", b"", problem, levels.local.path) for problem in problems)
    for level, store, key, row in levels.all_rows():
        problem = str(row) if isinstance(row, StoreError) else _problem(row, load)
        if problem:
            yield Finding(level, key, problem, store)
        if key:
            on_entry()


def _is_key(key: object) -> bool:
    """Whether it can be one: SQLite takes any type in any column."""
    return isinstance(key, bytes) and key != b""


def _damage(database: Database) -> list[str]:
    try:
        return database.damage()
    except StoreError as error:
        return [str(error)]


def _problem(row: Row, load: Callable[[Entry], str | None] | None) -> str | None:
    try:
        entry = unpack(row)
    except CorruptEntryError as error:
        return str(error)
    return load(entry) if load else None


def _try(target: DeviceTarget, entry: Entry) -> str | None:
    """What cuDNN says against an entry that is meant for this device; None for those that are not."""
    if target.device.is_file or Place(*entry.key.preimages[1:6]) != target.place or usable(entry, target.backend.here):
        return None
    try:
        target.backend.load(entry)
    except Exception as error:  # whatever cuDNN raises is the answer
        return f"it does not load ({type(error).__name__}: {error})"
    return None


def _is_stale(libraries: Mapping[str, bytes], place: Place | None, stored: Stored) -> bool:
    """Whether no request here can be answered by an entry: it is for another cuDNN or frontend than are loaded here, or for
    this model of device (where there is one) with another driver or other limits."""
    try:
        theirs = dict(zip(COMPONENTS, split_preimage(stored.preimage), strict=True))
    except ValueError:
        return True  # nothing can find it
    if any(theirs[name] != value for name, value in libraries.items()):
        return True
    if place is None or theirs["model"] != place.model:
        return False
    return (theirs["driver"], theirs["device"]) != (place.driver, place.device)
