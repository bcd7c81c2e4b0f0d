"""Faults of routed, recurrent, gated and per-layer architectures, and where each must be found.

`PLACES` says at which point of which model a fault first shows, whoever runs it. `FAKE` plants them
in the fake engine by patching a reference function; fixtures/faults plants most in the real one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from reference import moe, ops
from reference.delta_net import RecurrentState
from reference.forward import Reference
from reference.model import Model
from reference.model.weights import Tensor
from suites.harness.compare import Array
from suites.harness.fake_engine import Fault, patched

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Place:
    """`point` is the first trace point above its limit, made by `op`."""

    id: str
    model: str
    point: str
    op: str


OTHER_CACHE = "shared-kv-of-another-layer"
"""Planted in the spec that the engine loads, not in a function."""

PLACES = (
    Place("v-norm-skipped", "gemma4", "Vcur_normed-0", "rms_norm"),
    Place("v-from-normed-k", "gemma4", "Vcur_normed-2", "rms_norm"),
    Place("v-from-rotated-k", "gemma4", "Vcur_normed-2", "rms_norm"),
    Place("soft-cap-missing", "gemma4", "result_output", "soft_cap"),
    Place("layer-scale-missing", "gemma4", "l_out-0", "add_scaled"),
    Place("rope-factors-left-out", "gemma4", "Qcur_pos-2", "rope"),
    Place(OTHER_CACHE, "gemma4e", "kqv_out-4", "attention"),
    Place("per-layer-table-unscaled", "gemma4e", "inp_per_layer", "per_layer_inputs"),
    Place("per-layer-input-reversed", "gemma4e", "per_layer_act-0", "activation"),
    Place("expert-scale-missing", "gemma4moe", "ffn_moe_out-0", "experts"),
    Place("router-fed-experts-input", "gemma4moe", "ffn_moe_logits-0", "linear"),
    Place("router-unscaled", "gemma4moe", "ffn_moe_router-0", "router"),
    Place("post-norms-swapped", "gemma4moe", "ffn_mlp_normed-0", "rms_norm"),
    Place("no-renormalisation", "qwen3moe", "ffn_moe_weights-0", "routing_weights"),
    Place("experts-gate-up-swapped", "qwen3moe", "ffn_moe_out-0", "experts"),
    Place("expert-of-the-neighbour", "qwen3moe", "ffn_moe_out-0", "experts"),
    Place("ties-to-the-highest", "qwen3moe", "ffn_moe_topk-1", "routing"),
    Place("shared-gate-missing", "qwen35moe", "ffn_shexp_gated-0", "shared_gate"),
    Place("attention-gate-missing", "qwen35moe", "attn_gated-2", "sigmoid_gate"),
    Place("beta-without-sigmoid", "qwen35", "beta-0", "beta"),
    Place("decay-without-softplus", "qwen35", "log_decay-0", "log_decay"),
    Place("taps-reversed", "qwen35", "conv_output_silu-0", "convolution"),
    Place("tail-shifted-at-chunk", "qwen35", "conv_output_silu-0", "convolution"),
    Place("tail-lost-at-chunk", "qwen35d64", "conv_output_silu-0", "convolution"),
    Place("heads-not-unit", "qwen35", "q_conv-0", "unit_heads"),
    Place("decay-after-update", "qwen35", "delta_out-0", "delta_rule"),
    Place("delta-without-correction", "qwen35", "delta_out-0", "delta_rule"),
    Place("key-heads-grouped", "qwen35", "delta_out-0", "delta_rule"),
    Place("state-lost-at-chunk", "qwen35d64", "delta_out-0", "delta_rule"),
    Place("state-transposed-at-chunk", "qwen35", "delta_out-0", "delta_rule"),
    Place("delta-gate-is-sigmoid", "qwen35", "delta_gated-0", "delta_gate"),
    Place("all-dimensions-rotated", "qwen35", "Qcur_pos-3", "rope"),
    Place("query-bias-missing", "qwen2", "Qcur-0", "linear"),
    Place("key-bias-missing", "qwen2", "Kcur-0", "linear"),
    Place("value-bias-missing", "qwen2", "Vcur-0", "linear"),
    Place("yarn-magnitude-missing", "llama_yarn", "Qcur_pos-0", "rope"),
)


def _patch(target: str, wrap: Wrap) -> Fault:
    return Fault(numerics=lambda: patched(target, wrap))


def _method(owner: type, name: str, wrap: Wrap) -> Fault:
    def plant() -> AbstractContextManager[Any]:
        return mock.patch.object(owner, name, wrap(getattr(owner, name)))

    return Fault(numerics=plant)


def _vector(role: str, change: Callable[[Array], Array]) -> Fault:
    """The float32 tensors of a role are read as something else."""

    def wrap(vector: Callable[..., Array]) -> Callable[..., Array]:
        def broken(tensor: Tensor) -> Array:
            values = vector(tensor)
            return change(values) if tensor.name.endswith(role) else values

        return broken

    return _method(Tensor, "vector", wrap)


def _v_norm_skipped(norm: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, w, e: x if w is None and x.ndim == 3 else norm(x, w, e)


@contextmanager
def _v_from(rotated: bool) -> Iterator[None]:
    """V's norm reads K as K's norm, or its rotation, left it, on layers whose V is the raw K."""
    norm, rope = ops.rms_norm, ops.rope
    seen: dict[str, Array] = {}

    def broken_norm(x: Array, weight: Array | None, epsilon: float) -> Array:
        if weight is None and x.ndim == 3 and np.array_equal(seen["raw"], x):
            return norm(seen["rotated" if rotated else "normed"], None, epsilon)
        y = norm(x, weight, epsilon)
        if weight is not None and x.ndim == 3:
            seen.update(raw=x, normed=y)
        return y

    def watched_rope(*arguments: Any) -> Array:
        seen["rotated"] = rope(*arguments)
        return seen["rotated"]

    with (
        mock.patch.object(ops, "rms_norm", broken_norm),
        mock.patch.object(ops, "rope", watched_rope),
    ):
        yield


def _swapped_norms(vector: Callable[..., Array]) -> Callable[..., Array]:
    """The two post-norms of a layer's dense and routed results, by their known tensors."""
    known: dict[str, Tensor] = {}

    def broken(tensor: Tensor) -> Array:
        known[tensor.name] = tensor
        for one, other in (("norm_1", "norm_2"), ("norm_2", "norm_1")):
            if f"post_ffw_{one}" in tensor.name:
                pair = tensor.name.replace(one, other)
                return vector(known[pair]) if pair in known else vector(tensor)[::-1]
        return vector(tensor)

    return broken


def _no_renormalisation(route: Callable[..., moe.Routing]) -> Callable[..., moe.Routing]:
    def broken(logits: Array, used: int) -> moe.Routing:
        routing = route(logits, used)
        chosen = np.take_along_axis(routing.probabilities, routing.experts, axis=-1)
        return replace(routing, weights=chosen)

    return broken


def _ties_to_the_highest(route: Callable[..., moe.Routing]) -> Callable[..., moe.Routing]:
    def broken(logits: Array, used: int) -> moe.Routing:
        last = logits.shape[-1] - 1
        experts = last - np.argsort(-logits[:, ::-1], axis=-1, kind="stable")[:, :used]
        return route(logits, used, experts)

    return broken


def _experts_of(change: Callable[[Any, int], Any]) -> Wrap:
    """`change(expert, e)` gives the matrices in place of `expert(e)`."""

    def wrap(routed_sum: Callable[..., Array]) -> Callable[..., Array]:
        def broken(x: Array, routing: Any, expert: Any, *rest: Any) -> Array:
            return routed_sum(x, routing, lambda e: change(expert, e), *rest)

        return broken

    return wrap


def _neighbour(expert: Any, e: int) -> Any:
    return expert(e ^ 1)


def _swapped(expert: Any, e: int) -> Any:
    gate, up, down = expert(e)
    return up, gate, down


@contextmanager
def _open_attention_gate() -> Iterator[None]:
    """attn_gated-2 of qwen35moe has 128 columns; SiLU, which other blocks use, stays whole."""
    sigmoid = ops.sigmoid

    def broken(x: Array) -> Array:
        return np.ones_like(x) if x.shape[-1] == 128 else np.asarray(sigmoid(x))

    with (
        mock.patch.object(ops, "sigmoid", broken),
        mock.patch.object(ops, "silu", lambda x: x * sigmoid(x)),
    ):
        yield


def _taps_reversed(convolve: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, kernel, state: convolve(x, kernel[:, ::-1], state)


def _decay_after(step: Callable[..., Array]) -> Callable[..., Array]:
    """S = e^g (S + k d^T): the update itself decays too."""

    def broken(q: Array, k: Array, v: Array, g: Array, beta: Array, state: RecurrentState) -> Array:
        out = step(q, k, v, np.zeros_like(g), beta, state)
        decay = np.exp(g[-1])[:, None]
        state.memory = state.memory * decay[:, :, None]
        return np.asarray(out * decay)

    return broken


def _no_correction(step: Callable[..., Array]) -> Callable[..., Array]:
    """d = beta v: what the state already holds for this key is not taken off."""

    def broken(q: Array, k: Array, v: Array, g: Array, beta: Array, state: RecurrentState) -> Array:
        decay = np.exp(g[0])[:, None, None]
        added = k[0][:, :, None] * (v[0] * beta[0][:, None])[:, None, :]
        state.memory = state.memory * decay + added
        return np.asarray(np.einsum("hkv,hk->hv", state.memory, q[0])[None])

    return broken


def _grouped(step: Callable[..., Array]) -> Callable[..., Array]:
    """Value head h reads key head h // (NV / NK); these models have 2 key heads."""

    def broken(q: Array, k: Array, *rest: Any) -> Array:
        heads = np.arange(q.shape[1]) // (q.shape[1] // 2)
        return step(q[:, heads], k[:, heads], *rest)

    return broken


def _sigmoid_for_silu(silu: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x: ops.sigmoid(x) if x.shape[-1] == 128 else silu(x)


def _rotate_all(rope: Callable[..., Array]) -> Callable[..., Array]:
    """Every pair of a head turns, the ones past the rotated part as slowly as the last."""

    def broken(x: Array, cos: Array, sin: Array, pairing: str) -> Array:
        missing = x.shape[-1] // 2 - cos.shape[-1]
        widened = [np.pad(table, ((0, 0), (0, missing)), mode="edge") for table in (cos, sin)]
        return rope(x, *widened, pairing)

    return broken


def _unscaled_table(embed: Callable[..., Array]) -> Callable[..., Array]:
    def broken(self: Any, table: Tensor, tokens: tuple[int, ...]) -> Array:
        rows = embed(self, table, tokens)
        width = self.model.spec.per_layer_length
        return rows / np.sqrt(width) if "per_layer" in table.name else rows

    return broken


def _reversed_input(output: Callable[..., Array]) -> Callable[..., Array]:
    """Each layer reads its per-layer input reversed, as a wrong stride or offset would."""
    return lambda self, chunk, layer, x, rows: output(self, chunk, layer, x, rows[..., ::-1])


def _each(change: Callable[[RecurrentState], None]) -> Fault:
    """`change` of every layer's state between two chunks."""

    def at_chunk(states: dict[int, RecurrentState]) -> None:
        for state in states.values():
            change(state)

    return Fault(at_chunk=at_chunk)


def _shift_tail(state: RecurrentState) -> None:
    state.tail = np.concatenate([np.zeros_like(state.tail[:1]), state.tail[:-1]])


def _lose_tail(state: RecurrentState) -> None:
    state.tail = np.zeros_like(state.tail)


def _lose_memory(state: RecurrentState) -> None:
    state.memory = np.zeros_like(state.memory)


def _transpose_memory(state: RecurrentState) -> None:
    state.memory = np.ascontiguousarray(state.memory.transpose(0, 2, 1))


def _router_fed_experts_input(experts: Callable[..., Array]) -> Callable[..., Array]:
    return lambda self, chunk, layer, router, own: experts(self, chunk, layer, own, own)


FAKE: Mapping[str, Fault] = {
    "v-norm-skipped": _patch("reference.ops.rms_norm", _v_norm_skipped),
    "v-from-normed-k": Fault(numerics=lambda: _v_from(rotated=False)),
    "v-from-rotated-k": Fault(numerics=lambda: _v_from(rotated=True)),
    "soft-cap-missing": _patch("reference.ops.soft_cap", lambda f: lambda x, cap: x),
    "layer-scale-missing": _vector("layer_output_scale.weight", np.ones_like),
    "rope-factors-left-out": _vector("rope_freqs.weight", np.ones_like),
    "per-layer-table-unscaled": _method(Reference, "_embed", _unscaled_table),
    "per-layer-input-reversed": _method(Reference, "_per_layer_output", _reversed_input),
    "expert-scale-missing": _vector("ffn_down_exps.scale", np.ones_like),
    "router-fed-experts-input": _method(Reference, "_experts", _router_fed_experts_input),
    "router-unscaled": _vector("ffn_gate_inp.scale", np.ones_like),
    "post-norms-swapped": _method(Tensor, "vector", _swapped_norms),
    "no-renormalisation": _patch("reference.moe.route", _no_renormalisation),
    "experts-gate-up-swapped": _patch("reference.moe.routed_sum", _experts_of(_swapped)),
    "expert-of-the-neighbour": _patch("reference.moe.routed_sum", _experts_of(_neighbour)),
    "ties-to-the-highest": _patch("reference.moe.route", _ties_to_the_highest),
    "shared-gate-missing": _patch(
        "reference.ops.sigmoid", lambda f: lambda x: np.ones_like(x) if x.shape[-1] == 1 else f(x)
    ),
    "attention-gate-missing": Fault(numerics=_open_attention_gate),
    "beta-without-sigmoid": _patch(
        "reference.ops.sigmoid", lambda f: lambda x: x if x.shape[-1] == 4 else f(x)
    ),
    "decay-without-softplus": _patch(
        "reference.delta_net.log_decay",
        lambda f: lambda alpha, bias, a: np.maximum(alpha + bias, 0) * a,
    ),
    "taps-reversed": _patch("reference.delta_net.convolve", _taps_reversed),
    "tail-shifted-at-chunk": _each(_shift_tail),
    "tail-lost-at-chunk": _each(_lose_tail),
    "heads-not-unit": _patch(
        "reference.delta_net.unit_heads", lambda f: lambda x, e: f(x, e) * np.float32(1.00001)
    ),
    "decay-after-update": _patch("reference.delta_net.step_form", _decay_after),
    "delta-without-correction": _patch("reference.delta_net.step_form", _no_correction),
    "key-heads-grouped": _patch("reference.delta_net.step_form", _grouped),
    "state-lost-at-chunk": _each(_lose_memory),
    "state-transposed-at-chunk": _each(_transpose_memory),
    "delta-gate-is-sigmoid": _patch("reference.ops.silu", _sigmoid_for_silu),
    "all-dimensions-rotated": _patch("reference.ops.rope", _rotate_all),
    "query-bias-missing": _vector("attn_q.bias", np.zeros_like),
    "key-bias-missing": _vector("attn_k.bias", np.zeros_like),
    "value-bias-missing": _vector("attn_v.bias", np.zeros_like),
    "yarn-magnitude-missing": _patch(
        "reference.ops.rope_tables", lambda f: lambda fr, pos, m: f(fr, pos)
    ),
}


def another_shared_layer(model: Model) -> Model:
    """The model as an engine sees it that reads the wrong layer's cache."""
    layers = list(model.spec.layers)
    owners = [layer.index for layer in layers if layer.owns_kv]
    first = next(layer for layer in layers if not layer.owns_kv)
    same = [i for i in owners if i != first.kv_layer and layers[i].head_size == first.head_size]
    layers[first.index] = replace(first, kv_layer=same[0])
    return replace(model, spec=replace(model.spec, layers=tuple(layers)))


def as_seen_by_engine(place: Place, model: Model) -> Model:
    """What the broken engine loads instead of `model`."""
    return another_shared_layer(model) if place.id == OTHER_CACHE else model


def fault_of(place: Place) -> Fault:
    return FAKE.get(place.id, Fault())
