"""`assay bisect --git GOOD BAD --case FILE`: the commit that broke a verdict."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from reference.model.errors import InputError
from suites.commands import common, tables
from suites.harness.bisect_report import EXIT_CODES, Report, document_of, render
from suites.harness.case import Case, case_model, load_case
from suites.harness.commit_bisect import Judged, find
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
    steps = math.ceil(math.log2(between)) if between > 1 else 0
    progress.line(
        f"{counted(between, 'commit')} after GOOD: both ends, then about {counted(steps, 'step')} "
        f"of {counted(plan.runs, 'probe')} at most"
    )
    with temporary_worktree(git, good) as (worktree, folder):
        root = make_overlay(folder, worktree) if arguments.engine_only else worktree
        probe = Probe(case, model, root, folder, arguments.timeout)
        progress("probing GOOD")
        finding = find(GitSearch(worktree), good, bad, probe, plan, _teller(git, progress))
    return Report(git, ends, case, finding, engine_only=arguments.engine_only)


def _teller(git: Git, progress: common.ProgressReport) -> Callable[[Judged], None]:
    """Says each verdict as it falls: number, hash, verdict, subject, reason."""
    told = 0

    def tell(judged: Judged) -> None:
        nonlocal told
        commit = git.commit(judged.commit)
        name = ("GOOD", "BAD")[told] if told < 2 else f"step {told - 1}"
        told += 1
        runs = f" ({judged.failed} of {judged.runs} runs failed)" if judged.runs > 1 else ""
        why = "" if judged.text == "ok" else f": {judged.text}"
        text = f"{name:<7} {commit.short} {judged.mark.value:<4} {commit.subject}{runs}{why}"
        progress.line(common.printable(text))
        progress("probing BAD" if told == 1 else f"probing step {told - 1}")

    return tell
