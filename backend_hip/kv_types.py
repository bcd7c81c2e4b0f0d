"""Storage types of the KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KVType:
    """A storage type of the KV cache, as kernels/kv_type.h knows it under `code`.

    Elements of `dtype`; with `block_elements` above 1 each block of that many along the head has a
    scale of `scale_nbytes` beside them.
    """

    code: int
    dtype: np.dtype[Any]
    block_elements: int = 1
    scale_nbytes: int = 0

    def row_nbytes(self, width: int) -> int:
        """Of one position's `width` elements, scales included."""
        return width * self.dtype.itemsize + width // self.block_elements * self.scale_nbytes


# The one place to add a type: here, with its Storage in kernels/kv_type.h.
KV_TYPES: Mapping[str, KVType] = {
    "f32": KVType(0, np.dtype(np.float32)),
    "f16": KVType(1, np.dtype(np.float16)),
    "q8_0": KVType(2, np.dtype(np.int8), block_elements=32, scale_nbytes=2),
}
