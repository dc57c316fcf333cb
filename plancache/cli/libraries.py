"""Where NVIDIA's libraries lie on this machine, whether they can be loaded or not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Found(NamedTuple):
    """A library file and the search that finds it."""

    path: str
    through: str


def search(pattern: str) -> list[Found]:
    """The libraries whose file name matches, links resolved, in the order in which cuDNN's frontend looks for them."""
    name, seen = re.compile(pattern), dict[str, Found]()
    for folder, through in _folders():
        for path in sorted(folder.glob("lib*.so*")):
            if name.fullmatch(path.name):
                seen.setdefault(str(path.resolve()), Found(str(path), through))
    for cached in _linker_cache():
        if name.fullmatch(Path(cached).name):
            seen.setdefault(str(Path(cached).resolve()), Found(cached, "the system's linker cache"))
    return list(seen.values())


def places() -> str:
    """Where `search` looks, for people."""
    return "LD_LIBRARY_PATH, nvidia/*/lib of the installed packages and the system's linker cache"


def _folders() -> Iterator[tuple[Path, str]]:
    for listed in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        yield Path(listed), "LD_LIBRARY_PATH"
    for packages in filter(None, sys.path):
        for folder in sorted(Path(packages).glob("nvidia/*/lib")):
            yield folder, "the installed packages"


def _linker_cache() -> list[str]:
    program = shutil.which("ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if program is None:
        return []
    done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False)
    return re.findall(r"=> (/.*)", done.stdout)
