"""Choosing a runtime, and building the CPU one. test_cuda_runtime.py has CUDA's side."""

import ctypes.util
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import backend_hip.runtimes as runtimes
from backend_hip.runtimes import nvidia, select_runtime
from reference.model.errors import InputError

NO_DRIVER = "libno-such-driver.so.1"


def test_two_processes_repair_at_once(tmp_path: Path) -> None:
    """Both start from a runtime without its compiler library and what a killed build left."""
    built = select_runtime("cpu").rocm_path
    assert built is not None
    broken = tmp_path / "runtimes" / built.name
    (broken / "lib").mkdir(parents=True)
    (broken / "lib" / "libamdhip64.so").write_bytes(b"\x7fELF")
    (tmp_path / "runtimes" / f"{built.name}.part-abc" / "lib" / "objects").mkdir(parents=True)
    code = (
        "from backend_hip.device import open_device\n"
        "with open_device('cpu') as device: print(device.runtime.rocm_path)"
    )
    environment = {**os.environ, "ASSAY_CACHE": str(tmp_path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [child.communicate(timeout=300)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers == [str(broken)] * 2
    assert [str(path) for path in (tmp_path / "runtimes").glob("cpu-*")] == answers[:1]


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtimes, "_AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(nvidia, "DRIVER", NO_DRIVER)
    with pytest.raises(InputError, match="auto, amd, cuda, cpu"):
        select_runtime("vulkan")
    with pytest.raises(InputError, match=f"{NO_DRIVER} can't be loaded"):
        select_runtime("cuda")
    with pytest.raises(InputError, match="kfd does not exist"):
        select_runtime("amd")
    assert select_runtime("auto").kind == "cpu"


class Machine:
    """A machine with the AMD kernel driver and nothing of ROCm; tests add what they need."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.driver = folder / "kfd"
        self.driver.touch()
        self.rocm = folder / "opt-rocm"
        monkeypatch.setattr(runtimes, "_AMD_DRIVER", self.driver)
        monkeypatch.setattr(nvidia, "DRIVER", NO_DRIVER)
        monkeypatch.setattr(runtimes, "_ROCM", self.rocm)
        for name in ("ROCM_PATH", "ROCM_HOME", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
        self.without_wheel()

    def without_wheel(self, spec: object = None) -> None:
        real = importlib.util.find_spec

        def find(name: str, package: str | None = None) -> Any:
            return spec if name == "rocm_sdk" else real(name, package)

        self.monkeypatch.setattr(importlib.util, "find_spec", find)

    def add_library(self, folder: str) -> Path:
        """A folder below this machine's with ROCm's library in it."""
        path = self.folder / folder
        path.mkdir(parents=True)
        (path / "libamdhip64.so").touch()
        return path

    def variable(self, name: str, value: object) -> None:
        self.monkeypatch.setenv(name, str(value))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Place:
    """Where ROCm's library is, and whether hip-python looks there."""

    name: str
    found: bool
    make: Callable[[Machine], object]


def _cpu_runtime() -> Path:
    folder = select_runtime("cpu").rocm_path
    assert folder is not None
    return folder


def _two_folders(machine: Machine) -> None:
    machine.add_library("opt-rocm/lib")
    machine.variable("ROCM_PATH", machine.folder / "elsewhere")


PLACES = [
    Place("nowhere", False, lambda m: None),
    Place("opt-rocm", True, lambda m: m.add_library("opt-rocm/lib")),
    Place("rocm-path", True, lambda m: m.variable("ROCM_PATH", m.add_library("mine/lib").parent)),
    Place("rocm-home", True, lambda m: m.variable("ROCM_HOME", m.add_library("mine/lib").parent)),
    Place("rocm-path-hides-opt", False, _two_folders),
    Place("not-in-lib", False, lambda m: m.variable("ROCM_PATH", m.add_library("mine"))),
    Place("loader-path", True,
          lambda m: m.variable("LD_LIBRARY_PATH", f"/nowhere::{m.add_library('loaded')}")),
    Place("loader", True,
          lambda m: m.monkeypatch.setattr(ctypes.util, "find_library", lambda name: name)),
    Place("wheel", True, lambda m: m.without_wheel(spec=object())),
    # The variable that a process on the CPU runtime leaves to itself and to its children.
    Place("the-cpu-runtime-is-not-rocm", False, lambda m: m.variable("ROCM_PATH", _cpu_runtime())),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_driver_counts_only_with_a_library(place: Place, machine: Machine) -> None:
    place.make(machine)
    lines: list[str] = []
    if place.found:
        chosen = select_runtime("auto", progress=lines.append)
        assert (chosen.kind, chosen.rocm_path, lines) == ("amd", None, [])
        assert select_runtime("amd") == chosen
        return
    assert select_runtime("auto", progress=lines.append).kind == "cpu"
    assert [line for line in lines if "libamdhip64.so is not" in line] == lines[:1]
    assert str(machine.driver) in lines[0]
    with pytest.raises(InputError, match=r"ROCm's libamdhip64\.so is neither in .*lib") as caught:
        select_runtime("amd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("with_rocm", [True, False])
def test_the_cpu_is_chosen_in_silence_beside_a_card(with_rocm: bool, machine: Machine) -> None:
    lines: list[str] = []
    if with_rocm:
        machine.add_library("opt-rocm/lib")
    assert select_runtime("cpu", progress=lines.append).kind == "cpu"
    assert lines == []


def test_no_compiler_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'apt install g\+\+.*`pip install -e "\.\[compiler\]"`'):
        select_runtime("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        select_runtime("cpu")


@pytest.mark.parametrize(
    "value",
    ["0", "abc", "-1", "", "1.5", "9" * 30, "9" * 5000, "1025", " 4", "4\n", "٤", "0x4"],
    ids=lambda value: repr(value[:31]),
)
def test_a_bad_number_of_threads_is_refused_first(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CPU_THREADS", value)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"^ASSAY_CPU_THREADS is '.*', expected .*1 to 1024$"):
        select_runtime("cpu")


@pytest.mark.parametrize("value", ["1", "16", "1024"])
def test_a_good_number_of_threads_is_taken(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CPU_THREADS", value)
    assert select_runtime("cpu").kind == "cpu"
