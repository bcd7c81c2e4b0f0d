"""The errors that Assay raises on purpose, each with the exit code that the command line gives it.

    AssayError
    ├── InputError    2   the caller's file, option or machine is not what the operation needs
    ├── Unsupported   2   understood, but this product does not do it; the text says what it does
    └── DeviceError   3   the runtime or a kernel failed while running

Texts are one line of the form *op: argument is X, expected Y because Z*.
"""

from typing import ClassVar


class AssayError(Exception):
    """Base of all deliberate errors; `exit_code` is the command line's exit code."""

    exit_code: ClassVar[int] = 3


class InputError(AssayError):
    """Bad input: nothing ran and nothing was written."""

    exit_code: ClassVar[int] = 2


class Unsupported(AssayError):
    """A known thing that is not implemented; the text names what is."""

    exit_code: ClassVar[int] = 2


class DeviceError(AssayError):
    """A device call failed mid-run; the text carries call, code and kernel where known."""

    exit_code: ClassVar[int] = 3
