"""The memory's own speed: one launch that only copies, one that only reads (bandwidth.hip).

Decode mostly reads, so its limit is what `read` gives. No engine launches these kernels, so the
registry has no row of them.
"""

import numpy as np
from numpy.typing import NDArray

from backend_hip.compile import KernelSource, build
from backend_hip.device import Buffer, Device, Kernel, Module
from backend_hip.wave import WAVE
from reference.model.errors import InputError

_BLOCK = 256
_SHARE = 8  # pieces a thread, bandwidth.hip
_PIECE_NBYTES = 16
GRAIN_NBYTES = _BLOCK * _SHARE * _PIECE_NBYTES
"""What a block moves: buffers are whole multiples of it."""


class Bandwidth:
    """Two buffers of `nbytes` and the kernels over them; leaving the block frees them.

    To measure memory and not a cache, `nbytes` must be many times the last-level cache. Raises
    InputError for a size that is no multiple of GRAIN_NBYTES or does not fit.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._blocks, rest = divmod(nbytes, GRAIN_NBYTES)
        if rest or not self._blocks:
            raise InputError(
                f"bandwidth: {nbytes} bytes, expected a multiple of {GRAIN_NBYTES} because a block "
                "moves that much"
            )
        source = KernelSource("bandwidth.hip", (("SIMT_BLOCK", _BLOCK), ("SIMT_WAVE", WAVE)))
        self._module = Module(build(device, [source])[source], source.name)
        self._copy = Kernel(self._module, "copy_pieces", "PP", _BLOCK)
        self._read = Kernel(self._module, "read_pieces", "PP", _BLOCK)
        self.source = Buffer(device, nbytes, "bandwidth source")
        self.target = Buffer(device, nbytes, "bandwidth target")
        self._sums = Buffer(device, self._blocks * _BLOCK * 4, "bandwidth sums")
        self.source.clear()

    @property
    def copied_nbytes(self) -> int:
        """Bytes that one `copy` moves: read and written."""
        return 2 * self.source.nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes that one `read` moves; its sums are 1/128 of that, not counted."""
        return self.source.nbytes

    def copy(self) -> None:
        """Queues target = source."""
        self._copy.launch(self._device.stream, (self._blocks, 1), self.source, self.target)

    def read(self) -> None:
        """Queues one pass over the source."""
        self._read.launch(self._device.stream, (self._blocks, 1), self.source, self._sums)

    def sums(self) -> NDArray[np.uint32]:
        """What the last `read` left: one exclusive or a thread."""
        return self._sums.download((self._blocks * _BLOCK,), np.uint32)

    def close(self) -> None:
        """Frees all device memory."""
        self._device.stream.synchronise()
        for buffer in (self.source, self.target, self._sums):
            buffer.free()
        self._module.unload()
