"""For users' own tests: a cache of their own, so that no test sees the user's plans or another test's.

pytest finds this module by itself where plancache is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from plancache.cache import PlanCache


@pytest.fixture
def plancache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory that this test's caches use, and those of the processes it starts; cache faults raise there."""
    directory = tmp_path / "plancache"
    for name in ("PLANCACHE_BUNDLES", "PLANCACHE_MODE", "PLANCACHE_BUILD", "PLANCACHE_MAX_BYTES", "PLANCACHE_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLANCACHE_DIR", str(directory))
    monkeypatch.setenv("PLANCACHE_STRICT", "1")
    return directory


@pytest.fixture
def plan_cache(plancache_dir: Path) -> Iterator[PlanCache]:
    """An empty `PlanCache` for the device that is current, closed after the test."""
    from plancache.cache import PlanCache

    with PlanCache(plancache_dir) as cache:
        yield cache
