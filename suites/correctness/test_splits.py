"""Whole models over contexts of several splits of keys: both prefill modes, batches and graphs."""

from collections.abc import Callable

import numpy as np
import pytest

from backend_hip.attention_shape import SPLIT_KEYS
from backend_hip.engine import Engine
from backend_hip.graphs import GraphUse
from reference.kv_cache import stored
from reference.model.errors import Unsupported
from suites.harness.compare import same_bits

EngineFor = Callable[..., Engine]

LENGTH = SPLIT_KEYS + 3
CONTEXT = 2 * SPLIT_KEYS + 1
CASES = [
    ("tiny-qwen3", "f16", "f16"),
    ("tiny-qwen3", "q8_0", "q8_0"),
    ("tiny-gemma3", "q8_0", "f16"),
    ("tiny-llama", "f32", "q8_0"),
]


def _tokens(engine: Engine, count: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng([LENGTH, seed])
    return [int(token) for token in random.integers(0, engine.model.spec.vocab_size, count)]


@pytest.mark.parametrize(("model", "kv_type_k", "kv_type_v"), CASES)
def test_prefill_modes_agree_across_splits(
    model: str, kv_type_k: str, kv_type_v: str, engine_for: EngineFor
) -> None:
    engine = engine_for(
        model, kv_type_k=kv_type_k, kv_type_v=kv_type_v, context_length=CONTEXT, chunk=50
    )
    tokens = _tokens(engine, LENGTH)
    one = engine.prefill_per_token(tokens)
    left = engine.contents()
    assert any("attention_merge" in route for route in one.routes)
    engine.reset()
    many = engine.prefill_batched(tokens)
    assert not any("attention_split" in route for route in many.routes)
    assert np.isfinite(one.logits).all()
    assert one.logits.tobytes() == many.logits.tobytes()
    assert left == engine.contents()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_sequences_in_other_buckets_get_their_own_bits(kv_type: str, engine_for: EngineFor) -> None:
    lengths = (SPLIT_KEYS - 1, 5, 2 * SPLIT_KEYS - 1)
    options = {"kv_type_k": kv_type, "kv_type_v": kv_type, "context_length": CONTEXT, "chunk": 64}
    single = engine_for("tiny-qwen3", **options)
    want = []
    for sequence, length in enumerate(lengths):
        single.reset()
        single.prefill_batched(_tokens(single, length, sequence))
        want.append([single.decode(token).tail.logits.tobytes() for token in (3, 5)])
    batch = engine_for("tiny-qwen3", sequences=len(lengths), **options)
    for sequence, length in enumerate(lengths):
        batch.prefill_batched(_tokens(batch, length, sequence), sequence=sequence)
    for step, token in enumerate((3, 5)):
        for sequence, result in enumerate(batch.decode_batch([token] * len(lengths))):
            assert result.tail.logits.tobytes() == want[sequence][step], (sequence, step)


def test_graphs_are_captured_once_a_bucket(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-qwen3", context_length=CONTEXT)
    assert engine.graph_use == GraphUse()
    assert engine.graph_use.hit_rate == 0.0
    engine.prefill_batched(_tokens(engine, SPLIT_KEYS - 2))
    for replays, captures in ((1, 1), (2, 1), (3, 2), (4, 2)):
        engine.step(1)
        assert (engine.graph_use.replays, engine.graph_use.captures) == (replays, captures)
    assert engine.graph_use.hit_rate == 0.5
    assert engine.graph_use.capture_us > 0


def test_kv_contents_are_the_values_that_the_bytes_stand_for(engine_for: EngineFor) -> None:
    wide, blocks = (
        engine_for("tiny-qwen3", kv_type_k=kind, kv_type_v=kind, context_length=64)
        for kind in ("f32", "q8_0")
    )
    for engine in (wide, blocks):
        engine.prefill_batched(_tokens(engine, 7))
    # Layer 0 reads no cache before it writes its own, so both engines store the same values.
    for exact, rounded in zip(wide.kv_contents(0), blocks.kv_contents(0), strict=True):
        assert rounded.dtype == np.float32
        assert same_bits(rounded, stored("q8_0", exact))


def test_a_head_that_is_no_whole_number_of_blocks_is_refused(engine_for: EngineFor) -> None:
    with pytest.raises(Unsupported, match="heads of 36; supported: heads of a multiple of 32"):
        engine_for("tiny-llama-odd", kv_type_v="q8_0")
