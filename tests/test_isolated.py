"""Tuning in child processes, real ones on a made-up GPU: what hangs, kills, raises or computes the wrong thing is never stored."""

from __future__ import annotations

import os
import select
import shutil
from pathlib import Path
from typing import Any

import pytest
from benches import FAKES, MadeUpBench, opened_to_tune
from faking import finish, product, start
from isolated_gpu import TARGET, script
from test_autotune import Fake
from test_tuner import reasons, stored

import plancache.isolated
import plancache.tuner
from plancache import PlanCache, Tuning
from plancache.children import Child
from plancache.errors import CaptureError, CompilerError, PlancacheWarning, ProofError, SettingsError

pytest.importorskip("cudnn")
pytest.importorskip("torch")

ISOLATED = Tuning(isolate=True)
IMPATIENT = Tuning(isolate=True, candidate_limit_s=2.0)


class Recorded(Child):
    """A child that tests can look at when it is gone."""

    made: list[Recorded]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The children that tuned; all are gone at the end, and so are their folders."""
    for name in ("PLANCACHE_DIR", "PLANCACHE_MODE", "PLANCACHE_BUNDLES", "PLANCACHE_BUILD"):
        monkeypatch.delenv(name, raising=False)
    Recorded.made = []
    monkeypatch.setattr(plancache.isolated, "TARGET", TARGET)
    monkeypatch.setattr(plancache.isolated, "Child", Recorded)
    return Recorded.made


def opened(monkeypatch: pytest.MonkeyPatch, directory: Path, *fakes: Fake, options: dict[str, Any] | None = None, **more: Any) -> PlanCache:
    """A cache whose tuning goes on in children that do what `isolated_gpu.script` says."""
    for name, value in script(directory, *(fakes or FAKES), **more).items():
        monkeypatch.setenv(name, value)
    cache, _ = opened_to_tune(directory / "cache", *(fakes or FAKES), **{"strict": True, **(options or {})})
    return cache


def gone(children: list[Recorded]) -> bool:
    return all(child.process.returncode is not None and not Path(child.folder).exists() for child in children)


def test_a_child_tunes_and_this_process_has_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """The heuristic's plan and the tuned one come from the child, with trials and proof; the next one is a hit."""
    with opened(monkeypatch, tmp_path) as cache:
        plan = cache.plan(product(), tuning=ISOLATED)
        assert plan.entry is not None and (plan.origin, plan.entry.engine, plan.entry.proof) == ("built", "eng1", "agrees with eng0")
        assert {name: result for name, (result, _) in reasons(plan.entry).items()} == {"eng0": "pruned", "eng1": "won", "eng2": "pruned"}
        assert stored(cache) == [("tuned", "eng1")] and cache.plan(product()).origin == "memory"
        (tuned,) = cache.tune([product(17)], tuning=ISOLATED)
        assert tuned.before is not None and tuned.before.engine == "eng0" and tuned.gain == pytest.approx(50 / 20, rel=0.1)
    assert len(children) == 2 and [child.process.returncode for child in children] == [0, 0] and gone(children)


@pytest.mark.parametrize("heuristic", ["right", 1.5])
def test_what_hangs_kills_raises_or_is_wrong_is_never_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded], heuristic: Any
) -> None:
    """Six faster ones, also where the heuristic's own is wrong: the first one that is right is stored, with all reasons."""
    fakes = [
        Fake("eng0", 25, output=heuristic),
        Fake("eng1", 20),
        Fake("eng2", 21),
        Fake("eng3", 22, output="raises"),
        Fake("eng4", 23, output=1.7),
        Fake("eng5", 24, output="nan"),
        Fake("eng6", 24, output="leaves a row"),
        Fake("eng7", 40),
        Fake("eng8", 44),
    ]
    with opened(monkeypatch, tmp_path, *fakes, load_eng1_1="hang", run_eng2_1="kill") as cache:
        plan = cache.plan(product(), tuning=IMPATIENT)
        assert plan.entry is not None and plan.entry.engine == ("eng0" if heuristic == "right" else "eng7")
        assert stored(cache) == [("tuned", plan.entry.engine)]
        said = reasons(plan.entry)
        assert said["eng1"] == ("failed", "hung: nothing came of its load within 2 s")
        assert said["eng2"] == ("failed", "its process was killed by signal 9 in its run")
        assert said["eng3"][0] == "failed" and {said[name][0] for name in ("eng4", "eng5", "eng6")} <= {"wrong"}
        kinds = {(verdict.kind, verdict.count) for verdict in cache.verdicts() if verdict.kind == "struck"}
        assert kinds == {("struck", 3), ("struck", 1)}  # the one that hung is not tried again, whatever its process left behind
    assert len(children) == 3 and gone(children)


@pytest.mark.parametrize(("deed", "step"), [("start_eng1_1", "build"), ("run_eng1_4", "race"), ("outputs_eng1_1", "proof")])
def test_a_candidate_that_hangs_is_killed_recorded_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded], deed: str, step: str
) -> None:
    """In whichever step, with the GIL held: the rest is tuned. Later tunings leave it out and say how to lift that."""
    with opened(monkeypatch, tmp_path, **{deed: "hang"}) as cache:
        plan = cache.plan(product(), tuning=IMPATIENT)
        assert plan.entry is not None and plan.entry.engine == "eng2" and len(children) == 2
        assert reasons(plan.entry)["eng1"] == ("failed", f"hung: nothing came of its {step} within 2 s")
        (verdict,) = cache.verdicts()
        assert verdict.reason == f"hung: nothing came of its {step} within 2 s"
        monkeypatch.setattr(plancache.tuner, "Workbench", MadeUpBench)
        (tuned,) = cache.tune([product()], refresh=True)
        result, reason = reasons(tuned.entry)["eng1"]
        assert result == "skipped" and reason == f"{verdict.reason}; to try once more: plancache rm --verdicts {verdict.key.hex()[:16]}"
        assert cache.lift(cache.verdicts()) == 1
        (tuned,) = cache.tune([product()], refresh=True)
        assert tuned.entry is not None and tuned.entry.engine == "eng1"
    assert gone(children)


def test_a_candidate_that_crashes_twice_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """Once in a tuning, whatever plans of its family there are; the second tuning tries it once more, the third does not.

    Progress is told twice a plan all the same.
    """
    for expected in ("failed", "failed", "skipped"):
        with opened(monkeypatch, tmp_path, outputs_eng1_1="kill") as cache:
            steps: list[int] = []
            done_ = cache.tune(
                [product(16), product(32)],
                tuning=ISOLATED,
                refresh=True,
                on_step=lambda steps=steps: steps.append(1),  # type: ignore[misc]
            )
            assert [tuned.entry and tuned.entry.engine for tuned in done_] == ["eng2", "eng2"] and len(steps) == 4
            assert reasons(done_[0].entry)["eng1"][0] == expected
    assert [child.process.returncode for child in children] == [-9, 0, -9, 0, 0]


def test_a_heuristic_that_hangs_gives_its_place_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph that was never planned: the next choice is stored as the heuristic's, and what wins is tuned."""
    with opened(monkeypatch, tmp_path, load_eng0_1="hang") as cache:
        (tuned,) = cache.tune([product()], tuning=IMPATIENT)
        assert tuned.before is not None and tuned.before.engine == "eng1" and tuned.entry is not None
        assert reasons(tuned.entry)["eng0"][0] == "failed" and tuned.entry.engine == "eng1"


def test_a_crash_outside_a_candidate_fails_its_plan_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the heuristics are asked: the others go on in a new child."""
    with opened(monkeypatch, tmp_path, plan_17_1="kill") as cache:
        steps: list[int] = []
        graphs = [product(size) for size in (16, 17, 18)]
        first, second, third = cache.tune(graphs, tuning=ISOLATED, on_step=lambda: steps.append(1))
        assert isinstance(second.error, CompilerError) and "killed by signal 9 in its plan" in second.reason
        assert first.entry is not None and third.entry is not None and len(steps) == 6
        assert sorted(quality for quality, _ in stored(cache)) == ["tuned", "tuned"]


def test_a_child_that_finds_another_machine_tunes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys name this process's driver and cuDNN: all plans fail with the reason, in one child."""
    with opened(monkeypatch, tmp_path, elsewhere=True) as cache:
        done_ = cache.tune([product(16), product(17)], tuning=ISOLATED)
        assert all(isinstance(tuned.error, CompilerError) and "LD_LIBRARY_PATH" in tuned.reason for tuned in done_)
        assert stored(cache) == []


def test_a_wrong_plan_without_a_right_one_is_the_usual_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ProofError` comes through as itself, and nothing is kept."""
    with opened(monkeypatch, tmp_path, Fake("eng0", 50, output="leaves a row"), Fake("eng1", 20, builds=False)) as cache:
        with pytest.raises(ProofError, match=r"eng0.*unwritten"):
            cache.plan(product(), tuning=ISOLATED)
        assert stored(cache) == []


def test_what_the_child_cannot_store_is_told_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, and a tuned plan all the same."""
    with opened(monkeypatch, tmp_path, full=True, options={"strict": False}) as cache:
        cache.plan(product())
        with pytest.warns(PlancacheWarning, match="disk I/O error"):
            plan = cache.plan(product(), tuning=ISOLATED)
        assert plan.entry is not None and plan.entry.engine == "eng1" and cache.statistics().faults["write"] == 1


def test_a_budget_for_all_graphs_holds_over_all_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left each stays as it is, and is told so."""
    with opened(monkeypatch, tmp_path) as cache:
        cache.plan(product())
        (tuned,) = cache.tune(tuning=Tuning(isolate=True, total_budget_s=0))
        assert (tuned.entry, tuned.error, tuned.reason) == (None, None, "the budget for all graphs was spent")


def test_what_compiles_for_a_child_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """A process that the child has started and that hangs too: nothing of it is left, its folder neither."""
    with opened(monkeypatch, tmp_path, load_eng1_1="hang with a child") as cache:
        plan = cache.plan(product(), tuning=Tuning(isolate=True, candidate_limit_s=5.0))
        assert plan.entry is not None and plan.entry.engine == "eng2"
    pid, folder = (tmp_path / "child.txt").read_text().split()
    assert ended(int(pid)) and not Path(folder).exists() and Path(folder).is_relative_to(children[0].folder) and gone(children)


def ended(pid: int) -> bool:
    """Whether a process that is not ours has ended, or ends now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(20_000))
    finally:
        os.close(descriptor)


def test_an_interrupt_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """Ctrl-C, or whatever else is raised here, leaves no process behind."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with opened(monkeypatch, tmp_path) as cache:
        with pytest.raises(KeyboardInterrupt):
            cache.tune([product()], tuning=ISOLATED, on_step=interrupt)
        assert len(children) == 1 and gone(children)


def test_a_child_ends_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is killed while a candidate hangs leaves no process behind."""
    for name, value in script(tmp_path, *FAKES, load_eng1_1="hang with a child").items():
        monkeypatch.setenv(name, value)
    program = """
    import sys, plancache.isolated
    from benches import opened_to_tune
    from faking import product
    from isolated_gpu import TARGET
    from plancache import Tuning
    from plancache.children import Child

    class Told(Child):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            print(self.process.pid, self.folder, flush=True)

    plancache.isolated.TARGET, plancache.isolated.Child = TARGET, Told
    cache, _ = opened_to_tune(sys.argv[1])
    cache.plan(product(), tuning=Tuning(isolate=True, candidate_limit_s=1000.0))
    """
    process = start(program, tmp_path / "cache")
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    log = tmp_path / "child.txt"
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not log.exists() or not log.read_text():
        assert not poll.poll(50), process.communicate()  # it says nothing more unless it fails
    process.kill()
    finish(process, code=-9)
    assert ended(int(pid)) and ended(int(log.read_text().split()[0]))
    shutil.rmtree(folder)  # nobody was left to do that


# ---- where it cannot be done


def test_inputs_stay_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """They cannot go to the child: an error with the cure, before one is started."""
    graph = product()
    with opened(monkeypatch, tmp_path) as cache, pytest.raises(SettingsError, match="leave them out"):
        cache.plan(graph, tuning=ISOLATED, inputs={graph._nodes[0].inputs["A"]: object()})
    assert children == []


@pytest.mark.parametrize("mode", ["off", "readonly"])
def test_without_a_store_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded], mode: str) -> None:
    """Results come through the store: the message names the directory and the cures."""
    with opened(monkeypatch, tmp_path, options={"mode": mode}) as cache, pytest.raises(SettingsError, match=rf"{mode}.*PLANCACHE_DIR"):
        cache.plan(product(), tuning=ISOLATED)
    assert children == []


def test_during_a_capture_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Recorded]) -> None:
    """As without isolation, before a child is started."""
    with opened(monkeypatch, tmp_path) as cache:
        cache.plan(product())
        monkeypatch.setattr("plancache.cache.is_capturing", lambda: True)
        with pytest.raises(CaptureError):
            cache.plan(product(), tuning=ISOLATED)
    assert children == []
