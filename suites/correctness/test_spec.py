"""ModelSpec and weights: what a file must say, and what is refused by name."""

from dataclasses import dataclass

import numpy as np
import pytest

from fixtures.tiny import TINY
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import AssayError, InputError, Unsupported
from suites.correctness.gguf_edits import (
    Edit,
    add,
    both,
    drop,
    load,
    lose,
    put,
    rename,
    reshape,
    retype,
)
from suites.correctness.oracles import ORACLES, golden_name


@pytest.mark.parametrize("model", [*ORACLES, *TINY])
def test_unedited_files_load(model: str) -> None:
    spec = load(golden_name(model), lambda metadata, tensors: None)
    assert spec.layer_count > 0


@dataclass(frozen=True)
class Refusal:
    """One change to a good file and the error it must cause."""

    id: str
    model: str
    edit: Edit
    error: type[AssayError]
    message: str


REFUSALS = [
    Refusal("architecture", "llama", put("general.architecture", "mamba2"), Unsupported,
            "architecture is mamba2; supported: llama, qwen2, qwen3, qwen3moe, gemma3, gemma4, "
            "qwen35, qwen35moe"),
    Refusal("no-architecture", "llama", drop("general.architecture"), InputError,
            "no string general.architecture"),
    Refusal("experts-in-llama", "llama", put("llama.expert_count", 8), Unsupported,
            "llama.expert_count .value 8. is not known"),
    Refusal("softcap", "gemma3", put("gemma3.final_logit_softcapping", 30.0), Unsupported,
            "gemma3.final_logit_softcapping"),
    Refusal("missing-key", "llama", drop("llama.embedding_length"), InputError,
            "llama.embedding_length is missing"),
    Refusal("text-for-count", "llama", put("llama.block_count", "3"), InputError,
            "llama.block_count is '3', expected a positive whole number"),
    Refusal("zero-count", "llama", put("llama.block_count", 0), InputError, "block_count is 0"),
    Refusal("list-for-count", "llama", put("llama.attention.head_count", [4, 4, 4]), InputError,
            "head_count is"),
    Refusal("short-list", "llama", put("llama.attention.head_count_kv", [2, 2]), InputError,
            "head_count_kv has 2 values, expected 3"),
    Refusal("long-array", "qwen3", put("qwen3.feed_forward_length", np.array([9] * 5)),
            InputError, "feed_forward_length has 5 values, expected 4"),
    Refusal("zero-in-list", "llama", put("llama.attention.head_count_kv", [2, 0, 2]), InputError,
            "head_count_kv is 0"),
    Refusal("list-changes-shapes", "llama", put("llama.attention.head_count_kv", [2, 1, 2]),
            InputError, r"blk.1.attn_k.weight has shape .*because the metadata says so"),
    Refusal("nan-epsilon", "llama", put("llama.attention.layer_norm_rms_epsilon", float("nan")),
            InputError, "layer_norm_rms_epsilon is nan"),
    Refusal("heads-not-grouped", "llama", put("llama.attention.head_count_kv", 3), InputError,
            "expected a multiple of head_count_kv = 3"),
    Refusal("more-kv-heads", "llama", put("llama.attention.head_count_kv", 8), InputError,
            "expected a multiple of head_count_kv = 8"),
    Refusal("value-length", "qwen3", put("qwen3.attention.value_length", 64), Unsupported,
            "value_length is 64 and key_length 32"),
    Refusal("rope-dimensions", "llama", put("llama.rope.dimension_count", 66), InputError,
            "rope.dimension_count is 66, expected an even number of at most the head size, 64"),
    Refusal("rope-odd", "llama", put("llama.rope.dimension_count", 31), InputError,
            "rope.dimension_count is 31"),
    *(
        Refusal(f"longrope-{name}", name, put(f"{name}.rope.scaling.type", "longrope"),
                Unsupported, "rope.scaling.type is 'longrope'; supported: none, linear, yarn")
        for name in sorted(ARCHITECTURES)
    ),
    Refusal("longrope-factors", "llama", add("rope_factors_long.weight", 32), Unsupported,
            "tensor rope_factors_long.weight is not used"),
    Refusal("scaling-zero", "llama_yarn", put("llama.rope.scaling.factor", 0.0), InputError,
            "rope.scaling.factor is 0.0"),
    Refusal("scaling-text", "llama_yarn", put("llama.rope.scaling.factor", "4"), InputError,
            "rope.scaling.factor is '4', expected a number"),
    *(
        Refusal(f"unknown-key-{name}", name, put(f"{name}.attention.clamp_kqv", 8.0), Unsupported,
                f"{name}.attention.clamp_kqv .value 8.0. is not known for this architecture")
        for name in sorted(ARCHITECTURES)
    ),
    *(
        Refusal(f"unused-tensor-{name}", name, add("blk.0.attn_sinks.weight", 4), Unsupported,
                "tensor blk.0.attn_sinks.weight is not used")
        for name in sorted(ARCHITECTURES)
    ),
    Refusal("qwen2-experts", "qwen2", put("qwen2.expert_count", 4), Unsupported,
            "qwen2.expert_count .value 4. is not known"),
    Refusal("qwen2-bias", "qwen2", lose("blk.1.attn_k.bias"), InputError,
            "blk.1.attn_k.bias is missing"),
    Refusal("experts-used", "qwen3moe", put("qwen3moe.expert_used_count", 9), InputError,
            "expert_used_count is 9, expected at most 8"),
    Refusal("experts-used-gemma", "gemma4moe", put("gemma4.expert_used_count", 9), InputError,
            "expert_used_count is 9, expected at most 8"),
    Refusal("experts-none", "qwen3moe", put("qwen3moe.expert_used_count", 0), InputError,
            "expert_used_count is 0"),
    Refusal("experts-count", "qwen3moe", put("qwen3moe.expert_count", 6), InputError,
            r"blk.0.ffn_gate_inp.weight has shape \(8, 256\), expected \(6, 256\)"),
    Refusal("experts-missing", "qwen3moe", lose("blk.0.ffn_gate_inp.weight"), InputError,
            "blk.0.ffn_gate_inp.weight is missing"),
    Refusal("shared-expert-missing", "qwen35moe", lose("blk.0.ffn_gate_inp_shexp.weight"),
            InputError, "blk.0.ffn_gate_inp_shexp.weight is missing"),
    Refusal("shared-length", "qwen35moe", drop("qwen35moe.expert_shared_feed_forward_length"),
            InputError, "expert_shared_feed_forward_length is missing"),
    Refusal("router-scale-missing", "gemma4moe", lose("blk.0.ffn_gate_inp.scale"), InputError,
            "blk.0.ffn_gate_inp.scale is missing"),
    Refusal("router-lost", "gemma4moe", lose("blk.1.ffn_gate_inp.weight"), Unsupported,
            r"tensor blk.1.\S+ is not used"),
    Refusal("fused-rows", "gemma4moe", put("gemma4.expert_feed_forward_length", 31), InputError,
            r"blk.0.ffn_gate_up_exps.weight has shape \(8, 64, 256\), expected 62 rows = 31 . 31"),
    Refusal("fused-and-apart", "tiny-llama-fused", add("blk.0.attn_q.weight", 192, 256),
            InputError, "attn_qkv.weight holds the rows of blk.0.attn_q.weight, which is there"),
    Refusal("fused-experts-and-apart", "gemma4moe", add("blk.0.ffn_up_exps.weight", 8, 32, 256),
            InputError, "gate_up_exps.weight holds the rows of blk.0.ffn_up_exps.weight"),
    Refusal("fused-attention-rows", "tiny-qwen2-fused",
            put("qwen2.attention.head_count_kv", 1), InputError, "attn_qkv"),
    Refusal("shared-layers", "gemma4e", put("gemma4.attention.shared_kv_layers", 6), InputError,
            "shared_kv_layers is 6, expected less than 6"),
    Refusal("shared-layers-more", "gemma4e", put("gemma4.attention.shared_kv_layers", 7),
            InputError, "shared_kv_layers is 7"),
    Refusal("shared-without-kind", "gemma4e", put("gemma4.attention.shared_kv_layers", 3),
            InputError, "layer 3 shares the cache of an earlier layer of its kind"),
    Refusal("pattern-missing", "gemma4", drop("gemma4.attention.sliding_window_pattern"),
            InputError, "sliding_window_pattern is missing"),
    Refusal("pattern-short", "gemma4", put("gemma4.attention.sliding_window_pattern", [True]),
            InputError, "sliding_window_pattern has 1 values, expected 6"),
    Refusal("pattern-no-flags", "gemma4",
            put("gemma4.attention.sliding_window_pattern", [1, 2, 0, 1, 1, 0]), InputError,
            "sliding_window_pattern is .*expected true or false per layer"),
    Refusal("pattern-texts", "gemma4",
            put("gemma4.attention.sliding_window_pattern", ["a"] * 6), InputError,
            "expected true or false per layer"),
    Refusal("value-length-swa", "gemma4", put("gemma4.attention.value_length_swa", 64),
            Unsupported, "value_length_swa is 64 and key_length_swa 32"),
    Refusal("key-norm-missing", "gemma4", lose("blk.2.attn_k_norm.weight"), InputError,
            "blk.2.attn_k_norm.weight is missing"),
    Refusal("inner-size", "qwen35", put("qwen35.ssm.inner_size", 64), InputError,
            "ssm.inner_size is 64, expected 128 = state_size x time_step_rank"),
    Refusal("key-heads", "qwen35",
            both(put("qwen35.ssm.group_count", 3), drop("qwen35.ssm.inner_size")), InputError,
            "ssm.time_step_rank is 4, expected a multiple of ssm.group_count = 3"),
    Refusal("state-size-missing", "qwen35", drop("qwen35.ssm.state_size"), InputError,
            "qwen35.ssm.state_size is missing"),
    Refusal("kernel", "qwen35", put("qwen35.ssm.conv_kernel", 3), InputError,
            r"blk.0.ssm_conv1d.weight has shape \(256, 4\), expected \(256, 3\)"),
    Refusal("recurrent-short", "qwen35", put("qwen35.attention.recurrent_layers", [True] * 7),
            InputError, "recurrent_layers has 7 values, expected 8"),
    Refusal("recurrent-without-prediction", "tiny-qwen35moe-nextn",
            put("qwen35moe.attention.recurrent_layers", [True, False, True]), InputError,
            "recurrent_layers has 3 values, expected 4 because there are that many blocks"),
    Refusal("recurrent-no-flags", "qwen35", put("qwen35.attention.recurrent_layers", [2] * 8),
            InputError, "recurrent_layers is .*expected true or false per layer"),
    Refusal("recurrent-elsewhere", "qwen35",
            put("qwen35.attention.recurrent_layers", [True] * 8), InputError,
            "blk.3.attn_qkv.weight is missing"),
    Refusal("all-prediction", "qwen35", put("qwen35.nextn_predict_layers", 8), InputError,
            "block_count is 8 with 8 prediction blocks, expected at least one block besides"),
    Refusal("prediction-negative", "qwen35", put("qwen35.nextn_predict_layers", -1), InputError,
            "nextn_predict_layers is -1, expected a whole number"),
    Refusal("prediction-of-another", "tiny-qwen35-nextn", rename(
            "blk.4.attn_norm.weight", "blk.5.attn_norm.weight"), Unsupported,
            "tensor blk.5.attn_norm.weight is not used"),
    Refusal("vocab-size", "llama", put("llama.vocab_size", 321), InputError,
            "vocab_size is 321, expected 320"),
    Refusal("window-missing", "gemma3", drop("gemma3.attention.sliding_window"), InputError,
            "sliding_window is missing"),
    Refusal("tensor-shape", "llama", reshape("blk.1.ffn_up.weight", (256, 512)), InputError,
            r"blk.1.ffn_up.weight has shape \(256, 512\), expected \(256, 256\)"),
    Refusal("tensor-missing", "llama", lose("blk.2.attn_v.weight"), InputError,
            "blk.2.attn_v.weight is missing"),
    Refusal("embedding-missing", "llama", lose("token_embd.weight"), InputError,
            "token_embd.weight is missing"),
    Refusal("tensor-unused", "llama", rename("output.weight", "output.bias"), Unsupported,
            "tensor output.bias is not used"),
    Refusal("output-bias-in-qwen3", "qwen3", add("output.bias", 320), Unsupported,
            "tensor output.bias is not used"),
    Refusal("bias-in-llama", "llama", add("blk.0.attn_q.bias", 256), Unsupported,
            "tensor blk.0.attn_q.bias is not used"),
    Refusal("extra-block", "llama", put("llama.block_count", 2), Unsupported,
            r"tensor blk.2\S+ is not used"),
    Refusal("norm-format", "llama", retype("output_norm.weight", "F16"), Unsupported,
            "output_norm.weight is F16; supported for norm weights"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_refused_by_name(case: Refusal) -> None:
    with pytest.raises(case.error, match=case.message) as caught:
        load(case.model, case.edit)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
