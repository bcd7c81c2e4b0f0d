"""The CPU runtime refuses what HIP refuses: memory bounds, arguments, code objects, options."""

import ctypes
import os
from typing import Any

import numpy as np
import pytest

from suites.correctness.cpu_driver import (
    BLOCK,
    ErrorCase,
    at,
    call,
    code_object,
    compile_source,
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


def test_copies_reach_exactly_to_the_end_and_no_further() -> None:
    hip = runtime().hip
    data = np.arange(100, dtype=np.uint8)
    pointer = upload(data)
    host = np.zeros(101, dtype=np.uint8)
    call(hip.hipMemcpy(host, at(pointer, 99), 1, kind("DeviceToHost")))
    assert host[0] == 99
    too_far = "hipErrorInvalidValue"
    assert name_of(lambda: call(hip.hipMemcpy(host, pointer, 101, kind("DeviceToHost")))) == too_far
    assert (
        name_of(lambda: call(hip.hipMemcpy(at(pointer, 1), host, 100, kind("HostToDevice"))))
        == too_far
    )
    assert name_of(lambda: call(hip.hipMemset(at(pointer, 1), 0, 100))) == too_far
    np.testing.assert_array_equal(download(pointer, 100, np.uint8), data)


def test_fresh_memory_is_poisoned_also_when_reused() -> None:
    for _ in range(3):
        pointer = device_memory(40)
        assert (download(pointer, 40, np.uint8) == 0xFF).all()
        call(runtime().hip.hipMemset(pointer, 0, 40))
        assert (download(pointer, 40, np.uint8) == 0).all()
        call(runtime().hip.hipFree(pointer))


ERRORS = [
    ErrorCase("host-to-device-into-host", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipMemcpy(h, h, 8, kind("HostToDevice")))),
    ErrorCase("device-to-host-from-host", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipMemcpy(h, h.copy(), 8, kind("DeviceToHost")))),
    ErrorCase("host-to-device-from-device", "hipErrorInvalidMemcpyDirection",
              lambda hip, d, h: call(hip.hipMemcpy(d, d, 8, kind("HostToDevice")))),
    ErrorCase("device-to-host-into-device", "hipErrorInvalidMemcpyDirection",
              lambda hip, d, h: call(hip.hipMemcpy(d, d, 8, kind("DeviceToHost")))),
    ErrorCase("unknown-direction", "hipErrorInvalidMemcpyDirection",
              lambda hip, d, h: call(hip.hipMemcpy(d, h, 8, kind("DeviceToDeviceNoCU")))),
    ErrorCase("copy-from-null", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipMemcpy(d, None, 8, kind("HostToDevice")))),
    ErrorCase("fill-host", "hipErrorInvalidValue", lambda hip, d, h: call(hip.hipMemset(h, 0, 8))),
    ErrorCase("fill-words-too-far", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipMemsetD32(d, 0, 17))),
    ErrorCase("free-host", "hipErrorInvalidValue", lambda hip, d, h: call(hip.hipFree(h))),
    ErrorCase("free-middle", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipFree(at(d, 16)))),
    ErrorCase("free-device-as-pinned", "hipErrorInvalidValue",
              lambda hip, d, h: call(hip.hipHostFree(d))),
    ErrorCase("out-of-memory", "hipErrorOutOfMemory",
              lambda hip, d, h: call(hip.hipMalloc(1 << 50))),
    ErrorCase("no-such-kernel", "hipErrorNotFound", lambda hip, d, h: call(
        hip.hipModuleGetFunction(call(hip.hipModuleLoadData(code_object(BLOCK, 32))), b"none"))),
    ErrorCase("too-few-arguments", "hipErrorInvalidValue",
              lambda hip, d, h: launch(kernel("add"), (1, 1, 1), d, d, d)),
    ErrorCase("wide-argument", "hipErrorInvalidValue",
              lambda hip, d, h: launch(kernel("write_at"), (1, 1, 1), d, ctypes.c_int64(0), d)),
    ErrorCase("host-pointer-argument", "hipErrorInvalidDevicePointer",
              lambda hip, d, h: launch(kernel("position"), (1, 1, 1), h)),
    ErrorCase("freed-pointer-argument", "hipErrorInvalidDevicePointer",
              lambda hip, d, h: launch(kernel("position"), (1, 1, 1), ctypes.c_void_p(freed()))),
    ErrorCase("block-above-256", "hipErrorInvalidConfiguration",
              lambda hip, d, h: launch(kernel("position"), (1, 1, 1), d, block=257)),
    ErrorCase("block-not-as-compiled", "hipErrorInvalidConfiguration",
              lambda hip, d, h: launch(kernel("position"), (1, 1, 1), d, block=32)),
    ErrorCase("empty-grid", "hipErrorInvalidConfiguration",
              lambda hip, d, h: launch(kernel("position"), (0, 1, 1), d)),
    ErrorCase("foreign-code-object", "hipErrorInvalidImage",
              lambda hip, d, h: call(hip.hipModuleLoadData(b"\x7fELF" + bytes(200)))),
    ErrorCase("damaged-code-object", "hipErrorInvalidImage",
              lambda hip, d, h: call(hip.hipModuleLoadData(damaged()))),
    ErrorCase("second-device", "hipErrorInvalidDevice",
              lambda hip, d, h: call(hip.hipSetDevice(1))),
    ErrorCase("unrecorded-event", "hipErrorInvalidHandle", lambda hip, d, h: call(
        hip.hipEventElapsedTime(call(hip.hipEventCreate()), call(hip.hipEventCreate())))),
    ErrorCase("end-without-begin", "hipErrorIllegalState",
              lambda hip, d, h: call(hip.hipStreamEndCapture(call(hip.hipStreamCreate())))),
    ErrorCase("stale-stream", "hipErrorInvalidHandle",
              lambda hip, d, h: call(hip.hipStreamSynchronize(stale_stream()))),
]  # fmt: skip


def freed() -> int:
    pointer = device_memory(64)
    address = int(pointer)
    call(runtime().hip.hipFree(pointer))
    return address


def stale_stream() -> Any:
    hip = runtime().hip
    stream = call(hip.hipStreamCreate())
    call(hip.hipStreamDestroy(stream))
    return stream


def damaged() -> bytes:
    code = bytearray(code_object(BLOCK, 32))
    code[len(code) // 2] ^= 1
    return bytes(code)


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
def test_error(case: ErrorCase) -> None:
    hip = runtime().hip
    call(hip.hipFree(None))
    hip.hipGetLastError()
    pointer = device_memory(64)
    assert name_of(lambda: case.act(hip, pointer, np.zeros(64, dtype=np.uint8))) == case.want
    assert hip.hipPeekAtLastError()[0].name == case.want
    assert hip.hipGetLastError()[0].name == case.want
    assert hip.hipGetLastError()[0].name == "hipSuccess"
    call(hip.hipFree(pointer))  # the device is not lost


def test_double_free_is_an_error() -> None:
    hip = runtime().hip
    address = ctypes.c_void_p(freed())
    assert name_of(lambda: call(hip.hipFree(address))) == "hipErrorInvalidValue"


def test_compiler_errors_and_unknown_options() -> None:
    result, log, _ = compile_source("int broken = ;")
    assert result == "HIPRTC_ERROR_COMPILATION"
    assert "test.hip:1" in log
    result, log, _ = compile_source("int x;", "-ffast-math")
    assert result == "HIPRTC_ERROR_INVALID_OPTION"
    assert "-ffast-math" in log


def test_device_properties_and_attributes() -> None:
    hip = runtime().hip
    p = call(hip.hipGetDeviceProperties(0))
    assert (p.name, p.gcnArchName) == (b"Assay CPU", b"emulated") or (p.name, p.gcnArchName) == (
        "Assay CPU",
        "emulated",
    )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert p.totalGlobalMem == total
    assert (p.sharedMemPerBlock, p.warpSize, p.maxThreadsPerBlock) == (65536, 32, 256)
    assert p.maxThreadsDim == [256, 1, 1]
    assert p.multiProcessorCount == os.cpu_count()
    assert (p.clockRate, p.isLargeBar, p.asicRevision) == (1_000_000, 0, 0)
    assert p.maxSharedMemoryPerMultiProcessor == 65536
    attribute = hip.hipDeviceAttribute_t
    for name, want in (
        ("WarpSize", 32),
        ("MaxThreadsPerBlock", 256),
        ("MaxSharedMemoryPerBlock", 65536),
        ("MultiprocessorCount", os.cpu_count()),
    ):
        enum = getattr(attribute, f"hipDeviceAttribute{name}")
        assert call(hip.hipDeviceGetAttribute(enum, 0)) == want
    free, reported = hip.hipMemGetInfo()[1:]
    assert 0 < free <= reported == total
