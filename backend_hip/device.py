"""The device layer: everything that speaks to HIP, and nothing else in the product does.

hip-python loads libamdhip64 and libhiprtc at the first HIP call from $ROCM_PATH/lib, so the runtime
is chosen before that and can't change within a process. Errors become DeviceError with call and
code. What hip-python accepts in silence is checked here and in launch_arguments.py: contiguity and
sizes of host arrays, types of launch arguments.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from hip import hip as _hip
from hip import hiprtc as _hiprtc
from numpy.typing import DTypeLike, NDArray

from backend_hip.kernel_use import KernelUse
from backend_hip.launch_arguments import DeviceMemory, DevicePointer, LaunchArguments
from backend_hip.runtimes import RuntimeInfo, select_runtime
from backend_hip.wave import WAVE
from reference.model.errors import DeviceError, InputError, Unsupported

Progress = Callable[[str], None]

# The bindings carry no types worth checking against.
hip: Any = _hip
hiprtc: Any = _hiprtc

_active: RuntimeInfo | None = None


def check(result: Any, call: str) -> Any:
    """What follows the status in a hip-python result; DeviceError on a bad status."""
    status, *values = result
    if status != hip.hipError_t.hipSuccess:
        detail = hip.hipGetErrorString(status)[-1]
        hip.hipGetLastError()  # clears a non-sticky error, so that it is not reported twice
        raise DeviceError(f"{call}: {status.name}, {detail}")
    return values[0] if len(values) == 1 else tuple(values)


class Buffer(DeviceMemory):
    """Device memory. Copies go through the device's stream and wait for it."""

    def __init__(self, device: "Device", nbytes: int, name: str) -> None:
        if nbytes <= 0:
            raise InputError(f"device: {name} has {nbytes} bytes, expected at least 1")
        self._device = device
        self.name = name
        self.nbytes = nbytes
        try:
            self._pointer = check(hip.hipMalloc(nbytes), f"hipMalloc({nbytes} bytes for {name})")
        except DeviceError as error:
            if "OutOfMemory" in str(error) or "MemoryAllocation" in str(error):
                raise InputError(
                    f"device: {nbytes / 2**20:.1f} MiB for {name} do not fit in the memory of "
                    f"{device.label}; a shorter context or a smaller model needs less"
                ) from None
            raise
        self.address = int(self._pointer)

    def at(self, offset_nbytes: int) -> DevicePointer:
        """The address `offset_nbytes` into the buffer."""
        if not 0 <= offset_nbytes < self.nbytes:
            raise InputError(
                f"device: offset {offset_nbytes} is outside {self.name} of {self.nbytes} bytes"
            )
        return DevicePointer(self.address + offset_nbytes)

    def upload(self, array: NDArray[Any], offset_nbytes: int = 0) -> None:
        """Copies a C-contiguous host array in and waits."""
        if not array.flags.c_contiguous:
            raise InputError(f"device: upload to {self.name} needs a C-contiguous array")
        self._require_inside(offset_nbytes, array.nbytes)
        if array.nbytes:
            self._device.stream.copy(
                self.address + offset_nbytes, array.ctypes.data, array.nbytes, to_device=True
            )
            self._device.stream.synchronise()

    def download(
        self, shape: Sequence[int], dtype: DTypeLike, offset_nbytes: int = 0
    ) -> NDArray[Any]:
        """A fresh host array with the buffer's content, once the stream has caught up."""
        array = np.empty(tuple(shape), dtype=dtype)
        self._require_inside(offset_nbytes, array.nbytes)
        if array.nbytes:
            self._device.stream.copy(
                array.ctypes.data, self.address + offset_nbytes, array.nbytes, to_device=False
            )
        self._device.stream.synchronise()
        return array

    def poison(self, offset_nbytes: int = 0, nbytes: int | None = None) -> None:
        """Fills a part, by default all, with 0xFF: NaN as floats, -1 as integers."""
        self._fill(0xFF, offset_nbytes, nbytes)

    def clear(self, offset_nbytes: int = 0, nbytes: int | None = None) -> None:
        """Fills a part, by default all, with zero bytes."""
        self._fill(0, offset_nbytes, nbytes)

    def _fill(self, byte: int, offset_nbytes: int, nbytes: int | None) -> None:
        count = self.nbytes - offset_nbytes if nbytes is None else nbytes
        self._require_inside(offset_nbytes, count)
        if count:
            self._device.stream.fill(self.address + offset_nbytes, byte, count)

    def free(self) -> None:
        if self._pointer is not None:
            check(hip.hipFree(self._pointer), f"hipFree({self.name})")
            self._pointer = None

    def _require_inside(self, offset_nbytes: int, nbytes: int) -> None:
        if offset_nbytes < 0 or offset_nbytes + nbytes > self.nbytes:
            raise InputError(
                f"device: bytes {offset_nbytes} to {offset_nbytes + nbytes} are outside "
                f"{self.name} of {self.nbytes} bytes"
            )


class PinnedArray:
    """Page-locked host memory seen as a NumPy array, for copies inside a captured graph."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> None:
        self.name = name
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._pointer = check(hip.hipHostMalloc(nbytes, 0), f"hipHostMalloc({nbytes} for {name})")
        self.address = int(self._pointer)
        raw = memoryview((ctypes.c_uint8 * nbytes).from_address(self.address)).cast("B")
        self.array: NDArray[Any] = np.frombuffer(raw, dtype=dtype).reshape(tuple(shape))
        self.nbytes = nbytes

    def free(self) -> None:
        if self._pointer is not None:
            self.array = np.empty(0, dtype=self.array.dtype)
            check(hip.hipHostFree(self._pointer), f"hipHostFree({self.name})")
            self._pointer = None


class Event:
    """A point in a stream's work, with time in microseconds between two of them."""

    def __init__(self) -> None:
        self._event = check(hip.hipEventCreate(), "hipEventCreate")

    def record(self, stream: "Stream") -> None:
        check(hip.hipEventRecord(self._event, stream.handle), "hipEventRecord")

    def synchronise(self) -> None:
        check(hip.hipEventSynchronize(self._event), "hipEventSynchronize")

    def elapsed_us(self, end: "Event") -> float:
        """Device time from this event to `end`; both must have been reached."""
        milliseconds = check(
            hip.hipEventElapsedTime(self._event, end._event), "hipEventElapsedTime"
        )
        return float(milliseconds) * 1000.0

    def free(self) -> None:
        if self._event is not None:
            check(hip.hipEventDestroy(self._event), "hipEventDestroy")
            self._event = None


class Graph:
    """A captured sequence of stream operations that replays with one call."""

    def __init__(self, captured: Any) -> None:
        self._graph = captured
        self._executable = check(
            hip.hipGraphInstantiateWithFlags(captured, 0), "hipGraphInstantiateWithFlags"
        )

    def launch(self, stream: "Stream") -> None:
        check(hip.hipGraphLaunch(self._executable, stream.handle), "hipGraphLaunch")

    def free(self) -> None:
        if self._executable is not None:
            check(hip.hipGraphExecDestroy(self._executable), "hipGraphExecDestroy")
            check(hip.hipGraphDestroy(self._graph), "hipGraphDestroy")
            self._executable = None


class Stream:
    """An ordered queue of device work. Asynchronous: hosts of copies must outlive them."""

    def __init__(self) -> None:
        # Non-blocking: it does not wait for the NULL stream, which nothing here uses.
        self.handle = check(hip.hipStreamCreateWithFlags(1), "hipStreamCreateWithFlags")
        self.last_kernel = "none"

    def copy(self, target: int, source: int, nbytes: int, *, to_device: bool) -> None:
        """Queues a copy between host and device memory, by address."""
        kind = hip.hipMemcpyKind
        direction = kind.hipMemcpyHostToDevice if to_device else kind.hipMemcpyDeviceToHost
        check(
            hip.hipMemcpyAsync(target, source, nbytes, direction, self.handle),
            f"hipMemcpyAsync({nbytes} bytes {'to' if to_device else 'from'} device, "
            f"after kernel {self.last_kernel})",
        )

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        check(hip.hipMemsetAsync(target, byte, nbytes, self.handle), "hipMemsetAsync")

    def synchronise(self) -> None:
        check(
            hip.hipStreamSynchronize(self.handle),
            f"hipStreamSynchronize (last kernel queued: {self.last_kernel})",
        )

    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Records what is queued inside the block; the list then holds one Graph."""
        mode = hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
        check(hip.hipStreamBeginCapture(self.handle, mode), "hipStreamBeginCapture")
        result: list[Graph] = []
        try:
            yield result
        except BaseException:
            hip.hipStreamEndCapture(self.handle)  # leaves capture mode; the first error is raised
            raise
        result.append(Graph(check(hip.hipStreamEndCapture(self.handle), "hipStreamEndCapture")))

    def free(self) -> None:
        if self.handle is not None:
            check(hip.hipStreamDestroy(self.handle), "hipStreamDestroy")
            self.handle = None


class Kernel:
    """One entry of a module with a declared signature (see launch_arguments.py)."""

    def __init__(self, module: "Module", entry: str, signature: str, block: int) -> None:
        self.entry = entry
        self.block = block
        self._arguments = LaunchArguments(entry, signature)
        self._function = check(
            hip.hipModuleGetFunction(module.handle, entry.encode()),
            f"hipModuleGetFunction({entry})",
        )

    def use(self) -> KernelUse:
        """What the driver says; all 0 on the CPU runtime, which has nothing of the kind."""
        kinds, function = hip.hipFunction_attribute, self._function
        names = ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
        which = [getattr(kinds, f"HIP_FUNC_ATTRIBUTE_{name}") for name in names]
        use = [check(hip.hipFuncGetAttribute(kind, function), self.entry) for kind in which]
        blocks = hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function, self.block, 0)
        use.append(check(blocks, f"occupancy of {self.entry}"))
        return KernelUse(*use)

    def launch(self, stream: Stream, grid: tuple[int, int], *arguments: Any) -> None:
        """Queues the kernel over a 2-D grid of blocks; the runtime copies the arguments now."""
        extra = self._arguments.pack(arguments)
        stream.last_kernel = self.entry
        check(
            hip.hipModuleLaunchKernel(
                self._function, *grid, 1, self.block, 1, 1, 0, stream.handle, None, extra
            ),
            f"hipModuleLaunchKernel({self.entry}, grid {grid})",
        )


class Module:
    """A loaded code object."""

    def __init__(self, code: bytes, name: str) -> None:
        self._code = code  # the runtime may read the image after the call
        self.handle = check(hip.hipModuleLoadData(code), f"hipModuleLoadData({name})")

    def unload(self) -> None:
        if self.handle is not None:
            check(hip.hipModuleUnload(self.handle), "hipModuleUnload")
            self.handle = None


class Device:
    """One opened device of the chosen runtime, with the stream that all its work uses."""

    def __init__(self, runtime: RuntimeInfo) -> None:
        self.runtime = runtime
        properties = check(hip.hipGetDeviceProperties(0), "hipGetDeviceProperties")
        self.name = str(properties.name)
        self.architecture = str(properties.gcnArchName).split(":")[0]
        self.compute_units = int(properties.multiProcessorCount)
        self.threads_per_unit = int(properties.maxThreadsPerMultiProcessor)
        if int(properties.warpSize) != WAVE:
            raise Unsupported(
                f"device: {self.name} ({self.architecture}) has waves of {properties.warpSize} "
                f"lanes; supported: {WAVE}, as RDNA4 has"
            )
        self.stream = Stream()

    @property
    def label(self) -> str:
        """What produced a figure: `gfx1201`, `cuda sm_90`, `emulated`. Never mixed in a column."""
        return "emulated" if self.runtime.kind == "cpu" else self.architecture

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Source text to a code object through hiprtc. DeviceError carries the compiler's log."""
        program = _check_rtc(
            hiprtc.hiprtcCreateProgram(source.encode(), name.encode(), 0, None, None),
            f"hiprtcCreateProgram({name})",
        )
        try:
            encoded = [option.encode() for option in options]
            result = hiprtc.hiprtcCompileProgram(program, len(encoded), encoded)
            if result[0] != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
                log = _program_log(program)
                raise DeviceError(f"compile: {name} failed, {result[0].name}:\n{log}")
            size = int(_check_rtc(hiprtc.hiprtcGetCodeSize(program), "hiprtcGetCodeSize"))
            code = bytearray(size)
            _check_rtc(hiprtc.hiprtcGetCode(program, code), "hiprtcGetCode")
            return bytes(code)
        finally:
            hiprtc.hiprtcDestroyProgram(program.createRef())

    def __enter__(self) -> "Device":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stream.free()


def _check_rtc(result: Any, call: str) -> Any:
    status, *values = result
    if status != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
        raise DeviceError(f"{call}: {status.name}")
    return values[0] if values else None


def _program_log(program: Any) -> str:
    size = int(_check_rtc(hiprtc.hiprtcGetProgramLogSize(program), "hiprtcGetProgramLogSize"))
    if size <= 1:
        return ""
    log = bytearray(size)
    _check_rtc(hiprtc.hiprtcGetProgramLog(program, log), "hiprtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace")


def open_device(device: str = "auto", *, progress: Progress | None = None) -> Device:
    """Chooses a runtime (building a stand-in on first use) and opens its device 0.

    Raises InputError for a device that is not there and Unsupported when this process already
    runs on another runtime, because hip-python binds its libraries once.
    """
    global _active
    runtime = select_runtime(device, progress=progress)
    if _active is not None and _active.kind != runtime.kind:
        raise Unsupported(
            f"device: {device} was asked for, but this process runs on the {_active.kind} runtime; "
            "supported: one runtime per process"
        )
    if runtime.rocm_path is not None:
        os.environ["ROCM_PATH"] = str(runtime.rocm_path)
    os.environ.update(runtime.environment)
    try:
        _require_identity(runtime)
        count = check(hip.hipGetDeviceCount(), "hipGetDeviceCount")
    except (RuntimeError, OSError) as error:  # hip-python's words for a library that will not load
        raise InputError(
            f"device: the HIP libraries of the {runtime.kind} runtime can't be loaded ({error}); "
            "use --device cpu, or assay doctor to see what is missing"
        ) from None
    except DeviceError as error:
        raise InputError(f"device: the {runtime.kind} runtime finds no device: {error}") from None
    if count < 1:
        raise InputError(f"device: the {runtime.kind} runtime reports no device")
    _active = runtime
    return Device(runtime)


def active_runtime() -> RuntimeInfo | None:
    """The runtime that this process runs on, None before a device was opened."""
    return _active


def _require_identity(runtime: RuntimeInfo) -> None:
    """Refuses a library that is not the chosen one; a ROCm wheel would win over ROCM_PATH."""
    for library in (hip, hiprtc):
        for kind in ("cpu", "cuda"):
            if library.has_symbol(f"assay_runtime_{kind}") != (kind == runtime.kind):
                raise Unsupported(
                    f"device: {library.__name__} loaded another library than the "
                    f"{runtime.kind} runtime; a ROCm SDK wheel in this environment takes "
                    "precedence, remove it"
                )
