"""The script that runs the suite under compute-sanitizer: every tool, and red when one is."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "checkers" / "compute_sanitizer.sh"
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]


def _run(folder: Path, *arguments: str, red: str = "") -> tuple[int, list[list[str]], str]:
    """Exit code, the arguments of each call of a stand-in, and stderr."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n[ "$2" != "{red}" ]\n')
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [line.split() for line in lines], done.stderr


def test_every_tool_runs_the_correctness_suite(tmp_path: Path) -> None:
    code, calls, _ = _run(tmp_path)
    assert code == 0
    assert [call[1] for call in calls] == TOOLS
    for call in calls:
        assert call[-3:] == ["cuda", "--require-gpu", "suites/correctness"]
        assert "--error-exitcode" in call


@pytest.mark.parametrize("red", TOOLS)
def test_one_red_tool_is_named_and_the_others_still_run(red: str, tmp_path: Path) -> None:
    code, calls, said = _run(tmp_path, red=red)
    assert (code, len(calls)) == (1, len(TOOLS))
    assert said.strip() == f"compute_sanitizer.sh: not clean: {red}"


def test_tools_and_tests_can_be_named(tmp_path: Path) -> None:
    code, calls, _ = _run(tmp_path, "racecheck", "--", "a.py", "-x")
    assert (code, [(call[1], call[-2:]) for call in calls]) == (0, [("racecheck", ["a.py", "-x"])])
    code, _, said = _run(tmp_path, "racecheks")
    assert code == 2
    assert "expected memcheck, racecheck" in said
