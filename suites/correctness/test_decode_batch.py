"""Sequences that advance together: each gets the bits that it gets alone, and touches no other."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.engine_options import MAX_SEQUENCES
from fixtures.registry import resolve_model
from reference.dequant import dequantise
from reference.model import load_model
from reference.model.errors import InputError
from reference.quantise import quantise
from suites.correctness.oracles import ORACLES

EngineFor = Callable[..., Engine]
Logits = NDArray[np.float32]

# Prompt lengths around a tile of keys and a chunk of 7, one per sequence.
LENGTHS = (1, 7, 33, 8)
# Which sequences each step advances: all, another order, a part, one alone.
ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (1,))


def _prompt(engine: Engine, sequence: int) -> list[int]:
    random = np.random.default_rng(400 + sequence)
    ids = random.integers(0, engine.model.spec.vocab_size, LENGTHS[sequence])
    return [int(token) for token in ids]


def _bits(logits: Logits) -> bytes:
    assert np.isfinite(logits).all()
    return logits.tobytes()


def _alone(engine: Engine, sequence: int, steps: int) -> tuple[list[bytes], list[int], list[bytes]]:
    """Logits after the prompt and after each step, tokens, and what is left behind."""
    engine.reset()
    result = engine.prefill_batched(_prompt(engine, sequence))
    logits, tokens = [_bits(result.logits)], [result.tail.staged_token]
    for _ in range(steps):
        step = engine.decode(tokens[-1])
        logits.append(_bits(step.tail.logits))
        tokens.append(step.token)
    return logits, tokens, engine.contents()


@pytest.mark.parametrize("model", ORACLES)
def test_a_batch_gives_each_sequence_its_own_bits(model: str, engine_for: EngineFor) -> None:
    single = engine_for(model, chunk=7, context_length=64)
    steps = [sum(sequence in order for order in ORDERS) for sequence in range(len(LENGTHS))]
    want = [_alone(single, sequence, count) for sequence, count in enumerate(steps)]

    batch = engine_for(model, chunk=7, context_length=64, sequences=len(LENGTHS))
    last = []
    for sequence in range(len(LENGTHS)):
        prefilled = batch.prefill_batched(_prompt(batch, sequence), sequence=sequence)
        assert _bits(prefilled.logits) == want[sequence][0][0]
        last.append(prefilled.tail.staged_token)
    taken = [0] * len(LENGTHS)
    for order in ORDERS:
        results = batch.decode_batch([last[sequence] for sequence in order], order)
        assert len(results) == len(order)
        for sequence, result in zip(order, results, strict=True):
            taken[sequence] += 1
            logits, tokens, _ = want[sequence]
            assert _bits(result.tail.logits) == logits[taken[sequence]], (order, sequence)
            assert result.token == result.tail.device_token == tokens[taken[sequence]]
            assert result.fed_token == last[sequence]
            assert result.position == LENGTHS[sequence] + taken[sequence]
            last[sequence] = result.token
    assert taken == steps
    for sequence in range(len(LENGTHS)):
        assert batch.contents(sequence) == want[sequence][2], sequence


def test_production_steps_emit_the_judged_tokens(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-qwen3", context_length=64, sequences=2)
    for sequence in range(2):
        engine.prefill(_prompt(engine, sequence), sequence=sequence)
    judged = [result.token for result in engine.decode_batch([3, 5])]
    engine.reset()
    assert engine.positions == (0, 0)
    for sequence in range(2):
        engine.prefill(_prompt(engine, sequence), sequence=sequence)
    assert engine.step_batch([3, 5]) == judged
    assert engine.positions == (LENGTHS[0] + 1, LENGTHS[1] + 1)


def test_a_batch_multiplies_with_the_batched_kernels(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-qwen3", context_length=64, sequences=2)
    two = engine.decode_batch([3, 5])[0].routes
    one = engine.decode(7).routes
    assert any("matvec_few" in row for row in two)
    assert not any("matvec_few" in row for row in one)


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [([], []), ([1, 2], [0]), ([1, 2], [0, 0]), ([1], [2]), ([1], [-1])],
    ids=["none", "too many tokens", "one twice", "past the last", "negative"],
)
def test_a_wrong_batch_is_refused(
    tokens: list[int], sequences: list[int], engine_for: EngineFor
) -> None:
    engine = engine_for("tiny-qwen3", context_length=64, sequences=2)
    with pytest.raises(InputError, match=r"^engine: "):
        engine.decode_batch(tokens, sequences)
    assert engine.positions == (0, 0)


@pytest.mark.parametrize("sequences", [0, MAX_SEQUENCES + 1])
def test_a_number_of_sequences_out_of_range_is_refused(
    sequences: int, engine_for: EngineFor
) -> None:
    with pytest.raises(InputError, match=f"sequences is {sequences}, expected 1 to"):
        engine_for("tiny-qwen3", sequences=sequences)


@pytest.mark.parametrize("path", ["kparallel", "matrix"])
def test_the_last_token_can_be_chosen(path: str, device: Device) -> None:
    """By every entry: where the count of logits ends a token early, it never is."""
    model = load_model(resolve_model("tiny-llama"))
    head, last = model.weights.top["output"], model.spec.vocab_size - 1
    rows = dequantise(head.format, head.raw, np.float32)
    prompt = [3, 1, 4]
    with Engine(model, device, path=path, context_length=16) as engine:
        logits = engine.prefill_batched(prompt).logits[-1]
    best = int(np.argmax(logits))
    # Above the best of any token: along it and against the one that is least.
    rows[last] = 20 * (rows[best] - rows[int(np.argmin(logits))])
    raw = quantise(head.format, rows)
    top = {**model.weights.top, "output": replace(head, raw=raw.reshape(head.raw.shape))}
    changed = replace(model, weights=replace(model.weights, top=top))
    with Engine(changed, device, path=path, sequences=2, context_length=16) as engine:
        for prefill in (engine.prefill_per_token, engine.prefill_batched):
            engine.reset()
            assert prefill(prompt).tail.staged_token == last
        engine.reset()
        for sequence in (0, 1):
            engine.prefill_batched(prompt[:-1], sequence=sequence)
        assert engine.step_batch([prompt[-1]] * 2) == [last, last]
        engine.reset()
        engine.prefill_batched(prompt[:-1])
        assert engine.step(prompt[-1]) == last
