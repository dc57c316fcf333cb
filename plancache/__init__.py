"""A persistent cache of cuDNN execution plans: describe a graph, get a plan that is ready to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plancache import errors, graphs
    from plancache.autotune import Tuning
    from plancache.cache import PlanCache
    from plancache.environment import Device
    from plancache.intercept import install, installed, uninstall
    from plancache.key import Constraints, PlanKey
    from plancache.manifest import Manifest
    from plancache.plan import Plan
    from plancache.settings import Settings
    from plancache.starting import startup
    from plancache.statistics import Statistics

__all__ = [
    "Constraints",
    "Device",
    "Manifest",
    "Plan",
    "PlanCache",
    "PlanKey",
    "Settings",
    "Statistics",
    "Tuning",
    "errors",
    "graphs",
    "install",
    "installed",
    "startup",
    "uninstall",
]

_HOMES = {
    "Constraints": "key",
    "Device": "environment",
    "Manifest": "manifest",
    "Plan": "plan",
    "PlanCache": "cache",
    "PlanKey": "key",
    "Settings": "settings",
    "Statistics": "statistics",
    "Tuning": "autotune",
    "errors": "errors",
    "graphs": "graphs",
    "install": "intercept",
    "installed": "intercept",
    "startup": "starting",
    "uninstall": "intercept",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first used: `import plancache` itself costs next to nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'plancache' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"plancache.{home}")
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
