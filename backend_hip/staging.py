"""Large host arrays to the device: copied into pinned memory by threads while the bus carries.

An upload straight from a memory map would make the driver copy it piece by piece into pinned memory
of its own, one thread and no overlap. Here two pinned slots take turns: threads fill one while the
copy out of the other is under way; an event after each copy says when its slot is free again.
Pieces of several arrays share a slot, so a thousand norm weights cost no more than their bytes.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device, Event, PinnedArray
from backend_hip.layout import BlockLayout, copy_blocks
from reference.model.errors import DeviceError, InputError

SLOT_NBYTES = 32 * 2**20
# One thread copies 4 to 5 GB/s out of the page cache; a PCIe 5 bus carries about 50.
MAX_THREADS = 8
# What one thread copies at once. Starting a task costs about as much as copying 100 KiB.
SHARE_NBYTES = 4 * 2**20

Bytes = NDArray[np.uint8]
AS_STORED = BlockLayout(1, 1)


class _Slot:
    """Pinned memory that is filled, sent and used again."""

    def __init__(self, nbytes: int, index: int) -> None:
        self.pinned = PinnedArray((nbytes,), np.uint8, f"staging of uploads {index}")
        self.sent = Event()
        self.filled_nbytes = 0
        self.in_flight = False
        self.filling: list[Future[None]] = []
        self.targets: list[tuple[int, int, int]] = []  # device address, start in the slot, bytes

    @property
    def room_nbytes(self) -> int:
        return self.pinned.nbytes - self.filled_nbytes

    def free(self) -> None:
        self.sent.free()
        self.pinned.free()


class Staging:
    """Uploads of one load. `put` queues, `finish` waits; leaving the block frees the memory.

    `total_nbytes`: of all that will be put; small loads get small slots. `sent` is called with the
    bytes that have been queued to the device so far. `source_wait_s`: seconds that this thread
    waited for bytes of the source (page cache or disk) while it could have queued copies.
    """

    def __init__(
        self, device: Device, total_nbytes: int, sent: Callable[[int], None] | None = None
    ) -> None:
        self._stream = device.stream
        self._sent = sent or (lambda nbytes: None)
        nbytes = max(1, min(SLOT_NBYTES, total_nbytes))
        self._slots = [_Slot(nbytes, index) for index in range(2)]
        self._current = self._slots[0]
        self._pool: ThreadPoolExecutor | None = None
        self._sent_nbytes = 0
        self.source_wait_s = 0.0

    def put(
        self, buffer: Buffer, array: NDArray[np.uint8], layout: BlockLayout = AS_STORED
    ) -> None:
        """Queues a C-contiguous byte array, which must stay as it is until `finish`.

        Its blocks arrive as `layout` has them on the device, with padding of no particular value.
        """
        device_nbytes = layout.device_size(array.nbytes)
        if not array.flags.c_contiguous or device_nbytes > buffer.nbytes:
            raise InputError(
                f"device: upload to {buffer.name} of {buffer.nbytes} bytes has {device_nbytes}, "
                "expected a C-contiguous array that fits"
            )
        source, done, count = array.reshape(-1), 0, array.nbytes // layout.stored_nbytes
        while done < count:
            slot = self._slot_with_room(layout.device_nbytes)
            blocks = min(slot.room_nbytes // layout.device_nbytes, count - done)
            first, last = done * layout.stored_nbytes, (done + blocks) * layout.stored_nbytes
            address = buffer.address + done * layout.device_nbytes
            self._fill(slot, source[first:last], address, layout)
            done += blocks

    def finish(self) -> None:
        """Sends what is left and waits until everything has arrived."""
        self._send(self._current)
        self._stream.synchronise()

    def _slot_with_room(self, nbytes: int) -> _Slot:
        if self._current.room_nbytes < nbytes:
            self._send(self._current)
            other = self._slots[self._slots.index(self._current) - 1]
            if other.in_flight:
                other.sent.synchronise()
                other.in_flight = False
            self._current = other
        return self._current

    def _fill(self, slot: _Slot, source: Bytes, address: int, layout: BlockLayout) -> None:
        """Copies into the slot, in shares where that pays, and notes where it is to go."""
        first, nbytes = slot.filled_nbytes, layout.device_size(source.nbytes)
        target = slot.pinned.array[first : first + nbytes]
        if source.nbytes < SHARE_NBYTES:
            copy_blocks(target, source, layout)
        else:
            self._pool = self._pool or ThreadPoolExecutor(_threads(), "upload")
            blocks = max(1, SHARE_NBYTES // layout.stored_nbytes)
            to, of = blocks * layout.device_nbytes, blocks * layout.stored_nbytes
            for i in range(-(-source.nbytes // of)):
                part = target[i * to : (i + 1) * to], source[i * of : (i + 1) * of], layout
                slot.filling.append(self._pool.submit(copy_blocks, *part))
        slot.targets.append((address, first, nbytes))
        slot.filled_nbytes += nbytes

    def _send(self, slot: _Slot) -> None:
        """Queues the copies of all that the slot holds, once its threads are through."""
        if not slot.targets:
            return
        started = time.perf_counter()
        for share in slot.filling:
            share.result()
        self.source_wait_s += time.perf_counter() - started
        for address, start, nbytes in slot.targets:
            self._stream.copy(address, slot.pinned.address + start, nbytes, to_device=True)
        slot.sent.record(self._stream)
        slot.in_flight = True
        slot.filling.clear()
        slot.targets.clear()
        self._sent_nbytes += slot.filled_nbytes
        slot.filled_nbytes = 0
        self._sent(self._sent_nbytes)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()  # nothing may write to pinned memory that is freed
        # After a device error freeing fails too and would hide the error that matters.
        if not isinstance(error, DeviceError):
            self._stream.synchronise()
            for slot in self._slots:
                slot.free()


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
