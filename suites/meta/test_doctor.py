"""`assay doctor` where something is missing: a row that says so and how to get it, no crash."""

from pathlib import Path

import pytest

from backend_hip.runtimes import nvidia
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


def test_what_cuda_lacks_is_a_row_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvidia, "DRIVER", "libno-such-driver.so.1")
    monkeypatch.setenv(nvidia.NVRTC, "/no-such-nvrtc.so")
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    out = capsys.readouterr().out
    assert _state(out, "cuda").startswith("missing")
    assert "missing: --device cuda has no runtime here: device: the CUDA runtime needs" in out
    driver, nvrtc = doctor._nvidia()
    assert driver[:3] == ("nvidia", "driver", "missing")
    assert "install NVIDIA's driver" in driver[3]
    assert nvrtc[:3] == ("nvidia", "NVRTC", "missing")
    assert "`pip install nvidia-cuda-nvrtc`" in nvrtc[3]


def test_an_nvrtc_that_serves_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = nvidia.Driver((12, 4), "A GPU", "sm_90")
    found = nvidia.Nvrtc(Path("/somewhere/libnvrtc.so.12"), (12, 4))
    monkeypatch.setattr(nvidia, "find_driver", lambda: driver)
    monkeypatch.setattr(nvidia, "find_nvrtc", lambda asked: found if asked is driver else None)
    assert [row[2:] for row in doctor._nvidia()] == [
        ("present", "A GPU (sm_90), driver for CUDA 12.4"),
        ("present", "12.4 /somewhere/libnvrtc.so.12"),
    ]
