"""Trace files from the command line: what they record, and what `assay compare` says of two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model.trace import Trace
from suites import cli
from suites.harness.verdict import SCHEMA_PATH
from suites.meta.test_verdict import violations

RUN = ("tiny-llama", "--tokens", "3,1,4,1,5,9,2,6", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _trace(folder: Path, name: str, *more: str) -> str:
    path = str(folder / name)
    assert cli.main(["trace", *RUN, "--out", path, *more]) == 0
    return path


def test_trace_and_compare(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = _trace(folder, "reference.npz", "--side", "reference")
    batched = _trace(folder, "batched.npz", "--side", "engine", "--logits", "all")
    last = _trace(folder, "last.npz", "--side", "engine")
    per_token = _trace(folder, "per-token.npz", "--side", "engine", "--prefill", "per-token")
    meta = Trace.load(folder / "batched.npz").meta
    assert (meta["side"], meta["runtime"], meta["path"]) == ("engine", "emulated", "kparallel")
    capsys.readouterr()

    assert cli.main(["compare", last, reference]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ok (side engine against reference, runtime emulated against ")
    assert not any(line.startswith("attn_norm-0 ") for line in lines)
    assert cli.main(["compare", last, reference, "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("attn_norm-0 ") for line in lines)
    assert cli.main(["compare", last, per_token, "--exact"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok (prefill batched against per-token)"
    assert cli.main(["compare", last, reference, "--exact"]) == 1
    capsys.readouterr()
    assert cli.main(["compare", last, reference, "--limit", "1e-12"]) == 1
    assert "diverged: " in capsys.readouterr().out
    assert cli.main(["compare", batched, reference]) == 2
    assert "compare: logits is all and last, expected one value" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["model_sha256", "architecture", "logits", "kv_type_k", "tokens"])
def test_compare_refuses_what_was_made_to_differ(
    field: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _trace(folder, "a.npz", "--side", "reference")
    trace = Trace.load(Path(first))
    tokens = trace.tokens[::-1] if field == "tokens" else trace.tokens
    other = Trace(tokens, {**trace.meta, field: "other"} if field in trace.meta else trace.meta)
    _save(dict(trace.arrays), other, tokens, folder / "b.npz")
    capsys.readouterr()
    compare = ["compare", first, str(folder / "b.npz")]
    assert cli.main(compare) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"assay: compare: {field} ")
    values = "3 and 6 at place 0" if field == "tokens" else f"{trace.meta[field]} and other"
    assert values in line
    code = cli.main([*compare, "--allow-different"])
    assert code == (0 if field == "kv_type_k" else 2)
    if code == 0:
        assert capsys.readouterr().out.splitlines()[-1] == "ok (kv_type_k f16 against other)"


def test_compare_of_a_file_with_itself_proves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _trace(folder, "a.npz", "--side", "reference")
    (folder / "link.npz").symlink_to(first)
    (folder / "hard.npz").hardlink_to(first)
    (folder / "copy.npz").write_bytes(Path(first).read_bytes())
    for other in ("a.npz", "link.npz", "hard.npz", "copy.npz"):
        for mode in ((), ("--exact",)):
            capsys.readouterr()
            assert cli.main(["compare", first, str(folder / other), *mode]) == 3
            assert "prove" in capsys.readouterr().out.splitlines()[-1]


def test_compare_names_the_first_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace.load(Path(_trace(folder, "a.npz", "--side", "reference")))
    broken = {name: np.array(value) for name, value in trace.arrays.items()}
    broken["ffn_act-1"][2, 3] += 1
    broken["l_out-1"][2] *= 2
    path = folder / "b.npz"
    _save(broken, trace, trace.tokens, path)
    capsys.readouterr()
    output = folder / "compare.json"
    assert cli.main(["compare", str(path), str(folder / "a.npz"), "--json", str(output)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "diverged: ffn_act-1"
    document = json.loads(output.read_text())
    assert violations(document, json.loads(SCHEMA_PATH.read_text())) == []
    assert document["first_broken"] == "ffn_act-1"


def test_compare_of_other_points_is_invalid(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace.load(Path(_trace(folder, "a.npz", "--side", "reference")))
    arrays = dict(trace.arrays)
    del arrays["kqv_out-0"]
    _save(arrays, trace, trace.tokens, folder / "points.npz")
    first = str(folder / "a.npz")
    for got, want in ((str(folder / "points.npz"), first), (first, str(folder / "points.npz"))):
        assert cli.main(["compare", got, want]) == 3
        assert capsys.readouterr().out.splitlines()[-1] == "invalid: kqv_out-0"


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_traces_of_one_constant_prove_nothing(
    value: float, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace.load(Path(_trace(folder, "a.npz", "--side", "reference")))
    same = {name: np.full_like(array, value) for name, array in trace.arrays.items()}
    for side in ("engine", "reference"):
        made = Trace(trace.tokens, {**trace.meta, "side": side})
        _save(same, made, trace.tokens, folder / f"{side}.npz")
    capsys.readouterr()
    for mode in ((), ("--exact",)):
        assert cli.main(["compare", "engine.npz", "reference.npz", *mode]) == 3
        assert "all logits of the reference are equal" in capsys.readouterr().out


def _logits_only(folder: Path, points: object) -> None:
    """Two files of logits alone, which differ in what made them; `points` None: without a list."""
    trace = Trace.load(Path(_trace(folder, "a.npz", "--side", "reference")))
    meta = {name: value for name, value in trace.meta.items() if name != "points"}
    meta |= {} if points is None else {"points": points}
    for side in ("engine", "reference"):
        copy = Trace(trace.tokens, {**meta, "side": side})
        _save({"result_output": trace["result_output"]}, copy, trace.tokens, folder / f"{side}.npz")


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (None, "both files hold logits and no other point"),
        (["inp_embd", "result_output"], "invalid: inp_embd"),
    ],
    ids=["no list", "list"],
)
def test_points_that_both_files_lack_are_noticed(
    points: object, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _logits_only(folder, points)
    capsys.readouterr()
    assert cli.main(["compare", "engine.npz", "reference.npz"]) == 3
    assert text in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("points", [[], "inp_embd", [1], ["no point"], {"inp_embd": 1}])
def test_a_list_of_no_points_is_refused(
    points: object, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _logits_only(folder, points)
    capsys.readouterr()
    assert cli.main(["compare", "engine.npz", "reference.npz"]) == 2
    assert "meta.points of a file is no list of trace points" in capsys.readouterr().err


def test_a_trace_lists_the_points_of_its_model(folder: Path) -> None:
    trace = Trace.load(Path(_trace(folder, "a.npz", "--side", "engine")))
    assert set(trace.meta["points"]) == set(trace.arrays)


def _save(arrays: dict[str, Any], trace: Trace, tokens: tuple[int, ...], path: Path) -> None:
    copy = Trace(tokens, trace.meta)
    for name, value in arrays.items():
        copy.record(name, value)
    copy.save(path)


def test_trace_follows_the_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, mode in (("0", "per-token"), ("1", "batched")):
        monkeypatch.setenv("ASSAY_BATCHED_PREFILL", value)
        _trace(folder, f"{value}.npz", "--side", "engine")
        assert Trace.load(folder / f"{value}.npz").meta["prefill"] == mode
    engine = ["trace", *RUN, "--side", "engine", "--out", "t.npz"]
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "0")
    assert cli.main([*engine, "--prefill", "batched"]) == 2
    assert "--prefill is batched, expected per-token" in capsys.readouterr().err
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "validate")
    assert cli.main(engine) == 2
    assert "a trace is of one prefill mode" in capsys.readouterr().err
    assert cli.main([*engine, "--prefill", "batched"]) == 0
