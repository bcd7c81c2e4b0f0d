"""What the device gives at best, measured in the same run as the speeds compared with it."""

import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from backend_hip import Device
from backend_hip.bandwidth import GRAIN_NBYTES, Bandwidth
from backend_hip.device import Event
from backend_hip.matrix_rate import MatrixLoop
from reference.model.errors import InputError

# Many times any last-level cache on a GPU (64 MiB on RDNA4, 50 MiB on Hopper); on the CPU runtime
# figures mean nothing, so it gets what takes no time.
GPU_NBYTES = 2**30
CPU_NBYTES = 32 * GRAIN_NBYTES
ROUNDS = 7
# Times eight products of a wave: about a millisecond on a GPU.
GPU_PRODUCTS = 4096
CPU_PRODUCTS = 1


@dataclass(frozen=True)
class MeasuredLimits:
    """Medians. `copy`: bytes read and written; `matrix_flops_per_s`: of products of fragments held
    in registers, None in records from before it was measured."""

    runtime: str
    device: str
    copy_bytes_per_s: float
    read_bytes_per_s: float
    matrix_flops_per_s: float | None
    nbytes: int

    def stored(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)

    def line(self) -> str:
        """For below a table."""
        matrix = self.matrix_flops_per_s
        rate = "not measured" if matrix is None else f"{matrix / 1e12:,.1f} TFLOP/s"
        return (
            f"Limits measured in this run on {self.device} [{self.runtime}], over "
            f"{self.nbytes / 2**20:,.0f} MiB: reading {self.read_bytes_per_s / 1e9:,.1f} GB/s, "
            f"copying {self.copy_bytes_per_s / 1e9:,.1f} GB/s (read and written), matrix units "
            f"{rate} (by the instruction that the kernels use, on registers)."
        )


def measure_limits(
    device: Device,
    *,
    nbytes: int | None = None,
    rounds: int = ROUNDS,
) -> MeasuredLimits:
    """Copies, reads and matrix products in turn, `rounds` times each after one warm-up."""
    if rounds < 1:
        raise InputError(f"limits: rounds is {rounds}, expected at least 1")
    size = nbytes or (CPU_NBYTES if device.runtime.kind == "cpu" else GPU_NBYTES)
    emulated = device.runtime.kind == "cpu"
    copy_s: list[float] = []
    read_s: list[float] = []
    matrix_s: list[float] = []
    loop = MatrixLoop(device, CPU_PRODUCTS if emulated else GPU_PRODUCTS)
    with closing(Bandwidth(device, size)) as bandwidth, closing(loop):
        for _ in range(rounds + 1):
            copy_s.append(device_seconds(device, bandwidth.copy))
            read_s.append(device_seconds(device, bandwidth.read))
            matrix_s.append(device_seconds(device, loop.run))
        copied, read = bandwidth.copied_nbytes, bandwidth.read_nbytes
    return MeasuredLimits(
        runtime=device.label,
        device=device.name,
        copy_bytes_per_s=copied / statistics.median(copy_s[1:]),
        read_bytes_per_s=read / statistics.median(read_s[1:]),
        matrix_flops_per_s=loop.flops / statistics.median(matrix_s[1:]),
        nbytes=size,
    )


def device_seconds(device: Device, run: Callable[[], object]) -> float:
    """Device time of what `run` queues, gaps included."""
    begin, end = Event(), Event()
    try:
        device.stream.synchronise()
        begin.record(device.stream)
        run()
        end.record(device.stream)
        end.synchronise()
        return begin.elapsed_us(end) * 1e-6
    finally:
        begin.free()
        end.free()
