"""The models that faults are planted under, registered ones and edits of them, and prompts."""

from dataclasses import replace

import numpy as np

from fixtures.registry import resolve_model
from reference.model import Model, load_model
from reference.model.errors import InputError

LOUDER = np.float32(64)
"""Scores of the tiny models are about 3 at most."""


def fault_model(name: str, edit: str = "") -> Model:
    """The registered model, with the edit that some faults need to matter."""
    return edited(load_model(resolve_model(name)), edit)


def edited(model: Model, edit: str) -> Model:
    """The model after an edit of fixtures.faults.EDITS; InputError where it lacks the tensor."""
    needed = {"tied-router": "ffn_gate_inp", "loud-scores": "attn_q_norm"}.get(edit)
    layers = model.weights.layers[1:2] if edit == "tied-router" else model.weights.layers
    if needed is not None and not all(needed in tensors for tensors in layers):
        raise InputError(f"fault: the model has no {needed}, expected one because of edit {edit}")
    match edit:
        case "tied-router":
            return with_tied_router(model, 1)
        case "loud-scores":
            return with_loud_scores(model)
    return model


def with_tied_router(model: Model, layer: int, *, zero: bool = True) -> Model:
    """The same model, but all experts of `layer` tie: router rows are 0, or all the first row."""
    layers = list(model.weights.layers)
    router = layers[layer]["ffn_gate_inp"]
    raw = np.zeros_like(router.raw) if zero else np.tile(router.raw[:1], (len(router.raw), 1))
    layers[layer] = {**layers[layer], "ffn_gate_inp": replace(router, raw=raw)}
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def with_loud_scores(model: Model) -> Model:
    """The same model, but queries are so long that exp of a raw score overflows in float32."""
    layers = []
    for tensors in model.weights.layers:
        norm = tensors["attn_q_norm"]
        loud = np.ascontiguousarray(LOUDER * norm.vector()).view(np.uint8).reshape(norm.raw.shape)
        layers.append({**tensors, "attn_q_norm": replace(norm, raw=loud)})
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def seeded_prompt(model: Model, length: int, seed: int) -> tuple[int, ...]:
    """Ids drawn evenly from the vocabulary."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return tuple(int(token) for token in rng.integers(0, model.spec.vocab_size, length))
