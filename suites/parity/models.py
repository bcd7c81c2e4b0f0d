"""Tiny transformers models with random weights: one case for each architecture and shape.

Weights are float32 values (a GGUF file holds no more) and nothing is neutral: norms are not 1,
biases not 0, scales not 1, the window is shorter than the prompt, heads are grouped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suites.parity.oracle import require

VOCAB_SIZE = 97
WINDOW = 16
EPSILON = float(np.float32(1e-6))
LOGIT_SPREAD = 3.0
POST_NORM_GAIN = 6.0


@dataclass(frozen=True)
class ModelCase:
    """`config` are the arguments of transformers' `family`TextConfig or `family`Config."""

    id: str
    family: str
    seed: int
    config: Mapping[str, Any] = field(hash=False)
    text: bool = False
    tokens: int = 81
    rounded_factors: bool = False

    @property
    def model_class(self) -> str:
        return f"{self.family}ForCausalLM"

    @property
    def config_class(self) -> str:
        return f"{self.family}{'Text' if self.text else ''}Config"

    def prompt(self) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, 1]).integers(0, VOCAB_SIZE, self.tokens)


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPSILON,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
_GEMMA = _COMMON | {
    "hidden_size": 54,
    "num_hidden_layers": 7,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = _GEMMA | {
    "num_hidden_layers": 6,
    "layer_types": _PATTERN * 2,
    "global_head_dim": 32,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 7.0,
}
_QWEN35 = _COMMON | {
    "num_hidden_layers": 4,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_QWEN35_PERIOD_2 = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 3,
}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 40}
_TOKENS_HYBRID = 131  # two chunks of 64 and three more

CASES = (
    ModelCase("llama", "Llama", 1, _COMMON | {"rope_parameters": _ROPE}),
    ModelCase(
        "llama-tied-linear",
        "Llama",
        2,
        _COMMON
        | {
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE | {"rope_type": "linear", "factor": 4.0},
        },
    ),
    ModelCase("llama-yarn", "Llama", 3, _COMMON | {"rope_parameters": _YARN}),
    ModelCase(
        "llama3",
        "Llama",
        4,
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        rounded_factors=True,
    ),
    ModelCase(
        "qwen2",
        "Qwen2",
        5,
        {key: value for key, value in _COMMON.items() if key != "head_dim"}
        | {"rope_parameters": _ROPE | {"rope_theta": 1000000.0}},
    ),
    ModelCase("qwen3", "Qwen3", 6, _COMMON | {"rope_parameters": _ROPE}),
    ModelCase("qwen3-yarn", "Qwen3", 7, _COMMON | {"rope_parameters": _YARN}),
    ModelCase("qwen3moe", "Qwen3Moe", 8, _COMMON | _EXPERTS | {"rope_parameters": _ROPE}),
    ModelCase(
        "gemma3",
        "Gemma3",
        9,
        _GEMMA
        | {
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        },
        text=True,
    ),
    ModelCase(
        "gemma4-dense",
        "Gemma4",
        10,
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        text=True,
    ),
    ModelCase(
        "gemma4-e",
        "Gemma4",
        11,
        _GEMMA4
        | {
            "layer_types": _PATTERN * 3,
            "num_hidden_layers": 9,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 10,
        },
        text=True,
    ),
    ModelCase(
        "gemma4-moe",
        "Gemma4",
        12,
        _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        text=True,
    ),
    ModelCase("qwen35", "Qwen3_5", 13, _QWEN35, text=True, tokens=_TOKENS_HYBRID),
    ModelCase("qwen35-period-2", "Qwen3_5", 14, _QWEN35 | _QWEN35_PERIOD_2, text=True, tokens=65),
    ModelCase(
        "qwen35moe", "Qwen3_5Moe", 15, _QWEN35 | _SHARED_EXPERT, text=True, tokens=_TOKENS_HYBRID
    ),
)


def build(case: ModelCase) -> Any:
    """The transformers model in torch's default dtype, every tensor set from the case's seed."""
    torch, transformers = require("torch"), require("transformers")
    config = getattr(transformers, case.config_class)(**case.config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, case.model_class)(config).eval()
    rng = np.random.default_rng(case.seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = _values(rng, case, name, tuple(tensor.shape))
            tensor.copy_(torch.from_numpy(values).to(tensor.dtype))
    return model


def _values(
    rng: np.random.Generator, case: ModelCase, name: str, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """float64 values whose stored form (1 added, or -exp taken) is exact in float32."""
    stored = _stored(rng, case, name, shape).astype(np.float32).astype(np.float64)
    if name.endswith("A_log"):
        return np.asarray(np.log(stored))
    zero_centred = case.family.startswith(("Gemma3", "Qwen3_5")) and _is_norm(name)
    return stored - 1 if zero_centred and not name.endswith("linear_attn.norm.weight") else stored


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or "layernorm" in name


def _stored(
    rng: np.random.Generator, case: ModelCase, name: str, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    if name.endswith("A_log"):
        return rng.uniform(0.05, 4.0, shape)
    if _is_norm(name):
        gain = POST_NORM_GAIN if "Gemma" in case.family and ".post_" in name else 1.0
        return rng.uniform(0.5, 1.5, shape) * gain
    if name.endswith(("scale", "layer_scalar")):
        return rng.uniform(0.5, 1.5, shape)
    if len(shape) == 1:
        return rng.normal(0, 0.5, shape)
    tied = "Gemma" in case.family and name.endswith("embed_tokens.weight")
    if tied or name == "lm_head.weight":
        spread = LOGIT_SPREAD / np.sqrt(shape[-1])
    else:
        spread = 0.5 if "embed_tokens" in name else 1 / np.sqrt(shape[-1])
    return np.asarray(rng.standard_normal(shape) * spread)
