"""The commands that look after the store: what they show, what they remove and refuse, their exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commands import Result, Run, is_one_line
from samples import make_entry

from plancache import graphs
from plancache.cache import PlanCache
from plancache.cli import COMMANDS
from plancache.encoding import encode
from plancache.environment import Device
from plancache.errors import PlancacheWarning, StoreError
from plancache.key import PlanKey
from plancache.settings import Settings
from plancache.singleflight import SingleFlight
from plancache.store.connection import HEAD
from plancache.store.database import Database, Verdict
from plancache.store.sealed import seal

ROOT = Path(__file__).parents[1]
SIGNATURE = encode(1) + encode([None] * 6) + encode([None] * 3)
SIGNATURE += encode([[None, (2, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]])
SIGNATURE += encode([["POINTWISE", None, {"mode": "relu"}, {"IN_0": 1}, {"OUT_0": 1}]])
PLANS = 4
BUILD_S = (0.35, 0.75, 0.7, 0.45)  # the more they are worth the longer they stay, and no two are worth the same
KEYS = [
    PlanKey((SIGNATURE, b"{}", b'"NVIDIA H200"', b"%d" % (13000 + number), b'{"version":91900}', b'"1.32.0"', b"{}", b"{}"))
    for number in range(PLANS)
]


@pytest.fixture
def file(cache_dir: Path) -> Path:
    """The database of a cache directory with four plans, one built 40 days ago."""
    file = Settings.load(directory=cache_dir / "cache").database
    with closing(Database(file, lock_timeout_s=20)) as database:
        for number, key in enumerate(KEYS):
            age_s = 40 * 86400 if number == 0 else 60 * number
            timings_s = {"build": BUILD_S[number]}
            database.put(make_entry(key=key, created_at=time.time() - age_s, blob=os.urandom(5000), timings_s=timings_s))
        database.count_uses({KEYS[1].digest: 8}, time.time())
    return file


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same, with tables as wide as documents have them."""
    monkeypatch.setenv("COLUMNS", "80")
    return run


def stored(run: Run) -> list[str]:
    return [entry["key"] for entry in json.loads(run("ls", "--json").out)]


def change(file: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement, values)


def record(file: Path, kind: str, key: bytes, reason: str = "a reason") -> None:
    with closing(Database(file, lock_timeout_s=20)) as database:
        database.record(Verdict(kind, key, b"", reason, 1, time.time()))


def verdicts(run: Run, *kind: str) -> list[dict[str, Any]]:
    return json.loads(run("ls", "--verdicts", *kind, "--json").out)  # type: ignore[no-any-return]


# ---- all commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(run: Run, command: str) -> None:
    """Help is read in a terminal of the usual width."""
    out = run(command, "--help").out
    assert out and [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("typed", "meant"), [("vrify", "verify"), ("stat", "stats"), ("purg", "purge")])
def test_a_mistyped_command_is_told_what_was_meant(run: Run, typed: str, meant: str) -> None:
    """One line names the nearest command."""
    result = run(typed)
    assert result.code == 2 and is_one_line(result.err) and f"did you mean {meant}?" in result.err


@pytest.mark.parametrize("arguments", [("rm", "ab"), ("prune", "--all"), ("purge",)])
def test_what_removes_asks_and_without_a_terminal_refuses(run: Run, file: Path, arguments: tuple[str, ...]) -> None:
    """A script that did not say --yes removes nothing, and is told how to."""
    for more in ((), ("--json",)):
        result = run(*arguments, *more)
        assert result.code == 2 and is_one_line(result.err) and "--yes" in result.err and "--dry-run" in result.err
    assert len(stored(run)) == PLANS and file.exists()


@pytest.mark.parametrize("arguments", [("rm", "ab", "--yes"), ("rm", "--verdicts", "ab"), ("prune", "--all", "--yes"), ("upgrade",)])
@pytest.mark.parametrize("mode", ["readonly", "off"])
def test_nothing_is_changed_in_a_mode_that_stores_nothing(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, mode: str, arguments: tuple[str, ...]
) -> None:
    """PLANCACHE_MODE is named, and how to do it all the same."""
    monkeypatch.setenv("PLANCACHE_MODE", mode)
    before = file.read_bytes()
    result = run(*arguments)
    assert result.code == 2 and is_one_line(result.err) and f"the cache is {mode} (PLANCACHE_MODE)" in result.err
    assert file.read_bytes() == before


@pytest.mark.parametrize("arguments", [("rm", KEYS[0].hex, "--yes"), ("prune", "--all", "--yes"), ("purge", "--dry-run"), ("upgrade",)])
def test_a_sealed_directory_is_refused_with_the_cure(run: Run, file: Path, arguments: tuple[str, ...]) -> None:
    """A sealed file is never changed."""
    seal(file, lock_timeout_s=20)
    before = file.read_bytes()
    result = run(*arguments)
    assert result.code == 1 and is_one_line(result.err) and f"plancache seal --undo --cache-dir {file.parent}" in result.err
    assert file.read_bytes() == before


@pytest.mark.parametrize("arguments", [("rm", KEYS[0].hex), ("prune", "--all"), ("purge",)])
def test_a_directory_that_others_may_write_is_not_cleaned_up(run: Run, file: Path, arguments: tuple[str, ...]) -> None:
    """What is not trusted is not touched: the reason with its cure, and exit code 1."""
    file.parent.chmod(0o777)
    result = run(*arguments, "--yes")
    assert result.code == 1 and f"chmod go-w {file.parent}" in result.err and "nothing can be changed" in result.err
    file.parent.chmod(0o700)
    assert len(stored(run)) == PLANS


@pytest.mark.parametrize("arguments", [("ls",), ("stats",), ("verify",), ("ls", "--verdicts"), ("purge", "--dry-run")])
def test_looking_neither_changes_nor_moves_a_damaged_file(run: Run, file: Path, arguments: tuple[str, ...]) -> None:
    """Only what stores or removes puts a damaged file aside."""
    file.write_bytes(b"no database" * 1000)
    assert run(*arguments).code == 1
    assert file.read_bytes() == b"no database" * 1000 and not list(file.parent.glob("*.damaged*"))


@pytest.mark.parametrize("arguments", [("ls",), ("stats",), ("verify",), ("purge", "--yes"), ("prune", "--all", "--dry-run"), ("upgrade",)])
def test_an_empty_cache_is_no_error_and_is_not_made(run: Run, cache_dir: Path, arguments: tuple[str, ...]) -> None:
    """Commands say that there is nothing, and leave it so."""
    result = run(*arguments)
    assert (result.code, result.err) == (0, "") and str(cache_dir / "cache") in result.out
    assert not (cache_dir / "cache").exists()


@pytest.mark.parametrize("arguments", [("stats", "--json"), ("verify", "--json"), ("rm", "--dry-run", KEYS[0].hex), ("ls", "--verdicts")])
def test_looking_after_the_store_imports_nothing_heavy(file: Path, arguments: tuple[str, ...]) -> None:
    """No cuDNN, no torch, no SQLAlchemy."""
    heavy = "{'cudnn', 'torch', 'sqlalchemy', 'alembic', 'numpy'} & {name.partition('.')[0] for name in sys.modules}"
    code = f"import sys; from plancache.cli import main; code = main({list(arguments)!r}); sys.exit(code or {heavy} or 0)"
    environment = os.environ | {"PLANCACHE_DIR": str(file.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- stats ----------------------------------------------------------------------------------------------------------


def test_stats_sums_up_what_is_stored_and_what_it_saved(run: Run, file: Path) -> None:
    """Counts, bytes and seconds are those of the entries."""
    record(file, "struck", KEYS[0].digest)
    file.with_name(f"{file.name}.damaged").write_bytes(b"x" * 1234)
    shown = json.loads(run("stats", "--json").out)
    assert (shown["entries"], shown["hits"], shown["qualities"]) == (PLANS, 8, {"heuristic": PLANS})
    assert shown["build_s"] == pytest.approx(sum(BUILD_S)) and shown["saved_s"] == 8 * 0.75
    assert [(row["device"], row["driver_version"]) for row in shown["environments"]] == [("NVIDIA H200", 13000 + n) for n in range(PLANS)]
    assert shown["environments"][1]["saved_s"] == 8 * 0.75 and shown["tags"] == []
    assert shown["verdicts"] == {"struck": 1} and shown["damaged_file"] == {"path": f"{file}.damaged", "bytes": 1234}
    text = run("stats").out
    assert "8, which saved 6.0 s of building" in text and "1 struck" in text and "1.23 kB" in text and "2.00 GB at most (default)" in text


def test_stats_and_ls_tell_sealed_files_apart(run: Run, file: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a bundle is shown as such, by file."""
    assert "WHERE" not in run("ls").out
    bundle = cache_dir / "carried.sqlite3"
    bundle.write_bytes(file.read_bytes())
    seal(bundle, lock_timeout_s=20)
    run("rm", KEYS[0].hex, "--yes")
    monkeypatch.setenv("PLANCACHE_BUNDLES", str(bundle))
    shown = json.loads(run("stats", "--json").out)
    assert shown["entries"] == PLANS - 1 and [(each["path"], each["entries"]) for each in shown["sealed_files"]] == [(str(bundle), PLANS)]
    lines = run("ls").out.splitlines()
    assert lines[0].endswith("WHERE") and [line.split()[-1] for line in lines[1 : 2 * PLANS]] == ["directory"] * 3 + [str(bundle)] * PLANS
    listed = json.loads(run("ls", "--json").out)
    assert [entry.get("sealed_in") for entry in listed] == [None] * 3 + [str(bundle)] * PLANS


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_verify_finds_nothing_in_a_store_that_is_whole(run: Run, file: Path) -> None:
    """No problem, exit code 0."""
    assert file.exists() and run("verify") == (0, f"no problems found, {PLANS} plans checked\n", "")


def test_verify_names_each_damaged_row_and_a_cure_that_works(run: Run, file: Path) -> None:
    """What verify says is done, and then nothing is wrong; the whole rows stay."""
    change(file, "UPDATE entries SET payload = substr(payload, 1, 9) WHERE key = ?", KEYS[2].digest)
    change(file, "UPDATE entries SET preimage = x'00' WHERE key = ?", KEYS[3].digest)
    result = run("verify")
    assert result.code == 1 and "2 problems found" in result.out
    cures = re.findall(r"cure: plancache (rm \w+ --cache-dir [^;]+);", result.out)
    assert len(cures) == 2
    for cure in cures:
        assert run(*cure.split(), "--yes").code == 0
    assert run("verify").code == 0 and len(stored(run)) == PLANS - 2


def test_verify_that_should_load_wants_a_gpu(file: Path) -> None:
    """Without one it is wrong usage, and says what to leave out."""
    pytest.importorskip("cudnn")
    environment = os.environ | {"PLANCACHE_DIR": str(file.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "plancache", "verify", "--load"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and is_one_line(done.stderr) and "leave it out" in done.stderr


def test_a_row_whose_key_is_no_key_is_found_and_goes_with_a_purge(run: Run, file: Path) -> None:
    """SQLite takes any type in any column: such a row blocks neither a look nor a removal."""
    change(file, "UPDATE entries SET key = 'text' WHERE key = ?", KEYS[2].digest)
    result = run("verify")
    assert result.code == 1 and "'text'" in result.out and "plancache purge" in result.out
    assert run("rm", KEYS[0].hex, "--yes").code == 0 and len(stored(run)) == PLANS - 2
    assert run("purge", "--yes").code == 0 and run("verify").code == 0


def test_verify_tells_what_becomes_of_a_damaged_file(run: Run, file: Path) -> None:
    """A file that is no database is one finding, with what puts it aside."""
    file.write_bytes(b"no database" * 1000)
    result = run("verify", "--json")
    shown = json.loads(result.out)
    assert result.code == 1 and shown["checked"] == 0 and len(shown["findings"]) == 1
    finding = shown["findings"][0]
    assert finding["key"] is None and "not a database" in finding["problem"] and f"{file.name}.damaged" in finding["cure"]


def test_verify_finds_a_damaged_row_of_a_sealed_file(run: Run, file: Path) -> None:
    """Its cure is another file: rows of sealed ones are not removed."""
    change(file, "UPDATE entries SET payload = x'00' WHERE key = ?", KEYS[2].digest)
    seal(file, lock_timeout_s=20)
    shown = json.loads(run("verify", "--json").out)
    assert [finding["key"] for finding in shown["findings"]] == [KEYS[2].hex] and "anew" in shown["findings"][0]["cure"]


# ---- rm -------------------------------------------------------------------------------------------------------------


def test_rm_removes_what_was_named_and_says_what_it_freed(run: Run, file: Path) -> None:
    """By the beginning of the key; a dry run shows the same and removes nothing."""
    foretold = json.loads(run("rm", KEYS[1].hex[:10], KEYS[2].hex, "--dry-run", "--json").out)
    assert len(stored(run)) == PLANS and foretold["dry_run"] is True
    done = json.loads(run("rm", KEYS[1].hex[:10], KEYS[2].hex, "--yes", "--json").out)
    assert {one["key"] for one in done["removed"]} == {one["key"] for one in foretold["removed"]} == {KEYS[1].hex, KEYS[2].hex}
    assert done["freed_bytes"] == foretold["freed_bytes"] > 10_000 and done["skipped"] == []
    assert stored(run) == [KEYS[0].hex, KEYS[3].hex] and file.exists()


@pytest.mark.parametrize("key", ["zz", ""], ids=["unknown", "ambiguous"])
def test_rm_of_no_plan_or_several_removes_none(run: Run, file: Path, key: str) -> None:
    """One wrong key, and none of the others goes."""
    result = run("rm", KEYS[0].hex, key, "--yes")
    assert result.code == 1 and is_one_line(result.err) and "plancache ls" in result.err
    assert len(stored(run)) == PLANS and file.exists()


def test_rm_skips_a_plan_that_is_being_built_unless_forced(run: Run, file: Path) -> None:
    """Its builder's lock is asked; exit code 1 says that it stayed."""
    flight = SingleFlight(file.parent / "locks", timeout_s=20, on_fault=pytest.fail)
    with flight.building(KEYS[1].digest):
        result = run("rm", KEYS[1].hex, "--yes")
        assert result.code == 1 and "skipped 1 plan" in result.out and "--force" in result.out and len(stored(run)) == PLANS
        assert run("rm", KEYS[1].hex, "--yes", "--force").code == 0
    assert len(stored(run)) == PLANS - 1


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, PLANS - 1), ("n", 1, PLANS), ("", 1, PLANS)])
def test_rm_asks_on_a_terminal(run: Run, file: Path, answer: str, code: int, left: int) -> None:
    """Only a yes removes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plancache", "rm", KEYS[0].hex]
    environment = os.environ | {"PLANCACHE_DIR": str(file.parent)}
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, env=environment, text=True) as process:
        os.write(ours, f"{answer}\n".encode())
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "relu [2x3]" in out and re.search(r"remove 1 plan, [\d.]+ kB\? \[y/N\] ", out)
    assert process.returncode == code and len(stored(run)) == left and ("nothing was removed" in out) == bool(code)


def test_rm_verdicts_lifts_what_is_known_and_leaves_the_plan(run: Run, file: Path) -> None:
    """What ls lists is lifted, of that key only."""
    record(file, "struck", KEYS[0].digest)
    record(file, "unsupported without a GPU", KEYS[0].digest)
    record(file, "unsupported", b"\xab" * 32)
    assert run("rm", "--verdicts", "abab", "--dry-run").code == 0 and len(verdicts(run)) == 3
    result = run("rm", "--verdicts", KEYS[0].hex[:12], KEYS[0].hex)
    assert result.code == 0 and "lifted 2 verdicts" in result.out
    assert [verdict["kind"] for verdict in verdicts(run)] == ["unsupported"] and len(stored(run)) == PLANS


@pytest.mark.parametrize(("key", "said"), [("zz", "nothing is known"), ("ab", "2 keys")])
def test_rm_verdicts_of_an_unknown_or_ambiguous_key_lifts_none(run: Run, file: Path, key: str, said: str) -> None:
    """One line with the cure."""
    record(file, "struck", b"\xab" * 32)
    record(file, "struck", b"\xab\xcd" * 16)
    result = run("rm", "--verdicts", key)
    assert result.code == 1 and is_one_line(result.err) and said in result.err and "plancache ls --verdicts" in result.err
    assert len(verdicts(run)) == 2


# ---- ls --verdicts --------------------------------------------------------------------------------------------------


def test_ls_verdicts_shows_why_in_one_line_and_how_to_lift(run: Run, file: Path) -> None:
    """The graph where an entry of that key is stored, cuDNN's long answer cut to its first reason."""
    record(file, "struck", KEYS[0].digest, "load: process 7 died")
    record(file, "unsupported", b"\xab" * 32, "no plan (the backend declined: for _\nWarning: X; Reason: types\n")
    out = run("ls", "--verdicts").out
    assert re.search(rf"^struck +{KEYS[0].hex[:12]} +relu \[2x3\] +load: process 7 died +1 +0 s$", out, re.MULTILINE)
    assert re.search(r"^unsupported +abababababab +- +no plan; first check that failed: types +1 +0 s$", out, re.MULTILINE)
    assert "plancache rm --verdicts KEY" in out


def test_ls_verdicts_of_a_kind(run: Run, file: Path) -> None:
    """Those of builds without a GPU are unsupported too; a mistyped kind is told what was meant."""
    record(file, "struck", KEYS[0].digest)
    record(file, "unsupported without a GPU", KEYS[1].digest)
    assert [verdict["key"] for verdict in verdicts(run, "unsupported")] == [KEYS[1].hex]
    assert verdicts(run, "denied") == [] and run("ls", "--verdicts", "denied").code == 0
    result = run("ls", "--verdicts", "strck")
    assert result.code == 2 and is_one_line(result.err) and "did you mean struck?" in result.err


# ---- prune and purge ------------------------------------------------------------------------------------------------


def test_prune_wants_to_know_what_is_to_go(run: Run, file: Path) -> None:
    """No filter is wrong usage, and so is a bound that leaves nothing."""
    for arguments, cure in (((), "--older-than"), (("--max-bytes", "0"), "--all"), (("--older-than", "5x"), "90min")):
        result = run("prune", *arguments, "--yes")
        assert result.code == 2 and is_one_line(result.err) and cure in result.err
    assert len(stored(run)) == PLANS and file.exists()


@pytest.mark.parametrize(
    ("filters", "gone"),
    [
        (("--older-than", "30d"), [0]),
        (("--unused-since", "90s"), [0, 2, 3]),  # 1 was used just now
        (("--older-than", "960h", "--unused-since", "2.5min"), [0, 3]),
        (("--max-bytes", "12kB"), [0, 3]),
        (("--older-than", "6w"), []),
        (("--all",), [0, 1, 2, 3]),
    ],
)
def test_prune_removes_what_its_filters_name(run: Run, file: Path, filters: tuple[str, ...], gone: list[int]) -> None:
    """Ages, last use and bytes; the dry run names the same plans."""
    foretold = {one["key"] for one in json.loads(run("prune", *filters, "--dry-run", "--json").out)["removed"]}
    assert foretold == {KEYS[number].hex for number in gone} and len(stored(run)) == PLANS
    assert run("prune", *filters, "--yes").code == 0
    assert set(stored(run)) == {key.hex for key in KEYS} - foretold and file.exists()


def test_prune_shows_a_sensible_number_of_lines(run: Run, file: Path) -> None:
    """Of many plans the rest is counted."""
    with closing(Database(file, lock_timeout_s=20)) as database:
        for number in range(60):
            database.put(make_entry(key=PlanKey((*KEYS[0].preimages[:3], b"%d" % number, *KEYS[0].preimages[4:]))))
    out = run("prune", "--all", "--dry-run").out
    assert len(out.splitlines()) < 30 and "and 46 plans more" in out and "would remove 64 plans" in out


def test_purge_removes_everything_and_says_how_to_remove_the_rest(run: Run, file: Path) -> None:
    """Plans, verdicts and the damaged file; the plan of it tells all three, and a dry run leaves them."""
    record(file, "unsupported", b"\xab" * 32)
    damaged = file.with_name(f"{file.name}.damaged")
    damaged.write_bytes(b"x" * 1234)
    out = run("purge", "--dry-run").out
    assert "4 plans" in out and "1 verdict" in out and f"{damaged.name}, 1.23 kB" in out and damaged.exists() and len(verdicts(run)) == 1
    size = file.stat().st_size
    result = run("purge", "--yes")
    assert result.code == 0 and result.out.endswith(f"rm -r {file.parent}\n")
    assert stored(run) == [] and verdicts(run) == [] and not damaged.exists() and file.stat().st_size < size


def test_purge_of_a_damaged_database_puts_it_aside_and_removes_it(run: Run, file: Path) -> None:
    """One command is enough."""
    file.write_bytes(b"no database" * 1000)
    result = run("purge", "--yes")
    assert result.code == 0 and "11.0 kB" in result.out
    assert [each for each in file.parent.iterdir() if each.name.startswith("plans-")] == []


# ---- upgrade and seal -----------------------------------------------------------------------------------------------


def test_upgrade_says_from_and_to_and_that_there_is_nothing_to_do(run: Run, cache_dir: Path, file: Path) -> None:
    """A file of the first revision is brought to this version's, with its plans."""
    for name in ("verdicts", "compatibility", "tags"):
        change(file, f"DROP TABLE {name}")
    change(file, "UPDATE alembic_version SET version_num = '0001_entries'")
    assert f"from 0001_entries to {HEAD}" in run("upgrade").out and len(stored(run)) == PLANS
    assert f"nothing to upgrade: {file} is at {HEAD}" in run("upgrade").out
    change(file, "UPDATE alembic_version SET version_num = '9999_later'")
    assert "a newer plancache made" in run("upgrade").out
    change(file, "UPDATE compatibility SET min_reader = 9999")
    result = run("upgrade")
    assert result.code == 1 and "install that version" in result.err and cache_dir.exists()


def test_seal_is_a_command_and_is_undone(run: Run, file: Path) -> None:
    """Sealed, the plans are listed all the same."""
    assert run("seal").code == 0 and len(stored(run)) == PLANS and "(sealed)" in run("ls").out
    assert run("seal", "--undo").code == 0 and len(stored(run)) == PLANS and file.exists()


# ---- warm and doctor ------------------------------------------------------------------------------------------------


def test_warm_where_builds_are_barred_names_the_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming is building: wrong usage, with the cure."""
    monkeypatch.setenv("PLANCACHE_BUILD", "forbid")
    result = run("warm", "plancache.graphs:examples", "--device", "h200")
    assert result.code == 2 and is_one_line(result.err) and "env -u PLANCACHE_BUILD plancache warm" in result.err


@pytest.mark.parametrize("name", ["h20", "H200", "h2000"])
def test_warm_for_a_mistyped_device_is_told_what_was_meant(run: Run, name: str) -> None:
    """A slip in the name of a device file that the package ships."""
    pytest.importorskip("cudnn")
    result = run("warm", "plancache.graphs:examples", "--device", name)
    assert result.code == 2 and is_one_line(result.err) and "did you mean h200" in result.err


def test_doctor_looks_at_verdicts_sealed_files_and_bundles(run: Run, file: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of what can be used, and a problem for what cannot."""
    pytest.importorskip("cudnn")
    record(file, "struck", KEYS[0].digest)
    bundle, missing = cache_dir / "carried.sqlite3", cache_dir / "missing.sqlite3"
    bundle.write_bytes(file.read_bytes())
    seal(bundle, lock_timeout_s=20)
    monkeypatch.setenv("PLANCACHE_BUNDLES", f"{bundle}:{missing}")
    shown = json.loads(run("doctor", "--json").out)
    assert shown["store"]["verdicts"] == {"struck": 1}
    assert shown["store"]["bundle carried.sqlite3"] == {"path": str(bundle), "entries": PLANS}
    assert [problem for problem in shown["problems"] if str(missing) in problem]
    seal(file, lock_timeout_s=20)
    shown = json.loads(run("doctor", "--json").out)
    assert shown["store"]["sealed"] == {"path": str(file), "entries": PLANS}
    assert not [problem for problem in shown["problems"] if str(file) in problem]
    assert shown["building_without_a_gpu"]["device file h200"] == Device.from_file("h200").cudnn_version


# ---- scripts --------------------------------------------------------------------------------------------------------


def script(name: str, *arguments: str) -> Result:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PLANCACHE_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["inspect_cache.py", "purge_cache.py", "prewarm.py"])
def test_a_script_says_how_it_is_used_and_is_short(name: str) -> None:
    """They are starting points: read in a minute."""
    assert f"python scripts/{name}" in script(name, "--help").out
    assert len((ROOT / "scripts" / name).read_text().splitlines()) < 60


def test_inspect_and_purge_by_script(run: Run, file: Path) -> None:
    """The one sums up, the other removes what has a word in its summary, when told to."""
    place = ("--cache-dir", str(file.parent))
    assert "NVIDIA H200: 4 plans" in script("inspect_cache.py", *place).out
    assert "nothing to remove" in script("purge_cache.py", *place, "--graph", "sdpa", "--yes").out
    assert "would remove 4 plans" in script("purge_cache.py", *place, "--graph", "relu").out and len(stored(run)) == PLANS
    assert "removed 4 plans" in script("purge_cache.py", *place, "--device", "NVIDIA H200", "--yes").out and stored(run) == []
    assert script("purge_cache.py", *place).code == 2


def test_prewarm_by_script(run: Run, cache_dir: Path) -> None:
    """It fills a directory that other processes then find."""
    pytest.importorskip("cudnn")
    result = script("prewarm.py", "--device", "h200", "--cache-dir", str(cache_dir / "cache"))
    assert result.code == 0, result.err
    assert "3 plans in" in result.out and len(stored(run)) == 3


# ---- the limit of what is stored ------------------------------------------------------------------------------------


def convolution(height: int) -> Any:
    """Its engine is precompiled: built in milliseconds."""
    return graphs.conv_bias_relu(batch=2, in_channels=32, out_channels=32, height=height, width=14).graph


def used_bytes(file: Path) -> int:
    with closing(sqlite3.connect(file)) as connection:
        pages, free, page_bytes = connection.execute(
            "SELECT page_count, freelist_count, page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        ).fetchone()
    return int((pages - free) * page_bytes)


@pytest.mark.parametrize("max_bytes", [80_000, 0])
def test_a_cache_keeps_to_its_limit_and_the_newest_plan_survives(cache_dir: Path, device: Device, max_bytes: int) -> None:
    """Each put is followed by what makes room for it; 0 is no limit."""
    pytest.importorskip("cudnn")
    with PlanCache(cache_dir, device=device, max_bytes=max_bytes) as cache:
        for height in range(14, 22):
            plan = cache.plan(convolution(height))
            assert plan.entry is not None
            found = {entry.key for entry in cache.entries()}
            assert plan.entry.key in found
            assert not max_bytes or used_bytes(cache.settings.database) <= max_bytes
        assert len(found) == 8 if not max_bytes else 1 <= len(found) < 8


def test_what_cannot_be_kept_to_its_limit_is_stored_all_the_same(
    cache_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A put is done once it is done: making room never fails it."""
    pytest.importorskip("cudnn")
    from plancache.store import retention

    def full(*_: object, **__: object) -> None:
        raise StoreError("disk I/O error")

    monkeypatch.setattr(retention, "retain", full)
    with PlanCache(cache_dir, device=device, max_bytes=1, strict=True) as cache:
        cache.plan(convolution(14))
        assert cache.statistics().stored == 1 and len(cache.entries()) == 1
    assert "could not be kept to its limit" in caplog.text


def test_a_damaged_row_is_listed_around_with_a_warning(cache_dir: Path, file: Path) -> None:
    """Shelves leave out what cannot be read, as entries do."""
    change(file, "UPDATE entries SET facts = x'00' WHERE key = ?", KEYS[0].digest)
    with PlanCache(cache_dir / "cache") as cache, pytest.warns(PlancacheWarning):
        assert [len(shelf.entries) for shelf in cache.shelves()] == [PLANS - 1]
