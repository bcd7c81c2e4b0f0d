"""What an engine accepts: checked before anything is compiled or allocated."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import MAX_COLS_LIMIT
from reference.model.errors import InputError, Unsupported
from reference.model.spec import ModelSpec

MAX_SEQUENCES = MAX_COLS_LIMIT
DEFAULT_CONTEXT = 4096  # positions, where the model allows more; bounds the cache's memory


def check_options(
    spec: ModelSpec,
    max_cols: int,
    chunk: int,
    sequences: int,
    context_length: int | None,
    kv_types: tuple[str, str],
) -> None:
    """Raises InputError for a number out of range, Unsupported for a KV type that no kernel has."""
    if not 1 <= max_cols <= MAX_COLS_LIMIT:
        raise InputError(f"engine: max-cols is {max_cols}, expected 1 to {MAX_COLS_LIMIT}")
    if chunk < 1:
        raise InputError(f"engine: chunk is {chunk} tokens, expected at least 1")
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise InputError(
            f"engine: sequences is {sequences}, expected 1 to {MAX_SEQUENCES} because a decode "
            "step's rows are the columns of its products"
        )
    if context_length is not None and not 1 <= context_length <= spec.context_length:
        raise InputError(
            f"engine: context length is {context_length}, expected 1 to {spec.context_length} "
            "because the model was made for that many positions"
        )
    for name, kind in zip(("kv-type-k", "kv-type-v"), kv_types, strict=True):
        if kind not in KV_TYPES:
            raise Unsupported(f"engine: {name} is {kind}; supported: {', '.join(KV_TYPES)}")


def check_logits(logits: NDArray[Any], vocabulary: int, sequences: int) -> None:
    """Raises InputError for what is not float32 (rows, V) of at most so many sequences."""
    fits = logits.ndim == 2 and logits.shape[1] == vocabulary and 1 <= len(logits) <= sequences
    if not fits or logits.dtype != np.float32:
        raise InputError(
            f"engine: logits are {logits.dtype} {logits.shape}, expected float32 (rows, "
            f"{vocabulary}) of 1 to {sequences} rows because the engine holds as many sequences"
        )
