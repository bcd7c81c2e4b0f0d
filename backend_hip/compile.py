"""Kernel source to code object: includes flattened, defines and flags explicit, results cached.

The cache key covers everything that changes the binary: the flattened source, every option, the
architecture, the runtime and its compiler. Cached objects are files that appear by rename; each
carries its own checksum, because no runtime but the CPU's notices a damaged code object.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backend_hip.device import Device, Progress
from reference.model.cache import atomic_write, cache_folder
from reference.model.errors import InputError

KERNEL_FOLDER = Path(__file__).parent / "kernels"

# Contraction off: one rounding per written operation, or bit-equality between paths is lost.
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")

_SEAL = b"assay code object 1\n"

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$", re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """One code object to build: a file of `kernels/` and its defines."""

    file: str
    defines: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return " ".join([self.file, *(f"{key}={value}" for key, value in self.defines)])


def flatten(file: str, folder: Path = KERNEL_FOLDER) -> str:
    """The file with its quoted includes inserted once each, because run-time compilers have no
    include path. #line keeps the compiler's messages on the original files."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        text = _PRAGMA_ONCE.sub("", (folder / name).read_text())
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                lines.append(line)
            elif match[1] not in seen:
                lines += [expand(match[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return "\n".join(lines)

    return expand(file) + "\n"


def build(
    device: Device, sources: Sequence[KernelSource], *, progress: Progress | None = None
) -> Mapping[KernelSource, bytes]:
    """Code objects for all sources, compiled in parallel where the cache lacks them or holds them
    damaged. Raises InputError for a cached file that can't be read, DeviceError as Device.compile.
    """
    folder = cache_folder("kernels")
    result: dict[KernelSource, bytes] = {}
    missing: list[tuple[KernelSource, str, list[str], Path]] = []
    damaged = 0
    for source in dict.fromkeys(sources):
        text = flatten(source.file)
        options = _options(device, source)
        path = folder / f"{_key(device, text, options)}.bin"
        content = read_cached(path)
        code = None if content is None else unseal(content, path.stem)
        if code is not None:
            result[source] = code
        else:
            damaged += content is not None
            missing.append((source, text, options, path))
    if missing and progress is not None:
        note = f"; the cache holds {damaged} of them damaged" if damaged else ""
        progress(f"compiling {len(missing)} kernels for {device.label}{note}")

    def compile_one(job: tuple[KernelSource, str, list[str], Path]) -> tuple[KernelSource, bytes]:
        source, text, options, path = job
        code = device.compile(text, source.file, options)
        atomic_write(path, seal(code, path.stem))
        return source, code

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for done, (source, code) in enumerate(pool.map(compile_one, missing), start=1):
            result[source] = code
            if progress is not None:
                progress(f"compiled {done}/{len(missing)} {source.name}")
    return result


def seal(code: bytes, key: str) -> bytes:
    """The cached file's content: a mark, the SHA-256 of key and code, the code."""
    return _SEAL + hashlib.sha256(key.encode() + b"\0" + code).digest() + code


def unseal(content: bytes, key: str) -> bytes | None:
    """The code in a cached file; None when the file is not what `seal` made under this key."""
    code = content[len(_SEAL) + hashlib.sha256().digest_size :]
    return code if code and content == seal(code, key) else None


def read_cached(path: Path) -> bytes | None:
    """A cached file's content, None when there is none; InputError when it can't be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"compile: the cached kernel {path} can't be read ({error.strerror}); remove it, or "
            "let ASSAY_CACHE name another folder"
        ) from None


def _options(device: Device, source: KernelSource) -> list[str]:
    defines = [f"-D{name}={value}" for name, value in source.defines]
    return [*OPTIONS, f"--offload-arch={device.architecture}", *defines]


def _key(device: Device, text: str, options: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (
        _SEAL.decode(),
        text,
        *options,
        device.runtime.kind,
        device.runtime.detail,
        device.architecture,
    ):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
