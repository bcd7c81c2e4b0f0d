"""`assay bench`: speed tables with limits, ratios and a record file, within a time that is set."""

import argparse
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference.model.cache import atomic_write
from reference.model.errors import InputError
from suites.commands import common
from suites.harness.verdict import write_json

if TYPE_CHECKING:
    from backend_hip.device import Progress
    from reports.speed import Speed
    from suites.benchmark.bench import Subject
    from suites.benchmark.deadline import Deadline
    from suites.benchmark.limits import MeasuredLimits
    from suites.benchmark.plans import Wanted
    from suites.benchmark.stored import Stored

SCHEMA_VERSION = 2
ROUNDS = 5


def add(subparsers: Any) -> None:
    from suites.benchmark.plans import ALL_SECTIONS

    parser = subparsers.add_parser(
        "bench",
        help="speed tables: decode by batch and context, prefill by mode, path and MAX_COLS",
        description="Proves each row, times the rows of a section in turn, and sets them beside "
        "what the device's measured bandwidth and matrix rate allow. Tables are printed, and the "
        "files of --out and --json written anew, as soon as rows are measured. geometry-qwen3-8b "
        "is a model for it. The CPU runtime has fewer rows; a value that no row has is refused.",
    )
    common.add_model(parser)
    common.add_device(parser)
    parser.add_argument(
        "--sections",
        default=",".join(ALL_SECTIONS),
        metavar="A,B",
        help=f"which tables, in this order (default: {','.join(ALL_SECTIONS)})",
    )
    for option, what in (
        ("--batches", "sequences of decode rows"),
        ("--contexts", "cached tokens of decode rows"),
        ("--prompts", "prompt lengths of prefill rows"),
        ("--paths", "paths"),
    ):
        parser.add_argument(
            option,
            metavar="LIST",
            help=f"only rows with these {what}, and what stands beside them (default: all)",
        )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"samples a row (default: {ROUNDS})"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="no context or prompt of a section is begun later than this (default: 60)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write speed.json and speed.md there"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from backend_hip.device import open_device
    from backend_hip.runtimes import select_runtime
    from suites.benchmark.bench import Subject
    from suites.benchmark.clock import host_name
    from suites.benchmark.deadline import Deadline
    from suites.benchmark.limits import measure_limits
    from suites.benchmark.load_speed import read_alone
    from suites.benchmark.plans import ALL_SECTIONS
    from suites.benchmark.stored import checkout_commit, closing_lines, document, tables

    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    names = arguments.sections.split(",")
    if len(set(names)) != len(names) or not set(names) <= set(ALL_SECTIONS):
        raise InputError(
            f"--sections is {arguments.sections}, expected some of {','.join(ALL_SECTIONS)}"
        )
    if arguments.rounds < 1 or not 0 < arguments.minutes < math.inf:
        raise InputError(
            f"--rounds is {arguments.rounds} and --minutes {arguments.minutes}, expected finite "
            "numbers above 0"
        )
    if arguments.out is not None and not arguments.out.is_dir():
        raise InputError(f"--out is {arguments.out}, expected a folder that exists")
    wanted = wanted_from(arguments)
    deadline, records = Deadline(arguments.minutes), list["Stored"]()

    def closing() -> list[str]:
        fastest = sorted(subject.loads, key=lambda load: load.elapsed_s)[:1]
        of = {"compiler": device.runtime.compiler, "host": subject.host}
        return closing_lines(
            limits, deadline.left_out, [read, *fastest], commit=subject.commit, **of
        )

    with common.ProgressReport() as progress:
        kind = select_runtime(arguments.device, progress=progress).kind
        require_rows(wanted, names, kind)
        model = common.open_model(arguments, progress)
        with open_device(arguments.device, progress=progress) as device:
            progress("measuring limits, reading the file")
            limits, read = measure_limits(device), read_alone(model)
            subject = Subject(
                arguments.model, model, device, limits, host_name(), checkout_commit()
            )
            sections = {
                name: begin(subject, name, wanted, arguments.rounds, progress, deadline)
                for name in names
            }
            for name, parts in sections.items():
                for part in parts if deadline.allows(name) else ():
                    records += part
                    # What is measured is kept and shown, whatever happens to the next part.
                    _write(arguments, document(records, closing(), markdown=True), records, limits)
                    for table in tables(part):
                        print(table.terminal(), end="\n\n", flush=True)
            _write(arguments, document(records, closing(), markdown=True), records, limits)
            print("\n\n".join(closing()))
    return 0


def begin(
    subject: "Subject",
    name: str,
    wanted: "Wanted",
    rounds: int,
    progress: "Progress",
    deadline: "Deadline",
) -> "Iterator[list[Stored]]":
    """A section, part by part. InputError where no row of it is wanted, before anything runs."""
    from suites.benchmark.bench import run_section
    from suites.benchmark.operations import run_ops
    from suites.benchmark.plans import OPS, section

    if name == OPS:
        return (list(part) for part in run_ops(subject, rounds, progress, deadline, wanted))
    plan = section(name, subject.device.runtime.kind, wanted)
    return _with_kernels(subject, run_section(subject, plan, rounds, progress, deadline))


def _with_kernels(subject: "Subject", parts: "Iterator[list[Speed]]") -> "Iterator[list[Stored]]":
    """Each part, the first one with what the section's kernels take."""
    shown = len(subject.kernels)
    for part in parts:
        found = subject.kernels[shown:]
        shown += len(found)
        yield [*found, *part]


def wanted_from(arguments: argparse.Namespace) -> "Wanted":
    """What the options leave. InputError for what is no list of numbers, or no path."""
    from backend_hip.registry import PATHS
    from suites.benchmark.plans import Wanted

    lists: dict[str, tuple[int, ...]] = {}
    for name in ("batches", "contexts", "prompts"):
        text = getattr(arguments, name)
        try:
            lists[name] = tuple(map(int, text.split(","))) if text is not None else ()
        except ValueError:
            raise InputError(f"--{name} is {text}, expected numbers such as 1,8") from None
    paths = tuple(arguments.paths.split(",")) if arguments.paths is not None else ()
    if not set(paths) <= set(PATHS):
        raise InputError(f"--paths is {arguments.paths}, expected some of {','.join(PATHS)}")
    return Wanted(**lists, paths=paths)


def require_rows(wanted: "Wanted", names: list[str], device_kind: str) -> None:
    """InputError where an option lists a value that no row of these sections has."""
    from suites.benchmark import operations
    from suites.benchmark.plans import OPS, section

    size = "cpu" if device_kind == "cpu" else "gpu"
    rows = [row for name in names if name != OPS for row in section(name, device_kind).rows]
    decode = [row for row in rows if row.phase == "decode"]
    known: dict[str, set[Any]] = {
        "batches": {row.batch for row in decode},
        "contexts": {row.context for row in decode},
        "prompts": {row.context for row in rows if row.phase != "decode"},
        "paths": {row.path for row in rows},
    }
    if OPS in names:
        known["batches"] |= set(operations.BATCHES[size])
        known["contexts"] |= set(operations.CONTEXTS[size])
        known["paths"] |= set(operations.PRODUCT_PATHS)
    for name, has in known.items():
        missing = [value for value in getattr(wanted, name) if value not in has]
        if missing:
            shown = ", ".join(map(str, sorted(has))) or "none"
            raise InputError(
                f"--{name} has {', '.join(map(str, missing))}, which no row of sections "
                f"{','.join(names)} has here; they have {shown}"
            )


def _write(
    arguments: argparse.Namespace,
    markdown: str,
    records: "list[Stored]",
    limits: "MeasuredLimits",
) -> None:
    stored = {
        "schema": "assay.bench",
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "limits": limits.stored(),
        "rows": [record.stored() for record in records],
    }
    if arguments.out is not None:
        write_json(arguments.out / "speed.json", stored)
        atomic_write(arguments.out / "speed.md", markdown.encode())
    if arguments.json is not None:
        write_json(arguments.json, stored)
