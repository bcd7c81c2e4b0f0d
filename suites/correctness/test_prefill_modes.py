"""Batched prefill against per-token prefill: equal bits on kparallel, bounded on serial."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from backend_hip.engine import DEFAULT_MAX_COLS, Engine
from backend_hip.results import PrefillResult
from fixtures.golden import TINY_GATES
from fixtures.tiny import TINY
from reference.forward import Reference
from reference.model import Model
from reference.model.trace import Trace
from suites.harness.compare import compare
from suites.harness.tolerances import END_TO_END

EngineFor = Callable[..., Engine]

LONGEST = 105
MAX_COLS_SWEEP = (1, 8, 16, 32, 35, 40, 44, 48, 64)
# One token, two, and one below, at and above one and two full chunks; 105 is the source's prompt.
LENGTHS = sorted({1, 2, LONGEST} | {k * DEFAULT_MAX_COLS + d for k in (1, 2) for d in (-1, 0, 1)})
MODELS = (*TINY, *(f"oracle-{name}" for name in TINY_GATES))
KV_PAIRS = (("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("f32", "f16"))


def _tokens(model: Model, count: int = LONGEST) -> list[int]:
    generator = np.random.default_rng(model.spec.embedding_length * 1000 + count)
    return [int(token) for token in generator.integers(0, model.spec.vocab_size, count)]


@dataclass(frozen=True)
class PerToken:
    """One per-token run of LONGEST tokens; serves every shorter length too."""

    result: PrefillResult
    cache: tuple[tuple[np.ndarray, np.ndarray], ...]


def _kv(engine: Engine) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return tuple(engine.kv_contents(layer.index) for layer in engine.model.spec.layers)


def _per_token(engine: Engine) -> PerToken:
    engine.reset()
    result = engine.prefill_per_token(_tokens(engine.model), logits="all")
    return PerToken(result, _kv(engine))


def _assert_equal_bits(engine: Engine, expected: PerToken, length: int) -> None:
    engine.reset()
    result = engine.prefill_batched(_tokens(engine.model)[:length])
    assert result.n_tokens == engine.position == length
    assert result.chunks == -(-length // engine.chunk)
    assert any("matvec_batched" in route for route in result.routes)
    assert not any("matvec_batched" in route for route in expected.result.routes)
    logits = compare(result.logits[0], expected.result.logits[length - 1], 0.0)
    assert logits.elements == engine.model.spec.vocab_size
    assert logits.bit_equal, f"logits at length {length}: {logits.reason()}"
    for layer, (want, got) in enumerate(zip(expected.cache, _kv(engine), strict=True)):
        for side, wanted, have in zip("KV", want, got, strict=True):
            found = compare(have, wanted[:length], 0.0)
            assert found.bit_equal, f"{side} of layer {layer}, length {length}: {found.reason()}"


# Equal types on every model; unequal ones on one model per architecture.
MODE_CASES = [
    (name, kv_type_k, kv_type_v)
    for name in MODELS
    for kv_type_k, kv_type_v in KV_PAIRS
    if kv_type_k == kv_type_v or name in ("tiny-llama", "tiny-qwen3", "tiny-gemma3")
]


@pytest.mark.parametrize(("name", "kv_type_k", "kv_type_v"), MODE_CASES)
def test_modes_agree_bit_for_bit(
    name: str, kv_type_k: str, kv_type_v: str, engine_for: EngineFor
) -> None:
    engine = engine_for(name, kv_type_k=kv_type_k, kv_type_v=kv_type_v)
    expected = _per_token(engine)
    for length in LENGTHS:
        _assert_equal_bits(engine, expected, length)


@pytest.mark.parametrize("max_cols", MAX_COLS_SWEEP)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
def test_max_cols_changes_no_bit(name: str, max_cols: int, engine_for: EngineFor) -> None:
    engine = engine_for(name, max_cols=max_cols)
    expected = _per_token(engine)
    for length in sorted({1, max_cols - 1, max_cols, max_cols + 1, LONGEST} - {0}):
        _assert_equal_bits(engine, expected, length)


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 41, 100, 105, 512])
def test_chunk_changes_no_bit(chunk: int, engine_for: EngineFor) -> None:
    # Chunks longer than MAX_COLS run their products in several groups of columns.
    engine = engine_for("tiny-gemma3", chunk=chunk)
    expected = _per_token(engine)
    for length in (LONGEST, 41):
        _assert_equal_bits(engine, expected, length)


def test_logits_at_every_position_agree(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-qwen3")
    expected = _per_token(engine)
    engine.reset()
    result = engine.prefill_batched(_tokens(engine.model), logits="all")
    found = compare(result.logits, expected.result.logits, 0.0)
    assert found.elements == LONGEST * engine.model.spec.vocab_size
    assert found.bit_equal, found.reason()


@pytest.mark.parametrize("name", ["tiny-llama-q4_0", "tiny-qwen3", "tiny-gemma3"])
def test_serial_path_is_bounded(name: str, engine_for: EngineFor) -> None:
    engine = engine_for(name, path="serial")
    tokens = _tokens(engine.model)
    expected = _per_token(engine)
    dense: Any = {}
    runs = [
        Reference(engine.model, dtype=dtype, dense=dense, kv_type_k=kind, kv_type_v=kind).prefill(
            tokens
        )[0]
        for dtype, kind in ((np.float32, "f16"), (np.float64, "f16"), (np.float64, "f32"))
    ]
    distance, rounding = (float(np.abs(run - runs[1]).max()) for run in (runs[0], runs[2]))
    # Each mode may be off by the end-to-end limit.
    limit = 2 * END_TO_END.limit(distance, rounding)
    engine.reset()
    result = engine.prefill_batched(tokens)
    assert any("matvec_batched" in route and "serial" in route for route in result.routes)
    found = compare(result.logits[0], expected.result.logits[-1], limit)
    assert found.ok, found.reason()


def test_prefill_continues_where_the_cache_ends(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-gemma3")
    tokens = _tokens(engine.model)
    expected = _per_token(engine)
    for cut in (1, 15, 16, 17, 39, 40, 41, 104):
        engine.reset()
        engine.prefill_batched(tokens[:cut])
        rest = engine.prefill_batched(tokens[cut:])
        found = compare(rest.logits[0], expected.result.logits[-1], 0.0)
        assert found.bit_equal, f"cut at {cut}: {found.reason()}"


def test_reset_leaves_nothing_of_the_last_prompt(engine_for: EngineFor) -> None:
    engine = engine_for("tiny-gemma3")
    first = _tokens(engine.model)
    second = _tokens(engine.model, 41)
    engine.reset()
    clean = engine.prefill_batched(second)
    contents = _kv(engine)
    engine.reset()
    engine.prefill_batched(first)
    engine.reset()
    again = engine.prefill_batched(second)
    assert again.logits.tobytes() == clean.logits.tobytes()
    for want, got in zip(contents, _kv(engine), strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))


def test_eager_equals_graph(engine_for: EngineFor) -> None:
    engine = engine_for("oracle-gemma3")
    tokens = _tokens(engine.model, 20)
    engine.reset()
    graph = engine.prefill_per_token(tokens, logits="all")
    engine.reset()
    eager = engine.prefill_per_token(tokens, logits="all", trace=Trace())
    assert graph.logits.tobytes() == eager.logits.tobytes()
