"""The references of one run and what they say about logits: the value and the end-to-end limit.

The references share one set of dequantised weights: float64, float32, float32 again with embeddings
moved by one unit in the last place (a single sample of what rounding does can be small by luck),
float64 with a float32 KV cache (left out where the cache is float32 already), and on path matrix
float64 with prompts' products rounded as it declares, in several samples too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference.forward import DenseCache
from reference.model import Model
from reference.model.trace import Trace
from suites.harness.compare import Array
from suites.harness.protocol import Progress
from suites.harness.routing import Choices, FollowingReference, RoutingJudge, choices_of
from suites.harness.tolerances import END_TO_END
from suites.harness.verdict import json_number


@dataclass(frozen=True)
class Expected:
    """Reference logits (rows, V) float64 and the limit of each row (rows,), with its terms.

    `one_column_limits` is for what no batched product was part of: without declared roundings of
    the path's products.
    """

    logits: Array
    limits: Array
    one_column_limits: Array
    float32_distance: Array
    kv_distance: Array
    product_distance: Array

    def limits_of(self, mode: str) -> Array:
        """Those of a prefill mode."""
        return self.limits if mode == "batched" else self.one_column_limits


MOVED = 3
"""Further samples of a float32 reference."""


HALF_SHARE = 2.0**-14
"""A quarter of what rounding to halves moves a value by at most, as a share of it: enough that
other codes are chosen behind it, and little beside what they make."""


class _Moved(Trace):
    """Moves every element of the embeddings, up or down; keeps nothing.

    By `share` of it, or to a neighbouring float32.
    """

    def __init__(self, seed: tuple[int, int], share: float = 0.0) -> None:
        super().__init__()
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._share = share

    def record(self, name: str, value: NDArray[Any]) -> None:
        pass

    def replacement(self, name: str, value: NDArray[Any]) -> NDArray[Any] | None:
        if name != "inp_embd":
            return None
        signs = self._random.choice(np.array([-1.0, 1.0], dtype=value.dtype), value.shape)
        moved: NDArray[Any] = (
            value * (1 + signs * value.dtype.type(self._share))
            if self._share
            else np.nextafter(value, signs * np.inf)
        )
        return moved


def apart(rows: Sequence[Array]) -> float:
    """The largest distance between one row of logits of several references, 0 for one."""
    return float(np.max(np.ptp(np.stack(rows), axis=0)))


class References:
    """Feeds all references the same tokens, and routes them as `choices` say.

    `choices` may be set or grow between feeds; `routing` judges what was followed. `path` is that
    of the prompt's products: the first feed is the prompt, later ones are decoded.
    """

    def __init__(
        self,
        model: Model,
        kv_type_k: str,
        kv_type_v: str,
        *,
        path: str = "kparallel",
        dense: DenseCache | None = None,
    ) -> None:
        shared: DenseCache = {} if dense is None else dense
        self.choices: Choices = {}
        self.routing = RoutingJudge(model.spec)
        self._spec, self._prompt = model.spec, tuple[int, ...]()
        self._routed = any(layer.experts is not None for layer in model.spec.layers)

        def reference(
            dtype: type[np.floating[Any]], type_k: str, type_v: str
        ) -> FollowingReference:
            return FollowingReference(
                model,
                dtype=dtype,
                kv_type_k=type_k,
                kv_type_v=type_v,
                dense=shared,
                choices=self.choices,
            )

        self._exact = reference(np.float64, kv_type_k, kv_type_v)
        self._single = reference(np.float32, kv_type_k, kv_type_v)
        # Weights that are dequantised at each use make a pass dear: one more sample must do.
        count = MOVED if self._single.weights_mode == "kept" else 1
        self._moved = [reference(np.float32, kv_type_k, kv_type_v) for _ in range(count)]
        rounds = (kv_type_k, kv_type_v) != ("f32", "f32")
        self._unrounded = reference(np.float64, "f32", "f32") if rounds else None
        # The first is what the path declares. Few columns meet exact weights of K formats: another
        # sample of the same rounding, and so are embeddings moved a little.
        stored = self._single.weights_mode == "kept"
        samples = (1 + MOVED if stored else 2) if path == "matrix" else 0
        self._halved = [reference(np.float64, kv_type_k, kv_type_v) for _ in range(samples)]
        for sample in self._halved[1:2]:
            sample.exact_weights = True
        self._copy = partial(References, model, kv_type_k, kv_type_v, dense=shared)

    @property
    def may_route_apart(self) -> bool:
        """True where only one prefill mode's products round to halves and tokens choose experts: a
        near-tie that is none of the other mode's can send a token elsewhere."""
        return bool(self._halved) and self._routed

    def of_modes(self, expected: Expected, traced: Mapping[str, Trace]) -> dict[str, Expected]:
        """What each mode's logits are held to, by mode; `traced` are the prompt's traces.

        That is `expected`, for which these references followed the routing of the first mode. Where
        the other may route apart, references of its own follow it, if all of the prompt was traced.
        """
        found = dict.fromkeys(traced, expected)
        if self.may_route_apart:
            for mode, trace in list(traced.items())[1:]:
                own = self._copy()
                own.choices.update(choices_of(trace, self._spec))
                found[mode] = own.feed(self._prompt)
        return found

    def feed(
        self,
        tokens: Sequence[int],
        *,
        all_rows: bool = False,
        trace: Trace | None = None,
        progress: Progress | None = None,
    ) -> Expected:
        """Feeds `tokens` after what was fed before; logits of the last token, or of all."""
        which: Literal["last", "all"] = "all" if all_rows else "last"
        say = progress or (lambda text: None)
        start = self._exact.position
        self._prompt = self._prompt if start else tuple(tokens)
        say("reference float64")
        exact = self._exact.prefill(tokens, trace=trace, logits=which)
        say("reference float32")
        single = self._single.prefill(tokens, logits=which)
        samples = [single]
        for number, moved in enumerate(self._moved):
            trace_of = _Moved((start, number))
            samples.append(moved.prefill(tokens, logits=which, trace=trace_of))
        errors = [np.abs(sample.astype(np.float64) - exact).max(axis=-1) for sample in samples]
        distance = np.max(errors, axis=0)
        kv_distance = np.zeros_like(distance)
        if self._unrounded is not None:
            say("reference float64 with a float32 KV cache")
            unrounded = self._unrounded.prefill(tokens, logits=which)
            kv_distance = np.max(np.abs(unrounded - exact), axis=-1)
        product_distance = np.zeros_like(distance)
        for number, halved in enumerate(self._halved):
            say("reference float64 with products of halves")
            halved.half_products = start == 0
            moves = _Moved((start, number), HALF_SHARE) if number > 1 and not start else None
            got = halved.prefill(tokens, logits=which, trace=moves)
            product_distance = np.maximum(product_distance, np.max(np.abs(got - exact), axis=-1))
        self._judge_routing(start)
        one_column, limits = (
            np.array([END_TO_END.limit(*(float(term) for term in terms)) for terms in rows])
            for rows in (
                zip(distance, kv_distance, strict=True),
                zip(distance, kv_distance, product_distance, strict=True),
            )
        )
        return Expected(exact, limits, one_column, distance, kv_distance, product_distance)

    def _judge_routing(self, start: int) -> None:
        """Hands over the router logits of this feed."""
        logits: list[dict[int, Array]] = []
        halved = self._halved[0] if self._halved else None
        for reference in (self._exact, self._single, self._unrounded, halved):
            kept = {} if reference is None else reference.router_logits
            logits.append({layer: np.concatenate(parts) for layer, parts in kept.items()})
            kept.clear()
        for moved in (*self._moved, *self._halved):
            moved.router_logits.clear()
        self.routing.feed(start, self.choices, *logits)


@dataclass(frozen=True)
class PointDistance:
    """How far the engine's value of one trace point is from the reference's: information only."""

    point: str
    max_abs_diff: float
    reference_max: float


class DistanceTrace(Trace):
    """Measures the reference against a recorded trace as it runs, and keeps nothing else.

    Only whole prompts in one call: rows are matched from the end of each array.
    """

    def __init__(self, engine: Trace) -> None:
        super().__init__()
        self._engine = engine
        self.distances: list[PointDistance] = []

    def record(self, name: str, value: NDArray[Any]) -> None:
        self.distances.append(distance(self._engine, name, value))

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "point": entry.point,
                "max_abs_diff": json_number(entry.max_abs_diff),
                "reference_max": json_number(entry.reference_max),
            }
            for entry in self.distances
        ]


def distance(engine: Trace, name: str, value: NDArray[Any]) -> PointDistance:
    """The engine's recorded value against a reference's `value`; NaN where there is none."""
    largest = float(np.max(np.abs(value))) if value.size else 0.0
    difference = float("nan")
    if name in engine:
        got = engine[name]
        rows = min(len(got), len(value))
        if rows and got[0].size == value[0].size:
            want = value[len(value) - rows :].reshape(rows, -1)
            wide = got[len(got) - rows :].reshape(rows, -1).astype(np.float64)
            with np.errstate(invalid="ignore"):
                difference = float(np.max(np.abs(wide - want)))
    return PointDistance(name, difference, largest)
