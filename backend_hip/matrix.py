"""Products on the matrix unit (path `matrix`): activations as halves, and the block shape by size.

Declared roundings, which reference/half.py repeats: an activation row is scaled by a power of two
and rounded to float16. A weight is the file's float32 value rounded to float16, but exact where few
columns meet a K format, whose integers and scales are exact as halves (packed.py). Products are
exact, sums float32 in an order that the unit does not tell.
"""

from backend_hip import packed
from backend_hip.dispatch import Kernels
from backend_hip.half_columns import TALLEST, HalfColumns, padded
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import HALVES_TILES, MATRIX_TILES, runs_packed, tiles_of
from backend_hip.weights import DeviceTensor

MATRIX_CHUNK = 1024  # prompt tokens per flow
# Weight rows of a block by its columns. Blocks of up to 32 columns split K over their waves.
HEIGHTS = {16: 32, 32: 32, 64: 64, 96: 128, 128: 128}
UNITS_PER_BLOCK = 16 * 256  # elements that a block of kernels/weights_to_half.hip takes
assert tuple(HEIGHTS) == MATRIX_TILES
assert max(HEIGHTS.values()) == TALLEST

# Multiprocessors of an H200, and by tile how long 1, 2, ... blocks take that one holds at once, as
# far as they fit, in microseconds for 4,096 elements of K. Other architectures are not measured.
MULTIPROCESSORS = 132
TURNS = {64: (23, 33, 46, 61), 96: (60, 85, 116), 128: (65, 88)}
assert tuple(TURNS) == HALVES_TILES


def choose_tile(form: str, rows: int, count: int) -> int:
    """Columns of a block for `count` activation columns and `rows` weight rows: one of the tiles.

    Up to 32 columns a product is limited by reading weights, above by the matrix unit: there the
    tile that leaves least of the device idle, in the last turn of blocks or behind the last column.
    """
    for tile in tiles_of(form):
        if count <= tile and tile not in HALVES_TILES:
            return tile

    def cost(tile: int) -> int:
        blocks = -(-rows // HEIGHTS[tile]) * -(-count // tile)
        turns, rest = divmod(-(-blocks // MULTIPROCESSORS), len(TURNS[tile]))
        return turns * TURNS[tile][-1] + (TURNS[tile][rest - 1] if rest else 0)

    return min(HALVES_TILES, key=cost)


def default_chunk(path: str, max_cols: int) -> int:
    """Prompt tokens per flow where none were asked for."""
    return MATRIX_CHUNK if path == "matrix" else max_cols


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
    if tile is None and runs_packed(weight.format, count):
        if not (same_input and held.holds == ("packed", count, columns)):
            packed.pack(kernels, held, x, count, columns)
        packed.multiply_one(kernels, held, weight, y, count)
        return
    tile = tile or choose_tile(weight.format, rows, count)
    stride, needed = padded(columns), ("halves", count, columns)
    if not (same_input and held.holds == needed):
        to_half = ("to_half", "", "any")
        kernels.launch(to_half, (count, 1), x, held.halves, held.scales, columns, stride)
    held.holds = needed
    if tile in HALVES_TILES:
        _multiply_halves(kernels, held, weight, y, count, tile)
        return
    kernels.launch(
        ("matvec_batched", f"{weight.format}/{tile}", "matrix"),
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
