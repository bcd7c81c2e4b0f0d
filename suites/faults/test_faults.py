"""Catalogued faults are caught, and named where they were planted.

By default the fast tier on a part of the catalogue that CI has time for; `-m full` runs the full
tier, whose first looks are the fast one's, on all of it, as `assay faults` does.
"""

import pytest

from fixtures.faults import CATEGORIES, TIERS, Fault, load_faults
from suites.faults.conftest import FaultRun, waits
from suites.harness.fault_run import LOOKS, looks_of
from suites.harness.fault_score import MUST_CATCH_ALL

FAULTS = list(load_faults().values())
LEAST_FAULTS = 60
OFTEN = [
    fault
    for place, fault in enumerate(FAULTS)
    if fault.category in MUST_CATCH_ALL or place % 8 == 0
]
"""What CI has minutes for: every fault of the sampler, of control flow and of the KV cache, and of
the others every eighth."""


def _judge(fault: Fault, run: FaultRun) -> None:
    outcome = run.outcome(fault.id)
    assert outcome.dead == ""
    if run.tier == "full" or fault.tier == "fast":
        assert outcome.caught_by(run.tier), f"{fault.what}: the judge said ok"
        assert outcome.localised, f"named first: {outcome.link}, expected {fault.where}"


@pytest.mark.parametrize("fault", OFTEN, ids=lambda fault: fault.id)
def test_caught_by_the_fast_tier(fault: Fault, fast_run: FaultRun) -> None:
    _judge(fault, fast_run)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_caught_by_the_full_tier(fault: Fault, full_run: FaultRun) -> None:
    _judge(fault, full_run)


def test_the_score_of_the_fast_tier(fast_run: FaultRun) -> None:
    assert fast_run.score().problems(complete=False) == []


@pytest.mark.full
def test_the_score_of_the_full_tier(full_run: FaultRun) -> None:
    score = full_run.score()
    assert score.problems(complete=len(score.outcomes) == len(FAULTS)) == []


def test_the_catalogue_is_whole() -> None:
    assert len(FAULTS) >= LEAST_FAULTS
    assert {fault.category for fault in FAULTS} == set(CATEGORIES)
    assert {fault.category for fault in OFTEN} == set(CATEGORIES)
    late = [f.id for f in FAULTS if f.tier != "fast" and f.category in MUST_CATCH_ALL]
    assert late == []


def test_what_waits_for_the_run_comes_last(request: pytest.FixtureRequest) -> None:
    waiting = [waits(item) for item in request.session.items]
    assert waiting == sorted(waiting)


def test_a_dearer_tier_adds_looks() -> None:
    assert [len(looks_of(tier)) for tier in TIERS] == sorted(len(looks_of(t)) for t in TIERS)
    assert looks_of("full") == LOOKS
    assert len(looks_of("fast")) < len(LOOKS)
