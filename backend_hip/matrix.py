"""Products on the matrix unit (path `matrix`): activations as halves, and the block shape by size.

Declared roundings, which reference/half.py repeats: an activation row is scaled by a power of two
and rounded to float16. A weight is the file's float32 value rounded to float16, but exact where up
to 16 columns meet a K format, whose integers and scales are exact as halves. Products are exact,
sums float32 in an order that the unit does not tell.
"""

from collections.abc import Sequence

from backend_hip.device import Buffer, Device
from backend_hip.dispatch import Kernels
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import (
    MATRIX_TILES,
    PACKED_FORMATS,
    PACKED_MOST,
    PACKED_TILE,
    Key,
    runs_packed,
)
from backend_hip.tuning import shape_of
from backend_hip.weights import DeviceTensor
from reference.model.weights import Weights

MATRIX_CHUNK = 512  # prompt tokens per flow
STEP = 64  # elements of K that the kernels take at once; rows of halves are padded to multiples
NARROW_ROWS = 32  # weight rows of a block whose waves split K
NARROW = (16, 32)  # columns of such a block; wider ones are as many rows high as columns wide
WIDE = (64, 128)
PACKED_ROWS = 128  # weight rows of a block of kernels/matvec_packed.hip
SUPERBLOCK = 256  # elements of K there
PACKED_NBYTES = 12288  # of PACKED_TILE columns of a superblock, kernels/packed.h
assert (*NARROW, *WIDE) == MATRIX_TILES

# Blocks that fill the device (132 multiprocessors of an H200 with one each): a product that makes
# fewer with the widest block takes the next narrower one. Not measured per architecture yet.
FILL = 132


def choose_tile(form: str, rows: int, count: int) -> int:
    """Columns of a block for `count` activation columns and `rows` weight rows: one of the tiles.

    Up to 32 columns a product is limited by reading weights, above by the matrix unit.
    """
    for tile in NARROW:
        if count <= tile and form not in PACKED_FORMATS:
            return tile
    narrower, widest = WIDE
    blocks = -(-rows // widest) * -(-count // widest)
    return widest if count > narrower and blocks >= FILL else narrower


class HalfColumns:
    """Device memory for products' activations: (rows, padded length) halves, or up to PACKED_MOST
    rows packed as kernels/packed.h says; a float32 scale a row; the parts of results.

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
        # Cut products have fewer blocks of PACKED_ROWS than this in all parts together.
        most = shape_of(device.architecture, "products_packed")["BLOCKS"] * PACKED_ROWS
        self.parts = Buffer(device, packed_rows * max(most, widest) * 4, "parts of results")

    def free(self) -> None:
        for buffer in (self.halves, self.packed, self.scales, self.parts):
            buffer.free()


def parts_of_k(architecture: str, rows: Sequence[int], columns: int) -> int:
    """Into how many parts a launch of packed products cuts K: as many as fill the device."""
    shape = shape_of(architecture, "products_packed")
    blocks = _packed_blocks(rows)
    return max(1, min(shape["BLOCKS"] // blocks, shape["PARTS"], columns // SUPERBLOCK))


def _packed_blocks(rows: Sequence[int]) -> int:
    return sum(-(-each // PACKED_ROWS) for each in rows)


def default_chunk(path: str, max_cols: int) -> int:
    """Prompt tokens per flow where none were asked for."""
    return MATRIX_CHUNK if path == "matrix" else max_cols


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
            pack(kernels, held, x, count, columns)
        multiply_held(kernels, held, weight, y, count)
        return
    tile = tile or choose_tile(weight.format, rows, count)
    key = ("matvec_batched", f"{weight.format}/{tile}", "matrix")
    stride, needed = padded(columns), ("halves", count, columns)
    if not (same_input and held.holds == needed):
        to_half = ("to_half", "", "any")
        kernels.launch(to_half, (count, 1), x, held.halves, held.scales, columns, stride)
    held.holds = needed
    height = NARROW_ROWS if tile in NARROW else tile
    kernels.launch(
        key,
        (-(-rows // height), -(-count // tile)),
        *(weight.buffer, held.halves, held.scales, y, rows, columns, stride, count),
    )


def pack(
    kernels: Kernels,
    held: HalfColumns,
    x: DevicePointer,
    count: int,
    columns: int,
) -> None:
    """Packs x (count, columns) for multiply_packed; at most PACKED_MOST rows."""
    if count > PACKED_MOST:
        raise ValueError(f"matrix: count is {count}, expected at most {PACKED_MOST}, what is held")
    kernels.launch(("to_packed", "", "any"), (count, 1), x, held.packed, held.scales, columns)
    held.holds = ("packed", count, columns)


def multiply_held(
    kernels: Kernels, held: HalfColumns, weight: DeviceTensor, y: DevicePointer, count: int
) -> None:
    """y (count, rows) = what is packed times W^T."""
    rows, _ = weight.shape
    parts = multiply_packed(kernels, held, [weight], count, y)
    if parts > 1:
        sum_parts = ("sum_parts", "", "any")
        grid = (-(-count * rows // kernels.block(sum_parts)), 1)
        kernels.launch(sum_parts, grid, held.parts, y, count * rows, parts)


def packed_key(formats: Sequence[str]) -> Key:
    """The row for weights that share a launch: up to three, all but the third of one format."""
    return ("products_packed", f"{formats[0]},{formats[-1]}", "matrix")


def multiply_packed(
    kernels: Kernels,
    held: HalfColumns,
    weights: Sequence[DeviceTensor],
    count: int,
    y: DevicePointer | None = None,
) -> int:
    """What is packed times one to three matrices with rows of one length, in one launch.

    Leaves the returned number of parts (parts, count, rows of all) in held.parts; where it is one
    and `y` is given, y (count, rows of all) has the result instead.
    """
    rows = [weight.shape[0] for weight in weights]
    columns = weights[0].shape[1]
    if held.holds != ("packed", count, columns):
        raise ValueError(
            f"matrix: activations held are {held.holds}, expected {count} packed rows of {columns}"
        )
    parts = parts_of_k(kernels.device.architecture, rows, columns)
    buffers = [weight.buffer for weight in weights]
    # The last of two is the kernel's third, which alone may have another format.
    missing = 3 - len(weights)
    rows[1:1], buffers[1:1] = [0] * missing, buffers[:1] * missing
    grid = (_packed_blocks(rows), parts * -(-count // PACKED_TILE))
    to = held.parts if parts > 1 or y is None else y
    kernels.launch(
        packed_key([weight.format for weight in weights]),
        grid,
        *(*buffers, held.packed, held.scales, to, *rows, columns, count, parts),
    )
    return parts
