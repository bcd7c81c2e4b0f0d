"""The script that runs the suite under compute-sanitizer: every tool, and red when one is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suites.checkers.sample import spread

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "suites" / "checkers" / "compute_sanitizer.sh"
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]


def _run(
    folder: Path, *arguments: str, red: str = "", code: int = 86, wait: str = ""
) -> tuple[int, list[list[str]], str, str]:
    """Exit code, the arguments of each call of a stand-in, stdout and stderr. The stand-in ends
    with `code` for the tool `red`, after `wait`."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n{wait}\necho "== 5 passed in 1.00s =="\n'
        f'[ "$2" != "{red}" ] && echo "========= ERROR SUMMARY: 0 errors" && exit 0\n'
        f'echo "========= ERROR SUMMARY: 2 errors"\nexit {code}\n'
    )
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [line.split() for line in lines], done.stdout, done.stderr


def test_every_tool_runs_a_sample_of_the_correctness_suite(tmp_path: Path) -> None:
    code, calls, said, _ = _run(tmp_path)
    assert code == 0
    assert [call[1] for call in calls] == TOOLS
    for call in calls:
        assert "--error-exitcode" in call
        assert " ".join(call).count("cuda --require-gpu -p suites.checkers.sample --sample 3 ") == 1
        files = [part.partition("::")[0] for part in call if part.startswith("suites/")]
        assert len(files) > 5
        assert all((ROOT / file).is_file() for file in files)
    lines = said.partition("== summary\n")[2].splitlines()
    assert lines == [f"{tool}: clean; ERROR SUMMARY: 0 errors; 5 passed in 1.00s" for tool in TOOLS]


@pytest.mark.parametrize("red", TOOLS)
def test_one_red_tool_is_named_and_the_others_still_run(red: str, tmp_path: Path) -> None:
    code, calls, said, problems = _run(tmp_path, red=red)
    assert (code, len(calls)) == (1, len(TOOLS))
    assert f"{red}: findings; ERROR SUMMARY: 2 errors; 5 passed" in said
    assert said.count(": clean;") == len(TOOLS) - 1
    assert problems.strip() == f"compute_sanitizer.sh: not clean: {red}"


def test_red_tests_are_not_clean_either(tmp_path: Path) -> None:
    code, _, said, _ = _run(tmp_path, "memcheck", red="memcheck", code=1)
    assert (code, "memcheck: failed, exit code 1" in said) == (1, True)


def test_a_tool_that_is_not_done_is_not_clean(tmp_path: Path) -> None:
    wait = "kill -s TERM $PPID; sleep 5"  # as when the time is up; the parent is timeout(1)
    code, _, said, problems = _run(tmp_path, "initcheck", "--minutes", "1", wait=wait)
    assert code == 1
    assert "initcheck: " in said
    assert "initcheck: clean" not in said
    assert "not clean: initcheck" in problems


def test_tools_and_tests_can_be_named(tmp_path: Path) -> None:
    code, calls, *_ = _run(tmp_path, "racecheck", "--", "a.py", "-x")
    assert (code, [(call[1], call[-2:]) for call in calls]) == (0, [("racecheck", ["a.py", "-x"])])
    code, *_, said = _run(tmp_path, "racechecks")
    assert code == 2
    assert "expected memcheck, racecheck" in said
    code, *_, said = _run(tmp_path, "--minutes", "many")
    assert (code, "--minutes is many, expected a number above 0" in said) == (2, True)


def test_a_sample_has_both_ends() -> None:
    assert spread(3, 3) == {0, 1, 2}
    assert spread(101, 3) == {0, 50, 100}
    assert spread(101, 1) == {0}


def test_the_plugin_samples_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_a(n): pass\n"
        "def test_b(): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "suites.checkers.sample",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-c", "/dev/null", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    for sample, passed in (("3", 4), ("1", 2), ("0", None)):
        done = subprocess.run(
            [*command, "--sample", sample], capture_output=True, text=True, cwd=ROOT, check=False
        )
        if passed is None:
            assert "--sample is 0, expected 1 or more" in done.stdout + done.stderr
        else:
            assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
