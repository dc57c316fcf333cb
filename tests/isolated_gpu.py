"""A made-up GPU for the child processes that tune in isolation: what its candidates do there is said in a variable.

The child makes its target here (`isolated.TARGET`) in place of a real one.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from benches import MadeUpBench, TunableGpu
from hanging import hang
from test_autotune import Fake

import plancache.tuner
from plancache.backend import Option
from plancache.children import Child
from plancache.description import decode
from plancache.environment import Device
from plancache.errors import StoreError
from plancache.store.database import Database
from plancache.target import DeviceTarget

VARIABLE = "ISOLATED_GPU"
TARGET = "isolated_gpu:made_up"

_children: list[Child] = []  # those that a child of ours has started and not ended


def script(directory: Path, *fakes: Fake, full: bool = False, elsewhere: bool = False, **deeds: str) -> dict[str, str]:
    """What to set in the environment. `deeds`: what happens at the n-th time of a step, such as `run_eng1_2="hang"`.

    `full`: nothing can be stored there; `elsewhere`: it finds another driver.
    """
    told = [[fake.name, fake.time_us, fake.output, fake.builds] for fake in fakes]
    facts = {"fakes": told, "deeds": deeds, "log": str(directory / "done.txt"), "full": full, "elsewhere": elsewhere}
    return {VARIABLE: json.dumps(facts)}


def done(directory: Path) -> list[str]:
    """The steps of all children so far."""
    return (directory / "done.txt").read_text().splitlines()


def made_up(device: Device) -> DeviceTarget:
    facts: dict[str, Any] = json.loads(os.environ[VARIABLE])
    target = DeviceTarget(device)
    fakes = [Fake(name, time_us, output=output, builds=builds) for name, time_us, output, builds in facts["fakes"]]
    gpu = TunableGpu(target.backend, fakes)
    seen: Counter[str] = Counter()

    def when(step: str, name: str) -> None:
        seen[f"{step}_{name}"] += 1
        with Path(facts["log"]).open("a") as log:
            log.write(f"{step} {name}\n")
        _do(facts["deeds"].get(f"{step}_{name}_{seen[f'{step}_{name}']}"), Path(facts["log"]))

    gpu.when = when
    target.backend = target.builder = gpu  # type: ignore[assignment]
    plancache.tuner.Workbench = Bench  # type: ignore[misc, assignment]
    if facts["full"]:
        Database.put = _full  # type: ignore[method-assign, assignment]
    if facts["elsewhere"]:
        target.place = target.place._replace(driver=b"1")
    return target


class Bench(MadeUpBench):
    """Says when it is asked for the candidates of a `product`, by its size."""

    def __init__(self, backend: TunableGpu, builders: object, signature: bytes, *more: object) -> None:
        super().__init__(backend, builders, signature, *more)
        self._size = max(max(tensor["dim"]) for tensor in decode(signature).tensors) // 8
        self._asked = False

    def options(self) -> list[Option]:  # type: ignore[override]
        if not self._asked:
            self._asked = True
            self.gpu.note("plan", str(self._size))
        return list(super().options())


def _do(deed: str | None, log: Path) -> None:
    if deed == "hang":
        hang()
    elif deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "hang with a child":  # as one that compiles
        child = Child("hanging", {}, "")
        _children.append(child)
        child.receive()
        log.with_name("child.txt").write_text(f"{child.process.pid} {child.folder}")
        hang()


def _full(*_: object, **__: object) -> None:
    raise StoreError("disk I/O error")
