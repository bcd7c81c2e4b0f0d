"""What a step must move and compute, from the model's shapes: the limits of its speed.

Bytes: each weight once a step whatever the batch (of routed experts those that some token chose),
each cached key and value once for its sequence, recurrent states read and written. Activations are
left out: at most a few MB that stay in caches. FLOPs: a multiply-add is two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reference.model import Model
from reference.model.quant import FORMATS
from reference.model.spec import ExpertsSpec, LayerSpec, ModelSpec
from reference.model.weights import Tensor

# A table of which only the rows of the tokens at hand are read.
_LOOKED_UP = ("token_embd", "per_layer_token_embd")


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one decode step: `weights` by role, then what grows with sequences and context."""

    weights: Mapping[str, float]
    kv_read: float
    kv_written: float
    states: float

    @property
    def total(self) -> float:
        return sum(self.weights.values()) + self.kv_read + self.kv_written + self.states

    def seconds(self, bytes_per_s: float) -> float:
        """Time that these bytes take at least."""
        return self.total / bytes_per_s


def kv_row_nbytes(layer: LayerSpec, kv_type_k: str, kv_type_v: str) -> int:
    """Bytes of one token's key and value in one layer's cache."""
    return layer.head_count_kv * sum(
        FORMATS[kind.upper()].row_nbytes(layer.head_size, "KV cache")
        for kind in (kv_type_k, kv_type_v)
    )


def kv_nbytes_per_token(spec: ModelSpec, kv_type_k: str, kv_type_v: str) -> int:
    """Bytes that one token adds to the cache, all layers."""
    return sum(kv_row_nbytes(layer, kv_type_k, kv_type_v) for layer in spec.layers if layer.owns_kv)


def state_nbytes(spec: ModelSpec) -> int:
    """Bytes of one sequence's recurrent and convolution states, float32."""
    nets = [layer.delta_net for layer in spec.layers if layer.delta_net is not None]
    return 4 * sum(
        net.value_heads * net.state_size**2 + net.channels * (net.conv_kernel - 1) for net in nets
    )


def touched_experts(count: int, used: int, tokens: int) -> float:
    """How many different ones of `count` experts `tokens` tokens choose, on average, evenly routed.

    An expert is left out by all with probability (1 - used / count)^tokens.
    """
    return count * (1.0 - (1.0 - used / count) ** tokens)


def step_bytes(model: Model, contexts: Sequence[int], kv_type_k: str, kv_type_v: str) -> StepBytes:
    """One decode step of len(contexts) sequences; `contexts`: tokens that each cache holds."""
    spec, batch = model.spec, len(contexts)
    weights: dict[str, float] = {}

    def add(role: str, nbytes: float) -> None:
        weights[role] = weights.get(role, 0.0) + nbytes

    for role, tensor in model.weights.top.items():
        if tensor is model.weights.lm_head:
            add("output", tensor.raw.nbytes)
        elif role not in _LOOKED_UP:
            add(role, tensor.raw.nbytes)
        if role in _LOOKED_UP:
            add(f"rows of {role}", batch * tensor.raw.nbytes / tensor.shape[0])
    for layer, tensors in zip(spec.layers, model.weights.layers, strict=True):
        for role, tensor in tensors.items():
            add(role, _layer_tensor_nbytes(layer.experts, role, tensor, batch))
    read = sum(
        kv_row_nbytes(spec.layers[layer.kv_layer], kv_type_k, kv_type_v)
        * min(context, layer.window or context)
        for layer in spec.layers
        if layer.delta_net is None
        for context in contexts
    )
    written = batch * kv_nbytes_per_token(spec, kv_type_k, kv_type_v)
    return StepBytes(weights, read, written, batch * 2 * state_nbytes(spec))


def _layer_tensor_nbytes(
    experts: ExpertsSpec | None, role: str, tensor: Tensor, tokens: int
) -> float:
    if experts is None or not role.endswith("_exps"):
        return float(tensor.raw.nbytes)
    share = touched_experts(experts.count, experts.used, tokens) / experts.count
    return tensor.raw.nbytes * share


def flow_weight_bytes(model: Model, tokens: int) -> float:
    """Bytes of weights that one prefill flow of `tokens` tokens reads, the output matrix left out:
    only a prompt's last flow needs it.
    """
    held = step_bytes(model, [0] * tokens, "f16", "f16").weights
    return sum(nbytes for role, nbytes in held.items() if role != "output")


def prefill_flops(model: Model, tokens: int) -> float:
    """FLOPs of feeding a prompt from an empty cache, logits of the last token only."""
    head = model.weights.lm_head
    return (
        tokens * sum(map(_layer_flops, model.spec.layers, _layer_weights(model)))
        + sum(_attention_flops(layer, tokens) for layer in model.spec.layers)
        + 2.0 * head.shape[0] * head.shape[1]
    )


def _layer_weights(model: Model) -> list[float]:
    """Weights of one token's matrix products in each layer; of experts those that it uses."""
    counts = []
    for layer, tensors in zip(model.spec.layers, model.weights.layers, strict=True):
        total = 0.0
        for role, tensor in tensors.items():
            if len(tensor.shape) == 3 and layer.experts is not None:
                used = layer.experts.used / layer.experts.count
                total += used * tensor.shape[0] * tensor.shape[1] * tensor.shape[2]
            elif len(tensor.shape) == 2 and role != "ssm_conv1d":
                total += tensor.shape[0] * tensor.shape[1]
        counts.append(total)
    return counts


def _layer_flops(layer: LayerSpec, weights: float) -> float:
    net = layer.delta_net
    if net is None:
        return 2.0 * weights
    # Decay, S^T k, the rank-one update and S^T q: 1 + 2 + 2 + 2 for each element of the state.
    state = 7.0 * net.value_heads * net.state_size**2
    return 2.0 * weights + state + 2.0 * net.channels * net.conv_kernel


def _attention_flops(layer: LayerSpec, tokens: int) -> float:
    """q . k and the weighted sum of v, causal: token i sees min(i + 1, window) keys."""
    if layer.delta_net is not None:
        return 0.0
    window = min(layer.window or tokens, tokens)
    pairs = window * (window + 1) // 2 + (tokens - window) * window
    return 4.0 * layer.head_count * layer.head_size * pairs
