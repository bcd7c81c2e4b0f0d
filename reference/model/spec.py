"""ModelSpec: the shape of one model and how its architecture differs from the others, as data.

Dimension symbols, used here and in the maths of both forward passes:

    T    tokens in this call                E    embedding length (width of the residual stream)
    H    query heads                        KVH  key/value heads; query head h reads h // (H / KVH)
    D    head size                          F    feed-forward length
    V    vocabulary size                    C    context length (rows of the KV cache)

Keys are GGUF metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A key of the
model's architecture that nothing here reads is refused by name: it might change the maths.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference.model.errors import InputError, Unsupported
from reference.model.gguf import GGUFFile

Pairing = Literal["norm", "neox"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one layer.

    `pairing` "norm" rotates neighbours (0,1), (2,3), ...; "neox" rotates j with j + dimensions/2.
    `divisor` is linear scaling: every frequency is divided by it.
    """

    pairing: Pairing
    dimensions: int
    base: float
    divisor: float

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Radians per position of each pair, float64 (dimensions/2,): base^(-2j/n) / divisor.

        `factors`, the file's `rope_freqs` (dimensions/2,), divides each pair's frequency.
        """
        pair = np.arange(self.dimensions // 2, dtype=np.float64)
        frequency = self.base ** (-2.0 * pair / self.dimensions) / self.divisor
        return frequency if factors is None else frequency / factors.astype(np.float64)


@dataclass(frozen=True)
class LayerSpec:
    """One transformer block. Keys at distance >= `window` are masked; None: full attention."""

    index: int
    head_count: int
    head_count_kv: int
    head_size: int
    feed_forward_length: int
    window: int | None
    rope: RopeSpec


@dataclass(frozen=True)
class ModelSpec:
    """All that the forward passes need to know besides the weights.

    `attention_scale` multiplies q.k; `embedding_scale` multiplies token embeddings; `qk_norm`: q
    and k get a per-head RMS norm before RoPE; `post_norms`: the attention and feed-forward outputs
    get an RMS norm before they are added to the residual stream.
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

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @staticmethod
    def from_file(file: GGUFFile) -> "ModelSpec":
        """Reads the spec. Raises Unsupported for what it does not know, InputError for nonsense."""
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise InputError(
                f"model: {file.path} has no string general.architecture; "
                "a GGUF that holds a language model names one"
            )
        if architecture not in ARCHITECTURES:
            raise Unsupported(
                f"model: architecture is {architecture}; supported: {', '.join(ARCHITECTURES)}"
            )
        keys = _Keys(file.metadata, architecture)
        spec = _read(keys, ARCHITECTURES[architecture], _vocab_size(file))
        keys.refuse_unread()
        return spec


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs, before the file's own numbers.

    `sliding_period` p: layer i slides when i mod p < p - 1 (None: no layer does).
    """

    name: str
    pairing: Pairing
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    rope_factors: bool = False
    sliding_period: int | None = None
    sliding_rope_base: float = 10000.0


ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row
    for row in (
        Architecture("llama", pairing="norm", rope_factors=True),
        Architecture("qwen3", pairing="neox", qk_norm=True),
        Architecture(
            "gemma3",
            pairing="neox",
            activation="gelu_tanh",
            qk_norm=True,
            post_norms=True,
            scaled_embeddings=True,
            sliding_period=6,
        ),
    )
}

# Gemma 3 27B is the one size whose query scale follows width / heads instead of the head size;
# llama.cpp recognises it by its number of blocks (src/models/gemma3.cpp).
_GEMMA3_27B_BLOCKS = 62


class _Keys:
    """Typed access to `{architecture}.*` metadata that remembers what was read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."
        self._read: set[str] = set()

    def _value(self, name: str) -> Any:
        self._read.add(self._prefix + name)
        return self._metadata.get(self._prefix + name)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._metadata

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._value(name)
        if value is None:
            if default is None:
                raise InputError(
                    f"model: metadata key {self._prefix}{name} is missing, expected a count"
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(
                f"model: {self._prefix}{name} is {_short(value)}, expected a positive whole number"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(name)
        if value is None:
            if default is None:
                raise InputError(
                    f"model: metadata key {self._prefix}{name} is missing, expected a number"
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"model: {self._prefix}{name} is {_short(value)}, expected a number")
        if not (math.isfinite(value) and value > 0):
            raise InputError(
                f"model: {self._prefix}{name} is {value}, expected a positive finite number"
            )
        return float(value)

    def text(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self._value(name)
        if value is None:
            return default
        if value not in choices:
            raise Unsupported(
                f"model: {self._prefix}{name} is {_short(value)}; supported: {', '.join(choices)}"
            )
        return str(value)

    def refuse_unread(self) -> None:
        unknown = sorted(
            key for key in self._metadata if key.startswith(self._prefix) and key not in self._read
        )
        if unknown:
            raise Unsupported(
                f"model: metadata key {unknown[0]} (value {_short(self._metadata[unknown[0]])}) is "
                f"not known for this architecture and may change its maths; "
                f"known keys: {', '.join(sorted(self._read))}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _vocab_size(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        shape = "missing" if info is None else f"of shape {info.shape}"
        raise InputError(
            f"model: tensor token_embd.weight is {shape}, expected (vocabulary, width)"
        )
    return info.shape[0]


def _read(keys: _Keys, rules: Architecture, vocab_size: int) -> ModelSpec:
    embedding_length = keys.count("embedding_length")
    head_count = keys.count("attention.head_count")
    head_count_kv = keys.count("attention.head_count_kv", head_count)
    if head_count % head_count_kv:
        raise InputError(
            f"model: attention.head_count is {head_count}, expected a multiple of "
            f"head_count_kv = {head_count_kv} because query heads share key/value heads evenly"
        )
    head_size = keys.count("attention.key_length", embedding_length // head_count or None)
    if not keys.has("attention.key_length") and embedding_length % head_count:
        raise InputError(
            f"model: embedding_length is {embedding_length}, expected a multiple of head_count = "
            f"{head_count} because no attention.key_length is given"
        )
    value_size = keys.count("attention.value_length", head_size)
    if value_size != head_size:
        raise Unsupported(
            f"model: attention.value_length is {value_size} and key_length {head_size}; "
            "supported: equal head sizes"
        )
    declared_vocab = keys.count("vocab_size", vocab_size)
    if declared_vocab != vocab_size:
        raise InputError(
            f"model: vocab_size is {declared_vocab}, expected {vocab_size} because "
            "token_embd.weight has that many rows"
        )
    block_count = keys.count("block_count")
    feed_forward_length = keys.count("feed_forward_length")
    rope_dimensions = keys.count("rope.dimension_count", head_size)
    if rope_dimensions != head_size:
        raise Unsupported(
            f"model: rope.dimension_count is {rope_dimensions}; "
            f"supported: the head size, {head_size}"
        )
    if head_size % 2:
        raise InputError(f"model: head size is {head_size}, expected an even number for RoPE")

    full_rope = RopeSpec(
        pairing=rules.pairing,
        dimensions=rope_dimensions,
        base=keys.number("rope.freq_base", 10000.0),
        divisor=_linear_divisor(keys),
    )
    window: int | None = None
    sliding_rope = full_rope
    period = 1
    if rules.sliding_period is not None:
        window = keys.count("attention.sliding_window")
        period = keys.count("attention.sliding_window_pattern", rules.sliding_period)
        sliding_rope = RopeSpec(
            pairing=rules.pairing,
            dimensions=rope_dimensions,
            base=keys.number("rope.freq_base_swa", rules.sliding_rope_base),
            divisor=1.0,
        )

    def layer(index: int) -> LayerSpec:
        slides = window is not None and index % period < period - 1
        return LayerSpec(
            index=index,
            head_count=head_count,
            head_count_kv=head_count_kv,
            head_size=head_size,
            feed_forward_length=feed_forward_length,
            window=window if slides else None,
            rope=sliding_rope if slides else full_rope,
        )

    wide_query = rules.name == "gemma3" and block_count == _GEMMA3_27B_BLOCKS
    return ModelSpec(
        architecture=rules.name,
        context_length=keys.count("context_length"),
        embedding_length=embedding_length,
        vocab_size=vocab_size,
        rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        attention_scale=1.0 / math.sqrt(embedding_length / head_count if wide_query else head_size),
        embedding_scale=math.sqrt(embedding_length) if rules.scaled_embeddings else 1.0,
        activation=rules.activation,
        qk_norm=rules.qk_norm,
        post_norms=rules.post_norms,
        layers=tuple(layer(index) for index in range(block_count)),
    )


def _linear_divisor(keys: _Keys) -> float:
    """`rope.scaling.factor` under type linear or no type; older files: `rope.scale_linear`."""
    kind = keys.text("rope.scaling.type", ("none", "linear"), "linear")
    older = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", older)
    return factor if kind == "linear" else 1.0
