"""Typed access to one architecture's metadata keys, remembering what was read.

Keys are GGUF's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A key that nothing
reads is refused by name: it might change the maths.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from reference.model.errors import InputError, Unsupported

T = TypeVar("T")

LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = float(np.finfo(np.float32).max)


class MetadataKeys:
    """Reads `{architecture}.NAME`; names are given without the prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return self._prefix + name in self._metadata

    def count(self, name: str, default: int | None = None, *, zero: bool = False) -> int:
        """A positive whole number, or zero where that is allowed."""
        value = self._value(name)
        if value is None:
            return self._default(name, default, "a count")
        return self._count(name, value, zero)

    def counts(self, name: str, length: int, default: int | None = None) -> list[int]:
        """One positive whole number per block: a list of `length`, or one for all."""
        value = self._value(name)
        if value is None:
            return [self._default(name, default, "a count")] * length
        items = self._list(name, value, length)
        return [self._count(name, item, False) for item in items]

    def flags(self, name: str, length: int) -> list[bool] | None:
        """One truth value per block, or None where the key is absent."""
        value = self._value(name)
        if value is None:
            return None
        items = self._list(name, value, length)
        if not all(isinstance(item, bool | int) and item in (0, 1) for item in items):
            raise InputError(
                f"model: {self._prefix}{name} is {short(value)}, expected true or false per layer"
            )
        return [bool(item) for item in items]

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(name)
        if value is None:
            return self._default(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"model: {self._prefix}{name} is {short(value)}, expected a number")
        if not 0 < value <= LARGEST_NUMBER:
            raise InputError(
                f"model: {self._prefix}{name} is {value}, expected a positive finite float32"
            )
        return float(value)

    def text(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self._value(name)
        if value is None:
            return default
        if value not in choices:
            raise Unsupported(
                f"model: {self._prefix}{name} is {short(value)}; supported: {', '.join(choices)}"
            )
        return str(value)

    def without_effect(self, *names: str) -> None:
        """Marks keys that are known to change nothing in this architecture."""
        self._read.update(self._prefix + name for name in names)

    def is_list(self, name: str) -> bool:
        return isinstance(self._metadata.get(self._prefix + name), list | np.ndarray)

    def refuse_unread(self) -> None:
        """Raises Unsupported for a key of the architecture that nothing asked for."""
        unknown = sorted(
            key for key in self._metadata if key.startswith(self._prefix) and key not in self._read
        )
        if unknown:
            raise Unsupported(
                f"model: metadata key {unknown[0]} (value {short(self._metadata[unknown[0]])}) is "
                f"not known for this architecture and may change its maths; "
                f"known keys: {', '.join(sorted(self._read))}"
            )

    def _value(self, name: str) -> Any:
        self._read.add(self._prefix + name)
        return self._metadata.get(self._prefix + name)

    def _default(self, name: str, default: T | None, what: str) -> T:
        if default is None:
            raise InputError(
                f"model: metadata key {self._prefix}{name} is missing, expected {what}"
            )
        return default

    def _count(self, name: str, value: Any, zero: bool) -> int:
        least = 0 if zero else 1
        whole = not isinstance(value, bool) and isinstance(value, int | np.integer)
        if whole and value > LARGEST_COUNT:
            raise InputError(
                f"model: {self._prefix}{name} is {value}, expected at most {LARGEST_COUNT} because "
                "kernels count in 32 bits"
            )
        if not whole or value < least:
            kind = "whole number" if zero else "positive whole number"
            raise InputError(f"model: {self._prefix}{name} is {short(value)}, expected a {kind}")
        return int(value)

    def _list(self, name: str, value: Any, length: int) -> list[Any]:
        if not isinstance(value, list | np.ndarray):
            return [value] * length
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if len(items) != length:
            raise InputError(
                f"model: {self._prefix}{name} has {len(items)} values, expected {length} because "
                "there are that many blocks"
            )
        return list(items)


def short(value: Any) -> str:
    """A value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
