"""What the tests share: the device file of an H200, cuDNN for it, and an empty cache directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result, Run

from plancache.backend import CudnnBackend
from plancache.cli import main
from plancache.environment import Device


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is in the background of a shell, and tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms of stress tests (make stress)")


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How much of something: the first number, or with --long the second."""
    return lambda short, long: long if request.config.getoption("--long") else short


@pytest.fixture(scope="session")
def device() -> Device:
    return Device.from_file("h200")


@pytest.fixture(scope="session")
def backend(device: Device) -> CudnnBackend:
    """cuDNN in this process. It lowers graphs for the device; it neither builds nor runs anything."""
    return CudnnBackend(device)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def run(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`main` in this process, on an empty directory, without a terminal."""
    for name in list(os.environ):
        if name.startswith("PLANCACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PLANCACHE_DIR", str(cache_dir / "cache"))

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    return run
