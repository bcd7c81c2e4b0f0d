"""`assay compare A B`: two trace files, point by point."""

import argparse
from pathlib import Path
from typing import Any

from reference.model.errors import InputError
from reference.model.trace import Trace
from suites.commands import common
from suites.harness.traces import compare_traces
from suites.harness.verdict import State, Verdict


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare two trace files point by point",
        description="Compares two files of `assay trace` and names the first point that diverges. "
        "Errors that a point inherits count here; `assay validate` judges each point alone.",
    )
    parser.add_argument("got", type=Path, metavar="A", help="trace file under test")
    parser.add_argument("want", type=Path, metavar="B", help="trace file to hold it against")
    parser.add_argument(
        "--exact", action="store_true", help="demand equal bits (for two engine traces)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SHARE",
        help="allowed difference as a share of B's largest magnitude at each point "
        "(default: the trace-file row of the tolerance table)",
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_writable("--json", arguments.json)
    if arguments.limit is not None and not 0 <= arguments.limit < 1:
        raise InputError(f"--limit is {arguments.limit}, expected a share from 0 to below 1")
    if arguments.exact and arguments.limit is not None:
        raise InputError("--limit goes with a bounded comparison, expected it without --exact")
    got, want = Trace.load(arguments.got), Trace.load(arguments.want)
    verdict = compare_traces(got, want, exact=arguments.exact, share=arguments.limit)
    facts = {"command": "compare", "got": str(arguments.got), "want": str(arguments.want)}
    verdict = Verdict(verdict.checks, run={**facts, **verdict.run}, notes=verdict.notes)
    print(render(verdict))
    if arguments.json is not None:
        verdict.write(arguments.json)
    return verdict.exit_code


def render(verdict: Verdict) -> str:
    rows = [
        (
            check.name,
            check.state.value,
            f"{check.elements:,}",
            common.figure(check.measured),
            common.figure(check.limit),
            common.figure(check.headroom),
            common.shorten(check.where or check.detail, 60),
        )
        for check in verdict.checks
    ]
    headers = ["point", "state", "compared", "max diff", "limit", "head-room", "where"]
    lines = [common.table(rows, headers), ""]
    lines += [f"note      {note}" for note in verdict.notes]
    bad = [check for check in verdict.checks if check.state is not State.OK]
    if bad:
        lines.append(f"{len(bad)} of {len(verdict.checks)} points differ; first: {bad[0].name}")
    lines.append(verdict.summary())
    return "\n".join(lines)
