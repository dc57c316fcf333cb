"""Tuning's choice and proof, on a bench that injects what a GPU does not do on demand: wrong, slow, failing candidates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from samples import make_entry

from plancache.autotune import Tuning, tune
from plancache.backend import Option
from plancache.entry import Built, Candidate
from plancache.errors import SettingsError
from plancache.jury import POISONS, Outcome

torch = pytest.importorskip("torch")

RIGHT = torch.arange(64, dtype=torch.float32).reshape(8, 8) + 1


class Fake:
    """A candidate: its time, its workspace, and what it makes of an output that was filled with a byte."""

    def __init__(
        self,
        name: str,
        time_us: float,
        *,
        workspace: int = 0,
        output: Any = "right",
        deterministic: bool = True,
        builds: bool | Exception = True,
        noise: float = 0.002,
    ) -> None:
        self.name, self.time_us, self.workspace, self.output = name, time_us, workspace, output
        self.deterministic, self.builds, self.noise = deterministic, builds, noise
        self.runs = 0

    @property
    def option(self) -> Option:
        engine = int(self.name.removeprefix("eng").partition("_")[0])
        return Option(Candidate(self.name, engine, {}), self.deterministic, runtime_compiled=False)


class FakeBench:
    """Times are drawn around those that the candidates have; outputs are torch tensors on the CPU."""

    def __init__(self, *fakes: Fake, seed: int = 0) -> None:
        self.fakes = {fake.name: fake for fake in fakes}
        self.random = random.Random(seed)
        self.started: list[str] = []

    def options(self) -> Sequence[Option]:
        return [fake.option for fake in self.fakes.values()]

    def start(self, option: Option) -> Future[Built]:
        self.started.append(option.candidate.name)
        future: Future[Built] = Future()
        fake = self.fakes[option.candidate.name]
        if isinstance(fake.builds, Exception):
            future.set_exception(fake.builds)
        elif fake.builds:
            future.set_result(make_entry(recipe=option.candidate, workspace_size=fake.workspace))
        else:
            future.set_exception(RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"))
        return future

    def load(self, built: Built) -> Fake:
        return self.fakes[built.recipe.name]

    def time_us(self, runnables: Sequence[Fake], runs: int) -> list[list[float]]:
        for fake in runnables:
            fake.runs += runs
        return [[fake.time_us * (1 + fake.noise * self.random.gauss(0, 1)) for _ in range(runs)] for fake in runnables]

    def outputs(self, runnable: Fake, poison: int) -> Mapping[int, Any]:
        if runnable.output == "raises":
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        buffer = torch.full((256,), poison, dtype=torch.uint8).view(torch.float32).reshape(8, 8).clone()
        if runnable.output == "leaves a row":
            buffer[:7] = RIGHT[:7]
        elif runnable.output == "nan":
            buffer.copy_(RIGHT)[3, 3] = float("nan")
        elif runnable.output == "right":
            buffer.copy_(RIGHT)
        else:
            buffer.copy_(RIGHT * runnable.output)
        return {9: buffer}

    def bounds(self) -> Mapping[int, float]:
        return {9: 1e-3}

    def partly_written(self) -> frozenset[int]:
        return frozenset()


def results(outcome: Outcome) -> dict[str, str]:
    return {contestant.candidate.name: contestant.result for contestant in outcome.contestants}


def winner(outcome: Outcome) -> str | None:
    return outcome.winner.candidate.name if outcome.winner else None


def test_the_fastest_wins_and_is_proven_by_the_heuristics_first_plan() -> None:
    """Each candidate gets its result; the proof names what it was compared with."""
    bench = FakeBench(Fake("eng0", 50), Fake("eng1", 20), Fake("eng2", 400), Fake("eng3", 30), Fake("eng4", 25, builds=False))
    outcome = tune(bench, Tuning())
    assert winner(outcome) == "eng1"
    assert outcome.proof == "agrees with eng0"
    assert results(outcome) == {"eng0": "pruned", "eng1": "won", "eng2": "pruned", "eng3": "pruned", "eng4": "failed"}
    assert [trial.name for trial in outcome.trials()][:3] == ["eng1", "eng3", "eng0"]


def test_what_cannot_win_is_dropped_at_once() -> None:
    """One that is far slower is run a few times, the best hundreds of times."""
    slow, fast, near = Fake("eng0", 5_000), Fake("eng1", 20), Fake("eng2", 20.2)
    tune(FakeBench(fast, slow, near), Tuning())
    assert slow.runs < 10
    assert fast.runs > 100


@pytest.mark.parametrize(
    ("first", "second"),
    [({"workspace": 0}, {"workspace": 64}), ({"deterministic": True}, {"deterministic": False}), ({}, {})],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_fixed_order_decides_among_ties(first: dict[str, Any], second: dict[str, Any], seed: int) -> None:
    """Less workspace, then deterministic, then the heuristic's order, whichever was measured faster."""
    outcome = tune(FakeBench(Fake("eng5", 20.1, **first), Fake("eng1", 20.0, **second), Fake("eng2", 30), seed=seed), Tuning())
    assert winner(outcome) == "eng5"
    assert results(outcome)["eng1"] == "tied"
    reverse = tune(FakeBench(Fake("eng1", 20.0, **second), Fake("eng5", 20.1, **first), seed=seed), Tuning())
    assert winner(reverse) == ("eng5" if first else "eng1")


def test_runs_agree_where_candidates_lie_on_the_margin() -> None:
    """The end of ties lies in the widest gap near the margin, not at a fixed ratio: 40 tunings choose alike."""
    chosen = set()
    for seed in range(40):
        fakes = [Fake("eng7", 20.4, workspace=0), Fake("eng1", 20.0, workspace=1), Fake("eng2", 20.36, workspace=2), Fake("eng3", 21.2)]
        chosen.add(winner(tune(FakeBench(*fakes, seed=seed), Tuning())))
    assert chosen == {"eng7"}


@pytest.mark.parametrize("output", [1.5, "nan", "leaves a row", "raises"])
def test_a_wrong_candidate_never_wins(output: Any) -> None:
    """The fastest one computes something else, NaN, leaves a row unwritten or raises: the next best is proven and wins."""
    outcome = tune(FakeBench(Fake("eng0", 50), Fake("eng1", 20, output=output), Fake("eng2", 30)), Tuning())
    assert winner(outcome) == "eng2"
    assert results(outcome)["eng1"] == ("failed" if output == "raises" else "wrong")
    assert [one.candidate.name for one in outcome.wrong] == ([] if output == "raises" else ["eng1"])
    assert not outcome.heuristic_is_wrong


@pytest.mark.parametrize("output", [1.5, "nan", "leaves a row"])
def test_the_heuristics_own_plan_is_found_wrong(output: Any) -> None:
    """Two engines that agree are right against it, however it ranks; it is denied."""
    for time_us in (10, 60):
        outcome = tune(FakeBench(Fake("eng0", time_us, output=output), Fake("eng1", 20), Fake("eng2", 30)), Tuning())
        assert winner(outcome) == "eng1"
        assert outcome.heuristic_is_wrong
        assert [one.candidate.name for one in outcome.wrong] == ["eng0"]


def test_where_no_two_agree_nothing_is_proven() -> None:
    """Nobody wins, nobody is denied: none was shown wrong."""
    outcome = tune(FakeBench(Fake("eng0", 50, output=2.0), Fake("eng1", 20, output=3.0)), Tuning())
    assert winner(outcome) is None
    assert outcome.wrong == ()
    assert set(results(outcome).values()) == {"wrong"}


def test_a_single_candidate_is_proven_as_far_as_that_goes() -> None:
    """The proof says that there was no other to compare with."""
    outcome = tune(FakeBench(Fake("eng0", 50)), Tuning())
    assert winner(outcome) == "eng0"
    assert "no other plan" in outcome.proof
    assert winner(tune(FakeBench(Fake("eng0", 50, output="leaves a row")), Tuning())) is None


def test_denied_candidates_are_not_tried_and_known_winners_come_first() -> None:
    """A denial is a reason to skip; what won before is built first."""
    bench = FakeBench(Fake("eng0", 50), Fake("eng1", 20), Fake("eng2", 30))
    outcome = tune(bench, Tuning(), denied=lambda candidate: "shown wrong" if candidate.name == "eng1" else None, first=["eng2"])
    assert bench.started == ["eng2", "eng0"]
    assert winner(outcome) == "eng2"
    assert [(trial.name, trial.result, trial.reason) for trial in outcome.trials() if trial.name == "eng1"] == [
        ("eng1", "skipped", "shown wrong")
    ]


def test_those_that_are_left_out_are_not_built() -> None:
    """Where only some take part; the others say so, and do not count as failed."""
    bench = FakeBench(Fake("eng0", 50), Fake("eng1", 20), Fake("eng2", 10))
    outcome = tune(bench, Tuning(), only={"eng0", "eng1"})
    assert bench.started == ["eng0", "eng1"] and winner(outcome) == "eng1"
    assert [(trial.name, trial.result) for trial in outcome.trials() if "left out" in trial.reason] == [("eng2", "skipped")]


def test_each_step_is_watched_and_singly_each_run() -> None:
    """Whoever watches knows at any time which candidate runs; otherwise only the race is of several at once."""
    for singly in (False, True):
        steps: list[tuple[str, int]] = []
        under_way: list[str] = []

        @contextmanager
        def watch(
            step: str, candidates: Sequence[Candidate], steps: list[tuple[str, int]] = steps, under_way: list[str] = under_way
        ) -> Iterator[None]:
            steps.append((step, len(candidates)))
            under_way[:] = [candidate.name for candidate in candidates]
            yield
            under_way.clear()

        class Watched(FakeBench):
            def time_us(self, runnables: Sequence[Fake], runs: int, under_way: list[str] = under_way) -> list[list[float]]:
                assert under_way == [fake.name for fake in runnables]
                return super().time_us(runnables, runs)

            def outputs(self, runnable: Fake, poison: int, under_way: list[str] = under_way) -> Mapping[int, Any]:
                assert under_way == [runnable.name]
                return super().outputs(runnable, poison)

        assert winner(tune(Watched(Fake("eng0", 20.1), Fake("eng1", 20, workspace=1)), Tuning(), watch=watch, singly=singly)) == "eng0"
        assert {step for step, _ in steps} == {"build", "load", "run", "race", "proof"}
        assert {(step, count) for step, count in steps if count != 1} == (set() if singly else {("race", 2)})


def test_the_best_so_far_is_kept_when_the_budget_is_spent() -> None:
    """Without a second left the first candidate that is there is proven and kept; the others were not tried."""
    bench = FakeBench(Fake("eng0", 50), Fake("eng1", 20))
    slow: Future[Built] = Future()
    start = bench.start
    bench.start = lambda option: slow if option.candidate.name == "eng1" else start(option)  # type: ignore[method-assign]
    outcome = tune(bench, Tuning(budget_s=0))
    assert winner(outcome) == "eng0"
    assert results(outcome)["eng1"] == "skipped"
    assert slow.cancelled()


def test_every_candidate_that_fails_leaves_nobody() -> None:
    """The outcome says why of each."""
    outcome = tune(FakeBench(Fake("eng0", 50, builds=False), Fake("eng1", 20, builds=False)), Tuning())
    assert winner(outcome) is None
    assert [trial.reason for trial in outcome.trials()] == ["RuntimeError: CUDNN_STATUS_NOT_SUPPORTED"] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"budget_s": -1},
        {"budget_s": None},
        {"modes": ("C",)},
        {"modes": ()},
        {"measure": "both"},
        {"tie_margin": "1"},
        {"jobs": -1},
        {"tolerance": 2},
        {"replay": 1},
        {"isolate": "yes"},
        {"candidate_limit_s": None},
        {"candidate_limit_s": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    """The message names the setting."""
    with pytest.raises(SettingsError, match=next(iter(options))):
        Tuning(**options)


def test_poisons_differ_in_every_byte() -> None:
    """What stays as it was can be told from any value that a plan may write twice."""
    assert POISONS[0] != POISONS[1]
