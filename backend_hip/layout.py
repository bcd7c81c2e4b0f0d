"""How blocks of weights lie in device memory: as in the file, or padded to 16 bytes.

Kernels read weights 16 bytes a lane, which must begin at multiples of 16. A Q6_K block has 210
bytes, so most begin elsewhere and each read becomes five and a shift; padded to 224 it costs 6.7 %
more bytes and none of that. Blocks of the formats with 32 elements stay as they are: the padding
would be a third of them or more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.model.quant import FORMATS, BlockFormat

ALIGNMENT = 16
_SUPER_BLOCK = 256

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockLayout:
    """Bytes of a block in the file and on the device."""

    stored_nbytes: int
    device_nbytes: int

    @property
    def padded(self) -> bool:
        return self.device_nbytes != self.stored_nbytes

    def device_size(self, stored_nbytes: int) -> int:
        """Bytes on the device of what takes `stored_nbytes`, whole blocks, in the file."""
        return stored_nbytes // self.stored_nbytes * self.device_nbytes


def layout_of(block_format: BlockFormat) -> BlockLayout:
    """The layout of a format's blocks; kernels/formats.h has the same structs."""
    stored = block_format.block_nbytes
    aligned = -(-stored // ALIGNMENT) * ALIGNMENT
    return BlockLayout(stored, aligned if block_format.block_elements == _SUPER_BLOCK else stored)


def copy_blocks(target: Bytes, source: Bytes, layout: BlockLayout) -> None:
    """Blocks of the file, flat, to where the device has them; what pads them is left as it is."""
    blocks = target.reshape(-1, layout.device_nbytes)[:, : layout.stored_nbytes]
    np.copyto(blocks, source.reshape(-1, layout.stored_nbytes))


def on_device(form: str, raw: Bytes) -> Bytes:
    """A whole tensor's blocks as the device has them, flat; the padding is zero."""
    layout = layout_of(FORMATS[form])
    if not layout.padded:
        return np.ascontiguousarray(raw).reshape(-1)
    placed = np.zeros(layout.device_size(raw.nbytes), dtype=np.uint8)
    copy_blocks(placed, np.ascontiguousarray(raw).reshape(-1), layout)
    return placed
