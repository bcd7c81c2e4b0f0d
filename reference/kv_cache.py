"""Keys and values of past tokens, held in a storage type and rounded to it on write."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dequant import dequantise
from reference.model.errors import InputError, Unsupported
from reference.model.quant import FORMATS
from reference.model.spec import ModelSpec
from reference.quantise import quantise

STORAGE: Mapping[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
# Block formats that llama.cpp offers for its cache: each head's row is quantised on write. They are
# kept here as the float32 values that reading gives back.
BLOCK_STORAGE = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def stored(kind: str, values: NDArray[Any]) -> NDArray[Any]:
    """What a cache of type `kind` gives back for (..., D) values: rounded, in its NumPy dtype.

    A block that holds a value that is not finite has no scale and gives back NaN throughout. Raises
    Unsupported for an unknown type.
    """
    if kind not in STORAGE and kind not in BLOCK_STORAGE:
        known = ", ".join((*STORAGE, *BLOCK_STORAGE))
        raise Unsupported(f"kv cache: type is {kind}; supported: {known}")
    if kind in STORAGE:
        return values.astype(STORAGE[kind])
    block_format = FORMATS[kind.upper()]
    blocks = values.astype(np.float32).reshape(-1, block_format.block_elements)
    usable = np.isfinite(blocks).all(axis=1, keepdims=True)
    packed = quantise(block_format, np.where(usable, blocks, np.float32(0)))
    back = np.where(usable, dequantise(block_format, packed), np.float32(np.nan))
    return back.reshape(values.shape)


class KVCache:
    """One sequence's cache; `position` is the number of tokens held and has no other owner.

    Raises Unsupported for an unknown type and InputError where a head is no whole number of blocks.
    """

    def __init__(
        self, spec: ModelSpec, kv_type_k: str, kv_type_v: str, context_length: int
    ) -> None:
        if context_length < 1:
            raise InputError(f"kv cache: context length is {context_length}, expected at least 1")
        self.context_length = context_length
        self.position = 0
        self._kinds = (kv_type_k, kv_type_v)
        type_k, type_v = (
            _held_type(f"kv-type-{side}", kind, spec)
            for side, kind in zip("kv", self._kinds, strict=True)
        )
        shapes = {
            layer.index: (layer.head_count_kv, layer.head_size)
            for layer in spec.layers
            if layer.owns_kv
        }
        self._keys = {i: np.zeros((0, *shape), dtype=type_k) for i, shape in shapes.items()}
        self._values = {i: np.zeros((0, *shape), dtype=type_v) for i, shape in shapes.items()}

    def write(self, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Stores (T, KVH, D) keys and values at positions position.. of a layer that owns some."""
        end = self.position + len(k)
        if end > self.context_length:
            raise InputError(
                f"kv cache: token {end} does not fit, expected at most {self.context_length}"
            )
        for kind, store, new in zip(self._kinds, (self._keys, self._values), (k, v), strict=True):
            if end > len(store[layer]):
                grown = min(self.context_length, max(end, 2 * len(store[layer]), 64))
                larger = np.zeros((grown, *new.shape[1:]), dtype=store[layer].dtype)
                larger[: self.position] = store[layer][: self.position]
                store[layer] = larger
            store[layer][self.position : end] = stored(kind, new)

    def contents(self, layer: int, count: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Views of the first `count` (default: `position`) keys and values of one layer."""
        count = self.position if count is None else count
        return self._keys[layer][:count], self._values[layer][:count]


def _held_type(argument: str, kind: str, spec: ModelSpec) -> np.dtype[Any]:
    """The dtype in which a cache of type `kind` keeps what reading gives back."""
    if kind not in BLOCK_STORAGE:
        if kind not in STORAGE:
            known = ", ".join((*STORAGE, *BLOCK_STORAGE))
            raise Unsupported(f"kv cache: {argument} is {kind}; supported: {known}")
        return np.dtype(STORAGE[kind])
    length = FORMATS[kind.upper()].block_elements
    for layer in spec.layers:
        if layer.owns_kv and layer.head_size % length:
            raise InputError(
                f"kv cache: {argument} is {kind}, but layer {layer.index} has heads of "
                f"{layer.head_size}, expected a multiple of {length}"
            )
    return np.dtype(np.float32)
