"""Where things are and how the cache behaves; the only reader of plancache's environment variables."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from plancache.errors import SettingsError

Mode = Literal["readwrite", "readonly", "off"]
Build = Literal["allow", "forbid", "lookup"]

LOCK_TIMEOUT_S = 600.0
"""Default bound on waiting for another builder of the same key, in seconds: longer than any build seen."""

MAX_BYTES = 2_000_000_000
"""Default bound on the stored plans of a directory, in bytes: 100,000 plans of the usual size."""

MAX_TAG_LENGTH = 100


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse


def _flag(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false", "yes", "no", "on", "off", ""):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true", "yes", "on")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("must be a number of seconds, such as 600") from None
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"must be a finite number of seconds, 0 or more, {threading.TIMEOUT_MAX:.0f} at most")
    return seconds


def _directory(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("must be an absolute path, so that every process finds the same directory")
    return path


def _bundles(text: str) -> tuple[Path, ...]:
    return tuple(_directory(part) for part in text.split(os.pathsep) if part)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if found is None:
        raise ValueError("must be a number of bytes, such as 2000000000, 500MB or 2GB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(unit or " "))


def _tag(text: str) -> str:
    if not 0 < len(text) <= MAX_TAG_LENGTH or not text.isprintable() or text != text.strip():
        raise ValueError(f"must be a name of 1 to {MAX_TAG_LENGTH} printable characters, without blanks around it")
    return text


VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "directory": ("PLANCACHE_DIR", _directory),
    "mode": ("PLANCACHE_MODE", _choice("readwrite", "readonly", "off")),
    "build": ("PLANCACHE_BUILD", _choice("allow", "forbid")),
    "strict": ("PLANCACHE_STRICT", _flag),
    "lock_timeout_s": ("PLANCACHE_LOCK_TIMEOUT_S", _seconds),
    "bundles": ("PLANCACHE_BUNDLES", _bundles),
    "max_bytes": ("PLANCACHE_MAX_BYTES", _bytes),
    "log": ("PLANCACHE_LOG", _choice("debug", "info", "warning", "error")),
    "tag": ("PLANCACHE_TAG", _tag),
    "record": ("PLANCACHE_RECORD", lambda text: str(_directory(text))),
}


def default_directory() -> Path:
    """The user's cache directory of this platform (`~/.cache/plancache` on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("plancache", appauthor=False)


@dataclass(frozen=True)
class Settings:
    """How a cache behaves.

    `directory`: holds the database and its locks. `mode`: `readwrite`, `readonly` (nothing is stored) or `off`
    (memory only). `build`: what a miss does, `allow` builds, `forbid` raises `PlanNotFoundError`. `strict`: cache
    faults raise `StoreError` in place of one warning and a miss. `lock_timeout_s`: seconds to wait for another
    builder of the same key before one more build goes on. `bundles`: sealed files, looked up in this order behind the
    directory. `max_bytes`: of stored plans; beyond it those go that save the least build seconds per byte, the newest
    excepted, down to 90 percent of it; 0 is no limit. `max_live_bytes`: of loaded plans in memory; the least recently
    used beyond it are let go of. `log`: from which level on plancache's log goes to stderr; by default the program's
    own logging decides. `tag`: the name of this program, noted with the plans that it builds and loads.
    `record`: a manifest that takes what the cache was asked for, when it is closed or the process ends.
    """

    directory: Path = field(default_factory=default_directory)
    mode: Mode = "readwrite"
    build: Build = "allow"
    strict: bool = False
    lock_timeout_s: float = LOCK_TIMEOUT_S
    bundles: tuple[Path, ...] = ()
    max_bytes: int = MAX_BYTES
    max_live_bytes: int = 1_000_000_000
    log: str | None = None
    tag: str | None = None
    record: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value came from: a variable's name, `argument` or `default`."""

    def __post_init__(self) -> None:
        place = os.fspath(self.directory)
        if not place or "\0" in place:
            raise SettingsError(f"directory must be the path of a folder, not {place!r}")
        object.__setattr__(self, "directory", Path(place))
        for name, choices in (("mode", ("readwrite", "readonly", "off")), ("build", ("allow", "forbid")), ("strict", (True, False))):
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        if isinstance(self.bundles, str | os.PathLike):
            raise SettingsError(f"bundles must be a list of sealed files, not {self.bundles!r}")
        object.__setattr__(self, "bundles", tuple(Path(bundle) for bundle in self.bundles))
        for name in ("max_bytes", "max_live_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise SettingsError(f"{name} must be a whole number of bytes, not {getattr(self, name)!r}")
        if self.log not in (None, "debug", "info", "warning", "error"):
            raise SettingsError(f"log must be debug, info, warning or error, not {self.log!r}")
        if self.record is not None and not isinstance(self.record, str):
            raise SettingsError(f"record must be a manifest's path, not {self.record!r}")
        if self.tag is not None:
            try:
                _tag(self.tag)
            except (TypeError, AttributeError, ValueError):
                raise SettingsError(f"tag must be a short printable name, such as 'resnet50-serve', not {self.tag!r}") from None
        seconds = self.lock_timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise SettingsError(f"lock_timeout_s must be a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, not {seconds!r}")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from arguments, else the environment, else the defaults; `None` counts as not given."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        sources = dict.fromkeys(values, "argument")
        for name, (variable, parse) in VARIABLES.items():
            text = environ.get(variable, "")
            if name in values or not text:
                continue
            try:
                values[name] = parse(text)
            except ValueError as error:
                raise SettingsError(f"{variable}={text!r} {error}") from None
            sources[name] = variable
        if values.get("directory"):
            values["directory"] = Path(values["directory"]).expanduser().absolute()
        known = {f.name for f in fields(cls) if f.name != "sources"}
        if unknown := values.keys() - known:
            raise SettingsError(f"unknown setting {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}")
        return cls(**values, sources={name: sources.get(name, "default") for name in known})

    @property
    def database(self) -> Path:
        """The SQLite file of this cache directory."""
        return self.directory / "plans-1.sqlite3"


def make_private(directory: Path) -> None:
    """Makes a directory, and those above it that are missing, for this user only (mode 0700)."""
    if not directory.exists():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
