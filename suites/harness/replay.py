"""Replays a repro bundle: judges what was recorded, without an engine; then runs it here again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_hip.registry import MAX_COLS_LIMIT
from reference.model import Model
from reference.model.errors import InputError
from reference.model.trace import Trace, TracePoint, trace_points
from suites.harness import bisect_tail
from suites.harness.bisect import identities_of
from suites.harness.bundle import Bundle
from suites.harness.local import judge_point
from suites.harness.new_error import as_read
from suites.harness.protocol import PREFILL_MODES, JudgedEngine, Progress
from suites.harness.rerun import run_engine
from suites.harness.tail import BrokenLink, broken_tail
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict


@dataclass(frozen=True)
class Replayed:
    """`recorded`: what the bundle holds, judged by today's limits. `here`: the engine run again.

    `same_code` says of each kernel of the bundle whether it has the same code object here, None
    where it is not loaded here.
    """

    recorded: Check | None
    here: Check
    same_code: dict[str, bool | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def proves_nothing(self) -> str:
        """Why neither answer can be given; empty where one can.

        Only a whole run, which has no record to be judged, may reproduce an invalid verdict.
        """
        if self.recorded is None:
            return ""
        if self.here.state in (State.INVALID, State.UNSUPPORTED):
            return f"what ran here proves nothing: {_named(self.here)}"
        if self.here.state is State.DIVERGED or self.recorded.state is State.DIVERGED:
            return ""
        if self.recorded.state is State.OK:
            return "the bundle's own record is within today's limits: it shows no fault"
        return f"the bundle's own record proves nothing: {_named(self.recorded)}"

    @property
    def reproduces(self) -> bool:
        return self.here.state is not State.OK and not self.proves_nothing

    @property
    def exit_code(self) -> int:
        return State.INVALID.exit_code if self.proves_nothing else int(self.reproduces)

    @property
    def verdict(self) -> Verdict:
        """Of the engine here: what was recorded says nothing about it."""
        return Verdict((self.here,), notes=self.notes)


def _named(check: Check) -> str:
    link = check.link or check.name
    return link if not check.detail or check.detail in link else f"{link}; {check.detail}"


def options_of(bundle: Bundle) -> Options:
    meta = bundle.meta
    return Options(
        modes=tuple(str(mode) for mode in meta["modes"]),
        n_decode=meta["n_decode"],
        path=meta["path"],
        kv_type_k=meta["kv_type_k"],
        kv_type_v=meta["kv_type_v"],
    )


def replay(
    bundle: Bundle,
    model: Model,
    open_engine: Callable[[], JudgedEngine],
    progress: Progress | None = None,
) -> Replayed:
    """Judges the bundle's tensors and runs the engine at the same point. Raises InputError for a
    bundle that does not fit its model."""
    say = progress or (lambda text: None)
    _require_ranges(bundle, model)
    options_of(bundle)
    if bundle.case.mode not in PREFILL_MODES:
        raise InputError(
            f"bundle: mode is {bundle.case.mode}, expected one of {', '.join(PREFILL_MODES)}"
        )
    match bundle.kind:
        case "point":
            return _point(bundle, model, open_engine, say)
        case "tail":
            return _tail(bundle, model, open_engine, say)
    return _run(bundle, model, open_engine, say)


def _require_ranges(bundle: Bundle, model: Model) -> None:
    """Refuses counts that no run can have had. The engine has more rules and keeps them itself."""
    context = model.spec.context_length
    ranges = {
        "context_length": (1, context),
        "n_decode": (0, context),
        "max_cols": (1, MAX_COLS_LIMIT),
    }
    for name, (low, high) in ranges.items():
        if not low <= bundle.meta[name] <= high:
            raise InputError(f"bundle: {name} is {bundle.meta[name]}, expected {low} to {high}")


def _point(
    bundle: Bundle, model: Model, open_engine: Callable[[], JudgedEngine], say: Progress
) -> Replayed:
    point = _point_of(bundle, model)
    case, rules = bundle.case, bundle.case.rules
    say("judging the recorded tensors")
    kept = Trace(case.tokens, {"mode": case.mode})
    for name, value in bundle.inputs.items():
        kept.record(name, value)
    kept.record(point.name, bundle.arrays["got"])
    recorded = judge_point(model, kept, rules, point).check
    say(f"the engine at {point.name}, on the recorded inputs")
    engine = open_engine()
    try:
        again = run_engine(engine, model, case, bundle.inputs)
        same = _same_code(bundle, engine)
    finally:
        engine.close()
    seen = as_read(model, rules, again, bundle.inputs, point)
    return Replayed(recorded, judge_point(model, seen, rules, point).check, same)


def _point_of(bundle: Bundle, model: Model) -> TracePoint:
    """The broken point; InputError where it, or an array, is not one of the model's."""
    points = {point.name: point for point in trace_points(model.spec)}
    name = str(bundle.meta["point"])
    for other, value in {**bundle.inputs, name: bundle.arrays["got"]}.items():
        if other not in points:
            raise InputError(f"bundle: point is {other}, which its model does not have")
        size, rows = int(np.prod(points[other].shape)), len(bundle.tokens)
        if len(value) not in (1, rows) or value.size != len(value) * size:
            raise InputError(
                f"bundle: array of {other} is {value.shape}, expected {rows} rows of {size} values"
            )
    return points[name]


def _tail(
    bundle: Bundle, model: Model, open_engine: Callable[[], JudgedEngine], say: Progress
) -> Replayed:
    """The tail alone on the recorded logits, then in a run of prefills and decode steps."""
    logits, options = bundle.arrays["logits"], options_of(bundle)
    vocabulary = model.spec.vocab_size
    if logits.shape != (vocabulary,) or logits.dtype.str != "<f4":
        raise InputError(
            f"bundle: logits are {logits.dtype} {logits.shape}, expected float32 ({vocabulary},)"
        )
    recorded = _link_check("recorded tail", broken_tail(bundle.tail))
    engine = open_engine()
    try:
        say("the sampler tail on the recorded logits")
        (tail,) = engine.run_tail(logits[None])
        alone = broken_tail(tail)
        notes = ["the tail alone, on the recorded logits: " + ("ok" if alone is None else "broken")]
        found = bisect_tail.rerun_tails(
            engine, bundle.tokens, options.modes, options.n_decode, vocabulary, say
        )
        if found is None:
            found = bisect_tail.rerun_probes(engine, vocabulary, say)
        same = _same_code(bundle, engine)
    finally:
        engine.close()
    broken = alone if found is None else found.broken
    place = "" if found is None else f", in {found.place}"
    return Replayed(recorded, _link_check(f"sampler tail{place}", broken), same, tuple(notes))


def _link_check(name: str, broken: BrokenLink | None) -> Check:
    if broken is None:
        return Check(name, State.OK, 1, unit="tails")
    link = f"{name}: {broken}"
    return Check(name, State.DIVERGED, 1, detail=broken.detail, link=link, unit="tails")


def _run(
    bundle: Bundle, model: Model, open_engine: Callable[[], JudgedEngine], say: Progress
) -> Replayed:
    """Nothing smaller than the whole run shows it."""
    context = bundle.meta["context_length"]
    verdict = validate(
        model,
        open_engine,
        bundle.tokens,
        options_of(bundle),
        context_length=context,
        progress=say,
    )
    broken = verdict.first_broken
    here = broken or Check("validate", State.OK, max(verdict.elements, 1))
    notes = (f"recorded verdict: {bundle.meta['summary']}", f"verdict here: {verdict.summary()}")
    return Replayed(None, here, {}, notes)


def _same_code(bundle: Bundle, engine: JudgedEngine) -> dict[str, bool | None]:
    recorded: Sequence[Any] = bundle.meta["kernels"]
    rows = {
        str(entry["row"]): entry.get("code_sha256") for entry in recorded if isinstance(entry, dict)
        and "row" in entry
    }  # fmt: skip
    here = {entry["row"]: entry["code_sha256"] for entry in identities_of(engine, list(rows))}
    return {row: None if row not in here else here[row] == code for row, code in rows.items()}
