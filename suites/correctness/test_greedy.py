"""Published models on this machine's device against 64 greedy tokens of the NumPy reference.

    pytest suites/correctness/test_greedy.py --device cuda --require-gpu

The reference's tokens are recorded (fixtures/greedy), so only the model's file is needed here.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend_hip import Device, Engine
from fixtures.golden import PUBLISHED, published_model
from fixtures.greedy import GreedyRecord, greedy_record, path_of
from reference.forward import Reference
from reference.model import Model
from reference.model.errors import InputError
from suites.correctness.greedy_reference import STEPS

# The CPU runtime gets what takes seconds; every step there is a step of `assay validate` too.
CPU_STEPS = 8


def undecided(record: GreedyRecord, emitted: list[int]) -> list[int]:
    """The steps at which `emitted` is another token and may be. AssertionError where it may not."""
    apart = [step for step, token in enumerate(emitted) if token != record.tokens[step]]
    wrong = [step for step in apart if record.decided(step)]
    assert not wrong, (
        f"{record.name}: greedy token {wrong[0]} is {emitted[wrong[0]]}, expected "
        f"{record.tokens[wrong[0]]}, whose margin is {record.margins[wrong[0]]:.3g} where logits "
        f"may be off by {record.limits[wrong[0]]:.3g}"
    )
    return apart


@pytest.mark.models
@pytest.mark.parametrize("model", PUBLISHED)
def test_engine_decodes_what_the_reference_does(
    model: str, load: Callable[[str], Model], device: Device
) -> None:
    record = greedy_record(model)
    steps = CPU_STEPS if device.runtime.kind == "cpu" else STEPS
    context = len(record.prompt) + STEPS
    kind = record.kv_type
    with Engine(
        load(model), device, context_length=context, kv_type_k=kind, kv_type_v=kind
    ) as engine:
        emitted = [engine.prefill_batched(record.prompt).tail.staged_token]
        while len(emitted) < steps:
            # The recorded token: where another one was allowed, the steps after it still compare.
            emitted.append(engine.step(record.tokens[len(emitted) - 1]))
    apart = undecided(record, emitted)
    assert sum(map(record.decided, range(steps))) > steps // 2, "too little was compared"
    assert len(apart) <= steps - sum(map(record.decided, range(steps)))


@pytest.mark.full
@pytest.mark.models
@pytest.mark.parametrize("model", PUBLISHED)
def test_the_record_begins_with_what_the_reference_says(
    model: str, load: Callable[[str], Model]
) -> None:
    record, golden = greedy_record(model), published_model(model)
    assert (record.sha256, record.prompt) == (golden.sha256, golden.ids)
    assert len(record.tokens) == STEPS
    kind = record.kv_type
    reference = Reference(load(model), dtype=np.float64, kv_type_k=kind, kv_type_v=kind)
    logits = reference.prefill(record.prompt)[-1]
    second, best = np.partition(logits, -2)[-2:]
    assert int(logits.argmax()) == record.tokens[0]
    assert abs(best - second - record.margins[0]) < record.limits[0]


RECORD = GreedyRecord("m", "0", (1,), "f16", (5, 6, 7), (1.0, 0.1, 1.0), (0.1, 0.1, 0.1))


def test_only_a_near_tie_may_be_decided_otherwise() -> None:
    assert undecided(RECORD, [5, 6, 7]) == []
    assert undecided(RECORD, [5, 9, 7]) == [1]
    with pytest.raises(AssertionError, match="greedy token 2 is 9, expected 7"):
        undecided(RECORD, [5, 6, 9])
    assert not replace(RECORD, margins=(0.2, 0.1, 1.0)).decided(0)


def test_a_record_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="expected a file tiny-llama"):
        greedy_record("tiny-llama")
    assert all(path_of(name).is_file() for name in PUBLISHED)
