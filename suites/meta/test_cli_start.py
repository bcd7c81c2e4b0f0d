"""What the command line does before a command runs: usage, help, version, an early interrupt."""

import re
import subprocess
import sys

import pytest

from suites import cli


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["validate"], ["validate", "x", "--no"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("assay")
    assert said.endswith("--help` has the options\n")
    assert said.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert re.fullmatch(r"assay \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"] if command else ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "usage: assay" in text
    if command:
        assert "--json" in text


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_modules_are_imported_is_one_line() -> None:
    program = (
        "import signal, sys, threading\n"
        "class Raises:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'numpy': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Raises())\n"
        "from suites.__main__ import main\n"
        "sys.exit(main())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert process.stderr == "assay: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (">/dev/full", 2, "assay: standard output can't be written (No space left on device)\n"),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_one_line_at_most(
    redirection: str, code: int, says: str
) -> None:
    command = f'"{sys.executable}" -m suites faults --list {redirection}'
    process = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert (process.returncode, process.stderr) == (code, says)
