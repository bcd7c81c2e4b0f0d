"""`assay doctor` where something is missing: a row that says so and how to get it, no crash."""

from pathlib import Path

import pytest

from suites import cli
from suites.commands import doctor


def _state(out: str, name: str) -> str:
    (line,) = (line for line in out.splitlines() if line.split()[1:2] == [name])
    return line.split(maxsplit=2)[2]


def test_an_unusable_cache_folder_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "file"))
    assert cli.main(["doctor"]) == 2
    out = capsys.readouterr().out
    assert _state(out, "folder").startswith("unusable")
    assert "missing: --device auto has no runtime here: cache: " in out


def test_missing_compilers_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor._compiler("clang++")[2:] == ("missing", "apt-get install clang")
    assert doctor._gfx1201_compiler()[2] == "missing"
    assert "clang-19" in doctor._gfx1201_compiler()[3]


@pytest.mark.parametrize("version", [17, 18, 25])
def test_the_first_clang_that_knows_gfx1201_is_named(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "clang++-18"
    answer = f"[ $1 = --version ] && echo Debian clang version {version}.1.7 || echo lld"
    compiler.write_text(f"#!/bin/sh\n{answer}\n", encoding="ascii")
    compiler.chmod(0o755)
    found = {"clang++-18": str(compiler), "lld": "/usr/bin/lld"}
    monkeypatch.setattr("shutil.which", found.get)
    state = doctor._gfx1201_compiler()[2:]
    assert (state == ("present", str(compiler))) == (version >= 18)
    del found["lld"]
    assert doctor._gfx1201_compiler()[2] == "missing", "it can't link"


def test_cuda_is_said_not_to_exist_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    out = capsys.readouterr().out
    assert _state(out, "cuda").startswith("not yet")
    assert "no runtime over CUDA exists" in out
