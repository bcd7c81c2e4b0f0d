"""What the CPU runtime checks beyond what it always does; other runtimes have no such checks.

shuffle   each launch runs in a seeded order of blocks, waves and lanes, in its reverse, and where
          waves of a block can interleave, interleaved: all must leave the same memory
sanitize  stream work runs as late as HIP allows, in an order that the seed chooses where there is a
          choice: what was not waited for is not there

A finding is a sticky error of the call that ran the work: a DeviceError that names kernel, launch
and, where known, block and thread. `recover` makes the device usable again.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from backend_hip.runtimes import LIBRARY, RuntimeInfo
from reference.model.errors import InputError, Unsupported

LARGEST_SEED = 2**64 - 1
_READY = 0
_active: tuple["Checking", RuntimeInfo] | None = None


@dataclass(frozen=True)
class Checking:
    """shuffle: the seed of the orders, None for the plain one; with sanitize the seed also chooses
    between legal orders of queued work (0 where shuffle is None)."""

    shuffle: int | None = None
    sanitize: bool = False

    def __post_init__(self) -> None:
        if self.shuffle is not None and not 0 <= self.shuffle <= LARGEST_SEED:
            raise InputError(f"--shuffle is {self.shuffle}, expected a seed from 0 to 2^64 - 1")

    @property
    def is_on(self) -> bool:
        return self.sanitize or self.shuffle is not None

    @property
    def options(self) -> str:
        """As on a command line; "" when nothing is on."""
        seed = [] if self.shuffle is None else [f"--shuffle {self.shuffle}"]
        return " ".join([*seed, *(["--sanitize"] if self.sanitize else [])])

    def facts(self) -> dict[str, Any]:
        """For the `run` part of a record."""
        return {"shuffle": self.shuffle, "sanitize": self.sanitize}


OFF = Checking()


def require_checkable(runtime: RuntimeInfo, checking: Checking) -> None:
    """Raises Unsupported when `checking` asks for what the runtime can't do."""
    if checking.is_on and runtime.kind != "cpu":
        raise Unsupported(
            f"{checking.options}: the {runtime.kind} runtime can't check this; "
            "supported: --device cpu"
        )


def set_checking(checking: Checking) -> None:
    """Sets what the process's runtime checks from now on, any number of times.

    All queued work must have been waited for. Raises Unsupported where the runtime is not the
    CPU's (turning everything off is fine anywhere), RuntimeError while work is queued and when no
    device is open.
    """
    global _active
    runtime = _runtime()
    require_checkable(runtime, checking)
    if runtime.kind == "cpu":
        seed = checking.shuffle or 0
        arguments = (int(checking.sanitize), int(checking.shuffle is not None))
        if _library(runtime).assay_cpu_checking(*arguments, ctypes.c_uint64(seed)) != _READY:
            raise RuntimeError(
                "set_checking: work is queued, expected none because it was queued under other "
                "rules; synchronise first"
            )
    _active = (checking, runtime)


def checking_of() -> Checking:
    """What is checked now."""
    return OFF if _active is None else _active[0]


def recover() -> None:
    """Drops queued work and forgets a sticky error, so that the CPU runtime can be used again.

    What device memory holds afterwards proves nothing. Raises Unsupported on other runtimes.
    """
    runtime = _runtime()
    if runtime.kind != "cpu":
        raise Unsupported(f"recover: the {runtime.kind} runtime can't; supported: --device cpu")
    _library(runtime).assay_cpu_recover()


def _runtime() -> RuntimeInfo:
    from backend_hip.device import active_runtime  # which imports this package

    runtime = active_runtime()
    if runtime is None:
        raise RuntimeError("checking: no device was opened, expected one because it decides")
    return runtime


def _library(runtime: RuntimeInfo) -> ctypes.CDLL:
    """The library that hip-python has loaded: the same file is the same library in a process."""
    assert runtime.rocm_path is not None
    return ctypes.CDLL(str(runtime.rocm_path / "lib" / LIBRARY))
