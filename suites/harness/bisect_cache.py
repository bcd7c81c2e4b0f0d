"""A KV cache that does not hold what was recorded before the write: where, and what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.kv_cache import stored
from reference.model import Model
from suites.harness.bisect_forward import Flows
from suites.harness.compare import Array, same_bits
from suites.harness.damage import Damage, Layout, describe, runs
from suites.harness.kv import KVSnapshot, snapshot
from suites.harness.protocol import JudgedEngine, Progress
from suites.harness.rerun import Case, LaunchTrace, run_engine
from suites.harness.rules_attention import stored_value


@dataclass(frozen=True)
class WrongCache:
    """The first of K and V, layer by layer, that differs from the recorded point `source`.

    `wrong` and `right` are all that differ and all that do not, as ("K", layer).
    """

    letter: str
    layer: int
    source: str
    damage: Damage
    wrong: tuple[tuple[str, int], ...] = ()
    right: tuple[tuple[str, int], ...] = ()


def first_wrong(
    model: Model, engine: JudgedEngine, case: Case, flows: Flows, say: Progress
) -> WrongCache | None:
    """Runs the case with a trace and compares every layer's cache; None where all is well."""
    say("bisect: engine with every trace point, for its cache")
    trace = run_engine(engine, model, case)
    held = snapshot(engine, model.spec)
    batched = case.mode == "batched"
    first: WrongCache | None = None
    sides: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
    for layer, contents in held.items():
        layout = Layout(
            len(case.tokens),
            heads=model.spec.layers[layer].head_count_kv,
            chunk=flows.chunk if batched else 1,
            columns=1,
        )
        stems = ("Kcur_pos", stored_value(model.spec.value_norm))
        kinds = (case.kv_type_k, case.kv_type_v)
        for letter, stem, kind, got in zip("KV", stems, kinds, contents, strict=True):
            source = f"{stem}-{layer}"
            want = stored(kind, trace[source].reshape(got.shape))
            same = same_bits(got, want)
            sides[same].append((letter, layer))
            if first is None and not same:
                exact = want.astype(np.float64)
                others = _others(trace, held, source, got)
                damage = describe(got, exact, np.zeros_like(exact), layout, others)
                first = WrongCache(letter, layer, source, damage)
    if first is None:
        return None
    return replace(first, wrong=tuple(sides[False]), right=tuple(sides[True]))


def _others(trace: LaunchTrace, held: KVSnapshot, source: str, got: Array) -> dict[str, Array]:
    """What else could have been written there: K, V before norm and rotation, in every layer."""
    stems = ("Kcur", "Kcur_normed", "Kcur_pos", "Vcur", "Vcur_normed")
    names = [f"{stem}-{layer}" for stem in stems for layer in held]
    return {
        name: trace[name]
        for name in names
        if name != source and name in trace and trace[name].size == got.size
    }


def sentences(found: WrongCache | None) -> list[str]:
    if found is None:
        return ["It did not come again in a second run."]
    text = str(found.damage).replace("are above their limit", "have other bits")
    text = text.replace("they are the input", "they are the value of")
    lines = [f"Of {found.letter} in layer {found.layer}, against {found.source}: {text}."]
    others = [side for side in found.wrong if side != (found.letter, found.layer)]
    if others:
        lines.append(f"Wrong too: {_sides(others)}.")
    if found.right:
        lines.append(f"Right: {_sides(found.right)}.")
    return lines


def _sides(sides: Sequence[tuple[str, int]]) -> str:
    """ "K of layers 0 to 2; V of layer 1"."""
    texts = []
    for letter in "KV":
        layers = [layer for one, layer in sides if one == letter]
        if layers:
            noun = "layer" if len(layers) == 1 else "layers"
            texts.append(f"{letter} of {noun} {runs(layers)}")
    return "; ".join(texts)
