"""`plancache run`: starts a program whose cuDNN graphs go through the cache, without a change of its code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from plancache.cli.command import Command, UsageError, settings_of

_LAUNCHER = Path(__file__).parents[1] / "launcher"


def configure_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")


def execute(args: argparse.Namespace, **more: str) -> int:
    """Becomes the program, with `more` in its environment; returns only where there is none."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("there is no program to run; name one after --, as in: plancache run -- python serve.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} to run; name one that the shell would find")
    settings = settings_of(args)  # here, where what is wrong with them can be said
    environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, (str(_LAUNCHER), os.environ.get("PYTHONPATH"))))}
    if args.cache_dir is not None:
        environment["PLANCACHE_DIR"] = str(settings.directory)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


COMMAND = Command(
    "run",
    "run a program whose cuDNN graphs go through the cache, without a change of its code",
    "Every cudnn.pygraph of the program and of the Python processes that it starts is served from the cache; what is not stored "
    "is built and kept. PLANCACHE_LOG=info says at the end what was loaded and built. The exit code is the program's own. "
    "A Python that is started with -I, -E or -S runs without the cache.",
    "plancache run -- python serve.py --port 8000\nPLANCACHE_LOG=info plancache run -- torchrun --nproc-per-node 8 train.py",
    configure_command,
    execute,
)
