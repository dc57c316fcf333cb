"""A GPU to tune on that is made up: what its candidates take, compute and break is said beforehand.

Used by tests and by the processes that they start. What it does is told in `TunableGpu.done`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from faking import MadeUp
from test_autotune import Fake, FakeBench

from plancache import Device, PlanCache
from plancache.backend import CudnnBackend, Option
from plancache.entry import Built, Candidate, Entry
from plancache.key import Constraints

FAKES = (Fake("eng0", 50), Fake("eng1", 20), Fake("eng2", 30))
"""The heuristics' first choice, the fastest, another one."""


class TunableGpu(MadeUp):
    """In place of cuDNN on a GPU: the heuristics name `fakes` in this order for every graph."""

    def __init__(self, real: CudnnBackend, fakes: Sequence[Fake] = FAKES) -> None:
        super().__init__(real)
        self.fakes = list(fakes)
        self.benches: list[MadeUpBench] = []
        self.done: list[str] = []
        self.when: Callable[[str, str], object] = lambda _, __: None

    def build(self, signature: bytes, *_: object) -> Entry:
        return replace(super().build(signature), recipe=self.fakes[0].option.candidate)

    def planned(self, signature: bytes, constraints: Constraints, modes: Sequence[str]) -> MadeUpPlanned:  # noqa: ARG002
        return MadeUpPlanned(self)

    def note(self, step: str, name: str) -> None:
        self.done.append(f"{step} {name}")
        self.when(step, name)


class MadeUpPlanned:
    """In place of `backend.Planned`."""

    def __init__(self, gpu: TunableGpu) -> None:
        self._gpu = gpu
        self.candidates = [fake.option.candidate for fake in gpu.fakes]

    def build(self, candidate: Candidate) -> Built:
        self._gpu.note("build", candidate.name)
        fake = next(fake for fake in self._gpu.fakes if fake.name == candidate.name)
        if not fake.builds:
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return replace(MadeUp.build(self._gpu, b""), recipe=candidate)


class MadeUpBench(FakeBench):
    """In place of `workbench.Workbench`."""

    def __init__(self, backend: TunableGpu, *_: object) -> None:
        super().__init__(*backend.fakes)
        self.gpu = backend
        backend.benches.append(self)

    def compiling(self, _: object) -> int:
        return 0

    def start_compiling(self, _: object) -> None: ...

    def set_aside(self) -> None: ...

    def ready(self) -> bool:
        return True

    def start(self, option: Option) -> Future[Built]:
        self.gpu.note("start", option.candidate.name)
        started = super().start(option)
        if not started.exception():
            built, started = started.result(), Future()
            started.set_result(replace(built, operands=(1,)))
        return started

    def outputs(self, runnable: Fake, poison: int) -> Mapping[int, Any]:
        self.gpu.note("outputs", runnable.name)
        return super().outputs(runnable, poison)

    def load(self, built: Built) -> Fake:
        self.gpu.note("load", built.recipe.name)
        return super().load(built)

    def time_us(self, runnables: Sequence[Fake], runs: int) -> list[list[float]]:
        for fake in runnables:
            self.gpu.note("run", fake.name)
        return super().time_us(runnables, runs)


def opened_to_tune(directory: Path | str, *fakes: Fake, **options: Any) -> tuple[PlanCache, TunableGpu]:
    """A cache for a made-up GPU that can be tuned on, once `MadeUpBench` has taken the place of `plancache.tuner.Workbench`."""
    gpu = Device(Device.from_file("h200").properties, None, 0)
    cache = PlanCache(directory, device=gpu, **options)
    target = cache._targets._of(gpu)
    made_up = TunableGpu(target.backend, fakes or FAKES)
    target.backend = target.builder = made_up  # type: ignore[assignment]
    return cache, made_up
