"""Two recorded traces against each other, point by point, where neither side can be run again."""

import math
from dataclasses import replace

import numpy as np

from reference.model.errors import InputError
from reference.model.trace import LOGITS, Trace
from suites.harness.check_kinds import is_trace_point
from suites.harness.compare import Array, compare
from suites.harness.selftest import Plant, caught
from suites.harness.tail_probe import told_apart
from suites.harness.tolerances import TRACE_FILES
from suites.harness.verdict import Check, State, Verdict, check_of

SAME_RUN = ("model_sha256", "architecture", "logits")
"""Where these differ, the values are of different things and nothing can be said."""
STORAGE = ("kv_type_k", "kv_type_v")
"""These change what is right; they may differ where that is what is compared."""
POINTS = "points"
"""Names of all points that the model has; files of before lack it."""
UNDER_TEST = ("side", "runtime", "dtype", "prefill", "path")
"""What two traces of one model and one prompt are made to compare."""


def require_comparable(got: Trace, want: Trace, allow_different: bool = False) -> None:
    """Refuses traces that were made to be different; `allow_different` lets KV types differ."""
    for trace in (got, want):
        strange = [name for name in trace.arrays if not is_trace_point(name)]
        listed = trace.meta.get(POINTS, [LOGITS])
        if not isinstance(listed, list) or not listed or not all(map(_is_point, listed)):
            raise InputError(
                f"compare: meta.{POINTS} of a file is no list of trace points, expected what "
                "`assay trace` wrote"
            )
        if strange:
            raise InputError(
                f"compare: an array is named {strange[0]!r}, expected a trace point such as "
                "attn_norm-0 because both files are traces of a model"
            )
    for field in SAME_RUN if allow_different else (*SAME_RUN, *STORAGE):
        one, other = got.meta.get(field), want.meta.get(field)
        if one is None and other is None:
            raise InputError(
                f"compare: meta has no {field} in either file, expected what `assay trace` wrote "
                "because traces of different things can agree"
            )
        if one != other:
            hint = " (or --allow-different)" if field in STORAGE else ""
            raise InputError(f"compare: {field} is {one} and {other}, expected one value{hint}")
    if got.tokens != want.tokens:
        places = [
            i
            for i, ids in enumerate(zip(got.tokens, want.tokens, strict=False))
            if ids[0] != ids[1]
        ]
        what = f"{len(got.tokens)} and {len(want.tokens)} tokens"
        if places:
            at = places[0]
            what = f"{got.tokens[at]} and {want.tokens[at]} at place {at}"
        raise InputError(f"compare: tokens are {what}, expected one prompt")


def _is_point(name: object) -> bool:
    return isinstance(name, str) and is_trace_point(name)


def under_test(got: Trace, want: Trace) -> list[str]:
    """In what the two differ by intent: what a verdict over them is a verdict of.

    What only one of them has (the reference has no path) goes without saying.
    """
    pairs = [
        (field, got.meta.get(field), want.meta.get(field)) for field in (*UNDER_TEST, *STORAGE)
    ]
    return [
        f"{field} {one} against {other}"
        for field, one, other in pairs
        if one != other and None not in (one, other)
    ]


def compare_traces(
    got: Trace, want: Trace, *, exact: bool = False, share: float | None = None
) -> Verdict:
    """Holds every point of `got` against `want`, in want's order.

    The limit is `share` (default: the trace-file row) of the largest magnitude in want's row;
    `exact` demands equal bits. Other tokens, or points that one side lacks, are invalid.
    """
    share = TRACE_FILES.share if share is None else share
    checks = [_same_prompt(got, want)]
    notes = under_test(got, want)
    if not notes:
        notes.append("nothing is different in how the two were made: two runs of one thing")
    if not exact:
        notes.append("errors that a point inherits count here; validate judges each point alone")
    checks += _premises(got, want)
    listed = [name for trace in (want, got) for name in trace.meta.get(POINTS, ())]
    names = dict.fromkeys([*want.arrays, *got.arrays, *listed])
    checks += [_point(got, want, name, exact, share) for name in names]
    if all(check.state is State.OK for check in checks):
        # Only where the files agree: what differs already shows without a plant.
        checks.append(caught(_plants(want, exact, share)))
    run = {"exact": exact, "share": None if exact else share, "got": got.meta, "want": want.meta}
    return Verdict(tuple(checks), run={"traces": run}, notes=tuple(notes))


def _premises(got: Trace, want: Trace) -> list[Check]:
    """What must hold before two files that agree can prove anything."""
    checks = []
    if {*got.arrays, *want.arrays} == {LOGITS} and POINTS not in {*got.meta, *want.meta}:
        link = "both files hold logits and no other point, nor the names of what the model has"
        checks.append(Check("two traces", State.INVALID, 0, link=link, unit="files"))
    if LOGITS in want and np.isfinite(want[LOGITS]).all():
        # By row: two tokens of different constants tell no tokens apart. NaN is the point's matter.
        row = max(want[LOGITS], key=np.ptp, default=np.zeros(1))
        told = told_apart(row)
        link = "" if told.state is State.OK else told.detail
        checks.append(replace(told, elements=1, unit="files", link=link))
    return checks


def _plants(want: Trace, exact: bool, share: float) -> list[Plant]:
    """Faults in copies of a point, judged by the very function that judges the files.

    A value is moved by twice its limit, or to the next float32 where that is more.
    """
    floats = (n for n, value in want.arrays.items() if value.size and value.dtype.kind == "f")
    name = next(floats, None)
    if name is None:
        return []  # and nothing planted is invalid
    clean = want[name].astype(np.float32)
    limit = np.zeros_like(clean) if exact else share * _row_magnitude(clean, clean)
    moved, wrong, flat = clean.copy(), clean.copy(), clean.size // 2
    step = max(2 * float(limit.flat[flat]), 2 * float(np.spacing(np.abs(clean.flat[flat]))))
    moved.flat[flat] += np.float32(step)
    wrong.flat[flat] = np.nan
    cases = {
        "one value moved": (moved, clean, State.DIVERGED),
        "a NaN": (wrong, clean, State.DIVERGED),
        "NaN on both sides": (wrong, wrong, State.INVALID),
        "nothing compared": (clean[:0], clean[:0], State.INVALID),
        "another shape": (clean[1:], clean, State.DIVERGED),
    }
    plants = []
    for what, (got, meant, state) in cases.items():
        one, other = Trace(want.tokens), Trace(want.tokens)
        one.record(name, got)
        other.record(name, meant)
        plants.append(Plant(name, what, _point(one, other, name, exact, share).state is state))
    return plants


def _row_magnitude(wide: Array, stored: Array) -> Array:
    """What an error is measured by, for each element: its row's largest magnitude, or that of the
    typical row where it is larger (a row can cancel to almost nothing).

    By row, because a real model's first token can be a thousand times larger than the others. Zero
    for whole numbers (expert ids), which must be equal.
    """
    if stored.dtype.kind in "iu" or not wide.size or not np.isfinite(wide).all():
        return np.zeros_like(wide, dtype=np.float64)
    inner = tuple(range(1, wide.ndim))
    row = np.max(np.abs(wide), axis=inner, keepdims=True)
    return np.broadcast_to(np.maximum(row, np.median(row)), wide.shape)


def _same_prompt(got: Trace, want: Trace) -> Check:
    same = got.tokens == want.tokens
    detail = f"{len(got.tokens)} and {len(want.tokens)} tokens"
    link = "" if same else "the traces are of different prompts"
    state = State.OK if same else State.INVALID
    return Check("tokens", state, len(want.tokens), detail=detail, link=link, unit="tokens")


def _point(got: Trace, want: Trace, name: str, exact: bool, share: float) -> Check:
    if name not in got or name not in want:
        side = "the first trace lacks" if name in want else "the second trace lacks"
        if name not in got and name not in want:
            side = "both traces lack"
        return Check(name, State.INVALID, 0, detail=f"{side} this point")
    one, other = got[name], want[name]
    if not exact:
        # Either file may hold float64; the difference is taken in float64 anyway.
        one, other = one.astype(np.float64), other.astype(np.float64)
    comparison = compare(one, other, 0.0 if exact else share * _row_magnitude(other, want[name]))
    check = check_of(name, comparison)
    if exact and check.state is State.OK and not comparison.bit_equal:
        return replace(
            check, state=State.DIVERGED, of_limit=math.inf, detail="equal numbers, other bits"
        )
    return check
