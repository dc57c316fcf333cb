"""`plancache record`: runs a program as `plancache run` does, and writes down which graphs it asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

from plancache.cli.command import Command
from plancache.cli.run import configure_command, execute


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="MANIFEST", required=True, help="the manifest; one that is there is added to")
    configure_command(parser)


def _run(args: argparse.Namespace) -> int:
    from plancache.recording import Recording

    Recording(args.output)  # here, where what is wrong with the file can be said
    return execute(args, PLANCACHE_RECORD=str(Path(args.output).absolute()))


COMMAND = Command(
    "record",
    "run a program as 'run' does, and write its manifest: the graphs that it asked for",
    "The manifest is a text file, to be read, compared and committed: 'plancache check' says which of its plans are there, "
    "'plancache warm' makes them. Each process adds what it asked for when it ends. The exit code is the program's own.",
    "plancache record -o serve.plans -- python serve.py --one-request",
    _configure,
    _run,
)
