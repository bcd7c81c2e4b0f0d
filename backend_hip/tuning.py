"""Kernel shapes by architecture: how a kernel is compiled, beside what it computes.

No shape changes a bit of any result on the kparallel path; each changes only how fast it comes.
"""

from collections.abc import Mapping

# Rows of a weight matrix per wave, elements of one column (STAGE) or columns (STAGE_COLUMNS) that
# are held in block-shared memory; 0 columns: activations are read from device memory. LEAN: fewer
# registers in place of weights that are asked for ahead (kernels/dot.h). Blocks of the kernels for
# one column stay and take one group of rows after the other, BLOCKS_PER_UNIT of them a compute
# unit; those of path digits may have others, and ask for the weights of AHEAD steps at a time.
# Packed products stage STAGED_SUPERBLOCKS of activations at a time and are cut along K, in PARTS at
# most, until there are about BLOCKS of them: two for each of an H200's 132 multiprocessors.
Shape = Mapping[str, int]


def _one_column(*, rows: int, stage: int, blocks: int, ahead: int = 0) -> Shape:
    return {
        "ROWS_PER_WAVE": rows,
        "STAGE": stage,
        "BLOCKS_PER_UNIT": blocks,
        "AHEAD": ahead,
    }


_SHAPES: Mapping[str, Mapping[str, Shape]] = {
    "cuda": {
        "one_column": _one_column(rows=1, stage=4096, blocks=4),
        "norm_gate_up": _one_column(rows=2, stage=4096, blocks=4),
        "one_column digits": _one_column(rows=2, stage=4096, blocks=2, ahead=1),
        "matvec digits": _one_column(rows=2, stage=4096, blocks=3, ahead=1),
        "norm_gate_up digits": _one_column(rows=2, stage=4096, blocks=3, ahead=1),
        "matvec_few": {"ROWS_PER_WAVE": 2, "STAGE_COLUMNS": 8, "LEAN": 0},
        "matvec_batched": {"ROWS_PER_WAVE": 2, "STAGE_COLUMNS": 0, "LEAN": 0},
        "experts": {"LEAN": 0},
        "packed": {"STAGED_SUPERBLOCKS": 2, "BLOCKS": 264, "PARTS": 8},
    },
    # Not measured on a card: one row a wave, for fewer registers; which kernels still exceed the
    # budget stands in isa_budgets.py (`assay isa` prints them).
    "gfx1201": {
        "one_column": _one_column(rows=1, stage=4096, blocks=4),
        "norm_gate_up": _one_column(rows=2, stage=4096, blocks=4),
        "one_column digits": _one_column(rows=1, stage=4096, blocks=4, ahead=1),
        "norm_gate_up digits": _one_column(rows=2, stage=4096, blocks=4, ahead=1),
        "matvec_few": {"ROWS_PER_WAVE": 1, "STAGE_COLUMNS": 0, "LEAN": 0},
        "matvec_batched": {"ROWS_PER_WAVE": 1, "STAGE_COLUMNS": 0, "LEAN": 1},
        "experts": {"LEAN": 1},
        "packed": {"STAGED_SUPERBLOCKS": 2, "BLOCKS": 128, "PARTS": 8},
    },
    # Small, because a host thread poisons shared memory for each block.
    "cpu": {
        "one_column": _one_column(rows=1, stage=1024, blocks=4),
        "norm_gate_up": _one_column(rows=2, stage=1024, blocks=4),
        "one_column digits": _one_column(rows=1, stage=2048, blocks=4, ahead=1),
        "norm_gate_up digits": _one_column(rows=2, stage=2048, blocks=4, ahead=1),
        "matvec_few": {"ROWS_PER_WAVE": 2, "STAGE_COLUMNS": 2, "LEAN": 0},
        "matvec_batched": {"ROWS_PER_WAVE": 1, "STAGE_COLUMNS": 0, "LEAN": 1},
        "experts": {"LEAN": 1},
        "packed": {"STAGED_SUPERBLOCKS": 1, "BLOCKS": 6, "PARTS": 4},
    },
}
MOST_PARTS = 8  # of K that kernels/partial_sums.h adds; more would be left out
assert all(shapes["packed"]["PARTS"] <= MOST_PARTS for shapes in _SHAPES.values())
_OTHER_AMD = "gfx1201"
_FAMILIES: Mapping[str, str] = {
    "matvec": "one_column",
    "matvec_add": "one_column",
    "norm_qkv": "one_column",
    "matvec_batched_packed": "packed",
    "matvec_expert": "experts",
    "matvec_experts": "experts",
}


# Sequences of a decode step from which path matrix multiplies on the matrix unit; fewer run the
# kernels of kparallel. At least 2: one sequence's step is what per-token prefill is made of, which
# batched prefill is compared with. gfx1201's is not measured.
_MATRIX_FROM: Mapping[str, int] = {"cuda": 2, "gfx1201": 2, "cpu": 2}


# Device memory for weights as halves, which many columns are multiplied with; larger matrices go in
# slices of rows. cuda: any matrix of a layer of an 8B model at once, because the last turn of a
# slice's blocks does not fill the device. gfx1201, not measured: a slice stays in the last cache of
# 64 MiB beside the activations. cpu: small, so that small matrices have slices too.
_HALF_WEIGHTS_NBYTES: Mapping[str, int] = {
    "cuda": 128 * 2**20,
    "gfx1201": 32 * 2**20,
    "cpu": 64 * 2**10,
}


def half_weights_nbytes(architecture: str) -> int:
    """Bytes of weights that are held as halves at a time, at least a block's rows."""
    return _HALF_WEIGHTS_NBYTES[_kind(architecture, _HALF_WEIGHTS_NBYTES)]


def decode_path(path: str, sequences: int, architecture: str) -> str:
    """The path whose products a decode step runs."""
    few = sequences < _MATRIX_FROM[_kind(architecture, _MATRIX_FROM)]
    if path != "matrix" or not few:
        return path
    return "kparallel" if sequences > 1 else "digits"


def _kind(architecture: str, table: Mapping[str, object]) -> str:
    """The column of a table for an architecture: AMD's others take gfx1201's, others the CPU's."""
    kind = architecture.split()[0]
    if kind.startswith("gfx"):
        return kind if kind in table else _OTHER_AMD
    return kind if kind in table else "cpu"


def shape_of(architecture: str, op: str, path: str = "") -> Shape:
    """The shape of an op's kernels on an architecture ("gfx1201", "cuda sm_90", "x86_64", ...).

    A path may have shapes of its own.

    AMD's other architectures take gfx1201's, NVIDIA's one column of the table. Raises KeyError for
    an op without shapes.
    """
    shapes, family = _SHAPES[_kind(architecture, _SHAPES)], _FAMILIES.get(op, op)
    names = (f"{op} {path}", f"{family} {path}", family)
    return next(shapes[name] for name in names if name == family or name in shapes)
