"""The order of look-up, and what a store that cannot be used costs."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from samples import make_entry

from plancache.errors import StoreError
from plancache.settings import Settings
from plancache.store import levels as module
from plancache.store import place
from plancache.store.levels import Levels
from plancache.store.place import Mount

KEY = make_entry().key.digest


class Told:
    """What levels say: faults by kind, and warnings."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.warnings: list[str] = []

    def levels(self, directory: Path, **options: Any) -> Levels:
        settings = Settings(directory=directory, **options)
        return Levels(settings, lambda kind, error: self.faults.append(f"{kind}: {error}"), lambda _, text: self.warnings.append(text))


def test_a_lock_that_begins_after_opening_is_waited_for_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look waits for its time and tells a fault; for a while the store is left alone, then it is asked again."""
    told = Told()
    opened = told.levels(cache_dir, lock_timeout_s=0.2)
    opened.put(make_entry(), replace_equal=False)
    opened.close()
    other = sqlite3.connect(cache_dir / "plans-1.sqlite3", isolation_level=None)
    other.execute("PRAGMA journal_mode = DELETE")  # where a writer keeps readers out
    looked = told.levels(cache_dir, lock_timeout_s=0.2)
    assert looked.local is not None
    other.execute("BEGIN EXCLUSIVE")
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    for _ in range(5):
        assert list(looked.rows(KEY)) == []
        assert looked.verdicts(KEY) == []
        assert not looked.put(make_entry(quality="tuned"), replace_equal=False)
    assert len(told.faults) == 1
    assert "locked" in told.faults[0]
    other.execute("ROLLBACK")
    other.close()
    clock[0] = now + 61
    assert [found.level for found in looked.rows(KEY)] == ["local"]
    looked.close()


def test_on_a_network_file_system_no_lock_lies_in_the_directory(
    cache_dir: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers and builders lock each other out in a folder of this machine; the file has a rollback journal."""
    local = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(local))
    monkeypatch.setattr(place, "network_mount", lambda path: Mount("/mnt", "nfs4") if cache_dir in (path, *path.parents) else None)
    told = Told()
    opened = told.levels(cache_dir)
    assert opened.put(make_entry(), replace_equal=False)
    folder = opened.lock_folder()
    assert folder is not None
    assert local in folder.parents
    assert (folder / "write.lock").exists()
    assert not list(cache_dir.rglob("*.lock"))
    assert sqlite3.connect(cache_dir / "plans-1.sqlite3").execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert told.faults == []
    assert len(told.warnings) == 1
    assert "/mnt" in told.warnings[0]
    opened.close()


def test_strict_faults_do_not_leave_it_half_open(cache_dir: Path) -> None:
    """A fault that is raised while it opens is raised again by the next look, and nothing is lost."""

    def strict(_: str, error: StoreError) -> None:
        raise error

    (cache_dir / "plans-1.sqlite3").mkdir()
    opened = Levels(Settings(directory=cache_dir), strict, lambda *_: None)
    for _ in range(2):
        with pytest.raises(StoreError):
            list(opened.rows(KEY))
    (cache_dir / "plans-1.sqlite3").rmdir()
    assert list(opened.rows(KEY)) == []
    assert opened.put(make_entry(), replace_equal=False)
    opened.close()
