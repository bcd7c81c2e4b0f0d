"""Dequantised weights: kept where they fit into memory, else made anew at each use, in row blocks.

Both ways give the same values, so logits differ by no more than the rounding of a product that is
cut into blocks of outputs.
"""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference import ops
from reference.dequant import dequantise
from reference.half import half_weights
from reference.model.errors import InputError
from reference.model.weights import Tensor, Weights
from reference.ops import Array

WeightsMode = Literal["kept", "streamed"]
DenseCache = dict[str, NDArray[np.float32]]

# Of the memory that is available; the rest is for activations, the KV cache and other programs.
MEMORY_SHARE = 0.8
STREAM_ELEMENTS = 1 << 22  # of one block of rows: 16 MiB
_MEMINFO = Path("/proc/meminfo")


class DenseWeights:
    """The float32 matrices of a model. `mode` says whether they are kept or streamed.

    What `kept` holds is used in either mode; only in mode "kept" is it added to.
    """

    def __init__(self, weights: Weights, kept: DenseCache, budget_nbytes: int | None) -> None:
        """`budget_nbytes`: what kept weights may take; None: a share of the available memory."""
        if budget_nbytes is None:
            budget_nbytes = int(MEMORY_SHARE * available_memory_nbytes())
        if budget_nbytes < 0:
            raise InputError(f"reference: dense budget is {budget_nbytes} bytes, expected >= 0")
        held = sum(values.nbytes for values in kept.values())
        fits = dense_nbytes(weights) - held <= budget_nbytes
        self.mode: WeightsMode = "kept" if fits else "streamed"
        self._kept = kept

    def linear(self, x: Array, tensor: Tensor, *, half: bool = False) -> Array:
        """(T, K) -> (T, N): x . W^T with the matrix `tensor`, (N, K), its values rounded to float16
        where `half` says so."""
        rounded = half_weights if half else _as_they_are
        if self.mode == "kept" or tensor.name in self._kept:
            return ops.linear(x, rounded(self._rows(tensor.name, tensor, tensor.raw)))
        count, columns = tensor.shape
        y = np.empty((*x.shape[:-1], count), dtype=x.dtype)
        step = max(1, STREAM_ELEMENTS // columns)
        for start in range(0, count, step):
            part = dequantise(tensor.format, tensor.raw[start : start + step], np.float32)
            y[..., start : start + step] = ops.linear(x, rounded(part))
        return y

    def expert(self, tensor: Tensor, index: int) -> NDArray[np.float32]:
        """One expert's matrix (N, K) of a stack (experts, N, K)."""
        return self._rows(f"{tensor.name}[{index}]", tensor, tensor.raw[index])

    def _rows(self, name: str, tensor: Tensor, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        found = self._kept.get(name)
        if found is None:
            found = dequantise(tensor.format, raw, np.float32)
            if self.mode == "kept":
                self._kept[name] = found
        return found


def _as_they_are(weight: Array) -> Array:
    return weight


def dense_nbytes(weights: Weights) -> int:
    """What every matrix that a product reads takes in float32, each counted once."""
    tensors = {tensor.name: tensor for tensor in weights.matrices()}
    for layer in weights.layers:
        tensors |= {tensor.name: tensor for tensor in layer.values() if len(tensor.shape) > 2}
    return sum(4 * int(np.prod(tensor.shape, dtype=np.int64)) for tensor in tensors.values())


def available_memory_nbytes() -> int:
    """Memory that can be had without swapping: MemAvailable, else half of the physical memory.

    Raises InputError where the system says neither.
    """
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        raise InputError(
            "reference: this system does not say how much memory is available, expected a dense "
            "budget in bytes"
        ) from None
