"""The CPU runtime in the cache: damage is seen and repaired, killed builds leave nothing behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from backend_hip.runtimes import build, select_runtime
from backend_hip.runtimes.build import StandIn
from backend_hip.runtimes.compilers import Compiler
from reference.model.errors import InputError


@dataclass
class Cache:
    """A cache of its own that holds a copy of the built runtime; builds copy it again."""

    target: Path
    built: Path
    builds: list[Path] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def lib(self) -> Path:
        return self.target / "lib"

    def select(self) -> Path | None:
        return select_runtime("cpu", progress=self.lines.append).rocm_path

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.target.parent.glob("cpu-*"))

    def assert_whole(self) -> None:
        """Every file is there with the bytes that were built."""
        for path in (self.built / "lib").iterdir():
            assert (self.lib / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    built = select_runtime("cpu").rocm_path
    assert built is not None
    result = Cache(tmp_path / "runtimes" / built.name, built)
    shutil.copytree(built, result.target)

    def copy(runtime: StandIn, compiler: Compiler, lib: Path) -> None:
        result.builds.append(lib)
        shutil.copytree(built / "lib", lib)

    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_build", copy)
    return result


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _folder_instead(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


@dataclass(frozen=True)
class Damage:
    name: str
    file: str
    act: Callable[[Path], object]


DAMAGES = [
    Damage("compiler-library-removed", "libhiprtc.so", Path.unlink),
    Damage("compiler-library-empty", "libhiprtc.so", lambda path: path.write_bytes(b"")),
    Damage("library-truncated", "libamdhip64.so", _truncate),
    Damage("library-changed-at-its-size", "libamdhip64.so", _flip),
    Damage("library-is-a-folder", "libamdhip64.so", _folder_instead),
    Damage("command-removed", "compiler.txt", Path.unlink),
    Damage("command-changed", "compiler.txt", lambda path: path.write_text("cat\n")),
    Damage("manifest-removed", "assay-manifest.txt", Path.unlink),
    Damage("no-libraries", "", shutil.rmtree),
]


@pytest.mark.parametrize("case", DAMAGES, ids=lambda case: case.name)
def test_a_damaged_runtime_is_built_again_once(case: Damage, cache: Cache) -> None:
    case.act(cache.lib / case.file)
    assert cache.select() == cache.target
    cache.assert_whole()
    assert len(cache.builds) == 1
    assert "damaged" in cache.lines[0]
    assert case.file in cache.lines[0]
    assert cache.folders() == [cache.target.name]
    cache.lines.clear()
    assert cache.select() == cache.target
    assert (len(cache.builds), cache.lines) == (1, [])


def test_a_manifest_of_garbage_is_damage(cache: Cache) -> None:
    (cache.lib / "assay-manifest.txt").write_bytes(b"\xff\x00{[")
    cache.select()
    assert len(cache.builds) == 1
    cache.assert_whole()


def test_a_file_where_the_folder_belongs_is_replaced(cache: Cache) -> None:
    shutil.rmtree(cache.target)
    cache.target.write_text("")
    assert cache.select() == cache.target
    cache.assert_whole()
    assert cache.folders() == [cache.target.name]


def test_a_whole_runtime_needs_no_write(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a whole runtime was locked")

    monkeypatch.setattr(build, "_locked", refuse)
    assert cache.select() == cache.target
    assert (cache.builds, cache.lines) == ([], [])


def test_a_cache_that_cannot_be_written_is_one_line(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cache.target)

    def full(runtime: StandIn, compiler: Compiler, lib: Path) -> None:
        raise OSError(28, "No space left on device", str(lib))

    monkeypatch.setattr(build, "_build", full)
    with pytest.raises(InputError, match=r"No space left on device.*ASSAY_CACHE") as caught:
        cache.select()
    assert "\n" not in str(caught.value)
    assert cache.folders() == []


CHILD = """
import shutil, sys
from pathlib import Path
from backend_hip.runtimes import build, select_runtime

def slow(runtime, compiler, lib):
    (lib / "objects").mkdir(parents=True)
    print(lib, flush=True)
    sys.stdin.readline()
    (lib / "objects").rmdir()
    shutil.copytree(sys.argv[1], lib, dirs_exist_ok=True)

build._build = slow
print(select_runtime("cpu").rocm_path)
"""


def _start_build(cache: Cache) -> tuple[subprocess.Popen[str], Path]:
    """A process in the middle of a build, and the folder that it builds into."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(cache.built / "lib")],
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip()).parent


def test_what_a_killed_build_left_is_removed_by_the_next(cache: Cache) -> None:
    shutil.rmtree(cache.target)
    child, unfinished = _start_build(cache)
    child.kill()
    child.communicate()
    assert cache.folders() == [unfinished.name]
    (cache.target.parent / "cpu-other.broken-abc").mkdir()
    cache.select()
    assert cache.folders() == [cache.target.name]
    cache.assert_whole()


def test_a_second_process_waits_for_the_build_of_the_first(cache: Cache) -> None:
    shutil.rmtree(cache.target)
    child, unfinished = _start_build(cache)
    assert unfinished.is_dir()
    said = []

    def progress(line: str) -> None:
        said.append(line)
        assert unfinished.is_dir()
        assert child.stdin is not None
        child.stdin.write("go on\n")
        child.stdin.flush()

    try:
        assert select_runtime("cpu", progress=progress).rocm_path == cache.target
        answer = child.communicate()[0].strip()
    finally:
        child.kill()
        child.communicate()
    assert answer == str(cache.target)
    assert said == ["waiting for another process that builds the CPU runtime"]
    assert cache.builds == []
    cache.assert_whole()
