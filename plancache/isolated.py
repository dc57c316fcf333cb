"""Tuning in a child process, `python -m plancache.isolated`, so that a candidate that hangs or crashes ends that one only.

The child opens the same cache directory and tunes as usual; it says each risky step before it begins. Where nothing more is
heard, or the child is gone, the candidate of that step has fallen: it is noted, and a new child tunes what is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from plancache import errors
from plancache.autotune import Tuning
from plancache.children import Child, end_with_parent, receive, send, visible_devices
from plancache.entry import Entry, Row, join_preimages, pack, split_preimage, unpack, usable
from plancache.environment import Device, load_frontend
from plancache.errors import CompilerError, CorruptEntryError, PlancacheError, ProofError, SettingsError, StoreError
from plancache.jobs import Job, Tuned, constraints_of, hung
from plancache.key import Place, PlanKey
from plancache.settings import Settings
from plancache.store.levels import STRIKES, Levels
from plancache.target import DeviceTarget
from plancache.tuner import Isolation, Tuner

TARGET = "plancache.target:DeviceTarget"
"""What the child makes of a `Device`, as `module:function`."""


class _Risk(NamedTuple):
    """A step that is under way in the child: its candidates by the digest that they are denied under."""

    step: str
    key: bytes
    candidates: Mapping[bytes, str]


class IsolatedTuner:
    """Tunes as `Tuner` does, in child processes."""

    def __init__(
        self,
        levels: Levels,
        settings: Settings,
        target: DeviceTarget,
        variables: Mapping[str, str],
        tuning: Tuning,
        *,
        refresh: bool = False,
        on_fault: Callable[[str, StoreError], None],
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._levels = levels
        self._settings = settings
        self._target = target
        self._variables = variables
        self._tuning = tuning
        self._refresh = refresh
        self._on_fault = on_fault
        self._on_step = on_step
        self._fallen: dict[bytes, str] = {}
        self._steps_told = self._steps_again = self._done = 0

    def tune(self, jobs: Iterable[Job]) -> Iterator[Tuned]:
        """Tunes them in one child after the other. Raises `SettingsError` where that cannot be done."""
        left = {job.key.digest: job for job in jobs}
        self._refuse(left.values())
        until = None if self._tuning.total_budget_s is None else time.monotonic() + self._tuning.total_budget_s
        while left:
            budget_s = None if until is None else max(0.0, until - time.monotonic())
            self._steps_again = self._steps_told - 2 * self._done
            child = Child("plancache.isolated", self._variables, visible_devices(self._target.device.ordinal))
            try:
                for tuned in self._heard(child, list(left.values()), budget_s):
                    del left[tuned.key.digest]
                    self._done += 1
                    while self._steps_told < 2 * self._done:  # of one that failed
                        self._stepped()
                    yield tuned
                child.stop()
            finally:
                child.stop(kill=True)

    def _refuse(self, jobs: Iterable[Job]) -> None:
        if any(job.inputs for job in jobs):
            raise SettingsError("inputs cannot go to the child process that tunes; leave them out (it makes its own), or isolate=False")
        if self._levels.lock_folder() is None:
            raise SettingsError(
                f"isolated tuning hands over through the store, and {self._settings.directory} ({self._settings.mode}) cannot be "
                "written; name another directory (PLANCACHE_DIR), or tune with isolate=False"
            )

    def _heard(self, child: Child, left: list[Job], budget_s: float | None) -> Iterator[Tuned]:
        """What comes of one child: of all jobs, or of those that were done when it ended."""
        waiting, risk = {job.key.digest: job for job in left}, None
        try:
            child.send(json.dumps(self._request(left, budget_s)).encode())
            while waiting:
                header, _ = child.receive(self._tuning.candidate_limit_s if risk else None)
                said = json.loads(header)
                match said.pop("what"):
                    case "risk":
                        risk = _Risk(said["step"], bytes.fromhex(said["key"]), {bytes.fromhex(one): said["of"][one] for one in said["of"]})
                    case "safe":
                        risk = None
                    case "step":
                        self._stepped()
                    case "fault":
                        self._on_fault(said["kind"], StoreError(said["message"]))
                    case "done":
                        yield self._tuned(waiting.pop(bytes.fromhex(said["key"])), said)
                    case "failed":
                        yield from _failed(waiting.values(), said["message"])
                        return
        except TimeoutError:
            assert risk is not None
            child.stop(kill=True)
            yield from self._after(risk, waiting, hung(risk.step, self._tuning.candidate_limit_s), strikes=STRIKES)
        except (EOFError, BrokenPipeError):
            how = child.how_it_ended()
            if risk is None:
                yield from _failed(waiting.values(), f"the process that tunes {how}; its last words are on stderr")
            else:
                yield from self._after(risk, waiting, f"its process {how} in its {risk.step}", strikes=0)  # it left a mark

    def _after(self, risk: _Risk, waiting: Mapping[bytes, Job], reason: str, *, strikes: int) -> Iterator[Tuned]:
        """Notes whose step the child did not outlive. A step that is no candidate's fails its plan."""
        self._levels.count_casualties()
        for digest in risk.candidates:
            self._fallen[digest] = reason
            if strikes:
                self._levels.record("struck", digest, reason, count=strikes)
        if not risk.candidates:
            yield from _failed([waiting[risk.key]], reason)

    def _request(self, left: list[Job], budget_s: float | None) -> dict[str, Any]:
        settings = {field.name: getattr(self._settings, field.name) for field in fields(Settings) if field.name != "sources"}
        settings.update(directory=str(settings["directory"]), bundles=[str(bundle) for bundle in settings["bundles"]])
        ordinal = self._target.device.ordinal
        return {
            "settings": settings,
            "device": asdict(replace(self._target.device, ordinal=0)),  # the only one that the child sees
            "target": TARGET,
            "tuning": asdict(replace(self._tuning, total_budget_s=budget_s)),
            "variables": dict(self._variables),
            "refresh": self._refresh,
            "keys": [b64encode(join_preimages(job.key.preimages)).decode() for job in left],
            "fallen": {digest.hex(): reason for digest, reason in self._fallen.items()},
            "own_processes": 1 + (ordinal is not None and _has_context(ordinal)),
        }

    def _stepped(self) -> None:
        """Steps that an earlier child had done are not told again."""
        if self._steps_again > 0:
            self._steps_again -= 1
        else:
            self._steps_told += 1
            self._on_step()

    def _tuned(self, job: Job, said: Mapping[str, Any]) -> Tuned:
        before, entry = (_entry(said[name], job.key) for name in ("before", "entry"))
        error = _error(*said["error"]) if said["error"] else None
        if isinstance(error, ProofError):  # what was shown wrong goes from this process too
            self._levels.forget(job.key.digest, error.reason)
        return Tuned(job.key, before or job.entry, entry, said["seconds"], said["reason"], error, said["elsewhere"])


def tuner_for(
    levels: Levels, settings: Settings, target: DeviceTarget, variables: Mapping[str, str], tuning: Tuning, **more: Any
) -> Tuner | IsolatedTuner:
    """What tunes in this process, or in a child where that is asked for."""
    if tuning.isolate:
        return IsolatedTuner(levels, settings, target, variables, tuning, **more)
    return Tuner(levels, target, variables, tuning, **more)


def _failed(jobs: Iterable[Job], reason: str) -> Iterator[Tuned]:
    for job in list(jobs):
        yield Tuned(job.key, job.entry, None, 0.0, reason, CompilerError(reason))


def _has_context(ordinal: int) -> bool:
    """Whether this process has a CUDA context on a device: NVIDIA's library counts it among those that use the GPU then."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    try:
        state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return False
    return state(ordinal, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value != 0


# ---- what crosses ---------------------------------------------------------------------------------------------------


def _row(entry: Entry | None) -> list[str] | None:
    return None if entry is None else [b64encode(part).decode() for part in pack(entry)]


def _entry(row: list[str] | None, key: PlanKey) -> Entry | None:
    return None if row is None else unpack(Row(*map(b64decode, row)), key)


def _told(error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    return [type(error).__name__, list(error.__reduce__()[1]) if isinstance(error, PlancacheError) else [str(error)]]


def _error(name: str, arguments: list[Any]) -> Exception:
    """A child's error: plancache's own, cuDNN's refusal, or another one by its name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PlancacheError):
        return kind(*arguments)
    if name == "cudnnGraphNotSupportedError":
        return load_frontend().cudnnGraphNotSupportedError(*arguments)  # type: ignore[no-any-return]  # an exception, says the frontend
    return RuntimeError(f"{name}: {arguments[0]}")


# ---- the child ------------------------------------------------------------------------------------------------------


def serve(request: Mapping[str, Any], say: Callable[..., None]) -> None:
    """Tunes what is asked for, and says all that happens."""
    module, _, function = request["target"].partition(":")
    target: DeviceTarget = getattr(import_module(module), function)(Device(**request["device"]))
    levels = Levels(Settings(**request["settings"]), lambda kind, error: say("fault", kind=kind, message=str(error)), lambda *_: None)
    try:
        jobs = [_job(levels, target, PlanKey(split_preimage(b64decode(key)))) for key in request["keys"]]
        tuner = Tuner(
            levels,
            target,
            request["variables"],
            Tuning(**request["tuning"]),
            refresh=request["refresh"],
            on_fault=lambda kind, error: say("fault", kind=kind, message=str(error)),
            on_step=lambda: say("step"),
            isolation=Isolation(
                partial(_at_risk, say),
                {bytes.fromhex(digest): reason for digest, reason in request["fallen"].items()},
                request["own_processes"],
            ),
        )
        for key, before, entry, seconds, reason, error, elsewhere in tuner.tune(jobs):
            rows = {"before": _row(before), "entry": _row(entry)}
            say("done", key=key.hex, seconds=seconds, reason=reason, error=_told(error), elsewhere=elsewhere, **rows)
    finally:
        target.close()
        levels.close()


def _job(levels: Levels, target: DeviceTarget, key: PlanKey) -> Job:
    if Place(*key.preimages[1:6]) != target.place:
        raise CompilerError(
            f"the process that tunes finds another cuDNN, driver or GPU than this one, from {target.backend.libraries.folder}; "
            "set LD_LIBRARY_PATH before this process starts, and leave one libcudnn in reach"
        )
    for found in levels.rows(key.digest):
        with suppress(CorruptEntryError):
            entry = unpack(found.row, key)
            if usable(entry, target.backend.here) is None:
                return Job(key, entry, constraints_of(key), {})
    return Job(key, None, constraints_of(key), {})


@contextmanager
def _at_risk(say: Callable[..., None], step: str, key: PlanKey, candidates: Mapping[bytes, str]) -> Iterator[None]:
    say("risk", step=step, key=key.hex, of={digest.hex(): name for digest, name in candidates.items()})
    try:
        yield
    finally:
        say("safe")


def _main(requests: str, answers: str, lifeline: str, folder: str) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the program's to answer
    end_with_parent(int(lifeline))
    tempfile.tempdir = folder  # those who compile for it may be killed with it
    with suppress(BrokenPipeError, EOFError), os.fdopen(int(requests), "rb", 0) as asked, os.fdopen(int(answers), "wb", 0) as answered:

        def say(what: str, **facts: Any) -> None:
            send(answered, json.dumps({"what": what, **facts}).encode())

        request, _ = receive(asked)
        try:
            serve(json.loads(request), say)
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever it is: it is all that the program gets to know
            say("failed", message=str(error) or type(error).__name__)
    shutil.rmtree(Path(folder), ignore_errors=True)
    os._exit(0)  # as the child that compiles does


if __name__ == "__main__":
    _main(*sys.argv[1:])
