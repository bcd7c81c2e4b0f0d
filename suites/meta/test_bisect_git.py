"""`assay bisect --git` on a history that breaks its build once and the Q6_K scale once."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reference.model.errors import InputError
from suites.commands import bisect_git
from suites.harness.bisect_report import SCHEMA_PATH
from suites.meta import history
from suites.meta.test_verdict import violations

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 30
FAULTY = 20
MODEL = "tiny-qwen3-q6_k"
KERNEL = "backend_hip/kernels/formats.h"
CASE = {"model": MODEL, "tokens": [1, 2, 3], "steps": 1, "device": "cpu"}
FAULT = ("block.scales[sixteenth]", "block.scales[sixteenth / 2]")
BUILD = ("namespace formats {\n", "namespace formats {\n#error this commit does not compile\n")


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bisect_git.add_options(parser)
    return bisect_git.run(parser.parse_args(list(arguments)))


def _copy_project(folder: Path) -> None:
    """What `assay validate` of a tiny model needs."""
    kept = shutil.ignore_patterns("__pycache__", "golden", "meta", "parity")
    for name in ("reference", "backend_hip", "suites", "fixtures", "reports"):
        shutil.copytree(ROOT / name, folder / name, ignore=kept)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@dataclass(frozen=True)
class History:
    folder: Path
    hashes: list[str]
    not_built: int


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> History:
    """30 commits: the one that git tries first doesn't compile, number FAULTY breaks Q6_K."""
    shape = tmp_path_factory.mktemp("shape") / "r"
    hashes = history.linear(shape, LENGTH)
    middle = history.git(shape, "rev-list", "--bisect", "main", f"^{hashes[0]}")
    not_built = hashes.index(middle)
    assert not {not_built, not_built + 1} & {FAULTY - 1, FAULTY}
    folder = history.start(tmp_path_factory.mktemp("past") / "r")
    _copy_project(folder)
    kernel, made = folder / KERNEL, []
    for number in range(LENGTH):
        (folder / "NOTES").write_text(f"{number}\n")
        if number == not_built:
            _replace(kernel, *BUILD)
        elif number == not_built + 1:
            _replace(kernel, *reversed(BUILD))
        elif number == FAULTY:
            _replace(kernel, *FAULT)
        made.append(history.commit(folder, f"change {number}"))
    return History(folder, made, not_built)


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))
    return path


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    schema = json.loads(SCHEMA_PATH.read_text())
    assert violations(document, schema) == []
    return document


def test_the_commit_is_found(past: History, case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = history.snapshot(past.folder)
    out = case.with_name("out.json")
    ends = ("--git", past.hashes[0], "main", "--repository", str(past.folder))
    code = _run(*ends, "--case", str(case), "--json", str(out))
    printed = capsys.readouterr()
    document = _document(out)
    assert (code, document["exit_code"], document["state"]) == (1, 1, "found")
    assert history.snapshot(past.folder) == before

    first = document["first_bad"]
    assert first["hash"] == past.hashes[FAULTY]
    assert first["subject"] == f"change {FAULTY}"
    assert first["author"] == "A. Author <author@example.org>"
    assert first["files"] == ["NOTES", KERNEL]
    (parent,) = document["before"]
    assert parent == {"commit": past.hashes[FAULTY - 1], "mark": "good", "text": "ok"}
    assert document["after"].startswith("diverged: inp_embd (embed)")
    skipped = [entry for entry in document["judged"] if entry["mark"] == "skip"]
    assert [entry["commit"] for entry in skipped] == [past.hashes[past.not_built]]
    assert "this commit does not compile" in skipped[0]["text"]
    assert document["judge"] == "tested commit"

    assert printed.out.splitlines()[-1] == document["summary"]
    for text in (KERNEL, f"change {FAULTY}", "2 files changed", "does not build or run: compile"):
        assert text in printed.out
    assert len([line for line in printed.err.splitlines() if " good ok" not in line]) >= 8


BLIND = """
import json, sys
from pathlib import Path
document = {"schema": "assay.verdict", "state": "ok", "summary": "ok", "elements": 1}
Path(sys.argv[-1].removeprefix("--json=")).write_text(json.dumps(document))
"""


def test_a_blind_judge_is_replaced_with_engine_only(tmp_path: Path, case: Path) -> None:
    folder = history.start(tmp_path / "r")
    _copy_project(folder)
    (folder / "suites" / "__main__.py").write_text(BLIND)
    hashes = [history.commit(folder, "start")]
    (folder / "reference" / "ops.py").unlink()
    hashes.append(history.commit(folder, "no reference"))
    _replace(folder / KERNEL, *FAULT)
    hashes.append(history.commit(folder, "fault"))
    out = case.with_name("out.json")
    options = ("--repository", str(folder), "--case", str(case), "--json", str(out))
    with pytest.raises(InputError, match="BAD does not diverge: its run ended with ok"):
        _run("--git", hashes[0], "main", *options)
    assert _run("--git", hashes[0], "main", *options, "--engine-only") == 1
    document = _document(out)
    assert document["first_bad"]["hash"] == hashes[2]
    assert document["after"] == "diverged: inp_embd (embed)"
    assert document["judge"] == "running assay"


def test_ends_that_are_not_what_they_should_be(past: History, case: Path) -> None:
    def run(good: int, bad: int) -> str:
        ends = ("--git", past.hashes[good], past.hashes[bad], "--repository", str(past.folder))
        with pytest.raises(InputError) as raised:
            _run(*ends, "--case", str(case), "--json", str(case.with_name("out.json")))
        assert "\n" not in str(raised.value)
        assert not case.with_name("out.json").exists()
        return str(raised.value)

    before = history.snapshot(past.folder)
    assert run(FAULTY, 29) == "bisect: GOOD diverges too: diverged: inp_embd (embed)"
    assert run(0, 1) == "bisect: BAD does not diverge: its run ended with ok"
    assert run(0, past.not_built).startswith("bisect: BAD can't be judged: does not build or run")
    assert run(3, 2).startswith("--git: GOOD is ")
    assert history.snapshot(past.folder) == before


def test_another_failure_than_the_cases_is_no_proof(past: History, case: Path) -> None:
    case.write_text(json.dumps({**CASE, "broken": "Qcur-0"}))
    ends = ("--git", past.hashes[FAULTY - 1], "main", "--repository", str(past.folder))
    with pytest.raises(InputError, match="BAD can't be judged: another failure: diverged: inp_emb"):
        _run(*ends, "--case", str(case))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, case: Path, number: signal.Signals
) -> None:
    folder = history.start(tmp_path / "r")
    (folder / "suites").mkdir()
    (folder / "suites" / "__init__.py").write_text("")
    (folder / "suites" / "__main__.py").write_text(
        f"open({str(tmp_path / 'probing')!r}, 'w').close()\nimport time\ntime.sleep(60)\n"
    )
    hashes = [history.commit(folder, "one"), history.commit(folder, "two")]
    before = history.snapshot(folder)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import argparse, sys\nfrom suites.commands import bisect_git\n"
        "parser = argparse.ArgumentParser()\nbisect_git.add_options(parser)\n"
        "bisect_git.run(parser.parse_args(sys.argv[1:]))\n"
    )
    arguments = ["--git", *hashes, "--case", str(case), "--repository", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "probing").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    left_while_running = list(temporary.iterdir())
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert left_while_running
    assert "KeyboardInterrupt" in errors
    assert list(temporary.iterdir()) == []
    assert history.snapshot(folder) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "--case is missing"),
        (("--case", "none.json"), "none.json can't be read"),
        (("--case", "CASE", "--json", "no/where.json"), "expected a folder that exists"),
        (("--case", "CASE", "--json", "CASE"), "expected another file than the input"),
        (("--case", "CASE", "--timeout", "0"), "--timeout is 0"),
        (("--case", "CASE", "--timeout", "nan"), "--timeout is nan"),
        (("--case", "CASE", "--rate", "2"), "--rate is 2"),
        (("--case", "CASE", "--probes", "3", "--at-least", "4"), "--probes is 3"),
        (("--case", "CASE", "--repository", "none"), "expected a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input(options: tuple[str, ...], text: str, case: Path) -> None:
    given = [str(case) if option == "CASE" else option for option in options]
    with pytest.raises(InputError) as raised:
        _run("--git", "HEAD~1", "HEAD", *given)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_parser_that_has_json_already_keeps_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="theirs")
    bisect_git.add_options(parser)
    assert parser.parse_args([]).json == "theirs"
    assert parser.parse_args([]).git is None
