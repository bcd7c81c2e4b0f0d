"""Products on the matrix unit (path `matrix`): activations as halves, and the block shape by size.

Declared roundings, which reference/half.py repeats: an activation row is scaled by a power of two
and rounded to float16. A weight is the file's float32 value rounded to float16, but exact where up
to 16 columns meet a K format, whose integers and scales are exact as halves. Products are exact,
sums float32 in an order that the unit does not tell.
"""

from backend_hip.device import Buffer, Device
from backend_hip.dispatch import Kernels
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import HALVES_TILES, MATRIX_TILES, PACKED_TILE, runs_packed
from backend_hip.tuning import half_weights_nbytes
from backend_hip.weights import DeviceTensor
from reference.model.weights import Weights

MATRIX_CHUNK = 1024  # prompt tokens per flow
STEP = 64  # elements of K that the kernels take at once; rows of halves are padded to multiples
# Weight rows of a block by its columns. Blocks of up to 32 columns split K over their waves.
HEIGHTS = {16: 32, 32: 32, 64: 64, 96: 128, 128: 128}
PACKED_ROWS = 16  # weight rows of a block of kernels/matvec_packed.hip
SUPERBLOCK = 256  # elements of K there
PACKED_NBYTES = 12288  # of 16 columns of a superblock, kernels/packed.h
UNITS_PER_BLOCK = 16 * 256  # elements that a block of kernels/weights_to_half.hip takes
assert tuple(HEIGHTS) == MATRIX_TILES

# Multiprocessors of an H200, and by tile how long 1, 2, ... blocks take that one holds at once, as
# far as they fit, in microseconds for 4,096 elements of K. Other architectures are not measured.
MULTIPROCESSORS = 132
TURNS = {64: (23, 33, 46, 61), 96: (60, 85, 116), 128: (65, 88)}
assert tuple(TURNS) == HALVES_TILES


def choose_tile(rows: int, count: int) -> int:
    """Columns of a block for `count` activation columns and `rows` weight rows: one of the tiles.

    Up to 32 columns a product is limited by reading weights, above by the matrix unit: there the
    tile that leaves least of the device idle, in the last turn of blocks or behind the last column.
    """
    for tile in MATRIX_TILES:
        if count <= tile and tile not in HALVES_TILES:
            return tile

    def cost(tile: int) -> int:
        blocks = -(-rows // HEIGHTS[tile]) * -(-count // tile)
        turns, rest = divmod(-(-blocks // MULTIPROCESSORS), len(TURNS[tile]))
        return turns * TURNS[tile][-1] + (TURNS[tile][rest - 1] if rest else 0)

    return min(HALVES_TILES, key=cost)


class HalfColumns:
    """Device memory for one product's activations: (rows, padded length) halves, up to 16 rows
    packed as kernels/packed.h says, and a float32 scale a row; and for as many rows of its weights
    as halves as tuning.py allows.

    One serves a whole flow: a product writes it and reads it, and so may the products after it
    that have the same input. `holds` is what the queue has left in it: form, rows, elements a row.
    """

    holds: tuple[str, int, int] | None = None

    def __init__(self, device: Device, rows: int, columns: int) -> None:
        self.halves = Buffer(device, rows * padded(columns) * 2, "activations as halves")
        superblocks = -(-columns // SUPERBLOCK)
        self.packed = Buffer(device, superblocks * PACKED_NBYTES, "activations packed")
        self.scales = Buffer(device, rows * 4, "scales of the halves")
        tallest = max(HEIGHTS.values()) * padded(columns) * 2
        nbytes = max(half_weights_nbytes(device.architecture), tallest)
        self.weights = Buffer(device, nbytes, "weights as halves")

    def free(self) -> None:
        self.halves.free()
        self.packed.free()
        self.scales.free()
        self.weights.free()


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
    if tile in HALVES_TILES:
        _multiply_halves(kernels, held, weight, y, count, tile)
        return
    kernels.launch(
        key,
        (-(-rows // HEIGHTS[tile]), -(-count // tile)),
        *(weight.buffer, held.halves, held.scales, y, rows, columns, stride, count),
    )


def _multiply_halves(
    kernels: Kernels,
    held: HalfColumns,
    weight: DeviceTensor,
    y: DevicePointer,
    count: int,
    tile: int,
) -> None:
    """`multiply` with activations in `held`: weights as halves, as many rows as fit at a time."""
    rows, columns = weight.shape
    stride, height = padded(columns), HEIGHTS[tile]
    most = held.weights.nbytes // (2 * stride) // height * height
    for first in range(0, rows, most):
        taken = min(most, rows - first)
        kernels.launch(
            ("weights_to_half", weight.format, "any"),
            (-(-taken * stride // UNITS_PER_BLOCK), 1),
            *(weight.buffer, held.weights, first, taken, columns, stride),
        )
        kernels.launch(
            ("matvec_batched", f"{weight.format}/{tile}", "matrix"),
            (-(-count // tile), -(-taken // height)),
            *(held.weights, held.halves, held.scales, DevicePointer(y.address + 4 * first)),
            *(taken, rows, stride, count),
        )
