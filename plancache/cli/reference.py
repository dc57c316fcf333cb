"""The reference of all commands as Markdown, made from their parsers: `python -m plancache.cli.reference docs/commands.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from plancache.cli import COMMANDS, command

BEGIN = "<!-- made by python -m plancache.cli.reference; change the commands, not this -->"
END = "<!-- end of what is made -->"


def reference() -> str:
    """All commands, in the order of `plancache --help`."""
    return "\n".join(line for name in COMMANDS for line in _command(name))


def written_into(text: str) -> str:
    """A page with the reference between its markers as it is now. Raises `ValueError` for a page without them."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _command(name: str) -> Iterator[str]:
    own = command(name)
    parser = argparse.ArgumentParser(prog=f"plancache {name}", add_help=False)
    own.configure(parser)
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    usage = " ".join([f"plancache {name}", *(_positional(action) for action in shown if not action.option_strings)])
    options = " [options]" if any(action.option_strings for action in shown) else ""
    yield from (f"### `{usage}{options}`", "", f"{own.summary[0].upper()}{own.summary[1:]}. {own.details}", "")
    if shown:
        yield from ("| argument | |", "|---|---|")
        yield from (f"| `{_bars(_argument(action))}` | {_bars(action.help or '').replace('*', chr(92) + '*')} |" for action in shown)
        yield ""
    yield from ("```", *own.example.splitlines(), "```", "")


def _positional(action: argparse.Action) -> str:
    shown = _metavar(action)
    return {"?": f"[{shown}]", "*": f"[{shown} ...]", "+": f"{shown} ..."}.get(str(action.nargs), shown)


def _argument(action: argparse.Action) -> str:
    flags, shown = ", ".join(action.option_strings), _metavar(action)
    if not flags:
        return shown
    if action.nargs == 0:
        return flags
    return f"{flags} [{shown}]" if action.nargs == "?" else f"{flags} {shown}"


def _metavar(action: argparse.Action) -> str:
    if action.metavar is None and action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _bars(text: str) -> str:
    """A cell of a table, whose columns are parted by bars."""
    return text.replace("|", "\\|").replace("%%", "%")


def main(argv: Sequence[str]) -> int:
    """Rewrites the pages that are named."""
    for name in argv:
        page = Path(name)
        page.write_text(written_into(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
