"""Faults in the real engine for tests that run it in their own process.

The catalogue of faults is fixtures/faults.

A change of a kernel's source must match exactly once, or the plant itself is broken.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from backend_hip import compile as compiling
from backend_hip import delta_net
from fixtures.faults import find_fault

Plant = Callable[[pytest.MonkeyPatch], None]


def kernel(file: str, *changes: tuple[str, str]) -> Plant:
    """Every (old, new) of `changes` in the flattened source of one kernel file."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        flatten = compiling.flatten

        def broken(name: str, *rest: Any) -> str:
            text = flatten(name, *rest)
            if name != file:
                return text
            for old, new in changes:
                if text.count(old) != 1:
                    raise AssertionError(f"{file}: {old!r} is there {text.count(old)} times")
                text = text.replace(old, new)
            return text

        patch.setattr(compiling, "flatten", broken)

    return plant


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
    reset, seen = delta_net.RecurrentState.reset, set[int]()

    def broken(self: delta_net.RecurrentState) -> None:
        if id(self) not in seen:
            seen.add(id(self))
            reset(self)

    patch.setattr(delta_net.RecurrentState, "reset", broken)


REAL: Mapping[str, Plant] = {"tail-shifted-at-chunk": catalogued("tail-shifted-at-chunk")}
