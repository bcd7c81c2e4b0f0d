"""The matrix unit's own speed: one launch that only multiplies fragments held in registers.

No engine launches this kernel, so the registry has no row of it.
"""

import numpy as np
from numpy.typing import NDArray

from backend_hip.compile import KernelSource, build
from backend_hip.device import Buffer, Device, Kernel, Module
from backend_hip.wave import WAVE

_BLOCK = 256
_CHAINS = 8  # matrix_rate.hip
_BLOCKS_PER_UNIT = 8  # more than fit at once, so that no unit waits for the last one
_PRODUCT_FLOPS = 2 * 16**3


class MatrixLoop:
    """`rounds` times eight products a wave; leaving the block frees what it holds."""

    def __init__(self, device: Device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._blocks = device.compute_units * _BLOCKS_PER_UNIT
        source = KernelSource("matrix_rate.hip", (("SIMT_BLOCK", _BLOCK), ("SIMT_WAVE", WAVE)))
        self._module = Module(build(device, [source])[source], source.name)
        self._kernel = Kernel(self._module, "matrix_rate", "Pi", _BLOCK)
        self._sums = Buffer(device, self._blocks * _BLOCK * 4, "matrix sums")

    @property
    def flops(self) -> float:
        """Of one `run`; a multiply-add is two."""
        waves = self._blocks * (_BLOCK // WAVE)
        return float(waves * self._rounds * _CHAINS * _PRODUCT_FLOPS)

    def run(self) -> None:
        """Queues one launch."""
        self._kernel.launch(self._device.stream, (self._blocks, 1), self._sums, self._rounds)

    def sums(self) -> NDArray[np.float32]:
        """What the last `run` left: the results of each thread, added."""
        return self._sums.download((self._blocks * _BLOCK,), np.float32)

    def close(self) -> None:
        """Frees all device memory."""
        self._device.stream.synchronise()
        self._sums.free()
        self._module.unload()
