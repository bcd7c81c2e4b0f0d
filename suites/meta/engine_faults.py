"""Faults in the real engine for tests that run it in their own process.

The catalogue of faults is fixtures/faults.

A change of a kernel's source must match exactly once, or the plant itself is broken.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from backend_hip import compile as compiling
from backend_hip import delta_net
from fixtures.faults import Change, find_fault

Plant = Callable[[pytest.MonkeyPatch], None]


def change_source(patch: pytest.MonkeyPatch, file: str, change: Callable[[str], str]) -> None:
    """Compiles the flattened source of one kernel file as `change` makes it from now on."""
    flatten = compiling.flatten

    def changed(name: str, *rest: Any) -> str:
        text = flatten(name, *rest)
        return change(text) if name == file else text

    patch.setattr(compiling, "flatten", changed)


def kernel(file: str, *changes: tuple[str, str]) -> Plant:
    """Every (old, new) of `changes` in the flattened source of one kernel file."""

    def change(text: str) -> str:
        for old, new in changes:
            text = Change(file, old, new).apply(text)
        return text

    return lambda patch: change_source(patch, file, change)


def catalogued(name: str) -> Plant:
    """A fault of the catalogue whose changes are all in one kernel file."""
    changes = find_fault(name).changes
    (path,) = {change.file for change in changes}
    folder, file = path.rsplit("/", 1)
    if folder != "backend_hip/kernels" or not file.endswith(".hip"):
        raise ValueError(f"faults: {name} changes {path}, expected a kernel file")
    return kernel(file, *((change.old, change.new) for change in changes))


def state_not_reset(patch: pytest.MonkeyPatch) -> None:
    """States are zero once, when they are made."""
    patch.setattr(delta_net.RecurrentState, "reset", lambda self: None)


REAL: Mapping[str, Plant] = {"tail-shifted-at-chunk": catalogued("tail-shifted-at-chunk")}
