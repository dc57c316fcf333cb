"""Locks by key: who waits for whom and how long, who is named, and what a death, a fork or an interrupt leaves."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plancache import singleflight as module
from plancache.errors import StoreError
from plancache.singleflight import STRIPES, SingleFlight

KEY = bytes(32)
OTHER = bytes([1] * 32)

START = """
import os, signal, sys, threading
from pathlib import Path
from plancache.singleflight import SingleFlight

def fail(error): raise error
KEY = bytes(32)
flight = SingleFlight(Path(sys.argv[1]), timeout_s=float(sys.argv[2]), on_fault=fail)
"""
HOLD = """
with flight.building(KEY) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def start(directory: Path, script: str, timeout_s: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + textwrap.dedent(script), str(directory), str(timeout_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def holder(directory: Path, timeout_s: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of KEY, the late one if the first is taken; it ends, killed, with the block."""
    process = start(directory, HOLD, timeout_s)
    try:
        assert line(process) in ("True", "False")
        yield process
    finally:
        process.kill()
        process.communicate()


def fail(error: StoreError) -> None:
    raise error


def flight_of(directory: Path | None, timeout_s: float = 60) -> SingleFlight:
    return SingleFlight(directory, timeout_s=timeout_s, on_fault=fail)


@contextmanager
def thread_holding(flight: SingleFlight) -> Iterator[threading.Thread]:
    """A thread that holds a lock of KEY until the block ends."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with flight.building(KEY):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold, name="builder-7")
    thread.start()
    assert inside.wait(30)
    try:
        yield thread
    finally:
        leave.set()
        thread.join()


class Lines(logging.Handler):
    """The log lines of the module, and what to do at each."""

    def __init__(self, then: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.then = then
        self.texts: list[str] = []
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.levels.append(record.levelname)
        self.then(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """What is logged, with waits spoken of at once rather than after 5 s."""
    monkeypatch.setattr(module, "_SAY_AFTER_S", 0.0)
    handler, logger = Lines(), logging.getLogger("plancache.singleflight")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


# ---- one more at a time


def test_after_the_timeout_one_more_process_at_a_time_goes_on(tmp_path: Path, lines: Lines) -> None:
    """Behind one that hangs and a late one that builds a third waits, and has its turn when the late one is done."""
    flight, entered = flight_of(tmp_path, 0.05), threading.Event()
    waits_for_late = threading.Event()
    with holder(tmp_path) as first, holder(tmp_path, 0.05) as late:

        def then(text: str) -> None:
            flight._timeout_s = 60  # from here on nobody's patience ends
            if f"process {late.pid} " in text:
                waits_for_late.set()

        def build() -> None:
            with flight.building(KEY) as held:
                assert not held
                entered.set()

        lines.then = then
        third = threading.Thread(target=build)
        third.start()
        assert waits_for_late.wait(30)
        assert not entered.is_set()
        late.kill()
        assert entered.wait(30)
        third.join()
        assert first.poll() is None
    assert lines.levels[-1] == "WARNING"
    assert f"process {first.pid} " in lines.texts[-1]
    assert f"process {late.pid} " not in lines.texts[-1]


def test_after_the_timeout_one_more_thread_at_a_time_goes_on(lines: Lines) -> None:
    """The same between threads, without a directory."""
    flight, entered, waits = flight_of(None, 0.05), threading.Event(), threading.Event()
    with thread_holding(flight), thread_holding(flight) as late:

        def then(text: str) -> None:
            flight._timeout_s = 60
            if "late-8" in text:
                waits.set()

        def build() -> None:
            with flight.building(KEY) as held:
                assert not held
                entered.set()

        late.name, lines.then = "late-8", then
        third = threading.Thread(target=build)
        third.start()
        assert waits.wait(30)
        assert not entered.is_set()
    assert entered.wait(30)
    third.join()


@pytest.mark.parametrize("place", ["processes", "threads"])
def test_behind_two_that_hang_a_waiter_goes_on_alone(tmp_path: Path, lines: Lines, place: str) -> None:
    """Nobody waits longer than twice the timeout; the warning names both, and what is held is left to its holders."""
    if place == "processes":
        flight = flight_of(tmp_path, 0.05)
        with holder(tmp_path) as first, holder(tmp_path, 0.05) as late, flight.building(KEY) as held:
            assert not held
        names = [f"process {first.pid} (", f"process {late.pid} ("]
    else:
        flight = flight_of(None, 0.05)
        with thread_holding(flight) as one, thread_holding(flight) as two:
            one.name, two.name = "first-1", "late-2"
            with flight.building(KEY) as held:
                assert not held
        names = ["thread first-1 of", "thread late-2 of"]
    assert lines.levels[-1] == "WARNING"
    assert all(name in lines.texts[-1] for name in names)
    assert not flight.busy(KEY)


def test_a_key_of_the_same_stripe_does_not_wait_for_itself(tmp_path: Path) -> None:
    """A thread that holds a stripe may ask for it again at once, and keeps it until it leaves the outer block."""
    flight = flight_of(tmp_path)
    with flight.building(KEY):
        with flight.building(bytes([STRIPES, *KEY[1:]])) as held:
            assert held
        assert flight_of(tmp_path).busy(KEY)
    assert not flight_of(tmp_path).busy(KEY)


# ---- who holds it


def test_a_waiter_says_whom_it_waits_for(tmp_path: Path, lines: Lines) -> None:
    """INFO while waiting, WARNING when going on; both name the process, its program and since when."""
    with holder(tmp_path) as other, flight_of(tmp_path, 0.05).building(KEY):
        assert lines.levels == ["INFO", "WARNING"]
    for text in lines.texts:
        assert f"process {other.pid} ({sys.executable[-80:]}, since " in text


def test_a_thread_that_waits_is_told_of_the_thread(tmp_path: Path, lines: Lines) -> None:
    """Within a process the holder is a thread, and its name says more than a process id."""
    flight = flight_of(tmp_path, 0.05)
    with thread_holding(flight), flight.building(KEY):
        assert "thread builder-7 of this process" in lines.texts[0]


def test_nothing_is_said_within_the_first_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wait shorter than 5 s leaves no line."""
    caplog.set_level(logging.INFO, "plancache.singleflight")
    assert module._SAY_AFTER_S == 5.0
    with holder(tmp_path) as other:
        threading.Timer(0.05, other.kill).start()
        with flight_of(tmp_path).building(KEY) as held:
            assert held
    assert caplog.records == []


def test_a_dead_holder_is_not_named_for_the_next_one(tmp_path: Path, lines: Lines) -> None:
    """Its name stays in the file, and whoever takes the lock writes over it, however long the name was."""
    with holder(tmp_path) as dead:
        pass
    (tmp_path / "00.lock").write_bytes((tmp_path / "00.lock").read_bytes() + b"x" * 500)
    with holder(tmp_path) as living, flight_of(tmp_path, 0.05).building(KEY):
        pass
    assert f"process {living.pid} ({sys.executable[-80:]}, since" in lines.texts[0]
    assert f"process {dead.pid} " not in "".join(lines.texts)


@pytest.mark.parametrize("content", [b"", b"\xff\0 1 x", b"12 99999999999999999999999 x", b"12"])
def test_a_lock_file_that_names_nobody_is_no_failure(tmp_path: Path, lines: Lines, content: bytes) -> None:
    """An empty or strange file, such as an older version leaves, gives a line without a name."""
    with holder(tmp_path):
        (tmp_path / "00.lock").write_bytes(content)
        with flight_of(tmp_path, 0.05).building(KEY):
            assert "another holder of its lock is building this plan" in lines.texts[0]


# ---- busy


def test_busy_sees_threads_and_processes_and_takes_nothing(tmp_path: Path) -> None:
    """Whoever holds the key is seen, from the same or another process; other keys and asking itself are not."""
    flight, elsewhere = flight_of(tmp_path), flight_of(tmp_path)
    assert not flight.busy(KEY)
    with thread_holding(flight):
        assert flight.busy(KEY)
        assert elsewhere.busy(KEY)
        assert not flight.busy(OTHER)
    assert not flight.busy(KEY)
    with holder(tmp_path):
        assert flight.busy(KEY)
    assert not flight.busy(KEY)
    with flight_of(tmp_path, 0).building(KEY) as held:
        assert held


def test_one_that_asks_is_not_taken_for_a_holder(tmp_path: Path) -> None:
    """Two that ask at once, here one that never stops asking, do not see each other."""
    flight = flight_of(tmp_path)
    with flight.building(KEY):
        pass
    with (tmp_path / "00.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not flight.busy(KEY)


def test_busy_without_a_directory_sees_this_process(tmp_path: Path) -> None:
    """Threads alone count where there is no place for locks; a place that is missing is not made."""
    flight = flight_of(None)
    with thread_holding(flight):
        assert flight.busy(KEY)
    assert not flight.busy(KEY)
    assert not flight_of(tmp_path / "none").busy(KEY)
    assert list(tmp_path.iterdir()) == []


def test_busy_sees_the_late_builder_alone(tmp_path: Path) -> None:
    """A late one that builds on when the first holder is gone still counts."""
    with holder(tmp_path) as first, holder(tmp_path, 0.05):
        first.kill()
        first.wait()
        assert flight_of(tmp_path).busy(KEY)
    assert not flight_of(tmp_path).busy(KEY)


# ---- deaths, forks, interrupts, faults


def test_a_forked_child_does_not_keep_its_killed_parents_lock(tmp_path: Path) -> None:
    """The parent is killed while its child lives on: another process has the lock at once."""
    script = """
        with flight.building(KEY):
            if not os.fork():
                print(os.getpid(), flush=True)  # by the child: a fork is done when its hooks have run there
            signal.pause()
    """
    parent = start(tmp_path, script)
    child = int(line(parent))
    try:
        assert flight_of(tmp_path).busy(KEY)
        parent.kill()
        parent.wait()
        assert not flight_of(tmp_path).busy(KEY)
        with flight_of(tmp_path, 0).building(KEY) as held:
            assert held
        os.kill(child, 0)  # it was alive all the while
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_forked_child_that_leaves_the_block_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    """The lock is the parent's: what the child does with its copy changes nothing."""
    script = """
        with flight.building(KEY):
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                print("child is gone", flush=True)
                sys.stdin.read()
    """
    parent = start(tmp_path, script)
    assert line(parent) == "child is gone"
    assert flight_of(tmp_path).busy(KEY)
    parent.communicate()
    assert parent.returncode == 0
    assert not flight_of(tmp_path).busy(KEY)


def test_a_child_does_not_wait_for_threads_that_are_not_in_it(tmp_path: Path) -> None:
    """A lock that another thread held at the fork is free in the child after `after_fork`, and not before."""
    script = """
        flight = SingleFlight(None, timeout_s=0.05, on_fault=fail)
        inside = threading.Event()
        def hold():
            with flight.building(KEY):
                inside.set()
                threading.Event().wait()
        threading.Thread(target=hold, daemon=True).start()
        inside.wait()
        if not os.fork():
            with flight.building(KEY) as before: pass
            flight.after_fork()
            with flight.building(KEY) as after: pass
            print(before, after, flight.busy(KEY), flush=True)
            os._exit(0)
        os.wait()
    """
    process = start(tmp_path, script)
    assert line(process) == "False True False"
    process.communicate()


@pytest.mark.parametrize("place", ["process", "thread"])
def test_an_interrupt_while_waiting_leaves_no_lock(tmp_path: Path, lines: Lines, place: str) -> None:
    """Ctrl-C ends a wait for a thread or for a process, and whoever comes next finds what the holder leaves."""
    flight, waiting = flight_of(tmp_path), threading.Event()
    lines.then = lambda _: waiting.set()
    interrupter = threading.Thread(target=lambda: waiting.wait(30) and os.kill(os.getpid(), signal.SIGINT))
    with holder(tmp_path) if place == "process" else thread_holding(flight):
        interrupter.start()
        with pytest.raises(KeyboardInterrupt), flight.building(KEY):
            pytest.fail("the lock is held elsewhere")
        interrupter.join()
        assert flight.busy(KEY)
    assert not flight.busy(KEY)
    with flight_of(tmp_path, 0).building(KEY) as held, thread_free(flight):
        assert held


@contextmanager
def thread_free(flight: SingleFlight) -> Iterator[None]:
    """Checks that no thread of this process holds the lock of KEY."""
    got = []
    thread = threading.Thread(target=lambda: got.append(flight._lock(KEY)._threads.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert got == [True]
    yield


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_build_leaves_no_lock(tmp_path: Path, error: type[BaseException]) -> None:
    """Whatever ends a build, its locks are free and its lock file stays."""
    flight = flight_of(tmp_path)
    with pytest.raises(error), flight.building(KEY):
        raise error
    assert not flight.busy(KEY)
    with thread_free(flight):
        assert [path.name for path in tmp_path.iterdir()] == ["00.lock"]


def test_a_lock_file_that_cannot_be_opened_is_a_fault_and_no_obstacle(tmp_path: Path) -> None:
    """The fault is told, the build goes on as if alone, and other threads of this process still wait for it."""
    (tmp_path / "00.lock").mkdir()
    faults: list[StoreError] = []
    flight = SingleFlight(tmp_path, timeout_s=60, on_fault=faults.append)
    with flight.building(KEY) as held:
        assert not held
        assert flight.busy(KEY)
    assert [type(fault) for fault in faults] == [StoreError]
    assert "00.lock" in str(faults[0])
    assert not flight.busy(KEY)


def test_a_fault_that_is_raised_leaves_no_lock(tmp_path: Path) -> None:
    """In strict mode the fault passes through, and the thread's lock with it."""
    (tmp_path / "00.lock").mkdir()
    flight = flight_of(tmp_path)
    with pytest.raises(StoreError, match=r"00\.lock"), flight.building(KEY):
        pytest.fail("strict faults stop a build")
    assert not flight.busy(KEY)


def test_a_name_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the lock is held all the same."""

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    flight = flight_of(tmp_path)
    with flight.building(KEY) as held:
        assert held
        assert flight_of(tmp_path).busy(KEY)
