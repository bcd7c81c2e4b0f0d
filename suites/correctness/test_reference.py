"""The NumPy reference against llama.cpp's recorded logits, and against itself when chunked.

test_delta_net_forms.py has the two forms of the gated delta net and its state.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import gguf
import numpy as np
import pytest

from fixtures.golden import GATE, GREEDY_PROMPT, PUBLISHED, published_model
from reference.forward import DenseCache, Reference
from reference.model import Model, load_model
from reference.model.errors import InputError, Unsupported
from reference.ops import Array
from suites.correctness.oracles import ORACLES, golden_name, golden_of
from suites.harness.compare import compare
from suites.harness.tolerances import ORACLE_TIE_MARGIN, oracle_limit


@cache
def _loaded(model: str) -> tuple[Model, DenseCache]:
    return load_model(golden_of(model).path), {}


@dataclass(frozen=True)
class GoldenCase:
    """One recorded prompt of one tiny model, run by the reference in one precision."""

    model: str
    length: int
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.model}-{self.length}-{self.dtype}"


GOLDEN_CASES = [
    GoldenCase(model, length, dtype)
    for model in ORACLES
    for length in golden_of(model).prompts
    for dtype in ("float32", "float64")
]


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case.id)
def test_logits_agree_with_llama_cpp_at_every_recorded_position(case: GoldenCase) -> None:
    prompt = golden_of(case.model).prompts[case.length]
    model, dense = _loaded(case.model)
    reference = Reference(
        model, dtype=getattr(np, case.dtype), kv_type_k="f32", kv_type_v="f32", dense=dense
    )
    logits = reference.prefill(prompt.tokens.tolist(), logits="all")[prompt.positions]
    result = compare(
        logits.astype(np.float32),
        prompt.logits,
        oracle_limit(golden_name(case.model), prompt.logits),
    )
    assert result.elements == prompt.logits.size
    assert result.ok, result.reason()
    assert np.array_equal(logits.argmax(axis=-1), prompt.logits.argmax(axis=-1))


def test_every_golden_is_compared() -> None:
    lengths = {model: [*golden_of(model).prompts] for model in ORACLES}
    assert len(GOLDEN_CASES) == 2 * sum(map(len, lengths.values()))
    assert sum(600 in found for found in lengths.values()) == 10
    longest = [model for model, found in lengths.items() if 2100 in found]
    assert longest == ["oracle-llama", "oracle-qwen35"]


@pytest.mark.parametrize("model", ORACLES)
def test_decoding_token_by_token_agrees_with_llama_cpp(model: str) -> None:
    """Longer than the sliding windows, the convolution and the delta net's memory of one chunk."""
    prompt = golden_of(model).prompts[40]
    loaded, dense = _loaded(model)
    reference = Reference(loaded, kv_type_k="f32", kv_type_v="f32", dense=dense)
    logits = np.stack([reference.decode(token) for token in prompt.tokens.tolist()])
    result = compare(logits, prompt.logits, oracle_limit(golden_name(model), prompt.logits))
    assert result.elements == prompt.logits.size
    assert result.ok, result.reason()
    assert np.array_equal(logits.argmax(axis=-1), prompt.logits.argmax(axis=-1))
    assert reference.position == 40


@pytest.mark.parametrize("model", ORACLES)
def test_greedy_tokens_are_llama_cpps(model: str) -> None:
    """The oracle's token is fed each time, so one near-tie does not end the comparison."""
    golden = golden_of(model)
    prompt = golden.prompts[GREEDY_PROMPT]
    loaded, dense = _loaded(model)
    reference = Reference(loaded, kv_type_k="f32", kv_type_v="f32", dense=dense)
    logits = reference.prefill(prompt.tokens.tolist())[0]
    near_tie = 2 * oracle_limit(golden_name(model), prompt.logits)
    compared = 0
    for token, margin in zip(golden.greedy_ids.tolist(), golden.greedy_margins, strict=True):
        if margin > near_tie:
            assert int(logits.argmax()) == token, f"after {reference.position} tokens"
            compared += 1
        logits = reference.decode(token)
    assert compared > len(golden.greedy_ids) // 2


@pytest.mark.models
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_model_agrees_with_llama_cpp(model: str, load: Callable[[str], Model]) -> None:
    loaded = load(model)
    golden = published_model(model)
    assert loaded.file.sha256 == golden.sha256
    run = golden.runs[GATE]
    reference = Reference(loaded, kv_type_k="f32", kv_type_v="f32", context_length=256)
    logits = reference.prefill(golden.ids)[0]
    result = compare(logits, run.last_logits, oracle_limit(model, run.last_logits))
    assert result.ok, result.reason()
    compared = 0
    for token, margin in zip(run.greedy_ids, run.greedy_margins, strict=True):
        if margin < ORACLE_TIE_MARGIN:
            break
        assert int(logits.argmax()) == token, f"greedy token {compared}"
        compared += 1
        logits = reference.decode(int(token))
    assert compared > 0


@cache
def _whole_prefill(model: str) -> Array:
    loaded, dense = _loaded(model)
    whole = Reference(loaded, dtype=np.float64, kv_type_k="f32", kv_type_v="f32", dense=dense)
    return whole.prefill(golden_of(model).prompts[79].tokens.tolist(), logits="all")


@pytest.mark.parametrize("model", ORACLES)
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 39, 40, 41])
def test_chunking_changes_only_rounding(model: str, chunk: int) -> None:
    # BLAS sums in another order for another number of rows, so the relation is bounded, not exact:
    # float64 runs differ by far less than float32 resolves.
    loaded, dense = _loaded(model)
    expected = _whole_prefill(model)
    parts = Reference(loaded, dtype=np.float64, kv_type_k="f32", kv_type_v="f32", dense=dense)
    got = parts.prefill(golden_of(model).prompts[79].tokens.tolist(), chunk=chunk, logits="all")
    result = compare(got, expected, oracle_limit(golden_name(model), expected))
    assert result.ok, result.reason()
    assert parts.position == len(expected) == 79


def test_prefill_then_decode_equals_one_prefill() -> None:
    model, dense = _loaded("oracle-gemma3")
    tokens = golden_of("oracle-gemma3").prompts[40].tokens.tolist()
    whole = Reference(model, dtype=np.float64, dense=dense)
    steps = Reference(model, dtype=np.float64, dense=dense)
    expected = whole.prefill(tokens, logits="all")
    steps.prefill(tokens[:20])
    for place, token in enumerate(tokens[20:], start=20):
        result = compare(steps.decode(token), expected[place], oracle_limit("gemma3", expected))
        assert result.ok, f"token {place}: {result.reason()}"


def test_reset_forgets_the_sequence() -> None:
    model, dense = _loaded("oracle-llama")
    tokens = golden_of("oracle-llama").prompts[17].tokens.tolist()
    reference = Reference(model, dense=dense)
    first = reference.prefill(tokens)
    reference.reset()
    assert reference.position == 0
    assert np.array_equal(reference.prefill(tokens), first)


def test_kv_types_round_on_write() -> None:
    model, dense = _loaded("oracle-qwen3")
    tokens = golden_of("oracle-qwen3").prompts[17].tokens.tolist()
    wide = Reference(model, kv_type_k="f32", kv_type_v="f32", dense=dense)
    mixed = Reference(model, kv_type_k="f16", kv_type_v="f32", dense=dense)
    wide.prefill(tokens)
    mixed.prefill(tokens)
    keys, values = mixed.kv_contents(0)
    assert keys.dtype == np.float16
    assert values.dtype == np.float32
    # Layer 0 sees the same inputs in both, so its keys are the wide ones rounded once.
    assert np.array_equal(keys, wide.kv_contents(0)[0].astype(np.float16))
    with pytest.raises(Unsupported, match="kv-type-k is q3_k; supported: f32, f16, q8_0"):
        Reference(model, kv_type_k="q3_k")


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_block_kv_types_round_each_head_as_the_format_does(kind: str) -> None:
    model, dense = _loaded("oracle-llama")
    tokens = golden_of("oracle-llama").prompts[40].tokens.tolist()
    wide = Reference(model, kv_type_k="f32", kv_type_v="f32", dense=dense)
    blocks = Reference(model, kv_type_k=kind, kv_type_v=kind, dense=dense)
    exact, rounded = wide.prefill(tokens), blocks.prefill(tokens)
    form = gguf.GGMLQuantizationType[kind.upper()]
    # Layer 0 sees the same inputs in both; gguf-py says what the format makes of them.
    for want, got in zip(wide.kv_contents(0), blocks.kv_contents(0), strict=True):
        expected = gguf.quants.dequantize(gguf.quants.quantize(want, form), form)
        assert got.dtype == np.float32
        assert np.array_equal(got, expected)
        assert not np.array_equal(got, want)
    assert np.isfinite(rounded).all()
    assert not np.array_equal(rounded, exact)


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    model, dense = _loaded("oracle-llama")
    layers = tuple(replace(layer, head_size=48) for layer in model.spec.layers)
    odd = replace(model, spec=replace(model.spec, layers=layers))
    with pytest.raises(InputError, match="layer 0 has heads of 48, expected a multiple of 32"):
        Reference(odd, kv_type_v="q8_0", dense=dense)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "prompt is empty"),
        ([0, 320], "id 320 at place 1 is out of range"),
        ([-1], "id -1 at place 0 is out of range"),
        ([1] * 9, "9 tokens do not fit, expected at most 8"),
    ],
)
def test_bad_tokens_are_refused_before_anything_runs(tokens: list[int], message: str) -> None:
    model, dense = _loaded("oracle-llama")
    reference = Reference(model, context_length=8, dense=dense)
    with pytest.raises(InputError, match=message):
        reference.prefill(tokens)
    assert reference.position == 0
