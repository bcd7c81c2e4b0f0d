"""The timer behind pytest-benchmark's rounds: it stands still except for what was measured here.

pytest-benchmark reads the timer before and after a round. A host timer would also count the work
of collecting results; `SampleClock.measure` advances by the time between two device events around
one prefill instead, and keeps the host's time of the same interval beside it.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from backend_hip import Device
from backend_hip.device import Buffer, Event

Result = TypeVar("Result")

# More than any last-level cache in reach (64 MiB on RDNA4, 50 MiB on Hopper, less on laptops).
CACHE_NBYTES = 256 * 2**20


class SampleClock:
    """Accumulated device time in seconds; `host_seconds` holds one host time per measurement."""

    label = "device events"

    def __init__(self) -> None:
        self._seconds = 0.0
        self.host_seconds: list[float] = []

    def read(self) -> float:
        """What pytest-benchmark calls."""
        return self._seconds

    def measure(self, device: Device, run: Callable[[], Result]) -> Result:
        """Runs once and advances by its device time, gaps between its kernels included."""
        begin, end = Event(), Event()
        try:
            device.stream.synchronise()
            begin.record(device.stream)
            started = time.perf_counter()
            result = run()
            end.record(device.stream)
            end.synchronise()
            self.host_seconds.append(time.perf_counter() - started)
            self._seconds += begin.elapsed_us(end) * 1e-6
        finally:
            begin.free()
            end.free()
        return result

    def rounds(self, count: int) -> list[float]:
        """Host times of the last `count` measurements."""
        return self.host_seconds[-count:]


CLOCK = SampleClock()


def read_clock() -> float:
    """The timer to name in `pytest.mark.benchmark(timer=read_clock)`."""
    return CLOCK.read()


class CacheFlush:
    """Fills memory larger than the last-level cache, so that no sample starts with warm weights."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = Buffer(device, CACHE_NBYTES, "cache flush")

    def __call__(self) -> None:
        self._buffer.poison()
        self._device.stream.synchronise()

    def free(self) -> None:
        self._buffer.free()


def host_name() -> str:
    """The machine's processor and the number of threads that the CPU runtime has on it."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                processor = value.strip()
                break
    threads = os.environ.get("ASSAY_CPU_THREADS") or len(os.sched_getaffinity(0))
    return f"{processor}, {threads} threads"
