"""The fixtures that users' own tests get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
from pathlib import Path
import pytest
from plancache import Device, PlanCache, Settings

def test_an_isolated_cache(plan_cache, tmp_path):
    assert plan_cache.settings.directory == tmp_path / "plancache" == Path(os.environ["PLANCACHE_DIR"])
    assert plan_cache.settings.strict and plan_cache.entries() == []

def test_a_cache_of_the_code_under_test_is_isolated(plancache_dir):
    settings = Settings.load()
    assert settings.directory == plancache_dir
    assert settings.mode == "readwrite" and settings.bundles == ()
"""


def test_users_tests_get_a_cache_of_their_own(tmp_path: Path) -> None:
    """Where plancache is installed pytest finds the fixtures by itself, whatever the environment says."""
    (tmp_path / "test_theirs.py").write_text(PROGRAM)
    environment = {**os.environ, "PLANCACHE_DIR": "/nowhere", "PLANCACHE_MODE": "off", "PLANCACHE_BUNDLES": "/nowhere/x"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
