"""Device memory that a running engine owns: KV cache, RoPE tables, step input."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device, PinnedArray
from reference.model.spec import LayerSpec, ModelSpec, RopeSpec

_STORAGE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
}

# Layout of kernels/flow.h.
_POSITION, _STAMP, _TOKENS = 0, 1, 4


class DeviceCache:
    """Keys and values of one sequence, contiguous: per layer (context, KVH, D) in storage type."""

    def __init__(self, spec: ModelSpec, device: Device, types: tuple[str, str], context: int):
        self._spec = spec
        self._types = tuple(_STORAGE[name] for name in types)
        self.context_length = context
        self.keys, self.values = (
            {
                layer.index: Buffer(
                    device,
                    context * layer.head_count_kv * layer.head_size * dtype.itemsize,
                    f"KV cache of layer {layer.index}",
                )
                for layer in spec.layers
                if layer.owns_kv
            }
            for dtype in self._types
        )

    def contents(self, layer: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of the first `count` keys and values of one layer, each (count, KVH, D)."""
        shape = (count, self._spec.layers[layer].head_count_kv, self._spec.layers[layer].head_size)
        key_type, value_type = self._types
        return (
            self.keys[layer].download(shape, key_type),
            self.values[layer].download(shape, value_type),
        )

    def poison(self, keep: int = 0) -> None:
        """Overwrites everything after the first `keep` positions, so that nothing stale is read."""
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer.poison(keep * (buffer.nbytes // self.context_length))

    def free(self) -> None:
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer.free()


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


class StepInput:
    """Position, stamp and tokens of one flow: pinned on the host, copied by the flow."""

    def __init__(self, device: Device, max_tokens: int) -> None:
        self._device = device
        self._host = PinnedArray((_TOKENS + max_tokens,), np.int32, "step input")
        self._host.array[:] = -1
        self.buffer = Buffer(device, self._host.nbytes, "step input")

    def write(self, position: int, stamp: int, tokens: Sequence[int]) -> None:
        """Sets the host side. Only when no copy from it is in flight."""
        self._host.array[_POSITION] = position
        self._host.array[_STAMP] = stamp
        self._host.array[_TOKENS : _TOKENS + len(tokens)] = tokens

    def queue_copy(self, count: int) -> None:
        """Queues the copy of a flow with `count` tokens to the device."""
        nbytes = (_TOKENS + count) * 4
        self._device.stream.copy(self.buffer.address, self._host.address, nbytes, to_device=True)

    def fed_token(self, index: int) -> int:
        """The token id at place `index` as the device holds it."""
        return int(self.buffer.download((1,), np.int32, (_TOKENS + index) * 4)[0])

    def free(self) -> None:
        self._host.free()
        self.buffer.free()
