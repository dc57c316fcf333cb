"""What all commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plancache.settings import Settings


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


def source_of(settings: Settings, name: str) -> str:
    """Where a setting came from, in the words of the command line."""
    source = settings.sources.get(name, "default")
    return "--cache-dir" if source == "argument" else source


def nothing_stored(settings: Settings) -> str:
    """What to say of a cache without entries."""
    return f"no plans are stored in {settings.directory} ({source_of(settings, 'directory')})"


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
