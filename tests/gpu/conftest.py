"""Tests that execute plans. Skipped where there is no GPU; `make gpu-test` runs them."""

from __future__ import annotations

import pytest


def _gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _gpu():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no GPU (make gpu-test runs these on a machine with one)"))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory):
    """A cache directory in which every example graph was built on this GPU."""
    from plancache import PlanCache, graphs

    directory = tmp_path_factory.mktemp("stored")
    with PlanCache(directory, strict=True) as cache:
        for example in graphs.examples():
            assert cache.plan(example.graph).origin == "built"
    return directory
