"""Which HIP runtime the process uses: the machine's ROCm, or a stand-in over CUDA or the CPU.

hip-python loads `$ROCM_PATH/lib/libamdhip64.so` and `libhiprtc.so` at the first HIP call. Choosing
happens here and makes no HIP call; backend_hip.device sets the variable and checks what was loaded.
"""

import ctypes.util
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend_hip.runtimes import nvidia
from backend_hip.runtimes.build import CPU, CUDA, build_runtime
from backend_hip.runtimes.compilers import find_compiler
from backend_hip.runtimes.manifest import MANIFEST
from reference.model.errors import InputError

DEVICES = ("auto", "amd", "cuda", "cpu")
_AMD_DRIVER = Path("/dev/kfd")
_ROCM = Path("/opt/rocm")
LIBRARY = "libamdhip64.so"
_THREADS = "ASSAY_CPU_THREADS"
_MOST_THREADS = 1024


@dataclass(frozen=True)
class RuntimeInfo:
    """The chosen runtime.

    rocm_path: folder that ROCM_PATH must name; None leaves hip-python's own search (amd).
    compiler: what compiles kernels, in words.
    detail: identifies the build; part of the key of cached code objects.
    environment: variables that the runtime's libraries read, to be set before the first HIP call.
    """

    kind: Literal["amd", "cuda", "cpu"]
    rocm_path: Path | None
    compiler: str
    detail: str
    environment: tuple[tuple[str, str], ...] = ()


def select_runtime(device: str, *, progress: Callable[[str], None] | None = None) -> RuntimeInfo:
    """The runtime for `device`: "auto", "amd", "cuda" or "cpu".

    "auto" is amd when the kernel driver's /dev/kfd and ROCm's library are both there, else cuda
    when NVIDIA's driver shows a GPU and there is NVRTC, else cpu; `progress` is told of a GPU that
    is not used. A stand-in is built into the cache folder on first use; `progress` gets a line of
    text before that.

    Raises InputError for an unknown device, for "amd" without a driver or without ROCm's library,
    for "cuda" without a driver, a GPU or NVRTC, for either stand-in without a C++ compiler, and for
    a bad ASSAY_CPU_THREADS.
    """
    if device not in DEVICES:
        raise InputError(f"device: {device!r} is unknown, expected one of {', '.join(DEVICES)}")
    say = progress if progress is not None else lambda text: None
    if device in ("auto", "amd"):
        problem = _amd_problem()
        if not problem:
            return RuntimeInfo("amd", None, "hiprtc", f"the machine's ROCm ({_AMD_DRIVER})")
        if device == "amd":
            raise InputError(problem)
        if _AMD_DRIVER.exists():
            say(f"{_AMD_DRIVER} is there but ROCm's {LIBRARY} is not: the card is not used")
    if device == "cuda":
        return _cuda(nvidia.find_driver(), progress)
    if device == "auto":
        try:
            driver = nvidia.find_driver()
        except InputError:
            driver = None  # no GPU of this kind
        if driver is not None:
            try:
                return _cuda(driver, progress)
            except InputError as error:
                say(f"{driver.name} is there but not used, running on the CPU: {error}")
    _check_threads()
    compiler = find_compiler()
    folder = build_runtime(CPU, compiler, progress)
    return RuntimeInfo("cpu", folder, compiler.version, f"{compiler.version}, build {folder.name}")


def _cuda(driver: nvidia.Driver, progress: Callable[[str], None] | None) -> RuntimeInfo:
    nvrtc = nvidia.find_nvrtc(driver)
    folder = build_runtime(CUDA, find_compiler(), progress)
    return RuntimeInfo(
        "cuda",
        folder,
        str(nvrtc),
        f"{nvrtc.identity}, build {folder.name}",
        ((nvidia.NVRTC, str(nvrtc.path)),),
    )


def _amd_problem() -> str:
    """Why the machine's ROCm can't be used, "" when it can."""
    if not _AMD_DRIVER.exists():
        return (
            f"device: amd was asked for, but {_AMD_DRIVER} does not exist, so no AMD GPU driver "
            "is loaded; use --device cpu"
        )
    if not _has_rocm():
        return (
            f"device: amd was asked for and its driver is loaded, but ROCm's {LIBRARY} is "
            f"neither in {_rocm_folder() / 'lib'} nor where the loader searches; install ROCm, "
            "set ROCM_PATH to its folder, or use --device cpu"
        )
    return ""


def _rocm_folder() -> Path:
    """Where hip-python looks first."""
    return Path(os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or _ROCM)


def _has_rocm() -> bool:
    """Whether hip-python will find a HIP library that is ROCm's: a ROCm SDK wheel, the folder that
    ROCM_PATH or ROCM_HOME names, else /opt/rocm, then the loader's folders."""
    if importlib.util.find_spec("rocm_sdk") is not None:
        return True
    lib = _rocm_folder() / "lib"
    if (lib / MANIFEST).exists():
        return False  # a stand-in, which this process or its parent has chosen
    loader = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    searched = [Path(folder) for folder in loader if folder]
    return (
        any((folder / LIBRARY).exists() for folder in (lib, *searched))
        or ctypes.util.find_library("amdhip64") is not None
    )


def _check_threads() -> None:
    """Refuses what the runtime's worker pool would replace by the machine's processors."""
    value = os.environ.get(_THREADS)
    if value is None:
        return
    if re.fullmatch("[1-9][0-9]{0,3}", value) is None or int(value) > _MOST_THREADS:
        shown = value if len(value) <= 40 else f"{value[:40]}..."
        raise InputError(
            f"{_THREADS} is {shown!r}, expected a number of threads from 1 to {_MOST_THREADS}"
        )
