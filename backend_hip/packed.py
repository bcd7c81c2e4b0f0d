"""Packed products of path matrix: a few columns times weights of K formats as they are in the file.

Up to three matrices share a launch, and K is cut into parts until there are enough blocks to fill
the device (kernels/matvec_packed.hip).
"""

from collections.abc import Sequence

from backend_hip.dispatch import Kernels
from backend_hip.half_columns import SUPERBLOCK, TALLEST, HalfColumns
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import PACKED_MOST, PACKED_TILE, Key
from backend_hip.tuning import shape_of
from backend_hip.weights import DeviceTensor

ROWS = TALLEST  # weight rows of a block


def parts_of_k(architecture: str, rows: Sequence[int], columns: int) -> int:
    """Into how many parts a launch cuts K: what fills the device, two where one falls short."""
    shape, blocks = shape_of(architecture, "matvec_batched_packed"), _blocks(rows)
    wanted = shape["BLOCKS"] // blocks
    if wanted == 1 and blocks < shape["BLOCKS"]:
        wanted = 2
    return max(1, min(wanted, shape["PARTS"], columns // SUPERBLOCK))


def _blocks(rows: Sequence[int]) -> int:
    return sum(-(-each // ROWS) for each in rows)


def pack(
    kernels: Kernels,
    held: HalfColumns,
    x: DevicePointer,
    count: int,
    columns: int,
) -> None:
    """Packs x (count, columns) for `multiply`; at most PACKED_MOST rows."""
    if count > PACKED_MOST:
        raise ValueError(f"packed: count is {count}, expected at most {PACKED_MOST}, what is held")
    kernels.launch(("to_packed", "", "any"), (count, 1), x, held.packed, held.scales, columns)
    held.holds = ("packed", count, columns)


def multiply_one(
    kernels: Kernels, held: HalfColumns, weight: DeviceTensor, y: DevicePointer, count: int
) -> None:
    """y (count, rows) = what is packed times W^T."""
    rows, _ = weight.shape
    parts = multiply(kernels, held, [weight], count, y)
    if parts > 1:
        sum_parts = ("sum_parts", "", "any")
        grid = (-(-count * rows // kernels.block(sum_parts)), 1)
        kernels.launch(sum_parts, grid, held.parts, y, count * rows, parts)


def product_key(formats: Sequence[str]) -> Key:
    """The row for weights that share a launch: up to three, all but the third of one format."""
    return ("matvec_batched_packed", f"{formats[0]},{formats[-1]}", "matrix")


def multiply(
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
            f"packed: activations held are {held.holds}, expected {count} packed rows of {columns}"
        )
    parts = parts_of_k(kernels.device.architecture, rows, columns)
    buffers = [weight.buffer for weight in weights]
    # The last of two is the kernel's third, which alone may have another format.
    missing = 3 - len(weights)
    rows[1:1], buffers[1:1] = [0] * missing, buffers[:1] * missing
    grid = (_blocks(rows), parts * -(-count // PACKED_TILE))
    to = held.parts if parts > 1 or y is None else y
    kernels.launch(
        product_key([weight.format for weight in weights]),
        grid,
        *(*buffers, held.packed, held.scales, to, *rows, columns, count, parts),
    )
    return parts
