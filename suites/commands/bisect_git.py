"""`assay bisect --git GOOD BAD --case FILE`: the commit that broke a verdict."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reference.model.errors import InputError
from suites import summary
from suites.commands import common, tables
from suites.harness.bisect_report import EXIT_CODES, Report, document_of, text_of
from suites.harness.case import Case, case_model, load_case
from suites.harness.commit_bisect import Finding, Judged, Mark, Run, find
from suites.harness.commit_probe import DEFAULT_TIMEOUT_S, Probe, make_overlay
from suites.harness.git_worktree import (
    Git,
    GitSearch,
    find_ends,
    open_repository,
    temporary_worktree,
)
from suites.harness.repeats import DEFAULT_ERROR, Plan, plan_runs
from suites.harness.verdict import counted, write_json

EXPLANATION = (
    "Exit codes of --git: 1 a commit was found, 2 it can't be told which or the question is bad. "
    "A commit that doesn't build, hangs or fails otherwise than the case says is skipped."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what --git needs; --json too, unless the parser has it already."""
    group = parser.add_argument_group("which commit broke it (--git)", EXPLANATION)
    group.add_argument(
        "--git",
        nargs=2,
        metavar=("GOOD", "BAD"),
        help="find the first commit after GOOD, up to BAD, at which the case fails; works in a "
        "temporary worktree and leaves checkout, index and bisect state alone",
    )
    group.add_argument(
        "--case", type=Path, metavar="FILE", help="JSON file with the model, prompt and options"
    )
    group.add_argument(
        "--repository",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="a folder of the repository (default: the current one)",
    )
    group.add_argument(
        "--engine-only",
        action="store_true",
        help="take only backend_hip from the tested commit; judge, reference and fixtures are "
        "those of the assay that runs (default: the whole tree of the tested commit)",
    )
    group.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="P",
        help="how often the fault shows, per run (default: 1, always)",
    )
    group.add_argument(
        "--error",
        type=float,
        metavar="E",
        help="allowed probability that the verdict on a commit is wrong; decides the number of "
        f"probes (default: {DEFAULT_ERROR})",
    )
    group.add_argument(
        "--probes", type=int, metavar="N", help="probes per commit, instead of --error"
    )
    group.add_argument(
        "--at-least",
        type=int,
        default=1,
        metavar="K",
        help="failing probes that make a commit bad (default: 1)",
    )
    group.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="Q",
        help="how often a sound commit fails a run; needs --at-least above 1 (default: 0)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"time for one probe; more is a hang, and skipped (default: {DEFAULT_TIMEOUT_S:g})",
    )
    with suppress(argparse.ArgumentError):  # the parser has it already
        common.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.case is None:
        raise InputError("--case is missing, expected a case file because --git probes one case")
    if not 0 < arguments.timeout < math.inf:
        raise InputError(f"--timeout is {arguments.timeout:g}, expected seconds above 0")
    common.require_writable("--json", arguments.json)
    common.require_apart("--json", arguments.json, arguments.case)
    plan = plan_runs(
        arguments.rate,
        arguments.error,
        failing=arguments.at_least,
        noise=arguments.noise,
        runs=arguments.probes,
    )
    case = load_case(arguments.case)
    git = open_repository(arguments.repository)
    good, bad = find_ends(git, *arguments.git)
    with common.ProgressReport() as progress:
        model = case_model(case, arguments.case.absolute().parent, progress)
        common.require_apart("--json", arguments.json, model)
        report = _search(arguments, git, (good, bad), case, model, plan, progress)
    print(common.printable(render(report, tables.width())))
    text = render(report, tables.PLAIN).replace("\n", "\n    ")
    summary.append(f"### assay bisect --git\n\n    {common.printable(text)}")
    if arguments.json is not None:
        write_json(arguments.json, document_of(report))
    return EXIT_CODES[report.state]


def _search(
    arguments: argparse.Namespace,
    git: Git,
    ends: tuple[str, str],
    case: Case,
    model: Path,
    plan: Plan,
    progress: common.ProgressReport,
) -> Report:
    good, bad = ends
    between = int(git("rev-list", "--count", f"{good}..{bad}"))
    steps = math.ceil(math.log2(between))
    progress.line(
        f"{counted(between, 'commit')} after GOOD: both ends and about {counted(steps, 'step')}; "
        f"{_rule(plan)}"
    )
    with temporary_worktree(git, good) as (worktree, folder):
        root = make_overlay(folder, worktree) if arguments.engine_only else worktree
        probe = Probe(case, model, root, folder, arguments.timeout)
        told = _Told(git, probe, progress)
        finding = find(GitSearch(worktree), good, bad, told.probe, plan, told.tell)
    return Report(git, ends, case, finding, engine_only=arguments.engine_only)


@dataclass
class _Told:
    """Says what is being probed, and each verdict as it falls."""

    git: Git
    run: Callable[[], Run]
    progress: common.ProgressReport
    commits: int = 0

    @property
    def name(self) -> str:
        return ("GOOD", "BAD")[self.commits] if self.commits < 2 else f"step {self.commits - 1}"

    def probe(self) -> Run:
        self.progress(f"probing {self.name}")
        return self.run()

    def tell(self, judged: Judged) -> None:
        commit = self.git.commit(judged.commit)
        runs = f" ({judged.failed} of {judged.runs} runs failed)" if judged.runs > 1 else ""
        why = "" if judged.text == "ok" else f": {judged.text}"
        text = f"{self.name:<7} {commit.short} {judged.mark.value:<4} {commit.subject}{runs}{why}"
        self.progress.line(common.printable(text))
        self.commits += 1


def render(report: Report, columns: int) -> str:
    """Entries of one line or block each, and the summary as the last line."""
    git, finding = report.git, report.finding

    def entry(head: str, text: str) -> str:
        return tables.paragraph(f"{head:<9} {text}", columns)

    lines = [entry("judge", f"of the {report.judge}")]
    lines += [entry("probes", _rule(finding.plan)), entry("error", _sureness(finding))]
    for judged in finding.skipped:
        commit = git.commit(judged.commit)
        lines.append(entry("skipped", f"{commit.short} {commit.subject}: {judged.text}"))
    if finding.first_bad is None:
        for candidate in finding.candidates:
            commit, known = git.commit(candidate), finding.of(candidate)
            mark = f" ({known.mark.value})" if known else ""
            lines.append(entry("candidate", f"{commit.short} {commit.subject}{mark}"))
        return "\n".join([*lines, report.summary()])
    commit = git.commit(finding.first_bad)
    lines.append(entry("first bad", f"{commit.hash} {commit.subject}"))
    lines += [entry("author", commit.author), entry("date", commit.date)]
    for parent, known in report.before():
        lines.append(entry("before", f"{parent.short} {text_of(known)}"))
    lines.append(entry("after", f"{commit.short} {report.after()}"))
    # git's table is aligned: not wrapped, but made for the columns that are left.
    table = git.stat(commit, columns - 10).splitlines() or ["none: the commit changes no file"]
    heads = ["files", *[""] * (len(table) - 1)]
    lines += [f"{head:<9} {line.strip()}" for head, line in zip(heads, table, strict=True)]
    return "\n".join([*lines, report.summary()])


def _rule(plan: Plan) -> str:
    if plan.runs == 1:
        return "one probe decides a commit"
    if plan.failing == 1:
        return f"a commit is bad once a probe fails, good after {plan.runs} clean ones"
    return f"a commit is bad once {plan.failing} of {plan.runs} probes fail, else good"


def _sureness(finding: Finding) -> str:
    """How probable an error is, per verdict and in all."""
    plan = finding.plan
    if plan.miss == 0 and not plan.noise:
        return "a wrong commit with probability 0, if the fault shows in every run"
    per_commit = (
        f"a fault that shows in {_percent(plan.rate)} of runs is missed at a commit with "
        f"probability {_percent(plan.miss)}"
    )
    if plan.noise:
        per_commit += f", a sound commit called bad with {_percent(plan.false_alarm)}"
    settled = sum(judged.mark is not Mark.SKIP for judged in finding.judged)
    return (
        f"{per_commit}; one or more of the {settled} verdicts of this bisection are wrong with "
        f"{_percent(finding.error)} at most"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
