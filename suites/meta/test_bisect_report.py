"""The whole command on toy repositories, whose `assay` is a few lines: what it says and returns."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from suites.commands import bisect_git
from suites.harness.bisect_report import SCHEMA_PATH
from suites.harness.tolerances import FLOAT64_SUMS
from suites.meta import history
from suites.meta.test_verdict import violations

# Writes a verdict as the commit's module says, in the form of `assay validate`. COUNTER is a file
# beside the repository: how many probes there were.
ASSAY = """
import json, sys
from pathlib import Path
from suites.behaviour import state
counter = Path(COUNTER)
runs = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(runs))
name = state(runs)
summary = "ok" if name == "ok" else f"{name}: Qcur-0 (product)"
document = {"schema": "assay.verdict", "state": name, "summary": summary, "elements": 9}
Path(sys.argv[-1].removeprefix("--json=")).write_text(json.dumps(document))
sys.exit({"ok": 0, "diverged": 1, "unsupported": 2, "invalid": 3}[name])
"""
OK, BAD = "lambda runs: 'ok'      ", "lambda runs: 'diverged'"
UNSUPPORTED, SYNTAX = "lambda runs: 'unsupported'", "lambda runs: 'ok' ("
SOMETIMES = "lambda runs: 'diverged' if runs % 5 == 0 else 'ok'"


def _commit(folder: Path, behaviour: str, subject: str) -> str:
    (folder / "suites" / "behaviour.py").write_text(f"state = {behaviour}\n")
    return history.commit(folder, subject)


def _toy(tmp_path: Path, behaviours: Sequence[str]) -> tuple[Path, list[str]]:
    folder = history.start(tmp_path / "toy")
    package = folder / "suites"
    package.mkdir()
    (package / "__init__.py").write_text("")
    counter = repr(str(tmp_path / "counter"))
    (package / "__main__.py").write_text(ASSAY.replace("COUNTER", counter))
    subjects = [f"change {number}" for number in range(len(behaviours))]
    return folder, [_commit(folder, b, s) for b, s in zip(behaviours, subjects, strict=True)]


def _run(tmp_path: Path, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    case, out = tmp_path / "case.json", tmp_path / "out.json"
    case.write_text(json.dumps({"model": "tiny-llama"}))
    good = history.git(folder, "rev-list", "--max-parents=0", "main")
    parser = argparse.ArgumentParser()
    bisect_git.add_options(parser)
    ends = ("--git", good, "main", "--repository", str(folder), "--case", str(case))
    code = bisect_git.run(parser.parse_args([*ends, "--json", str(out), *options]))
    document: dict[str, Any] = json.loads(out.read_text())
    assert violations(document, json.loads(SCHEMA_PATH.read_text())) == []
    assert document["exit_code"] == code
    return code, document


def test_commits_of_one_second_and_one_size_are_told_apart(tmp_path: Path) -> None:
    """Python would take the bytecode of one for the other's."""
    assert len(OK) == len(BAD)
    folder, hashes = _toy(tmp_path, [OK] * 6 + [BAD] * 2)
    code, document = _run(tmp_path, folder)
    assert (code, document["first_bad"]["hash"]) == (1, hashes[6])


def test_what_skips_hide_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, hashes = _toy(tmp_path, [OK, OK, SYNTAX, UNSUPPORTED, BAD, BAD])
    code, document = _run(tmp_path, folder)
    assert (code, document["state"], document["first_bad"]) == (2, "undecided", None)
    assert document["candidates"] == hashes[2:5]
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("candidate")] == [
        "(skip)",
        "(skip)",
        "(bad)",
    ]
    assert "change 2: does not build or run: SyntaxError" in out
    assert "change 3: unsupported: Qcur-0 (product)" in out
    assert out.splitlines()[-1] == (
        "undecided: the first bad one is one of 3 commits and can't be narrowed further"
    )


def test_a_fault_in_every_fifth_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, hashes = _toy(tmp_path, [OK] * 3 + [SOMETIMES] * 3)
    code, document = _run(tmp_path, folder, "--rate", "0.2", "--error", "0.05")
    assert (code, document["first_bad"]["hash"]) == (1, hashes[3])
    probes = document["probes"]
    assert probes["runs"] == 14
    assert probes["miss"] == pytest.approx(0.8**14, rel=FLOAT64_SUMS)
    good = [entry for entry in document["judged"] if entry["mark"] == "good"]
    assert {entry["runs"] for entry in good} == {14}
    assert all(e["runs"] <= 5 and e["failed"] == 1 for e in document["judged"] if e not in good)
    assert probes["error_of_bisection"] == pytest.approx(
        1 - (1 - 0.8**14) ** len(good), rel=FLOAT64_SUMS
    )
    printed = capsys.readouterr()
    assert "good after 14 clean ones" in printed.out
    assert "with probability 4.4 %" in " ".join(printed.out.split())
    assert "(0 of 14 runs failed)" in printed.err


def test_k_of_n(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, hashes = _toy(tmp_path, [SOMETIMES, SOMETIMES, BAD, BAD])
    options = ("--rate", "1", "--at-least", "3", "--noise", "0.05")
    code, document = _run(tmp_path, folder, *options)
    assert (code, document["first_bad"]["hash"]) == (1, hashes[2])
    assert document["probes"]["runs"] == 3
    assert document["probes"]["false_alarm"] == pytest.approx(0.05**3, rel=FLOAT64_SUMS)
    assert "3 of 3 probes fail" in capsys.readouterr().out


def test_a_merge_names_both_parents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, hashes = _toy(tmp_path, [OK, OK])
    history.git(folder, "checkout", "-q", "-b", "side", hashes[0])
    (folder / "side").write_text("x")
    side = history.commit(folder, "side \x1b[31mred")
    history.git(folder, "checkout", "-q", "main")
    history.git(folder, "merge", "-q", "--no-commit", "--no-ff", "side")
    merge = _commit(folder, BAD, "an evil merge")
    code, document = _run(tmp_path, folder)
    assert (code, document["first_bad"]["hash"]) == (1, merge)
    assert [parent["commit"] for parent in document["before"]] == [hashes[1], side]
    assert {parent["mark"] for parent in document["before"]} <= {"good", "not probed"}
    assert document["first_bad"]["files"] == ["side", "suites/behaviour.py"]
    printed = capsys.readouterr()
    assert printed.out.count("\nbefore") == 2
    assert "\x1b" not in printed.out + printed.err
