"""What a commit bisect found, and its JSON form after bisect_git.schema.json."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suites.harness.case import Case
from suites.harness.commit_bisect import Finding, Judged
from suites.harness.git_worktree import Commit, Git
from suites.harness.repeats import Plan
from suites.harness.verdict import counted

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).with_name("bisect_git.schema.json")
FOUND, UNDECIDED = "found", "undecided"
EXIT_CODES = {FOUND: 1, UNDECIDED: 2}
IMPLIED = "an ancestor of a good commit"


@dataclass(frozen=True)
class Report:
    """A finding and where it was made. `ends` are the hashes of GOOD and BAD."""

    git: Git
    ends: tuple[str, str]
    case: Case
    finding: Finding
    engine_only: bool = False

    @property
    def judge(self) -> str:
        """Whose judge, reference and fixtures gave the verdicts."""
        return "running assay" if self.engine_only else "tested commit"

    @property
    def state(self) -> str:
        return UNDECIDED if self.finding.first_bad is None else FOUND

    def summary(self) -> str:
        """The last line of the report."""
        first = self.finding.first_bad
        if first is None:
            count = counted(len(self.finding.candidates), "commit")
            return f"undecided: the first bad one is one of {count} and can't be narrowed further"
        return f"found: {self.git.commit(first).short} broke the case: {self.after()}"

    def after(self) -> str:
        """The first broken link at the first bad commit; empty where none was found."""
        known = self.finding.of(self.finding.first_bad or "")
        return "" if known is None else known.text

    def before(self) -> list[tuple[Commit, Judged | None]]:
        """The parents of the first bad commit, and what was judged of each."""
        if self.finding.first_bad is None:
            return []
        parents = self.git.commit(self.finding.first_bad).parents
        return [(self.git.commit(parent), self.finding.of(parent)) for parent in parents]


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
        "judge": report.judge,
        "case": report.case.to_json(),
        "probes": _plan_json(finding.plan, finding.error),
        "first_bad": None if first is None else _commit_json(git, git.commit(first)),
        "before": [
            {"commit": parent.hash, "mark": _mark(known), "text": text_of(known)}
            for parent, known in report.before()
        ],
        "after": None if first is None else report.after(),
        "candidates": list(finding.candidates),
        "judged": [{**asdict(entry), "mark": entry.mark.value} for entry in finding.judged],
    }


def _plan_json(plan: Plan, whole: float) -> dict[str, Any]:
    return {**asdict(plan), "error_of_bisection": whole}


def _mark(known: Judged | None) -> str:
    return "not probed" if known is None else known.mark.value


def text_of(known: Judged | None) -> str:
    """What was seen at the parent of a bad commit, or why there is nothing to say."""
    return IMPLIED if known is None else known.text


def _commit_json(git: Git, commit: Commit) -> dict[str, Any]:
    return {**asdict(commit), "parents": list(commit.parents), "files": list(git.files(commit))}
