"""Batched prefill against per-token prefill: equal bits on kparallel, bounded on the other paths.

Every format and shape at chosen lengths; test_relations.py varies chunks, cuts, resets and more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from backend_hip.engine import DEFAULT_MAX_COLS, Engine
from fixtures.tiny import MIX, TINY
from reference.model import Model
from reference.model.trace import Trace
from suites.correctness.oracles import ORACLES
from suites.correctness.relation_runs import kv_of, states_of
from suites.harness.compare import compare
from suites.harness.endtoend import References
from suites.options import SELECTION

EngineFor = Callable[..., Engine]
LeftBehind = dict[str, np.ndarray]

LONGEST = 105
MAX_COLS_SWEEP = (1, 8, 16, 32, 35, 40, 44, 48, 64)
# One token, two, and one below, at and above one and two full chunks; 105 is the source's prompt.
LENGTHS = tuple(
    sorted({1, 2, LONGEST} | {k * DEFAULT_MAX_COLS + d for k in (1, 2) for d in (-1, 0, 1)})
)
FEWER_LENGTHS = (1, DEFAULT_MAX_COLS, DEFAULT_MAX_COLS + 1, LONGEST)
# A model that --model names may be a thousand times as large.
ADDED_LENGTHS = (1, DEFAULT_MAX_COLS + 1)
KV_PAIRS = (("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("f32", "f16"))  # q8_0: test_splits.py


@dataclass(frozen=True)
class ModeCase:
    """One model with one pair of storage types, compared at each of `lengths`."""

    model: str
    kv_type_k: str
    kv_type_v: str
    lengths: tuple[int, ...]
    path: str = "kparallel"

    @property
    def id(self) -> str:
        return f"{self.model}-{self.kv_type_k}-{self.kv_type_v}"


def _mode_cases() -> Iterator[ModeCase]:
    """One model per architecture and shape, in its default mix of formats, with every pair of types
    at every length. The first three architectures in every format, with both types. The others in
    one more format, whose rows are no whole K blocks, and every option a file may carry; scaled
    RoPE, a table that both modes share, for one model each.
    """
    for name, case in TINY.items():
        default = case.format == MIX and name.count("-") == 1
        dense = name.startswith(("tiny-llama", "tiny-qwen3", "tiny-gemma3")) and not case.experts
        scaled = name.endswith(("-linear", "-yarn", "-attn-factor"))
        if default:
            yield from (ModeCase(name, *pair, LENGTHS) for pair in KV_PAIRS)
        elif case.format != MIX and dense and not case.delta_net:
            yield from (ModeCase(name, *pair, FEWER_LENGTHS) for pair in KV_PAIRS[:2])
        elif case.format in (MIX, "Q8_0") and not scaled:
            yield ModeCase(name, "f16", "f16", FEWER_LENGTHS)
    for name in ("tiny-llama-linear", "tiny-qwen3-yarn", *ORACLES):
        yield ModeCase(name, "f16", "f16", FEWER_LENGTHS)


MODE_CASES = tuple(_mode_cases())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode_case" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.stash[SELECTION]
    known = {case.model for case in MODE_CASES}
    pairs = list(product(chosen.kv_type_k or ("f16",), chosen.kv_type_v or ("f16",)))
    added = [
        ModeCase(name, *pair, FEWER_LENGTHS if name in TINY else ADDED_LENGTHS)
        for name in chosen.model
        if name not in known
        for pair in pairs
    ]
    metafunc.parametrize("mode_case", [*MODE_CASES, *added], ids=lambda case: case.id)


def _tokens(model: Model) -> list[int]:
    generator = np.random.default_rng(model.spec.embedding_length * 1000 + LONGEST)
    return [int(token) for token in generator.integers(0, model.spec.vocab_size, LONGEST)]


@dataclass(frozen=True)
class PerToken:
    """One per-token run that serves every shorter length too.

    `logits` (tokens, V); `cache` holds all positions; `states` by length, because a recurrent
    state belongs to one length alone.
    """

    logits: np.ndarray
    cache: LeftBehind
    states: dict[int, LeftBehind]


def _per_token(engine: Engine, lengths: Sequence[int] = (LONGEST,)) -> PerToken:
    engine.reset()
    rows, states, start = [], {}, 0
    for end in sorted(lengths):
        result = engine.prefill_per_token(_tokens(engine.model)[start:end], logits="all")
        assert not any("batched" in route for route in result.routes)
        rows.append(result.logits)
        states[end] = states_of(engine)
        start = end
    return PerToken(np.concatenate(rows), kv_of(engine), states)


def _assert_equal_bits(engine: Engine, expected: PerToken, length: int) -> None:
    engine.reset()
    result = engine.prefill_batched(_tokens(engine.model)[:length])
    assert result.n_tokens == engine.position == length
    assert result.chunks == -(-length // engine.chunk)
    assert any("matvec_batched" in route for route in result.routes)
    logits = compare(result.logits[0], expected.logits[length - 1], 0.0)
    assert logits.elements == engine.model.spec.vocab_size
    assert logits.bit_equal, f"logits at length {length}: {logits.reason()}"
    wanted = {name: array[:length] for name, array in expected.cache.items()}
    wanted |= expected.states[length]
    got = kv_of(engine) | states_of(engine)
    assert wanted
    assert wanted.keys() == got.keys()
    for name, want in wanted.items():
        found = compare(got[name], want, 0.0)
        assert found.bit_equal, f"{name}, length {length}: {found.reason()}"


def test_modes_agree_bit_for_bit(mode_case: ModeCase, engine_for: EngineFor) -> None:
    engine = engine_for(
        mode_case.model,
        kv_type_k=mode_case.kv_type_k,
        kv_type_v=mode_case.kv_type_v,
        path=mode_case.path,
    )
    expected = _per_token(engine, mode_case.lengths)
    for length in mode_case.lengths:
        _assert_equal_bits(engine, expected, length)


@pytest.mark.parametrize("max_cols", MAX_COLS_SWEEP)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
def test_max_cols_changes_no_bit(model: str, max_cols: int, engine_for: EngineFor) -> None:
    engine = engine_for(model, max_cols=max_cols)
    lengths = sorted({1, max_cols - 1, max_cols, max_cols + 1, LONGEST} - {0})
    expected = _per_token(engine, lengths)
    for length in lengths:
        _assert_equal_bits(engine, expected, length)


@pytest.mark.parametrize("path", ["serial", "matrix"])
@pytest.mark.parametrize("model", ["tiny-llama-q4_0", "tiny-qwen3", "tiny-gemma3"])
def test_other_paths_are_bounded(model: str, path: str, engine_for: EngineFor) -> None:
    engine = engine_for(model, path=path)
    tokens = _tokens(engine.model)
    expected = _per_token(engine)
    references = References(engine.model, "f16", "f16", path=path)
    # Each mode may be off by the end-to-end limit.
    limit = 2 * float(references.feed(tokens).limits[-1])
    engine.reset()
    result = engine.prefill_batched(tokens)
    assert any("matvec_batched" in route and path in route for route in result.routes)
    found = compare(result.logits[0], expected.logits[-1], limit)
    assert found.ok, found.reason()


@pytest.mark.any_model("oracle-gemma3")
def test_eager_equals_graph(model: str, engine_for: EngineFor) -> None:
    engine = engine_for(model)
    tokens = _tokens(engine.model)[:20]
    engine.reset()
    graph = engine.prefill_per_token(tokens, logits="all")
    engine.reset()
    eager = engine.prefill_per_token(tokens, logits="all", trace=Trace())
    assert graph.logits.tobytes() == eager.logits.tobytes()
