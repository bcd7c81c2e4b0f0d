"""What an NVIDIA machine has of what the CUDA runtime needs: the driver with a GPU, and NVRTC.

The driver is asked in a process of its own: an initialised driver does not survive a fork, and the
process that asks may yet choose another runtime. NVRTC is only a compiler and needs no GPU.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from backend_hip.runtimes.compilers import how_it_ended, run_tool
from reference.model.errors import InputError

DRIVER = "libcuda.so.1"
NVRTC = "ASSAY_NVRTC"  # names the library; also how the CUDA runtime is told which was chosen
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")
_TOOLKITS = Path("/usr/local")
_TIMEOUT_S = 120.0  # a machine of many GPUs takes seconds to wake them

# CUDA's numbers: 75 and 76 are the compute capability's attributes.
_QUESTION = f"""
import ctypes
cuda = ctypes.CDLL("{DRIVER}")
status, version, count = cuda.cuInit(0), ctypes.c_int(), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
if status == 0:
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
name, device, part = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
capability = ""
if status == 0 and count.value > 0:
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, 256, device)
    for attribute in (75, 76):
        cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        capability += str(part.value)
print(status, version.value, count.value, capability or "-", name.value.decode(errors="replace"))
"""


@dataclass(frozen=True)
class Driver:
    """A driver that shows at least one GPU. cuda: the newest CUDA that it serves."""

    cuda: tuple[int, int]
    name: str
    architecture: str  # "sm_90"

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture}), driver for CUDA {_dotted(self.cuda)}"


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC's library, by its path, and its version."""

    path: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"NVRTC {_dotted(self.version)}"

    @property
    def identity(self) -> str:
        """Tells builds of one version apart, whose code may differ: it is part of cache keys."""
        real = self.path.resolve()
        return f"{self} ({real.name}, {real.stat().st_size} bytes)"


def find_driver() -> Driver:
    """The driver and its first GPU. Raises InputError that says what is missing."""
    problem = _driver_problem()
    if problem:
        raise InputError(
            f"device: the CUDA runtime needs an NVIDIA driver, but {problem}; install NVIDIA's "
            "driver, or use --device cpu"
        )
    answer = _ask_driver()
    if isinstance(answer, str):
        raise InputError(
            f"device: the CUDA runtime finds no GPU, {answer}; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return answer


def _driver_problem() -> str:
    """Why the driver's library can't be loaded, "" when it can. Loading initialises nothing."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"{DRIVER} can't be loaded ({error})"
    return ""


@functools.cache
def _ask_driver() -> Driver | str:
    """The answer to _QUESTION, or in words why there is none. Asked once a process."""
    try:
        answer = run_tool([sys.executable, "-I", "-c", _QUESTION], timeout=_TIMEOUT_S)
    except (OSError, TimeoutExpired) as error:
        return f"asking the driver failed: {error}"
    words = answer.stdout.split(maxsplit=4)
    if answer.returncode != 0 or len(words) < 4:
        return f"asking the driver {how_it_ended(answer.returncode)}"
    status, version, count = map(int, words[:3])
    if status != 0 or count == 0:
        return f"the driver answers error {status}" if status != 0 else "the driver shows none"
    name = words[4].strip() if len(words) > 4 else "GPU"
    return Driver(_version(version), name, f"sm_{words[3]}")


def find_nvrtc(driver: Driver | None) -> Nvrtc:
    """The first NVRTC that can be loaded and whose code the driver takes (None: any driver).

    Looked for: $ASSAY_NVRTC alone when set, else $CUDA_PATH, $CUDA_HOME, where the loader searches,
    /usr/local/cuda*, and the wheels nvidia-cuda-nvrtc of this environment. Raises InputError.
    """
    chosen = os.environ.get(NVRTC, "").strip()
    problems = []
    for path in [Path(chosen)] if chosen else _candidates():
        try:
            found = _load(path)
        except (OSError, AttributeError) as error:
            if chosen or path.is_absolute():  # a name that the loader doesn't know is just absent
                problems.append(f"{path} can't be loaded: {error}")
            continue
        # Code runs on drivers of its own major version and newer ones.
        if driver is None or found.version[0] <= driver.cuda[0]:
            return found
        problems.append(
            f"{path} is version {_dotted(found.version)}, newer than the driver's CUDA "
            f"{_dotted(driver.cuda)}"
        )
    where = f"{NVRTC} names one that does not serve" if chosen else "none was found that serves"
    major = 13 if driver is None else driver.cuda[0]
    wheel = "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    raise InputError(
        f"device: the CUDA runtime needs NVRTC to compile kernels, but {where}"
        f"{''.join(f' ({problem})' for problem in problems)}; `pip install {wheel}`, install the "
        "CUDA toolkit, or set CUDA_PATH to its folder"
    )


def _candidates() -> Iterator[Path]:
    """Paths and names to try, in order; files that exist, or names that the loader knows."""
    roots = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    yield from _inside(roots)
    yield from map(Path, _NAMES)
    yield from _inside([_TOOLKITS / "cuda", *sorted(_TOOLKITS.glob("cuda-*"), reverse=True)])
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    yield from _inside([folder / part for folder in wheels for part in ("cu13", "cuda_nvrtc")])


def _inside(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield from (root / folder / name for name in _NAMES if (root / folder / name).exists())


class _DlInfo(ctypes.Structure):
    """dladdr's answer: file, its address, symbol, its address."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


def _load(path: Path) -> Nvrtc:
    """The library behind a path or a name. OSError when it can't be loaded, AttributeError when it
    is another library."""
    library = ctypes.CDLL(str(path))
    version = library.nvrtcVersion
    major, minor = ctypes.c_int(), ctypes.c_int()
    if version(ctypes.byref(major), ctypes.byref(minor)) != 0:
        raise OSError("nvrtcVersion failed")
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(version, ctypes.c_void_p), ctypes.byref(info))
    real = Path(os.fsdecode(info.file)) if info.file else path
    return Nvrtc(real, (major.value, minor.value))


def _version(number: int) -> tuple[int, int]:
    """CUDA's 1000 * major + 10 * minor."""
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
