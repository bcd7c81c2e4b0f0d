"""Repro bundles through the command line: written, replayed with and without the fault, damaged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference.model.errors import DeviceError
from suites import cli, summary
from suites.commands import bisect as command
from suites.commands.bisect_render import SCHEMA_PATH
from suites.harness import bisect_words
from suites.meta.engine_faults import kernel
from suites.meta.test_bisect import plant_column_shift, plant_stale_argmax
from suites.meta.test_verdict import violations

TOKENS = ",".join(str(3 * i + 1) for i in range(13))
OPTIONS = ("--device", "cpu", "-n", "2", "--max-cols", "8")
RUN = ("oracle-qwen3", "--tokens", TOKENS, *OPTIONS)


@pytest.fixture(autouse=True)
def _switch_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)


def _kernel_fault(patch: pytest.MonkeyPatch) -> None:
    kernel("rope.hip", ("values[first] = a * c - b * s;", "values[first] = a * c + b * s;"))(patch)


def _dispatch_fault(patch: pytest.MonkeyPatch) -> None:
    plant_column_shift(patch, "blk.2.ffn_up.weight")


def _main(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def _bundle_of(plant: Callable[[pytest.MonkeyPatch], None], path: Path, *more: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return _main("bisect", *RUN, "--bundle", path, *more)


def _document(path: Path) -> dict[str, Any]:
    """What was written, once it was held to the schema."""
    document: dict[str, Any] = json.loads(path.read_text())
    assert violations(document, json.loads(SCHEMA_PATH.read_text())) == []
    return document


def test_a_sound_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.npz"
    assert _main("bisect", *RUN, "--bundle", path, "--json", tmp_path / "j.json") == 0
    out = capsys.readouterr().out
    assert "There is nothing to bisect" in out
    assert out.endswith("\nok\n")
    assert not path.exists()
    document = _document(tmp_path / "j.json")
    assert (document["schema"], document["state"], document["bundle"]) == (
        "assay.bisect",
        "ok",
        None,
    )


DEVICE_REPORT = (
    "It reports kernel argmax",
    "its result depends on the order in which the threads of a block run",
    "a barrier is missing",
    "The last stage that had begun is: engine batched prefill.",
    "There is no bundle, because nothing was recorded.",
)


def test_a_device_error_leaves_header_paragraph_json_and_one_line(tmp_path: Path) -> None:
    """In a process of its own, because a device that has failed stays so."""
    bundle, written = tmp_path / "b.npz", tmp_path / "j.json"
    options = ("--plant", "argmax-barrier-missing", "--shuffle", "1")
    command = [sys.executable, "-m", "suites", "bisect", *RUN, *options]
    printed = subprocess.run(
        [*command, "--bundle", str(bundle), "--json", str(written)],
        env={**os.environ, summary.VARIABLE: str(tmp_path / "s.md")},
        cwd=Path(cli.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed.returncode == 3
    assert printed.stdout.startswith("model     oracle-qwen3")
    assert printed.stdout.splitlines()[-1].startswith("invalid: ")
    assert printed.stderr.splitlines()[-1].startswith("assay: hip")
    assert "Traceback" not in printed.stderr
    assert not bundle.exists()
    document = _document(written)
    assert (document["state"], document["exit_code"], document["bundle"]) == ("invalid", 3, None)
    assert document["verdict"]["first_broken"] == "device"
    markdown = (tmp_path / "s.md").read_text()
    assert markdown.startswith("### assay bisect oracle-qwen3: invalid")
    for text in DEVICE_REPORT:
        assert text in document["paragraph"]
        assert text in " ".join(printed.stdout.split())
        assert text in markdown


def test_the_words_of_a_device_error() -> None:
    """A report of the emulator, of a GPU that knows the last kernel alone, and neither."""
    stray = (
        "hipStreamSynchronize (last kernel queued: add): hipErrorIllegalAddress, an illegal memory "
        "access: kernel add (launch 37), block (0, 1, 0), thread 5: write past the end"
    )
    assert "It reports kernel add, launch 37, block (0, 1, 0), thread 5: write past the end." in (
        bisect_words.device(stray, "bisect: engine without a trace")
    )
    lines = bisect_words.device(stray.partition(": kernel ")[0], "bisect: engine without a trace")
    assert lines[1] == (
        "It reports no kernel; hipStreamSynchronize saw it, and the last kernel queued before was "
        "add: hipErrorIllegalAddress, an illegal memory access."
    )
    assert lines[2] == "The last stage that had begun is: engine without a trace."
    assert bisect_words.device("hipMalloc: out of memory", "")[1:] == [
        "It reports: hipMalloc: out of memory."
    ]


def test_what_can_not_be_compiled_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise DeviceError("compile: argmax.hip failed")

    monkeypatch.setattr(command, "bisect", refuse)
    assert _main("bisect", *RUN, "--json", tmp_path / "j.json") == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == "assay: compile: argmax.hip failed"
    assert not (tmp_path / "j.json").exists()


@pytest.mark.parametrize(
    ("plant", "point", "code"),
    [
        (_kernel_fault, "Qcur_pos-0", "another code object: rope "),
        (_dispatch_fault, "ffn_up-2", "the same code objects (matvec_batched "),
    ],
    ids=["kernel", "dispatch"],
)
def test_a_broken_op_replays_where_the_fault_is_and_only_there(
    plant: Callable[[pytest.MonkeyPatch], None],
    point: str,
    code: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b.npz"
    assert _bundle_of(plant, path, "--json", tmp_path / "j.json") == 1
    out = capsys.readouterr().out
    assert "breaks first" in out
    assert f"bundle    {path}\n" in out
    assert out.splitlines()[-1].startswith(f"diverged: {point} (")
    document = _document(tmp_path / "j.json")
    assert document["point"] == point
    assert document["verdict"]["schema"] == "assay.verdict"

    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert _main("bisect", "--replay", path, "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert f"recorded  diverged: {point} (" in out
    assert "the same code objects (" in out
    assert out.endswith("\nreproduces\n")

    assert _main("bisect", "--replay", path, "--device", "cpu", "--json", tmp_path / "r.json") == 0
    out = capsys.readouterr().out
    assert f"recorded  diverged: {point} (" in out
    assert f"{point} is within today's limits" in out
    assert code in " ".join(out.split())
    assert out.endswith("\ndoes not reproduce here\n")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema"] == "assay.bisect.replay"
    assert not document["reproduces"]


def test_a_job_summary_has_the_paragraph_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    markdown, path = tmp_path / "s.md", tmp_path / "b.npz"
    monkeypatch.setenv(summary.VARIABLE, str(markdown))
    assert _bundle_of(_dispatch_fault, path) == 1
    text = markdown.read_text()
    for part in ("Layer 2 breaks first", "new of limit", "breaks first", "linear"):
        assert part in text
    assert "sampler tail: chosen logits" not in text
    markdown.unlink()
    assert _main("bisect", "--replay", path, "--device", "cpu") == 0
    lines = markdown.read_text().splitlines()
    assert lines[0] == "### assay bisect --replay oracle-qwen3: does not reproduce here"
    assert "within today's limits" in markdown.read_text()


def test_a_stale_argmax_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.npz"
    assert _bundle_of(plant_stale_argmax, path, "--json", tmp_path / "j.json") == 1
    tail = _document(tmp_path / "j.json")["tail"]
    assert tail["link"] == "device argmax"
    assert tail["staged_stamp"] < tail["expected_stamp"]
    assert "the staging stamp is old too" in " ".join(capsys.readouterr().out.split())
    with pytest.MonkeyPatch.context() as patch:
        plant_stale_argmax(patch)
        assert _main("bisect", "--replay", path, "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert "in the batched prefill: device argmax: did not run for step" in " ".join(out.split())
    assert _main("bisect", "--replay", path, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "recorded  diverged: recorded tail: device argmax" in out
    assert out.endswith("\ndoes not reproduce here\n")


def test_what_has_no_smaller_case_replays_as_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("backend_hip.engine.Engine.prefill_batched",
                      lambda self, *a, **k: self.prefill_per_token(*a, **k))  # fmt: skip

    path = tmp_path / "b.npz"
    assert _bundle_of(plant, path) == 3
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert _main("bisect", "--replay", path, "--device", "cpu") == 1
    assert _main("bisect", "--replay", path, "--device", "cpu") == 0
    assert "verdict here: ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "got none of them, expected one of MODEL, --replay, --git"),
        (("tiny-llama", "--replay", "b.npz"), "got MODEL and --replay, expected one of"),
        (("--replay", "b.npz", "--tokens", "1,2"), "--tokens goes with MODEL"),
        (("--replay", "b.npz", "--bundle", "c.npz"), "--bundle goes with MODEL"),
        (("tiny-llama", "--git", "HEAD~1", "HEAD"), "got MODEL and --git, expected one of"),
        (("--git", "HEAD~1", "HEAD", "--prompt", "x"), "--prompt goes with MODEL, expected it"),
        (("--git", "HEAD~1", "HEAD"), "--case is missing"),
        (("tiny-llama", "--case", "c.json"), "--case goes with --git"),
        (("tiny-llama", "--bundle", "c.txt"), "expected a name that ends in .npz"),
        (("tiny-llama", "--bundle", "no/c.npz"), "a folder that exists"),
    ],
)
def test_wrong_combinations(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main("bisect", *arguments) == 2
    assert text in capsys.readouterr().err
