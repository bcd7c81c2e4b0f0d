"""The traced runs of validate: every point of every prefill mode judged alone, on its own inputs.

The first mode that is traced is judged in full. A later one is judged at each point too, but where
op, inputs and result have the bits of the first and the same row of limits applies, the first
judgement holds and is taken over, so that an engine whose modes agree pays for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reference.model import Model
from reference.model.trace import Trace
from suites.harness import kv
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import same_bits
from suites.harness.kernels import path_of
from suites.harness.left_behind import LeftBehind
from suites.harness.local import (
    LocalRules,
    PointCheck,
    Proven,
    first_broken,
    judge_trace,
    summarise,
)
from suites.harness.plants import left_behind_plants, local_plants
from suites.harness.protocol import Prefilled, Progress
from suites.harness.selftest import Plant
from suites.harness.verdict import Check, State, counted

PER_TOKEN_TRACED = 32
"""Tokens from the prompt's start that are traced token by token beside a batched trace.

Each of them is a pass of its own with every value read back.
"""


@dataclass(frozen=True)
class TracedRun:
    """One prefill as it was traced; `whole`: all of the prompt, not only its start.

    `parted_at` names the first point that has other bits than the run traced before it, as links
    do; empty where none has, and for the first run.
    """

    result: Prefilled
    recorded: Trace
    points: list[PointCheck]
    proven: Proven
    checks: list[Check]
    notes: list[str]
    plants: list[Plant]
    held: LeftBehind
    whole: bool = True
    parted_at: str = ""

    @property
    def mode(self) -> str:
        return str(self.recorded.meta["mode"])

    @property
    def broken_point(self) -> str | None:
        found = first_broken(self.points)
        return None if found is None else found.point.name


def judge_run(
    model: Model,
    result: Prefilled,
    recorded: Trace,
    held: LeftBehind,
    declared: LocalRules,
    first: TracedRun | None,
    progress: Progress,
) -> TracedRun:
    """Judges a trace and what its sequence left behind.

    `declared` has the path that the engine was built for. `first` is the run traced before this
    one: it makes this one the second mode, named in its checks.
    """
    mode = str(recorded.meta["mode"])
    rules = replace(declared, path=path_of(mode, declared.path))
    states: dict[int, DeltaRule] = {}
    proven = None if first is None else first.proven
    points = list(
        judge_trace(model, recorded, rules, recurrent=states, proven=proven, progress=progress)
    )
    found = first_broken(points)
    broken = "" if found is None else found.point.name
    stored = (declared.kv_type_k, declared.kv_type_v)
    left = held.checks_of(recorded, stored, states, model.spec, broken)
    local = summarise(points)
    checks = (
        [*left, *local] if _stored_wrong(found, held, model, recorded, stored) else [*local, *left]
    )
    plants: list[Plant] = []
    if first is None:
        progress("planting faults in copies of the trace")
        plants = local_plants(model, recorded, rules, points)
        plants += left_behind_plants(held, recorded, stored, states, model.spec, left)
    else:
        checks = _of_second_mode(checks, mode, points)
    notes = [f"{point.point.name}: {point.note}" for point in points if point.note]
    whole = first is None or len(recorded.tokens) == len(first.recorded.tokens)
    known = Proven(recorded, rules, {p.point.name: p for p in points}, states)
    parted = "" if first is None else _parted_at(points, recorded, first.recorded)
    return TracedRun(result, recorded, points, known, checks, notes, plants, held, whole, parted)


def _parted_at(points: Sequence[PointCheck], recorded: Trace, before: Trace) -> str:
    """The first point where two traces have other bits for the tokens that both hold."""
    count = min(len(recorded.tokens), len(before.tokens))
    for point in points:
        name = point.point.name
        if name not in recorded or name not in before:
            continue
        one, other = recorded[name], before[name]
        # The last row alone was recorded: of another token where one trace is shorter.
        last_only = len(one) < len(recorded.tokens) or len(other) < len(before.tokens)
        if last_only and len(recorded.tokens) != len(before.tokens):
            continue
        if not same_bits(one[:count], other[:count]):
            return f"{name} ({point.op})"
    return ""


def _stored_wrong(
    found: PointCheck | None,
    held: LeftBehind,
    model: Model,
    recorded: Trace,
    stored: tuple[str, str],
) -> bool:
    """True where attention is the first broken op and what it read had been stored wrong."""
    if found is None or found.op != "attention" or found.point.layer is None:
        return False
    layer = model.spec.layers[found.point.layer].kv_layer
    norm = model.spec.value_norm
    return not kv.is_written(recorded, held.kv, stored, layer, value_norm=norm)


def judge_again(
    model: Model,
    recorded: Trace,
    declared: LocalRules,
    name: str,
    what: str,
    progress: Progress,
    *,
    held: LeftBehind | None = None,
) -> list[Check]:
    """Judges the trace of a prefill that stands for runs which can't be traced.

    `name` follows "local, " in the checks, `what` was traced stands in their links. Sound ops
    become one check. `held`: what the sequence left behind, judged too where it is given.
    """
    path = path_of(str(recorded.meta["mode"]), declared.path)
    rules, states = replace(declared, path=path), dict[int, DeltaRule]()
    points = list(judge_trace(model, recorded, rules, recurrent=states, progress=progress))
    broken, left = first_broken(points), list[Check]()
    if held is not None:
        stored, since = (
            (declared.kv_type_k, declared.kv_type_v),
            broken.point.name if broken else "",
        )
        left = held.checks_of(recorded, stored, states, model.spec, since)
    checks = [
        replace(
            check,
            name=check.name.replace("local:", f"local, {name}:"),
            link=f"{check.link}, {what}",
        )
        for check in (*summarise(points), *left)
    ]
    sound = [check for check in checks if check.state is State.OK and check.detail]
    if not sound:
        return checks
    worst = max(sound, key=lambda check: check.of_limit or 0.0)
    merged = replace(
        worst,
        name=f"local, {name}: {counted(len(sound), 'sound op')}",
        elements=sum(check.elements for check in sound),
        detail=f"{counted(len(points), 'point')} of {counted(len(recorded.tokens), 'token')}",
    )
    return [*(check for check in checks if check not in sound), merged]


def _of_second_mode(
    checks: Sequence[Check], mode: str, points: Sequence[PointCheck]
) -> list[Check]:
    """Broken ones by name, sound ops as one check, which is that of the worst of them."""
    named = [
        replace(
            check,
            name=check.name.replace("local:", f"local, {mode}:"),
            link=f"{check.link}, {mode} prefill",
        )
        for check in checks
    ]
    kept = [check for check in named if check.state is not State.OK or not check.detail]
    sound = [check for check in named if check not in kept]
    if not sound:
        return kept
    worst = max(sound, key=lambda check: check.of_limit or 0.0)
    same = sum(point.taken_over for point in points)
    detail = f"{counted(len(sound), 'op')}; {counted(same, 'point')} of {len(points)} have the bits"
    merged = replace(
        worst,
        name=f"local, {mode}: {counted(len(sound), 'sound op')}",
        elements=sum(check.elements for check in sound),
        detail=f"{detail} of the first trace, which was judged",
    )
    return [*kept, merged]
