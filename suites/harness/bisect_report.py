"""What a commit bisect found: as text, and as JSON after bisect_git.schema.json."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suites.harness.case import Case
from suites.harness.commit_bisect import Finding, Judged, Mark
from suites.harness.git_worktree import Commit, Git
from suites.harness.repeats import Plan
from suites.harness.verdict import counted

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).with_name("bisect_git.schema.json")
FOUND, UNDECIDED = "found", "undecided"
EXIT_CODES = {FOUND: 1, UNDECIDED: 2}
IMPLIED = "not probed: an ancestor of a good commit"


@dataclass(frozen=True)
class Report:
    """A finding and where it was made. `ends` are the hashes of GOOD and BAD."""

    git: Git
    ends: tuple[str, str]
    case: Case
    finding: Finding
    engine_only: bool = False

    @property
    def state(self) -> str:
        return UNDECIDED if self.finding.first_bad is None else FOUND

    def summary(self) -> str:
        """The last line of the report."""
        first = self.finding.first_bad
        if first is None:
            count = counted(len(self.finding.candidates), "commit")
            return f"undecided: the first bad one is one of {count} and can't be narrowed further"
        commit, after = self.git.commit(first), self.finding.of(first)
        return f"found: {commit.short} broke the case: {after.text if after else ''}"

    def before(self) -> list[tuple[Commit, Judged | None]]:
        """The parents of the first bad commit, and what was judged of each."""
        if self.finding.first_bad is None:
            return []
        parents = self.git.commit(self.finding.first_bad).parents
        return [(self.git.commit(parent), self.finding.of(parent)) for parent in parents]


def render(report: Report, columns: int) -> str:
    """Entries, one a line or block, and the summary as the last line."""
    git, finding = report.git, report.finding
    lines = [_entry("judge", "of this checkout" if report.engine_only else "of each commit")]
    lines += [_entry("probes", text) for text in _sureness(finding)]
    for judged in finding.skipped:
        commit = git.commit(judged.commit)
        lines.append(_entry("skipped", f"{commit.short} {commit.subject}: {judged.text}"))
    if finding.first_bad is None:
        for candidate in finding.candidates:
            commit, known = git.commit(candidate), finding.of(candidate)
            mark = f" ({known.mark.value})" if known else ""
            lines.append(_entry("candidate", f"{commit.short} {commit.subject}{mark}"))
        return "\n".join([*lines, report.summary()])
    commit, after = git.commit(finding.first_bad), finding.of(finding.first_bad)
    lines += [
        _entry("first bad", f"{commit.hash} {commit.subject}"),
        _entry("author", commit.author),
        _entry("date", commit.date),
    ]
    for parent, known in report.before():
        lines.append(_entry("before", f"{parent.short} {known.text if known else IMPLIED}"))
    lines.append(_entry("after", f"{commit.short} {after.text if after else ''}"))
    lines += [_entry("files", line) for line in _stat(git, commit, columns)]
    return "\n".join([*lines, report.summary()])


def _entry(head: str, text: str) -> str:
    return f"{head:<9} {text}"


def _stat(git: Git, commit: Commit, columns: int) -> list[str]:
    lines = [line.strip() for line in git.stat(commit, columns - 10).splitlines()]
    return lines or ["none: the commit changed no file"]


def _sureness(finding: Finding) -> list[str]:
    """How many probes, and how probable an error is, per verdict and in all."""
    plan = finding.plan
    probes = counted(plan.runs, "probe")
    if plan.failing == 1:
        rule = f"a commit is bad once one of {probes} fails, good after {plan.runs} clean"
    else:
        rule = f"a commit is bad once {plan.failing} of {probes} fail"
    sure = (
        f"a fault that shows in {_percent(plan.rate)} of runs is missed with probability "
        f"{_percent(plan.miss)} per commit"
    )
    if plan.noise:
        sure += f", a sound commit called bad with {_percent(plan.false_alarm)}"
    settled = sum(judged.mark is not Mark.SKIP for judged in finding.judged)
    whole = f"over the {settled} verdicts of this bisection with {_percent(finding.error)} at most"
    return [rule, f"{sure}; one error or more {whole}"]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def document_of(report: Report) -> dict[str, Any]:
    """The JSON form."""
    finding, git = report.finding, report.git
    first = finding.first_bad
    return {
        "schema": "assay.bisect_git",
        "schema_version": SCHEMA_VERSION,
        "state": report.state,
        "exit_code": EXIT_CODES[report.state],
        "summary": report.summary(),
        "good": report.ends[0],
        "bad": report.ends[1],
        "engine_only": report.engine_only,
        "case": report.case.to_json(),
        "probes": _plan_json(finding.plan, finding.error),
        "first_bad": None if first is None else _commit_json(git, git.commit(first)),
        "before": [
            {"commit": parent.hash, "probed": known is not None, "text": _text(known)}
            for parent, known in report.before()
        ],
        "after": None if first is None else _text(finding.of(first)),
        "candidates": list(finding.candidates),
        "judged": [{**asdict(entry), "mark": entry.mark.value} for entry in finding.judged],
    }


def _plan_json(plan: Plan, whole: float) -> dict[str, Any]:
    return {**asdict(plan), "error_of_bisection": whole}


def _text(known: Judged | None) -> str:
    return IMPLIED if known is None else known.text


def _commit_json(git: Git, commit: Commit) -> dict[str, Any]:
    return {**asdict(commit), "parents": list(commit.parents), "files": list(git.files(commit))}
