"""What must hold before a row of a speed table is timed.

The engine is set against itself, because the NumPy reference of an 8B model takes longer than the
table: on `kparallel` batches and modes are bit-equal by contract, so a row that is not is refused.
Other paths round otherwise, and by how much they may would take the reference: they are judged by
suites/correctness. Here they are refused where their logits are not the same network's at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend_hip.results import PrefillResult
from suites.benchmark.engine_runs import Runner
from suites.benchmark.matrix_work import executed_products
from suites.benchmark.plans import SpeedRow
from suites.benchmark.proof import require_route
from suites.harness.compare import Array, same_bits
from suites.harness.tolerances import RELATED_LOGITS

EXACT = "kparallel"


@dataclass(frozen=True)
class RowProof:
    """`max_abs_diff`: logits against per-token prefill, None for decode; `note` is printed;
    `matrix_products`: of fragments in a decode step (matrix_work.py)."""

    chunks: int
    max_abs_diff: float | None
    note: str
    matrix_products: int | None = None


def prove_decode(runner: Runner, row: SpeedRow, tokens: Sequence[int]) -> RowProof:
    """A timed step emits what the same step gives with everything read back, and on exact paths
    what each sequence gives alone. The engine refuses NaN logits itself."""
    hybrid = any(layer.delta_net is not None for layer in runner.model.spec.layers)
    # A recurrent state can't be stepped back, so it starts anew.
    start = runner.assume if hybrid else runner.place
    start(row.context)
    together = runner.step(tokens)
    start(row.context)
    seen = runner.inspect(tokens, range(len(tokens)))
    emitted = [step.token for step in seen]
    assert together == emitted, f"{row.id}: emits {together}, read back it is {emitted}"
    routes, alone = dict(seen[0].routes), []
    for sequence, token in enumerate(tokens):
        start(row.context)
        alone += runner.inspect([token], [sequence])
    # Few sequences may run other kernels than the path's (backend_hip/tuning.py).
    bounded = any(name.endswith(f" {row.path}") for name in routes) and row.path != EXACT
    same = sum(one == other.token for one, other in zip(together, alone, strict=True))
    assert same == row.batch or bounded, (
        f"{row.id}: {row.batch - same} of {row.batch} sequences emit another token together than "
        "alone"
    )
    products = executed_products(runner.model, row.batch, routes)
    notes = []
    if bounded:
        for one, other in zip(seen, alone, strict=True):
            _require_related(row, one.tail.logits, other.tail.logits, "together than alone")
        notes.append(f"{same} of {row.batch} tokens as alone")
    if row.path != EXACT and not bounded:
        ran = "digits" if any(name.endswith(" digits") for name in routes) else EXACT
        notes = [f"kernels of {ran}, not the matrix unit's"]
    if row.expanded:
        notes.append("control: cache written out as f16 first")
    return RowProof(0, None, "; ".join(notes), products)


def prove_prefill(
    runner: Runner, row: SpeedRow, tokens: Sequence[int], per_token: PrefillResult
) -> RowProof:
    """Batched logits are those of per-token prefill, by kernels of the row's path."""
    assert np.isfinite(per_token.logits).all(), f"{row.id}: per-token logits are not finite"
    if row.mode == "per-token":
        return RowProof(per_token.chunks, 0.0, "")
    runner.engine.reset()
    result = runner.prefill(row.mode, tokens)
    assert np.isfinite(result.logits).all(), f"{row.id}: logits are not finite"
    require_route(result, row.mode, row.path, runner.model.spec.layer_count)
    difference = float(np.abs(result.logits[-1:] - per_token.logits[-1:]).max())
    if row.path == EXACT:
        assert same_bits(result.logits[-1:], per_token.logits[-1:]), (
            f"{row.id}: logits differ from per-token prefill by {difference}"
        )
        return RowProof(result.chunks, difference, "")
    _require_related(row, result.logits[-1], per_token.logits[-1], "than per-token prefill")
    return RowProof(result.chunks, difference, f"logits off by {difference:.2g}")


def _require_related(row: SpeedRow, got: Array, want: Array, whose: str) -> None:
    """Refuses logits (V,) that differ by a share of their spread that no rounding makes."""
    off = float(np.sqrt(np.mean(np.square(got - want, dtype=np.float64))))
    spread = float(np.std(want, dtype=np.float64))
    assert spread > 0, f"{row.id}: all logits are {want[0]}, expected others for other tokens"
    share = off / spread
    assert share <= RELATED_LOGITS, (
        f"{row.id}: logits are {share:.2g} of their spread other {whose}, expected at most "
        f"{RELATED_LOGITS} because they are rounded otherwise and no more"
    )
