"""`PlanCache` with tuning, on a made-up GPU: what is stored when, what is denied and lifted, who waits for whom, who dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benches import FAKES, MadeUpBench, TunableGpu, opened_to_tune
from faking import finish, product, start
from test_autotune import Fake
from test_cache import convolution

import plancache.tuner
from plancache import PlanCache, Tuning
from plancache.building import denial
from plancache.cli import main
from plancache.entry import Candidate, Entry, Quality, join_preimages
from plancache.errors import CaptureError, DeniedError, NotExecutableError, PlancacheWarning, ProofError, StoreError
from plancache.jobs import recipes
from plancache.key import PlanKey
from plancache.store.database import Database, Listed
from plancache.workbench import Builders, Workbench

pytest.importorskip("cudnn")

WRONG = Fake("eng0", 50, output=1.5)
"""The heuristics' first choice, which computes the wrong thing: two others agree against it."""

LEAVES = Fake("eng0", 50, output="leaves a row")


@pytest.fixture(autouse=True)
def made_up_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plancache.tuner, "Workbench", MadeUpBench)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANCACHE_DIR", "PLANCACHE_MODE", "PLANCACHE_BUNDLES", "PLANCACHE_BUILD"):
        monkeypatch.delenv(name, raising=False)


def stored(cache: PlanCache) -> list[tuple[str, str]]:
    """Quality and engine of all that is stored."""
    return [(listed.facts["quality"], listed.recipe.name) for listed in cache.entries()]


def reasons(entry: Entry | None) -> dict[str, tuple[str, str]]:
    assert entry is not None
    return {trial.name: (trial.result, trial.reason) for trial in entry.trials}


# ---- what is stored, and when


def test_a_miss_stores_the_heuristics_plan_and_then_the_tuned_one(tmp_path: Path) -> None:
    """While it is tuned others already find the heuristic's, unproven; the next cache loads the tuned one and builds nothing."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    seen: list[tuple[str, str, str]] = []

    def look(*_: str) -> None:
        if not seen:
            with closing(Database(cache.settings.database, lock_timeout_s=20)) as database:
                facts = [json.loads(row.facts) for row in database.listing()]
            seen.extend((fact["quality"], fact["recipe"][0], fact["proof"]) for fact in facts)

    gpu.when = look
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        assert seen == [("heuristic", "eng0", "none")]
        assert plan.entry is not None and (plan.origin, plan.entry.engine, plan.entry.proof) == ("built", "eng1", "agrees with eng0")
        assert stored(cache) == [("tuned", "eng1")] and plan.entry.conditions["measure"] == "eager"
        assert cache.plan(product()).origin == "memory"
    other, gpu = opened_to_tune(tmp_path, strict=True, tuning=Tuning())
    with other:
        loaded = other.plan(product())
        assert loaded.entry is not None and (loaded.origin, loaded.entry.engine, loaded.entry.quality) == ("local", "eng1", "tuned")
        assert (gpu.builds, gpu.benches, other.statistics().builds) == ([], [], 0)


def test_an_untuned_entry_is_upgraded_in_place_and_refresh_tunes_again(tmp_path: Path) -> None:
    """`tune()` takes all untuned ones, none twice; with refresh the tuned ones too. What is in memory is the tuned one then."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        for size in (16, 17):
            assert cache.plan(product(size)).origin == "built"
        done = cache.tune()
        assert [(tuned.entry and tuned.entry.engine, tuned.error, tuned.elsewhere) for tuned in done] == [("eng1", None, False)] * 2
        assert done[0].gain == pytest.approx(50 / 20, rel=0.1)
        assert stored(cache) == [("tuned", "eng1")] * 2
        plan = cache.plan(product(16))
        assert plan.entry is not None and (plan.entry.engine, plan.origin) == ("eng1", "local")
        assert (cache.tune(), len(gpu.benches)) == ([], 2)
        gpu.fakes = [*FAKES[:2], Fake("eng2", 10)]
        assert [tuned.entry and tuned.entry.engine for tuned in cache.tune(refresh=True)] == ["eng2"] * 2
        assert stored(cache) == [("tuned", "eng2")] * 2
        gpu.fakes = [*FAKES[:2], Fake("eng3", 5)]
        again = cache.plan(product(16), refresh=True, tuning=Tuning())
        assert again.entry is not None and again.entry.engine == "eng3"


def test_tune_takes_graphs_entries_and_the_same_one_twice(tmp_path: Path) -> None:
    """One outcome for each that was given, one tuning for each key; one that was never planned has its heuristic's plan first."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product(16)).entry
        done = cache.tune([product(17), entry, product(17)])
        assert [tuned.entry is not None for tuned in done] == [True] * 3 and done[0] is done[2]
        assert done[0].before is not None and done[0].before.engine == "eng0" and len(gpu.benches) == 2


def test_quality_never_goes_down(tmp_path: Path) -> None:
    """A refresh without tuning leaves the tuned entry in the store."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(), tuning=Tuning())
        again = cache.plan(product(), refresh=True)
        assert again.entry is not None and again.entry.quality == "heuristic"
        assert stored(cache) == [("tuned", "eng1")]


def test_to_tune_names_what_tune_would_take(tmp_path: Path) -> None:
    """By the beginning of a key; one that is tuned only on refresh, one that is not for this place is an error."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
        assert entry is not None
        assert [each.key for each in cache.to_tune(entry.key.hex[:10])] == [each.key for each in cache.to_tune()] == [entry.key]
        cache.tune()
        assert (cache.to_tune(), cache.to_tune(entry.key)) == ([], []) and len(cache.to_tune(entry.key, refresh=True)) == 1
        elsewhere = PlanKey((*entry.key.preimages[:2], b'"another GPU"', *entry.key.preimages[3:]))
        strange = Entry.of(entry, key=elsewhere, quality="heuristic", created_at=1.0, provenance={})
        with closing(Database(cache.settings.database, lock_timeout_s=20)) as database:
            database.put(strange)
        assert cache.to_tune() == []
        with pytest.raises(LookupError, match=r"not for this NVIDIA H200"):
            cache.to_tune(elsewhere)


# ---- what other environments learned

UPGRADE = {"driver": b"1", "cudnn": b'{"version":1}', "frontend": b'"1.0.0"'}


def learned(directory: Path, engine: str, *, changed: Mapping[str, bytes] = UPGRADE, quality: Quality = "tuned") -> None:
    """Stores that an engine was chosen for `product()` in an environment that differs in these components of its key."""
    cache, _ = opened_to_tune(directory, strict=True)
    with cache:
        entry = cache.plan(product()).entry
        assert entry is not None
        theirs = PlanKey(tuple(changed.get(name, preimage) for name, preimage in entry.key.components.items()))
        recipe = Candidate(engine, int(engine.removeprefix("eng")), {})
        cache.remove(entry.key, force=True)
        with closing(Database(cache.settings.database, lock_timeout_s=20)) as database:
            database.put(replace(entry, key=theirs, quality=quality, recipe=recipe, proof="agrees with eng0"))


def built(gpu: TunableGpu) -> list[str]:
    return [name.removeprefix("start ") for name in gpu.done if name.startswith("start")]


def test_after_an_upgrade_what_won_is_tried_against_the_heuristic_alone(tmp_path: Path) -> None:
    """Only those two are built, timed and compared; the better one is stored as tuned, with what was left out."""
    learned(tmp_path, "eng1")
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and (plan.entry.engine, plan.entry.proof) == ("eng1", "agrees with eng0")
        assert built(gpu) == ["eng1", "eng0"] and gpu.done.count("start eng2") == 0
        assert reasons(plan.entry)["eng2"] == ("skipped", "left out: what won in an earlier environment was tried alone")
        assert sorted(stored(cache)) == [("tuned", "eng1")] * 2


def test_what_won_before_and_is_the_heuristics_first_choice_is_compared_with_another(tmp_path: Path) -> None:
    """There is nothing to race, but a proof takes two."""
    learned(tmp_path, "eng0")
    cache, gpu = opened_to_tune(tmp_path, Fake("eng0", 20), Fake("eng1", 25), Fake("eng2", 30), strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and (plan.entry.engine, plan.entry.proof) == ("eng0", "agrees with eng1")
        assert built(gpu) == ["eng0", "eng1"]


@pytest.mark.parametrize(
    "fakes",
    [
        [Fake("eng0", 50), Fake("eng1", 60), Fake("eng2", 20)],
        [Fake("eng0", 50), Fake("eng1", 10, output=1.5), Fake("eng2", 20)],
        [Fake("eng0", 50), Fake("eng1", 10, output="leaves a row"), Fake("eng2", 20)],
        [Fake("eng0", 50), Fake("eng1", 10, builds=False), Fake("eng2", 20)],
        [Fake("eng0", 50), Fake("eng2", 20)],
        [Fake("eng0", 50, output=1.5), Fake("eng1", 40), Fake("eng2", 20)],
    ],
    ids=["slower", "wrong", "partly unwritten", "does not build", "not there", "disagrees with a wrong heuristic"],
)
def test_what_won_before_is_not_trusted(tmp_path: Path, fakes: list[Fake]) -> None:
    """Where it is slower than the heuristic, wrong, or cannot be had, all are tried."""
    learned(tmp_path, "eng1")
    cache, gpu = opened_to_tune(tmp_path, *fakes, strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and plan.entry.engine == "eng2"
        assert set(built(gpu)) == {fake.name for fake in fakes}
        wrong = [fake.name for fake in fakes if fake.output != "right"]
        assert [verdict.reason.partition(",")[0] for verdict in cache.verdicts()] == wrong
        if fakes[1].output == "leaves a row":  # shown wrong by itself, the first time already
            assert built(gpu).count("eng1") == 1


@pytest.mark.parametrize(
    ("changed", "quality", "tuning", "refresh"),
    [
        (UPGRADE, "tuned", Tuning(), True),
        (UPGRADE, "tuned", Tuning(replay=False), False),
        (UPGRADE, "heuristic", Tuning(), False),
        ({"model": b'"another GPU"'}, "tuned", Tuning(), False),
        ({"constraints": b'{"deterministic":true}'}, "tuned", Tuning(), False),
    ],
    ids=["refresh", "not wanted", "untuned", "another GPU", "other constraints"],
)
def test_otherwise_what_was_chosen_elsewhere_only_comes_first(
    tmp_path: Path, changed: dict[str, bytes], quality: Quality, tuning: Tuning, refresh: bool
) -> None:
    """All are tried, in another order than the heuristics'."""
    learned(tmp_path, "eng1", changed=changed, quality=quality)
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(), tuning=tuning, refresh=refresh)
        assert built(gpu) == ["eng1", "eng0", "eng2"]


def test_rows_that_cannot_be_read_are_no_recipes(tmp_path: Path) -> None:
    """Listings are not checked: what is malformed in any way is passed over, and the others count, the newest first."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
        assert entry is not None
    theirs = join_preimages(PlanKey((*entry.key.preimages[:3], b"1", *entry.key.preimages[4:])).preimages)

    class Rows:
        def listing(self) -> list[Listed]:
            facts = [b"{}", b"[]", b"no JSON", b'{"recipe": [], "quality": "tuned", "created_at": 1}']
            facts += [b'{"recipe": ["eng%d"], "quality": "tuned", "created_at": %s}' % pair for pair in ((1, b'"x"'), (2, b"1"), (3, b"2"))]
            rows = [(theirs, fact) for fact in facts] + [(b"junk", facts[-1]), (None, facts[-1])]
            return [Listed(b"key", preimage, fact, 0, 0, None) for preimage, fact in rows]  # type: ignore[arg-type]

    found = recipes(Rows(), [entry.key])[entry.key]  # type: ignore[arg-type]
    assert [(recipe.name, recipe.tuned, recipe.upgraded) for recipe in found] == [("eng3", True, True), ("eng2", True, True)]


def test_without_tuning_the_heuristics_choice_stays(tmp_path: Path) -> None:
    """A recipe is never trusted without having been run here."""
    learned(tmp_path, "eng1")
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        plan = cache.plan(product())
        assert plan.entry is not None and (plan.entry.engine, plan.entry.quality) == ("eng0", "heuristic")


def test_what_cannot_be_stored_is_a_warning_and_a_tuned_plan_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the cache never fails a caller; in strict mode it is raised."""
    cache, _ = opened_to_tune(tmp_path)
    with cache:
        cache.plan(product())

        def full(*_: object, **__: object) -> bool:
            raise StoreError("disk I/O error")

        monkeypatch.setattr(cache._levels, "put", full)
        with pytest.warns(PlancacheWarning, match="disk I/O error"):
            plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and plan.entry.quality == "tuned"
        assert cache.statistics().faults["write"] == 1


def test_a_budget_for_all_graphs_ends_with_the_reason(tmp_path: Path) -> None:
    """With nothing left each stays as it is, and is told so."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(16))
        cache.plan(product(17))
        done = cache.tune(tuning=Tuning(total_budget_s=0))
        assert [(tuned.entry, tuned.error, tuned.reason) for tuned in done] == [(None, None, "the budget for all graphs was spent")] * 2
        assert gpu.done == [] and stored(cache) == [("heuristic", "eng0")] * 2


def test_progress_is_told_twice_a_graph(tmp_path: Path) -> None:
    """When it was looked at and when it was decided, whatever became of it."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(16))
        cache.plan(product(17))
        for tuning in (Tuning(total_budget_s=0), Tuning()):
            steps: list[int] = []
            finished: list[int] = []
            cache.tune(tuning=tuning, on_step=lambda steps=steps: steps.append(1), on_done=lambda _, finished=finished: finished.append(1))  # type: ignore[misc]
            assert (len(steps), len(finished)) == (4, 2)


def test_tuning_for_a_device_file_is_refused(tmp_path: Path, device: Any) -> None:
    """It runs plans; `plan` with tuning builds as without."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        for call in (cache.tune, cache.to_tune):
            with pytest.raises(NotExecutableError, match="tune on the GPU itself"):
                call()
        entry = cache.plan(convolution(), tuning=Tuning()).entry
        assert entry is not None and entry.quality == "compiled"


def test_tuning_during_a_capture_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built or run; without tuning the plan that is ready is given."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product())
        monkeypatch.setattr("plancache.cache.is_capturing", lambda: True)
        with pytest.raises(CaptureError, match="tune it before the capture"):
            cache.plan(product(), tuning=Tuning())
        assert gpu.benches == [] and cache.plan(product()).origin == "memory"


# ---- wrong engines


def test_a_wrong_heuristic_is_denied_and_the_tuned_plan_takes_its_place(tmp_path: Path) -> None:
    """Shown by two others that agree."""
    cache, _ = opened_to_tune(tmp_path, WRONG, *FAKES[1:], strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and plan.entry.engine == "eng1" and reasons(plan.entry)["eng0"][0] == "wrong"
        assert stored(cache) == [("tuned", "eng1")]
        assert [(verdict.kind, verdict.reason.partition(",")[0]) for verdict in cache.verdicts()] == [("denied", "eng0")]


def test_where_nothing_is_right_nothing_is_kept_and_the_denied_engine_is_not_handed_out(tmp_path: Path) -> None:
    """`plan` raises, the entry goes; the next request builds what is not denied, or says what is in the way and how to lift it."""
    cache, gpu = opened_to_tune(tmp_path, LEAVES, Fake("eng1", 20, output="raises"), Fake("eng2", 30, builds=False), strict=True)
    with cache:
        before = cache.plan(product())
        assert before.entry is not None and before.entry.engine == "eng0"
        with pytest.raises(ProofError, match=r"eng0.*unwritten"):
            cache.plan(product(), tuning=Tuning())
        assert stored(cache) == []
        after = cache.plan(product())
        assert after.entry is not None and (after.entry.engine, after.origin) == ("eng1", "built")
        assert stored(cache) == [("heuristic", "eng1")]
        cache.remove(after.entry.key, force=True)
        gpu.fakes[1:2] = []
        with pytest.raises(DeniedError, match=r"eng0 is denied .*plancache rm --verdicts") as caught:
            cache.plan(product())
        assert caught.value.digest == after.entry.key.hex and stored(cache) == []
        assert cache.lift(cache.verdicts()) == 1
        again = cache.plan(product())
        assert again.entry is not None and again.entry.engine == "eng0"


def test_one_that_has_no_right_plan_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that nor one whose heuristics fail: each is told with its error."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        keys = [entry.key for entry in [cache.plan(product(size)).entry for size in (16, 17, 18)] if entry is not None]

        class Uneven(MadeUpBench):
            def __init__(self, backend: TunableGpu, _: object, signature: bytes, *__: object) -> None:
                number = [key.components["signature"] for key in keys].index(signature)
                backend.fakes = [list(FAKES), [LEAVES], list(FAKES)][number]
                super().__init__(backend)
                if number == 2:
                    raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")

        monkeypatch.setattr(plancache.tuner, "Workbench", Uneven)
        done = cache.tune()
        assert [type(tuned.error) for tuned in done] == [type(None), ProofError, RuntimeError]
        assert done[0].entry is not None and "unwritten" in done[1].reason and done[2].reason == "CUDNN_STATUS_INTERNAL_ERROR"
        assert sorted(stored(cache)) == [("heuristic", "eng0"), ("tuned", "eng1")]


def test_denials_hold_for_the_family_and_are_lifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape neither tries nor is given the denied engine, until `plancache rm --verdicts` lifts it."""
    cache, _ = opened_to_tune(tmp_path, WRONG, *FAKES[1:], strict=True)
    with cache:
        cache.plan(product(16), tuning=Tuning())
        (verdict,) = cache.verdicts()
    cache, gpu = opened_to_tune(tmp_path, *FAKES, strict=True)
    with cache:
        plan = cache.plan(product(32))
        assert plan.entry is not None and plan.entry.engine == "eng1"
        plan = cache.plan(product(32), tuning=Tuning())
        assert reasons(plan.entry)["eng0"] == ("skipped", verdict.reason) and "start eng0" not in gpu.done
    monkeypatch.setenv("PLANCACHE_DIR", str(tmp_path))
    assert main(["rm", "--verdicts", verdict.key.hex()[:12]]) == 0
    cache, gpu = opened_to_tune(tmp_path, *FAKES, strict=True)
    with cache:
        plan = cache.plan(product(48))
        assert plan.entry is not None and plan.entry.engine == "eng0"
        cache.tune([product(48)])
        assert "start eng0" in gpu.done


def test_a_stored_plan_that_was_denied_since_goes_where_no_other_is_right(tmp_path: Path) -> None:
    """Its engine was shown wrong on another shape of its family, so it does not stay for want of a better one."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product(32)).entry
        gpu.fakes = [WRONG, *FAKES[1:]]
        cache.plan(product(16), tuning=Tuning())
        gpu.fakes = [FAKES[0], Fake("eng1", 20, builds=False)]
        (tuned,) = cache.tune([entry])
        assert isinstance(tuned.error, ProofError) and stored(cache) == [("tuned", "eng1")]


def test_a_denial_that_cannot_be_recorded_holds_in_this_process(tmp_path: Path) -> None:
    """With the cache off nothing is written, and the engine is not handed out all the same."""
    cache, _ = opened_to_tune(tmp_path, LEAVES, strict=True, mode="off")
    with cache:
        with pytest.raises(ProofError):
            cache.plan(product(), tuning=Tuning())
        with pytest.raises(DeniedError):
            cache.plan(product())


def test_a_sealed_plan_that_was_shown_wrong_is_used_no_more(tmp_path: Path) -> None:
    """It cannot be removed, so it is noted beside it, for later processes too."""
    from plancache.store.sealed import seal

    there, _ = opened_to_tune(tmp_path / "there", LEAVES, strict=True)
    with there:
        there.plan(product())
    seal(there.settings.database, lock_timeout_s=20)
    for expected in (ProofError, DeniedError):
        cache, _ = opened_to_tune(tmp_path / "here", LEAVES, strict=True, bundles=(there.settings.database,))
        with cache, pytest.raises(expected):
            cache.plan(product(), tuning=Tuning())


def test_without_a_gpu_a_denied_choice_is_an_error_with_its_cure(tmp_path: Path, device: Any) -> None:
    """On real cuDNN: what comes next is not known in this process."""
    with PlanCache(tmp_path, device=device, strict=True) as cache:
        entry = cache.plan(convolution()).entry
        assert entry is not None
        digest = denial(entry.key, entry.recipe)
        cache._levels.record("denied", digest, "shown wrong")
        with pytest.raises(DeniedError, match=f"{entry.recipe.name} is denied .*rm --verdicts {digest.hex()[:16]}"):
            cache.plan(convolution(), refresh=True)
        assert cache.plan(convolution()).origin == "memory"


def test_a_stored_plan_whose_engine_was_denied_since_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built anew with the next choice, in processes that open the store later too. Hits of others ask for nothing more."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(32))
        cache.plan(product(17))
        gpu.fakes = [WRONG, *FAKES[1:]]
        cache.plan(product(16), tuning=Tuning())
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        asked: list[bytes | None] = []
        verdicts = Database.verdicts
        assert cache.plan(product(32), build="lookup") is None
        monkeypatch.setattr(Database, "verdicts", lambda self, key=None: [asked.append(key), verdicts(self, key)][1])
        hits = [cache.plan(product(17)), cache.plan(product(16))]
        assert [(plan.origin, plan.entry and plan.entry.engine) for plan in hits] == [("local", "eng0"), ("local", "eng1")] and asked == []
        plan = cache.plan(product(32))
        assert plan.entry is not None and (plan.origin, plan.entry.engine) == ("built", "eng1")
        assert sorted(stored(cache)) == [("heuristic", "eng0"), ("heuristic", "eng1"), ("tuned", "eng1")]


def test_a_tuning_reads_what_is_known_of_candidates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many graphs and candidates there are."""
    cache, gpu = opened_to_tune(tmp_path, WRONG, *FAKES[1:], strict=True)
    with cache:
        cache.plan(product(16))
        gpu.done.clear()
        asked: list[bytes | None] = []
        verdicts = Database.verdicts
        monkeypatch.setattr(Database, "verdicts", lambda self, key=None: [asked.append(key), verdicts(self, key)][1])
        done = cache.tune([product(16), product(32), product(48)])
        assert [tuned.entry and tuned.entry.engine for tuned in done] == ["eng1"] * 3 and asked == [None, None]


def test_the_usual_miss_looks_for_denials_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One SELECT over what is known beside the entries on a miss, none on a hit."""
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        cache.plan(product(16))
        asked: list[bytes | None] = []
        verdicts = Database.verdicts
        monkeypatch.setattr(Database, "verdicts", lambda self, key=None: [asked.append(key), verdicts(self, key)][1])
        cache.plan(product(16))
        assert asked == []
        entry = cache.plan(product(17)).entry
        assert entry is not None and asked == [entry.key.digest, None]


# ---- several processes

CHILD = """
    import os, signal, sys
    import plancache.tuner
    from benches import MadeUpBench, opened_to_tune
    from faking import product
    from plancache import Tuning
    from plancache.singleflight import SingleFlight

    plancache.tuner.Workbench = MadeUpBench
"""

HOLDER = """
    import sys
    from pathlib import Path
    from plancache.singleflight import SingleFlight

    flight = SingleFlight(Path(sys.argv[1]) / "tuning", timeout_s=60, on_fault=print)
    with flight.building(bytes.fromhex(sys.argv[2])):
        print("held", flush=True)
        sys.stdin.readline()
"""


def test_without_waiting_the_heuristics_plan_is_used_while_another_process_tunes(tmp_path: Path) -> None:
    """At once: no candidates are asked for. Once the other one is done the next request tunes after all."""
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        entry = cache.plan(product()).entry
        assert entry is not None
        other = start(HOLDER, tmp_path, entry.key.hex)
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        plan = cache.plan(product(), tuning=Tuning(wait=False))
        assert plan.entry is not None and (plan.entry.engine, plan.origin, gpu.benches) == ("eng0", "memory", [])
        (tuned,) = cache.tune(tuning=Tuning(wait=False))
        assert (tuned.entry, tuned.error, tuned.elsewhere, tuned.reason) == (None, None, True, "another process tunes it")
        finish(other)
        plan = cache.plan(product(), tuning=Tuning(wait=False))
        assert plan.entry is not None and plan.entry.engine == "eng1"


def test_of_two_processes_one_tunes_and_the_other_takes_its_result(tmp_path: Path) -> None:
    """The second one waits for the lock, and then neither builds nor runs anything."""
    first = start(
        CHILD
        + """
    cache, gpu = opened_to_tune(sys.argv[1], strict=True)
    def wait(step, name):
        if step == "run" and not gpu.told:
            gpu.told = True
            print("tuning", flush=True)
            sys.stdin.readline()
    gpu.told, gpu.when = False, wait
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        print(plan.entry.engine, len(gpu.benches))
    """,
        tmp_path,
    )
    assert first.stdout is not None and first.stdout.readline() == "tuning\n"
    second = start(
        CHILD
        + """
    from contextlib import contextmanager
    attempt = SingleFlight.attempt
    @contextmanager
    def told(self, key):
        with attempt(self, key) as free:
            print("free" if free else "taken", flush=True)
            yield free
    SingleFlight.attempt = told
    cache, gpu = opened_to_tune(sys.argv[1], strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning())
        print(plan.entry.engine, plan.entry.quality, plan.origin, len(gpu.benches))
    """,
        tmp_path,
    )
    assert second.stdout is not None and second.stdout.readline() == "taken\n"
    assert finish(first)[0] == "eng1 1\n"
    assert finish(second)[0] == "eng1 tuned local 0\n"


@pytest.mark.parametrize("step", ["start", "load", "run"])
def test_a_candidate_that_ended_the_process_twice_is_skipped(tmp_path: Path, step: str) -> None:
    """Whether it was built, loaded or run for the first time then; its trial says so and how to try it once more."""
    dying = (
        CHILD
        + f"""
    cache, gpu = opened_to_tune(sys.argv[1], strict=True)
    gpu.when = lambda step, name: os.kill(os.getpid(), signal.SIGKILL) if (step, name) == ({step!r}, "eng1") else None
    cache.plan(product(), tuning=Tuning())
    """
    )
    for _ in range(2):
        finish(start(dying, tmp_path), code=-signal.SIGKILL)
    cache, gpu = opened_to_tune(tmp_path, strict=True)
    with cache:
        (verdict,) = [verdict for verdict in cache.verdicts() if verdict.kind == "struck"]
        plan = cache.plan(product(), tuning=Tuning())
        assert plan.entry is not None and plan.entry.engine == "eng2" and "start eng1" not in gpu.done
        result, reason = reasons(plan.entry)["eng1"]
        assert result == "skipped" and "2 processes ended" in reason and f"rm --verdicts {verdict.key.hex()[:16]}" in reason
        cache.lift([verdict])
        (tuned,) = cache.tune(refresh=True)
        assert tuned.entry is not None and tuned.entry.engine == "eng1"


def test_a_heuristic_that_ends_the_process_is_marked_too(tmp_path: Path) -> None:
    """Tuning a graph that was never planned builds and loads the first choice itself: the next one takes its place."""
    dying = (
        CHILD
        + """
    cache, gpu = opened_to_tune(sys.argv[1], strict=True)
    gpu.when = lambda step, name: os.kill(os.getpid(), signal.SIGKILL) if (step, name) == ("load", "eng0") else None
    cache.tune([product()])
    """
    )
    for _ in range(2):
        finish(start(dying, tmp_path), code=-signal.SIGKILL)
    cache, _ = opened_to_tune(tmp_path, strict=True)
    with cache:
        (tuned,) = cache.tune([product()])
        assert tuned.before is not None and tuned.before.engine == "eng1"
        assert tuned.entry is not None and reasons(tuned.entry)["eng0"][0] == "skipped"


def test_a_candidate_that_hung_in_a_child_that_compiles_is_skipped(tmp_path: Path) -> None:
    """The child was killed for it: its trial says so, and it is not tried again until that is lifted."""
    fakes = [FAKES[0], Fake("eng1", 20, builds=TimeoutError("no answer within 7 s")), FAKES[2]]
    cache, gpu = opened_to_tune(tmp_path, *fakes, strict=True)
    with cache:
        plan = cache.plan(product(), tuning=Tuning(candidate_limit_s=7))
        assert plan.entry is not None and plan.entry.engine == "eng2"
        assert reasons(plan.entry)["eng1"] == ("failed", "hung: nothing came of its build within 7 s")
        gpu.done.clear()
        (tuned,) = cache.tune([product()], refresh=True)
        result, reason = reasons(tuned.entry)["eng1"]
        assert result == "skipped" and reason.startswith("hung: ") and "rm --verdicts" in reason and "start eng1" not in gpu.done


# ---- the real bench, as far as it goes without a GPU


def test_what_is_left_out_is_not_compiled_ahead_and_without_children_nothing_is(tmp_path: Path) -> None:
    """A build in this process waits for its turn, when it is marked."""
    from plancache.backend import Option

    options = [Option(Candidate(f"eng{number}", number, {}), deterministic=True, runtime_compiled=True) for number in range(3)]
    started: list[str] = []

    class Backend:
        device = None

        def options(self, *_: object) -> tuple[None, list[Option]]:
            return object(), options  # type: ignore[return-value]

    class Recording(Builders):
        def start(self, _: object, __: object, option: Option, ___: object) -> Future[Any]:  # type: ignore[override]
            started.append(option.candidate.name)
            return Future()

    signature = product_signature(tmp_path)
    for jobs, expected in ((2, ["eng0", "eng2"]), (0, [])):
        started.clear()
        builders = Recording(None, b"", {}, jobs)  # type: ignore[arg-type]
        bench = Workbench(Backend(), builders, signature, None, Tuning(), {})  # type: ignore[arg-type]
        assert bench.compiling(lambda one: one.name != "eng1") == 2
        bench.start_compiling(lambda one: one.name != "eng1")
        assert started == expected


def product_signature(directory: Path) -> bytes:
    cache, _ = opened_to_tune(directory)
    with cache:
        entry = cache.plan(product()).entry
        assert entry is not None
        return entry.key.components["signature"]
