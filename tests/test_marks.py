"""Marks: a step that its process did not outlive is recorded once, and nothing else is."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from plancache import marks as module
from plancache.marks import Casualty, Marks

KEY, CHECKSUM = bytes(range(32)), bytes(range(32, 64))

START = f"""
import ctypes, json, os, resource, signal, sys, threading
from pathlib import Path
from plancache.marks import Marks

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
KEY, CHECKSUM = {KEY!r}, {CHECKSUM!r}
marks = Marks(Path(sys.argv[1]))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
"""


def start(directory: Path, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + textwrap.dedent(script), str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(directory: Path, script: str) -> tuple[int, int]:
    """The exit status of a script, and its process id."""
    process = start(directory, script)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode, process.pid


def casualties(directory: Path) -> list[Casualty]:
    found: list[Casualty] = []
    Marks(directory).casualties(found.append)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "marks"


# ---- the dead


@pytest.mark.parametrize(
    ("death", "signal_number"),
    [("die()", signal.SIGKILL), ("os.abort()", signal.SIGABRT), ("ctypes.string_at(0)", signal.SIGSEGV)],
)
@pytest.mark.parametrize("phase", ["build", "load"])
def test_a_process_that_dies_in_a_step_is_a_casualty_once(directory: Path, death: str, signal_number: int, phase: str) -> None:
    """Killed, aborted or crashed in the step: key, checksum, phase and process are recorded, and its file is gone."""
    status, pid = run(directory, f"with marks.under_way(KEY, {phase!r}, CHECKSUM):\n    {death}")
    assert status == -signal_number
    assert casualties(directory) == [Casualty(KEY, CHECKSUM, phase, pid, "died")]  # type: ignore[arg-type]
    assert casualties(directory) == []
    assert list(directory.iterdir()) == []


def test_a_mark_from_before_the_machine_restarted_says_so(directory: Path) -> None:
    """Whoever keeps strikes can tell a crash from a machine that went down meanwhile."""
    run(directory, "with marks.under_way(KEY, 'load'): die()")
    (file,) = directory.iterdir()
    os.utime(file, (1, 1))
    assert [each.ended for each in casualties(directory)] == ["restart"]


def test_steps_of_several_threads_are_marked_at_a_time(directory: Path) -> None:
    """Each thread's step has its own slot, and a step that ended before leaves none."""
    script = """
        with marks.under_way(b"done", "build"): pass
        inside = threading.Barrier(4)
        def step(number):
            with marks.under_way(bytes([number]) * 32, "load"):
                inside.wait()
                threading.Event().wait()
        for number in range(3):
            threading.Thread(target=step, args=(number,), daemon=True).start()
        inside.wait()
        die()
    """
    run(directory, script)
    assert sorted(each.key[0] for each in casualties(directory)) == [0, 1, 2]


def test_more_steps_than_slots_go_on_unmarked(directory: Path) -> None:
    """A slot that is free again is used again, and running out of slots is no failure."""
    script = """
        import contextlib
        for _ in range(2):
            with contextlib.ExitStack() as steps:
                for number in range(40):
                    steps.enter_context(marks.under_way(bytes([number]), "load"))
        with contextlib.ExitStack() as steps:
            for number in range(40):
                steps.enter_context(marks.under_way(bytes([number]), "load"))
            die()
    """
    assert run(directory, script)[0] == -signal.SIGKILL
    assert sorted(each.key[0] for each in casualties(directory)) == list(range(30))


def test_eight_processes_that_look_at_once_count_each_mark_once(directory: Path) -> None:
    """The lock of the dead one's file makes one of them record it."""
    make = """
        dead = [Marks(Path(sys.argv[1])) for _ in range(40)]
        steps = [each.under_way(bytes([number]), "load") for number, each in enumerate(dead)]
        for step in steps: step.__enter__()
        die()
    """
    run(directory, make)
    look = """
        print("ready", flush=True)
        sys.stdin.readline()
        found = []
        marks.casualties(lambda each: found.append(each.key[0]))
        print(json.dumps(found))
    """
    lookers = [start(directory, look) for _ in range(8)]
    for looker in lookers:
        assert looker.stdout is not None
        assert looker.stdout.readline() == "ready\n"
    for looker in lookers:
        assert looker.stdin is not None
        looker.stdin.write("go\n")
        looker.stdin.flush()
    found = [json.loads(looker.communicate(timeout=60)[0]) for looker in lookers]
    assert sorted(number for each in found for number in each) == list(range(40))
    assert list(directory.iterdir()) == []


def test_a_mark_that_could_not_be_recorded_stays(directory: Path) -> None:
    """What `record` raises passes through; what it took before is not counted again, the rest is counted next time."""
    run(directory, "with marks.under_way(b'a', 'load'), marks.under_way(b'b', 'load'), marks.under_way(b'c', 'load'): die()")
    taken: list[bytes] = []

    def record(casualty: Casualty) -> None:
        if taken:
            raise OSError("the strikes cannot be stored")
        taken.append(casualty.key)

    with pytest.raises(OSError, match="cannot be stored"):
        Marks(directory).casualties(record)
    rest = [each.key for each in casualties(directory)]
    assert len(taken) == 1
    assert sorted(taken + rest) == [b"a", b"b", b"c"]


# ---- the living, and those that ended well


def test_the_living_are_no_casualties(directory: Path) -> None:
    """Neither this process's own step nor that of another one that lives is counted, or loses its file."""
    other = start(directory, "with marks.under_way(KEY, 'build'):\n    print('in', flush=True)\n    sys.stdin.read()")
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    own, found = Marks(directory), []
    with own.under_way(KEY, "load"):
        own.casualties(found.append)
        assert casualties(directory) == []
    assert found == []
    assert len(list(directory.iterdir())) == 2
    other.kill()
    other.communicate()
    own.casualties(found.append)
    assert [each.pid for each in found] == [other.pid]
    own.close()


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_an_exception_in_the_step_is_no_crash(directory: Path, error: str) -> None:
    """However a step ends in Python, a later death of its process is not put down to it; the empty file is removed."""
    script = f"""
        try:
            with marks.under_way(KEY, "build"): raise {error}
        except {error}:
            die()
    """
    assert run(directory, script)[0] == -signal.SIGKILL
    assert len(list(directory.iterdir())) == 1
    assert casualties(directory) == []
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("close", ["", "marks.close()"])
def test_a_normal_exit_with_a_step_under_way_is_no_crash(directory: Path, close: str) -> None:
    """A daemon thread that is cut short by the end of its program leaves no mark, closed or not."""
    script = f"""
        inside = threading.Event()
        def step():
            with marks.under_way(KEY, "build"):
                inside.set()
                threading.Event().wait()
        threading.Thread(target=step, daemon=True).start()
        inside.wait()
        assert len(list(Path(sys.argv[1]).iterdir())) == 1
        {close}
    """
    assert run(directory, script)[0] == 0
    assert list(directory.iterdir()) == []


def test_close_removes_the_file_under_a_step(directory: Path) -> None:
    """A step that outlasts its cache ends quietly, and what comes after makes no new file."""
    marks = Marks(directory)
    with marks.under_way(KEY, "load"):
        marks.close()
        assert list(directory.iterdir()) == []
    with marks.under_way(KEY, "load"):
        assert list(directory.iterdir()) == []
    marks.close()
    unused = Marks(directory)
    unused.close()
    with unused.under_way(KEY, "load"):
        assert list(directory.iterdir()) == []


def test_a_file_that_cannot_be_removed_holds_no_mark(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A normal end counts as one even where the folder became read-only under a step."""

    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, "read-only")

    marks = Marks(directory)
    with marks.under_way(KEY, "load"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            marks.close()
        assert len(list(directory.iterdir())) == 1
        assert casualties(directory) == []
        assert list(directory.iterdir()) == []


# ---- forks


def test_a_child_does_not_keep_its_killed_parent_alive(directory: Path) -> None:
    """While a forked child lives on, its parent's death in a step is seen; the child marks in a file of its own."""
    script = """
        with marks.under_way(b"parent", "build"):
            if not os.fork():
                with marks.under_way(b"child", "load"):
                    print(os.getpid(), flush=True)
                    signal.pause()
            signal.pause()
    """
    parent = start(directory, script)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        assert [(each.key, each.pid) for each in casualties(directory)] == [(b"parent", parent.pid)]
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()  # its pipe ends with the child
    assert [(each.key, each.pid) for each in casualties(directory)] == [(b"child", child)]


def test_a_child_that_leaves_the_step_and_ends_leaves_its_parents_mark(directory: Path) -> None:
    """A forked child neither clears the mark that it was forked under nor removes the file when it ends."""
    script = """
        with marks.under_way(KEY, "build"):
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                die()
        marks.casualties(lambda each: os._exit(1))  # the parent lives
    """
    status, pid = run(directory, script)
    assert status == -signal.SIGKILL
    assert [(each.key, each.pid) for each in casualties(directory)] == [(KEY, pid)]


# ---- no place, and no slot files


def no_folder(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.parent.touch()


def no_locks(_: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    patch.setattr("fcntl.flock", refuse)


def no_space(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "write", lambda *_: 100)


@pytest.mark.parametrize("obstacle", [no_locks, no_space, no_folder])
def test_without_a_place_there_is_no_mark_and_no_failure(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    """Steps go on, one debug line says why they are unmarked, and nothing half-made is left."""
    caplog.set_level(logging.DEBUG, "plancache.marks")
    steps, marks = 0, Marks(directory)
    with monkeypatch.context() as patch:
        obstacle(directory, patch)
        for _ in range(2):
            with marks.under_way(KEY, "load"):
                steps += 1
    assert steps == 2
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert [path for path in directory.parent.rglob("*") if path.is_file()] == []
    assert casualties(directory) == []


def test_a_real_limit_on_files_is_no_failure(directory: Path) -> None:
    """Where the kernel refuses to write, the step goes on, in a real process."""
    script = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with marks.under_way(KEY, "load"): os._exit(7)
    """
    assert run(directory, script)[0] == 7
    assert casualties(directory) == []


def test_without_a_directory_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`None` marks and finds nothing, and looking where nobody marked makes no folder."""
    monkeypatch.chdir(tmp_path)
    marks = Marks(None)
    with marks.under_way(KEY, "load"):
        marks.casualties(lambda each: pytest.fail(str(each)))
    marks.close()
    assert casualties(tmp_path / "none") == []
    assert list(tmp_path.iterdir()) == []


def test_garbage_is_removed_without_a_casualty(directory: Path) -> None:
    """Empty, truncated, overwritten and half-valid slot files go; files of other names stay."""
    run(directory, "with marks.under_way(KEY, 'load'): die()")
    (real,) = directory.iterdir()
    page = real.read_bytes()
    slot = page.index(KEY) - 4  # a flag, a phase and two lengths come before it
    real.unlink()
    garbage = {
        "empty": b"",
        "short": page[:-1],
        "long": page + b"\0",
        "noise": bytes(range(256)) * 16,
        "phase": page[: slot + 1] + b"\7" + page[slot + 2 :],
        "length": page[: slot + 2] + b"\xff" + page[slot + 3 :],
        "flag": page[:slot] + b"\2" + page[slot + 1 :],
    }
    for name, content in garbage.items():
        (directory / f"{name}.mark1").write_bytes(content)
    (directory / "1-0.mark2").write_bytes(page)
    assert casualties(directory) == []
    assert [path.name for path in directory.iterdir()] == ["1-0.mark2"]
    (directory / "real.mark1").write_bytes(page)
    assert len(casualties(directory)) == 1


def test_a_file_that_is_taken_away_before_it_is_locked_is_made_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks at the dead in the moment between does not cost this process its marks."""
    made: list[Path] = []
    create = module._create

    def create_and_lose(path: Path) -> int:
        descriptor = create(path)
        made.append(path)
        if len(made) == 1:
            path.unlink()
        return descriptor

    monkeypatch.setattr(module, "_create", create_and_lose)
    marks = Marks(directory)
    with marks.under_way(KEY, "load"):
        assert [KEY in path.read_bytes() for path in directory.iterdir()] == [True]
    assert len(made) == 2
    assert made[0].name.split("-")[0] == made[1].name.split("-")[0] == str(os.getpid())
    marks.close()


def test_a_child_that_is_forked_after_closing_closes_nothing_of_others(tmp_path: Path) -> None:
    """The descriptor of a slot file that is gone may be anybody's by then: a pipe, or a database."""
    script = """
    with marks.under_way(KEY, "load"):
        number = marks._file._descriptor
    marks.close()
    reading, writing = os.pipe()
    while number not in (reading, writing):  # the lowest free numbers are given out first
        reading, writing = os.pipe()
    os.set_inheritable(number, True)
    child = os.fork()
    if child == 0:
        os.fstat(number)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(tmp_path / "marks", script)[0] == 0
