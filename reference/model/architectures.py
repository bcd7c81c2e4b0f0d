"""The table of architectures: how each differs from the others before the file's own numbers.

A new dense architecture that mixes what exists is one more row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reference.model.spec import Activation, Pairing


@dataclass(frozen=True)
class Architecture:
    """`sliding_period` p: layer i slides when i mod p < p - 1, unless the file says otherwise.

    `sliding`: layers may slide. `hybrid`: some layers are gated delta nets. `routed`: every layer's
    feed-forward block is routed experts; `may_route`: those whose tensors are there.
    `pre_ffn_norm`: the role of the norm before the feed-forward block.
    """

    name: str
    pairing: Pairing
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    rope_factors: bool = False
    qkv_bias: bool = False
    sliding: bool = False
    sliding_period: int | None = None
    unit_attention_scale: bool = False
    value_norm: bool = False
    gated_attention: bool = False
    hybrid: bool = False
    routed: bool = False
    may_route: bool = False
    shared_expert: bool = False
    pre_ffn_norm: str = "ffn_norm"


_GEMMA = {
    "pairing": "neox",
    "activation": "gelu_tanh",
    "qk_norm": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "sliding": True,
}
_QWEN35 = {
    "pairing": "neox",
    "qk_norm": True,
    "gated_attention": True,
    "hybrid": True,
    "pre_ffn_norm": "post_attention_norm",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row
    for row in (
        Architecture("llama", pairing="norm", rope_factors=True),
        Architecture("qwen2", pairing="neox", qkv_bias=True),
        Architecture("qwen3", pairing="neox", qk_norm=True),
        Architecture("qwen3moe", pairing="neox", qk_norm=True, routed=True),
        Architecture("gemma3", **_GEMMA, sliding_period=6),  # type: ignore[arg-type]
        Architecture(
            "gemma4",
            **_GEMMA,  # type: ignore[arg-type]
            rope_factors=True,
            unit_attention_scale=True,
            value_norm=True,
            may_route=True,
        ),
        Architecture("qwen35", **_QWEN35),  # type: ignore[arg-type]
        Architecture("qwen35moe", **_QWEN35, routed=True, shared_expert=True),  # type: ignore[arg-type]
    )
}
