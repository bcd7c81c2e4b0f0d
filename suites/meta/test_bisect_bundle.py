"""Repro bundles through the command line: written, replayed with and without the fault, damaged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model.errors import DeviceError
from suites import cli, summary
from suites.commands import bisect as command
from suites.commands.bisect_render import SCHEMA_PATH
from suites.harness import bisect_words
from suites.harness.bundle import Bundle
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
    "It reports kernel argmax, launch ",
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
    assert f"recorded  {point} (" in out
    assert "the same code objects (" in out
    assert out.endswith("\nreproduces\n")

    assert _main("bisect", "--replay", path, "--device", "cpu", "--json", tmp_path / "r.json") == 0
    out = capsys.readouterr().out
    assert f"recorded  {point} (" in out
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
    assert "recorded  recorded tail: device argmax" in out
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


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b.npz"
    assert _bundle_of(_dispatch_fault, path) == 1
    return path


def test_a_bundle_says_all_that_a_replay_needs(bundle: Path) -> None:
    found = Bundle.load(bundle)
    assert (found.kind, len(found.tokens)) == ("point", 13)
    assert set(found.inputs) == {"ffn_norm-2"}
    assert found.arrays["got"].dtype == np.float32
    assert found.arrays["want"].dtype == np.float64
    assert found.arrays["model"].nbytes > 1000
    meta = found.meta
    assert all(meta["versions"][name] for name in ("python", "numpy", "hip-python", "assay"))
    (row,) = [entry["row"] for entry in meta["kernels"]]
    assert row.startswith("matvec_batched ")
    assert all(len(entry["code_sha256"]) == 64 for entry in meta["kernels"])
    assert meta["options"]["max_cols"] == 8
    assert len(meta["model_sha256"]) == 64


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def _without(array: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        kept = Bundle.load(path)
        arrays = {name: value for name, value in kept.arrays.items() if name != array}
        Bundle(kept.tokens, kept.meta, arrays).save(path)

    return change


def _meta(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        kept = Bundle.load(path)
        Bundle(kept.tokens, {**kept.meta, **changes}, kept.arrays).save(path)

    return change


def _other_shape(path: Path) -> None:
    kept = Bundle.load(path)
    inputs = {name: value[:, :-1] if name.startswith("input:") else value
              for name, value in kept.arrays.items()}  # fmt: skip
    Bundle(kept.tokens, kept.meta, inputs).save(path)


def _raw(path: Path, **changes: Any) -> None:
    """Changes the file as any tool can that knows nothing of the digest."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = {**json.loads(str(arrays["meta"])), **changes.pop("meta", {})}
    np.savez_compressed(path, **{**arrays, **changes, "meta": np.array(json.dumps(meta))})


def _edited(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        value = Bundle.load(path).arrays[name]
        _raw(path, **{name: np.zeros_like(value)})

    return change


def _other_tokens(path: Path) -> None:
    kept = Bundle.load(path)
    Bundle((1, 10**6), kept.meta, kept.arrays).save(path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "is not a whole bundle"),
        (_flip, "bundle"),
        (lambda path: path.write_bytes(b""), "is not a whole bundle"),
        (lambda path: path.write_text("hello"), "is not a whole bundle"),
        (lambda path: path.unlink(), "is not a file"),
        (lambda path: np.savez(path, a=np.zeros(3)), "has no array meta"),
        (_without("got"), "array got is missing"),
        (_meta(kind="other"), "kind is other, expected one of point, tail, run"),
        (_meta(kind="tail"), "meta has no usable tail"),
        (_meta(point="ffn_up-77"), "point is ffn_up-77, which its model does not have"),
        (_meta(model_sha256="0" * 64), "has another SHA-256"),
        (_meta(sanitize=None), "meta has no usable sanitize"),
        (_meta(max_cols="many"), "meta has no usable max_cols"),
        (_meta(max_cols=True), "meta has no usable max_cols"),
        (_meta(shuffle=True), "meta has no usable shuffle"),
        (_meta(max_cols=0), "max_cols is 0, expected 1 to 64"),
        (_meta(context_length=0), "context_length is 0, expected 1 to "),
        (_meta(context_length=-1), "context_length is -1, expected 1 to "),
        (_meta(context_length=10**12), "context_length is 1000000000000, expected 1 to "),
        (_meta(n_decode=10**30), f"n_decode is {10**30}, expected 0 to "),
        (_meta(n_decode=-1), "n_decode is -1, expected 0 to "),
        (_edited("got"), "have another SHA-256"),
        (_edited("limit"), "have another SHA-256"),
        (_edited("input:ffn_norm-2"), "have another SHA-256"),
        (lambda path: _raw(path, meta={"summary": "ok"}), "have another SHA-256"),
        (lambda path: _raw(path, meta={"sha256": None}), "meta has no usable sha256"),
        (lambda path: _raw(path, more=np.ones(2)), "have another SHA-256"),
        (_meta(modes=["sideways"]), "prefill is sideways"),
        (_meta(path="quick"), "path is quick"),
        (_other_shape, "array of ffn_norm-2 is (13, 255), expected 13 rows of 256 values"),
        (_meta(mode="sideways"), "mode is sideways, expected one of per-token, batched"),
        (_meta(kv_type_k="f7"), "kv-type-k is f7"),
        (_other_tokens, "id 1000000 at place 1"),
    ],
)
def test_a_damaged_bundle_is_one_line(
    bundle: Path,
    damage: Callable[[Path], Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    damage(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("assay: ")
    assert text in last
    assert "Traceback" not in captured.err


def _filled(path: Path, value: float, got: float) -> None:
    """Inputs and result of one value each, with a digest that is right."""
    kept = Bundle.load(path)
    fill = {name: value for name in kept.arrays if name.startswith("input:")} | {"got": got}
    arrays = {name: np.full_like(old, fill[name]) if name in fill else old
              for name, old in kept.arrays.items()}  # fmt: skip
    Bundle(kept.tokens, kept.meta, arrays).save(path)


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
@pytest.mark.parametrize(
    ("value", "got", "text"),
    [
        (0.0, 0.0, "the bundle's own record is within today's limits: it shows no fault"),
        (np.nan, np.nan, "invalid: what ran here proves nothing: "),
    ],
    ids=["zeros", "nan"],
)
def test_a_record_that_shows_no_fault_proves_nothing(
    value: float,
    got: float,
    text: str,
    broken: bool,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _filled(path, value, got)
    with pytest.MonkeyPatch.context() as patch:
        if broken:  # zeros hide this fault, and nothing may be called sound on their word
            _dispatch_fault(patch)
        document = tmp_path / "r.json"
        replay = ("bisect", "--replay", path, "--device", "cpu", "--json", document)
        assert _main(*replay) == 3
    last = " ".join(capsys.readouterr().out.split())
    assert text in last
    assert json.loads(document.read_text())["exit_code"] == 3


def test_a_record_without_inputs_proves_nothing(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _without("input:ffn_norm-2")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 3
    assert "invalid: the bundle's own record proves nothing: " in capsys.readouterr().out


def test_a_model_that_does_not_travel_along_must_be_the_same_file(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _without("model")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 0
    _meta(model="tiny-llama")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 2
    assert "because the bundle was made with that file" in capsys.readouterr().err


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
