"""Decode steps of path matrix: fused or op by op, and beside any others, the same bits."""

from collections.abc import Callable

import numpy as np
import pytest

from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.fused_batch import why_not_fused_batch
from backend_hip.registry import PACKED_MOST, PACKED_TILE
from reference.model import Model

MODEL = "tiny-qwen3-q4_k"
# Formats that share a launch, alike and not; with and without norms of heads; KV types of both.
CASES = (
    ("tiny-qwen3", ("f16", "f16")),
    ("tiny-qwen3-q5_k", ("f32", "q8_0")),
    ("tiny-llama3", ("q8_0", "f16")),
)


def _steps(engine: Engine, rows: int, count: int = 3) -> list[np.ndarray]:
    """Logits (rows, V) of `count` common steps, from sequences of other lengths."""
    engine.reset()
    for sequence in range(rows):
        engine.prefill_batched([1 + sequence, 2, 3][: 1 + sequence % 3], sequence=sequence)
    found = []
    for step in range(count):
        results = engine.decode_batch([4 + step + row for row in range(rows)], range(rows))
        found.append(np.stack([np.asarray(result.tail.logits) for result in results]))
    return found


@pytest.mark.parametrize(("name", "kv_types"), CASES)
def test_fused_steps_have_the_bits_of_single_ops(
    name: str, kv_types: tuple[str, str], device: Device, load: Callable[[str], Model]
) -> None:
    model = load(name)
    assert not why_not_fused_batch(model.spec, model.weights)
    rows = PACKED_TILE + 1
    found, left = [], []
    for fused in (True, False):
        with Engine(
            *(model, device),
            path="matrix",
            sequences=rows,
            context_length=16,
            fused=fused,
            kv_type_k=kv_types[0],
            kv_type_v=kv_types[1],
        ) as engine:
            assert engine.fusion.batch == ("on" if fused else "off")
            steps = [*_steps(engine, 2), *_steps(engine, rows)]
            ops = {key[0] for key, count in engine.kernels.routes.items() if count}
            assert ("norm_pack" in ops) == fused
            found.append(steps)
            left.append([engine.contents(sequence) for sequence in range(rows)])
    assert left[0] == left[1]
    assert len(found[0]) == 6
    for got, want in zip(*found, strict=True):
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_a_row_has_the_same_bits_beside_any_others(
    device: Device, load: Callable[[str], Model]
) -> None:
    model = load(MODEL)
    with Engine(model, device, path="matrix", sequences=PACKED_MOST, context_length=16) as engine:
        few, many = _steps(engine, 3), _steps(engine, PACKED_MOST)
    for some, every in zip(few, many, strict=True):
        np.testing.assert_array_equal(some.view(np.uint32), every[:3].view(np.uint32))
        assert len(np.unique(every, axis=0)) == PACKED_MOST


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiny-llama-q8_0", "weights in Q8_0"),
        ("tiny-gemma3", "post norms"),
        ("tiny-qwen3moe", "routed experts"),
    ],
)
def test_what_it_does_not_know_runs_op_by_op(
    name: str, reason: str, device: Device, load: Callable[[str], Model]
) -> None:
    model = load(name)
    with Engine(model, device, path="matrix", sequences=2, context_length=16) as engine:
        assert reason in engine.fusion.batch
        assert all(np.isfinite(step).all() for step in _steps(engine, 2, 1))
        assert not any(key[0] == "norm_pack" for key in engine.kernels.routes)
