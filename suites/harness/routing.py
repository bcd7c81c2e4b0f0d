"""Routing end to end: the references follow the engine's experts, and say if they could have.

A right engine may send a token to another expert than the reference where two router logits are
nearer than rounding knows them, and one such token moves the logits by far more than rounding does.
So the references take the engine's recorded choice as given, which keeps every other limit tight,
and each choice that is not theirs has to be a near-tie of theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.forward import Reference
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.trace import Trace
from reference.moe import Routing, route
from reference.ops import Array
from suites.harness.tolerances import END_TO_END
from suites.harness.verdict import Check, State, counted

TOPK = "ffn_moe_topk"
Choices = dict[int, NDArray[np.int64]]
"""Per layer with experts, (positions, used): where each position's token went."""


def choices_of(trace: Trace, spec: ModelSpec) -> Choices:
    """What a trace from position 0 recorded.

    A layer whose ids are no choice at all is left out: one outside the experts, or twice in a row.
    """
    found = {}
    for layer in spec.layers:
        name, experts = f"{TOPK}-{layer.index}", layer.experts
        if experts is None or name not in trace:
            continue
        ids = trace[name]
        usable = ids.dtype.kind == "i" and ids.ndim == 2 and ids.shape[1] == experts.used
        if not usable or not ids.size or ids.min() < 0 or ids.max() >= experts.count:
            continue
        ordered = np.sort(ids, axis=-1)
        if np.all(ordered[:, 1:] != ordered[:, :-1]):
            found[layer.index] = ids.astype(np.int64)
    return found


class FollowingReference(Reference):
    """A reference that routes as `choices` say and keeps its own router logits.

    Positions that `choices` does not cover are routed by its own logits. `choices` is read at every
    step and may grow.
    """

    def __init__(self, *arguments: Any, choices: Choices, **options: Any) -> None:
        self.choices = choices
        self.router_logits: dict[int, list[Array]] = {}
        super().__init__(*arguments, **options)

    def _route(self, positions: NDArray[np.int64], layer: LayerSpec, logits: Array) -> Routing:
        self.router_logits.setdefault(layer.index, []).append(np.array(logits, copy=True))
        followed = self.choices.get(layer.index)
        if followed is None or positions[-1] >= len(followed):
            return super()._route(positions, layer, logits)
        assert layer.experts is not None
        return route(logits, layer.experts.used, followed[positions])


@dataclass(frozen=True)
class Turn:
    """A token that the engine sent elsewhere. `gap` of the reference's logits, `known` within."""

    layer: int
    position: int
    engine: tuple[int, ...]
    reference: tuple[int, ...]
    gap: float
    known: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.known

    def __str__(self) -> str:
        relation = "within" if self.near_tie else "above"
        return (
            f"layer {self.layer} position {self.position}: engine chose experts "
            f"{list(self.engine)}, reference {list(self.reference)}, gap {self.gap:.3g} {relation} "
            f"{self.known:.3g}"
        )


@dataclass
class RoutingJudge:
    """Judges the choices against router logits that the references made while following them."""

    spec: ModelSpec
    turns: list[Turn] = field(default_factory=list)
    compared: int = 0

    def feed(
        self,
        start: int,
        choices: Mapping[int, NDArray[np.int64]],
        exact: Mapping[int, Array],
        single: Mapping[int, Array],
        unrounded: Mapping[int, Array],
        halved: Mapping[int, Array] | None = None,
    ) -> None:
        """Logits (T, count) by layer, of positions start.. by each reference; empty or None
        for one that does not run."""
        for layer, logits in exact.items():
            experts = self.spec.layers[layer].experts
            rows = choices.get(layer, np.empty((0, 0), np.int64))[start : start + len(logits)]
            if experts is None or len(rows) != len(logits):
                continue
            float32_distance = float(np.max(np.abs(single[layer] - logits)))
            kv_distance = 0.0
            if layer in unrounded:
                kv_distance = float(np.max(np.abs(unrounded[layer] - logits)))
            product_distance = 0.0
            if halved and layer in halved:
                product_distance = float(np.max(np.abs(halved[layer] - logits)))
            # Each of the two logits may be off by one limit.
            known = 2 * END_TO_END.limit(float32_distance, kv_distance, product_distance)
            own = route(logits, experts.used).experts
            self.compared += rows.size
            for token in range(len(rows)):
                engine, reference = set(rows[token].tolist()), set(own[token].tolist())
                if engine == reference:
                    continue
                refused = max(logits[token, e] for e in reference - engine)
                taken = min(logits[token, e] for e in engine - reference)
                gap = float(refused - taken)
                self.turns.append(
                    Turn(
                        layer,
                        start + token,
                        tuple(rows[token].tolist()),
                        tuple(own[token].tolist()),
                        gap,
                        known,
                    )
                )

    @property
    def near_ties(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.near_tie]

    def check(self) -> Check:
        """Diverged where a choice differs by more than rounding explains."""
        name = "routing: engine against reference"
        wrong = [turn for turn in self.turns if not turn.near_tie]
        detail = f"{counted(len(self.near_ties), 'near-tie')} taken otherwise"
        if not wrong:
            return Check(name, State.OK, self.compared, detail=detail, unit="choices")
        first = wrong[0]
        where = f"{TOPK}-{first.layer} position {first.position}"
        return Check(
            name,
            State.DIVERGED,
            self.compared,
            measured=first.gap,
            limit=first.known,
            where=where,
            detail=f"{first}; {len(wrong)} such",
            link=f"routing of layer {first.layer} against the reference",
            unit="choices",
        )
