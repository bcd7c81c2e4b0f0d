"""Verdicts where a CI shows them: properties of a JUnit test case, and GitHub's job summary.

GitHub Actions names a file in GITHUB_STEP_SUMMARY and renders the Markdown that a step appends to
it. Nothing here decides anything: a summary that can't be written is a line on standard error.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from suites.commands.common import printable
from suites.commands.tables import amount, share
from suites.harness.verdict import State, Verdict, worst_first

VARIABLE = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Facts:
    """What a verdict was of and what it said; every field is text for people."""

    model: str
    runtime: str
    state: str
    summary: str
    elements: int
    worst_share: str
    worst_check: str

    def properties(self) -> list[tuple[str, str]]:
        """Names and values of the properties of a JUnit test case."""
        return [
            ("verdict.model", self.model),
            ("verdict.runtime", self.runtime),
            ("verdict.state", self.state),
            ("verdict.summary", self.summary),
            ("verdict.elements", str(self.elements)),
            ("verdict.worst_share_of_limit", self.worst_share),
            ("verdict.worst_check", self.worst_check),
        ]


def facts_of(verdict: Verdict, model: str = "", runtime: str = "") -> Facts:
    """The facts of a verdict; `model` and `runtime` as the verdict's own run says where not given.

    The worst check is the one that used most of its limit, or the first that is not ok.
    """
    broken = verdict.first_broken
    limited = [check for check in verdict.checks if check.of_limit is not None]
    worst = broken or next(iter(worst_first(limited)), None)
    return Facts(
        model=model or str(verdict.run.get("model", "")),
        runtime=runtime or str(verdict.run.get("runtime", "")),
        state=verdict.state.value,
        summary=printable(verdict.summary()),
        elements=verdict.elements,
        worst_share="" if worst is None else share(worst.of_limit),
        worst_check="" if worst is None else worst.name,
    )


def cell(text: object) -> str:
    """Text as Markdown shows it literally, on one line, in a table."""
    one_line = " ".join(printable(str(text)).split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        one_line = one_line.replace(character, entity)
    return "".join(f"\\{c}" if c in "\\`*_{}[]|~#" else c for c in one_line)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[cell(value) for value in row] for row in rows]
    return str(tabulate(cells, headers=heads, tablefmt="github", disable_numparse=True))


def section_of(command: str, verdict: Verdict) -> str:
    """The section of one command: what was judged, the verdict, every check."""
    facts = facts_of(verdict)
    title = " ".join(part for part in (command, facts.model) if part)
    lines = [f"### {cell(title)}: {facts.state}", "", cell(facts.summary)]
    if facts.runtime:
        lines += ["", f"runtime {cell(facts.runtime)}, {facts.elements:,} values compared"]
    rows = [
        (check.name, check.state.value, amount(check), share(check.of_limit))
        for check in verdict.checks
    ]
    heads = ("check", "state", "compared", "of limit")
    notes = [f"- {cell(note)}" for note in verdict.notes]
    return "\n".join([*lines, "", markdown_table(heads, rows), "", *notes])


def section_of_tests(named: Sequence[tuple[str, Facts]]) -> str:
    """The section of a test run: a row for each verdict, those that are not ok first."""
    ordered = sorted(named, key=lambda entry: entry[1].state == State.OK.value)
    rows = [
        (
            test,
            *(facts.model, facts.runtime, facts.state, f"{facts.elements:,}"),
            *(facts.worst_share, facts.worst_check, facts.summary),
        )
        for test, facts in ordered
    ]
    heads = ("test", "model", "runtime", "verdict", "values", "of limit", "worst check", "summary")
    return "\n".join(["### Verdicts of the tests", "", markdown_table(heads, rows)])


def append(markdown: str, path: str | None = None) -> None:
    """Appends a section to `path` (default: what GITHUB_STEP_SUMMARY names; without it, nothing).

    One write to a file opened for appending, because other steps' processes may write to it too.
    """
    target = os.environ.get(VARIABLE) if path is None else path
    if not target:
        return
    content = f"{markdown.rstrip()}\n\n".encode(errors="backslashreplace")
    try:
        # Not blocking: a pipe that nobody reads must not hold the run up.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(target, flags, 0o666)
        try:
            written = os.write(descriptor, content)
        finally:
            os.close(descriptor)
        if written != len(content):
            raise OSError(0, f"{written} of {len(content)} bytes were written")
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"assay: {VARIABLE} can't be written ({reason}), no summary", file=sys.stderr)
