"""Reading a model's file alone, for beside an upload, which must read it and use the bus too."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip.staging import MAX_THREADS, SHARE_NBYTES
from reference.model import Model


@dataclass(frozen=True)
class ReadReport:
    """All tensors of a file copied out of the memory map into host memory, and nothing else."""

    nbytes: int
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"file read alone: {self.nbytes / 2**20:.0f} MiB in {self.elapsed_s:.2f} s, "
            f"{self.nbytes / 1e9 / self.elapsed_s:.1f} GB/s"
        )


def read_alone(model: Model) -> ReadReport:
    """Reads by as many threads and in the same shares as an upload does.

    The first read of a file is from disk, later ones from the page cache.
    """
    groups = (model.weights.top, *model.weights.layers)
    tensors = [tensor.raw for group in groups for tensor in group.values()]
    shares = [share for raw in tensors for share in _shares(raw)]
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def read(part: list[NDArray[np.uint8]]) -> None:
        room = np.empty(SHARE_NBYTES, dtype=np.uint8)
        for share in part:
            np.copyto(room[: share.nbytes], share)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, (shares[first::threads] for first in range(threads))))
    elapsed_s = time.perf_counter() - started
    return ReadReport(sum(share.nbytes for share in shares), elapsed_s)


def _shares(raw: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    flat = np.ascontiguousarray(raw).reshape(-1)
    return [flat[start : start + SHARE_NBYTES] for start in range(0, flat.nbytes, SHARE_NBYTES)]
