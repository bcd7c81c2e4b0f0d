"""One probe: `assay validate` of a checked-out commit in a process of its own, and what it means.

ok                                                            good
diverged, invalid                                             bad
no verdict, unsupported, another failure than the case's,     skip: nothing is known about
a run that hangs                                              the fault at this commit
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suites.harness import probe_main
from suites.harness.case import Case
from suites.harness.commit_bisect import Mark, Run
from suites.harness.verdict import State

DEFAULT_TIMEOUT_S = 600.0
DOES_NOT_BUILD = "does not build or run"
JUDGE_PACKAGES = tuple(name for name in probe_main.PACKAGES if name != "backend_hip")
_STATES = {state.value: state for state in State}


@dataclass(frozen=True)
class Probe:
    """Runs the case on the tree at `root`, with scratch files in `folder`."""

    case: Case
    model: Path
    root: Path
    folder: Path
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __call__(self) -> Run:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            verdict, log = Path(scratch, "verdict.json"), Path(scratch, "stderr")
            code = self._run(verdict, log)
            text = log.read_text(encoding="utf-8", errors="replace")
            if code is None:
                return Run(Mark.SKIP, f"hangs: no verdict within {self.timeout_s:g} s")
            return read_run(code, _document(verdict), text, self.case.broken)

    def _run(self, verdict: Path, log: Path) -> int | None:
        """The exit code; None where the time was up."""
        script = str(Path(probe_main.__file__).resolve())
        options = [str(self.model), *self.case.arguments(), f"--json={verdict}"]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", script, str(self.root), "validate", *options],
                cwd=self.root,
                env=probe_environment(self.root),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # a group of its own, to end compilers with it
            )
            try:
                return process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def probe_environment(root: Path) -> dict[str, str]:
    """The user's environment with the tested tree before all others.

    No bytecode is written: it is matched by second and size, which two commits may share. A switch
    of the batched prefill is dropped, because the case decides the modes, and so is the job's
    summary, which is for the search and not for its probes.
    """
    dropped = ("ASSAY_BATCHED_PREFILL", "GITHUB_STEP_SUMMARY")
    environment = {n: v for n, v in os.environ.items() if n not in dropped}
    paths = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
    if environment.get("ASSAY_CACHE"):
        environment["ASSAY_CACHE"] = os.path.abspath(environment["ASSAY_CACHE"])
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def make_overlay(folder: Path, worktree: Path) -> Path:
    """A folder that has backend_hip from the worktree and everything else from this checkout."""
    overlay = folder / "overlay"
    overlay.mkdir()
    here = Path(__file__).resolve().parents[2]
    for name in JUDGE_PACKAGES:
        (overlay / name).symlink_to(here / name)
    (overlay / "backend_hip").symlink_to(worktree / "backend_hip")
    return overlay


def _document(path: Path) -> Mapping[str, Any] | None:
    """The verdict that was written; None where there is none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("schema") != "assay.verdict":
        return None
    return document


def read_run(code: int, document: Mapping[str, Any] | None, log: str, broken: str) -> Run:
    """What an exit code, a verdict (None: there is none) and the error output mean.

    `broken` is a regular expression for the first broken link; empty where any failure counts.
    """
    if code == probe_main.FOREIGN:
        return Run(Mark.SKIP, f"{DOES_NOT_BUILD}: {reason(log)}")
    if document is None:
        ended = f"ended by {_signal(code)}" if code < 0 else DOES_NOT_BUILD
        return Run(Mark.SKIP, f"{ended}: {reason(log)}")
    state, link = _STATES.get(str(document.get("state"))), broken_link(document)
    if state is None or state.exit_code != code:
        said = f"verdict {document.get('state')!r} and exit code {code} don't fit"
        return Run(Mark.SKIP, f"no verdict: {said}")
    if state is State.UNSUPPORTED:
        return Run(Mark.SKIP, f"unsupported: {link}")
    if state is State.OK:
        elements = document.get("elements")
        if not isinstance(elements, int) or not elements > 0:
            return Run(Mark.SKIP, "no verdict: ok, but nothing was compared")
        return Run(Mark.GOOD, "ok")
    text = f"{state.value}: {link}"
    if broken and not re.search(broken, text):
        return Run(Mark.SKIP, f"another failure: {text} (the case expects {broken!r})")
    return Run(Mark.BAD, text)


def broken_link(document: Mapping[str, Any]) -> str:
    """The words for the first broken link of a verdict that is not ok, in one line."""
    summary = str(document.get("summary", ""))
    return " ".join(summary.removeprefix(f"{document.get('state')}:").split()) or "no link is named"


def reason(log: str) -> str:
    """The line of an error output that says why: assay's own with the first error below it, else
    the last one, which is what ends a traceback.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    own = [place for place, line in enumerate(lines) if line.startswith("assay: ")]
    if not own:
        return lines[-1].strip() if lines else "it gave no reason"
    head = lines[own[-1]].removeprefix("assay: ")
    below = (line.strip() for line in lines[own[-1] + 1 :] if "error:" in line)
    return "; ".join([head, *list(below)[:1]])


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
