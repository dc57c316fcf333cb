"""`plancache tune`, and how `show` and `ls` tell what tuning brought, on a made-up GPU."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benches import FAKES, MadeUpBench, TunableGpu
from commands import Result, Run, is_one_line
from faking import product
from isolated_gpu import TARGET, script
from test_autotune import Fake

import plancache.target
import plancache.tuner
from plancache import PlanCache
from plancache.cli import trials
from plancache.cli.progress import Progress
from plancache.entry import Trial, unpack
from plancache.environment import Device
from plancache.settings import Settings
from plancache.store.database import Database
from plancache.store.sealed import seal

pytest.importorskip("cudnn")

CONDITIONS = {
    "measure": "eager",
    "before": {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "sm_clock_max_mhz": 1980,
        "throttled": False,
        "other_processes": 0,
        "mig": False,
    },
    "after": {
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 3201,
        "sm_clock_max_mhz": 1980,
        "throttled": True,
        "other_processes": 2,
        "mig": False,
    },
    "quiet": False,
}


class Machine:
    """A machine with a made-up GPU, for every cache that is opened on it."""

    def __init__(self) -> None:
        self.fakes: list[Fake] = list(FAKES)
        self.when: Any = lambda _, __: None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine, gpu = Machine(), Device(Device.from_file("h200").properties, None, 0)

    class Target(plancache.target.DeviceTarget):
        def __init__(self, device: Device) -> None:
            super().__init__(device)
            made_up = TunableGpu(self.backend, machine.fakes)
            made_up.when = machine.when
            self.backend = self.builder = made_up  # type: ignore[assignment]

    monkeypatch.setattr(plancache.target, "DeviceTarget", Target)
    monkeypatch.setattr(plancache.target, "current_ordinal", lambda: 0)
    monkeypatch.setattr(Device, "current", classmethod(lambda *_: gpu))
    monkeypatch.setattr(plancache.tuner, "Workbench", MadeUpBench)
    return machine


@pytest.fixture
def plans(run: Run, machine: Machine) -> list[str]:  # noqa: ARG001  # what it is made with
    """The keys of two plans that are stored for the machine's GPU, untuned."""
    with PlanCache() as cache:
        return [entry.key.hex for entry in (cache.plan(product(size)).entry for size in (16, 17)) if entry is not None]


def listed(run: Run) -> list[dict[str, Any]]:
    return json.loads(run("ls", "--json").out)  # type: ignore[no-any-return]


def program(*arguments: str, directory: Path, **environment: str) -> Result:
    environment = os.environ | {"PLANCACHE_DIR": str(directory), "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run([sys.executable, "-m", "plancache", *arguments], env=environment, capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


# ---- tune


def test_tune_upgrades_all_untuned_plans_and_tells_what_was_won(run: Run, plans: list[str]) -> None:  # noqa: ARG001  # what is stored
    """Engine and time before and after, gain, proof; then there is nothing left to do."""
    result = run("tune")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["GRAPH", "ENGINE", "->", "ENGINE", "US", "->", "US", "GAIN", "PROOF", "S"]
    for line in lines[1:3]:
        assert re.search(r"matmul .*  eng0  +eng1  +50\.\d  +(19|20)\.\d  +2\.[45]\dx  agrees with eng0  +\d\.\d$", line)
    assert re.search(r"^2 plans tuned in .*, 2\.[45]\d times as fast as before \(geometric mean\)$", lines[-1])
    assert [(entry["quality"], entry["engine"], entry["proof"]) for entry in listed(run)] == [("tuned", "eng1", "agrees with eng0")] * 2
    assert [entry["time_us"] for entry in listed(run)] == pytest.approx([20, 20], rel=0.05)
    assert [line.split()[-8] for line in run("ls").out.splitlines()[1:3]] and run("ls").out.count(" tuned ") == 2
    again = run("tune")
    assert again.code == 0 and "nothing to tune" in again.out and "--refresh" in again.out


def test_tune_takes_single_plans_and_refresh(run: Run, plans: list[str], machine: Machine) -> None:
    """By the beginning of the key; what is tuned only when told to."""
    assert run("tune", plans[0][:12]).code == 0
    assert sorted(entry["quality"] for entry in listed(run)) == ["heuristic", "tuned"]
    assert "these plans are tuned" in run("tune", plans[0]).out
    machine.fakes = [*FAKES[:2], Fake("eng2", 5)]
    shown = json.loads(run("tune", plans[0], "--refresh", "--json").out)
    assert (shown["tuned"], shown["failed"], shown["not_stored"], shown["dry_run"]) == (1, 0, 0, False)
    (plan,) = shown["plans"]
    assert (plan["engine_before"], plan["engine"], plan["reason"], plan["failed"]) == ("eng1", "eng2", None, False)
    assert plan["gain"] == pytest.approx(4, rel=0.1) == shown["mean_gain"] and plan["time_before_us"] > plan["time_us"] > 4
    unknown = run("tune", "zz")
    assert unknown.code == 1 and is_one_line(unknown.err) and "plancache ls" in unknown.err


def test_tune_by_operation(run: Run, plans: list[str]) -> None:
    """One that no plan has is told with those that there are."""
    result = run("tune", "--operation", "conv_fprop")
    assert result.code == 1 and is_one_line(result.err) and "there are matmul" in result.err
    assert "2 plans tuned" in run("tune", "--operation", "matmul").out and plans


def test_tune_dry_run_shows_what_would_be_tuned(run: Run, plans: list[str]) -> None:
    """Nothing is built or stored."""
    result = run("tune", "--dry-run")
    assert result.code == 0 and "would tune 2 plans" in result.out and all(key[:12] in result.out for key in plans)
    assert [plan["key"] for plan in json.loads(run("tune", "--dry-run", "--json").out)["plans"]] == plans
    assert [entry["quality"] for entry in listed(run)] == ["heuristic"] * 2


def test_tune_goes_on_after_one_that_has_no_right_plan_and_exits_with_1(run: Run, plans: list[str], machine: Machine) -> None:
    """The reason is told; so is why others stay as they are."""
    machine.fakes = [Fake("eng0", 50, output="leaves a row")]
    result = run("tune")
    assert result.code == 1 and result.out.count("failed: ") == 2 and "unwritten" in result.out
    assert result.out.splitlines()[-1].endswith("; 2 failed") and listed(run) == []
    assert len(json.loads(run("ls", "--verdicts", "denied", "--json").out)) == len(plans)  # of two families


def test_tune_tells_how_many_stay_as_they_are_and_why(run: Run, plans: list[str]) -> None:
    """Exit code 0: nothing failed."""
    result = run("tune", "--total-budget", "0")
    assert result.code == 0 and result.out.endswith("; 2 stay as they are: the budget for all graphs was spent\n") and plans
    assert json.loads(run("tune", "--total-budget", "0", "--json").out)["mean_gain"] is None


def test_tune_that_cannot_store_exits_with_1(run: Run, plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was won is shown, and that it is not kept."""
    from plancache.errors import StoreError

    def full(*_: object, **__: object) -> None:
        raise StoreError("disk I/O error")

    monkeypatch.setattr(Database, "put", full)
    result = run("tune", plans[0])
    assert result.code == 1 and "disk I/O error" in result.err and result.out.endswith("1 plan could not be stored\n")


def test_tune_interrupted_tells_what_is_done(run: Run, plans: list[str], machine: Machine) -> None:
    """And exits with 130; what is done is stored."""
    runs: list[str] = []

    def interrupt(step: str, name: str) -> None:
        runs.append(name)
        if step == "run" and [entry for entry in listed_quietly() if entry == "tuned"]:
            raise KeyboardInterrupt

    def listed_quietly() -> list[str]:
        with closing(Database(Settings.load().database, lock_timeout_s=20)) as database:
            return [json.loads(row.facts)["quality"] for row in database.listing()]

    machine.when = interrupt
    result = run("tune")
    assert result.code == 130 and "1 plan tuned" in result.out
    assert sorted(entry["quality"] for entry in listed(run)) == ["heuristic", "tuned"] and runs and plans


def test_tune_in_isolation_goes_on_where_a_candidate_ends_the_process(
    run: Run, plans: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash and the one that hangs end a child each; this command tells what won, and what is not tried again."""
    import plancache.isolated

    deeds = {"run_eng1_1": "kill", "load_eng2_1": "hang"}
    for name, value in script(tmp_path, *FAKES, Fake("eng3", 40), **deeds).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plancache.isolated, "TARGET", TARGET)
    result = run("tune", plans[0], "--isolate", "--candidate-limit", "2")
    assert result.code == 0 and re.search(r"eng0  +eng3 .* 1\.2\dx ", result.out)
    candidates = {trial["name"]: trial["reason"] for trial in json.loads(run("show", plans[0], "--json").out)["trials"]}
    assert "killed by signal 9" in candidates["eng1"] and "within 2 s" in candidates["eng2"]
    (struck,) = [one for one in json.loads(run("ls", "--verdicts", "struck", "--json").out) if one["count"] > 1]
    assert "hung" in struck["reason"]


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("--device", "h200"), "there is nothing to tune for a device file"),
        (("--jobs", "-1"), "0 (compile in this one)"),
        (("--budget", "soon"), "90min"),
        (("--measure", "both"), "eager"),
        (("--candidate-limit", "soon"), "90min"),
        (("--candidate-limit", "0"), "from 1 to"),
    ],
)
def test_tune_wrongly_used_is_one_line_and_exits_with_2(run: Run, arguments: tuple[str, ...], cure: str) -> None:
    """A device file too: it has no GPU to run on."""
    result = run("tune", *arguments)
    assert result.code == 2 and is_one_line(result.err) and cure in result.err


def test_tune_where_nothing_may_be_built_or_stored_names_the_variable(run: Run, plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PLANCACHE_BUILD and PLANCACHE_MODE bar it, and so does a seal."""
    for name, value in (("PLANCACHE_BUILD", "forbid"), ("PLANCACHE_MODE", "readonly")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            result = run("tune")
            assert result.code == 2 and is_one_line(result.err) and f"env -u {name}" in result.err
    seal(Settings.load().database, lock_timeout_s=20)
    result = run("tune")
    assert result.code == 1 and is_one_line(result.err) and "seal --undo" in result.err and plans


@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--json",)])
def test_tune_without_a_gpu_is_the_usual_error(cache_dir: Path, arguments: tuple[str, ...]) -> None:
    """One line, exit code 1."""
    result = program("tune", *arguments, directory=cache_dir / "cache")
    assert result.code == 1 and is_one_line(result.err) and "GPU" in result.err and not (cache_dir / "cache").exists()


def test_progress_is_one_line_with_the_time_that_is_left() -> None:
    """Looked at and decided count a half each; the line goes when all is done."""
    now, said = [0.0], []
    progress = Progress(4, said.append, lambda: now[0], word="tuned", steps=2)
    for seconds in (10, 20):
        now[0] = seconds
        progress.step()
    progress.one()
    assert [text.removeprefix("\r\x1b[K") for text in said] == [
        "0 of 4 tuned",
        "0 of 4 tuned, about 1 min left",
        "0 of 4 tuned, about 1 min left",
        "1 of 4 tuned, about 1 min left",
    ]
    progress.end()
    assert said[-1] == "\r\x1b[K"


# ---- show


def trial(number: int, result: str, time_us: float | None = None, reason: str = "") -> Trial:
    timed = time_us is not None and result not in ("pruned",)
    edges = (time_us - 0.2, time_us + 0.4) if time_us is not None and timed else (None, None)
    built = result not in ("skipped", "failed")
    return Trial(f"eng{number}_k2={number}", number, {}, number, 0.25, 2048 if built else None, time_us, *edges, 40 * timed, result, reason)


def many() -> tuple[Trial, ...]:
    """45 candidates, as a convolution has."""
    own = [
        trial(0, "tied", 20.4),
        trial(1, "won", 20.0),
        trial(2, "slower", 40.0, "slower after 12 runs"),
        trial(3, "wrong", 10.0, "differs"),
    ]
    pruned = [trial(number, "pruned", 100.0 + number, "far slower at its first run") for number in range(4, 34)]
    failed = [trial(number, "failed", None, "RuntimeError: CUDNN_STATUS_NOT_SUPPORTED") for number in range(34, 44)]
    return (*own, *pruned, *failed, trial(44, "skipped", None, "the budget was spent"))


def store_tuned(directory: Path, found: tuple[Trial, ...], **more: Any) -> str:
    """A tuned entry of a real graph: that of the oldest file that is kept."""
    (past,) = (Path(__file__).parent / "databases").glob("0001*")
    copy = directory.with_name("past.sqlite3")
    copy.write_bytes(past.read_bytes())
    with (
        closing(Database(copy, lock_timeout_s=20)) as old,
        closing(Database(Settings.load(directory=directory).database, lock_timeout_s=20)) as new,
    ):
        row = old.get(next(old.listing()).key)
        assert row is not None
        entry = unpack(row)
        facts = {"quality": "tuned", "proof": "agrees with eng0", "tolerance": 0.004, "created_at": 1.0, "trials": found, **more}
        new.put(replace(entry, recipe=entry.recipe._replace(name=found[1].name), **facts))
    return entry.key.hex


def test_show_groups_many_candidates_and_all_shows_each(run: Run, cache_dir: Path) -> None:
    """Those that were in the race in full, the winner first; the others as counts, or in full with their reasons."""
    key = store_tuned(cache_dir / "cache", many(), conditions=CONDITIONS)
    out = run("show", key).out
    listing = out[out.index("candidates (") :].splitlines()
    assert listing[0] == "candidates (45 engine configurations: 1 won, 1 tied, 1 slower, 1 wrong, 30 pruned, 10 failed, 1 skipped)"
    assert [line.split()[0] for line in listing[2:6]] == ["won", "tied", "slower", "wrong"]
    assert re.match(r"  won     20\.0 ±0\.3       250    2\.05 kB  █+ +eng1_k2=1$", listing[2])
    assert (
        listing[4].endswith("eng2_k2=2: slower after 12 runs") and listing[6] == "  and 30 pruned, 10 failed, 1 skipped: --all shows them"
    )
    assert len(listing) == 7
    everything = run("show", key, "--all").out
    listing = everything[everything.index("candidates (") :].splitlines()
    assert len(listing) == 2 + 45 and "eng44_k2=44: the budget was spent" in listing[-1] and "CUDNN_STATUS_NOT_SUPPORTED" in listing[-2]


def test_show_tells_proof_tolerance_and_the_state_of_the_gpu(run: Run, cache_dir: Path) -> None:
    """What makes the times doubtful is seen at once; what nobody could tell says so."""
    key = store_tuned(cache_dir / "cache", many(), conditions=CONDITIONS)
    out = run("show", key).out
    for line in (
        r"proof +agrees with eng0, tolerance 0\.004",
        r"run time +20\.0 us",
        r"date +1970-01-01 .*",
        r"measured +single runs, each with a cold L2",
        r"SM clock +1980 to 1755 MHz \(at most 1980\)",
        r"memory clock +3201 MHz",
        r"throttled +yes",
        r"other processes +2",
        r"MIG +no",
        r"quiet +no: the times are doubtful",
    ):
        assert re.search(rf"^  {line}$", out, re.MULTILINE), (line, out)
    assert re.findall(r"not known", "\n".join(value for _, value in trials.conditions({}))) == ["not known"] * 6


def test_show_json_has_all_that_was_learned(run: Run, cache_dir: Path) -> None:
    """Every trial, whatever is shown to people."""
    key = store_tuned(cache_dir / "cache", many(), conditions=CONDITIONS)
    shown = json.loads(run("show", key, "--json").out)
    assert len(shown["trials"]) == 45 and shown["trials"][1] == many()[1]._asdict()
    assert (shown["conditions"], shown["proof"], shown["tolerance"], shown["time_us"]) == (CONDITIONS, "agrees with eng0", 0.004, 20.0)


def test_show_of_an_untuned_plan_shows_no_tuning(run: Run, plans: list[str]) -> None:
    """There is nothing to tell."""
    out = run("show", plans[0]).out
    assert "\ntuning\n" not in out and "run time" not in out
    shown = json.loads(run("show", plans[0], "--json").out)
    assert (shown["trials"], shown["conditions"], shown["time_us"]) == ([], {}, None)


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_bars_scale_with_the_terminal_and_stay_aligned(cache_dir: Path, columns: int) -> None:
    """On a real terminal no line is wider than it, each bar begins in the same column, and its length is the time's."""
    key = store_tuned(cache_dir / "cache", many())
    ours, theirs = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                said.append(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = os.environ | {"PLANCACHE_DIR": str(cache_dir / "cache"), "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}
    subprocess.run([sys.executable, "-m", "plancache", "show", key, "--all"], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    reader.join()
    os.close(ours)
    out = b"".join(said).decode()
    listing = out[out.index("candidates (") :].splitlines()[2:]
    assert len(listing) == 45 and max(map(len, listing)) <= columns
    bars = [(line.index("█"), line.count("█")) for line in listing if "█" in line]
    assert len({start for start, _ in bars}) == 1 and len(bars) == 34
    longest = max(length for _, length in bars)
    assert longest >= 10 and (longest > 20) == (columns == 160)
    assert bars[0][1] == max(1, round(longest * 20.0 / 133.0))
    engines = {line.index("eng") for line in listing if "eng" in line}
    assert len(engines) == 1
