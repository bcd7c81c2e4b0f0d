"""--sanitize: work that nobody waited for has not happened; writes to memory in flight are told."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip.device import Device
from backend_hip.runtimes.checking import Checking, recover, set_checking
from suites.correctness.checks import checked
from suites.correctness.cpu_driver import (
    BLOCK,
    HipError,
    call,
    code_object,
    device_memory,
    download,
    in_child,
    kernel,
    kind,
    launch,
    name_of,
    runtime,
    upload,
)

NBYTES = BLOCK * 4
SEEDS = range(20)


@pytest.fixture(autouse=True)
def sanitized(cpu_session: None, device: Device) -> Iterator[None]:
    with checked(device, Checking(sanitize=True)):
        yield


@contextmanager
def reported(error: str, *words: str) -> Iterator[None]:
    """The block must fail with the sticky `error`, whose text says all of `words`."""
    hip = runtime().hip
    with pytest.raises(HipError, match=error):
        yield
    text = str(hip.hipGetErrorString(hip.hipGetLastError()[0])[1])
    recover()
    for word in words:
        assert word in text


class Pinned:
    """Page-locked floats."""

    def __init__(self, count: int = BLOCK) -> None:
        self.pointer = call(runtime().hip.hipHostMalloc(count * 4, 0))
        raw = memoryview((ctypes.c_uint8 * (count * 4)).from_address(int(self.pointer))).cast("B")
        self.array: NDArray[np.float32] = np.frombuffer(raw, dtype=np.float32)


def independent_stream() -> Any:
    return call(runtime().hip.hipStreamCreateWithFlags(1))


def ones() -> Any:
    return upload(np.ones(BLOCK, dtype=np.float32))


def zeros() -> Any:
    return upload(np.zeros(BLOCK, dtype=np.float32))


def add(a: Any, b: Any, out: Any, stream: Any) -> None:
    launch(kernel("add"), (1, 1, 1), a, b, out, ctypes.c_int32(BLOCK), stream=stream)


def copy(target: Any, source: Any, direction: str, stream: Any) -> None:
    call(runtime().hip.hipMemcpyAsync(target, source, NBYTES, kind(direction), stream))


def synchronise(stream: Any) -> None:
    call(runtime().hip.hipStreamSynchronize(stream))


def first_of(pointer: Any) -> float:
    """The first float of device memory, by a blocking copy, which no non-blocking stream delays."""
    return float(download(pointer, BLOCK, np.float32)[0])


# --- what was not waited for is not there ---------------------------------------------------------


def test_a_pinned_result_is_stale_until_its_stream_was_synchronised() -> None:
    one, out, host, stream = ones(), zeros(), Pinned(), independent_stream()
    host.array[:] = 7
    add(one, one, out, stream)
    copy(host.pointer, out, "DeviceToHost", stream)
    assert (host.array == 7).all()
    synchronise(stream)
    assert (host.array == 2).all()


def test_a_kernel_on_a_wrong_stream_has_not_run() -> None:
    hip = runtime().hip
    one, out, host, stream, wrong = ones(), zeros(), Pinned(), *two_streams()
    add(one, one, out, wrong)
    copy(host.pointer, out, "DeviceToHost", stream)
    synchronise(stream)
    assert (host.array == 0).all()
    assert first_of(out) == 0
    call(hip.hipDeviceSynchronize())
    assert first_of(out) == 2


def two_streams() -> tuple[Any, Any]:
    return independent_stream(), independent_stream()


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_orders_two_streams(waits: bool) -> None:
    hip = runtime().hip
    one, host, stream, other = ones(), Pinned(), *two_streams()
    for seed in SEEDS:
        set_checking(Checking(shuffle=seed, sanitize=True))
        out, event = zeros(), call(hip.hipEventCreate())
        add(one, one, out, other)
        call(hip.hipEventRecord(event, other))
        add(one, out, out, other)  # after the event: not waited for
        if waits:
            call(hip.hipStreamWaitEvent(stream, event, 0))
        copy(host.pointer, out, "DeviceToHost", stream)
        synchronise(stream)
        assert (host.array == (2 if waits else 0)).all()
        synchronise(other)
        assert first_of(out) == 3


def test_the_seed_chooses_between_independent_streams() -> None:
    hip = runtime().hip

    def result(seed: int) -> float:
        set_checking(Checking(shuffle=seed, sanitize=True))
        out, streams = zeros(), [independent_stream() for _ in range(3)]
        for value, stream in enumerate(streams):
            call(hip.hipMemsetAsync(out, value, NBYTES, stream))
        call(hip.hipDeviceSynchronize())
        return first_of(out)

    assert len({result(seed) for seed in SEEDS}) == 3, "some seed shows each order"


def test_the_null_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    hip = runtime().hip
    blocking, free = call(hip.hipStreamCreate()), independent_stream()
    one, first, second, third, unseen = ones(), zeros(), zeros(), zeros(), zeros()
    add(one, one, unseen, free)
    add(one, one, first, blocking)  # 2
    add(one, first, second, None)  # 3
    add(one, second, third, blocking)  # 4
    synchronise(blocking)
    host = [np.zeros(BLOCK, dtype=np.float32) for _ in range(4)]
    for target, source in zip(host, (first, second, third, unseen), strict=True):
        call(hip.hipMemcpy(target, source, NBYTES, kind("DeviceToHost")))
    assert [values[0] for values in host] == [2, 3, 4, 0]


def test_queries_say_not_ready_and_come_to_an_end() -> None:
    hip = runtime().hip
    one, out, stream = ones(), zeros(), independent_stream()
    begin, end = call(hip.hipEventCreate()), call(hip.hipEventCreate())
    assert hip.hipStreamQuery(stream)[0].name == "hipSuccess"
    call(hip.hipEventRecord(begin, stream))
    add(one, one, out, stream)
    call(hip.hipEventRecord(end, stream))
    assert hip.hipEventElapsedTime(begin, end)[0].name == "hipErrorNotReady"
    for query, handle in ((hip.hipEventQuery, end), (hip.hipStreamQuery, stream)):
        answers = [query(handle)[0].name for _ in range(4)]
        assert answers[-1] == "hipSuccess"
        assert set(answers) <= {"hipErrorNotReady", "hipSuccess"}
    assert hip.hipGetLastError()[0].name == "hipSuccess", "not ready is no error"
    assert first_of(out) == 2
    assert call(hip.hipEventElapsedTime(begin, end)) >= 0


def test_memory_that_is_not_pinned_follows_hips_rule() -> None:
    # Its source may be reused at once; a result is there when the call returns.
    host, out, stream = np.ones(BLOCK, dtype=np.float32), zeros(), independent_stream()
    copy(out, host, "HostToDevice", stream)
    host[:] = 5
    assert first_of(out) == 0, "on the device it is there only after the stream was waited for"
    copy(host, out, "DeviceToHost", stream)
    assert (host == 1).all()


def test_freeing_waits_for_the_device() -> None:
    one, out, host, stream = ones(), zeros(), Pinned(), independent_stream()
    add(one, one, out, stream)
    copy(host.pointer, out, "DeviceToHost", stream)
    call(runtime().hip.hipFree(one))
    assert (host.array == 2).all()


def test_work_that_is_queued_at_the_end_of_the_process_is_dropped() -> None:
    child = in_child(
        """
library = ctypes.CDLL(os.environ["ROCM_PATH"] + "/lib/libamdhip64.so")
assert library.assay_cpu_checking(1, 0, ctypes.c_uint64(0)) == 0
launch(kernel('leave_before_barrier'), (1,1,1))
assert library.assay_cpu_checking(0, 0, ctypes.c_uint64(0)) == 600
print("end")
"""
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "end\n", "")


def test_the_checks_change_only_with_nothing_queued() -> None:
    one, out, stream = ones(), zeros(), independent_stream()
    add(one, one, out, stream)
    with pytest.raises(RuntimeError, match="work is queued"):
        set_checking(Checking())
    synchronise(stream)
    set_checking(Checking())
    add(one, out, out, stream)
    assert first_of(out) == 3, "without the check work runs at once"
    set_checking(Checking(sanitize=True))
    add(one, out, out, stream)
    assert first_of(out) == 3


# --- errors ---------------------------------------------------------------------------------------


def test_a_kernel_error_comes_with_the_synchronisation_and_names_the_launch() -> None:
    stream = independent_stream()
    launch(kernel("leave_before_barrier"), (1, 1, 1), stream=stream)
    launch(kernel("position"), (1, 1, 1), device_memory(NBYTES), stream=stream)
    words = ("kernel leave_before_barrier (launch ", "thread 9 has returned")
    with reported("hipErrorLaunchFailure", *words):
        synchronise(stream)
    synchronise(stream)  # what was queued behind it is dropped


@pytest.mark.parametrize("target", ["source", "destination"])
def test_pinned_memory_written_while_a_copy_is_queued_is_reported(target: str) -> None:
    host, device, stream = Pinned(), zeros(), independent_stream()
    host.array[:] = 1
    ends = (device, host.pointer) if target == "source" else (host.pointer, device)
    copy(*ends, "HostToDevice" if target == "source" else "DeviceToHost", stream)
    host.array[5] = 2
    side = "from" if target == "source" else "to"
    with reported(
        "hipErrorLaunchFailure", "a copy of 256 bytes", f"while a copy {side} it was queued"
    ):
        synchronise(stream)


def test_pinned_memory_that_the_device_writes_is_no_error() -> None:
    one, out, host, stream = ones(), zeros(), Pinned(), independent_stream()
    host.array[:] = 3
    copy(host.pointer, one, "DeviceToHost", stream)
    copy(out, host.pointer, "HostToDevice", stream)
    add(one, one, host.pointer, stream)
    copy(out, host.pointer, "HostToDevice", stream)
    synchronise(stream)
    assert first_of(out) == 2


def test_a_host_write_is_told_even_when_the_device_writes_there_later() -> None:
    one, out, host, stream = ones(), zeros(), Pinned(), independent_stream()
    host.array[:] = 3
    copy(host.pointer, one, "DeviceToHost", stream)
    copy(out, host.pointer, "HostToDevice", stream)
    host.array[0] = 4
    with reported("hipErrorLaunchFailure", "host memory was written while a copy"):
        synchronise(stream)


def captured(work: Callable[[Any], None]) -> Any:
    """An executable graph of what `work` queues on the stream that it is given."""
    hip = runtime().hip
    stream = independent_stream()
    call(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal))
    work(stream)
    return call(hip.hipGraphInstantiateWithFlags(call(hip.hipStreamEndCapture(stream)), 0))


def test_graph_launches_are_queued_and_their_inputs_watched() -> None:
    hip = runtime().hip
    host, result, total, step, stream = Pinned(), Pinned(), zeros(), zeros(), independent_stream()

    def work(recording: Any) -> None:
        copy(step, host.pointer, "HostToDevice", recording)
        add(total, step, total, recording)
        copy(result.pointer, total, "DeviceToHost", recording)

    graph = captured(work)
    result.array[:] = 0
    for replay in (1, 2, 3):
        host.array[:] = 1
        before = result.array.copy()
        call(hip.hipGraphLaunch(graph, stream))
        np.testing.assert_array_equal(result.array, before)
        synchronise(stream)
        assert (result.array == replay).all()
    call(hip.hipGraphLaunch(graph, stream))
    host.array[:] = 9
    with reported(
        "hipErrorLaunchFailure", "a copy of 256 bytes to the device", "while a copy from"
    ):
        synchronise(stream)


def test_queued_work_on_freed_memory_is_an_error_and_no_crash() -> None:
    hip = runtime().hip
    one, out, stream = ones(), zeros(), independent_stream()
    graph = captured(lambda recording: add(one, one, out, recording))
    call(hip.hipFree(one))
    call(hip.hipGraphLaunch(graph, stream))
    words = ("kernel add (launch ", "argument 0", "expected null or a pointer into a live")
    with reported("hipErrorIllegalAddress", *words):
        synchronise(stream)
    # A launch is refused where it is made, as without the check.
    refused = name_of(lambda: add(ctypes.c_void_p(int(one)), out, out, stream))
    assert refused == "hipErrorInvalidDevicePointer"


def test_queued_work_of_an_unloaded_module_is_an_error_and_no_crash() -> None:
    hip = runtime().hip
    module = call(hip.hipModuleLoadData(code_object(BLOCK, 32)))
    function = call(hip.hipModuleGetFunction(module, b"add"))
    one, out, stream = ones(), zeros(), independent_stream()
    arguments = (one, one, out, ctypes.c_int32(BLOCK))
    launch(function, (1, 1, 1), *arguments, stream=stream)
    call(hip.hipModuleUnload(module))
    with reported("hipErrorLaunchFailure", "kernel add (launch ", "its module was unloaded"):
        synchronise(stream)


def test_both_checks_find_dependent_blocks_at_the_synchronisation() -> None:
    set_checking(Checking(shuffle=3, sanitize=True))
    stream, out = independent_stream(), device_memory(2 * NBYTES)
    call(runtime().hip.hipMemsetAsync(out, 0, 2 * NBYTES, stream))
    # Two blocks write the same byte: the later one decides.
    launch(kernel("last_one"), (3, 1, 1), out, stream=stream)
    with reported("hipErrorLaunchFailure", "kernel last_one", "blocks are not independent"):
        synchronise(stream)
