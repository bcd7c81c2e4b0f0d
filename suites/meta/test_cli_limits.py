"""`assay limits`, and `assay validate --self-test`, from the command line."""

import json
from pathlib import Path

import pytest

from suites import cli
from suites.commands.tables import PLAIN
from suites.harness.promises import PROMISES
from suites.harness.tolerances import TABLE
from suites.harness.verdict import SCHEMA_PATH
from suites.meta.test_verdict import violations

TOKENS = ("--tokens", "3,1,4,1,5", "--device", "cpu")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)
    monkeypatch.chdir(tmp_path)


def test_every_row_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["limits", "--json", "limits.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line]
    assert {op for op, _ in (*TABLE, *PROMISES)} <= set(names)
    assert max(map(len, lines)) <= PLAIN
    document = json.loads(Path("limits.json").read_text())
    assert [(row["op"], row["path"]) for row in document["rows"]] == list(TABLE)
    assert all(row["reason"] and row["roundings"]["64"] > 0 for row in document["rows"])
    assert all(row["of_limit"] is None for row in document["rows"])
    assert document["operations"] == {}


def test_head_room_of_a_model_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["limits", "tiny-llama", *TOKENS, "--path", "serial", "--json", "limits.json"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "runtime emulated, batched prefill" in out
    assert max(map(len, out.splitlines())) <= PLAIN
    document = json.loads(Path("limits.json").read_text())
    used = {(row["op"], row["path"]): row["of_limit"] for row in document["rows"]}
    assert 0 < used["linear", "serial"] < 1
    assert used["linear", "kparallel"] is None
    assert used["soft_cap", "any"] is None
    assert document["operations"]["rope"]["rows"] == ["rope any"]
    assert 0 < document["operations"]["rope"]["of_limit"] < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("no-such-model",), "model is 'no-such-model'"),
        (("tiny-llama", "--device", "tpu"), "--device is 'tpu'"),
        (("tiny-llama", *TOKENS, "--json", "no/such/folder"), "--json is no/such/folder"),
        (("--path", "serial", "--prefill", "per-token"), "path serial is a path of batched"),
    ],
    ids=["model", "device", "json", "path"],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["limits", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1]
    assert sum(line.startswith("assay: ") for line in lines) == 1


def test_the_self_test_adds_its_check(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["validate", "tiny-llama", *TOKENS, "-n", "2", "--json", "verdict.json"]
    assert cli.main([*command, "--self-test"]) == 0
    assert "self-test: a patched kernel" in capsys.readouterr().out
    document = json.loads(Path("verdict.json").read_text())
    assert violations(document, json.loads(SCHEMA_PATH.read_text())) == []
    assert document["run"]["self_test"] is True
    last = document["checks"][-1]
    assert (last["kind"], last["state"], last["unit"]) == ("self-test", "ok", "faults")
    assert last["detail"].startswith("accumulators of the dot product start at 1: found at Qcur-0")
    assert cli.main(command) == 0
    document = json.loads(Path("verdict.json").read_text())
    assert document["run"]["self_test"] is False
    assert "self-test" not in {check["kind"] for check in document["checks"]}
