"""Cached kernels: a file that is not what was compiled is compiled again, on every runtime."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from backend_hip.compile import KernelSource, build
from backend_hip.device import Buffer, Device, Kernel, Module
from backend_hip.runtimes import RuntimeInfo
from reference.model.errors import InputError

ADD = KernelSource("arithmetic.hip", (("SIMT_BLOCK", 128), ("SIMT_WAVE", 32)))
OTHER = KernelSource("arithmetic.hip", (("SIMT_BLOCK", 64), ("SIMT_WAVE", 32)))

GPU = RuntimeInfo("amd", None, "hiprtc", "a GPU by name only")


@dataclass
class CountingDevice:
    """Compiles nothing and counts; of a runtime that does not check code objects itself."""

    label: str = "gfx1201"
    architecture: str = "gfx1201"
    runtime: RuntimeInfo = GPU
    compiled: list[str] = field(default_factory=list)

    def compile(self, source: str, name: str, options: list[str]) -> bytes:
        self.compiled.append(name)
        return b"code for " + " ".join(options).encode()


@dataclass
class Cache:
    """A folder with the two kernels, and the device that compiled them."""

    folder: Path
    device: CountingDevice = field(default_factory=CountingDevice)
    lines: list[str] = field(default_factory=list)

    def build(self) -> dict[KernelSource, bytes]:
        device = cast(Device, self.device)
        return dict(build(device, [ADD, OTHER], progress=self.lines.append))

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    return Cache(tmp_path / "kernels")


def _flip(at: int) -> Callable[[bytes], bytes]:
    def act(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at] ^= 1
        return bytes(changed)

    return act


@dataclass(frozen=True)
class Damage:
    name: str
    act: Callable[[bytes], bytes]


DAMAGES = [
    Damage("empty", lambda content: b""),
    Damage("one-byte-short", lambda content: content[:-1]),
    Damage("one-byte-long", lambda content: content + b"\0"),
    Damage("half", lambda content: content[: len(content) // 2]),
    Damage("first-byte", _flip(0)),
    Damage("checksum", _flip(25)),
    Damage("last-byte", _flip(-1)),
    Damage("zeros", lambda content: bytes(len(content))),
    Damage("code-without-checksum", lambda content: content[-30:]),
]


@pytest.mark.parametrize("case", DAMAGES, ids=lambda case: case.name)
def test_a_damaged_kernel_is_compiled_again_once(case: Damage, cache: Cache) -> None:
    want = cache.build()
    assert len(cache.device.compiled) == 2
    first, second = cache.files()
    whole = first.read_bytes(), second.read_bytes()
    first.write_bytes(case.act(whole[0]))
    assert first.read_bytes() != whole[0]
    cache.lines.clear()
    assert cache.build() == want
    assert len(cache.device.compiled) == 3
    assert cache.lines[0] == "compiling 1 kernels for gfx1201; the cache holds 1 of them damaged"
    assert (first.read_bytes(), second.read_bytes()) == whole
    cache.lines.clear()
    assert cache.build() == want
    assert (len(cache.device.compiled), cache.lines) == (3, [])


def test_a_kernel_under_another_kernels_name_is_damage(cache: Cache) -> None:
    want = cache.build()
    assert want[ADD] != want[OTHER]
    first, second = cache.files()
    first.write_bytes(second.read_bytes())
    assert cache.build() == want
    assert len(cache.device.compiled) == 3


@pytest.mark.parametrize("kind", ["folder", "forbidden"])
def test_an_unreadable_kernel_is_one_line(
    kind: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.build()
    path = cache.files()[0]
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        read = Path.read_bytes

        def forbid(self: Path) -> bytes:
            if self == path:
                raise PermissionError(13, "Permission denied", str(path))
            return read(self)

        monkeypatch.setattr(Path, "read_bytes", forbid)
    with pytest.raises(InputError, match=rf"{path.name} can't be read.*ASSAY_CACHE") as caught:
        cache.build()
    assert "\n" not in str(caught.value)


def test_a_damaged_kernel_runs_after_it_was_compiled_again(device: Device, cache: Cache) -> None:
    build(device, [ADD])
    (path,) = cache.files()
    path.write_bytes(path.read_bytes()[:-100])
    code = build(device, [ADD], progress=cache.lines.append)[ADD]
    assert "damaged" in cache.lines[0]
    module = Module(code, ADD.name)
    kernel = Kernel(module, "add", "PPPi", 128)
    values = np.arange(4, dtype=np.float32)
    buffers = [Buffer(device, values.nbytes, "test") for _ in range(3)]
    for buffer in buffers:
        buffer.upload(values)
    kernel.launch(device.stream, (1, 1), *buffers, 4)
    device.stream.synchronise()
    results = [buffer.download((4,), np.float32) for buffer in buffers]
    assert any(np.array_equal(result, values + values) for result in results)
    for buffer in buffers:
        buffer.free()
    module.unload()
