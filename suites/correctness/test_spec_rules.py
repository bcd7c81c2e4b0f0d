"""ModelSpec: what it holds of a file that is right, defaults and overrides included."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fixtures.golden import golden_model
from fixtures.registry import resolve_model
from reference.model import load_model
from reference.model.gguf import read_gguf
from reference.model.spec import ModelSpec, RopeSpec, YarnSpec
from suites.correctness.gguf_edits import Edit, both, drop, load, put
from suites.harness.tolerances import FEW_ROUNDINGS


def test_gemma_layers_slide_five_of_six() -> None:
    spec = load_model(golden_model("gemma3").path).spec
    assert [layer.window for layer in spec.layers] == [16] * 5 + [None]
    assert [layer.rope.base for layer in spec.layers] == [1e4] * 5 + [1e6]
    assert [layer.rope.divisor for layer in spec.layers] == [1.0] * 5 + [8.0]


def test_defaults_hold_only_where_the_key_is_absent() -> None:
    def spec(*edits: Edit) -> ModelSpec:
        return load("gemma3", both(*edits))

    period = put("gemma3.attention.sliding_window_pattern", 3)
    assert [layer.window for layer in spec(period).layers] == [16, 16, None] * 2
    flags = [True, False, False, True, True, False]
    named = spec(put("gemma3.attention.sliding_window_pattern", flags))
    assert [layer.window is not None for layer in named.layers] == flags
    base = spec(put("gemma3.rope.freq_base_swa", 5000.0))
    assert [layer.rope.base for layer in base.layers] == [5000.0] * 5 + [1e6]
    plain = load("gemma4", drop("gemma4.rope.freq_base_swa"))
    assert {layer.rope.base for layer in plain.layers if layer.window} == {1e4}


def test_rope_scaling_as_the_file_says() -> None:
    def rope(*edits: Edit, name: str = "qwen3moe") -> RopeSpec:
        return load(name, both(*edits)).layers[0].rope

    kind, factor = "qwen3moe.rope.scaling.type", "qwen3moe.rope.scaling.factor"
    assert rope().divisor == 1.0
    assert rope(put(factor, 4.0)).divisor == 4.0  # a factor alone is linear
    assert rope(put("qwen3moe.rope.scale_linear", 2.0)).divisor == 2.0
    assert rope(put(factor, 4.0), put(kind, "none")).divisor == 1.0
    yarn = rope(put(factor, 4.0), put(kind, "yarn"))
    assert yarn.yarn == YarnSpec(4.0, 2048)  # original context absent: the context length
    assert yarn.divisor == 1.0
    assert yarn.magnitude == pytest.approx(1 + 0.1 * np.log(4), rel=FEW_ROUNDINGS)
    original = put("qwen3moe.rope.scaling.original_context_length", 512)
    attn = put("qwen3moe.rope.scaling.attn_factor", 1.5)
    scaled = rope(put(factor, 4.0), put(kind, "yarn"), original, attn)
    assert scaled.yarn == YarnSpec(4.0, 512)
    assert scaled.magnitude == pytest.approx(1.5 * (1 + 0.1 * np.log(4)), rel=FEW_ROUNDINGS)
    assert rope(put("llama.rope.dimension_count", 16), name="llama").dimensions == 16


@pytest.mark.parametrize(
    "model", [f"tiny-{n}-yarn" for n in ("qwen2", "qwen3", "qwen3moe", "llama")]
)
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(model: str) -> None:
    rope = load_model(resolve_model(model)).spec.layers[0].rope
    assert rope.yarn is not None
    ratio = replace(rope, yarn=None).frequencies() / rope.frequencies()
    assert ratio[0] == pytest.approx(1, rel=FEW_ROUNDINGS)
    assert ratio[-1] == pytest.approx(rope.yarn.factor, rel=FEW_ROUNDINGS)
    assert np.all(np.diff(ratio) > -FEW_ROUNDINGS * ratio[:-1])


def test_recurrent_layers_override_the_interval() -> None:
    spec = load_model(resolve_model("tiny-qwen35-layers")).spec
    assert [layer.delta_net is not None for layer in spec.layers] == [False, True, True, False]
    by_interval = load_model(golden_model("qwen35").path).spec
    full = [layer.index for layer in by_interval.layers if layer.delta_net is None]
    assert full == [3, 7]


@pytest.mark.parametrize("model", ["tiny-qwen35-nextn", "tiny-qwen35moe-nextn"])
def test_prediction_blocks_are_skipped_and_counted(model: str) -> None:
    file = read_gguf(resolve_model(model))
    loaded = load_model(file.path)
    last = loaded.spec.layer_count
    assert loaded.spec.skipped_blocks == 1
    assert f"blk.{last}.nextn.eh_proj.weight" in file.tensors
    assert len(loaded.weights.layers) == last
    assert loaded.spec.layers[-1].delta_net is not None or model == "tiny-qwen35-nextn"
    names = {tensor.name for layer in loaded.weights.layers for tensor in layer.values()}
    assert not any(tensor.startswith(f"blk.{last}.") for tensor in names)


def test_shared_layers_read_the_last_cache_of_their_kind() -> None:
    spec = load_model(golden_model("gemma4e").path).spec
    assert [layer.kv_layer for layer in spec.layers] == [0, 1, 2, 3, 2, 3]
    assert [layer.owns_kv for layer in spec.layers] == [True] * 4 + [False] * 2
    assert [layer.feed_forward_length for layer in spec.layers] == [64] * 4 + [128] * 2


def test_values_come_from_the_key_where_there_is_no_projection() -> None:
    spec = load_model(golden_model("gemma4").path).spec
    sources = [layer.value_source for layer in spec.layers]
    assert sources == ["projection", "projection", "key"] * 2
    assert spec.value_norm
    assert spec.attention_scale == 1.0


def test_rope_frequencies_follow_the_definition() -> None:
    rope = RopeSpec("norm", 8, 10000.0, 2.0)
    expected = [10000.0 ** (-2 * j / 8) / 2 for j in range(4)]
    np.testing.assert_allclose(rope.frequencies(), expected, rtol=FEW_ROUNDINGS)
    factors = np.array([1, 2, 4, 1e30], dtype=np.float32)
    np.testing.assert_allclose(
        rope.frequencies(factors),
        np.array(expected) / factors.astype(np.float64),
        rtol=FEW_ROUNDINGS,
    )


def test_tensor_data_is_not_copied() -> None:
    model = load_model(golden_model("llama").path)
    for tensor in (*model.weights.top.values(), *model.weights.layers[0].values()):
        assert not tensor.raw.flags.owndata
        assert not tensor.raw.flags.writeable


def test_tied_output_is_the_embedding(tmp_path: Path) -> None:
    assert load_model(resolve_model("tiny-qwen3")).weights.lm_head.name == "token_embd.weight"
    assert load_model(resolve_model("tiny-llama")).weights.lm_head.name == "output.weight"
