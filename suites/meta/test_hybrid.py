"""The search for the stage at which hybrids turn, on planted answers."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.model.trace import Trace, trace_points
from suites.harness.hybrid import Hybrids, run_hybrids, search, stages, values_before
from suites.meta.models import oracle_model

COUNT = 12
NAMES = ("embedding", *(f"layer {i}" for i in range(COUNT - 2)), "output")


class Counted:
    """An answer for each cut, and how often it was asked."""

    def __init__(self, wrong: Callable[[int], bool]) -> None:
        self._wrong = wrong
        self.asked: list[int] = []

    def __call__(self, cut: int) -> bool:
        self.asked.append(cut)
        return self._wrong(cut)


def _hybrids(broken: set[int]) -> Hybrids:
    """Each stage of `broken` spoils the end by itself."""
    return run_hybrids(
        NAMES,
        lambda cut: any(stage >= cut for stage in broken),
        lambda cut: any(stage < cut for stage in broken),
        bool(broken),
    )


@pytest.mark.parametrize("stage", range(COUNT))
def test_one_broken_stage_is_named_by_both(stage: int) -> None:
    found = _hybrids({stage})
    assert found.agreed == NAMES[stage]
    called = NAMES[stage] if NAMES[stage].startswith("layer") else f"the {NAMES[stage]}"
    assert found.text().startswith(f"Both hybrids name {called}: ")
    assert len(found.reference_first.wrong) < COUNT


@given(st.sets(st.integers(0, COUNT - 1), min_size=2))
def test_several_broken_stages_are_spanned(broken: set[int]) -> None:
    found = _hybrids(broken)
    assert found.agreed is None
    assert found.span == (NAMES[min(broken)], NAMES[max(broken)])
    assert "more than one stage breaks" in found.text()


def test_nothing_wrong_names_nothing() -> None:
    found = _hybrids(set())
    assert (found.agreed, found.span) == (None, (None, None))
    assert found.text().startswith("The hybrids name nothing: ")


def test_errors_that_cancel_are_said_to_be_so() -> None:
    """Stages 3 and 7 undo each other, stage 9 is wrong by itself."""

    def wrong(engine: set[int]) -> bool:
        return len(engine & {3, 7}) == 1 or 9 in engine

    found = run_hybrids(
        NAMES,
        lambda cut: wrong(set(range(cut, COUNT))),
        lambda cut: wrong(set(range(cut))),
        True,
    )
    assert (found.agreed, found.span) == (None, (None, None))
    assert {*found.reference_first.wrong} == {*found.engine_first.wrong} == set(range(COUNT + 1))
    assert found.reference_first.turns == (9,)
    assert found.engine_first.turns == (3, 7, 9)
    assert "errors cancel or need each other" in found.text()
    assert "turns at layer 2, layer 6, layer 8" in found.text()


def test_a_turn_that_does_not_hold_one_stage_further_is_not_believed() -> None:
    answers = [True] * 10 + [False, True, False]
    found = search(lambda cut: answers[cut], COUNT)
    assert not found.monotone
    assert found.turns == (9, 10, 11)
    assert set(found.wrong) == set(range(COUNT + 1))


def test_a_deep_model_is_not_run_at_every_cut() -> None:
    names = ("embedding", *(f"layer {i}" for i in range(40)), "output")
    found = run_hybrids(names, lambda cut: cut <= 31, lambda cut: cut > 4, True)
    assert found.span == ("layer 3", "layer 30")
    assert len(found.reference_first.wrong) < 12
    assert "of the cuts that were run" in found.text()


def test_equal_ends_turn_nowhere_and_cost_nothing_more() -> None:
    asked = Counted(lambda cut: True)
    assert search(asked, COUNT).stage is None
    assert asked.asked == [0, COUNT]


@given(st.integers(0, COUNT - 1), st.booleans())
def test_a_single_turn_is_found_with_few_runs(stage: int, first: bool) -> None:
    asked = Counted(lambda cut: first if cut <= stage else not first)
    found = search(asked, COUNT)
    assert (found.stage, found.monotone) == (stage, True)
    assert len(asked.asked) == len(set(asked.asked)) <= 8
    assert {stage, stage + 1} <= set(found.wrong)


def test_the_values_before_a_cut_are_those_of_whole_stages() -> None:
    spec = oracle_model("gemma4e").spec
    trace = Trace()
    for point in trace_points(spec):
        trace.record(point.name, np.zeros((1, 1)))
    assert not values_before(spec, trace, 0)
    assert set(values_before(spec, trace, 1)) == {"inp_embd", "inp_per_layer"}
    third = values_before(spec, trace, 3)
    assert {"Kcur_pos-1", "l_out-1", "inp_per_layer"} <= set(third)
    assert not [name for name in third if name.endswith("-2")]
    whole = values_before(spec, trace, len(stages(spec)))
    assert len(whole) == len(trace_points(spec))
