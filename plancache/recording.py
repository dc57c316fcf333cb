"""What a cache is asked for while a recording is open, written into a manifest at its end."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from plancache.errors import ManifestError
from plancache.manifest import Manifest, Wanted

if TYPE_CHECKING:
    from plancache.entry import Entry
    from plancache.key import Constraints

_log = logging.getLogger("plancache.recording")


class Recording:
    """Notes graphs with counts, build seconds and, with `lock`, recipes, from any thread, until its with block ends.

    `uncacheable` counts by reason the graphs that have no signature; they are not in the manifest. `among`: the open
    recordings, which this one joins. What was recorded is added to what the file holds, also where the block raises; a
    forked child adds what it asked for itself. Raises `ManifestError` at once for a file that could not take it at the end.
    """

    def __init__(self, path: str | os.PathLike[str], *, lock: bool = False, among: list[Recording] | None = None) -> None:
        self.path = Path(path)
        self.lock = lock
        self.uncacheable: Counter[str] = Counter()
        self._among = [] if among is None else among
        self._wanted: dict[tuple[bytes, Constraints], Wanted] = {}
        self._process = os.getpid()
        self._guard = threading.Lock()
        if self.path.exists():
            Manifest.read(path)
        elif not self.path.parent.is_dir():
            raise ManifestError(str(path), None, "its directory is not there", f"make it first: mkdir -p {self.path.parent}")

    @property
    def manifest(self) -> Manifest:
        """What was asked for so far."""
        with self._guard:
            return Manifest.of(wanted for wanted in self._wanted.values() if wanted.count > 0)

    def asked(self, signature: bytes, constraints: Constraints) -> None:
        """Counts a request."""
        self._note(Wanted(signature, constraints))

    def answered(self, signature: bytes, constraints: Constraints, entry: Entry) -> None:
        """Notes what answered a request that was counted."""
        self._note(Wanted(signature, constraints, 0, entry.build_s, entry.recipe if self.lock else None))

    def withdrawn(self, signature: bytes, constraints: Constraints) -> None:
        """Takes one request back: the graph has a signature, but cannot be copied exactly."""
        self._note(Wanted(signature, constraints, -1))

    def _note(self, wanted: Wanted) -> None:
        self._begin()
        with self._guard:
            known = self._wanted.get(wanted.identity)
            self._wanted[wanted.identity] = wanted if known is None else known.and_again(wanted)

    def refused(self, reason: str) -> None:
        """Counts a graph that cannot be cached."""
        self._begin()
        with self._guard:
            self.uncacheable[reason] += 1

    def _begin(self) -> None:
        """In a forked child anew: what the parent asked for is the parent's to write."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._guard = threading.Lock()
            self._wanted = {}
            self.uncacheable = Counter()

    def __enter__(self) -> Recording:
        self._among.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._among.remove(self)
        if os.getpid() != self._process:
            return
        try:
            self.manifest.merge_into(self.path)
        except ManifestError as hindrance:
            if error is None:
                raise
            _log.warning("what was recorded is lost: %s", hindrance)  # what the block raised goes on


def record_until_the_end(cache: Any, recording: Recording) -> None:
    """Opens a recording that ends when its cache is closed or dropped, or when the process ends. Nothing asked, nothing written."""
    recording.__enter__()
    cache.end_recording = finalize(cache, _end, recording)


def _end(recording: Recording) -> None:
    if not recording.manifest.graphs:
        _log.warning("nothing is recorded in %s: no graph was asked for", recording.path)
        return
    try:
        recording.__exit__(None, None, None)
    except ManifestError as error:
        _log.warning("what was asked for is not recorded: %s", error)
