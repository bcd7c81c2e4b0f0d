"""Verdicts in JUnit and in GitHub's job summary: what is shown, escaped, and never in the way."""

import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from suites import cli, summary
from suites.harness.verdict import Check, State, Verdict

ROOT = Path(__file__).resolve().parents[2]
RUN = ("tiny-llama", "--tokens", "3,1,4", "--device", "cpu", "-n", "1")
NEAR = Check("local: add", State.OK, 4, measured=0.9, limit=1.0, of_limit=0.9)
FAR = Check("local: rope", State.OK, 4, measured=0.1, limit=1.0, of_limit=0.1)
COUNTED = Check("kernels: batched prefill", State.OK, 4, unit="launches")
BROKEN = Check(
    "local: embed",
    State.DIVERGED,
    4,
    of_limit=math.inf,
    link="a|b\n<script>\x1b[31m`x`*y*_z_\u202e",
)


def test_the_worst_check_is_the_nearest_to_its_limit() -> None:
    facts = summary.facts_of(Verdict((COUNTED, FAR, NEAR), run={"model": "m", "runtime": "r"}))
    assert facts == summary.Facts("m", "r", "ok", "ok", 8, "90 %", "local: add")
    assert summary.facts_of(Verdict((NEAR,)), "other", "gfx1201").runtime == "gfx1201"


def test_what_is_broken_is_the_worst() -> None:
    facts = summary.facts_of(Verdict((NEAR, BROKEN)))
    assert (facts.state, facts.worst_check, facts.worst_share) == (
        "diverged",
        "local: embed",
        "above 0",
    )
    nothing = summary.facts_of(Verdict(()))
    assert (nothing.state, nothing.worst_check, nothing.elements) == ("invalid", "", 0)
    counted = summary.facts_of(Verdict((COUNTED,)))
    assert (counted.worst_check, counted.worst_share) == ("", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a\\|b"),
        ("one\ntwo\r\n\tthree", "one two\\\\r three"),
        ("<b>&amp;", "&lt;b&gt;&amp;amp;"),
        ("\x1b[31m\x00\x07", "\\\\x1b\\[31m\\\\x00\\\\x07"),
        ("`*_~#{}[]", "\\`\\*\\_\\~\\#\\{\\}\\[\\]"),
        ("\u202eevil\ud800", "\\\\u202eevil\\\\ud800"),
        (12, "12"),
        ("", ""),
    ],
)
def test_markdown_is_escaped(text: object, shown: str) -> None:
    assert summary.cell(text) == shown


def test_hostile_text_stays_in_its_cell() -> None:
    verdict = Verdict((BROKEN, NEAR), run={"model": "m|n\n# head"}, notes=("a | note\nline",))
    for text in (
        summary.section_of("assay validate", verdict),
        summary.section_of_tests([("test|name\n", summary.facts_of(verdict))]),
    ):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "<script>" not in text
        for line in text.splitlines():
            if line.startswith("|"):
                columns = line.replace("\\|", "").count("|")
                assert columns in (5, 9)
            assert line == "" or line[0] in "|#-drm" or line.startswith("diverged")
    assert text.startswith("### Verdicts of the tests")


def test_tests_that_are_not_ok_come_first() -> None:
    good, bad = summary.facts_of(Verdict((NEAR,))), summary.facts_of(Verdict((BROKEN,)))
    lines = summary.section_of_tests([("a", good), ("b", bad)]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["b", "a"]


def test_sections_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    path.write_text("what another step wrote\n")
    monkeypatch.setenv(summary.VARIABLE, str(path))
    summary.append("one")
    summary.append("two \udcff")
    assert path.read_text() == "what another step wrote\none\n\ntwo \\udcff\n\n"


@pytest.mark.parametrize("kind", ["folder", "missing", "pipe", "full"])
def test_an_unwritable_path_is_one_line_and_no_failure(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.mkfifo(tmp_path / "pipe")
    target = {"folder": tmp_path, "missing": tmp_path / "no" / "s.md", "full": Path("/dev/full")}
    monkeypatch.setenv(summary.VARIABLE, str(target.get(kind, tmp_path / "pipe")))
    summary.append("text")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"assay: {summary.VARIABLE} can't be written (")


def test_without_the_variable_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(summary.VARIABLE, raising=False)
    summary.append("text")
    monkeypatch.setenv(summary.VARIABLE, "")
    summary.append("text")
    assert capsys.readouterr() == ("", "")


def test_validate_appends_its_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "summary.md"
    monkeypatch.setenv(summary.VARIABLE, str(path))
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)
    assert cli.main(["validate", *RUN]) == 0
    text = path.read_text()
    assert text.startswith("### assay validate tiny-llama: ok\n\nok\n\nruntime emulated, ")
    assert "| planted faults are caught" in text
    monkeypatch.setenv(summary.VARIABLE, str(tmp_path))
    capsys.readouterr()
    assert cli.main(["validate", *RUN]) == 0
    assert "no summary" in capsys.readouterr().err


def test_pytest_writes_properties_and_one_table(tmp_path: Path) -> None:
    report, text = tmp_path / "junit.xml", tmp_path / "summary.md"
    command = [sys.executable, "-m", "pytest", "-q", "--device", "cpu", f"--junitxml={report}"]
    command += ["suites/correctness/test_verdict.py", "-k", "one_mode and per-token"]
    environment = {**os.environ, summary.VARIABLE: str(text)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (case,) = ElementTree.parse(report).getroot().iter("testcase")
    found = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    assert found["verdict.model"] == "tiny-llama3"
    assert found["verdict.runtime"] == "emulated"
    assert (found["verdict.state"], found["verdict.summary"]) == ("ok", "ok")
    assert int(found["verdict.elements"]) > 0
    assert found["verdict.worst_share_of_limit"].endswith(" %")
    assert found["verdict.worst_check"].startswith("local")
    lines = text.read_text().splitlines()
    assert lines[0] == "### Verdicts of the tests"
    assert len([line for line in lines if "tiny-llama3" in line]) == 1


def test_commands_of_tests_do_not_write_into_the_runs_summary() -> None:
    assert summary.VARIABLE not in os.environ
