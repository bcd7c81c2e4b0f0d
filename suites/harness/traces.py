"""Two recorded traces against each other, point by point, where neither side can be run again."""

import numpy as np

from reference.model.trace import Trace
from suites.harness.compare import compare
from suites.harness.tolerances import TRACE_FILES
from suites.harness.verdict import Check, State, Verdict, check_of

_MUST_AGREE = ("architecture", "model_sha256", "kv_type_k", "kv_type_v")


def compare_traces(
    got: Trace, want: Trace, *, exact: bool = False, share: float | None = None
) -> Verdict:
    """Holds every point of `got` against `want`, in want's order.

    The limit at a point is `share` (default: the trace-file row) of want's largest magnitude there;
    `exact` demands equal bits. Other tokens, or points that one side lacks, are invalid.
    """
    share = TRACE_FILES.share if share is None else share
    checks = [_same_prompt(got, want)]
    notes = [
        f"{key} differs: {got.meta.get(key)} and {want.meta.get(key)}"
        for key in _MUST_AGREE
        if got.meta.get(key) != want.meta.get(key)
    ]
    if not exact:
        notes.append("errors that a point inherits count here; validate judges each point alone")
    names = [*want.arrays, *(name for name in got.arrays if name not in want)]
    checks += [_point(got, want, name, exact, share) for name in names]
    run = {"exact": exact, "share": None if exact else share, "got": got.meta, "want": want.meta}
    return Verdict(tuple(checks), run={"traces": run}, notes=tuple(notes))


def _same_prompt(got: Trace, want: Trace) -> Check:
    same = got.tokens == want.tokens
    detail = f"{len(got.tokens)} and {len(want.tokens)} tokens"
    link = "" if same else "the traces are of different prompts"
    state = State.OK if same else State.INVALID
    return Check("tokens", state, len(want.tokens), detail=detail, link=link)


def _point(got: Trace, want: Trace, name: str, exact: bool, share: float) -> Check:
    if name not in got or name not in want:
        side = "the first trace" if name not in got else "the second trace"
        return Check(name, State.INVALID, 0, detail=f"{side} lacks this point")
    one, other = got[name], want[name]
    if not exact:
        # Either file may hold float64; the difference is taken in float64 anyway.
        one, other = one.astype(np.float64), other.astype(np.float64)
    largest = float(np.max(np.abs(other))) if other.size and np.isfinite(other).all() else 0.0
    comparison = compare(one, other, 0.0 if exact else share * largest)
    check = check_of(name, comparison)
    if exact and check.state is State.OK and not comparison.bit_equal:
        return Check(name, State.DIVERGED, comparison.elements, detail="equal numbers, other bits")
    return check
