"""Builds the CPU runtime's two libraries into the cache folder, once per source, compiler, machine.

    <cache>/runtimes/cpu-<key>/lib/libamdhip64.so   the HIP entry points
                                   libhiprtc.so     the kernel compiler's entry points
                                   compiler.txt     the command that libhiprtc runs
                                   assay-manifest.txt   sizes and hashes of these three

The folder appears by one rename, so a process sees it whole or not at all. One process builds at a
time, under a lock that ends with it: what else lies under the names of unfinished work is left over
from a process that was killed. A damaged folder is built again and replaced under the same lock.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend_hip.runtimes.compilers import Compiler, how_it_ended, run_tool
from backend_hip.runtimes.manifest import damage, write_manifest
from reference.model.cache import cache_folder
from reference.model.errors import InputError

SOURCES = Path(__file__).parent / "cpu"
KERNELS = Path(__file__).parents[1] / "kernels"
ABI_HEADER = KERNELS / "simt_cpu_abi.h"
HIPRTC = "hiprtc.cpp"
MACHINES = ("x86_64", "aarch64")
LIBRARIES = ("libamdhip64.so", "libhiprtc.so")
FILES = (*LIBRARIES, "compiler.txt")

_LAYOUT = "2"  # raised when the files of the folder, or how they are linked, change
_UNFINISHED, _BROKEN = ".part-", ".broken-"
_LOAD = "import ctypes, sys; [ctypes.CDLL(path).assay_runtime_cpu for path in sys.argv[1:]]"


def build_cpu_runtime(compiler: Compiler, progress: Callable[[str], None] | None) -> Path:
    """The folder that ROCM_PATH must name, built now if the cache lacks it or holds it damaged.

    Raises InputError on a machine without a fiber switch, when the cache can't be written and when
    the compiler fails; the text carries the first line of its complaint.
    """
    if platform.machine() not in MACHINES:
        raise InputError(
            f"CPU runtime: the machine is {platform.machine()}, expected one of "
            f"{', '.join(MACHINES)} because the fiber switch is assembly"
        )
    target = cache_folder("runtimes") / f"cpu-{runtime_key(compiler)}"
    say = progress if progress is not None else lambda text: None
    if damage(target / "lib", FILES) is None:
        return target
    try:
        with _locked(target.parent, say):
            problem = damage(target / "lib", FILES)  # another process may have built it meanwhile
            if problem is not None:
                for pattern in (_UNFINISHED, _BROKEN):
                    for leftover in target.parent.glob(f"cpu-*{pattern}*"):
                        shutil.rmtree(leftover, ignore_errors=True)
                if os.path.lexists(target):
                    say(f"the cached CPU runtime is damaged ({problem}): building it again")
                _build_into(target, compiler, say)
    except OSError as error:
        raise InputError(
            f"CPU runtime: {error.filename or target} can't be written ({error.strerror}); "
            "ASSAY_CACHE names another folder"
        ) from None
    return target


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the only right to change `folder`; the system takes it back when the process ends."""
    import fcntl  # not on Windows, where the package must still import to say what it supports

    with (folder / "lock").open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that builds the CPU runtime")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build_into(target: Path, compiler: Compiler, say: Callable[[str], None]) -> None:
    note = "; zig's first compilation takes about 2 minutes" if compiler.family == "zig" else ""
    say(f"building the CPU runtime with {compiler.version}{note}")
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}{_UNFINISHED}"))
    try:
        _build(compiler, scratch / "lib")
        if os.path.lexists(target):
            # Into a new folder, because a rename replaces no folder that holds something.
            aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}{_BROKEN}"))
            os.rename(target, aside / target.name)
            os.rename(scratch, target)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(scratch, target)
    finally:
        # Compiler processes of an interrupted build may still write; the next build removes it.
        shutil.rmtree(scratch, ignore_errors=True)


def runtime_key(compiler: Compiler) -> str:
    """Hash of all that decides what the libraries and the kernels they compile contain."""
    digest = hashlib.sha256()
    for path in [*sorted(SOURCES.iterdir()), ABI_HEADER]:
        if path.suffix in (".cpp", ".h", ".S"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (
        _LAYOUT,
        compiler.version,
        *compiler.kernel_command(),
        *compiler.shared_object_flags(),
        platform.machine(),
        _cpu_features(),  # -march=native
    ):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _build(compiler: Compiler, lib: Path) -> None:
    lib.mkdir()
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.S")])
    flags = [*compiler.shared_object_flags(), "-I", str(KERNELS)]
    objects = lib.with_name("objects")
    objects.mkdir()
    compile_flags = [flag for flag in flags if flag != "-shared"]

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.name}.o"
        _run([*compiler.command, *compile_flags, "-c", "-o", str(target), str(source)], target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    hiprtc = [str(parts.pop(SOURCES / HIPRTC))]
    inputs = ([str(path) for path in parts.values()], hiprtc)
    for name, objects_of in zip(LIBRARIES, inputs, strict=True):
        command = [*compiler.command, *flags, "-o", str(lib / name), *objects_of, "-ldl"]
        _run(command, lib / name)
    shutil.rmtree(objects)
    (lib / "compiler.txt").write_text("".join(f"{part}\n" for part in compiler.kernel_command()))
    _require_loadable(compiler, [lib / name for name in LIBRARIES])
    write_manifest(lib, FILES)


def _run(command: list[str], output: Path) -> None:
    """One compiler call that must write `output`."""
    try:
        answer = run_tool(command)
    except OSError as error:
        raise InputError(f"CPU runtime: {command[0]} can't be run: {error}") from None
    if answer.returncode != 0:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        message = next((line for line in lines if "error" in line), (lines or ["no message"])[0])
        raise InputError(
            f"CPU runtime: {command[0]} failed to build it, {how_it_ended(answer.returncode)}: "
            f"{message}"
        )
    if not output.is_file() or output.stat().st_size == 0:
        raise InputError(
            f"CPU runtime: {command[0]} ended with status 0 but wrote no {output.name}, expected a "
            "working C++ compiler; CXX chooses another"
        )


def _require_loadable(compiler: Compiler, libraries: list[Path]) -> None:
    """Loads what was built in a process of its own, which a broken library may kill."""
    answer = run_tool([sys.executable, "-I", "-c", _LOAD, *map(str, libraries)])
    if answer.returncode != 0:
        why = (answer.stderr.strip().splitlines() or [how_it_ended(answer.returncode)])[-1]
        raise InputError(
            f"CPU runtime: {compiler.command[0]} built libraries that can't be loaded ({why}); "
            "CXX chooses another compiler"
        )


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
