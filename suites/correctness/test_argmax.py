"""The device argmax: ties, signed zeros, NaN, last elements, real vocabularies."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import ops
from backend_hip.device import Device
from backend_hip.sampler import NAN_TOKEN
from reference.model.sampling import argmax as host_argmax
from suites.correctness.lab import Lab

WAVE, BLOCK = 32, 256
SHARE = ops.ARGMAX_SHARE  # of a block of the first pass, while there are at most ARGMAX_BLOCKS
SIZES = (
    *(1, 2, 31, 32, 33, 255, 256, 257, 320, SHARE - 1, SHARE, SHARE + 1),
    *(ops.ARGMAX_BLOCKS * SHARE + 1, 49_152, 151_936, 262_144),
)
STAMP = 77


def _device_argmax(device: Device, logits: NDArray[np.float32]) -> int:
    (token,) = _tokens(device, logits[None])
    return token


def _tokens(device: Device, logits: NDArray[np.float32]) -> list[int]:
    """Of each row of logits (rows, V), as a step of so many sequences chooses them."""
    rows, count = logits.shape
    with Lab(device) as lab:
        keys = [("argmax_blocks", "", "any"), ("argmax", "", "any")]
        flow = replace(lab.flow(keys, {}, tokens=range(rows), stamp=STAMP), sequences=rows)
        result = lab.output(rows, 2)
        found = lab.output(rows, ops.ARGMAX_BLOCKS * ops.FOUND_NBYTES // 4).buffer
        ops.argmax(flow, lab.buffer(logits).at(0), found, result.buffer, count)
        chosen = lab.read(result).view(np.int32)
        assert (chosen[:, 1] == STAMP).all()
        return [int(token) for token in chosen[:, 0]]


@dataclass(frozen=True)
class Ties:
    """Equal maxima at `places` (negative: from the end) among smaller random logits."""

    id: str
    places: tuple[int, ...]


TIES = [
    Ties("first", (0,)),
    Ties("last", (-1,)),
    Ties("first-and-last", (0, -1)),
    Ties("inside-a-wave", (3, 4, 17)),
    Ties("across-waves", (WAVE - 1, WAVE)),
    Ties("across-block-strides", (BLOCK - 1, BLOCK, 2 * BLOCK)),
    # The later thread holds the lower index: thread 5 owns 5, thread 4 owns 4 + BLOCK.
    Ties("order-against-threads", (4 + BLOCK, 5)),
    Ties("last-two", (-2, -1)),
    Ties("across-blocks", (SHARE - 1, SHARE, -1)),
]


CASES = [
    (case, size)
    for case in TIES
    for size in SIZES
    if all(-size <= place < size for place in case.places)
]


@pytest.mark.parametrize(("case", "size"), CASES, ids=lambda value: getattr(value, "id", value))
def test_ties_go_to_the_lowest_index(case: Ties, size: int, device: Device) -> None:
    places = {place % size for place in case.places}
    logits = np.random.default_rng(size).uniform(-30, 10, size).astype(np.float32)
    logits[list(places)] = 12.5
    assert _device_argmax(device, logits) == min(places) == host_argmax(logits)


@pytest.mark.parametrize("size", SIZES)
def test_special_values(size: int, device: Device) -> None:
    lowest = np.full(size, -np.inf, dtype=np.float32)
    zeros = np.zeros(size, dtype=np.float32)
    zeros[::2] = -0.0
    for logits in (lowest, zeros, np.full(size, np.float32(3.25))):
        assert _device_argmax(device, logits) == 0 == host_argmax(logits)
    infinite = lowest.copy()
    infinite[-1] = np.inf
    assert _device_argmax(device, infinite) == size - 1


@pytest.mark.parametrize("size", SIZES)
def test_any_nan_is_reported_and_never_a_token(size: int, device: Device) -> None:
    for place in sorted({0, size // 2, size - 1}):
        for value in (np.nan, -np.nan):
            logits = np.zeros(size, dtype=np.float32)
            logits[0] = 5
            logits[place] = value
            assert _device_argmax(device, logits) == NAN_TOKEN


@pytest.mark.parametrize("size", SIZES)
def test_each_row_of_a_step_has_its_own_token(size: int, device: Device) -> None:
    places = [size - 1, 0, size // 2, min(SHARE, size - 1)]
    logits = np.random.default_rng(size).uniform(-30, 10, (len(places), size)).astype(np.float32)
    logits[range(len(places)), places] = 12.5
    assert _tokens(device, logits) == places
