"""ModelSpec and weights: what a file must say, and what is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.golden import golden_model
from fixtures.registry import resolve_model
from reference.model import load_model
from reference.model.errors import AssayError, InputError, Unsupported
from reference.model.gguf import GGUFFile, TensorInfo, read_gguf
from reference.model.quant import FORMATS
from reference.model.spec import RopeSpec
from reference.model.spec_reader import read_spec
from reference.model.weights import load_weights

Edit = Callable[[dict[str, Any], dict[str, TensorInfo]], None]


class _Edited:
    """A GGUF file with its metadata and tensor table changed; tensor data is the original's."""

    def __init__(self, file: GGUFFile, edit: Edit) -> None:
        self.path = file.path
        self.metadata = dict(file.metadata)
        self.tensors = dict(file.tensors)
        self.raw = file.raw
        edit(self.metadata, self.tensors)


def _load(name: str, edit: Edit) -> None:
    file: Any = _Edited(read_gguf(golden_model(name).path), edit)
    load_weights(file, read_spec(file))


def test_unedited_files_load() -> None:
    for name in ("llama", "llama3", "qwen3", "gemma3"):
        _load(name, lambda metadata, tensors: None)


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


REFUSALS = [
    Refusal("architecture", "llama", _set("general.architecture", "mamba2"), Unsupported,
            "architecture is mamba2; supported: llama, qwen3, gemma3"),
    Refusal("no-architecture", "llama", _drop("general.architecture"), InputError,
            "no string general.architecture"),
    Refusal("unknown-key", "llama", _set("llama.expert_count", 8), Unsupported,
            "llama.expert_count .value 8. is not known"),
    Refusal("softcap", "gemma3", _set("gemma3.final_logit_softcapping", 30.0), Unsupported,
            "gemma3.final_logit_softcapping"),
    Refusal("missing-key", "llama", _drop("llama.embedding_length"), InputError,
            "llama.embedding_length is missing"),
    Refusal("text-for-count", "llama", _set("llama.block_count", "3"), InputError,
            "llama.block_count is '3', expected a positive whole number"),
    Refusal("zero-count", "llama", _set("llama.block_count", 0), InputError, "block_count is 0"),
    Refusal("list-for-count", "llama", _set("llama.attention.head_count_kv", [2, 2, 2]), InputError,
            "head_count_kv is"),
    Refusal("nan-epsilon", "llama", _set("llama.attention.layer_norm_rms_epsilon", float("nan")),
            InputError, "layer_norm_rms_epsilon is nan"),
    Refusal("heads-not-grouped", "llama", _set("llama.attention.head_count_kv", 3), InputError,
            "expected a multiple of head_count_kv = 3"),
    Refusal("more-kv-heads", "llama", _set("llama.attention.head_count_kv", 8), InputError,
            "expected a multiple of head_count_kv = 8"),
    Refusal("value-length", "qwen3", _set("qwen3.attention.value_length", 64), Unsupported,
            "value_length is 64 and key_length 32"),
    Refusal("rope-dimensions", "llama", _set("llama.rope.dimension_count", 32), Unsupported,
            "rope.dimension_count is 32"),
    Refusal("yarn", "llama", _set("llama.rope.scaling.type", "yarn"), Unsupported,
            "rope.scaling.type is 'yarn'; supported: none, linear"),
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
