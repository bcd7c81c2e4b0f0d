"""Every kernel of the registry compiles for gfx1201 offline, with no ROCm on the machine."""

import os
import re
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest

from backend_hip.compile import OPTIONS, flatten
from backend_hip.dispatch import source_of
from backend_hip.engine import DEFAULT_MAX_COLS
from backend_hip.registry import REGISTRY, KernelRow

FIRST_CLANG_WITH_GFX12 = 18
EM_AMDGPU, MACH_GFX1201 = 224, 0x4E  # ELF header values, LLVM's AMDGPUUsage
PARAMETERS = {"MAX_COLS": DEFAULT_MAX_COLS}
SIZES = {"HEAD_SIZE": 128, "STATE_SIZE": 128, "EXPERTS": 256}


@cache
def _clang() -> str | None:
    for name in ("clang++", *(f"clang++-{version}" for version in range(25, 17, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"version (\d+)", text)
        linker = subprocess.run([path, "-print-prog-name=lld"], capture_output=True, text=True)
        can_link = shutil.which(linker.stdout.strip()) is not None
        if found is not None and int(found[1]) >= FIRST_CLANG_WITH_GFX12 and can_link:
            return path
    return None


@pytest.mark.parametrize("row", list(REGISTRY), ids=lambda row: "-".join(filter(None, row.key)))
def test_compiles_for_gfx1201(row: KernelRow, tmp_path: Path) -> None:
    clang = _clang()
    if clang is None:
        reason = "needs clang 18 or newer and its lld: apt-get install clang-19 lld-19"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    source = source_of(row, PARAMETERS, SIZES.get(row.sized, 0))
    text = tmp_path / source.file
    text.write_text(flatten(source.file))
    target = tmp_path / "kernel.co"
    command = [
        *(clang, "-x", "hip", "--offload-arch=gfx1201", "--offload-device-only"),
        *("-nogpulib", "-nogpuinc", "--no-gpu-bundle-output", "-Wall", "-Wextra", "-Werror"),
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in source.defines),
        *(str(text), "-o", str(target)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header = target.read_bytes()[:64]
    assert header[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", header, 18)
    (flags,) = struct.unpack_from("<I", header, 48)
    assert (machine, flags & 0xFF) == (EM_AMDGPU, MACH_GFX1201)
