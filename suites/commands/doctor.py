"""`assay doctor`: what this machine has, what is missing and how to get it."""

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from backend_hip.offline import find_clang
from fixtures.registry import published_files
from reference.model.cache import atomic_write, cache_folder
from reference.model.errors import AssayError
from suites.commands import common, tables
from suites.harness.verdict import write_json

PACKAGES = (
    "numpy", "gguf", "hip-python", "tabulate", "rich", "tokenizers", "sentencepiece", "protobuf",
    "platformdirs", "pytest", "pytest-benchmark", "hypothesis", "scipy", "threadpoolctl",
    "ziglang",
)  # fmt: skip
CPU_COMPILERS = ("g++", "clang++")

KINDS = ("amd", "cuda", "cpu")  # what --device auto tries, in order

Row = tuple[str, str, str, str]  # section, name, state, detail


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, what is missing and how to get it",
        description="Lists Python, packages, compilers, HIP runtimes, models and the cache folder. "
        "Exit code 2 where the asked-for device can't be used.",
    )
    common.add_device(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    with common.ProgressReport() as progress:
        devices = {kind: _runtime(kind, progress) for kind in KINDS}
    rows: list[Row] = [
        ("python", "version", "present", f"{platform.python_version()} {sys.executable}"),
        ("python", "platform", "present", platform.platform()),
        *map(_package, PACKAGES),
        *map(_compiler, CPU_COMPILERS),
        _gfx1201_compiler(),
        *_nvidia(),
        *devices.values(),
        *map(_model, published_files()),
        _cache(),
    ]
    wanted = list(KINDS) if arguments.device == "auto" else [arguments.device]
    usable = [kind for kind in wanted if devices[kind][2] == "present"]
    print(tables.wrapped(_shown(rows), ["what", "name", "state", "detail"], tables.width()))
    print()
    if usable:
        print(f"ok: --device {arguments.device} runs on {usable[0]}")
    else:
        reason = devices[wanted[-1]][3]
        print(f"missing: --device {arguments.device} has no runtime here: {reason}")
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "schema": "assay.doctor",
                "schema_version": 1,
                "device": arguments.device,
                "runtime": usable[0] if usable else None,
                "rows": [
                    dict(zip(("section", "name", "state", "detail"), row, strict=True))
                    for row in rows
                ],
            },
        )
    return 0 if usable else 2


def _package(name: str) -> Row:
    try:
        return ("package", name, "present", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return ("package", name, "missing", f"pip install {name}")


def _compiler(name: str) -> Row:
    path = shutil.which(name)
    if path is None:
        return ("compiler", name, "missing", f"apt-get install {_PACKAGE_OF[name]}")
    return ("compiler", name, "present", f"{path} {_first_line(path, '--version')}".strip())


_PACKAGE_OF = {"g++": "g++", "clang++": "clang"}


def _gfx1201_compiler() -> Row:
    """The clang that `assay isa` and the tests compile for gfx1201 with."""
    try:
        return ("compiler", "for gfx1201", "present", find_clang().path)
    except AssayError as error:
        return ("compiler", "for gfx1201", "missing", str(error))


def _nvidia() -> list[Row]:
    """The two parts of the CUDA runtime that the machine must have."""
    from backend_hip.runtimes import nvidia

    driver = None
    try:
        driver = nvidia.find_driver()
        rows: list[Row] = [("nvidia", "driver", "present", str(driver))]
    except AssayError as error:
        rows = [("nvidia", "driver", "missing", str(error))]
    try:
        found = nvidia.find_nvrtc(driver)
    except AssayError as error:
        return [*rows, ("nvidia", "NVRTC", "missing", str(error))]
    version = ".".join(map(str, found.version))
    return [*rows, ("nvidia", "NVRTC", "present", f"{version} {found.path}")]


def _shown(rows: list[Row]) -> list[Row]:
    """The rows, without details that an earlier one has already."""
    said: dict[str, str] = {}
    shown = []
    for section, name, state, detail in rows:
        before = said.setdefault(detail, f"{section} {name}")
        again = before != f"{section} {name}" and len(detail) > len(before)
        shown.append((section, name, state, f"see {before}" if again else detail))
    return shown


def _first_line(path: str, option: str) -> str:
    try:
        shown = subprocess.run(
            [path, option], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (shown.stdout.splitlines() or [""])[0]


def _cache() -> Row:
    try:
        folder = cache_folder("kernels")
        atomic_write(folder / ".doctor", b"")
        (folder / ".doctor").unlink()
    except (AssayError, OSError) as error:
        return ("cache", "folder", "unusable", str(error))
    return ("cache", "folder", "present", str(folder.parent))


def _runtime(kind: str, progress: Callable[[str], None]) -> Row:
    from backend_hip.runtimes import select_runtime

    try:
        info = select_runtime(kind, progress=progress)
    except AssayError as error:
        return ("runtime", kind, "missing", str(error))
    return ("runtime", kind, "present", info.detail)


def _model(name: str) -> Row:
    row = published_files()[name]
    if importlib.util.find_spec(row.module) is None:
        return ("model", name, "missing", f"pip install {row.requires}")
    return ("model", name, "present", f"{row.package} {row.version}, {row.nbytes / 1e6:.0f} MB")
