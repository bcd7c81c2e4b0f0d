"""Tiny models expose mistakes: taking any one tensor away, or any declared rule, moves the logits.

A tensor that changed nothing could be read wrongly, or not at all, and every other test would still
pass. The formats repeat the same shapes, so the default mix and the variants are tried.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fixtures.registry import resolve_model
from fixtures.tiny import MIX, TINY
from reference.dequant import dequantise
from reference.forward import DenseCache, Reference
from reference.model import Model, load_model
from reference.model.quant import FORMATS
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.trace import Trace
from reference.model.weights import Tensor, Weights
from reference.ops import Array
from suites.harness.tolerances import SENSITIVITY

MODELS = [name for name, case in TINY.items() if case.format == MIX]
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
LENGTH = 24  # longer than the sliding windows of 16

Spec = Callable[[ModelSpec], ModelSpec]


@cache
def _loaded(model: str) -> tuple[Model, DenseCache, Array]:
    loaded = load_model(resolve_model(model))
    dense: DenseCache = {}
    return loaded, dense, _logits(loaded, dense)


def _tokens(model: Model, length: int = LENGTH) -> list[int]:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(17)))
    ids: list[int] = rng.integers(0, model.spec.vocab_size, length).tolist()
    return ids


def _logits(model: Model, dense: DenseCache) -> Array:
    reference = Reference(model, kv_type_k="f32", kv_type_v="f32", dense=dense)
    return reference.prefill(_tokens(model), logits="all")


def _without(tensor: Tensor) -> Tensor:
    """The tensor with its content taken away, in F32.

    Norms and scales become their mean (the pattern is gone, the loudness stays; one alone becomes
    1), RoPE factors 1, the convolution its newest tap, everything else 0.
    """
    values = dequantise(tensor.format, tensor.raw).reshape(tensor.shape)
    role = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if role == "rope_freqs" or values.shape == (1,):
        values = np.ones_like(values)
    elif role == "ssm_conv1d":
        values = np.concatenate([np.zeros_like(values[:, :-1]), values[:, -1:]], axis=1)
    elif role == "scale" or "norm" in role:
        values = np.full_like(values, values.mean())
    else:
        values = np.zeros_like(values)
    raw = np.ascontiguousarray(values).view(np.uint8)
    return Tensor(tensor.name, FORMATS["F32"], tensor.shape, raw)


def _swapped(model: Model, layer: int | None, role: str) -> tuple[Model, str]:
    top, layers = dict(model.weights.top), [dict(each) for each in model.weights.layers]
    place = top if layer is None else layers[layer]
    place[role] = _without(place[role])
    return replace(model, weights=Weights(top, tuple(layers))), place[role].name


def _roles(model: Model) -> list[tuple[int | None, str]]:
    blocks = [(i, role) for i, layer in enumerate(model.weights.layers) for role in layer]
    return [*((None, role) for role in model.weights.top), *blocks]


@EVERY_MODEL
def test_every_tensor_moves_the_logits(model: str) -> None:
    loaded, dense, base = _loaded(model)
    roles, still, layers = _roles(loaded), [], loaded.spec.layer_count
    for layer, role in roles:
        if (layer, role) == (layers - 1, "layer_output_scale"):
            continue  # the output norm, which follows at once, divides it out again
        changed, name = _swapped(loaded, layer, role)
        kept = {key: value for key, value in dense.items() if key.partition("[")[0] != name}
        moved = float(np.abs(_logits(changed, kept) - base).max())
        if not moved > SENSITIVITY:
            still.append(f"{name} moves them by {moved:.3g}")
    assert len(roles) > 9 * layers
    assert not still, "; ".join(still)


def _layers(edit: Callable[[LayerSpec], LayerSpec]) -> Spec:
    return lambda spec: replace(spec, layers=tuple(map(edit, spec.layers)))


def _rope(**changes: object) -> Spec:
    def edit(layer: LayerSpec) -> LayerSpec:
        return replace(layer, rope=replace(layer.rope, **changes))  # type: ignore[arg-type]

    return _layers(edit)


def _wider(layer: LayerSpec) -> LayerSpec:
    return replace(layer, window=layer.window + 1 if layer.window else None)


def _other_pairing(spec: ModelSpec) -> ModelSpec:
    here = spec.layers[0].rope.pairing
    return _rope(pairing="norm" if here == "neox" else "neox")(spec)


def _fewer_experts(layer: LayerSpec) -> LayerSpec:
    experts = layer.experts
    return replace(layer, experts=experts and replace(experts, used=experts.used - 1))


RULES: dict[str, Spec] = {
    "pairing": _other_pairing,
    "rope base": _rope(base=50000.0),
    "rope scaling": _rope(divisor=1.0, yarn=None),
    "rope magnitude": _rope(magnitude=1.0),
    "window": _layers(_wider),
    "experts used": _layers(_fewer_experts),
    "soft cap": lambda spec: replace(spec, logit_softcap=None),
    "value norm": lambda spec: replace(spec, value_norm=False),
    "attention scale": lambda spec: replace(spec, attention_scale=spec.attention_scale * 1.5),
    "embedding scale": lambda spec: replace(spec, embedding_scale=spec.embedding_scale * 2),
    "epsilon": lambda spec: replace(spec, rms_epsilon=0.1),
    "activation": lambda spec: replace(
        spec, activation="silu" if spec.activation == "gelu_tanh" else "gelu_tanh"
    ),
}


@EVERY_MODEL
def test_every_rule_moves_the_logits(model: str) -> None:
    loaded, dense, base = _loaded(model)
    tried, still = 0, []
    for name, edit in RULES.items():
        spec = edit(loaded.spec)
        if spec == loaded.spec:
            continue  # the model has no such rule
        tried += 1
        moved = float(np.abs(_logits(replace(loaded, spec=spec), dense) - base).max())
        if not moved > SENSITIVITY:
            still.append(f"{name} moves them by {moved:.3g}")
    assert tried >= 6
    assert not still, "; ".join(still)


def test_every_rule_is_tried_somewhere() -> None:
    specs = [load_model(resolve_model(model)).spec for model in MODELS]
    for name, edit in RULES.items():
        assert any(edit(spec) != spec for spec in specs), name


@pytest.mark.parametrize("model", [name for name in MODELS if TINY[name].experts])
def test_every_expert_is_chosen_and_none_always(model: str) -> None:
    loaded = load_model(resolve_model(model))
    trace, tokens = Trace(), _tokens(loaded, 105)
    Reference(loaded).prefill(tokens, trace=trace)
    for layer in loaded.spec.layers:
        if layer.experts is None:
            continue
        chosen = trace[f"ffn_moe_topk-{layer.index}"]
        assert chosen.shape == (len(tokens), layer.experts.used)
        counts = np.bincount(chosen.ravel(), minlength=layer.experts.count)
        assert np.all(counts > 0)
        assert np.all(counts < len(tokens))
        assert trace[f"ffn_moe_weights-{layer.index}"].std() > 0


@pytest.mark.parametrize("model", [name for name in MODELS if TINY[name].delta_net])
def test_gates_and_decays_are_neither_open_nor_shut(model: str) -> None:
    """A delta net that forgets all or nothing would hide most of its faults."""
    loaded = load_model(resolve_model(model))
    trace = Trace()
    Reference(loaded).prefill(_tokens(loaded, 105), trace=trace)
    nets = [layer.index for layer in loaded.spec.layers if layer.delta_net is not None]
    assert 0 < len(nets) < loaded.spec.layer_count
    for layer in nets:
        for values in (trace[f"beta-{layer}"], np.exp(trace[f"log_decay-{layer}"])):
            low, high = np.quantile(values, (0.1, 0.9))
            assert low < 0.8
            assert high > 0.2
            assert high - low > 0.2
