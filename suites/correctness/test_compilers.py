"""Commands that are no compiler, or a broken one, are named in one line."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend_hip.runtimes import select_runtime
from backend_hip.runtimes.compilers import find_compiler
from reference.model.errors import InputError
from suites.correctness.cpu_driver import in_child


def _script(folder: Path, body: str) -> str:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@dataclass(frozen=True)
class CommandCase:
    """A value of CXX, or with `body` a script of that content."""

    name: str
    says: str
    value: str = ""
    body: str = ""


COMMANDS = [
    CommandCase("unclosed-quote", "No closing quotation", value="'unclosed"),
    CommandCase("two-lines", "a command of one line", value="'g++\n-O0'"),
    CommandCase("not-there", "No such file", value="no-such-compiler"),
    CommandCase("cat", r"`cat -dM -E -x c\+\+ /dev/null` ended with status 1, GCC", value="cat"),
    CommandCase("true", "expected GCC 11 or newer, or clang", body="echo true 8.32"),
    CommandCase("silent", "--version` printed nothing", body="exit 0"),
    CommandCase("not-utf-8", r"\\xff\\xfe", body=r"printf '\377\376 compiler\n'"),
    CommandCase("killed", "--version` was killed by signal SIGKILL", body="kill -9 $$"),
    CommandCase(
        "old-gcc", "g.. 10, expected GCC 11", body="echo g++ 10; echo '#define __GNUC__ 10'"
    ),
]


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case.name)
def test_a_command_that_is_no_compiler_is_one_line(
    case: CommandCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _script(tmp_path, case.body) if case.body else case.value)
    with pytest.raises(InputError, match=case.says) as caught:
        find_compiler()
    assert "CXX is " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_does_not_read_what_the_caller_may_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _script(tmp_path, "cat"))
    kept = os.dup(0)
    reader, writer = os.pipe()
    try:
        os.write(writer, b"typed\n")
        os.close(writer)
        os.dup2(reader, 0)
        with pytest.raises(InputError, match="--version` printed nothing"):
            find_compiler()
        assert os.read(reader, 6) == b"typed\n"
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reader)


def test_a_working_compiler_may_print_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shlex.join(find_compiler().command)
    body = f'[ "$1" = --version ] && printf \'\\377 compiler\\n\' && exit; exec {real} "$@"'
    monkeypatch.setenv("CXX", _script(tmp_path, body))
    assert find_compiler().version == r"\xff compiler"


@dataclass(frozen=True)
class BuildCase:
    """What the compiler does when it is asked for an output; it answers all else truly."""

    name: str
    body: str
    says: str


WRITE_JUNK = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo junk > "$2"; shift; done; exit 0'
BUILDS = [
    BuildCase("nothing", "exit 0", "ended with status 0 but wrote no .*[.]o"),
    BuildCase("empty", WRITE_JUNK.replace("echo junk", ":"), "ended with status 0 but wrote no"),
    BuildCase("junk", WRITE_JUNK, "can't be loaded .*file too short"),
    BuildCase("killed", "kill -9 $$", "was killed by signal SIGKILL: no message"),
    BuildCase("bytes", r"printf '\377 error\n' >&2; exit 3", r"ended with status 3: \\xff error"),
    BuildCase("no-error-word", "echo disk full >&2; exit 1", "status 1: disk full"),
]


@pytest.mark.parametrize("case", BUILDS, ids=lambda case: case.name)
def test_a_compiler_that_builds_nothing_is_named(
    case: BuildCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shlex.join(find_compiler().command)
    truly = f'case "$*" in --version|*-dM*) exec {real} "$@";; esac'
    compiler = _script(tmp_path, f"{truly}\n{case.body}")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    for _ in range(2):  # nothing bad stays in the cache
        with pytest.raises(InputError, match=case.says) as caught:
            select_runtime("cpu")
        assert compiler in str(caught.value)
        assert "\n" not in str(caught.value)
        assert list((tmp_path / "runtimes").glob("cpu-*")) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("kill -9 $$", "was killed by signal 9 (Killed)"),
        ("exit 0", "ended with status 0 but wrote no output"),
        ("exit 7", "ended with status 7"),
    ],
    ids=["killed", "nothing", "status"],
)
def test_a_kernel_compilation_that_fails_says_how(body: str, says: str, tmp_path: Path) -> None:
    built = select_runtime("cpu").rocm_path
    assert built is not None
    shutil.copytree(built, tmp_path / "runtimes" / built.name)
    compiler = _script(tmp_path, body)
    child = in_child(
        f"""
from pathlib import Path
Path(os.environ["ROCM_PATH"], "lib", "compiler.txt").write_text({compiler!r} + "\\n")
print(*compile_source("int x;"))
""",
        ASSAY_CACHE=str(tmp_path),
        TMPDIR=os.environ.get("TMPDIR", "/tmp"),
    )
    assert child.returncode == 0, child.stderr
    assert "HIPRTC_ERROR_COMPILATION" in child.stdout
    assert f"assay: {compiler} {says}" in child.stdout
