"""The page of the commands says what they are: its reference is made from them, and the fields that it names are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from samples import make_entry

from plancache.cli import COMMANDS, main
from plancache.cli.reference import reference, written_into
from plancache.encoding import encode
from plancache.explaining import Explanation
from plancache.key import PlanKey
from plancache.settings import Settings
from plancache.store.database import Database, Verdict

PAGE = (Path(__file__).parents[1] / "docs" / "commands.md").read_text()
SIGNATURE = encode(1) + encode([None] * 6) + encode([None] * 3)
SIGNATURE += encode([[None, (2, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]])
SIGNATURE += encode([["POINTWISE", None, {"mode": "relu"}, {"IN_0": 1}, {"OUT_0": 1}]])
KEY = PlanKey((SIGNATURE, b"{}", b'"NVIDIA H200"', b"13000", b'{"version":91900,"builds":{}}', b'"1.32.0"', b"{}", b"{}"))


def test_the_reference_is_that_of_the_commands() -> None:
    """To make it anew: python -m plancache.cli.reference docs/commands.md."""
    assert written_into(PAGE) == PAGE
    assert all(f"### `plancache {name}" in reference() for name in COMMANDS)


def test_what_stands_around_the_reference_stays() -> None:
    """Only what is between the markers is made; a page without them is not touched."""
    before, after = PAGE.split("### `plancache ls")[0], "\nmore of somebody's own\n"
    assert written_into(PAGE.replace("### `plancache ls", "### `plancache sl") + after) == PAGE + after
    assert PAGE.startswith(before)
    with pytest.raises(ValueError, match="no lines"):
        written_into("# a page\n")


def fields(command: str) -> set[str]:
    """The names in the row of a command, without what stands in brackets."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{command}` |"))
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", row.split("|", 2)[2])))


@pytest.fixture
def printed(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints as JSON, of a cache with one plan and one verdict."""
    monkeypatch.setenv("PLANCACHE_DIR", str(cache_dir / "cache"))
    with closing(Database(Settings.load(directory=cache_dir / "cache").database, lock_timeout_s=20)) as database:
        database.put(make_entry(key=KEY))
        database.record(Verdict("unsupported", b"key", b"", "no plan", 1, 1.0))

    def printed(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return printed


def test_the_fields_that_the_page_names_are_those_that_are_printed(printed: Callable[..., Any]) -> None:
    """Neither names what the other lacks."""
    assert set(printed("ls")[0]) == fields("ls") - {"ls", "sealed_in"}
    assert set(printed("ls", "--verdicts")[0]) == fields("ls --verdicts")
    assert set(printed("stats")) == fields("stats")
    assert set(printed("show", KEY.hex)) == (fields("show") | fields("ls")) - {"ls", "sealed_in"}
    assert {"name", *Explanation("missing", None, None).to_dict()} == fields("explain")
