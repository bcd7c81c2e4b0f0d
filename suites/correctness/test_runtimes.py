"""Choosing a runtime and building the CPU one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import backend_hip.runtimes as runtimes
from backend_hip.runtimes import select_runtime
from reference.model.errors import InputError, Unsupported


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    code = "from backend_hip.runtimes import select_runtime; print(select_runtime('cpu').rocm_path)"
    environment = {**os.environ, "ASSAY_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [child.communicate(timeout=300)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0] == answers[1]
    assert [str(path) for path in (tmp_path / "runtimes").iterdir()] == [answers[0]]


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtimes, "_AMD_DRIVER", tmp_path / "kfd")
    with pytest.raises(InputError, match="auto, amd, cuda, cpu"):
        select_runtime("vulkan")
    with pytest.raises(Unsupported, match="supported: amd, cpu"):
        select_runtime("cuda")
    with pytest.raises(InputError, match="kfd does not exist"):
        select_runtime("amd")
    assert select_runtime("auto").kind == "cpu"
    (tmp_path / "kfd").touch()
    assert select_runtime("auto") == select_runtime("amd")
    assert select_runtime("amd").rocm_path is None


def test_no_compiler_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"apt install g\+\+.*pip install 'assay\[compiler\]'"):
        select_runtime("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        select_runtime("cpu")
