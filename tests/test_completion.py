"""The completion of shells: what a real one offers at a place of the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable

import pytest

from plancache.cli import COMMANDS, main

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str]) -> Complete:
    """What bash offers for the last of these words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words: str) -> list[str]:
        ask = f'{script}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _plancache; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", ask, "bash", "plancache", *words], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pr"], ["prune"]),
        (["--ver"], ["--version"]),
        (["ls", "--old"], ["--older-than"]),
        (["--cache-dir", "x", "rm", "--dry"], ["--dry-run"]),
        (["ls", "--quality", ""], ["compiled", "heuristic", "tuned"]),
        (["ls", "--quality", "tuned", "--verdicts", "s"], ["struck"]),
        (["completion", ""], ["bash", "zsh"]),
        (["stats", "--j"], ["--json"]),
        (["show", "abc"], []),
    ],
)
def test_what_fits_is_offered(complete: Complete, words: list[str], offered: list[str]) -> None:
    """Commands, a command's own options, and an option's choices."""
    assert [word for word in complete(*words) if not word.startswith("-") or words[-1].startswith("-")] == offered


def test_every_command_is_offered(complete: Complete) -> None:
    """None is forgotten."""
    assert {word for word in complete("") if not word.startswith("-")} == set(COMMANDS)


def test_zsh_gets_the_same_after_a_line_that_lets_it_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    """zsh reads bash's completions once bashcompinit is loaded."""
    for shell in ("bash", "zsh"):
        assert main(["completion", shell, "--json"]) == 0
    printed = capsys.readouterr().out
    bash, zsh = (json.loads(part) for part in printed.replace("}\n{", "}\0{").split("\0"))
    assert zsh["script"] == f"autoload -U +X bashcompinit && bashcompinit\n{bash['script']}"
