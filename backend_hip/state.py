"""Device memory that a running engine owns beside its cache: RoPE tables and the step input."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device, PinnedArray
from reference.model.spec import LayerSpec, ModelSpec, RopeSpec

# Layout of kernels/flow.h: a header, then four fields a row.
_STAMP, _ROWS, _FIELDS = 0, 4, 4
_TOKEN, _POSITION, _CACHE, _SEQUENCE = range(_FIELDS)


class RopeTables:
    """cos and sin of every position for each distinct RoPE, float32 (context, n/2).

    Computed in float64 here, apart from the reference's, so that neither hides the other's fault.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        factors: NDArray[np.float32] | None,
        context: int,
    ):
        self._tables: dict[tuple[RopeSpec, bool], tuple[Buffer, Buffer]] = {}
        position = np.arange(context, dtype=np.float64)
        for layer in spec.layers:
            key = self._key(layer)
            if layer.delta_net is not None or key in self._tables:
                continue
            # `rope_freqs` belongs to the layers that do not slide.
            own = factors if layer.window is None else None
            angle = np.outer(position, layer.rope.frequencies(own))
            self._tables[key] = (
                _upload(device, np.cos(angle) * layer.rope.magnitude, "RoPE cosines"),
                _upload(device, np.sin(angle) * layer.rope.magnitude, "RoPE sines"),
            )

    @staticmethod
    def _key(layer: LayerSpec) -> tuple[RopeSpec, bool]:
        return layer.rope, layer.window is None

    def __getitem__(self, layer: LayerSpec) -> tuple[Buffer, Buffer]:
        return self._tables[self._key(layer)]

    def free(self) -> None:
        for pair in self._tables.values():
            for buffer in pair:
                buffer.free()


def _upload(device: Device, values: NDArray[np.float64], name: str) -> Buffer:
    table = np.ascontiguousarray(values, dtype=np.float32)
    buffer = Buffer(device, table.nbytes, name)
    buffer.upload(table)
    return buffer


@dataclass(frozen=True)
class FlowRow:
    """One token of a flow: its place in its sequence, and where the sequence's cache begins."""

    token: int
    position: int
    cache_start: int = 0
    sequence: int = 0


class StepInput:
    """Stamp and rows of one flow: pinned on the host, copied by the flow."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self._device = device
        self._host = PinnedArray((_ROWS + _FIELDS * max_rows,), np.int32, "step input")
        self._host.array[:] = -1
        self.buffer = Buffer(device, self._host.nbytes, "step input")

    def write(self, stamp: int, rows: Sequence[FlowRow]) -> None:
        """Sets the host side. Only when no copy from it is in flight."""
        self._host.array[_STAMP] = stamp
        fields = self._host.array[_ROWS : _ROWS + _FIELDS * len(rows)].reshape(-1, _FIELDS)
        fields[:, _TOKEN] = [row.token for row in rows]
        fields[:, _POSITION] = [row.position for row in rows]
        fields[:, _CACHE] = [row.cache_start for row in rows]
        fields[:, _SEQUENCE] = [row.sequence for row in rows]

    def queue_copy(self, count: int) -> None:
        """Queues the copy of a flow with `count` rows to the device."""
        nbytes = (_ROWS + _FIELDS * count) * 4
        self._device.stream.copy(self.buffer.address, self._host.address, nbytes, to_device=True)

    def fed_token(self, index: int) -> int:
        """The token id of row `index` as the device holds it."""
        place = _ROWS + _FIELDS * index + _TOKEN
        return int(self.buffer.download((1,), np.int32, place * 4)[0])

    def free(self) -> None:
        self._host.free()
        self.buffer.free()
