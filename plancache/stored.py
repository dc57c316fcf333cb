"""What is stored: listed, looked at, checked, taken out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from plancache.entry import Entry, split_preimage, unpack, usable
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
    from plancache.listing import Listed
    from plancache.store.database import Verdict
    from plancache.store.retention import Removal, Removed, Stored


class Finding(NamedTuple):
    """What is wrong with a stored entry, or with a whole file (`key` is empty then)."""

    level: str
    key: bytes
    problem: str


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
        from plancache.listing import Listed

        listed = []
        for row in self._levels.listing():
            try:
                listed.append(Listed.of(*row[1:]))
            except CorruptEntryError as error:
                self._report.fault("corrupt", error)
        return listed

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

    def verify(self, *, load: bool = False) -> list[Finding]:
        """What is wrong with what is stored, sealed files included: checksums, sizes, keys, pages. Nothing is changed.

        `load`: those that may run on this device are loaded as well.
        """
        target = self._targets.current() if load else None
        return list(_verify(self._levels, None if target is None else partial(_try, target)))

    def remove(self, *digests: str | PlanKey, force: bool = False, dry_run: bool = False) -> Removed:
        """Takes entries out of the local store, by key or the beginning of its hex digits. Raises `LookupError` for none.

        Those in use here or in flight anywhere are skipped unless forced.
        """
        from plancache.store.retention import Removal

        stored = self._scan()
        chosen = []
        for digest in digests:
            text = digest.hex if isinstance(digest, PlanKey) else digest.lower()
            found = [one for one in stored if text and one.key.hex().startswith(text)]
            if len(found) != 1:
                raise LookupError(f"{len(found) or 'no'} stored entries have a key that starts with {text!r}; 'plancache ls' lists them")
            chosen += found
        kept = sum(one.size_bytes for one in stored) - sum(one.size_bytes for one in set(chosen))
        return self._take_out(Removal(tuple(dict.fromkeys(chosen)), kept), force=force, dry_run=dry_run)

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
        from plancache.store.retention import choose

        removal = choose(
            self._scan(),
            max_bytes=max_bytes,
            older_than_s=older_than_s,
            unused_since_s=unused_since_s,
            matching=self._stale() if stale else None,
            everything=everything,
            now=time.time(),
        )
        return self._take_out(removal, force=force, dry_run=dry_run)

    def _scan(self) -> tuple[Stored, ...]:
        from plancache.store.retention import scan

        return scan(self._levels.local) if self._levels.local is not None else ()

    def _stale(self) -> Callable[[Stored], bool]:
        try:
            place = self._targets.current().place
        except DeviceError:
            place = None
        return partial(_is_stale, Place.of_libraries(Libraries.loaded()), place)

    def _take_out(self, removal: Removal, *, force: bool, dry_run: bool) -> Removed:
        from plancache.store.retention import Removed, remove

        if dry_run or not removal.chosen or self._levels.local is None:
            return Removed.foretold(removal)
        flight = self._single_flight()
        skip = (lambda _: False) if force else lambda key: self._plans.holds(key) or flight.busy(key)
        removed = remove(self._levels.local, removal, skip=skip)
        for one in removed.entries:
            self._plans.drop(one.key)
        return removed

    def verdicts(self) -> list[Verdict]:
        """What is known beside the entries: quarantined rows, unsupported graphs, strikes, denials; oldest first."""
        return self._levels.local.verdicts() if self._levels.local is not None else []

    def lift(self, verdicts: Iterable[Verdict]) -> int:
        """Forgets verdicts, and returns how many there were: what they are about is tried again. Raises `StoreError`."""
        return self._levels.local.lift(list(verdicts)) if self._levels.local is not None else 0

    def _single_flight(self) -> SingleFlight:
        with self._guard:
            if self._flight is None:
                folder, timeout_s = self._levels.lock_folder(), self.settings.lock_timeout_s
                self._flight = SingleFlight(folder, timeout_s=timeout_s, on_fault=lambda error: self._report.fault("lock", error))
            return self._flight


def _verify(levels: Levels, load: Callable[[Entry], str | None] | None) -> Iterator[Finding]:
    if levels.local is not None:
        yield from (Finding("local", b"", problem) for problem in levels.local.damage())
    for level, key, row in levels.all_rows():
        if isinstance(row, StoreError):
            yield Finding(level, key, str(row))
            continue
        try:
            entry = unpack(row)
        except CorruptEntryError as error:
            yield Finding(level, key, str(error))
            continue
        problem = load(entry) if load else None
        if problem:
            yield Finding(level, key, problem)


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
