"""Kernel arguments in one packed buffer, typed by a signature.

hip-python would pass a NumPy scalar as a host address, a Python int as 8 bytes and an ndarray as a
host pointer, all in silence, and packs a tuple anew at every launch. Here a signature has a letter
per argument (P pointer, i int32, f float32), every value is checked against it, and the buffer is
packed in place.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

_KINDS = {"P": "a Buffer or DevicePointer", "i": "an int", "f": "a float"}
# hipModuleLaunchKernel's `extra` list (HIP_LAUNCH_PARAM_*).
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3


class DeviceMemory:
    """Anything whose `address` is device memory; only these are taken as pointer arguments."""

    address: int


class DevicePointer(DeviceMemory):
    """An address inside device memory."""

    def __init__(self, address: int) -> None:
        self.address = address


class LaunchArguments:
    """The argument buffer of one kernel and the `extra` list that points to it."""

    def __init__(self, entry: str, signature: str) -> None:
        unknown = set(signature) - set(_KINDS)
        if unknown:
            raise ValueError(
                f"kernel {entry}: signature letter {unknown.pop()} is not one of P i f"
            )
        self._entry = entry
        self._signature = signature
        self._layout = struct.Struct("@" + signature)
        self._buffer = ctypes.create_string_buffer(self._layout.size)
        self._size = ctypes.c_size_t(self._layout.size)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER,
            ctypes.addressof(self._buffer),
            _BUFFER_SIZE,
            ctypes.addressof(self._size),
            _END,
        )

    def pack(self, arguments: Sequence[Any]) -> int:
        """Packs the arguments in place; address of the `extra` list. ValueError if one is off."""
        if len(arguments) != len(self._signature):
            raise ValueError(
                f"kernel {self._entry}: got {len(arguments)} arguments, expected "
                f"{len(self._signature)} because its signature is {self._signature}"
            )
        values = [
            self._value(place, letter, value)
            for place, (letter, value) in enumerate(zip(self._signature, arguments, strict=True))
        ]
        self._layout.pack_into(self._buffer, 0, *values)
        return ctypes.addressof(self._extra)

    def _value(self, place: int, letter: str, value: Any) -> int | float:
        if letter == "P" and isinstance(value, DeviceMemory):
            return value.address
        if letter == "i" and isinstance(value, int) and not isinstance(value, bool):
            return value
        if letter == "f" and isinstance(value, float):
            return value
        raise ValueError(
            f"kernel {self._entry}: argument {place} is {type(value).__name__}, "
            f"expected {_KINDS[letter]}"
        )
