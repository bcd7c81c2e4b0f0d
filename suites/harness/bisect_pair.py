"""Two runs that must have equal bits and do not: the first recorded point at which they part."""

from dataclasses import dataclass

import numpy as np

from reference.model import Model
from reference.model.trace import TracePoint, trace_points
from suites.harness.bisect_forward import Flows, layout_of
from suites.harness.compare import same_bits
from suites.harness.damage import Damage, describe
from suites.harness.protocol import JudgedEngine, Progress
from suites.harness.rerun import Case, LaunchTrace, run_engine


@dataclass(frozen=True)
class Parting:
    """The first point whose bits differ between the prefill modes; None where none does."""

    point: TracePoint | None
    damage: Damage | None


def first_parting(
    model: Model, engine: JudgedEngine, case: Case, flows: Flows, say: Progress
) -> Parting:
    """Traces both modes of the case's prompt; `case.mode` is the one that damage is told of."""
    say("bisect: both prefill modes with every trace point")
    got = run_engine(engine, model, case)
    other = "per-token" if case.mode == "batched" else "batched"
    want = run_engine(
        engine, model, Case(case.tokens, other, case.path, case.kv_type_k, case.kv_type_v)
    )
    for point in trace_points(model.spec):
        if not _same(got, want, point.name):
            one, two = got[point.name], want[point.name].reshape(got[point.name].shape)
            layout = layout_of(model, case, flows, point, len(one))
            wide = two.astype(np.float64)
            return Parting(point, describe(one, wide, np.zeros_like(wide), layout))
    return Parting(None, None)


def _same(got: LaunchTrace, want: LaunchTrace, name: str) -> bool:
    if name not in got or name not in want:
        return name not in got and name not in want
    return same_bits(got[name], want[name])


def sentences(found: Parting) -> list[str]:
    if found.point is None or found.damage is None:
        return [
            "Run again with every point recorded, both prefill modes have equal bits at every "
            "point: the difference is in what an untraced run does otherwise (graph replay, what "
            "is not synchronised), or does not come every time."
        ]
    text = str(found.damage).replace("are above their limit", "have other bits")
    return [
        f"The two prefill modes part at {found.point.name}: before it every recorded point has "
        f"equal bits in both. In the batched run {text}."
    ]
