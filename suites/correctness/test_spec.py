"""ModelSpec and weights: what a file must say, and what is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fixtures.golden import TINY_GATES, golden_model
from fixtures.registry import resolve_model
from fixtures.tiny import TINY
from reference.model import load_model
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import AssayError, InputError, Unsupported
from reference.model.gguf import GGUFFile, TensorInfo, read_gguf
from reference.model.quant import FORMATS
from reference.model.spec import ModelSpec, RopeSpec, YarnSpec
from reference.model.spec_reader import read_spec
from reference.model.weights import load_weights

Edit = Callable[[dict[str, Any], dict[str, TensorInfo]], None]


class _Edited:
    """A GGUF file with its metadata and tensor table changed; tensor data is the original's."""

    def __init__(self, file: GGUFFile, edit: Edit) -> None:
        self.path = file.path
        self.metadata = dict(file.metadata)
        self.tensors = dict(file.tensors)
        self._file = file
        edit(self.metadata, self.tensors)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A renamed tensor has the data of the one it was; an added one has zeros."""
        info = self.tensors[name]
        original = self._file.tensors.get(info.name)
        if original is None:
            return np.zeros(
                (*info.shape[:-1], info.format.row_nbytes(info.shape[-1], name)), np.uint8
            )
        return self._file.raw(info.name)


def _path(name: str) -> Path:
    return golden_model(name).path if name in TINY_GATES else resolve_model(name)


def _load(name: str, edit: Edit) -> ModelSpec:
    file: Any = _Edited(read_gguf(_path(name)), edit)
    spec = read_spec(file)
    load_weights(file, spec)
    return spec


@pytest.mark.parametrize("name", [*TINY_GATES, *TINY])
def test_unedited_files_load(name: str) -> None:
    spec = _load(name, lambda metadata, tensors: None)
    assert spec.layer_count > 0


@dataclass(frozen=True)
class Refusal:
    """One change to a good file and the error it must cause."""

    id: str
    model: str
    edit: Edit
    error: type[AssayError]
    message: str


def _set(key: str, value: object) -> Edit:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def _drop(key: str) -> Edit:
    return lambda metadata, tensors: metadata.__delitem__(key)


def _reshape(name: str, shape: tuple[int, ...]) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(name, replace(tensors[name], shape=shape))


def _retype(name: str, form: str) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(
        name, replace(tensors[name], format=FORMATS[form])
    )


def _lose(name: str) -> Edit:
    return lambda metadata, tensors: tensors.__delitem__(name)


def _rename(old: str, new: str) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(new, tensors.pop(old))


def _add(name: str, *shape: int) -> Edit:
    info = TensorInfo(name, FORMATS["F32"], shape, 0, 4 * int(np.prod(shape)))
    return lambda metadata, tensors: tensors.__setitem__(name, info)


def _both(*edits: Edit) -> Edit:
    def edit(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        for each in edits:
            each(metadata, tensors)

    return edit


REFUSALS = [
    Refusal("architecture", "llama", _set("general.architecture", "mamba2"), Unsupported,
            "architecture is mamba2; supported: llama, qwen2, qwen3, qwen3moe, gemma3, gemma4, "
            "qwen35, qwen35moe"),
    Refusal("no-architecture", "llama", _drop("general.architecture"), InputError,
            "no string general.architecture"),
    Refusal("experts-in-llama", "llama", _set("llama.expert_count", 8), Unsupported,
            "llama.expert_count .value 8. is not known"),
    Refusal("softcap", "gemma3", _set("gemma3.final_logit_softcapping", 30.0), Unsupported,
            "gemma3.final_logit_softcapping"),
    Refusal("missing-key", "llama", _drop("llama.embedding_length"), InputError,
            "llama.embedding_length is missing"),
    Refusal("text-for-count", "llama", _set("llama.block_count", "3"), InputError,
            "llama.block_count is '3', expected a positive whole number"),
    Refusal("zero-count", "llama", _set("llama.block_count", 0), InputError, "block_count is 0"),
    Refusal("list-for-count", "llama", _set("llama.attention.head_count", [4, 4, 4]), InputError,
            "head_count is"),
    Refusal("short-list", "llama", _set("llama.attention.head_count_kv", [2, 2]), InputError,
            "head_count_kv has 2 values, expected 3"),
    Refusal("long-array", "qwen3", _set("qwen3.feed_forward_length", np.array([9] * 5)),
            InputError, "feed_forward_length has 5 values, expected 4"),
    Refusal("zero-in-list", "llama", _set("llama.attention.head_count_kv", [2, 0, 2]), InputError,
            "head_count_kv is 0"),
    Refusal("list-changes-shapes", "llama", _set("llama.attention.head_count_kv", [2, 1, 2]),
            InputError, r"blk.1.attn_k.weight has shape .*because the metadata says so"),
    Refusal("nan-epsilon", "llama", _set("llama.attention.layer_norm_rms_epsilon", float("nan")),
            InputError, "layer_norm_rms_epsilon is nan"),
    Refusal("heads-not-grouped", "llama", _set("llama.attention.head_count_kv", 3), InputError,
            "expected a multiple of head_count_kv = 3"),
    Refusal("more-kv-heads", "llama", _set("llama.attention.head_count_kv", 8), InputError,
            "expected a multiple of head_count_kv = 8"),
    Refusal("value-length", "qwen3", _set("qwen3.attention.value_length", 64), Unsupported,
            "value_length is 64 and key_length 32"),
    Refusal("rope-dimensions", "llama", _set("llama.rope.dimension_count", 66), InputError,
            "rope.dimension_count is 66, expected an even number of at most the head size, 64"),
    Refusal("rope-odd", "llama", _set("llama.rope.dimension_count", 31), InputError,
            "rope.dimension_count is 31"),
    *(
        Refusal(f"longrope-{name}", name, _set(f"{name}.rope.scaling.type", "longrope"),
                Unsupported, "rope.scaling.type is 'longrope'; supported: none, linear, yarn")
        for name in sorted(ARCHITECTURES)
    ),
    Refusal("longrope-factors", "llama", _add("rope_factors_long.weight", 32), Unsupported,
            "tensor rope_factors_long.weight is not used"),
    Refusal("scaling-zero", "llama_yarn", _set("llama.rope.scaling.factor", 0.0), InputError,
            "rope.scaling.factor is 0.0"),
    Refusal("scaling-text", "llama_yarn", _set("llama.rope.scaling.factor", "4"), InputError,
            "rope.scaling.factor is '4', expected a number"),
    *(
        Refusal(f"unknown-key-{name}", name, _set(f"{name}.attention.clamp_kqv", 8.0), Unsupported,
                f"{name}.attention.clamp_kqv .value 8.0. is not known for this architecture")
        for name in sorted(ARCHITECTURES)
    ),
    *(
        Refusal(f"unused-tensor-{name}", name, _add("blk.0.attn_sinks.weight", 4), Unsupported,
                "tensor blk.0.attn_sinks.weight is not used")
        for name in sorted(ARCHITECTURES)
    ),
    Refusal("qwen2-experts", "qwen2", _set("qwen2.expert_count", 4), Unsupported,
            "qwen2.expert_count .value 4. is not known"),
    Refusal("qwen2-bias", "qwen2", _lose("blk.1.attn_k.bias"), InputError,
            "blk.1.attn_k.bias is missing"),
    Refusal("experts-used", "qwen3moe", _set("qwen3moe.expert_used_count", 9), InputError,
            "expert_used_count is 9, expected at most 8"),
    Refusal("experts-used-gemma", "gemma4moe", _set("gemma4.expert_used_count", 9), InputError,
            "expert_used_count is 9, expected at most 8"),
    Refusal("experts-none", "qwen3moe", _set("qwen3moe.expert_used_count", 0), InputError,
            "expert_used_count is 0"),
    Refusal("experts-count", "qwen3moe", _set("qwen3moe.expert_count", 6), InputError,
            r"blk.0.ffn_gate_inp.weight has shape \(8, 256\), expected \(6, 256\)"),
    Refusal("experts-missing", "qwen3moe", _lose("blk.0.ffn_gate_inp.weight"), InputError,
            "blk.0.ffn_gate_inp.weight is missing"),
    Refusal("shared-expert-missing", "qwen35moe", _lose("blk.0.ffn_gate_inp_shexp.weight"),
            InputError, "blk.0.ffn_gate_inp_shexp.weight is missing"),
    Refusal("shared-length", "qwen35moe", _drop("qwen35moe.expert_shared_feed_forward_length"),
            InputError, "expert_shared_feed_forward_length is missing"),
    Refusal("router-scale-missing", "gemma4moe", _lose("blk.0.ffn_gate_inp.scale"), InputError,
            "blk.0.ffn_gate_inp.scale is missing"),
    Refusal("router-lost", "gemma4moe", _lose("blk.1.ffn_gate_inp.weight"), Unsupported,
            r"tensor blk.1.\S+ is not used"),
    Refusal("fused-rows", "gemma4moe", _set("gemma4.expert_feed_forward_length", 31), InputError,
            r"blk.0.ffn_gate_up_exps.weight has shape \(8, 64, 256\), expected 62 rows = 31 . 31"),
    Refusal("fused-and-apart", "tiny-llama-fused", _add("blk.0.attn_q.weight", 192, 256),
            InputError, "attn_qkv.weight holds the rows of blk.0.attn_q.weight, which is there"),
    Refusal("fused-experts-and-apart", "gemma4moe", _add("blk.0.ffn_up_exps.weight", 8, 32, 256),
            InputError, "gate_up_exps.weight holds the rows of blk.0.ffn_up_exps.weight"),
    Refusal("fused-attention-rows", "tiny-qwen2-fused",
            _set("qwen2.attention.head_count_kv", 1), InputError, "attn_qkv"),
    Refusal("shared-layers", "gemma4e", _set("gemma4.attention.shared_kv_layers", 6), InputError,
            "shared_kv_layers is 6, expected less than 6"),
    Refusal("shared-layers-more", "gemma4e", _set("gemma4.attention.shared_kv_layers", 7),
            InputError, "shared_kv_layers is 7"),
    Refusal("shared-without-kind", "gemma4e", _set("gemma4.attention.shared_kv_layers", 3),
            InputError, "layer 3 shares the cache of an earlier layer of its kind"),
    Refusal("pattern-missing", "gemma4", _drop("gemma4.attention.sliding_window_pattern"),
            InputError, "sliding_window_pattern is missing"),
    Refusal("pattern-short", "gemma4", _set("gemma4.attention.sliding_window_pattern", [True]),
            InputError, "sliding_window_pattern has 1 values, expected 6"),
    Refusal("pattern-no-flags", "gemma4",
            _set("gemma4.attention.sliding_window_pattern", [1, 2, 0, 1, 1, 0]), InputError,
            "sliding_window_pattern is .*expected true or false per layer"),
    Refusal("pattern-texts", "gemma4",
            _set("gemma4.attention.sliding_window_pattern", ["a"] * 6), InputError,
            "expected true or false per layer"),
    Refusal("value-length-swa", "gemma4", _set("gemma4.attention.value_length_swa", 64),
            Unsupported, "value_length_swa is 64 and key_length_swa 32"),
    Refusal("key-norm-missing", "gemma4", _lose("blk.2.attn_k_norm.weight"), InputError,
            "blk.2.attn_k_norm.weight is missing"),
    Refusal("inner-size", "qwen35", _set("qwen35.ssm.inner_size", 64), InputError,
            "ssm.inner_size is 64, expected 128 = state_size x time_step_rank"),
    Refusal("key-heads", "qwen35",
            _both(_set("qwen35.ssm.group_count", 3), _drop("qwen35.ssm.inner_size")), InputError,
            "ssm.time_step_rank is 4, expected a multiple of ssm.group_count = 3"),
    Refusal("state-size-missing", "qwen35", _drop("qwen35.ssm.state_size"), InputError,
            "qwen35.ssm.state_size is missing"),
    Refusal("kernel", "qwen35", _set("qwen35.ssm.conv_kernel", 3), InputError,
            r"blk.0.ssm_conv1d.weight has shape \(256, 4\), expected \(256, 3\)"),
    Refusal("recurrent-short", "qwen35", _set("qwen35.attention.recurrent_layers", [True] * 7),
            InputError, "recurrent_layers has 7 values, expected 8"),
    Refusal("recurrent-without-prediction", "tiny-qwen35moe-nextn",
            _set("qwen35moe.attention.recurrent_layers", [True, False, True]), InputError,
            "recurrent_layers has 3 values, expected 4 because there are that many blocks"),
    Refusal("recurrent-no-flags", "qwen35", _set("qwen35.attention.recurrent_layers", [2] * 8),
            InputError, "recurrent_layers is .*expected true or false per layer"),
    Refusal("recurrent-elsewhere", "qwen35",
            _set("qwen35.attention.recurrent_layers", [True] * 8), InputError,
            "blk.3.attn_qkv.weight is missing"),
    Refusal("all-prediction", "qwen35", _set("qwen35.nextn_predict_layers", 8), InputError,
            "block_count is 8 with 8 prediction blocks, expected at least one block besides"),
    Refusal("prediction-negative", "qwen35", _set("qwen35.nextn_predict_layers", -1), InputError,
            "nextn_predict_layers is -1, expected a whole number"),
    Refusal("prediction-of-another", "tiny-qwen35-nextn", _rename(
            "blk.4.attn_norm.weight", "blk.5.attn_norm.weight"), Unsupported,
            "tensor blk.5.attn_norm.weight is not used"),
    Refusal("vocab-size", "llama", _set("llama.vocab_size", 321), InputError,
            "vocab_size is 321, expected 320"),
    Refusal("window-missing", "gemma3", _drop("gemma3.attention.sliding_window"), InputError,
            "sliding_window is missing"),
    Refusal("tensor-shape", "llama", _reshape("blk.1.ffn_up.weight", (256, 512)), InputError,
            r"blk.1.ffn_up.weight has shape \(256, 512\), expected \(256, 256\)"),
    Refusal("tensor-missing", "llama", _lose("blk.2.attn_v.weight"), InputError,
            "blk.2.attn_v.weight is missing"),
    Refusal("embedding-missing", "llama", _lose("token_embd.weight"), InputError,
            "token_embd.weight is missing"),
    Refusal("tensor-unused", "llama", _rename("output.weight", "output.bias"), Unsupported,
            "tensor output.bias is not used"),
    Refusal("output-bias-in-qwen3", "qwen3", _add("output.bias", 320), Unsupported,
            "tensor output.bias is not used"),
    Refusal("bias-in-llama", "llama", _add("blk.0.attn_q.bias", 256), Unsupported,
            "tensor blk.0.attn_q.bias is not used"),
    Refusal("extra-block", "llama", _set("llama.block_count", 2), Unsupported,
            r"tensor blk.2\S+ is not used"),
    Refusal("norm-format", "llama", _retype("output_norm.weight", "F16"), Unsupported,
            "output_norm.weight is F16; supported for norm weights"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_refused_by_name(case: Refusal) -> None:
    with pytest.raises(case.error, match=case.message) as caught:
        _load(case.model, case.edit)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_gemma_layers_slide_five_of_six() -> None:
    spec = load_model(golden_model("gemma3").path).spec
    assert [layer.window for layer in spec.layers] == [16] * 5 + [None]
    assert [layer.rope.base for layer in spec.layers] == [1e4] * 5 + [1e6]
    assert [layer.rope.divisor for layer in spec.layers] == [1.0] * 5 + [8.0]


def test_defaults_hold_only_where_the_key_is_absent() -> None:
    def spec(*edits: Edit) -> ModelSpec:
        return _load("gemma3", _both(*edits))

    period = _set("gemma3.attention.sliding_window_pattern", 3)
    assert [layer.window for layer in spec(period).layers] == [16, 16, None] * 2
    flags = [True, False, False, True, True, False]
    named = spec(_set("gemma3.attention.sliding_window_pattern", flags))
    assert [layer.window is not None for layer in named.layers] == flags
    base = spec(_set("gemma3.rope.freq_base_swa", 5000.0))
    assert [layer.rope.base for layer in base.layers] == [5000.0] * 5 + [1e6]
    plain = _load("gemma4", _drop("gemma4.rope.freq_base_swa"))
    assert {layer.rope.base for layer in plain.layers if layer.window} == {1e4}


def test_rope_scaling_as_the_file_says() -> None:
    def rope(*edits: Edit, name: str = "qwen3moe") -> RopeSpec:
        return _load(name, _both(*edits)).layers[0].rope

    kind, factor = "qwen3moe.rope.scaling.type", "qwen3moe.rope.scaling.factor"
    assert rope().divisor == 1.0
    assert rope(_set(factor, 4.0)).divisor == 4.0  # a factor alone is linear
    assert rope(_set("qwen3moe.rope.scale_linear", 2.0)).divisor == 2.0
    assert rope(_set(factor, 4.0), _set(kind, "none")).divisor == 1.0
    yarn = rope(_set(factor, 4.0), _set(kind, "yarn"))
    assert yarn.yarn == YarnSpec(4.0, 2048)  # original context absent: the context length
    assert yarn.divisor == 1.0
    assert yarn.magnitude == pytest.approx(1 + 0.1 * np.log(4))
    original = _set("qwen3moe.rope.scaling.original_context_length", 512)
    attn = _set("qwen3moe.rope.scaling.attn_factor", 1.5)
    scaled = rope(_set(factor, 4.0), _set(kind, "yarn"), original, attn)
    assert scaled.yarn == YarnSpec(4.0, 512)
    assert scaled.magnitude == pytest.approx(1.5 * (1 + 0.1 * np.log(4)))
    assert rope(_set("llama.rope.dimension_count", 16), name="llama").dimensions == 16


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3moe", "llama"])
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(name: str) -> None:
    rope = load_model(resolve_model(f"tiny-{name}-yarn")).spec.layers[0].rope
    assert rope.yarn is not None
    ratio = replace(rope, yarn=None).frequencies() / rope.frequencies()
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(rope.yarn.factor)
    assert np.all(np.diff(ratio) >= -1e-12)


def test_recurrent_layers_override_the_interval() -> None:
    spec = load_model(resolve_model("tiny-qwen35-layers")).spec
    assert [layer.delta_net is not None for layer in spec.layers] == [False, True, True, False]
    by_interval = load_model(golden_model("qwen35").path).spec
    full = [layer.index for layer in by_interval.layers if layer.delta_net is None]
    assert full == [3, 7]


@pytest.mark.parametrize("name", ["tiny-qwen35-nextn", "tiny-qwen35moe-nextn"])
def test_prediction_blocks_are_skipped_and_counted(name: str) -> None:
    file = read_gguf(resolve_model(name))
    model = load_model(file.path)
    last = model.spec.layer_count
    assert model.spec.skipped_blocks == 1
    assert f"blk.{last}.nextn.eh_proj.weight" in file.tensors
    assert len(model.weights.layers) == last
    assert model.spec.layers[-1].delta_net is not None or name == "tiny-qwen35-nextn"
    names = {tensor.name for layer in model.weights.layers for tensor in layer.values()}
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
    np.testing.assert_allclose(rope.frequencies(), expected, rtol=1e-15)
    factors = np.array([1, 2, 4, 1e30], dtype=np.float32)
    np.testing.assert_allclose(
        rope.frequencies(factors), np.array(expected) / factors.astype(np.float64), rtol=1e-15
    )


def test_tensor_data_is_not_copied() -> None:
    model = load_model(golden_model("llama").path)
    for tensor in (*model.weights.top.values(), *model.weights.layers[0].values()):
        assert not tensor.raw.flags.owndata
        assert not tensor.raw.flags.writeable


def test_tied_output_is_the_embedding(tmp_path: Path) -> None:
    assert load_model(resolve_model("tiny-qwen3")).weights.lm_head.name == "token_embd.weight"
    assert load_model(resolve_model("tiny-llama")).weights.lm_head.name == "output.weight"
