"""Judges an engine's trace point by point: each op alone, in float64, on the engine's own inputs.

A point that is above its local limit was broken by its own op; an error that it inherited does not
count, because the recorded inputs carry it. The first such point in forward order is the first
broken one. Differences between architectures come from ModelSpec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.model import Model
from reference.model.spec import LayerSpec
from reference.model.trace import LOGITS, Trace, TracePoint, trace_points
from reference.model.weights import Tensor
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import Array, Comparison, compare, same_bits
from suites.harness.protocol import Progress
from suites.harness.rules import LayerOps, LocalRules, Op, no_rule, top_op
from suites.harness.rules_attention import attention_op
from suites.harness.rules_delta_net import delta_net_op
from suites.harness.rules_feed_forward import experts_op, per_layer_op, stream_op
from suites.harness.tolerances import RowKey, consulted_rows
from suites.harness.verdict import Check, State, behind, check_of, counted

__all__ = [
    "UNOBSERVED",
    "Evaluated",
    "LocalRules",
    "PointCheck",
    "Proven",
    "evaluate_point",
    "first_broken",
    "judge_point",
    "judge_trace",
    "point_inputs",
    "summarise",
]

UNOBSERVED = "unobserved"
"""`Trace.meta` key: points that a fused kernel does not materialise, a list of names."""


@dataclass(frozen=True)
class PointCheck:
    """One trace point judged. `comparison` is None where there was nothing to judge.

    `note` says what deserves attention although it is no error: a near-tie in routing.
    `taken_over`: the same bits were judged by the same rules before. `rows`: what of the table of
    tolerances its limit was made of.
    """

    point: TracePoint
    op: str
    comparison: Comparison | None
    check: Check
    note: str = ""
    taken_over: bool = False
    rows: frozenset[RowKey] = frozenset()

    @property
    def observed(self) -> bool:
        return self.comparison is not None


@dataclass(frozen=True)
class Proven:
    """A trace that was judged before: its points by name, and the delta rule's results."""

    trace: Trace
    rules: LocalRules
    points: Mapping[str, PointCheck]
    recurrent: Mapping[int, DeltaRule]

    def covers(self, trace: Trace, rules: LocalRules, name: str, inputs: Sequence[str]) -> bool:
        """True where a sound point of both traces has equal result, equal inputs, equal rules."""
        found = self.points.get(name)
        return (
            found is not None
            and found.observed
            and found.check.state is State.OK
            and rules == self.rules
            and trace.tokens == self.trace.tokens
            and all(other in self.trace for other in inputs)
            and all(same_bits(trace[one], self.trace[one]) for one in (name, *inputs))
        )


def judge_point(model: Model, trace: Trace, rules: LocalRules, point: TracePoint) -> PointCheck:
    """Judges one point of a trace that starts at position 0."""
    return _Walk(model, trace, rules, {}).judge(point, None)


@dataclass(frozen=True)
class Evaluated:
    """What one op should have made of its recorded inputs (by point), and the limit of each.

    `matrix` is the weight of a plain product.
    """

    op: str
    inputs: Mapping[str, Array]
    got: Array
    want: Array
    limit: Array
    matrix: Tensor | None = None


def evaluate_point(
    model: Model, trace: Trace, rules: LocalRules, point: TracePoint
) -> Evaluated | None:
    """The arrays that `judge_point` compares; None where there is nothing to evaluate."""
    return _Walk(model, trace, rules, {}).evaluated(point)


def point_inputs(
    model: Model, trace: Trace, rules: LocalRules, point: TracePoint
) -> tuple[str, ...]:
    """The points that the op of `point` reads."""
    return _Walk(model, trace, rules, {}).inputs(point)


def judge_trace(
    model: Model,
    trace: Trace,
    rules: LocalRules,
    *,
    recurrent: dict[int, DeltaRule] | None = None,
    proven: Proven | None = None,
    progress: Progress | None = None,
) -> Iterator[PointCheck]:
    """Judges every point of a trace that starts at position 0, in forward order.

    A point that is missing is invalid, unless the trace's meta lists it as unobserved: that is
    reported as such and never counted as passed. A point whose inputs are not finite can't be
    judged and counts as diverged, behind the point that broke them; so does one whose limit or
    exact result overflows behind a broken point. `recurrent` receives what a delta net layer's
    state must be after the trace, by layer. What `proven` covers is taken over.
    """
    walk = _Walk(model, trace, rules, {} if recurrent is None else recurrent, proven)
    broken: str | None = None
    for point in trace_points(model.spec):
        if progress is not None and point.layer is not None and point.stem == "attn_norm":
            progress(f"layer {point.layer + 1} of {model.spec.layer_count}")
        result = walk.judge(point, broken)
        if broken is None and result.check.state is State.DIVERGED:
            broken = point.name
        yield result


class _Walk:
    def __init__(
        self,
        model: Model,
        trace: Trace,
        rules: LocalRules,
        recurrent: dict[int, DeltaRule],
        proven: Proven | None = None,
    ) -> None:
        self._proven = proven
        self._model = model
        self._trace = trace
        self._rules = rules
        self._recurrent = recurrent
        self._rows = len(trace.tokens)
        self._unobserved = frozenset(trace.meta.get(UNOBSERVED, ()))
        self._malformed: set[str] = set()

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
        problem = self._problem(point, layer, got)
        if problem:
            self._malformed.add(point.name)
            return unjudged(State.DIVERGED, problem)
        missing = [name for name in op.inputs if name not in self._trace]
        if missing:
            return unjudged(State.UNSUPPORTED, f"not judged: input {missing[0]} was not observed")
        malformed = [name for name in op.inputs if name in self._malformed]
        if malformed:
            return unjudged(State.DIVERGED, f"not judged: {malformed[0]} has a wrong shape or type")
        known = self._known(point, op)
        if known is not None:
            return known
        inputs = [self._trace[name] for name in op.inputs]
        if not all(np.isfinite(value).all() for value in inputs):
            if broken is None:
                return unjudged(State.INVALID, "inputs are not finite and nothing made them so")
            return unjudged(State.DIVERGED, f"inputs are not finite since {broken}")
        with consulted_rows() as rows:
            comparison = compare(got, *_evaluate(op, inputs, got))
        note = self._note(op)
        link = f"{point.name} ({op.name})"
        check = behind(check_of(point.name, comparison, detail=note, link=link), broken or "")
        return PointCheck(point, op.name, comparison, check, note, rows=frozenset(rows))

    def inputs(self, point: TracePoint) -> tuple[str, ...]:
        layer = None if point.layer is None else self._model.spec.layers[point.layer]
        return self._op(point.stem, layer).inputs

    def evaluated(self, point: TracePoint) -> Evaluated | None:
        layer = None if point.layer is None else self._model.spec.layers[point.layer]
        op = self._op(point.stem, layer)
        if any(name not in self._trace for name in (point.name, *op.inputs)):
            return None
        got = self._trace[point.name]
        inputs = {name: self._trace[name] for name in op.inputs}
        if self._problem(point, layer, got):
            return None
        if not all(np.isfinite(value).all() for value in inputs.values()):
            return None
        want, limit = _evaluate(op, list(inputs.values()), got)
        return Evaluated(op.name, inputs, got, want, limit, op.matrix)

    def _known(self, point: TracePoint, op: Op) -> PointCheck | None:
        """The judgement of a point that was proven before; None where it has to be judged."""
        read = (*op.inputs, *(name for name in op.note_inputs if name in self._trace))
        proven = self._proven
        if proven is None or not proven.covers(self._trace, self._rules, point.name, read):
            return None
        if point.stem == "delta_out" and point.layer is not None:
            self._recurrent[point.layer] = proven.recurrent[point.layer]
        return replace(proven.points[point.name], taken_over=True)

    def _note(self, op: Op) -> str:
        if op.note_of is None:
            return ""
        missing = [name for name in op.note_inputs if name not in self._trace]
        if missing:
            return f"near-ties were not looked for: {missing[0]} was not observed"
        values = [self._trace[name] for name in op.note_inputs]
        if not all(np.isfinite(value).all() for value in values):
            return ""
        return op.note_of(*values)

    def _problem(self, point: TracePoint, layer: LayerSpec | None, got: Array) -> str:
        """Why the array can't be the point's value; empty where it can."""
        last_only = point.stem in ("result_norm", LOGITS)
        rows = {1, self._rows} if last_only else {self._rows}
        ids = point.stem == "ffn_moe_topk"
        if ids and got.dtype not in (np.int32, np.int64):
            return f"dtype is {got.dtype}, expected int32 or int64"
        if not ids and got.dtype != np.float32:
            return f"dtype is {got.dtype}, expected float32"
        if got.ndim < 1 or len(got) not in rows or got[0].size != int(np.prod(point.shape)):
            return f"shape is {got.shape}, expected ({self._rows}, {point.shape}) for these tokens"
        if ids and layer is not None and layer.experts is not None:
            return _id_problem(got.reshape(len(got), -1), layer.experts.count)
        return ""

    def _op(self, stem: str, layer: LayerSpec | None) -> Op:
        if layer is None:
            rows = len(self._trace[stem]) if stem in self._trace else 1
            return top_op(self._model, stem, self._rules, self._trace.tokens, rows)
        builder = LayerOps(self._model, layer, self._rules, self._rows, self._recurrent)
        mixer = attention_op if layer.delta_net is None else delta_net_op
        for op in (part(builder, stem) for part in (mixer, experts_op, per_layer_op, stream_op)):
            if op is not None:
                return op
        raise no_rule(stem)


def _evaluate(op: Op, inputs: Sequence[Array], got: Array) -> tuple[Array, Array]:
    """Value and limit of an op in got's shape; expert ids in got's dtype too."""
    with np.errstate(over="ignore", invalid="ignore"):
        want, limit = op.evaluate(*inputs)
    if got.dtype.kind == "i":
        want = want.astype(got.dtype)
    return want.reshape(got.shape), limit.reshape(got.shape)


def _id_problem(ids: Array, count: int) -> str:
    """Expert ids that are none, or named twice by one token."""
    outside = np.argwhere((ids < 0) | (ids >= count))
    if len(outside):
        token, place = (int(i) for i in outside[0])
        return f"token {token} names expert {ids[token, place]}, expected 0 to {count - 1}"
    ordered = np.sort(ids, axis=-1)
    twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if len(twice):
        return f"token {int(twice[0][0])} names an expert twice: {ids[int(twice[0][0])].tolist()}"
    return ""


def first_broken(points: list[PointCheck]) -> PointCheck | None:
    """The first point in forward order that is not within its local limit."""
    return next((point for point in points if point.check.state is State.DIVERGED), None)


def summarise(points: list[PointCheck]) -> list[Check]:
    """One check per op: broken ones by their first broken point, then sound ones in forward order.

    A sound op's check is its point that uses most of its limit; a broken one is its first broken
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
            worst = max(judged, key=lambda point: point.check.of_limit or 0.0)
        else:
            worst = mine[0]
        detail = counted(len(judged), "point")
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
            of_limit=worst.check.of_limit,
            where=f"{worst.point.name} {worst.check.where}".strip(),
            detail=detail,
            link=worst.check.link,
        )
        if bad:
            broken.append((points.index(worst), check))
        else:
            sound.append(check)
    return [check for _, check in sorted(broken, key=lambda entry: entry[0])] + sound
