"""`assay isa`: one clear line where it can't work, exit codes, and JSON that fits its schema."""

import json
from pathlib import Path

import pytest

from backend_hip import isa_budgets
from backend_hip.isa_budgets import KNOWN, Budget
from backend_hip.offline import OfflineClang, find_clang
from reference.model.errors import InputError
from suites import cli
from suites.commands import isa
from suites.meta.test_verdict import violations


@pytest.fixture
def compiler() -> OfflineClang:
    try:
        return find_clang()
    except InputError as error:
        pytest.skip(str(error))  # suites/correctness fails without it in CI


BAD = {
    "op": (("--op", "conv"), "--op is conv, expected one of embed, matvec,"),
    "format": (
        ("--op", "rope", "--format", "Q4_K"),
        "--format is Q4_K, expected one of norm, neox",
    ),
    "path": (("--op", "add", "--path", "serial"), "--path is serial, expected one of any"),
    "columns": (("--max-cols", "16,65"), "--max-cols is '16,65', expected 1 to 64"),
    "no columns": (("--max-cols", ""), "--max-cols is ''"),
    "wave": (("--wave", "16"), "--wave is '16', expected 32, 64 or 32,64"),
    "json": (("--json", "nowhere/x.json"), "--json is nowhere/x.json, expected a folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = BAD[name]
    assert cli.main(["isa", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"assay: {said}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_a_clang_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cli.main(["isa", "--op", "add", "--json", str(tmp_path / "x.json")]) == 2
    captured = capsys.readouterr()
    assert "no clang 18 or newer with its lld; apt-get install clang-19 lld-19" in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_json_follows_the_schema(
    compiler: OfflineClang, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "isa.json"
    assert cli.main(["isa", "--op", "rope", "--json", str(target)]) == 0
    document = json.loads(target.read_text())
    schema = json.loads(isa.SCHEMA_PATH.read_text())
    assert violations(document, schema) == []
    assert violations({**document, "kernels": [{}]}, schema)
    assert [(kernel["variant"], kernel["wave"]) for kernel in document["kernels"]] == [
        ("norm", 32), ("norm", 64), ("neox", 32), ("neox", 64),
    ]  # fmt: skip
    assert document["compiler"] == compiler.version.splitlines()[0]
    assert "0 in every row: LDS, scratch, V spill, S spill" in capsys.readouterr().out


@pytest.mark.parametrize("known", [False, True])
def test_a_broken_budget_is_exit_code_1_unless_it_is_known(
    known: bool,
    compiler: OfflineClang,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    planted = Budget("vgprs", 1, "a plant", ops=("add",), waves=(32,))
    monkeypatch.setattr(isa, "BUDGETS", (planted,))
    entry = isa_budgets.KnownBreak("vgprs", "add", "any", 256, "a plant that is accepted")
    known_breaks = (entry,) if known else KNOWN
    monkeypatch.setattr(isa, "broken_budgets", lambda k: isa_budgets.broken_budgets(k, (planted,)))
    monkeypatch.setattr(isa, "known_break", lambda b: isa_budgets.known_break(b, known_breaks))
    target = tmp_path / "isa.json"
    assert cli.main(["isa", "--op", "add", "--json", str(target)]) == int(not known)
    out = capsys.readouterr().out
    assert ("broken: add any wave32: vgprs is " in out) == (not known)
    assert ("known: add any: vgprs up to 256: a plant that is accepted" in out) == known
    (broken,) = json.loads(target.read_text())["broken"]
    assert broken["known"] == (entry.reason if known else None)
