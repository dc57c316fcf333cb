"""A program's start-up as a whole: its graphs go through the cache, those of the last run are fetched ahead, this run's are noted."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plancache.errors import ManifestError, PlanNotFoundError, SettingsError, StoreError
from plancache.intercept import installed

if TYPE_CHECKING:
    from plancache.cache import PlanCache
    from plancache.statistics import Statistics

_log = logging.getLogger("plancache.startup")


@dataclass(eq=False)  # two of one name may run
class Startup:
    """One start-up. `manifest`: the file that holds what the program asks for; the numbers are known at the end of the block."""

    name: str
    manifest: Path
    loaded: int = 0
    built: int = 0
    left: int = 0
    spent_s: float = 0.0
    saved_s: float = 0.0
    seconds: float = 0.0
    cache: PlanCache = field(repr=False, kw_only=True)

    def summary(self) -> str:
        """One line."""
        text = (
            f"{self.name}: {self.loaded} plans loaded, {self.built} built, {self.spent_s:.2f} s spent on them, {self.saved_s:.1f} s saved"
        )
        return text + (f", {self.left} left to the frontend" if self.left else "") + f"; {self.manifest}"


_running: list[Startup] = []


@contextmanager
def startup(name: str, *, cache: PlanCache | None = None, **options: Any) -> Iterator[Startup]:
    """Sends every `cudnn.pygraph` of a block through the cache, and notes in the program's manifest which it asked for.

    What earlier runs asked for is fetched and checked in the background meanwhile. `options`: settings by name, such as
    `build="forbid"`, which raises on the first build and names the graph and the manifest. Within another start-up the cache
    is that one's, where neither `cache` nor options are given. At the end one INFO line sums up (logger
    `plancache.startup`). The cache stays open until the process ends.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name):
        raise SettingsError(f"the name of a program is letters, digits, '.', '_' and '-', 100 at most, not {name!r}")
    cache = cache if cache is not None else _cache_for(name, options)
    started, before = time.perf_counter(), cache.statistics()
    this = Startup(name, cache.settings.directory / "manifests" / f"{name}.plans", cache=cache)
    threading.Thread(target=_fetch, args=(cache, name), name="plancache-fetch", daemon=True).start()
    _running.append(this)
    try:
        with _recorded(this), installed(cache):
            try:
                yield this
            except PlanNotFoundError as error:
                error.add_note(f"what {name} asked for in earlier runs: {this.manifest}")
                raise
    finally:
        _running.remove(this)
        cache.forget_ahead()
        _sum_up(this, before, cache.statistics(), time.perf_counter() - started)


def _cache_for(name: str, options: dict[str, Any]) -> PlanCache:
    from plancache.cache import PlanCache

    if _running and not options:
        return _running[-1].cache
    return PlanCache(**{"tag": name, **options})


def _fetch(cache: PlanCache, name: str) -> None:
    try:
        cache.fetch_ahead(name)
    except Exception:  # it was to save time, no more
        _log.warning("nothing was fetched ahead", exc_info=True)


@contextmanager
def _recorded(this: Startup) -> Iterator[None]:
    """Notes what the block asks for, where that can be written down."""
    from plancache.settings import make_private

    if this.cache.settings.mode != "readwrite":
        yield
        return
    try:
        make_private(this.cache.settings.directory)
        make_private(this.manifest.parent)
        recording = this.cache.record(this.manifest)
    except (ManifestError, StoreError, OSError) as error:
        _log.warning("what %s asks for is not noted: %s", this.name, error)
        yield
        return
    recording.__enter__()
    try:
        yield
    finally:
        try:
            recording.__exit__(None, None, None)
        except ManifestError as error:
            _log.warning("what %s asked for is not noted: %s", this.name, error)


def _sum_up(this: Startup, before: Statistics, after: Statistics, seconds: float) -> None:
    this.loaded = after.hits - before.hits
    this.built = after.builds - before.builds
    this.left = after.fell_through.total() - before.fell_through.total()
    this.spent_s = after.load_s + after.build_s - before.load_s - before.build_s
    this.saved_s = after.saved_s - before.saved_s
    this.seconds = seconds
    _log.info("%s", this.summary())
