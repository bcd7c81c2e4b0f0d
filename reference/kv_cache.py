"""Keys and values of past tokens, held in a storage type and rounded to it on write."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.model.errors import InputError, Unsupported
from reference.model.spec import ModelSpec

STORAGE: Mapping[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}


def storage_type(argument: str, name: str) -> np.dtype[Any]:
    """The NumPy dtype of a KV type name; Unsupported for one that does not exist here yet."""
    if name not in STORAGE:
        raise Unsupported(f"kv cache: {argument} is {name}; supported: {', '.join(STORAGE)}")
    return np.dtype(STORAGE[name])


class KVCache:
    """One sequence's cache; `position` is the number of tokens held and has no other owner."""

    def __init__(
        self, spec: ModelSpec, kv_type_k: str, kv_type_v: str, context_length: int
    ) -> None:
        if context_length < 1:
            raise InputError(f"kv cache: context length is {context_length}, expected at least 1")
        self.context_length = context_length
        self.position = 0
        type_k = storage_type("kv-type-k", kv_type_k)
        type_v = storage_type("kv-type-v", kv_type_v)
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
        for store, new in ((self._keys, k), (self._values, v)):
            if end > len(store[layer]):
                grown = min(self.context_length, max(end, 2 * len(store[layer]), 64))
                larger = np.zeros((grown, *new.shape[1:]), dtype=store[layer].dtype)
                larger[: self.position] = store[layer][: self.position]
                store[layer] = larger
            store[layer][self.position : end] = new.astype(store[layer].dtype)

    def contents(self, layer: int, count: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Views of the first `count` (default: `position`) keys and values of one layer."""
        count = self.position if count is None else count
        return self._keys[layer][:count], self._values[layer][:count]
