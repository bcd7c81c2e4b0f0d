"""Every kernel of the registry compiles for gfx1201 offline, with no ROCm on the machine."""

import struct
import subprocess
from pathlib import Path

import pytest

from backend_hip.compile import flatten
from backend_hip.isa import variants_of
from backend_hip.offline import OfflineClang
from backend_hip.registry import REGISTRY, Key
from backend_hip.wave import WAVE
from suites.correctness.tiers import formats_in_ci

EM_AMDGPU, MACH_GFX1201 = 224, 0x4E  # ELF header values, LLVM's AMDGPUUsage


@pytest.mark.parametrize("key", formats_in_ci(row.key for row in REGISTRY))
def test_compiles_for_gfx1201(key: Key, offline_clang: OfflineClang, tmp_path: Path) -> None:
    row = REGISTRY.find(*key)
    _, _, source = variants_of(row, waves=(WAVE,))[-1]
    text = tmp_path / source.file
    text.write_text(flatten(source.file))
    target = tmp_path / "kernel.co"
    command = offline_clang.command(source, text, target, "-Wall", "-Wextra", "-Werror")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header = target.read_bytes()[:64]
    assert header[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", header, 18)
    (flags,) = struct.unpack_from("<I", header, 48)
    assert (machine, flags & 0xFF) == (EM_AMDGPU, MACH_GFX1201)
