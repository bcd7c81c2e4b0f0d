"""What a decode step multiplies on the matrix unit: computed from shapes and block sizes.

No counter of the device is read. The launches by format and block size that follow from the shapes
must be those that the engine counted, or nothing is said.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from backend_hip import matrix, packed
from backend_hip.dispatch import route_name
from backend_hip.fused_batch import product_keys, why_not_fused_batch
from backend_hip.half_columns import SUPERBLOCK, padded
from backend_hip.registry import PACKED_TILE, runs_packed
from reference.model import Model

SIDE = 16  # a fragment is SIDE x SIDE x SIDE
# Of a packed superblock: one for each 16 elements, which Q6_K multiplies in two parts, and minima.
_OF_SUPERBLOCK = {"Q4_K": 17, "Q5_K": 17, "Q6_K": 34}


@dataclass(frozen=True)
class MatrixWork:
    """`products`: of 16 x 16 x 16 fragments, padding of rows, columns and K included. `launches` by
    registry row."""

    products: int
    launches: Mapping[str, int]


def step_work(model: Model, columns: int) -> MatrixWork:
    """One step of `columns` sequences whose plain products run on path matrix."""
    tensors: list[tuple[str, int, int]] = [
        (tensor.format.name, tensor.shape[0], tensor.shape[1])
        for tensor in model.weights.matrices()
    ]
    for layer in model.weights.layers:
        gate = layer.get("ffn_gate_inp_shexp")
        if gate is not None:
            tensors.append((gate.format.name, 1, gate.shape[-1]))
    products, launches = 0, Counter[str]()
    for form, rows, inner in tensors:
        if runs_packed(form, columns):
            tiles = -(-rows // SIDE) * -(-columns // PACKED_TILE)
            products += tiles * inner // SUPERBLOCK * _OF_SUPERBLOCK[form]
            launches[route_name(packed.product_key([form]))] += 1
            continue
        tile = matrix.choose_tile(form, rows, columns)
        height = matrix.HEIGHTS[tile]
        blocks = -(-rows // height) * -(-columns // tile)
        products += blocks * height * tile * padded(inner) // SIDE**3
        launches[route_name(("matvec_batched", f"{form}/{tile}", "matrix"))] += 1
    if not why_not_fused_batch(model.spec, model.weights):
        head = model.weights.lm_head.format.name
        if runs_packed(head, columns):
            keys = [*product_keys(model.weights), packed.product_key([head])]
            launches = Counter(route_name(key) for key in keys)
    return MatrixWork(products, launches)


def executed_products(model: Model, columns: int, routes: Mapping[str, int]) -> int | None:
    """Products of fragments in a step that launched `routes`. None where no product of it ran on
    the matrix unit. AssertionError where others ran than the shapes say."""
    ran = {
        name: count
        for name, count in routes.items()
        if name.startswith("matvec_batched") and name.endswith(" matrix")
    }
    if not ran:
        return None
    work = step_work(model, columns)
    assert ran == work.launches, (
        f"matrix products of {columns} columns: the engine launched {ran}, expected "
        f"{dict(work.launches)} by the shapes"
    )
    return work.products
