"""Something to do when a program imports a module: a program that never does pays nothing. Imports next to nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Calls `then` with a module right after it was imported; at once where it is there already."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnImport(name, then))


class _OnImport:
    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # once
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec
