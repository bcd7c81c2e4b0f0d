"""Device memory for products on the matrix unit."""

from backend_hip.device import Buffer, Device
from backend_hip.registry import PACKED_MOST, PACKED_TILE
from backend_hip.tuning import half_weights_nbytes, shape_of
from reference.model.weights import Weights

STEP = 64  # elements of K that the kernels take at once; rows of halves are padded to multiples
TALLEST = 128  # weight rows of the tallest block
SUPERBLOCK = 256  # elements of K that are packed together
PACKED_NBYTES = 12288  # of PACKED_TILE columns of a superblock, kernels/packed.h


class HalfColumns:
    """Activations: (rows, padded length) halves, or up to PACKED_MOST rows packed as
    kernels/packed.h says, and a float32 scale a row. As many rows of weights as halves as tuning.py
    allows. The parts of packed products' results.

    One serves a whole flow: a product writes it and reads it, and so may the products after it
    that have the same input. `holds` is what the queue has left in it: form, rows, elements a row.
    `widest`: rows of the most weights that share a launch.
    """

    holds: tuple[str, int, int] | None = None

    def __init__(self, device: Device, rows: int, columns: int, widest: int) -> None:
        self.halves = Buffer(device, rows * padded(columns) * 2, "activations as halves")
        packed_rows = min(rows, PACKED_MOST)
        tiles = -(-packed_rows // PACKED_TILE)
        superblocks = -(-columns // SUPERBLOCK)
        self.packed = Buffer(device, tiles * superblocks * PACKED_NBYTES, "activations packed")
        self.scales = Buffer(device, rows * 4, "scales of the halves")
        # Cut products have fewer rows than this in all parts together.
        shape = shape_of(device.architecture, "matvec_batched_packed")
        most = max(2 * shape["BLOCKS"] * TALLEST, widest)
        self.parts = Buffer(device, packed_rows * most * 4, "parts of results")
        nbytes = max(half_weights_nbytes(device.architecture), TALLEST * padded(columns) * 2)
        self.weights = Buffer(device, nbytes, "weights as halves")

    def free(self) -> None:
        for buffer in (self.halves, self.packed, self.scales, self.parts, self.weights):
            buffer.free()


def half_columns(path: str, weights: Weights, device: Device, rows: int) -> HalfColumns | None:
    """Room for `rows` rows of any plain product of a model, on path matrix."""
    if path != "matrix":
        return None
    columns = max(tensor.shape[-1] for tensor in weights.matrices())
    # Three at most share a launch.
    widest = 3 * max(tensor.shape[0] for group in weights.layers for tensor in group.values())
    return HalfColumns(device, rows, columns, widest)


def padded(columns: int) -> int:
    """The length of a row of halves."""
    return -(-columns // STEP) * STEP
