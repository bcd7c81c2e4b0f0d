"""Localises a fault of the forward pass (damage, new error, hybrids) and says it in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.forward import DenseCache
from reference.model import Model
from reference.model.spec import LayerSpec
from reference.model.trace import TracePoint
from suites.harness import hybrid, new_error
from suites.harness.bisect_kernels import kernels_text, launched
from suites.harness.compare import compare_logits
from suites.harness.damage import Damage, Layout, describe
from suites.harness.damage_sums import wrong_part
from suites.harness.hybrid import Hybrids
from suites.harness.local import (
    Evaluated,
    PointCheck,
    evaluate_point,
    first_broken,
    judge_trace,
)
from suites.harness.new_error import StageError
from suites.harness.protocol import JudgedEngine, Progress
from suites.harness.rerun import (
    Case,
    Judged,
    LaunchTrace,
    last_logits,
    run_engine,
    run_reference,
    run_reference_on,
    run_untraced,
)
from suites.harness.verdict import counted

IN_HEADS = ("kqv_out", "attn_gated", "gate")
"""Points recorded as flat rows that are heads one after another."""


@dataclass(frozen=True)
class Flows:
    """How the engine cuts a batched prompt: tokens a flow, columns a product."""

    chunk: int
    max_cols: int


@dataclass(frozen=True)
class ForwardFinding:
    """What was found about a traced run.

    `broken` is the first point above its local limit on the engine's own inputs (None: no point
    is), with the arrays that were compared and their damage. `errors` holds every point.
    `part` says which part of a product's sum is wrong, where one explains the damage.
    `untraced_wrong` says the same of a run without a trace, where the traced one is right.
    """

    case: Case
    broken: PointCheck | None
    arrays: Evaluated | None
    damage: Damage | None
    errors: Sequence[StageError]
    hybrids: Hybrids
    logits_wrong: bool
    untraced_wrong: bool | None
    kernels: tuple[str, ...]
    part: str = ""

    @property
    def first_new(self) -> StageError | None:
        return new_error.first_new(self.errors)


def localise(
    model: Model, engine: JudgedEngine, case: Case, flows: Flows, dense: DenseCache, say: Progress
) -> ForwardFinding:
    """Runs the case again and looks for where it breaks; `engine` is one that nobody needs."""
    say("bisect: engine with every trace point")
    plain = run_engine(engine, model, case)
    points = list(judge_trace(model, plain, case.rules, progress=say))
    judged = run_reference(model, case, plain, dense, say)
    given = new_error.given_values(judged.trace)
    say("bisect: engine on the reference's values")
    forced = run_engine(engine, model, case, given)
    errors = new_error.new_errors(model, case.rules, forced, given, judged.trace.distances, say)
    broken = first_broken(points)
    arrays = None if broken is None else evaluate_point(model, plain, case.rules, broken.point)
    wrong, untraced = _wrong(judged, last_logits(plain)), None
    if broken is None and not wrong:
        say("bisect: engine without a trace")
        untraced = _wrong(judged, run_untraced(engine, model, case))
    return ForwardFinding(
        case,
        broken,
        arrays,
        None if broken is None or arrays is None else damage_of(model, case, flows, broken, arrays),
        errors,
        _hybrids(model, engine, case, plain, judged, dense, wrong, say),
        wrong,
        untraced,
        () if broken is None else launched(plain, broken.point.name),
        "" if arrays is None else _part(arrays),
    )


def _part(arrays: Evaluated) -> str:
    if arrays.matrix is None:
        return ""
    (x,) = arrays.inputs.values()
    return wrong_part(arrays.got, arrays.want, arrays.limit, x, arrays.matrix)


def damage_of(
    model: Model, case: Case, flows: Flows, broken: PointCheck, arrays: Evaluated
) -> Damage:
    layout = layout_of(model, case, flows, broken.point, len(arrays.got))
    return describe(arrays.got, arrays.want, arrays.limit, layout, arrays.inputs)


def layout_of(model: Model, case: Case, flows: Flows, point: TracePoint, rows: int) -> Layout:
    """What rows and elements of a point mean in this run."""
    batched = case.mode == "batched"
    layer = None if point.layer is None else model.spec.layers[point.layer]
    return Layout(
        len(case.tokens),
        len(case.tokens) - rows,
        _heads(point, layer),
        flows.chunk if batched else 1,
        min(flows.max_cols, flows.chunk) if batched else 1,
    )


def _heads(point: TracePoint, layer: LayerSpec | None) -> int:
    if layer is not None and point.stem in IN_HEADS:
        return layer.head_count
    return point.shape[0] if len(point.shape) > 1 else 1


def _wrong(judged: Judged, logits: Any) -> bool:
    expected = judged.expected
    return not compare_logits(logits, expected.logits[-1], float(expected.limits[-1])).ok


def _hybrids(
    model: Model,
    engine: JudgedEngine,
    case: Case,
    plain: LaunchTrace,
    judged: Judged,
    dense: DenseCache,
    plain_is_wrong: bool,
    say: Progress,
) -> Hybrids:
    names = hybrid.stages(model.spec)

    def reference_first(cut: int) -> bool:
        say(f"bisect: reference for {cut} of {len(names)} stages, then the engine")
        given = hybrid.values_before(model.spec, judged.trace, cut)
        return _wrong(judged, last_logits(run_engine(engine, model, case, given)))

    def engine_first(cut: int) -> bool:
        say(f"bisect: engine for {cut} of {len(names)} stages, then the reference")
        given = hybrid.values_before(model.spec, plain, cut)
        logits = run_reference_on(model, case, judged.choices, dense, given)
        return _wrong(judged, logits)

    return hybrid.run_hybrids(names, reference_first, engine_first, plain_is_wrong)


# --- words --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What is known of the run besides: `how` it is called, in words; whether `both_modes` break
    at the same point; whether `positions` were wrong when it ran; `taps` of the layer's convolution
    (0: none) and the engine's tokens a flow."""

    how: str
    both_modes: bool = False
    positions: bool = False
    taps: int = 0
    chunk: int = 1


def sentences(found: ForwardFinding, told: Told) -> list[str]:
    """What broke, where, the shape of the damage, what the hybrids say; in plain words."""
    broken = found.broken
    if broken is None:
        return _nothing_local(found, told.how)
    where = f"in the {told.how}"
    if told.both_modes:
        where = f"in both prefill modes (what follows is of the {told.how})"
    lines = [f"{place_of(broken.point)} breaks first, {where}: {_blamed(found, broken, told)}"]
    if found.damage is not None:
        text = str(found.damage)
        text = f"{text}; {found.part}" if found.part and not found.damage.values else text
        lines.append(f"{text[0].upper()}{text[1:]}.")
        lines += suspect_state(broken.op, found.damage, told)
    else:
        lines.append(f"{broken.check.detail}.")
    return [*lines, *_new(found, broken), found.hybrids.text()]


def _blamed(found: ForwardFinding, broken: PointCheck, told: Told) -> str:
    kernels = kernels_text(found.kernels)
    if told.positions and broken.op == "rope":
        behind = f" ({kernels})" if kernels else ""
        return (
            f"the op rope that makes {broken.point.name} does not give what it should at the "
            f"tokens' own positions. The position that it read is suspect, not rope{behind}."
        )
    if not kernels:
        return (
            f"the op {broken.op} that makes {broken.point.name} does not give what it should from "
            "the inputs that it read."
        )
    does = "does not give what it should from the inputs that it read"
    if len(found.kernels) > 1:
        does = "do not give what they should from the inputs that they read"
    return f"the op {broken.op} makes {broken.point.name}, and its {kernels} {does}."


def suspect_state(op: str, damage: Damage, told: Told) -> list[str]:
    """Damage at the first tokens alone, of an op that reads a state from before them."""
    hit = np.flatnonzero(damage.mask.any(axis=(1, 2)))
    first = np.array_equal(hit, np.arange(len(hit))) and len(hit) < len(damage.mask)
    if op == "convolution":
        first = first and len(hit) == told.taps - 1
    elif op == "delta_rule":
        first = first and len(hit) < told.chunk
    else:
        return []
    if not first:
        return []
    where = f"Only the first {counted(len(hit), 'token')} are damaged, which read"
    if op == "delta_rule":
        where = "The damage starts at token 0 and ends in the first chunk, which reads"
    return [
        f"{where} the state of before token 0: that state is suspect (it must be zero after a "
        "reset), before the kernel is."
    ]


def place_of(point: TracePoint) -> str:
    if point.layer is not None:
        return f"Layer {point.layer}"
    return "The embedding" if point.name.startswith("inp_") else "The output"


def _nothing_local(found: ForwardFinding, how: str) -> list[str]:
    if found.logits_wrong:
        return [
            f"The last token's logits of the {how} are wrong although every op is within its own "
            "limit on the inputs that it read: the error is one that no recorded point shows.",
            found.hybrids.text(),
        ]
    lines = [
        f"Run again with every point recorded, the {how} is right: every op is within its own "
        "limit and the last token's logits are within theirs."
    ]
    if found.untraced_wrong:
        return [
            *lines,
            "The same run without a trace is wrong: look at what it does otherwise (graph replay, "
            "which row of logits it returns, what is not synchronised).",
        ]
    return [
        *lines,
        "A run without a trace is right as well, so it is not the forward pass of a prefill.",
    ]


def _new(found: ForwardFinding, broken: PointCheck) -> list[str]:
    first = found.first_new
    if first is None:
        return [
            "Fed the reference's values every op is within its limit: the fault shows only on the "
            "values that the engine had."
        ]
    times = _times(first.check.of_limit)
    if first.point.name == broken.point.name:
        text = f"Fed the reference's values, {first.point.name} still adds {times} its limit"
        text += ", so the error is new there and not inherited"
    else:
        text = f"Fed the reference's values, {first.point.name} ({first.op}) adds {times} its limit"
    others = [error for error in found.errors if error.broken and error is not first]
    does = "adds more than its limit" if len(others) == 1 else "add more than theirs"
    more = f"; {counted(len(others), 'later point')} of the same run {does} too"
    ops = sorted({error.op for error in others})
    more += f" ({'op' if len(ops) == 1 else 'ops'} {', '.join(ops)})"
    return [text + (more if others else "; every other point adds less than its own limit") + "."]


def _times(of_limit: float | None) -> str:
    if of_limit is None or not math.isfinite(of_limit):
        return "more than"
    return f"{of_limit:.3g} times"
