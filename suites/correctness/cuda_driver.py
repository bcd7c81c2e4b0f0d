"""Drives the CUDA runtime over a driver without a GPU (fake_cuda.cpp), a process a time."""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backend_hip.runtimes import build
from backend_hip.runtimes.compilers import find_compiler

FAKE = Path(__file__).with_name("fake_cuda.cpp")
PREAMBLE = """
import ctypes, os
from pathlib import Path
import numpy as np
from backend_hip import runtimes
from backend_hip.device import (
    Buffer, Event, Kernel, Module, PinnedArray, Stream, check, hip, open_device
)
from reference.model.errors import DeviceError, InputError

runtimes._AMD_DRIVER = Path("no-card")  # which "auto" would take first

def script(text):
    os.environ["FAKE_CUDA_ERRORS"] = text

def name_of(result):
    return result[0].name
"""


@dataclass(frozen=True)
class Answer:
    """What a child printed and what the driver was called with, a line a call."""

    lines: list[str]
    calls: list[str]

    def of(self, name: str) -> list[str]:
        """The arguments of each call of one function."""
        words = (call.partition(" ") for call in self.calls)
        return [rest for called, _, rest in words if called == name]


@cache
def library(runtime: build.StandIn, name: str) -> ctypes.CDLL:
    """A stand-in's library, built where the cache lacks it, beside what this process runs on."""
    folder = build.build_runtime(runtime, find_compiler(), None)
    return ctypes.CDLL(str(folder / "lib" / name))


def build_fake(folder: Path, *defines: str) -> Path:
    """Compiles the driver; the folder that LD_LIBRARY_PATH must name."""
    command = [
        *(*find_compiler().command, "-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra"),
        *("-Werror", *defines, "-o", str(folder / "libcuda.so.1"), str(FAKE)),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return folder


def run_child(driver: Path, scratch: Path, body: str, **environment: str) -> Answer:
    """Runs `body` after PREAMBLE where the loader finds the driver of that folder."""
    log = scratch / "calls"
    log.write_text("")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ROCM_PATH", "CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")
    }
    fake = {
        "LD_LIBRARY_PATH": str(driver),
        "ASSAY_NVRTC": str(driver / "libcuda.so.1"),
        "FAKE_CUDA_LOG": str(log),
    }
    child = subprocess.run(
        [sys.executable, "-c", PREAMBLE + body],
        env={**kept, **fake, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return Answer(child.stdout.splitlines(), log.read_text().splitlines())
