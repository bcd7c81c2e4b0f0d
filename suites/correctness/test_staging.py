"""Uploads through two pinned slots: every byte arrives, whatever the sizes and the slots."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import staging as module
from backend_hip.device import Buffer, Device, PinnedArray
from backend_hip.layout import BlockLayout, layout_of
from backend_hip.runtimes.checking import Checking
from backend_hip.staging import Staging
from backend_hip.weights import DeviceWeights
from reference.model import Model
from reference.model.errors import InputError
from suites.correctness.checks import checked, finding

SLOT = 1000
SHARE = 300
# Ends of a slot, of two and of a share; 1 shares a slot with its neighbours.
SIZES = (1, SLOT - 1, SLOT, SLOT + 1, 3, 2 * SLOT, 2 * SLOT + 1, SHARE, SHARE - 1, 7 * SLOT + 77, 1)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_NBYTES", SLOT)
    monkeypatch.setattr(module, "SHARE_NBYTES", SHARE)


def _arrays() -> list[NDArray[np.uint8]]:
    rng = np.random.Generator(np.random.PCG64(3))
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in SIZES]


def _upload_all(device: Device, arrays: list[NDArray[np.uint8]]) -> list[int]:
    """Uploads, compares every byte, and returns what `sent` was told."""
    told: list[int] = []
    buffers = [Buffer(device, array.nbytes, "test") for array in arrays]
    total = sum(SIZES)
    with Staging(device, total, told.append) as staging:
        for buffer, array in zip(buffers, arrays, strict=True):
            staging.put(buffer, array)
        staging.finish()
    assert staging.source_wait_s >= 0
    for buffer, array in zip(buffers, arrays, strict=True):
        assert np.array_equal(buffer.download((array.nbytes,), np.uint8), array)
        buffer.free()
    return told


@pytest.mark.usefixtures("small_slots")
def test_every_byte_arrives(device: Device) -> None:
    told = _upload_all(device, _arrays())
    assert told == sorted(told)
    assert told[-1] == sum(SIZES)
    assert len(told) == -(-sum(SIZES) // SLOT)  # each slot was full when it was sent


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("layout", [BlockLayout(21, 22), BlockLayout(100, 112), BlockLayout(1, 16)])
def test_blocks_are_padded(layout: BlockLayout, device: Device) -> None:
    """Sizes of a block against those of slot and share: a block is never cut."""
    rng = np.random.Generator(np.random.PCG64(4))
    for count in (1, 9, SHARE // layout.stored_nbytes + 1, 3 * SLOT // layout.device_nbytes + 1):
        blocks = rng.integers(0, 256, (count, layout.stored_nbytes), dtype=np.uint8)
        buffer = Buffer(device, count * layout.device_nbytes, "test")
        with Staging(device, 10 * SLOT) as staging:
            staging.put(buffer, blocks.reshape(-1), layout)
            staging.finish()
        held = buffer.download((count, layout.device_nbytes), np.uint8)
        np.testing.assert_array_equal(held[:, : layout.stored_nbytes], blocks)
        buffer.free()


@pytest.mark.usefixtures("small_slots")
def test_no_slot_is_filled_while_it_is_read(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run as late as HIP allows: the event after each is what keeps its slot untouched."""
    with checked(device, Checking(sanitize=True)):
        _upload_all(device, _arrays())
        monkeypatch.setattr("backend_hip.staging.Event.synchronise", lambda event: None)
        with finding("host memory was written while a copy from it was queued"):
            _upload_all(device, _arrays())


@pytest.mark.usefixtures("small_slots")
def test_pinned_memory_is_freed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    free = PinnedArray.free

    def noted(pinned: PinnedArray) -> None:
        freed.append(pinned.name)
        free(pinned)

    monkeypatch.setattr(PinnedArray, "free", noted)
    _upload_all(device, _arrays())
    assert len(freed) == 2
    with pytest.raises(ZeroDivisionError), Staging(device, 10):
        raise ZeroDivisionError
    assert len(freed) == 4


def test_what_does_not_fit_is_refused(device: Device) -> None:
    buffer = Buffer(device, 16, "test")
    wide = np.zeros((8, 4), dtype=np.uint8)
    with Staging(device, 32) as staging:
        with pytest.raises(InputError, match="test of 16 bytes has 17, expected a C-contiguous"):
            staging.put(buffer, np.zeros(17, dtype=np.uint8))
        with pytest.raises(InputError, match="expected a C-contiguous"):
            staging.put(buffer, wide[:, :2])
        staging.finish()
    buffer.free()


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-llama-q6_k", "tiny-llama-fused", "tiny-qwen3moe-fused"]
)
@pytest.mark.usefixtures("small_slots")
def test_weights_on_the_device_are_the_file_s(
    device: Device, load: Callable[[str], Model], name: str
) -> None:
    model, lines = load(name), list[str]()
    weights = DeviceWeights(model.weights, device, progress=lines.append)
    compared = 0
    stored = (model.weights.top, *model.weights.layers)
    for there, here in zip((weights.top, *weights.layers), stored, strict=True):
        assert there.keys() == here.keys()
        for role, tensor in here.items():
            layout = layout_of(tensor.format)
            held = there[role].buffer.download((there[role].buffer.nbytes,), np.uint8)
            blocks = held.reshape(-1, layout.device_nbytes)[:, : layout.stored_nbytes]
            assert np.array_equal(blocks.reshape(tensor.raw.shape), tensor.raw), role
            compared += held.nbytes
    assert compared == weights.loading.nbytes > 0
    assert weights.loading.gb_per_s > 0
    assert lines[-1].startswith("weights uploaded: ")
    assert all(line.startswith("uploading ") for line in lines[:-1])
    weights.free()


def test_a_model_without_room_leaves_nothing(
    device: Device, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Buffer] = []

    def limited(device: Device, nbytes: int, name: str) -> Buffer:
        if len(made) == 5:
            raise InputError(f"device: {name} does not fit")
        made.append(Buffer(device, nbytes, name))
        return made[-1]

    monkeypatch.setattr("backend_hip.weights.Buffer", limited)
    with pytest.raises(InputError, match="does not fit"):
        DeviceWeights(load("tiny-qwen3").weights, device)
    assert len(made) == 5
    assert all(buffer._pointer is None for buffer in made)
