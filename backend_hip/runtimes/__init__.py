"""Which HIP runtime the process uses: the machine's ROCm, or the CPU stand-in.

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

from backend_hip.runtimes.build import build_cpu_runtime
from backend_hip.runtimes.compilers import find_compiler
from backend_hip.runtimes.manifest import MANIFEST
from reference.model.errors import InputError, Unsupported

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
    """

    kind: Literal["amd", "cuda", "cpu"]
    rocm_path: Path | None
    compiler: str
    detail: str


def select_runtime(device: str, *, progress: Callable[[str], None] | None = None) -> RuntimeInfo:
    """The runtime for `device`: "auto", "amd", "cuda" or "cpu".

    "auto" is amd when the kernel driver's /dev/kfd and ROCm's library are both there, else cpu
    (`progress` is told when only the driver is). The CPU runtime is built into the cache folder on
    first use; `progress` gets a line of text before that.

    Raises InputError for an unknown device, for "amd" without a driver or without ROCm's library,
    and for the CPU without a C++ compiler or with a bad ASSAY_CPU_THREADS; Unsupported for "cuda".
    """
    if device not in DEVICES:
        raise InputError(f"device: {device!r} is unknown, expected one of {', '.join(DEVICES)}")
    if device == "cuda":
        raise Unsupported(
            "device: the CUDA stand-in runtime does not exist yet; supported: amd, cpu"
        )
    has_amd = _AMD_DRIVER.exists()
    if device == "amd" and not has_amd:
        raise InputError(
            f"device: amd was asked for, but {_AMD_DRIVER} does not exist, so no AMD GPU driver "
            "is loaded; use --device cpu"
        )
    if has_amd and device != "cpu" and not _has_rocm():
        if device == "amd":
            raise InputError(
                f"device: amd was asked for and its driver is loaded, but ROCm's {LIBRARY} is "
                f"neither in {_rocm_folder() / 'lib'} nor where the loader searches; install ROCm, "
                "set ROCM_PATH to its folder, or use --device cpu"
            )
        has_amd = False
        if progress is not None:
            progress(f"{_AMD_DRIVER} is there but ROCm's {LIBRARY} is not: running on the CPU")
    if has_amd and device != "cpu":
        return RuntimeInfo("amd", None, "hiprtc", f"the machine's ROCm ({_AMD_DRIVER})")
    _check_threads()
    compiler = find_compiler()
    folder = build_cpu_runtime(compiler, progress)
    return RuntimeInfo("cpu", folder, compiler.version, f"{compiler.version}, build {folder.name}")


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
        return False  # the CPU runtime, which this process or its parent has chosen
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
