"""The commands that look: which plans they show, in which order and columns, and what they say of programs and environments."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from commands import Run, is_one_line
from samples import make_entry

from plancache.encoding import encode
from plancache.entry import QUALITIES
from plancache.key import PlanKey
from plancache.settings import Settings
from plancache.store.database import Database
from plancache.store.sealed import seal

DAY_S = 86400


def signature(batch: int, data_type: str, mode: str) -> bytes:
    """Of one pointwise operation on [batch x 3]."""
    tensor = [None, (batch, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]
    types = b"".join((b"l13:", b"e%d:%b" % (len(data_type) + 10, f"data_type.{data_type}".encode()), encode(tensor)[len("l13:n:") :]))
    operations = encode([["POINTWISE", None, {"mode": mode}, {"IN_0": 1}, {"OUT_0": 1}]])
    return encode(1) + encode([None] * 6) + encode([None] * 3) + b"l1:" + types + operations


def key(batch: int, data_type: str = "HALF", mode: str = "relu", cudnn: int = 91900, model: str = "NVIDIA H200") -> PlanKey:
    place = (b"{}", json.dumps(model).encode(), b"13000", b'{"version":%d}' % cudnn, b'"1.32.0"', b"{}", b"{}")
    return PlanKey((signature(batch, data_type, mode), *place))


KEYS = [key(1), key(20, "FLOAT", "gelu_approx_tanh"), key(3, cudnn=91400), key(4, model="NVIDIA H100")]


@pytest.fixture
def file(cache_dir: Path) -> Path:
    """Four plans: the first 40 days old, each of the next larger; `serve` asked for two, `train` for one of them."""
    file = Settings.load(directory=cache_dir / "cache").database
    with closing(Database(file, lock_timeout_s=20)) as database:
        for number, one in enumerate(KEYS):
            at = time.time() - (40 * DAY_S if number == 0 else 60 * (9 - number))
            blob, quality = os.urandom(5000 * (number + 1)), QUALITIES[number % 3]
            built = make_entry(key=one, created_at=at, blob=blob, quality=quality, timings_s={"build": 0.5 * (number + 1)})
            database.put(built, tag="serve" if number < 2 else None)
        database.count_uses({KEYS[1].digest: 8}, time.time() - 2 * DAY_S, "serve")
        database.count_uses({KEYS[1].digest: 2, KEYS[3].digest: 1}, time.time(), "train")
    return file


def shown(run: Run, *arguments: str) -> list[int]:
    """Which of the four, by their numbers."""
    result = run("ls", "--json", *arguments)
    assert result.code == 0, result.err
    digests = [one.hex for one in KEYS]
    return [digests.index(entry["key"]) for entry in json.loads(result.out)]


# ---- ls: which plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("--operation gelu_approx_tanh", [1]),
        ("--operation relu --operation gelu_approx_tanh", []),
        ("--dtype float", [1]),
        ("--shape 20x3", [1]),
        ("--shape *x3", [0, 1, 2, 3]),
        ("--shape 2x3", []),
        ("--quality tuned --quality heuristic", [1, 2]),
        ("--cudnn 9.14", [2]),
        ("--device-model h100", [3]),
        ("--newer-than 1d", [1, 2, 3]),
        ("--older-than 30d", [0]),
        ("--larger-than 12kB", [2, 3]),
        ("--min-hits 1", [1, 3]),
        ("--tag serve", [0, 1]),
        ("--tag train --cudnn 9.19.0", [1, 3]),
        ("--tag nobody", []),
    ],
)
def test_filters_choose_what_is_listed(run: Run, file: Path, arguments: str, expected: list[int]) -> None:
    """Plans that fit all of them, in the order in which they were built."""
    assert file.exists() and shown(run, *arguments.split()) == expected


def test_a_filtered_table_says_of_how_many(run: Run, file: Path) -> None:
    """What is shown is not taken for all that there is."""
    assert re.search(r"^1 of 4 plans, [\d.]+ kB, in ", run("ls", "--dtype", "float").out, re.MULTILINE)
    assert run("ls", "--dtype", "double") == (0, f"none of 4 plans fits, in {file.parent}\n", "")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("size", [0, 1, 2, 3]),
        ("-size", [3, 2, 1, 0]),
        ("-hits", [1, 3, 0, 2]),
        ("quality", [0, 3, 1, 2]),
        ("age", [3, 2, 1, 0]),
        ("-age", [0, 1, 2, 3]),
        ("used", [1, 3, 0, 2]),
        ("cudnn", [2, 0, 1, 3]),
        ("build", [0, 1, 2, 3]),
        ("tags", [2, 0, 1, 3]),
    ],
)
def test_a_column_sorts_by_what_it_means(run: Run, file: Path, column: str, expected: list[int]) -> None:
    """Numbers by value, qualities by rank, ages from the youngest, what was never used last; equals as they were built."""
    assert file.exists() and shown(run, f"--sort={column}") == expected


def test_columns_are_shown_as_they_are_asked_for(run: Run, file: Path) -> None:
    """In the order given, each with its own cell."""
    lines = run("ls", "--columns", "tags,hits,used,key,cudnn", "--sort=-hits").out.splitlines()
    assert lines[0].split() == ["TAGS", "HITS", "USED", "KEY", "CUDNN"]
    assert lines[1].split() == ["serve,", "train", "10", "0", "s", KEYS[1].hex[:12], "9.19.0"]
    assert lines[4].split() == ["0", "-", KEYS[2].hex[:12], "9.14.0"] and file.exists()


def test_every_column_can_be_shown_and_sorted_by(run: Run, file: Path) -> None:
    """The help names them all."""
    names = re.search(r"show these columns: ([\w, \n]+?)\s+--sort", run("ls", "--help").out)
    assert names is not None
    columns = re.findall(r"\w+", names[1])
    assert len(columns) == 18
    assert run("ls", "--columns", ",".join(columns)).out.count("\n") == 7
    assert all(sorted(shown(run, f"--sort={name}")) == [0, 1, 2, 3] for name in columns) and file.exists()


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("--sort", "hit"), "there are key, graph"),
        (("--sort", "-hits"), "--sort=-COLUMN"),
        (("--columns", "key,,"), "there are key, graph"),
        (("--shape", "8*"), "such as 8x64x56x56"),
        (("--newer-than", "1"), "such as 30d"),
        (("--larger-than", "much"), "such as 500MB"),
        (("--quality", "best"), "compiled"),
        (("--verdicts", "--dtype", "half"), "takes no columns, order or filters"),
    ],
)
def test_a_wish_that_makes_no_sense_is_one_line_with_the_cure(run: Run, file: Path, arguments: tuple[str, ...], cure: str) -> None:
    result = run("ls", *arguments)
    assert (result.code, result.out) == (2, "") and is_one_line(result.err) and cure in result.err and file.exists()


def test_a_bundles_plans_are_filtered_too_and_known_by_the_tags_of_both(
    run: Run, file: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the bundle says of programs, and what was counted beside it here."""
    bundle = cache_dir / "carried.sqlite3"
    bundle.write_bytes(file.read_bytes())
    seal(bundle, lock_timeout_s=20)
    file.unlink()
    with closing(Database(file, lock_timeout_s=20)) as database:
        database.upgrade()
        database.count_uses({KEYS[2].digest: 1}, 5.0, "here")
    monkeypatch.setenv("PLANCACHE_BUNDLES", str(bundle))
    assert (shown(run, "--tag", "here"), shown(run, "--tag", "train")) == ([2], [1, 3])
    assert json.loads(run("ls", "--json", "--tag", "here").out)[0]["sealed_in"] == str(bundle)
    assert run("ls", "--tag", "here").out.splitlines()[1].endswith(str(bundle))


# ---- how it is printed ----------------------------------------------------------------------------------------------


def on_terminal(arguments: list[str], **environment: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plancache", *arguments]
    done = subprocess.run(command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "64", **environment}, check=False)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.returncode == 0, said
    return said.decode().replace("\r\n", "\n")


def test_a_pipe_gets_whole_cells_and_no_one_gets_colours(run: Run, file: Path) -> None:
    """A terminal cuts the graph to its width; neither gets a control character, with or without NO_COLOR."""
    piped = run("ls").out
    assert "gelu_approx_tanh [20x3] float" in piped
    for environment in ({}, {"NO_COLOR": "1"}):
        seen = on_terminal(["ls", "--columns", "graph,device,device,device", "--cache-dir", str(file.parent)], **environment)
        assert "\x1b" not in seen + piped
        assert max(map(len, seen.splitlines()[:5])) <= 64 and "…" in seen


def test_json_is_one_entry_a_line(run: Run, file: Path) -> None:
    """As many as there are, for grep and for jq."""
    lines = run("ls", "--json").out.splitlines()
    assert (lines[0], lines[-1]) == ("[", "]") and file.exists()
    assert [json.loads(line.rstrip(","))["key"] for line in lines[1:-1]] == [one.hex for one in KEYS]


# ---- stats and show -------------------------------------------------------------------------------------------------


def test_stats_tells_seconds_by_environment_and_by_program(run: Run, file: Path) -> None:
    """Spent: of the builds; saved: hits times their builds, each program's own."""
    facts = json.loads(run("stats", "--json").out)
    assert facts["environments"] == [
        {"device": "NVIDIA H200", "driver_version": 13000, "cudnn_version": 91900, "frontend_version": "1.32.0"}
        | {"entries": 2, "build_s": 1.5, "hits": 10, "saved_s": 10.0},
        {"device": "NVIDIA H100", "driver_version": 13000, "cudnn_version": 91900, "frontend_version": "1.32.0"}
        | {"entries": 1, "build_s": 2.0, "hits": 1, "saved_s": 2.0},
        {"device": "NVIDIA H200", "driver_version": 13000, "cudnn_version": 91400, "frontend_version": "1.32.0"}
        | {"entries": 1, "build_s": 1.5, "hits": 0, "saved_s": 0},
    ]
    tags = [{name: value for name, value in row.items() if name != "last_used_at"} for row in facts["tags"]]
    assert tags == [
        {"tag": "serve", "entries": 2, "build_s": 1.5, "hits": 8, "saved_s": 8.0},
        {"tag": "train", "entries": 2, "build_s": 3.0, "hits": 3, "saved_s": 4.0},
    ]
    out = run("stats").out
    assert re.search(r"^  serve +2 +1\.5 s +8 +8\.0 s +2 d$", out, re.MULTILINE)
    assert re.search(r"^  NVIDIA H100 +13\.0 +9\.19\.0 +1\.32\.0 +1 +2\.0 s +1 +2\.0 s$", out, re.MULTILINE) and file.exists()


def test_stats_without_names_shows_no_programs(run: Run, file: Path) -> None:
    """Nor what was removed since."""
    for one in KEYS[:2]:
        run("rm", one.hex, "--yes")
    run("rm", KEYS[3].hex, "--yes")
    assert "by program" not in run("stats").out and json.loads(run("stats", "--json").out)["tags"] == [] and file.exists()


def test_show_says_which_programs_asked(run: Run, file: Path) -> None:
    """The last one first, each with its own hits."""
    out = run("show", KEYS[1].hex).out
    assert re.search(r"^  programs +train: 2 hits, last [^\n]+\n +serve: 8 hits, last [^\n]+\(2 d ago\)$", out, re.MULTILINE)
    assert json.loads(run("show", KEYS[1].hex, "--json").out)["tags"] == ["serve", "train"]
    assert "programs" not in run("show", KEYS[2].hex).out and file.exists()
