"""Tags: the programs that asked for a plan are known by the names in their settings, and nothing of that is in the plan."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from faking import opened_on_gpu, product

from plancache.store.database import Database
from plancache.store.retention import choose, remove, scan
from plancache.store.tags import Tagged


def tags(directory: Path) -> dict[str, int]:
    """Hits by tag."""
    with closing(Database(directory / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        return {tagged.tag: tagged.hits for tagged in database.tags()}


def test_a_program_is_known_by_what_it_built_and_loaded(cache_dir: Path) -> None:
    """The build at once, the uses when the cache is closed: a hit writes nothing."""
    cache, _ = opened_on_gpu(cache_dir, tag="train")
    with cache:
        cache.plan(product())
        assert tags(cache_dir) == {"train": 0}
    cache, _ = opened_on_gpu(cache_dir, tag="serve")
    with cache:
        assert cache.plan(product()).origin == "local"
        assert tags(cache_dir) == {"train": 0}
    assert tags(cache_dir) == {"train": 0, "serve": 1}


def test_a_program_without_a_name_leaves_none(cache_dir: Path) -> None:
    """Nor does one that may not write."""
    for options in ({}, {}, {"tag": "serve", "mode": "readonly"}):
        cache, _ = opened_on_gpu(cache_dir, **options)
        with cache:
            cache.plan(product())
    assert tags(cache_dir) == {}


def test_the_name_is_taken_from_the_environment(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PLANCACHE_TAG, as other settings."""
    monkeypatch.setenv("PLANCACHE_TAG", "resnet50-serve")
    cache, _ = opened_on_gpu(cache_dir)
    with cache:
        cache.plan(product())
        (tagged,) = cache.tags()
        (listed,) = cache.entries()
    assert (tagged.tag, listed.tags) == ("resnet50-serve", ("resnet50-serve",))


def test_no_name_is_in_a_plan(cache_dir: Path) -> None:
    """Key, facts and payload are those that any program would have stored."""
    cache, _ = opened_on_gpu(cache_dir, tag="a-name-of-its-own")
    with cache:
        plan = cache.plan(product())
    assert plan.entry is not None
    with closing(Database(cache_dir / "plans-1.sqlite3", lock_timeout_s=20)) as database:
        row = database.get(plan.entry.key.digest)
        assert row is not None and not any(b"a-name-of-its-own" in bytes(part) for part in row)
        remove(database, choose(scan(database), everything=True, now=0.0))
        assert database.tags() == list[Tagged]()
