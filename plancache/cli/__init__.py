"""The command line: arguments, tables, exit codes. No cache logic.

Exit codes: 0 done, 1 found problems or failed, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from plancache import __version__
from plancache.cli.command import Command, UsageError
from plancache.errors import DamagedStoreError, PlancacheError, PlancacheWarning
from plancache.events import ALL_THE_SAME

__all__ = ["main"]

COMMANDS = {
    "ls": "ls",
    "show": "show",
    "stats": "stats",
    "verify": "verify",
    "warm": "warm",
    "check": "check",
    "explain": "explain",
    "tune": "tune",
    "rm": "rm",
    "prune": "prune",
    "purge": "prune.PURGE",
    "export": "export",
    "import": "import_bundle",
    "run": "run",
    "record": "record",
    "seal": "seal",
    "upgrade": "upgrade",
    "doctor": "doctor",
    "completion": "completion",
}
"""By name the module, whose `COMMAND` it is unless another name is given; imported when it is used."""

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
UNREAD = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return UNREAD
    except KeyboardInterrupt:
        print("plancache: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(words)
    try:
        args = parser.parse_args(words)
    except SystemExit as leaving:  # argparse's way to end, after --help too
        return int(leaving.code or 0)
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    with _messages():
        try:
            return int(args.run(args))
        except BrokenPipeError:
            raise
        except (PlancacheError, OSError, LookupError, UsageError) as error:
            if args.debug:
                traceback.print_exc()
            print(f"plancache: error: {_one_line(error)}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    cure = "; 'plancache verify' says what becomes of it" if isinstance(error, DamagedStoreError) else ""
    return (" ".join(str(error).split()) or type(error).__name__) + cure


@contextmanager
def _messages() -> Iterator[None]:
    """Shows plancache's warnings and its log from WARNING on as lines on stderr, each once."""
    said: set[str] = set()

    def say(message: str) -> None:
        message = message.removesuffix(ALL_THE_SAME)  # there is no "this one" here
        if message not in said:
            said.add(message)
            print(f"plancache: warning: {message}", file=sys.stderr)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PlancacheWarning):
            say(str(message))
        else:
            others(message, category, *place, **more)

    handler, logger = Handler(logging.WARNING), logging.getLogger("plancache")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            others, warnings.showwarning = warnings.showwarning, show_warning
            warnings.simplefilter("always", PlancacheWarning)  # PYTHONWARNINGS neither hides them nor makes errors of them
            yield
    finally:
        logger.removeHandler(handler)


# ---- arguments


def command(name: str) -> Command:
    """One of the commands."""
    module, _, attribute = COMMANDS[name].partition(".")
    found: Command = getattr(import_module(f"plancache.cli.{module}"), attribute or "COMMAND")
    return found


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        for action in self._actions:
            for choice in action._choices_actions if isinstance(action, argparse._SubParsersAction) else ():
                choice.help = command(choice.dest).summary
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        mistyped = re.match(r"argument (?:COMMAND|--verdicts): invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        if mistyped:
            import difflib

            word, choices = mistyped[1], re.findall(r"[\w-]+", mistyped[2])
            near = difflib.get_close_matches(word, choices, 1)
            cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
            message = f"there is no {'command' if 'COMMAND' in message else 'kind of verdict'} {word!r}: {cure}"
        if message == "argument --sort: expected one argument":
            message += ", joined to it where it begins with a dash: --sort=-COLUMN"
        self.exit(2, f"plancache: error: {message}; '{self.prog} --help' shows how it is used\n")


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """For these words: a command that is not among them needs no parser of its own, unless all of them are shown."""
    parser = _Parser(
        prog="plancache",
        description="A persistent cache of cuDNN execution plans.",
        epilog="'plancache COMMAND --help' explains a command and has an example. 'plancache doctor' is a good first one.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"plancache {__version__}")
    _add_common(parser, cache_dir=None, debug=False)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog=parser.prog, parser_class=_CommandParser)
    named = [word for word in words if word in COMMANDS]
    before = words[: words.index(named[0])] if named else words
    for name in COMMANDS if not named or {"-h", "--help"} & set(before) else dict.fromkeys(named):
        commands.add_parser(name, help="", command=name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    return parser


class _CommandParser(_Parser):
    """The arguments of one command, which is imported when they are read or shown."""

    def __init__(self, *, command: str, **options: Any) -> None:
        super().__init__(**options)
        self._command: str | None = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._fill()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        self._fill()
        return super().format_help()

    def _fill(self) -> None:
        if self._command is None:
            return
        own, self._command = command(self._command), None
        self.description = textwrap.fill(f"{own.summary[0].upper()}{own.summary[1:]}. {own.details}", 78)
        self.epilog = "\n  ".join(["example:", *own.example.splitlines()])
        own.configure(self)
        self.add_argument("--json", action="store_true", help="print JSON")
        _add_common(self, cache_dir=argparse.SUPPRESS, debug=argparse.SUPPRESS)  # what was given before the command stays
        self.set_defaults(run=own.run)


def _add_common(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    place = "the cache directory (default: $PLANCACHE_DIR, else the user's cache directory)"
    parser.add_argument("--cache-dir", metavar="DIR", default=defaults["cache_dir"], help=place)
    parser.add_argument("--debug", action="store_true", default=defaults["debug"], help="show the traceback of an error")
