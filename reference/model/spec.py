"""ModelSpec: the shape of one model and how its architecture differs from the others, as data.

Dimension symbols, used here and in the maths of both forward passes:

    T    tokens in this call                E    embedding length (width of the residual stream)
    H    query heads                        KVH  key/value heads; query head h reads h // (H / KVH)
    D    head size                          F    feed-forward length
    V    vocabulary size                    C    context length (rows of the KV cache)

spec_reader.py makes it from a file.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pairing = Literal["norm", "neox"]
ValueSource = Literal["projection", "key"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one layer.

    `pairing` "norm" rotates neighbours (0,1), (2,3), ...; "neox" rotates j with j + dimensions/2.
    Elements of a head past `dimensions` are not rotated. `divisor` is linear scaling: every
    frequency is divided by it. `magnitude` multiplies every cos and sin.
    """

    pairing: Pairing
    dimensions: int
    base: float
    divisor: float = 1.0
    yarn: "YarnSpec | None" = None
    magnitude: float = 1.0

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Radians per position of each pair, float64 (dimensions/2,): base^(-2j/n) / divisor.

        `factors`, the file's `rope_freqs` (dimensions/2,), divides each pair's frequency.
        """
        pair = np.arange(self.dimensions // 2, dtype=np.float64)
        frequency = self.base ** (-2.0 * pair / self.dimensions) / self.divisor
        if self.yarn is not None:
            far = self.yarn.far(self.dimensions, self.base)
            frequency *= far / self.yarn.factor + 1 - far
        return frequency if factors is None else frequency / factors.astype(np.float64)


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (Peng et al. 2023) as llama.cpp applies it, with its betas of 32 and 1 turns.

    Pairs that turn often inside the original context keep their frequency, those that turn less
    than once are divided by `factor`, and a ramp joins the two.
    """

    factor: float
    original_context: int

    def far(self, dimensions: int, base: float) -> NDArray[np.float64]:
        """Share of interpolation of each pair, (dimensions/2,): 0 keeps, 1 divides by `factor`."""

        def pair_with(turns: float) -> float:
            full = math.log(self.original_context / (2 * math.pi * turns))
            return dimensions * full / (2 * math.log(base))

        low = max(0, math.floor(pair_with(32)))
        high = min(dimensions - 1, math.ceil(pair_with(1)))
        pair = np.arange(dimensions // 2, dtype=np.float64)
        return np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)

    @property
    def magnitude(self) -> float:
        """What every cos and sin is multiplied by, at every position."""
        return 1 + 0.1 * math.log(self.factor)


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net layer (Yang et al. 2024): linear attention with a recurrent state.

    Per value head the state is (state_size, state_size); value head h uses key head
    h mod key_heads. A causal depthwise convolution of `conv_kernel` taps precedes it.
    """

    state_size: int
    key_heads: int
    value_heads: int
    conv_kernel: int

    @property
    def key_length(self) -> int:
        return self.state_size * self.key_heads

    @property
    def value_length(self) -> int:
        return self.state_size * self.value_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_length + self.value_length


@dataclass(frozen=True)
class ExpertsSpec:
    """Routed experts: `used` of `count` per token, each a gated block of `feed_forward_length`.

    `router` "plain": p = softmax(x . gate^T). "scaled" (gemma4): the router reads
    rms(x) / sqrt(E) * scale, the experts a norm of their own, and a dense block runs beside them.
    `shared_length`: width of the expert that every token uses, behind a sigmoid gate; None: none.
    """

    count: int
    used: int
    feed_forward_length: int
    router: Literal["plain", "scaled"] = "plain"
    shared_length: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One block: attention, or a delta net in its place; then a feed-forward block.

    Keys at distance >= `window` are masked; None: full attention. `value_source` "key": V is the
    raw K projection, before norm and RoPE. `kv_layer`: the layer whose cache this one reads (its
    own index, except where layers share). `feed_forward_length` 0: experts only.
    """

    index: int
    head_count: int
    head_count_kv: int
    head_size: int
    feed_forward_length: int
    window: int | None
    rope: RopeSpec
    value_source: ValueSource = "projection"
    kv_layer: int = -1
    delta_net: DeltaNetSpec | None = None
    experts: ExpertsSpec | None = None
    output_scale: bool = False

    @property
    def owns_kv(self) -> bool:
        """True where the layer writes keys and values of its own."""
        return self.delta_net is None and self.kv_layer == self.index


@dataclass(frozen=True)
class ModelSpec:
    """All that the forward passes need to know besides the weights.

    `attention_scale` multiplies q.k; `embedding_scale` multiplies token embeddings; `qk_norm`: q
    and k get a per-head RMS norm before RoPE; `post_norms`: the attention and feed-forward outputs
    get an RMS norm before they are added to the residual stream; `gated_attention`: attn_q gives
    D query and D gate values per head, and the result is multiplied by sigmoid(gate);
    `value_norm`: V gets an RMS norm without weight; `per_layer_length`: width of Gemma's
    per-layer input (0: none); `logit_softcap` c: logits become c * tanh(x / c) (None: as they are).
    """

    architecture: str
    context_length: int
    embedding_length: int
    vocab_size: int
    rms_epsilon: float
    attention_scale: float
    embedding_scale: float
    activation: Activation
    qk_norm: bool
    post_norms: bool
    layers: tuple[LayerSpec, ...]
    gated_attention: bool = False
    value_norm: bool = False
    qkv_bias: bool = False
    per_layer_length: int = 0
    logit_softcap: float | None = None
    skipped_blocks: int = 0

    @property
    def layer_count(self) -> int:
        return len(self.layers)
