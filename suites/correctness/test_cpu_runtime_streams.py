"""Streams, events, capture and graphs of the CPU runtime."""

import ctypes
from typing import Any

import numpy as np
import pytest

from suites.correctness.cpu_driver import (
    BLOCK,
    ErrorCase,
    call,
    code_object,
    device_memory,
    download,
    kernel,
    kind,
    launch,
    name_of,
    runtime,
    upload,
)

pytestmark = pytest.mark.usefixtures("cpu_session")


def capturing() -> Any:
    hip = runtime().hip
    stream = call(hip.hipStreamCreate())
    call(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal))
    return stream


def test_events_measure_and_order() -> None:
    hip = runtime().hip
    stream = call(hip.hipStreamCreate())
    first, last = call(hip.hipEventCreate()), call(hip.hipEventCreate())
    call(hip.hipEventRecord(first, stream))
    call(hip.hipMemsetAsync(device_memory(1 << 20), 0, 1 << 20, stream))
    call(hip.hipEventRecord(last, stream))
    call(hip.hipStreamWaitEvent(stream, first, 0))
    call(hip.hipEventSynchronize(last))
    call(hip.hipEventQuery(last))
    assert call(hip.hipEventElapsedTime(first, last)) > 0
    for event in (first, last):
        call(hip.hipEventDestroy(event))
    call(hip.hipStreamDestroy(stream))


def test_a_graph_replays_with_the_arguments_of_capture_time() -> None:
    hip = runtime().hip
    a = np.ones(BLOCK, dtype=np.float32)
    total, step = upload(np.zeros(BLOCK, dtype=np.float32)), upload(a)
    values = [ctypes.c_void_p(int(p)) for p in (total, step, total)] + [ctypes.c_int32(BLOCK)]
    addresses = (ctypes.c_void_p * 4)(*[ctypes.addressof(value) for value in values])
    stream = capturing()
    call(hip.hipModuleLaunchKernel(kernel("add"), 1, 1, 1, BLOCK, 1, 1, 0, stream, addresses, None))
    values[1].value = 0xDEAD0000  # whoever reads it at replay is refused
    values[3].value = 0
    host = np.zeros(BLOCK, dtype=np.float32)
    call(hip.hipMemcpyAsync(host, total, host.nbytes, kind("DeviceToHost"), stream))
    graph = call(hip.hipStreamEndCapture(stream))
    assert not host.any()
    executable = call(hip.hipGraphInstantiateWithFlags(graph, 0))
    call(hip.hipGraphDestroy(graph))
    for replay in (1, 2, 3):
        call(hip.hipGraphLaunch(executable, stream))
        call(hip.hipStreamSynchronize(stream))
        np.testing.assert_array_equal(host, np.full(BLOCK, replay))
    call(hip.hipGraphExecDestroy(executable))


FORBIDDEN = [
    ErrorCase("null-stream", "hipErrorStreamCaptureImplicit",
              lambda hip, d, h: launch(kernel("position"), (1, 1, 1), d)),
    ErrorCase("null-stream-copy", "hipErrorStreamCaptureImplicit",
              lambda hip, d, h: call(hip.hipMemcpyAsync(d, h, 8, kind("HostToDevice"), None))),
    ErrorCase("synchronous-copy", "hipErrorStreamCaptureImplicit",
              lambda hip, d, h: call(hip.hipMemcpy(d, h, 8, kind("HostToDevice")))),
    ErrorCase("synchronous-fill", "hipErrorStreamCaptureImplicit",
              lambda hip, d, h: call(hip.hipMemset(d, 0, 8))),
    ErrorCase("malloc", "hipErrorStreamCaptureUnsupported",
              lambda hip, d, h: call(hip.hipMalloc(16))),
    ErrorCase("free", "hipErrorStreamCaptureUnsupported", lambda hip, d, h: call(hip.hipFree(d))),
    ErrorCase("pinned", "hipErrorStreamCaptureUnsupported",
              lambda hip, d, h: call(hip.hipHostMalloc(16, 0))),
    ErrorCase("module-load", "hipErrorStreamCaptureUnsupported",
              lambda hip, d, h: call(hip.hipModuleLoadData(code_object(BLOCK, 32)))),
    ErrorCase("device-synchronise", "hipErrorStreamCaptureUnsupported",
              lambda hip, d, h: call(hip.hipDeviceSynchronize())),
]  # fmt: skip


@pytest.mark.parametrize("case", FORBIDDEN, ids=lambda case: case.name)
def test_forbidden_in_capture(case: ErrorCase) -> None:
    hip = runtime().hip
    kernel("position")
    pointer, host = device_memory(BLOCK * 4), np.zeros(64, dtype=np.uint8)
    stream = capturing()
    assert name_of(lambda: case.act(hip, pointer, host)) == case.want
    fill = name_of(lambda: call(hip.hipMemsetAsync(pointer, 0, 8, stream)))
    assert fill == "hipErrorStreamCaptureInvalidated"
    assert call(hip.hipStreamIsCapturing(stream)).name == "hipStreamCaptureStatusInvalidated"
    end = name_of(lambda: call(hip.hipStreamEndCapture(stream)))
    assert end == "hipErrorStreamCaptureInvalidated"
    call(hip.hipFree(pointer))  # allowed again


def test_synchronising_the_captured_stream_or_event_is_forbidden() -> None:
    hip = runtime().hip
    stream, event = capturing(), call(hip.hipEventCreate())
    call(hip.hipEventRecord(event, stream))
    waiting = name_of(lambda: call(hip.hipEventSynchronize(event)))
    assert waiting == "hipErrorCapturedEvent"
    syncing = name_of(lambda: call(hip.hipStreamSynchronize(stream)))
    assert syncing == "hipErrorStreamCaptureUnsupported"
    end = name_of(lambda: call(hip.hipStreamEndCapture(stream)))
    assert end == "hipErrorStreamCaptureInvalidated"


@pytest.mark.parametrize("join", [True, False])
def test_a_forked_stream_must_be_joined(join: bool) -> None:
    hip = runtime().hip
    pointer = upload(np.zeros(8, dtype=np.uint8))
    other, fork, back = (
        call(hip.hipStreamCreate()),
        call(hip.hipEventCreate()),
        call(hip.hipEventCreate()),
    )
    stream = capturing()
    call(hip.hipEventRecord(fork, stream))
    call(hip.hipStreamWaitEvent(other, fork, 0))
    call(hip.hipMemsetAsync(pointer, 7, 8, other))
    if join:
        call(hip.hipEventRecord(back, other))
        call(hip.hipStreamWaitEvent(stream, back, 0))
        graph = call(hip.hipStreamEndCapture(stream))
        call(hip.hipGraphLaunch(call(hip.hipGraphInstantiateWithFlags(graph, 0)), stream))
        assert (download(pointer, 8, np.uint8) == 7).all()
    else:
        end = name_of(lambda: call(hip.hipStreamEndCapture(stream)))
        assert end == "hipErrorStreamCaptureUnjoined"
        assert (download(pointer, 8, np.uint8) == 0).all()
