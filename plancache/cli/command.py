"""What all commands share."""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plancache.settings import Settings
    from plancache.stored import StoredPlans

_log = logging.getLogger("plancache.cli")


class UsageError(Exception):
    """What was asked for makes no sense; the message names the cure. Exit code 2."""


@dataclass(frozen=True)
class Command:
    """A command: what its help says, the arguments it takes, and what it does (returning the exit code)."""

    name: str
    summary: str
    details: str
    example: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the environment, with the directory that was named."""
    from plancache.settings import Settings

    return Settings.load(directory=args.cache_dir)


def settings_to_look(args: argparse.Namespace) -> Settings:
    """The settings of a command that only looks: nothing is written, a damaged file stays where it is."""
    settings = settings_of(args)
    if settings.mode == "off":
        _log.warning("the cache is off (%s): programs neither look up nor store plans", source_of(settings, "mode"))
    return replace(settings, mode="readonly")


def settings_to_change(args: argparse.Namespace, *, dry_run: bool = False) -> Settings:
    """The settings of a command that changes the local store, where it may be changed. A dry run only looks.

    Bundles are left out: they are never changed, and one that cannot be used is not in the way.
    """
    from plancache.errors import SealedError
    from plancache.store.sealed import is_sealed

    settings = settings_of(args)
    if settings.mode != "readwrite" and not dry_run:
        source = source_of(settings, "mode")
        cure = f"to change it all the same: env -u {source} plancache ..."
        raise UsageError(f"the cache is {settings.mode} ({source}), so nothing is changed there; {cure}")
    if is_sealed(settings.database):
        cure = f"to change it: plancache seal --undo --cache-dir {settings.directory}"
        raise SealedError(settings.database, "it is sealed, and never changed", cure)
    return replace(settings, bundles=(), mode="readonly" if dry_run else "readwrite")


def refuse_unusable(cache: StoredPlans) -> None:
    """Raises `StoreError` where there is no local store to change; a warning has said why."""
    from plancache.errors import StoreError

    if not cache.has_local_store:
        raise StoreError(f"nothing can be changed in {cache.settings.directory}")


def source_of(settings: Settings, name: str) -> str:
    """Where a setting came from, in the words of the command line."""
    source = settings.sources.get(name, "default")
    return "--cache-dir" if source == "argument" else source


def nothing_stored(settings: Settings) -> str:
    """What to say of a cache without entries."""
    return f"no plans are stored in {settings.directory} ({source_of(settings, 'directory')})"


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: thousands of rows hold no cycles, and looking for some takes half of a listing's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
