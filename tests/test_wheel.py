"""What users install: the wheel alone, without this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT], check=True)
    (wheel,) = (folder / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("plancache/driver_stub.c", "plancache/devices/h200.json", "plancache/py.typed", "plancache/migrations/env.py"):
        assert needed in names
    assert not [name for name in names if name.startswith(("tests", "migrations", "benchmarks", "examples"))]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def test_the_installed_wheel_builds_stores_and_lists(site, tmp_path):
    """From the wheel alone: a fresh database is migrated, a plan is built, stored, and listed by the command."""
    script = """
import sys, plancache
from plancache import Device, PlanCache, graphs
assert plancache.__file__.startswith(sys.argv[1]), plancache.__file__
with PlanCache(sys.argv[2], device=Device.from_file("h200"), strict=True) as cache:
    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14)
    assert cache.plan(example.graph).origin == "built"
    assert len(cache.entries()) == 1
import plancache.migrations
assert plancache.migrations.__file__.startswith(sys.argv[1])
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", script, str(site), str(tmp_path / "cache")], env=environment, cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "plancache", "ls", "--cache-dir", str(tmp_path / "cache")]
    listed = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "conv_fprop+bias+relu" in listed.stdout
