"""Products on the matrix unit (path `matrix`): activations as halves, and the block shape by size.

Declared roundings, which reference/half.py repeats: an activation row is scaled by a power of two
and rounded to float16. A weight is the file's float32 value rounded to float16, but exact where up
to 16 columns meet a K format, whose integers and scales are exact as halves. Products are exact,
sums float32 in an order that the unit does not tell.
"""

from backend_hip.device import Buffer, Device
from backend_hip.dispatch import Kernels
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import MATRIX_TILES, PACKED_TILE, runs_packed
from backend_hip.weights import DeviceTensor
from reference.model.weights import Weights

MATRIX_CHUNK = 512  # prompt tokens per flow
STEP = 64  # elements of K that the kernels take at once; rows of halves are padded to multiples
NARROW_ROWS = 32  # weight rows of a block whose waves split K
NARROW = (16, 32)  # columns of such a block; wider ones are as many rows high as columns wide
WIDE = (64, 128)
PACKED_ROWS = 16  # weight rows of a block of kernels/matvec_packed.hip
SUPERBLOCK = 256  # elements of K there
PACKED_NBYTES = 12288  # of 16 columns of a superblock, kernels/packed.h
assert (*NARROW, *WIDE) == MATRIX_TILES

# Blocks that fill the device (132 multiprocessors of an H200 with one each): a product that makes
# fewer with the widest block takes the next narrower one. Not measured per architecture yet.
FILL = 132


def choose_tile(rows: int, count: int) -> int:
    """Columns of a block for `count` activation columns and `rows` weight rows: one of the tiles.

    Up to 32 columns a product is limited by reading weights, above by the matrix unit.
    """
    for tile in NARROW:
        if count <= tile:
            return tile
    narrower, widest = WIDE
    blocks = -(-rows // widest) * -(-count // widest)
    return widest if count > narrower and blocks >= FILL else narrower


class HalfColumns:
    """Device memory for one product's activations: (rows, padded length) halves, up to 16 rows
    packed as kernels/packed.h says, and a float32 scale a row.

    One serves a whole flow: a product writes it and reads it, and so may the products after it
    that have the same input. `holds` is what the queue has left in it: form, rows, elements a row.
    """

    holds: tuple[str, int, int] | None = None

    def __init__(self, device: Device, rows: int, columns: int) -> None:
        self.halves = Buffer(device, rows * padded(columns) * 2, "activations as halves")
        superblocks = -(-columns // SUPERBLOCK)
        self.packed = Buffer(device, superblocks * PACKED_NBYTES, "activations packed")
        self.scales = Buffer(device, rows * 4, "scales of the halves")

    def free(self) -> None:
        self.halves.free()
        self.packed.free()
        self.scales.free()


def default_chunk(path: str, max_cols: int) -> int:
    """Prompt tokens per flow where none were asked for."""
    return MATRIX_CHUNK if path == "matrix" else max_cols


def half_columns(path: str, weights: Weights, device: Device, rows: int) -> HalfColumns | None:
    """Room for `rows` rows of any plain product of a model, on path matrix."""
    if path != "matrix":
        return None
    return HalfColumns(device, rows, max(tensor.shape[-1] for tensor in weights.matrices()))


def padded(columns: int) -> int:
    """The length of a row of halves."""
    return -(-columns // STEP) * STEP


def multiply(
    kernels: Kernels,
    held: HalfColumns,
    x: DevicePointer,
    weight: DeviceTensor,
    y: DevicePointer,
    count: int,
    tile: int | None = None,
    *,
    same_input: bool = False,
) -> None:
    """y (count, rows) = x (count, columns) W^T, float32; `tile` None: chosen by size.

    `same_input`: the product queued before had this x, as halves or packed still there to be read.
    """
    rows, columns = weight.shape
    tile = tile or choose_tile(rows, count)
    key = ("matvec_batched", f"{weight.format}/{tile}", "matrix")
    packed = runs_packed(weight.format, tile)
    needed = ("packed" if packed else "halves", count, columns)
    convert = not (same_input and held.holds == needed)
    held.holds = needed
    if packed:
        if count > PACKED_TILE:
            raise ValueError(f"matrix: count is {count}, expected at most {PACKED_TILE}, a tile's")
        if convert:
            to_packed = ("to_packed", "", "any")
            kernels.launch(to_packed, (count, 1), x, held.packed, held.scales, columns)
        kernels.launch(
            key,
            (-(-rows // PACKED_ROWS), 1),
            *(weight.buffer, held.packed, held.scales, y, rows, columns, count),
        )
        return
    stride = padded(columns)
    if convert:
        to_half = ("to_half", "", "any")
        kernels.launch(to_half, (count, 1), x, held.halves, held.scales, columns, stride)
    height = NARROW_ROWS if tile in NARROW else tile
    kernels.launch(
        key,
        (-(-rows // height), -(-count // tile)),
        *(weight.buffer, held.halves, held.scales, y, rows, columns, stride, count),
    )
