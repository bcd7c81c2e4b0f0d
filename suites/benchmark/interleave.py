"""Several things timed in turn, so that a clock that drifts drifts for all of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from backend_hip import Device
from suites.benchmark.limits import device_seconds

Key = TypeVar("Key")


@dataclass(frozen=True)
class Timed:
    """What is timed: `prepare` runs before each sample and is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Samples:
    """One device time and one host time a round, in seconds."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def in_turn(
    device: Device, things: Mapping[Key, Timed], rounds: int, warm_up: int = 1
) -> dict[Key, Samples]:
    """Times each once a round, forwards and backwards in turn (A B C, C B A); warm-ups are dropped.

    Backwards, because in one order each would always follow the same neighbour.
    """
    samples: dict[Key, Samples] = {key: Samples() for key in things}
    for turn in range(warm_up + rounds):
        order = list(things) if turn % 2 == 0 else list(things)[::-1]
        for key in order:
            things[key].prepare()
            started = time.perf_counter()
            device_s = device_seconds(device, things[key].run)
            host_s = time.perf_counter() - started
            if turn >= warm_up:
                samples[key].device.append(device_s)
                samples[key].host.append(host_s)
    return samples
