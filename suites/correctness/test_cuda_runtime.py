"""The CUDA runtime without a GPU: what it calls in the driver and in NVRTC, and what it answers."""

import re
import subprocess
from pathlib import Path

import pytest

from backend_hip import device as device_layer
from backend_hip.compile import OPTIONS
from backend_hip.runtimes import build, nvidia, select_runtime
from backend_hip.runtimes.compilers import find_compiler
from reference.model.errors import InputError
from suites.correctness.cuda_driver import Answer, build_fake, library, run_child

RUNTIMES = Path(build.__file__).parent


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("fake-cuda"))


def _entry_points(*folders: str) -> set[str]:
    text = "".join(
        path.read_text() for folder in folders for path in (RUNTIMES / folder).glob("*.cpp")
    )
    return set(re.findall(r"^ASSAY_API .*?\b(hip\w+)\(", text, re.MULTILINE))


def test_both_runtimes_export_the_same_entry_points() -> None:
    names = _entry_points("common", "cpu")
    assert len(names) > 60
    assert names == _entry_points("common", "cuda")
    for runtime in (build.CPU, build.CUDA):
        for name in names:
            file = build.LIBRARIES[name.startswith("hiprtc")]
            assert hasattr(library(runtime, file), name), (runtime.name, name)
        for file in build.LIBRARIES:
            own = [hasattr(library(runtime, file), f"assay_runtime_{kind}") for kind in
                   ("cpu", "cuda")]  # fmt: skip
            assert own == [runtime is build.CPU, runtime is build.CUDA]


def test_every_call_of_the_device_layer_is_exported() -> None:
    text = Path(device_layer.__file__).read_text()
    used = set(re.findall(r"\b(?:hip|hiprtc)\.(hip\w+)\(", text)) - {"hipGetDeviceProperties"}
    assert len(used) > 25
    assert used <= _entry_points("common", "cuda")
    assert "hipGetDevicePropertiesR0600" in _entry_points("cuda")


def test_it_compiles_without_a_warning_or_a_toolkit() -> None:
    sources = [path for path in build.CUDA.sources() if path.suffix == ".cpp"]
    includes = [f"-I{RUNTIMES / folder}" for folder in ("common", "cuda")]
    command = [*find_compiler().command, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra"]
    done = subprocess.run(
        [*command, "-Werror", *includes, *map(str, sources)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"#include <(cuda|nvrtc)", "".join(p.read_text() for p in sources))


# --- the driver ---------------------------------------------------------------------------------


def test_the_device_is_labelled_by_its_architecture(fake: Path, tmp_path: Path) -> None:
    answer = run_child(
        fake,
        tmp_path,
        """
with open_device("cuda") as device:
    p = check(hip.hipGetDeviceProperties(0), "properties")
    print(device.label, "/", device.name, "/", device.architecture, "/", device.runtime.compiler)
    print(p.warpSize, p.multiProcessorCount, p.totalGlobalMem, p.clockRate, p.memoryBusWidth)
    print(p.memoryClockRate, p.maxThreadsDim, p.maxSharedMemoryPerMultiProcessor, p.l2CacheSize)
    for name in ("WarpSize", "MultiprocessorCount", "MemoryBusWidth", "MaxSharedMemoryPerBlock"):
        print(check(hip.hipDeviceGetAttribute(
            getattr(hip.hipDeviceAttribute_t, "hipDeviceAttribute" + name), 0), name))
    print(hip.hipDriverGetVersion()[1], hip.hipMemGetInfo()[1:])
print(open_device("auto").runtime.kind)
""",
    )
    assert answer.lines == [
        "cuda sm_90 / Fake GPU / cuda sm_90 / NVRTC 13.0",
        f"32 1016 {1 << 40} 1013 1037",
        "1036 [1002, 1003, 1004] 1081 1038",
        *("32", "1016", "1037", "1008"),
        "13000 (5, 9)",
        "cuda",
    ]
    assert answer.of("cuDevicePrimaryCtxRetain") == ["7"]


LAUNCH = """
device = open_device("cuda")
code = device.compile("the source", "arithmetic.hip", [*{options!r}, "-DX=1",
                      "--offload-arch=" + device.architecture])
kernel = Kernel(Module(code, "module"), "add", "PPPi", 128)
a, b, c = (Buffer(device, 64, "test") for _ in range(3))
kernel.launch(device.stream, (5, 2), a, b, c, -2)
print(*(buffer.address.to_bytes(8, "little").hex() for buffer in (a, b, c)), "feffffff", sep="")
try:
    Kernel(Module(code, "module"), "add", "PPP", 128).launch(device.stream, (1, 1), a, b, c)
    print("accepted")
except DeviceError as error:
    print(error)
""".replace("{options!r}", repr(OPTIONS))


def test_arguments_and_options_arrive_as_cuda_wants_them(fake: Path, tmp_path: Path) -> None:
    answer = run_child(fake, tmp_path, LAUNCH)
    packed, refused = answer.lines
    # HIP ends the list with 3, CUDA with 0; 28 bytes are three pointers and an int.
    assert answer.of("cuLaunchKernel") == [f"5 2 1 128 1 1 0 none 1 2 0 28 {packed}"]
    assert "hipModuleLaunchKernel(add" in refused
    assert "hipErrorInvalidValue" in refused
    (options,) = answer.of("nvrtcCompileProgram")
    assert options.split() == [
        *("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
        *("--generate-line-info", "--gpu-architecture=sm_90", "--std=c++17", "-DX=1"),
    ]
    assert answer.of("cuModuleLoadData")[0] == "7f454c46"  # the frame is taken off
    assert answer.calls.index("cuFuncLoad") < answer.calls.index("cuMemAlloc_v2 64")


def test_what_a_kernel_takes_is_asked_of_the_driver(fake: Path, tmp_path: Path) -> None:
    answer = run_child(fake, tmp_path, LAUNCH + "\nprint(kernel.use())")
    assert answer.lines[-1] == (
        "KernelUse(registers=40, local_nbytes=40, shared_nbytes=40, blocks_per_unit=6)"
    )
    assert answer.of("cuFuncGetAttribute") == ["4", "3", "1"]
    assert answer.of("cuOccupancyMaxActiveBlocksPerMultiprocessor") == ["128 0"]


def test_a_driver_that_names_no_parameters_launches_unchecked(tmp_path: Path) -> None:
    driver = build_fake(tmp_path, "-DWITHOUT_PARAMETERS")
    answer = run_child(driver, tmp_path, LAUNCH)
    assert answer.lines[1] == "accepted"
    assert len(answer.of("cuLaunchKernel")) == 2


def test_capture_events_and_streams_pass_through(fake: Path, tmp_path: Path) -> None:
    answer = run_child(
        fake,
        tmp_path,
        """
device = open_device("cuda")
for mode in ("Global", "ThreadLocal", "Relaxed"):
    stream = check(hip.hipStreamCreate(), "create")
    mode = getattr(hip.hipStreamCaptureMode, "hipStreamCaptureMode" + mode)
    check(hip.hipStreamBeginCapture(stream, mode), "begin")
    print(hip.hipStreamIsCapturing(stream)[1].name)
with device.stream.capture() as captured:
    device.stream.fill(Buffer(device, 16, "x").address, 0xFF, 16)
captured[0].launch(device.stream)
captured[0].free()
start, end = Event(), Event()
start.record(device.stream)
print(start.elapsed_us(end))
pinned = PinnedArray((4,), np.int32, "pinned")
pinned.free()
check(hip.hipEventCreateWithFlags(0x80000002), "flags of HIP's own")
script("cuStreamQuery=600")
print(name_of(hip.hipStreamQuery(device.stream.handle)), name_of(hip.hipPeekAtLastError()))
""",
    )
    invalidated = "hipStreamCaptureStatusInvalidated"
    assert answer.lines == [*[invalidated] * 3, "1500.0", "hipErrorNotReady hipSuccess"]
    assert answer.of("cuStreamBeginCapture_v2") == ["0", "1", "2", "1"]
    assert answer.of("cuStreamCreate") == ["1", "0", "0", "0"]
    assert answer.of("cuMemsetD8Async") == ["255 16"]
    assert answer.of("cuGraphInstantiateWithFlags") == ["0"]
    for name in ("cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy"):
        assert len(answer.of(name)) == 1, name
    assert answer.of("cuEventCreate") == ["0", "0", "2"]
    assert answer.of("cuMemHostAlloc") == ["16 0"]


def test_copies_are_held_to_their_direction_and_allocation(fake: Path, tmp_path: Path) -> None:
    answer = run_child(
        fake,
        tmp_path,
        """
device = open_device("cuda")
d, h = check(hip.hipMalloc(64), "malloc"), np.zeros(65, dtype=np.uint8)
kinds = hip.hipMemcpyKind
def copy(dst, src, nbytes, kind):
    print(name_of(hip.hipMemcpy(dst, src, nbytes, getattr(kinds, "hipMemcpy" + kind))))
copy(d, h, 64, "HostToDevice")
copy(d, h, 65, "HostToDevice")
copy(h, h, 8, "HostToDevice")
copy(d, d, 8, "HostToDevice")
copy(d, h, 8, "DeviceToDeviceNoCU")
copy(d, None, 8, "HostToDevice")
copy(h, d, 64, "Default")
for result in (hip.hipMemset(d, 1, 65), hip.hipMemset(h, 1, 8), hip.hipMemset(d, 257, 64),
               hip.hipMemsetD32(d, -1, 16), hip.hipMemsetD32(d, -1, 17), hip.hipFree(h),
               hip.hipFree(None), hip.hipFree(d), hip.hipMalloc(0)):
    print(name_of(result))
""",
    )
    bad, direction, fine = "hipErrorInvalidValue", "hipErrorInvalidMemcpyDirection", "hipSuccess"
    assert answer.lines == [
        *(fine, bad, bad, direction, direction, bad, fine),
        *(bad, bad, fine, fine, bad, bad, fine, fine, fine),
    ]
    assert answer.of("cuMemcpy") == ["64", "64"]
    assert answer.of("cuMemsetD8_v2") == ["1 64"]
    assert answer.of("cuMemsetD32_v2") == ["4294967295 16"]
    # Each synchronous call waits for the NULL stream, which other streams don't.
    assert answer.of("cuStreamSynchronize") == ["null"] * 4


# --- errors -------------------------------------------------------------------------------------

ERRORS = {
    1: "hipErrorInvalidValue",
    2: "hipErrorOutOfMemory",
    3: "hipErrorNotInitialized",
    100: "hipErrorNoDevice",
    209: "hipErrorNoBinaryForGpu",
    222: "hipErrorUnknown",  # HIP has no number for an unsupported PTX version
    400: "hipErrorInvalidHandle",
    401: "hipErrorIllegalState",
    500: "hipErrorNotFound",
    701: "hipErrorLaunchOutOfResources",
    801: "hipErrorNotSupported",
    900: "hipErrorStreamCaptureUnsupported",
    901: "hipErrorStreamCaptureInvalidated",
    902: "hipErrorStreamCaptureMerge",
    903: "hipErrorStreamCaptureUnmatched",
    904: "hipErrorStreamCaptureUnjoined",
    905: "hipErrorStreamCaptureIsolation",
    906: "hipErrorStreamCaptureImplicit",
    907: "hipErrorCapturedEvent",
    908: "hipErrorStreamCaptureWrongThread",
    999: "hipErrorUnknown",
}


def test_errors_have_hip_names_and_pass(fake: Path, tmp_path: Path) -> None:
    answer = run_child(
        fake,
        tmp_path,
        f"""
device = open_device("cuda")
for code in {list(ERRORS)}:
    script(f"cuStreamSynchronize={{code}}")
    result = hip.hipStreamSynchronize(device.stream.handle)
    assert hip.hipGetErrorString(result[0])[-1], code
    script("")
    print(name_of(result), name_of(hip.hipGetLastError()), name_of(hip.hipGetLastError()))
for code in (1, 2):
    script(f"cuMemAlloc_v2={{code}}")
    try:
        Buffer(device, 1 << 20, "much")
    except InputError as error:
        print(error)
""",
    )
    expected = [f"{name} {name} hipSuccess" for name in ERRORS.values()]
    refused = "device: 1.0 MiB for much do not fit in the memory of cuda sm_90; "
    assert answer.lines[:-2] == expected
    assert all(line.startswith(refused) for line in answer.lines[-2:])


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (700, "hipErrorIllegalAddress"),
        (716, "hipErrorLaunchFailure"),  # a misaligned address: HIP has no number
        (719, "hipErrorLaunchFailure"),
    ],
)
def test_a_lost_device_stays_lost(code: int, name: str, fake: Path, tmp_path: Path) -> None:
    answer = run_child(
        fake,
        tmp_path,
        f"""
device = open_device("cuda")
script("cuStreamSynchronize={code}")
try:
    device.stream.synchronise()
except DeviceError as error:
    print(error)
script("")
print(name_of(hip.hipMalloc(16)), name_of(hip.hipGetLastError()), name_of(hip.hipGetLastError()))
""",
    )
    assert answer.lines[0].startswith("hipStreamSynchronize")
    assert name in answer.lines[0]
    assert "cuStreamSynchronize: CUDA_ERROR_FAKE, a scripted error" in answer.lines[0]
    assert answer.lines[1] == f"{name} {name} {name}"
    assert answer.of("cuMemAlloc_v2") == []


# --- what may be missing ------------------------------------------------------------------------

OPEN = """
for device in ("cuda", "auto"):
    lines = []
    try:
        print(open_device(device, progress=lines.append).runtime.kind)
    except InputError as error:
        print(error)
    print(*(line for line in lines if "not used" in line))
"""


def _opened(fake: Path, scratch: Path, **environment: str) -> list[str]:
    answer: Answer = run_child(fake, scratch, OPEN, **environment)
    assert len(answer.lines) == 4
    return answer.lines


def test_no_driver_and_no_gpu_are_one_line(fake: Path, tmp_path: Path) -> None:
    cuda, _, auto, said = _opened(fake, tmp_path, FAKE_CUDA_NO_GPU="1")
    assert cuda.startswith("device: the CUDA runtime finds no GPU, the driver shows none; check")
    assert (auto, said) == ("cpu", "")
    cuda, _, auto, said = _opened(fake, tmp_path, FAKE_CUDA_ERRORS="cuInit=999")
    assert "the driver answers error 999" in cuda
    assert (auto, said) == ("cpu", "")


def test_a_gpu_without_nvrtc_is_said_and_the_cpu_runs(fake: Path, tmp_path: Path) -> None:
    cuda, _, auto, said = _opened(fake, tmp_path, ASSAY_NVRTC=str(tmp_path / "libnvrtc.so"))
    assert "libnvrtc.so can't be loaded" in cuda
    assert "`pip install nvidia-cuda-nvrtc`" in cuda
    assert auto == "cpu"
    assert said.startswith("Fake GPU is there but not used, running on the CPU: ")


def test_code_that_the_driver_would_not_take_is_not_made(fake: Path, tmp_path: Path) -> None:
    cuda, _, auto, said = _opened(fake, tmp_path, FAKE_NVRTC_MAJOR="14")
    assert "is version 14.0, newer than the driver's CUDA 13.0" in cuda
    assert (auto, "Fake GPU" in said) == ("cpu", True)


def test_an_old_driver_is_named_by_what_it_lacks(tmp_path: Path) -> None:
    driver = build_fake(tmp_path, "-DWITHOUT_GRAPHS")
    answer = run_child(driver, tmp_path, OPEN.replace(', "auto"', ","))
    assert "libcuda.so.1 has no cuGraphLaunch, expected NVIDIA's driver for CUDA" in answer.lines[0]


def test_no_driver_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "DRIVER", "libno-such-driver.so.1")
    with pytest.raises(InputError, match=r"needs an NVIDIA driver.*install NVIDIA's") as caught:
        select_runtime("cuda")
    assert "\n" not in str(caught.value)
