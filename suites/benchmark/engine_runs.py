"""What whole rows of the benchmarks ask of an engine; single operations reach into it themselves.

A decode step's speed depends on how many tokens the caches hold and not on which: `assume` fills
them with random finite values, so that depth 6,900 costs an upload instead of a prefill.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip import Device, Engine
from backend_hip.device import Progress
from backend_hip.kv_cache import DeviceCache
from backend_hip.results import PrefillResult, StepResult
from reference.model import Model
from reference.model.errors import InputError, Unsupported

# Rows of distinct random values; the cache repeats them.
_PATTERN_NBYTES = 4 * 2**20
_SCALE = 1 / 32  # of every block, where a cache type has them


class Runner:
    """One engine, `sequences` of which the first so many advance together."""

    def __init__(
        self,
        model: Model,
        device: Device,
        *,
        sequences: int = 1,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.model, self.device, self.sequences = model, device, sequences
        self._types = (options.get("kv_type_k", "f16"), options.get("kv_type_v", "f16"))
        self.engine = Engine(model, device, sequences=sequences, progress=progress, **options)

    def assume(self, length: int, seed: int = 1) -> None:
        """Every sequence holds `length` tokens that were never fed: random finite keys and values.

        For speed only; what the engine then says is about nothing. Raises InputError where the
        cache has not that many positions.
        """
        room = self.engine.context_length
        if not 0 <= length < room:
            raise InputError(f"benchmark: context is {length}, expected 0 to {room - 1}")
        self.engine.reset()
        fill_cache(self.engine._cache, self._types, self.sequences, length, seed)
        self.place(length)

    def place(self, length: int) -> None:
        """Every sequence is at position `length` of what its cache holds, whatever that is."""
        self.engine._sequences.positions[:] = [length] * self.sequences

    def step(self, tokens: Sequence[int]) -> list[int]:
        """One token for each of the first len(tokens) sequences, as production decodes."""
        return self.step_of(tokens, range(len(tokens)))

    def step_of(self, tokens: Sequence[int], sequences: Sequence[int]) -> list[int]:
        """One token for each named sequence."""
        return self.engine.step_batch(tokens, sequences)

    def inspect(self, tokens: Sequence[int], sequences: Sequence[int]) -> list[StepResult]:
        """The same with everything read back; `routes` are those of the whole step."""
        return self.engine.decode_batch(tokens, sequences)

    def prefill(self, mode: str, tokens: Sequence[int]) -> PrefillResult:
        """Feeds a prompt to sequence 0."""
        if mode == "batched":
            return self.engine.prefill_batched(tokens)
        return self.engine.prefill_per_token(tokens)

    def close(self) -> None:
        self.engine.close()


def fill_cache(
    cache: DeviceCache, types: tuple[str, str], sequences: int, length: int, seed: int
) -> None:
    """Random finite values at the first `length` positions of every sequence. Each gets values of
    its own: the same pattern, begun a position later."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    patterns = [finite_values(rng, kind) for kind in types]
    for pair in cache.tensors.values():
        for tensor, pattern in zip(pair, patterns, strict=True):
            for sequence in range(sequences if length else 0):
                (offset, nbytes), *scales = tensor.regions(cache.start(sequence), length)
                first = sequence * (nbytes // length)
                tensor.buffer.upload(np.resize(pattern, first + nbytes)[first:], offset)
                for at, scale_nbytes in scales:
                    tensor.buffer.upload(np.full(scale_nbytes // 2, _SCALE, np.float16), at)


def finite_values(rng: np.random.Generator, kind: str) -> NDArray[np.uint8]:
    """Bytes of a cache type's elements: standard normal, times 32 where blocks have scales."""
    floats = {"f32": np.float32, "f16": np.float16}
    if kind in floats:
        count = _PATTERN_NBYTES // np.dtype(floats[kind]).itemsize
        return rng.standard_normal(count, np.float32).astype(floats[kind]).view(np.uint8)
    if kind != "q8_0":
        raise Unsupported(f"benchmark: KV type is {kind}; supported: f32, f16, q8_0")
    codes = np.clip(rng.normal(0, 1 / _SCALE, _PATTERN_NBYTES), -127, 127)
    return codes.astype(np.int8).view(np.uint8)
