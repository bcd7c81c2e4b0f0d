"""Weights on the device, by role, in the file's own blocks (layout.py: padded where that pays)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device, Progress
from backend_hip.layout import layout_of
from backend_hip.staging import Staging
from reference.model.errors import InputError
from reference.model.weights import Tensor, Weights

MIB = 2**20


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


@dataclass(frozen=True)
class LoadReport:
    """How an upload of all weights went.

    `source_wait_s` of the `elapsed_s` seconds the bus waited for bytes from the memory map: from
    disk, or from the page cache where the file had been read before.
    """

    nbytes: int
    elapsed_s: float
    source_wait_s: float

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes a second."""
        return self.nbytes / 1e9 / self.elapsed_s

    def __str__(self) -> str:
        return (
            f"weights uploaded: {self.nbytes / 2**20:.0f} MiB in {self.elapsed_s:.2f} s, "
            f"{self.gb_per_s:.1f} GB/s; {self.source_wait_s:.2f} s of it waiting for the file"
        )


class DeviceWeights:
    """All tensors of a model uploaded once; a tied output projection shares its buffer.

    `progress` gets the bytes so far and the rate, at last the whole report, kept as `loading`.
    """

    def __init__(
        self, weights: Weights, device: Device, *, progress: Progress | None = None
    ) -> None:
        self._device = device
        self._buffers: list[Buffer] = []
        report = progress or (lambda line: None)
        total = sum(
            _device_nbytes(tensor)
            for group in (weights.top, *weights.layers)
            for tensor in group.values()
        )
        started = time.perf_counter()

        def sent(nbytes: int) -> None:
            if nbytes == total:
                return  # the report follows
            rate = nbytes / 1e9 / max(time.perf_counter() - started, 1e-9)
            report(f"uploading {nbytes // MIB} of {total // MIB} MiB of weights, {rate:.1f} GB/s")

        def upload(tensors: Mapping[str, Tensor]) -> dict[str, DeviceTensor]:
            return {role: self._upload(staging, tensor) for role, tensor in tensors.items()}

        try:
            with Staging(device, total, sent) as staging:
                self.top = upload(weights.top)
                self.layers = tuple(upload(layer) for layer in weights.layers)
                staging.finish()
        except InputError:  # no room: the caller may try a smaller model in the same process
            self.free()
            raise
        elapsed_s = time.perf_counter() - started
        self.loading = LoadReport(total, elapsed_s, staging.source_wait_s)
        report(str(self.loading))

    def _upload(self, staging: Staging, tensor: Tensor) -> DeviceTensor:
        buffer = Buffer(self._device, _device_nbytes(tensor), tensor.name)
        self._buffers.append(buffer)
        # Whole tensors are used where the file is mapped; a part of a fused one may have gaps.
        staging.put(buffer, np.ascontiguousarray(tensor.raw), layout_of(tensor.format))
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


def _device_nbytes(tensor: Tensor) -> int:
    return layout_of(tensor.format).device_size(tensor.raw.nbytes)
