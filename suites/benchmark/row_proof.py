"""What must hold before a row of a speed table is timed.

The engine is set against itself, because the NumPy reference of an 8B model takes longer than the
table: on `kparallel` batches and modes are bit-equal by contract, so a row that is not is refused.
Other paths are bounded; how far they are off is shown in the row and judged by suites/correctness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend_hip.results import PrefillResult
from suites.benchmark.engine_runs import Runner
from suites.benchmark.matrix_work import executed_products
from suites.benchmark.plans import SpeedRow
from suites.benchmark.proof import require_route
from suites.harness.compare import same_bits

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
    """Every sequence emits together what it emits alone. The engine refuses NaN logits itself."""
    hybrid = any(layer.delta_net is not None for layer in runner.model.spec.layers)
    # A recurrent state can't be stepped back, so it starts anew.
    start = runner.assume if hybrid else runner.place
    start(row.context)
    together = runner.step(tokens)
    alone = []
    for sequence, token in enumerate(tokens):
        start(row.context)
        alone += runner.step_of([token], [sequence])
    start(row.context)
    routes = runner.step_routes(tokens)
    # Few sequences run kernels of kparallel whatever the path (backend_hip/tuning.py).
    bounded = any(name.endswith(f" {row.path}") for name in routes) and row.path != EXACT
    same = sum(one == other for one, other in zip(together, alone, strict=True))
    assert same == row.batch or bounded, (
        f"{row.id}: {row.batch - same} of {row.batch} sequences emit another token together than "
        "alone"
    )
    products = executed_products(runner.model, row.batch, routes)
    notes = [f"{same} of {row.batch} tokens as alone"] if bounded else []
    if row.path != EXACT and not bounded:
        notes = [f"kernels of {EXACT}: {row.path} has none for so few"]
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
    note = "" if row.path == EXACT else f"logits off by {difference:.2g}"
    return RowProof(result.chunks, difference, note)
