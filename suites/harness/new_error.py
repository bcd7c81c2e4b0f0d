"""New error by stage: how much each op adds by itself, apart from what it inherited.

Accumulated error is the engine's own run against the float64 reference. New error comes from a run
in which every recorded value is replaced by the reference's: each op reads the reference's values,
so what it records differs from right by what it adds itself, and that is held to its local limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend_hip.forward import FUSED
from reference.model import Model
from reference.model.trace import LOGITS, Trace, TracePoint, trace_points
from suites.harness.compare import Array
from suites.harness.endtoend import PointDistance
from suites.harness.local import LocalRules, judge_point, point_inputs
from suites.harness.protocol import Progress
from suites.harness.verdict import Check, State

NEIGHBOURS = 3


@dataclass(frozen=True)
class StageError:
    """One point. `accumulated` and `new` are shares of the reference's largest magnitude there.

    `check` judges the new error: of_limit says how many times the op's own limit it is.
    """

    point: TracePoint
    op: str
    accumulated: float
    new: float
    check: Check

    @property
    def broken(self) -> bool:
        return self.check.state is State.DIVERGED


def given_values(reference: Trace) -> Mapping[str, Array]:
    """What a forced run goes on with: all but the logits, which nothing reads but the sampler."""
    return {name: value for name, value in reference.arrays.items() if name != LOGITS}


def new_errors(
    model: Model,
    rules: LocalRules,
    forced: Trace,
    given: Mapping[str, Array],
    distances: Mapping[str, PointDistance],
    progress: Progress,
) -> list[StageError]:
    """Judges what each op added in the `forced` run, which went on with the `given` values."""
    found = []
    for point in trace_points(model.spec):
        if point.layer is not None and point.stem == "attn_norm":
            progress(f"new error: layer {point.layer + 1} of {model.spec.layer_count}")
        judged = judge_point(model, as_read(model, rules, forced, given, point), rules, point)
        distance = distances.get(point.name)
        scale = distance.reference_max if distance is not None else 0.0
        largest = judged.comparison.max_abs_diff if judged.comparison is not None else None
        found.append(
            StageError(
                point,
                judged.op,
                _share(None if distance is None else distance.max_abs_diff, scale),
                _share(largest, scale),
                judged.check,
            )
        )
    return found


def as_read(
    model: Model, rules: LocalRules, forced: Trace, given: Mapping[str, Array], point: TracePoint
) -> Trace:
    """The point as it was recorded, beside its inputs as the op read them in a forced run.

    An input that the same kernel made was read before it could be replaced.
    """
    seen = Trace(forced.tokens, dict(forced.meta))
    for name in (*point_inputs(model, forced, rules, point), point.name):
        fused = FUSED.get(point.stem) == name.partition("-")[0]
        own = name == point.name or fused or name not in given
        if own and name not in forced:
            continue
        seen.record(name, forced[name] if own else given[name])
    return seen


def _share(difference: float | None, scale: float) -> float:
    if difference is None:
        return float("nan")
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def first_new(errors: Sequence[StageError]) -> StageError | None:
    """The first op that adds more than its limit by itself."""
    return next((error for error in errors if error.broken), None)


def shown(errors: Sequence[StageError], centre: str | None) -> list[StageError]:
    """Rows for a table: the centre and its neighbours, the next broken ones, the logits."""
    if not errors:
        return []
    names = [error.point.name for error in errors]
    middle = names.index(centre) if centre in names else len(names) - 1
    rows = set(range(max(0, middle - NEIGHBOURS), min(len(names), middle + NEIGHBOURS + 1)))
    rows |= set([i for i, error in enumerate(errors) if error.broken][:NEIGHBOURS])
    rows.add(len(names) - 1)
    return [errors[i] for i in sorted(rows)]
