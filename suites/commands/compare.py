"""`assay compare A B`: two trace files, point by point."""

import argparse
import filecmp
from pathlib import Path
from typing import Any

from reference.model.errors import InputError
from reference.model.trace import Trace
from suites import summary
from suites.commands import common, tables
from suites.harness.traces import compare_traces, require_comparable, under_test
from suites.harness.verdict import Check, State, Verdict, counted, worst_first


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare two trace files point by point",
        description="Compares two files of `assay trace` and names the first point that diverges. "
        "Errors that a point inherits count here; `assay validate` judges each point alone. "
        "Traces of other tokens, another model, other logits or other KV types are refused.",
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
        help="allowed difference as a share of the largest magnitude in B's row (token) at each "
        "point (default: the trace-file row of the tolerance table)",
    )
    parser.add_argument(
        "--allow-different", action="store_true", help="let the KV types differ: they are compared"
    )
    parser.add_argument(
        "--all", action="store_true", help="a row for every point, not only for those that differ"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_writable("--json", arguments.json)
    common.require_apart("--json", arguments.json, arguments.got, arguments.want)
    if arguments.limit is not None and not 0 <= arguments.limit < 1:
        raise InputError(f"--limit is {arguments.limit}, expected a share from 0 to below 1")
    if arguments.exact and arguments.limit is not None:
        raise InputError("--limit goes with a bounded comparison, expected it without --exact")
    got, want = Trace.load(arguments.got), Trace.load(arguments.want)
    require_comparable(got, want, arguments.allow_different)
    if _same_file(arguments.got, arguments.want):
        verdict = Verdict((_nothing_proven(arguments),))
    else:
        verdict = compare_traces(got, want, exact=arguments.exact, share=arguments.limit)
    facts = {"command": "compare", "got": str(arguments.got), "want": str(arguments.want)}
    verdict = Verdict(verdict.checks, run={**facts, **verdict.run}, notes=verdict.notes)
    compared = ", ".join(under_test(got, want))
    print(render(verdict, tables.width(), compared=compared, every=arguments.all))
    summary.append(summary.section_of("assay compare", verdict))
    if arguments.json is not None:
        verdict.write(arguments.json)
    return verdict.exit_code


def _same_file(got: Path, want: Path) -> bool:
    return got.samefile(want) or filecmp.cmp(got, want, shallow=False)


def _nothing_proven(arguments: argparse.Namespace) -> Check:
    one = arguments.got.samefile(arguments.want)
    link = "a file compared with itself proves nothing"
    if not one:
        link = "two files of the same bytes prove nothing: one may be a copy of the other"
    return Check("two traces", State.INVALID, 0, link=link, unit="files")


def render(verdict: Verdict, columns: int, *, compared: str = "", every: bool = False) -> str:
    """Rows of the points that differ (`every`: of all), notes, and the verdict as the last line."""
    bad = [check for check in verdict.checks if check.state is not State.OK]
    shown = list(verdict.checks) if every else bad
    lines = [tables.check_table(shown, columns, "point"), ""] if shown else []
    lines += [tables.paragraph(f"note      {note}", columns) for note in verdict.notes]
    points = [check for check in verdict.checks if check.unit == "values"]
    if points:
        lines.append(tables.paragraph(_total(points), columns))
    of = f" ({compared})" if compared and verdict.state is State.OK else ""
    return "\n".join([*lines, f"{verdict.summary()}{of}"])


def _total(points: list[Check]) -> str:
    bad = [check for check in points if check.state is not State.OK]
    values = counted(sum(check.elements for check in points), "value")
    text = f"{len(bad)} of {counted(len(points), 'point')} differ, {values} compared"
    if bad:
        return f"{text}; first: {bad[0].name}"
    worst = worst_first(points)[0]
    return f"{text}; nearest to its limit: {worst.name} with {tables.share(worst.of_limit)} of it"
