"""Builds the CPU runtime's two libraries into the cache folder, once per source, compiler, machine.

    <cache>/runtimes/cpu-<key>/lib/libamdhip64.so   the HIP entry points
                                   libhiprtc.so     the kernel compiler's entry points
                                   compiler.txt     the command that libhiprtc runs

The folder appears by one rename, so a process sees it whole or not at all and any number may build
at the same time.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend_hip.runtimes.compilers import Compiler
from reference.model.cache import cache_folder
from reference.model.errors import InputError

SOURCES = Path(__file__).parent / "cpu"
KERNELS = Path(__file__).parents[1] / "kernels"
ABI_HEADER = KERNELS / "simt_cpu_abi.h"
HIPRTC = "hiprtc.cpp"
MACHINES = ("x86_64", "aarch64")


def build_cpu_runtime(compiler: Compiler, progress: Callable[[str], None] | None) -> Path:
    """The folder that ROCM_PATH must name, built now if it is not in the cache.

    Raises InputError on a machine without a fiber switch and when the compiler fails; the text
    carries the first lines of its output.
    """
    if platform.machine() not in MACHINES:
        raise InputError(
            f"CPU runtime: the machine is {platform.machine()}, expected one of "
            f"{', '.join(MACHINES)} because the fiber switch is assembly"
        )
    target = cache_folder("runtimes") / f"cpu-{runtime_key(compiler)}"
    if _is_complete(target):
        return target
    if progress is not None:
        note = "; zig's first compilation takes about 2 minutes" if compiler.family == "zig" else ""
        progress(f"building the CPU runtime with {compiler.version}{note}")
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}.part-"))
    try:
        _build(compiler, scratch / "lib")
        try:
            os.rename(scratch, target)
        except OSError:
            # Another process was first; its folder is as good as ours.
            if not _is_complete(target):
                raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(scratch)
    return target


def runtime_key(compiler: Compiler) -> str:
    """Hash of all that decides what the libraries and the kernels they compile contain."""
    digest = hashlib.sha256()
    for path in [*sorted(SOURCES.iterdir()), ABI_HEADER]:
        if path.suffix in (".cpp", ".h", ".S"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (
        compiler.version,
        *compiler.kernel_command(),
        *compiler.library_flags(),
        platform.machine(),
        _cpu_features(),  # -march=native
    ):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _is_complete(target: Path) -> bool:
    return all(
        (target / "lib" / name).is_file()
        for name in ("libamdhip64.so", "libhiprtc.so", "compiler.txt")
    )


def _build(compiler: Compiler, lib: Path) -> None:
    lib.mkdir()
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.S")])
    flags = [*compiler.library_flags(), "-I", str(KERNELS)]
    objects = lib.with_name("objects")
    objects.mkdir()
    compile_flags = [flag for flag in flags if flag != "-shared"]

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.name}.o"
        _run([*compiler.command, *compile_flags, "-c", "-o", str(target), str(source)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    hiprtc = [str(parts.pop(SOURCES / HIPRTC))]
    for name, inputs in (
        ("libamdhip64.so", [str(path) for path in parts.values()]),
        ("libhiprtc.so", hiprtc),
    ):
        _run([*compiler.command, *flags, "-o", str(lib / name), *inputs, "-ldl"])
    shutil.rmtree(objects)
    (lib / "compiler.txt").write_text("".join(f"{part}\n" for part in compiler.kernel_command()))


def _run(command: list[str]) -> None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"CPU runtime: {command[0]} can't be run: {error}") from None
    if answer.returncode != 0:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["no message"]
        raise InputError(f"CPU runtime: {command[0]} failed to build it: {lines[0]}")


def _cpu_features() -> str:
    """What -march=native can depend on: model and feature flags of the first processor."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                lines.setdefault(name.strip(), value.strip())
    return "\n".join(f"{name}={value}" for name, value in sorted(lines.items()))
