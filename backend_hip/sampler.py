"""The sampler tail: logits -> argmax on the device -> copy to host-visible staging.

Staging is pinned memory that holds {token, stamp}. It is poisoned with an illegal id before each
step and the result carries the step's number, so that a stale read shows as what it is.
"""

import numpy as np

from backend_hip import ops
from backend_hip.device import Buffer, Device, PinnedArray
from backend_hip.launch_arguments import DevicePointer
from backend_hip.results import TailRecord

POISON = -1  # no token; 0xFFFFFFFF as the device fills it
NAN_TOKEN = -2  # what kernels/argmax.hip returns when a logit is NaN
_RESULT_NBYTES = 8


class SamplerTail:
    """Owns the device results, {token, stamp} for each of `rows` sequences, and their staging."""

    def __init__(self, device: Device, rows: int = 1) -> None:
        self._device = device
        self._result = Buffer(device, rows * _RESULT_NBYTES, "argmax result")
        self._result.poison()
        found_nbytes = rows * ops.ARGMAX_BLOCKS * ops.FOUND_NBYTES
        self._found = Buffer(device, found_nbytes, "argmax by block")
        self._staging = PinnedArray((rows, 2), np.int32, "argmax staging")

    def arm(self) -> None:
        """Poisons staging. Only when no copy into it is in flight."""
        self._staging.array[:] = POISON

    def queue(self, flow: ops.Flow, logits: DevicePointer, count: int) -> None:
        """Queues argmax over `count` logits of each sequence and the copy of all to staging."""
        nbytes = flow.sequences * _RESULT_NBYTES
        ops.argmax(flow, logits, self._found, self._result, count)
        self._device.stream.copy(
            self._staging.address, self._result.address, nbytes, to_device=False
        )

    def staged(self, row: int = 0) -> tuple[int, int]:
        """{token, stamp} in staging; the stream must have been synchronised."""
        return int(self._staging.array[row, 0]), int(self._staging.array[row, 1])

    def record(
        self, logits: Buffer, offset_nbytes: int, count: int, stamp: int, row: int = 0
    ) -> TailRecord:
        """Reads every link of one row back, staging first, so that reading can't refresh it."""
        token, staged_stamp = self.staged(row)
        device_token, device_stamp = self._result.download((2,), np.int32, row * _RESULT_NBYTES)
        return TailRecord(
            poison=POISON,
            staged_token=token,
            staged_stamp=staged_stamp,
            expected_stamp=stamp,
            device_token=int(device_token),
            device_stamp=int(device_stamp),
            logits=logits.download((count,), np.float32, offset_nbytes),
        )

    def free(self) -> None:
        self._found.free()
        self._result.free()
        self._staging.free()
