"""Helpers that drive the CPU stand-in runtime through hip-python alone, and the kernels for it.

Calls that leave the device lost (faults, divergence) run in a child process, which imports this
module and prints what it got.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.compile import flatten
from backend_hip.runtimes import select_runtime

BLOCK = 64
KERNELS = """
SIMT_KERNEL(add, const float* a, const float* b, float* out, int32_t n) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  if (i < n) out[i] = a[i] + b[i];
}
SIMT_KERNEL(mixed_arguments, float scale, uint64_t big, uint32_t* out, int32_t small) {
  if (simt::thread() == 0) {
    out[0] = simt::bits(scale); out[1] = uint32_t(big); out[2] = uint32_t(big >> 32);
    out[3] = uint32_t(small); out[4] = simt::grid_x(); out[5] = simt::grid_y();
  }
}
SIMT_KERNEL(position, uint32_t* out) {
  const int block = (simt::block_z() * simt::grid_y() + simt::block_y()) * simt::grid_x()
                    + simt::block_x();
  out[block * SIMT_BLOCK + simt::thread()] = simt::wave() * 1000 + simt::lane();
}
SIMT_KERNEL(columns_sum, const float* in, float* out, int32_t n) {
  float values[64];
  for (int c = 0; c < n; ++c) values[c] = in[simt::thread() * 64 + c];
  simt::wave_sum(values, n);
  for (int c = 0; c < n; ++c) out[simt::thread() * 64 + c] = values[c];
}
SIMT_KERNEL(wave_operations, const float* in, float* maximum, float* rotated, float* flipped) {
  const float v = in[simt::thread()];
  maximum[simt::thread()] = simt::wave_max(v);
  rotated[simt::thread()] = simt::shuffle(v, simt::lane() + 5);
  flipped[simt::thread()] = simt::shuffle_xor(v, 3);
}
SIMT_KERNEL(shared_memory, uint32_t* fresh, uint32_t* turned) {
  SIMT_SHARED(uint32_t, box, SIMT_BLOCK);
  SIMT_SHARED(uint32_t, other, 3);
  const int at = simt::block_x() * SIMT_BLOCK + simt::thread();
  fresh[at] = box[simt::thread()] & other[simt::thread() % 3];
  simt::sync();
  box[simt::thread()] = at;
  simt::sync();
  turned[at] = box[SIMT_BLOCK - 1 - simt::thread()];
}
SIMT_KERNEL(from_half, const uint32_t* codes, float* out) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  out[i] = simt::half_to_float(uint16_t(codes[i]));
}
SIMT_KERNEL(to_half, const float* in, uint32_t* codes, int32_t n) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  if (i < n) codes[i] = simt::float_to_half(in[i]);
}
SIMT_KERNEL(stack_alignment, uint32_t* out) {
  __attribute__((aligned(16))) float local[4];
  float* p = local;
  asm volatile("" : "+r"(p) : : "memory");  // the compiler must not answer from the declaration
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  out[simt::thread()] = uint32_t(address & 15);
}
SIMT_KERNEL(write_at, unsigned char* out, int64_t at) {
  if (simt::block_x() == 1 && simt::thread() == 5) out[at] = 1;
}
SIMT_KERNEL(last_one, int32_t* out) { if (simt::thread() == 0) out[0] = simt::block_x(); }
SIMT_KERNEL(leave_before_barrier) { if (simt::thread() != 9) simt::sync(); }
SIMT_KERNEL(leave_before_sum, float* out) {
  if (simt::thread() != 9) out[simt::thread()] = simt::wave_sum(1.0f);
}
SIMT_KERNEL(two_meetings, float* out) {
  if (simt::thread() == 9) simt::sync(); else out[0] = simt::wave_sum(1.0f);
}
SIMT_KERNEL(one_wave_leaves) { if (simt::wave() == 0) simt::sync(); }
SIMT_KERNEL(too_many_columns, float* out) {
  float values[2] = {};
  simt::wave_sum(values, 3);
  out[0] = values[0];
}
SIMT_KERNEL(much_shared, float* out) {
  SIMT_SHARED(float, a, 16384);
  SIMT_SHARED(float, b, 1);
  a[0] = b[0] = 0; out[0] = a[0];
}
SIMT_KERNEL(shared_overrun, float* out) {
  SIMT_SHARED(float, a, 4);
  SIMT_SHARED(float, b, 4);
  a[simt::thread() == 0 ? 4 : 0] = 1; b[0] = out[0];
}
SIMT_DEVICE int32_t* opaque(int32_t* p) { asm volatile("" : "+r"(p)); return p; }
__attribute__((noinline)) int32_t dig(int32_t depth) {
  int32_t room[1024];
  int32_t* p = opaque(room);
  p[0] = depth;
  return depth == 0 ? p[0] : dig(depth - 1) + *opaque(p);
}
SIMT_KERNEL(deep, int32_t* out, int32_t depth) { out[simt::thread()] = dig(depth); }
"""


class HipError(Exception):
    """A call's error as its name."""


@cache
def runtime() -> SimpleNamespace:
    """hip and hiprtc bound to the CPU runtime; the same folder that backend_hip.device binds."""
    os.environ["ROCM_PATH"] = str(select_runtime("cpu").rocm_path)
    from hip import hip, hiprtc

    assert hip.has_symbol("assay_runtime_cpu")
    assert hiprtc.has_symbol("assay_runtime_cpu")
    return SimpleNamespace(hip=hip, hiprtc=hiprtc)


def call(result: tuple[Any, ...]) -> Any:
    """The call's value; HipError when it failed."""
    error, *values = result
    if int(error) != 0:
        raise HipError(error.name)
    return values[0] if values else None


def name_of(function: Callable[[], Any]) -> str:
    """The name of the error that a call gives, "hipSuccess" when it gives none."""
    try:
        function()
    except HipError as error:
        return str(error)
    return "hipSuccess"


def compile_source(source: str, *options: str) -> tuple[str, str, bytearray]:
    """hiprtc's result name, its log and the code object."""
    rtc = runtime().hiprtc
    program = call(rtc.hiprtcCreateProgram(source.encode(), b"test.hip", 0, None, None))
    arguments = [option.encode() for option in options]
    (result,) = rtc.hiprtcCompileProgram(program, len(arguments), arguments)
    log = bytearray(call(rtc.hiprtcGetProgramLogSize(program)))
    call(rtc.hiprtcGetProgramLog(program, log))
    code = bytearray()
    if int(result) == 0:
        code = bytearray(call(rtc.hiprtcGetCodeSize(program)))
        call(rtc.hiprtcGetCode(program, code))
    call(rtc.hiprtcDestroyProgram(program.createRef()))
    return result.name, log.rstrip(b"\0").decode(), code


@cache
def code_object(block: int, wave: int, *options: str) -> bytes:
    result, log, code = compile_source(
        flatten("simt.h") + KERNELS,
        *(f"-DSIMT_BLOCK={block}", f"-DSIMT_WAVE={wave}", *options),
        *("-std=c++17", "-O3", "-ffp-contract=off", "--offload-arch=gfx1201"),
    )
    assert result == "HIPRTC_SUCCESS", log
    return bytes(code)


@cache
def kernel(name: str, block: int = BLOCK, wave: int = 32, *options: str) -> Any:
    module = call(runtime().hip.hipModuleLoadData(code_object(block, wave, *options)))
    return call(runtime().hip.hipModuleGetFunction(module, name.encode()))


def launch(
    function: Any,
    grid: tuple[int, int, int],
    *arguments: Any,
    block: int = BLOCK,
    stream: Any = None,
) -> None:
    hip = runtime().hip
    call(
        hip.hipModuleLaunchKernel(
            function, *grid, block, 1, 1, 0, stream, None, extra=tuple(arguments)
        )
    )


def kind(name: str) -> Any:
    return getattr(runtime().hip.hipMemcpyKind, f"hipMemcpy{name}")


def device_memory(nbytes: int) -> Any:
    return call(runtime().hip.hipMalloc(nbytes))


def upload(array: NDArray[Any]) -> Any:
    pointer = device_memory(array.nbytes)
    call(runtime().hip.hipMemcpy(pointer, array, array.nbytes, kind("HostToDevice")))
    return pointer


def download(pointer: Any, shape: Any, dtype: Any) -> NDArray[Any]:
    array = np.zeros(shape, dtype=dtype)
    call(runtime().hip.hipMemcpy(array, pointer, array.nbytes, kind("DeviceToHost")))
    return array


def at(pointer: Any, offset: int) -> int:
    return int(pointer) + offset


def in_child(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `body` in a new process with numpy as np, hip, and everything of this module."""
    code = f"""
import ctypes, os
import numpy as np
from suites.correctness.cpu_driver import *
hip = runtime().hip
{body}
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@dataclass(frozen=True)
class ErrorCase:
    """A call that must fail with `want`; `act` gets (hip, device pointer of 64 bytes, host)."""

    name: str
    want: str
    act: Callable[[Any, Any, NDArray[np.uint8]], Any]
