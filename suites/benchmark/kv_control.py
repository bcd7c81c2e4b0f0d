"""The control of quantised keys and values: q8_0 is written out as f16, then attention reads f16.

An engine whose attention reads q8_0 in place must beat it; and since it moves more bytes than
either, it must be slower than a cache of f16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from backend_hip.compile import KernelSource, build
from backend_hip.device import Device, Graph, Kernel, Module
from backend_hip.kv_cache import CacheTensor, DeviceCache, dequantised
from backend_hip.results import StepResult
from backend_hip.wave import WAVE
from reference.model import Model
from suites.benchmark.engine_runs import Runner, fill_cache

SOURCE = "q8_0"
_BLOCK = 256
_ELEMENTS = 16  # of a thread, kernels/expand_kv.hip


class ExpandingRunner(Runner):
    """An engine with a cache of f16 whose assumed part is written anew, from one of q8_0, before
    each step."""

    def __init__(self, model: Model, device: Device, **options: Any) -> None:
        kinds = {"kv_type_k": "f16", "kv_type_v": "f16"}
        super().__init__(model, device, **{**options, **kinds})
        context = self.engine.context_length
        self._source = DeviceCache(model.spec, device, (SOURCE, SOURCE), context, self.sequences)
        source = KernelSource("expand_kv.hip", (("SIMT_BLOCK", _BLOCK), ("SIMT_WAVE", WAVE)))
        self._module = Module(build(device, [source])[source], source.name)
        self._kernel = Kernel(self._module, "expand_kv", "PPiiiii", _BLOCK)
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._assumed = 0

    def assume(self, length: int, seed: int = 1) -> None:
        super().assume(length, seed)
        fill_cache(self._source, (SOURCE, SOURCE), self.sequences, length, seed)
        self._expand(self.sequences)
        self.require_expanded(length)

    def place(self, length: int) -> None:
        super().place(length)
        self._assumed = length

    def step_of(self, tokens: Sequence[int], sequences: Sequence[int]) -> list[int]:
        self._expand(1 + max(sequences))
        return super().step_of(tokens, sequences)

    def inspect(self, tokens: Sequence[int], sequences: Sequence[int]) -> list[StepResult]:
        self._expand(1 + max(sequences))
        return super().inspect(tokens, sequences)

    def _expand(self, sequences: int) -> None:
        key = (sequences, self._assumed)
        if not self._assumed:
            return
        if key not in self._graphs:
            with self.device.stream.capture() as captured:
                self.queue_expansion(*key)
            self._graphs[key] = captured[0]
        self._graphs[key].launch(self.device.stream)

    def queue_expansion(self, sequences: int, count: int) -> None:
        """Queues the launches that write the first `count` positions of every tensor."""
        for pair, targets in self._pairs():
            for source, target in zip(pair, targets, strict=True):
                groups = count * source.heads * source.size // _ELEMENTS
                context = self._source.context_length
                self._kernel.launch(
                    self.device.stream,
                    (-(-groups // _BLOCK), sequences),
                    *(source.buffer, target.buffer, source.rows, context, count),
                    *(source.heads, source.size),
                )

    def require_expanded(self, length: int) -> None:
        """AssertionError where the f16 cache is not what the q8_0 cache holds, by NumPy."""
        if not length:
            return
        for pair, targets in self._pairs():
            for source, target in zip(pair, targets, strict=True):
                for sequence in {0, self.sequences - 1}:
                    last = self._source.start(sequence) + length - 1
                    want = dequantised(*source.read(last, 1)).astype(np.float16)
                    assert np.array_equal(want, target.read(last, 1)[0]), "expanded values differ"

    def close(self) -> None:
        self.device.stream.synchronise()
        for graph in self._graphs.values():
            graph.free()
        self._source.free()
        self._module.unload()
        super().close()

    def _pairs(
        self,
    ) -> list[tuple[tuple[CacheTensor, CacheTensor], tuple[CacheTensor, CacheTensor]]]:
        targets = self.engine._cache.tensors
        return [(pair, targets[layer]) for layer, pair in self._source.tensors.items()]


def open_runner(model: Model, device: Device, *, expanded: bool = False, **options: Any) -> Runner:
    """The engine of a row's options."""
    return (ExpandingRunner if expanded else Runner)(model, device, **options)
