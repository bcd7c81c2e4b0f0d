"""Judges an engine's trace point by point: each op alone, in float64, on the engine's own inputs.

A point that is above its local limit was broken by its own op; an error that it inherited does not
count, because the recorded inputs carry it. The first such point in forward order is the first
broken one. Differences between architectures come from ModelSpec.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from reference.kv_cache import storage_type
from reference.model import Model
from reference.model.spec import LayerSpec
from reference.model.trace import LOGITS, Trace, TracePoint, trace_points
from suites.harness import bounds
from suites.harness.bounds import Bounded
from suites.harness.compare import Array, Comparison, compare
from suites.harness.protocol import Progress
from suites.harness.verdict import Check, State, check_of

UNOBSERVED = "unobserved"
"""`Trace.meta` key: points that a fused kernel does not materialise, a list of names."""


@dataclass(frozen=True)
class LocalRules:
    """What the engine declares: path (order of summation) and KV storage types."""

    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"


@dataclass(frozen=True)
class PointCheck:
    """One trace point judged. `comparison` is None where there was nothing to judge."""

    point: TracePoint
    op: str
    comparison: Comparison | None
    check: Check

    @property
    def observed(self) -> bool:
        return self.comparison is not None


@dataclass(frozen=True)
class _Op:
    """An op's name, the points it reads, and how to evaluate it on their recorded values."""

    name: str
    inputs: tuple[str, ...]
    evaluate: Callable[..., Bounded]


def judge_trace(
    model: Model, trace: Trace, rules: LocalRules, *, progress: Progress | None = None
) -> Iterator[PointCheck]:
    """Judges every point of a trace that starts at position 0, in forward order.

    A point that is missing is invalid, unless the trace's meta lists it as unobserved: that is
    reported as such and never counted as passed. A point whose inputs are not finite can't be
    judged and counts as diverged, behind the point that broke them.
    """
    walk = _Walk(model, trace, rules)
    broken: str | None = None
    for point in trace_points(model.spec):
        if progress is not None and point.layer is not None and point.stem == "attn_norm":
            progress(f"layer {point.layer + 1} of {model.spec.layer_count}")
        result = walk.judge(point, broken)
        if broken is None and result.check.state is State.DIVERGED:
            broken = point.name
        yield result


class _Walk:
    def __init__(self, model: Model, trace: Trace, rules: LocalRules) -> None:
        self._model = model
        self._trace = trace
        self._rules = rules
        self._rows = len(trace.tokens)
        self._positions = np.arange(self._rows, dtype=np.int64)
        top = model.weights.top
        self._factors = top["rope_freqs"].vector() if "rope_freqs" in top else None
        self._unobserved = frozenset(trace.meta.get(UNOBSERVED, ()))
        self._malformed: set[str] = set()
        self._storage_k = storage_type("kv-type-k", rules.kv_type_k)
        self._storage_v = storage_type("kv-type-v", rules.kv_type_v)

    def judge(self, point: TracePoint, broken: str | None) -> PointCheck:
        layer = None if point.layer is None else self._model.spec.layers[point.layer]
        op = self._op(point.stem, layer)

        def unjudged(state: State, detail: str) -> PointCheck:
            check = Check(point.name, state, 0, detail=detail, link=f"{point.name} ({op.name})")
            return PointCheck(point, op.name, None, check)

        if point.name not in self._trace:
            if point.name in self._unobserved:
                return unjudged(State.UNSUPPORTED, "not observed: a fused kernel does not store it")
            return unjudged(State.INVALID, "the engine did not record this point")
        got = self._trace[point.name]
        problem = self._shape_problem(point, got)
        if problem:
            self._malformed.add(point.name)
            return unjudged(State.DIVERGED, problem)
        missing = [name for name in op.inputs if name not in self._trace]
        if missing:
            return unjudged(State.UNSUPPORTED, f"not judged: input {missing[0]} was not observed")
        malformed = [name for name in op.inputs if name in self._malformed]
        if malformed:
            return unjudged(State.DIVERGED, f"not judged: {malformed[0]} has a wrong shape or type")
        inputs = [self._trace[name] for name in op.inputs]
        if not all(np.isfinite(value).all() for value in inputs):
            if broken is None:
                return unjudged(State.INVALID, "inputs are not finite and nothing made them so")
            return unjudged(State.DIVERGED, f"inputs are not finite since {broken}")
        with np.errstate(over="ignore", invalid="ignore"):
            want, limit = op.evaluate(*inputs)
        comparison = compare(got, want.reshape(got.shape), limit.reshape(got.shape))
        check = check_of(point.name, comparison, link=f"{point.name} ({op.name})")
        return PointCheck(point, op.name, comparison, check)

    def _shape_problem(self, point: TracePoint, got: Array) -> str:
        last_only = point.stem in ("result_norm", LOGITS)
        rows = {1, self._rows} if last_only else {self._rows}
        if got.dtype != np.float32:
            return f"dtype is {got.dtype}, expected float32"
        if got.ndim < 1 or len(got) not in rows or got[0].size != int(np.prod(point.shape)):
            return f"shape is {got.shape}, expected ({self._rows}, {point.shape}) for these tokens"
        return ""

    def _op(self, stem: str, layer: LayerSpec | None) -> _Op:
        return self._top_op(stem) if layer is None else self._layer_op(stem, layer)

    def _top_op(self, stem: str) -> _Op:
        spec, weights = self._model.spec, self._model.weights
        if stem == "inp_embd":
            table, tokens = weights.top["token_embd"], self._trace.tokens
            return _Op("embed", (), lambda: bounds.embed(table, tokens, spec.embedding_scale))
        if stem == "result_norm":
            weight = weights.top["output_norm"].vector()
            rows = len(self._trace[stem]) if stem in self._trace else 1
            source = f"l_out-{spec.layer_count - 1}"
            return _Op(
                "rms_norm",
                (source,),
                lambda x: bounds.rms_norm(x[len(x) - rows :], weight, spec.rms_epsilon),
            )
        path = self._rules.path
        return _Op("linear", ("result_norm",), lambda x: bounds.linear(x, weights.lm_head, path))

    def _layer_op(self, stem: str, layer: LayerSpec) -> _Op:
        spec, w, i = self._model.spec, self._model.weights.layers[layer.index], layer.index
        before = "inp_embd" if i == 0 else f"l_out-{i - 1}"
        normed = "_normed" if spec.qk_norm else ""

        def norm(role: str, source: str) -> _Op:
            weight = w[role].vector()
            return _Op(
                "rms_norm",
                (source,),
                lambda x: bounds.rms_norm(x, weight, spec.rms_epsilon),
            )

        def head_norm(role: str, source: str, heads: int) -> _Op:
            weight = w[role].vector()
            return _Op(
                "rms_norm",
                (source,),
                lambda x: bounds.rms_norm(
                    x.reshape(len(x), heads, layer.head_size), weight, spec.rms_epsilon
                ),
            )

        def project(role: str, source: str) -> _Op:
            return _Op("linear", (source,), lambda x: bounds.linear(x, w[role], self._rules.path))

        def rotate(source: str, heads: int) -> _Op:
            frequencies = layer.rope.frequencies(self._factors)
            return _Op(
                "rope",
                (source,),
                lambda x: bounds.rope(
                    x.reshape(len(x), heads, layer.head_size),
                    frequencies,
                    self._positions,
                    layer.rope.pairing,
                ),
            )

        def add(a: str, b: str) -> _Op:
            return _Op("add", (a, b), bounds.add)

        match stem:
            case "attn_norm":
                return norm("attn_norm", before)
            case "Qcur":
                return project("attn_q", f"attn_norm-{i}")
            case "Kcur":
                return project("attn_k", f"attn_norm-{i}")
            case "Vcur":
                return project("attn_v", f"attn_norm-{i}")
            case "Qcur_normed":
                return head_norm("attn_q_norm", f"Qcur-{i}", layer.head_count)
            case "Kcur_normed":
                return head_norm("attn_k_norm", f"Kcur-{i}", layer.head_count_kv)
            case "Qcur_pos":
                return rotate(f"Qcur{normed}-{i}", layer.head_count)
            case "Kcur_pos":
                return rotate(f"Kcur{normed}-{i}", layer.head_count_kv)
            case "kqv_out":
                read = (f"Qcur_pos-{i}", f"Kcur_pos-{i}", f"Vcur-{i}")
                return _Op("attention", read, lambda q, k, v: self._attention(layer, q, k, v))
            case "attn_out":
                return project("attn_output", f"kqv_out-{i}")
            case "attn_post_norm":
                return norm("post_attention_norm", f"attn_out-{i}")
            case "ffn_inp":
                return add(before, f"attn_post_norm-{i}" if spec.post_norms else f"attn_out-{i}")
            case "ffn_norm":
                return norm("ffn_norm", f"ffn_inp-{i}")
            case "ffn_gate":
                return project("ffn_gate", f"ffn_norm-{i}")
            case "ffn_up":
                return project("ffn_up", f"ffn_norm-{i}")
            case "ffn_act":
                inputs = (f"ffn_gate-{i}", f"ffn_up-{i}")
                return _Op("activation", inputs, lambda g, u: bounds.gated(g, u, spec.activation))
            case "ffn_out":
                return project("ffn_down", f"ffn_act-{i}")
            case "ffn_post_norm":
                return norm("post_ffw_norm", f"ffn_out-{i}")
            case "l_out":
                last = f"ffn_post_norm-{i}" if spec.post_norms else f"ffn_out-{i}"
                return add(f"ffn_inp-{i}", last)
        raise ValueError(
            f"local: trace point {stem} has no rule; every point of trace.py needs one"
        )

    def _attention(self, layer: LayerSpec, q: Array, k: Array, v: Array) -> Bounded:
        """Reads the engine's own K and V, rounded to the storage type as the cache write does."""
        kv_shape = (len(k), layer.head_count_kv, layer.head_size)
        return bounds.attention(
            q.reshape(len(q), layer.head_count, layer.head_size),
            k.reshape(kv_shape).astype(self._storage_k),
            v.reshape(kv_shape).astype(self._storage_v),
            0,
            layer.window,
            self._model.spec.attention_scale,
        )


def first_broken(points: list[PointCheck]) -> PointCheck | None:
    """The first point in forward order that is not within its local limit."""
    return next((point for point in points if point.check.state is State.DIVERGED), None)


def summarise(points: list[PointCheck]) -> list[Check]:
    """One check per op: broken ones by their first broken point, then sound ones in forward order.

    A sound op's check carries the worst head-room of its points; a broken one is its first broken
    point and says how many others are. Points that were not judged are named, not counted.
    """
    broken, sound = [], []
    for op in dict.fromkeys(point.op for point in points):
        mine = [point for point in points if point.op == op]
        judged = [point for point in mine if point.observed]
        elements = sum(point.check.elements for point in judged)
        bad = [point for point in mine if point.check.state in (State.DIVERGED, State.INVALID)]
        hidden = [point for point in mine if point.check.state is State.UNSUPPORTED]
        if bad:
            worst = bad[0]
        elif judged:
            worst = max(judged, key=lambda point: point.check.headroom or 0.0)
        else:
            worst = mine[0]
        detail = f"{len(judged)} points"
        if len(bad) > 1:
            detail += f", {len(bad)} of them broken"
        if hidden:
            detail += f"; not observed: {', '.join(point.point.name for point in hidden)}"
        if worst.check.detail:
            detail += f"; {worst.point.name}: {worst.check.detail}"
        check = Check(
            name=f"local: {op}",
            state=worst.check.state,
            elements=elements,
            measured=worst.check.measured,
            limit=worst.check.limit,
            headroom=worst.check.headroom,
            where=f"{worst.point.name} {worst.check.where}".strip(),
            detail=detail,
            link=worst.check.link,
        )
        if bad:
            broken.append((points.index(worst), check))
        else:
            sound.append(check)
    return [check for _, check in sorted(broken, key=lambda entry: entry[0])] + sound
