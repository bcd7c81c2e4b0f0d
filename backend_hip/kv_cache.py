"""The KV cache in device memory: the layout of kernels/kv_type.h, seen from the host."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device
from backend_hip.kv_types import KV_TYPES, KVType
from reference.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class CacheTensor:
    """Keys or values of one layer: `rows` positions of (heads, size), then the scales of all of
    them, (heads, rows, blocks of a head)."""

    buffer: Buffer
    kind: KVType
    rows: int
    heads: int
    size: int

    @property
    def blocks(self) -> int:
        """Scales of a head at one position; 0 for types without."""
        return self.size // self.kind.block_elements if self.kind.scale_nbytes else 0

    def regions(self, start: int, count: int) -> list[tuple[int, int]]:
        """(offset, nbytes) of the elements of `count` positions, then of each head's scales."""
        row_nbytes = self.heads * self.size * self.kind.dtype.itemsize
        found = [(start * row_nbytes, count * row_nbytes)]
        scale_nbytes = self.blocks * self.kind.scale_nbytes
        for head in range(self.heads if self.blocks else 0):
            first = self.rows * row_nbytes + (head * self.rows + start) * scale_nbytes
            found.append((first, count * scale_nbytes))
        return found

    def read(self, start: int, count: int) -> tuple[NDArray[Any], NDArray[np.float16]]:
        """Elements (count, heads, size) and scales (count, heads, blocks)."""
        (elements, _), *scales = self.regions(start, count)
        shape = (count, self.heads, self.size)
        held = [self.buffer.download((count, self.blocks), np.float16, at) for at, _ in scales]
        return (
            self.buffer.download(shape, self.kind.dtype, elements),
            np.stack(held, axis=1) if held else np.zeros((count, self.heads, 0), np.float16),
        )


class DeviceCache:
    """Keys and values of every layer that owns some, a sequence's positions one after another."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        types: tuple[str, str],
        context: int,
        sequences: int = 1,
    ) -> None:
        self.context_length = context
        key_type, value_type = (KV_TYPES[name] for name in types)
        rows = sequences * context
        self.tensors = {
            layer.index: (
                _tensor(device, layer, key_type, rows),
                _tensor(device, layer, value_type, rows),
            )
            for layer in spec.layers
            if layer.owns_kv
        }
        self.keys = {index: keys.buffer for index, (keys, _) in self.tensors.items()}
        self.values = {index: values.buffer for index, (_, values) in self.tensors.items()}

    def start(self, sequence: int) -> int:
        """The cache row that holds position 0 of a sequence."""
        return sequence * self.context_length

    def contents(
        self, layer: int, count: int, sequence: int = 0
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of a sequence's first `count` keys and values of a layer, each (count, KVH, D): in
        storage type, or as the float32 values that they stand for where the type has scales."""
        keys, values = (
            dequantised(*tensor.read(self.start(sequence), count)) for tensor in self.tensors[layer]
        )
        return keys, values

    def raw(self, layer: int, count: int, sequence: int = 0) -> tuple[bytes, bytes]:
        """The same keys and values as they are stored: all elements, then all scales."""
        keys, values = (
            b"".join(part.tobytes() for part in tensor.read(self.start(sequence), count))
            for tensor in self.tensors[layer]
        )
        return keys, values

    def poison(self, keep: int = 0, sequence: int = 0) -> None:
        """Overwrites a sequence after its first `keep` positions, so that nothing stale is read."""
        start, count = self.start(sequence) + keep, self.context_length - keep
        for tensor in (tensor for pair in self.tensors.values() for tensor in pair):
            for offset_nbytes, nbytes in tensor.regions(start, count):
                tensor.buffer.poison(offset_nbytes, nbytes)

    def free(self) -> None:
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer.free()


def packed_blocks(elements: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """What CacheTensor.read gives as gguf packs it: (count, KVH, bytes of a head), each block's
    scale before its elements."""
    parts = (scales[..., None].view(np.uint8), elements.view(np.uint8).reshape(*scales.shape, -1))
    return np.concatenate(parts, axis=-1).reshape(*scales.shape[:2], -1)


def _tensor(device: Device, layer: LayerSpec, kind: KVType, rows: int) -> CacheTensor:
    width = layer.head_count_kv * layer.head_size
    buffer = Buffer(device, rows * kind.row_nbytes(width), f"KV cache of layer {layer.index}")
    return CacheTensor(buffer, kind, rows, layer.head_count_kv, layer.head_size)


def dequantised(elements: NDArray[Any], scales: NDArray[np.float16]) -> NDArray[Any]:
    """What CacheTensor.read gives as values: float32 where there are scales."""
    if not scales.shape[-1]:
        return elements
    blocks = elements.reshape(*scales.shape, -1).astype(np.float32)
    with np.errstate(invalid="ignore"):  # an infinite scale marks a block that can't be stored
        values: NDArray[Any] = blocks * scales[..., None].astype(np.float32)
    return values.reshape(elements.shape)
