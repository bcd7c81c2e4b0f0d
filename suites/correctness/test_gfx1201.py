"""Every kernel of the registry compiles for gfx1201 offline, with no ROCm on the machine."""

import struct
from collections.abc import Callable
from functools import cache

import pytest

from backend_hip.compile import KernelSource, flatten
from backend_hip.isa import variants_of
from backend_hip.offline import OfflineClang
from backend_hip.registry import REGISTRY, Key
from backend_hip.runtimes.compilers import run_tool
from backend_hip.wave import WAVE
from suites.correctness.tiers import formats_in_ci

EM_AMDGPU, MACH_GFX1201 = 224, 0x4E  # ELF header values, LLVM's AMDGPUUsage


@pytest.fixture(scope="module")
def code_of(
    offline_clang: OfflineClang, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[KernelSource], tuple[bytes, str]]:
    """The code object of a source, which rows may share, and clang's words, warnings as errors."""

    @cache
    def compiled(source: KernelSource) -> tuple[bytes, str]:
        folder = tmp_path_factory.mktemp("gfx1201")
        text, target = folder / source.file, folder / "kernel.co"
        text.write_text(flatten(source.file))
        command = offline_clang.command(source, text, target, "-Wall", "-Wextra", "-Werror")
        done = run_tool(command)
        return (target.read_bytes() if done.returncode == 0 else b""), done.stderr

    return compiled


@pytest.mark.parametrize("key", formats_in_ci(row.key for row in REGISTRY))
def test_compiles_for_gfx1201(
    key: Key, code_of: Callable[[KernelSource], tuple[bytes, str]]
) -> None:
    row = REGISTRY.find(*key)
    _, _, source = variants_of(row, waves=(WAVE,))[-1]
    code, said = code_of(source)
    assert code, said
    assert code[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", code, 18)
    (flags,) = struct.unpack_from("<I", code, 48)
    assert (machine, flags & 0xFF) == (EM_AMDGPU, MACH_GFX1201)
    assert f"\0{row.entry}\0".encode() in code  # a symbol of it


@pytest.mark.parametrize("file", ["bandwidth.hip", "matrix_rate.hip", "expand_kv.hip"])
def test_what_no_engine_launches_compiles_too(
    file: str, code_of: Callable[[KernelSource], tuple[bytes, str]]
) -> None:
    code, said = code_of(KernelSource(file, (("SIMT_BLOCK", 256), ("SIMT_WAVE", WAVE))))
    assert code[:4] == b"\x7fELF", said
