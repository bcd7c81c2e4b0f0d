"""Which HIP runtime the process uses: the machine's ROCm, or the CPU stand-in.

hip-python loads `$ROCM_PATH/lib/libamdhip64.so` and `libhiprtc.so` at the first HIP call. Choosing
happens here and makes no HIP call; backend_hip.device sets the variable and checks what was loaded.
"""

import ctypes.util
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend_hip.runtimes.build import build_cpu_runtime
from backend_hip.runtimes.compilers import find_compiler
from reference.model.errors import InputError, Unsupported

DEVICES = ("auto", "amd", "cuda", "cpu")
_AMD_DRIVER = Path("/dev/kfd")
_LIBRARY = "libamdhip64.so"


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

    Raises InputError for an unknown device, for "amd" without a driver and without a C++ compiler;
    Unsupported for "cuda".
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
    if device == "auto" and has_amd and not _has_rocm():
        has_amd = False
        if progress is not None:
            progress(f"{_AMD_DRIVER} is there but ROCm's {_LIBRARY} is not: running on the CPU")
    if device == "amd" or (device == "auto" and has_amd):
        return RuntimeInfo("amd", None, "hiprtc", f"the machine's ROCm ({_AMD_DRIVER})")
    compiler = find_compiler()
    folder = build_cpu_runtime(compiler, progress)
    return RuntimeInfo("cpu", folder, compiler.version, f"{compiler.version}, build {folder.name}")


def _has_rocm() -> bool:
    """Whether hip-python will find a HIP library: a ROCm SDK wheel, $ROCM_PATH or /opt/rocm."""
    if importlib.util.find_spec("rocm_sdk") is not None:
        return True
    folders = [os.environ.get("ROCM_PATH"), "/opt/rocm"]
    found = [Path(folder) / "lib" / _LIBRARY for folder in folders if folder]
    return any(path.exists() for path in found) or ctypes.util.find_library("amdhip64") is not None
