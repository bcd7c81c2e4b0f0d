"""Plants and set-up for the tests of the CPU runtime's checks."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from backend_hip import compile as compiling
from backend_hip.device import Device
from backend_hip.runtimes.checking import Checking, checking_of, recover, set_checking
from reference.model.errors import DeviceError
from suites.meta.engine_faults import change_source

_BARRIER = re.compile(r"^(\s+)simt::(?:wave_)?sync\(\);", re.MULTILINE)


@contextmanager
def checked(device: Device, checking: Checking) -> Iterator[None]:
    """Checks so inside the block, then as before. Skips the test on another runtime."""
    if device.runtime.kind != "cpu":
        pytest.skip("only the CPU runtime checks")
    before = checking_of()
    device.stream.synchronise()
    set_checking(checking)
    try:
        yield
    finally:
        # An error of the block has been raised there already, or nobody was interested.
        with suppress(DeviceError):
            device.stream.synchronise()
        recover()
        set_checking(before)


@contextmanager
def finding(*words: str) -> Iterator[None]:
    """The block must raise a DeviceError that says all of `words`; the device is usable after."""
    with pytest.raises(DeviceError) as caught:
        yield
    recover()
    for word in words:
        assert word in str(caught.value)


def barriers_in(file: str) -> int:
    """Barriers that the kernels of one file write out."""
    return len(_BARRIER.findall(compiling.flatten(file)))


def without_barrier(patch: pytest.MonkeyPatch, file: str, index: int) -> None:
    """Compiles `file` without its barrier number `index` from now on."""

    def without(text: str) -> str:
        found = list(_BARRIER.finditer(text))[index]
        return text[: found.start()] + found[1] + ";" + text[found.end() :]

    change_source(patch, file, without)
