"""Builds a stand-in runtime's two libraries into the cache folder, once per source and compiler.

    <cache>/runtimes/NAME-<key>/lib/libamdhip64.so   the HIP entry points
                                    libhiprtc.so     the kernel compiler's entry points
                                    compiler.txt     the command that the CPU's libhiprtc runs
                                    assay-manifest.txt   sizes and hashes of these

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
from dataclasses import dataclass
from pathlib import Path

from backend_hip.runtimes.compilers import Compiler, how_it_ended, run_tool
from backend_hip.runtimes.manifest import damage, write_manifest
from reference.model.cache import cache_folder
from reference.model.errors import InputError

_HERE = Path(__file__).parent
KERNELS = _HERE.parent / "kernels"
LIBRARIES = ("libamdhip64.so", "libhiprtc.so")
HIPRTC = ("hiprtc.cpp", "compile_kernel.cpp")  # make libhiprtc.so; all others libamdhip64.so

_LAYOUT = "3"  # raised when the files of a folder, or how they are linked, change
_UNFINISHED, _BROKEN = ".part-", ".broken-"
_LOAD = "import ctypes, sys; [getattr(ctypes.CDLL(path), sys.argv[1]) for path in sys.argv[2:]]"


@dataclass(frozen=True)
class StandIn:
    """What one stand-in runtime is made of.

    headers: files beside its own folder and the shared one that they include.
    command: whether kernels are compiled by the C++ compiler, whose command is then kept beside.
    machines: where it can be built; empty means anywhere.
    """

    name: str
    title: str
    headers: tuple[Path, ...] = ()
    command: bool = False
    machines: tuple[str, ...] = ()

    def sources(self) -> list[Path]:
        """What is compiled or included from the runtime's own folder and the shared one."""
        folders = (_HERE / "common", _HERE / self.name)
        files = [path for folder in folders for path in sorted(folder.iterdir())]
        return [path for path in files if path.suffix in (".cpp", ".h", ".S")]

    def files(self) -> tuple[str, ...]:
        """What the built folder must hold."""
        return (*LIBRARIES, "compiler.txt") if self.command else LIBRARIES


CPU = StandIn(
    "cpu",
    "CPU runtime",
    headers=(KERNELS / "simt_cpu_abi.h",),
    command=True,
    machines=("x86_64", "aarch64"),  # the fiber switch is assembly
)
CUDA = StandIn("cuda", "CUDA runtime")


def build_runtime(
    runtime: StandIn, compiler: Compiler, progress: Callable[[str], None] | None
) -> Path:
    """The folder that ROCM_PATH must name, built now if the cache lacks it or holds it damaged.

    Raises InputError on a machine that the runtime is not written for, when the cache can't be
    written and when the compiler fails; the text carries the first line of its complaint.
    """
    if runtime.machines and platform.machine() not in runtime.machines:
        raise InputError(
            f"{runtime.title}: the machine is {platform.machine()}, expected one of "
            f"{', '.join(runtime.machines)} because the fiber switch is assembly"
        )
    target = cache_folder("runtimes") / f"{runtime.name}-{runtime_key(runtime, compiler)}"
    say = progress if progress is not None else lambda text: None
    if damage(target / "lib", runtime.files()) is None:
        return target
    try:
        with _locked(target.parent, runtime, say):
            # Another process may have built it meanwhile.
            problem = damage(target / "lib", runtime.files())
            if problem is not None:
                for pattern in (_UNFINISHED, _BROKEN):
                    for leftover in target.parent.glob(f"*{pattern}*"):
                        shutil.rmtree(leftover, ignore_errors=True)
                if os.path.lexists(target):
                    say(f"the cached {runtime.title} is damaged ({problem}): building it again")
                _build_into(target, runtime, compiler, say)
    except OSError as error:
        raise InputError(
            f"{runtime.title}: {error.filename or target} can't be written ({error.strerror}); "
            "ASSAY_CACHE names another folder"
        ) from None
    return target


@contextlib.contextmanager
def _locked(folder: Path, runtime: StandIn, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the only right to change `folder`; the system takes it back when the process ends."""
    import fcntl  # not on Windows, where the package must still import to say what it supports

    with (folder / "lock").open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that builds the {runtime.title}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build_into(
    target: Path, runtime: StandIn, compiler: Compiler, say: Callable[[str], None]
) -> None:
    note = "; zig's first compilation takes about 2 minutes" if compiler.family == "zig" else ""
    say(f"building the {runtime.title} with {compiler.version}{note}")
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}{_UNFINISHED}"))
    try:
        _build(runtime, compiler, scratch / "lib")
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


def runtime_key(runtime: StandIn, compiler: Compiler) -> str:
    """Hash of all that decides what the libraries and the kernels they compile contain."""
    digest = hashlib.sha256()
    for path in [*runtime.sources(), *runtime.headers]:
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


def _build(runtime: StandIn, compiler: Compiler, lib: Path) -> None:
    lib.mkdir()
    sources = [path for path in runtime.sources() if path.suffix != ".h"]
    folders = (_HERE / "common", _HERE / runtime.name, KERNELS)
    flags = [*compiler.shared_object_flags(), *(f"-I{folder}" for folder in folders)]
    objects = lib.with_name("objects")
    objects.mkdir()
    compile_flags = [flag for flag in flags if flag != "-shared"]

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.name}.o"
        command = [*compiler.command, *compile_flags, "-c", "-o", str(target), str(source)]
        _run(runtime, command, target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    hip = [str(part) for source, part in parts.items() if source.name not in HIPRTC]
    hiprtc = [str(part) for source, part in parts.items() if source.name in HIPRTC]
    for name, objects_of in zip(LIBRARIES, (hip, hiprtc), strict=True):
        command = [*compiler.command, *flags, "-o", str(lib / name), *objects_of, "-ldl"]
        _run(runtime, command, lib / name)
    shutil.rmtree(objects)
    if runtime.command:
        command = compiler.kernel_command()
        (lib / "compiler.txt").write_text("".join(f"{part}\n" for part in command))
    _require_loadable(runtime, compiler, [lib / name for name in LIBRARIES])
    write_manifest(lib, runtime.files())


def _run(runtime: StandIn, command: list[str], output: Path) -> None:
    """One compiler call that must write `output`."""
    try:
        answer = run_tool(command)
    except OSError as error:
        raise InputError(f"{runtime.title}: {command[0]} can't be run: {error}") from None
    if answer.returncode != 0:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        message = next((line for line in lines if "error" in line), (lines or ["no message"])[0])
        raise InputError(
            f"{runtime.title}: {command[0]} failed to build it, "
            f"{how_it_ended(answer.returncode)}: {message}"
        )
    if not output.is_file() or output.stat().st_size == 0:
        raise InputError(
            f"{runtime.title}: {command[0]} ended with status 0 but wrote no {output.name}, "
            "expected a working C++ compiler; CXX chooses another"
        )


def _require_loadable(runtime: StandIn, compiler: Compiler, libraries: list[Path]) -> None:
    """Loads what was built in a process of its own, which a broken library may kill."""
    symbol = f"assay_runtime_{runtime.name}"
    answer = run_tool([sys.executable, "-I", "-c", _LOAD, symbol, *map(str, libraries)])
    if answer.returncode != 0:
        why = (answer.stderr.strip().splitlines() or [how_it_ended(answer.returncode)])[-1]
        raise InputError(
            f"{runtime.title}: {compiler.command[0]} built libraries that can't be loaded ({why}); "
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
