"""Weights on the device, by role, in the file's own bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device, Progress
from reference.model.weights import Tensor, Weights


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor's raw blocks in device memory; `shape` is (rows, columns) or (length,)."""

    name: str
    format: str
    shape: tuple[int, ...]
    buffer: Buffer

    def as_row(self) -> "DeviceTensor":
        """A vector as a matrix of one row."""
        return DeviceTensor(self.name, self.format, (1, *self.shape), self.buffer)


class DeviceWeights:
    """All tensors of a model uploaded once; a tied output projection shares its buffer."""

    def __init__(
        self, weights: Weights, device: Device, *, progress: Progress | None = None
    ) -> None:
        self._device = device
        self._buffers: list[Buffer] = []
        total = sum(
            t.raw.nbytes for group in (weights.top, *weights.layers) for t in group.values()
        )
        if progress is not None:
            progress(f"uploading {total / 2**20:.0f} MiB of weights")

        def upload(tensors: Mapping[str, Tensor]) -> dict[str, DeviceTensor]:
            return {role: self._upload(device, tensor) for role, tensor in tensors.items()}

        self.top = upload(weights.top)
        self.layers = tuple(upload(layer) for layer in weights.layers)

    def _upload(self, device: Device, tensor: Tensor) -> DeviceTensor:
        buffer = Buffer(device, tensor.raw.nbytes, tensor.name)
        self._buffers.append(buffer)
        buffer.upload(np.ascontiguousarray(tensor.raw))  # a part of a fused tensor is a view
        return DeviceTensor(tensor.name, tensor.format.name, tensor.shape, buffer)

    def vector(self, name: str, values: NDArray[np.float32]) -> DeviceTensor:
        """A float32 vector that the file does not hold in this form, (length,)."""
        buffer = Buffer(self._device, values.nbytes, name)
        self._buffers.append(buffer)
        buffer.upload(values)
        return DeviceTensor(name, "F32", values.shape, buffer)

    @property
    def lm_head(self) -> DeviceTensor:
        return self.top.get("output", self.top["token_embd"])

    def free(self) -> None:
        while self._buffers:
            self._buffers.pop().free()
