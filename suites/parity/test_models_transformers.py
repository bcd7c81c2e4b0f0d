"""Whole tiny models against Hugging Face transformers, random weights, logits at every position.

The same random state goes into transformers' class and, exported by the converter's rules
(fixtures/export.py), into a GGUF file that the reference reads. transformers is independent of
llama.cpp and of us, so a mistake that our spec and our code share shows here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.export import export_gguf
from reference import kv_cache
from reference.forward import Reference
from reference.model import Model, load_model
from suites.parity.models import CASES, ModelCase, build
from suites.parity.oracle import require, widened
from suites.parity.tolerances import require_agreement

torch = require("torch")
require("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::Warning:torch", "ignore::Warning:transformers")

DECODED = 5  # the last tokens of a prompt, fed one at a time


@dataclass(frozen=True)
class Pair:
    """One random model, twice."""

    theirs: Any
    ours: Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture
def exported(case: ModelCase, folder: Path) -> Model:
    """The case's random model as the reference reads it."""
    path = folder / f"{case.id}.gguf"
    if not path.exists():
        with widened():
            theirs = build(case)
            state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
            export_gguf(theirs.config.to_dict(), state, path)
    return load_model(path)


@pytest.fixture
def pair(case: ModelCase, exported: Model) -> Iterator[Pair]:
    """Both in float64."""
    with widened():
        yield Pair(build(case), exported)


@pytest.fixture
def float64_cache(monkeypatch: pytest.MonkeyPatch) -> str:
    """A KV type that keeps float64, so that the cache rounds nothing."""
    monkeypatch.setitem(kv_cache.STORAGE, "f64", np.float64)
    return "f64"


def _reference(model: Model, kind: str) -> Reference:
    return Reference(model, dtype=np.float64, kv_type_k=kind, kv_type_v=kind)


def _logits(model: Any, tokens: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


def _row(case: ModelCase) -> str:
    return "model_stored_factors" if case.rounded_factors else "model_float64"


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@by_case
def test_float64_logits_agree_at_every_position(
    case: ModelCase, pair: Pair, float64_cache: str
) -> None:
    tokens = case.prompt()
    want = _logits(pair.theirs, tokens)
    assert want.dtype == np.float64
    got = _reference(pair.ours, float64_cache).prefill(tokens.tolist(), logits="all")
    require_agreement(got, want, _row(case), share_of="range")
    assert np.array_equal(got.argmax(axis=-1), want.argmax(axis=-1))


@by_case
def test_decoding_after_a_chunked_prefill_agrees_with_their_cache(
    case: ModelCase, pair: Pair, float64_cache: str
) -> None:
    """Their cached path is other code: sliding caches, and the recurrent form of the delta rule."""
    tokens = case.prompt()
    start = len(tokens) - DECODED
    ours = _reference(pair.ours, float64_cache)
    ours.prefill(tokens[:start].tolist(), chunk=13)
    ids = torch.from_numpy(tokens)[None]
    got, want = [], []
    with torch.no_grad():
        step = pair.theirs(input_ids=ids[:, :start], use_cache=True)
        for place in range(start, len(tokens)):
            step = pair.theirs(
                input_ids=ids[:, place : place + 1], use_cache=True, cache=step.cache
            )
            want.append(step.logits[0, -1].numpy())
            got.append(ours.decode(int(tokens[place])))
    require_agreement(np.array(got), np.array(want), _row(case), share_of="range")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.family.startswith("Qwen3_5")], ids=lambda case: case.id
)
def test_recurrent_and_convolution_states_agree(
    case: ModelCase, pair: Pair, float64_cache: str
) -> None:
    tokens = case.prompt()
    ours = _reference(pair.ours, float64_cache)
    ours.prefill(tokens.tolist(), chunk=29)
    with torch.no_grad():
        cache = pair.theirs(input_ids=torch.from_numpy(tokens)[None], use_cache=True).cache
    compared = 0
    for layer in pair.ours.spec.layers:
        net = layer.delta_net
        if net is None:
            continue
        state = ours.recurrent_state(layer.index)
        theirs = cache.get_recurrent_state(layer.index, state_idx=0)[0].numpy()
        # Theirs are grouped by key head; ours are tiled.
        grouped = theirs.reshape(net.key_heads, -1, *theirs.shape[1:])
        tiled = grouped.swapaxes(0, 1).reshape(theirs.shape)
        require_agreement(state.memory, tiled, "model_float64")
        inputs = cache.get_conv_state(layer.index, state_idx=0)[0].numpy().T
        value = inputs[:, 2 * net.key_length :]
        value = value.reshape(len(inputs), net.key_heads, -1, net.state_size).swapaxes(1, 2)
        inputs = np.concatenate(
            [inputs[:, : 2 * net.key_length], value.reshape(len(inputs), -1)], axis=1
        )
        require_agreement(state.tail, inputs[len(inputs) - len(state.tail) :], "model_float64")
        compared += 1
    assert compared == sum(kind == "linear_attention" for kind in case.config["layer_types"])


@by_case
def test_float32_logits_agree_with_transformers_as_it_is(case: ModelCase, exported: Model) -> None:
    """No dtype is replaced here: what a user of transformers computes in float32."""
    tokens = case.prompt()
    ours = Reference(exported, kv_type_k="f32", kv_type_v="f32")
    got = ours.prefill(tokens.tolist(), logits="all")
    want = _logits(build(case), tokens)
    assert got.dtype == want.dtype == np.float32
    require_agreement(got, want, "model_float32", share_of="range")
