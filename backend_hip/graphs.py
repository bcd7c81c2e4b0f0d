"""Captured decode steps: a graph for each shape of step, made when a step first has that shape."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from backend_hip.dispatch import CountedGraph, Kernels


@dataclass(frozen=True)
class GraphKey:
    """What a graph is captured for: rows of the step, LM head and sampler tail or not, and splits
    of keys that its attention has blocks for."""

    rows: int
    with_tail: bool
    splits: int


@dataclass(frozen=True)
class GraphUse:
    """Graphs of one engine so far. `capture_us`: host time of all captures, instantiation included.

    Each captured graph is replayed at once, so `replays` - `captures` steps found theirs.
    """

    captures: int = 0
    capture_us: float = 0.0
    replays: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the replays that needed no capture; 0 before the first."""
        return (self.replays - self.captures) / self.replays if self.replays else 0.0


class DecodeGraphs:
    """Owns an engine's graphs."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, CountedGraph] = {}
        self.use = GraphUse()

    def replay(self, kernels: Kernels, key: GraphKey, queue: Callable[[], object]) -> None:
        """Queues the graph of `key`, captured from what `queue` queues where there is none yet."""
        if key not in self._graphs:
            begin = time.perf_counter()
            with kernels.capture() as captured:
                queue()
            self._graphs[key] = captured[0]
            elapsed_us = (time.perf_counter() - begin) * 1e6
            used = self.use
            self.use = replace(
                used, captures=used.captures + 1, capture_us=used.capture_us + elapsed_us
            )
        kernels.replay(self._graphs[key])
        self.use = replace(self.use, replays=self.use.replays + 1)

    def free(self) -> None:
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
