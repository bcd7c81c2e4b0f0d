"""Kernels for gfx1201 on a machine without ROCm: a clang that knows the target, and its command."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from backend_hip.compile import OPTIONS, KernelSource
from backend_hip.runtimes.compilers import run_tool
from reference.model.errors import InputError

ARCHITECTURE = "gfx1201"
FIRST_CLANG = 18  # the first whose LLVM has gfx1201
LAST_CLANG = 25
INSTALL = "apt-get install clang-19 lld-19, or any from 18"
NAMES = ("clang++", *(f"clang++-{number}" for number in range(LAST_CLANG, FIRST_CLANG - 1, -1)))


@dataclass(frozen=True)
class OfflineClang:
    """A clang that compiles for gfx1201 and can link what it made.

    `version` is all that `--version` prints: part of the key of cached results.
    """

    path: str
    version: str

    def command(self, source: KernelSource, text: Path, target: Path, *more: str) -> list[str]:
        """The command that compiles the flattened `text` of `source` to the code object `target`;
        with "-S" among `more`, to assembly."""
        return [self.path, *options(source), *more, str(text), "-o", str(target)]


def options(source: KernelSource) -> list[str]:
    """Everything on the command line that decides what comes out."""
    defines = dict(source.defines)
    return [
        *("-x", "hip", f"--offload-arch={ARCHITECTURE}", "--offload-device-only"),
        *("-nogpulib", "-nogpuinc", "--no-gpu-bundle-output"),
        *OPTIONS,
        *(["-mwavefrontsize64"] if defines.get("SIMT_WAVE") == 64 else []),
        *(f"-D{name}={value}" for name, value in source.defines),
    ]


def find_clang() -> OfflineClang:
    """`clang++` where it is new enough, else the newest clang++-N.

    Raises InputError with the package to install where none is there, or none that runs, is new
    enough and has its lld.
    """
    problems = []
    for name in NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        problem, version = _version(path)
        if not problem:
            return OfflineClang(path, version)
        problems.append(f"{name} {problem}")
    found = f" ({'; '.join(problems)})" if problems else ""
    raise InputError(
        f"gfx1201: no clang {FIRST_CLANG} or newer with its lld{found}; {INSTALL}, compiles the "
        "kernels for it"
    )


def _version(path: str) -> tuple[str, str]:
    """What is wrong with this clang ("" for nothing), and what `--version` prints."""
    try:
        version = run_tool([path, "--version"], timeout=30).stdout
        linker = run_tool([path, "-print-prog-name=lld"], timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}", ""
    number = re.search(r"clang version (\d+)", version)
    if number is None:
        return "says no version", ""
    if int(number[1]) < FIRST_CLANG:
        return f"is version {number[1]}", ""
    # Its linker is a package of its own, which is only recommended.
    if shutil.which(linker) is None:
        return "lacks its lld", ""
    return "", version
