"""`assay faults`: plants every catalogued fault in a copy of the engine and scores the judge."""

import argparse
import fnmatch
from dataclasses import asdict
from typing import Any

from fixtures.faults import CATEGORIES, TIERS, Fault, load_faults
from reference.model.errors import InputError
from suites import summary
from suites.commands import common, tables
from suites.harness.clean_runs import GROUP, alarms_of, clean_models, clean_run
from suites.harness.fault_pool import Job, run_jobs
from suites.harness.fault_run import outcome_of, run_named
from suites.harness.fault_score import HEADS, Score, score_of
from suites.harness.verdict import json_number, write_json

SCHEMA_VERSION = 1
CLEAN_LIMIT_S = 900.0  # for a process of GROUP runs


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "faults",
        help="does the judge see every known bug: plants each in a copy of the engine",
        description="Plants each fault of the catalogue in a copy of the engine, runs the judge "
        "on the CPU runtime, and prints what was caught and where it was found. Exit 0 when every "
        "fault of the tier was caught and named at its place (of the whole catalogue, 95 % named "
        "there), 1 when not, 3 when a fault is dead (can't be planted). A look is one engine "
        "configuration, prompt and schedule.",
    )
    parser.add_argument(
        "only", nargs="*", metavar="ID", help="ids or patterns such as 'rope-*' (default: all)"
    )
    parser.add_argument(
        "--clean",
        type=int,
        metavar="N",
        help="plant nothing: N seeded runs of the tiny models, of which none may raise an alarm",
    )
    parser.add_argument("--list", action="store_true", help="print the catalogue and run nothing")
    parser.add_argument(
        "--tier",
        choices=TIERS,
        default="fast",
        help="looks taken at each fault: fast, or full, which adds more to it (default: fast)",
    )
    parser.add_argument(
        "--category", metavar="C", help=f"one of {', '.join(CATEGORIES)} (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="processes at a time (default: cores)"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_writable("--json", arguments.json)
    if arguments.jobs < 0:
        raise InputError(f"--jobs is {arguments.jobs}, expected 1 or more")
    if arguments.clean is not None:
        return run_clean(arguments)
    chosen = choose(arguments.only, arguments.category)
    if arguments.list:
        print(catalogue(chosen))
        if arguments.json is not None:
            facts = {"schema": "assay.catalogue", "schema_version": SCHEMA_VERSION}
            write_json(arguments.json, {**facts, "faults": [asdict(fault) for fault in chosen]})
        return 0
    if all(fault.tier == "full" for fault in chosen) and arguments.tier != "full":
        names = ", ".join(fault.id for fault in chosen)
        raise InputError(f"faults: --tier is fast, expected full because only it sees {names}")
    outcomes = []
    with common.ProgressReport() as progress:
        jobs = [Job(fault.id, run_named, (fault.id, arguments.tier)) for fault in chosen]
        for done in run_jobs(jobs, workers=arguments.jobs):
            outcomes.append(outcome_of(done.job.name, done.value, done.error))
            progress(_share(len(outcomes), len(jobs), "faults judged"))
    order = {fault.id: place for place, fault in enumerate(chosen)}
    score = score_of(sorted(outcomes, key=lambda o: order[o.fault]), arguments.tier)
    complete = len(chosen) == len(load_faults())
    problems = score.problems(complete=complete)
    print(render(score, problems))
    summary.append(markdown(score, problems))
    if arguments.json is not None:
        write_json(arguments.json, document(score, problems))
    return 3 if score.dead else int(bool(problems))


def run_clean(arguments: argparse.Namespace) -> int:
    """Seeded runs without a fault; exit 1 when one raises an alarm, 3 when a process is lost."""
    count, models = arguments.clean, clean_models()
    if count < 1:
        raise InputError(f"--clean is {count}, expected 1 or more runs")
    if arguments.only or arguments.category or arguments.list:
        raise InputError("--clean runs the engine as it is, expected no fault beside it")
    jobs = [
        Job(str(first), alarms_of, (first, min(GROUP, count - first), models))
        for first in range(0, count, GROUP)
    ]
    alarms: list[str] = []
    lost: list[str] = []
    runs = 0
    with common.ProgressReport() as progress:
        for done in run_jobs(jobs, workers=arguments.jobs, time_limit_s=CLEAN_LIMIT_S):
            if done.error:
                lost.append(f"runs from {done.job.name}: {done.error}")
            else:
                alarms += done.value
                runs += done.job.arguments[1]
            progress(_share(runs, count, f"clean runs made, {len(alarms)} alarms"))
    used = {clean_run(number, models) for number in range(runs)}
    said = (
        f"{runs} clean runs of {len({run.model for run in used})} models under "
        f"{len({run.look.name for run in used})} looks: {len(alarms)} alarms"
    )
    print("\n".join([*alarms, *lost, said]))
    summary.append(f"### assay faults --clean\n\n{summary.cell(said)}")
    if arguments.json is not None:
        facts = {"schema": "assay.clean", "schema_version": SCHEMA_VERSION, "runs": runs}
        write_json(arguments.json, {**facts, "alarms": alarms, "lost": lost})
    return 3 if lost or runs != count else int(bool(alarms))


def _share(done: int, count: int, what: str) -> str:
    """A line of progress for every tenth; those between say the same."""
    return f"{10 * (10 * done // count)} % of {count} {what}"


def choose(only: list[str], category: str | None) -> list[Fault]:
    """The faults that ids, patterns and a category leave; InputError where a filter leaves none."""
    faults = list(load_faults().values())
    if category is not None:
        if category not in CATEGORIES:
            raise InputError(f"--category is {category}, expected one of {', '.join(CATEGORIES)}")
        faults = [fault for fault in faults if fault.category == category]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(fault.id, pattern) for fault in faults):
            raise InputError(f"faults: no fault is named {pattern}; `assay faults --list` has all")
    if only:
        faults = [f for f in faults if any(fnmatch.fnmatchcase(f.id, p) for p in only)]
    if not faults:
        raise InputError("faults: nothing is left to run, expected at least one fault")
    return faults


def catalogue(faults: list[Fault]) -> str:
    rows = [[f.category, f.id, f.tier, f.model, f.what] for f in faults]
    return tables.table(rows, ["category", "id", "tier", "model", "what"])


def render(score: Score, problems: list[str]) -> str:
    """One line a fault, the score, and what is wrong with it."""
    columns = tables.width()
    lines = [
        f"{o.fault:<32} {o.look or '-':<13} {o.state or 'missed':<9} {o.link}" for o in score.alive
    ]
    later = [o.fault for o in score.alive if not o.caught and o.wanted_tier != score.tier]
    note = f"left to the full tier: {', '.join(later)}" if later and score.tier == "fast" else ""
    elapsed_s = sum(outcome.elapsed_s for outcome in score.outcomes)
    return "\n".join(
        [
            *(tables.paragraph(line, columns, 4) for line in lines),
            "",
            score.table(),
            *([note] if note else []),
            f"{len(score.outcomes)} faults, tier {score.tier}, {elapsed_s:.0f} s of processes",
            *problems,
            "ok" if not problems else f"{len(problems)} problems",
        ]
    )


def markdown(score: Score, problems: list[str]) -> str:
    """The section for a job summary."""
    said = [f"- {summary.cell(problem)}" for problem in problems]
    heads, rows = list(HEADS), score.rows()
    title = f"### assay faults, {score.tier} tier: {len(problems) or 'no'} problems"
    return "\n".join([title, "", summary.markdown_table(heads, rows), "", *said])


def document(score: Score, problems: list[str]) -> dict[str, Any]:
    return {
        "schema": "assay.faults",
        "schema_version": SCHEMA_VERSION,
        "tier": score.tier,
        "problems": problems,
        "outcomes": [
            {**asdict(outcome), "of_limit": json_number(outcome.of_limit)}
            for outcome in score.outcomes
        ],
    }
