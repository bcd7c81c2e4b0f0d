"""A copy of the engine's package with changed source text, loaded beside the one that is installed.

The copy has its own modules, so that nothing that was patched can leak into a sound engine. Both
share hip-python, and with it the runtime of this process. The judge keeps its own, unchanged view
of the registry.
"""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import backend_hip
from fixtures.faults import PATCHED_PACKAGE, Change
from reference.model.errors import InputError

ROOT = Path(backend_hip.__file__).resolve().parents[1]


@dataclass(frozen=True)
class PatchedEngine:
    """`open_device` and `Engine` of a copy; `Engine` has the same arguments as the original's."""

    open_device: Callable[..., Any]
    engine: Callable[..., Any]
    changed_files: tuple[str, ...]


@contextmanager
def patched_engine(changes: Sequence[Change]) -> Iterator[PatchedEngine]:
    """The package with all `changes` made; it can be used inside the block.

    Raises InputError when a change's text is not there exactly once, and when the copy can't be
    written. A change that is no Python raises SyntaxError: a fault that can't run is a mistake in
    the catalogue.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="assay-fault-"))
            _copy(Path(folder), changes)
        except OSError as error:
            raise InputError(
                f"patched engine: a copy of {PATCHED_PACKAGE} can't be written to "
                f"{_where()} ({_reason(error)}); TMPDIR names another folder"
            ) from None
        modules = _import_copy(folder)
        device, engine = modules["backend_hip.device"], modules["backend_hip.engine"]
        files = tuple(dict.fromkeys(change.file for change in changes))
        yield PatchedEngine(device.open_device, engine.Engine, files)


def _copy(folder: Path, changes: Sequence[Change]) -> None:
    # The runtimes' sources and the kernels are read as files, so all of the package is copied.
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / PATCHED_PACKAGE, folder / PATCHED_PACKAGE, ignore=ignored)
    for change in changes:
        path = folder / change.file
        path.write_text(change.apply(path.read_text(encoding="utf-8")), encoding="utf-8")


def _where() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "a temporary folder"


def _reason(error: OSError) -> str:
    """One line; shutil.Error holds a list of (source, target, text)."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        first = error.args[0][0]
        return str(first[2] if isinstance(first, tuple) else first)
    return error.strerror or str(error)


def _import_copy(folder: str) -> dict[str, ModuleType]:
    """Imports the package of `folder` and puts the modules of before back in their place."""
    before = _loaded()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    # Bytecode of the copy would only be written to be deleted.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()
        importlib.import_module(PATCHED_PACKAGE)
        copy = _loaded()
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)
    strays = [n for n, m in copy.items() if not str(m.__file__).startswith(folder)]
    if strays:
        raise RuntimeError(f"patched engine: {strays} were imported from elsewhere")
    return copy


def _loaded() -> dict[str, ModuleType]:
    prefix = f"{PATCHED_PACKAGE}."
    return {
        name: module
        for name, module in sys.modules.items()
        if name == PATCHED_PACKAGE or name.startswith(prefix)
    }
