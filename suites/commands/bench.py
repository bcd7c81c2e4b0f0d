"""`assay bench`: speed tables with limits, ratios and a record file, within a time that is set."""

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference.model.cache import atomic_write
from reference.model.errors import InputError
from suites.commands import common
from suites.harness.verdict import write_json

if TYPE_CHECKING:
    from reports.speed import Speed
    from suites.benchmark.limits import MeasuredLimits

SCHEMA_VERSION = 1
ROUNDS = 5


def add(subparsers: Any) -> None:
    from suites.benchmark.plans import SECTIONS

    parser = subparsers.add_parser(
        "bench",
        help="speed tables: decode by batch and context, prefill by mode, path and MAX_COLS",
        description="Proves each row, times the rows of a section in turn, and sets them beside "
        "what the device's measured bandwidth allows. geometry-qwen3-8b is a model for it.",
    )
    common.add_model(parser)
    common.add_device(parser)
    parser.add_argument(
        "--sections",
        default=",".join(SECTIONS),
        metavar="A,B",
        help=f"which tables, in this order (default: {','.join(SECTIONS)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"samples a row (default: {ROUNDS})"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="no section is begun later than this (default: 60)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write speed.json and speed.md there"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from backend_hip.device import open_device
    from suites.benchmark.bench import Subject, run_section
    from suites.benchmark.clock import host_name
    from suites.benchmark.limits import measure_limits
    from suites.benchmark.load_speed import read_alone
    from suites.benchmark.plans import SECTIONS, section
    from suites.benchmark.stored import checkout_commit, document

    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    names = arguments.sections.split(",")
    if len(set(names)) != len(names) or not set(names) <= set(SECTIONS):
        raise InputError(
            f"--sections is {arguments.sections}, expected some of {','.join(SECTIONS)}"
        )
    if arguments.rounds < 1 or not arguments.minutes > 0:
        raise InputError("--rounds and --minutes must be above 0")
    if arguments.out is not None and not arguments.out.is_dir():
        raise InputError(f"--out is {arguments.out}, expected a folder that exists")
    began = time.monotonic()
    records: list[Speed] = []
    left_out: list[str] = []

    def text(*, markdown: bool) -> str:
        fastest = sorted(subject.loads, key=lambda load: load.elapsed_s)[:1]
        return document(records, limits, left_out, [read, *fastest], markdown=markdown)

    with common.ProgressReport() as progress:
        model = common.open_model(arguments, progress)
        with open_device(arguments.device, progress=progress) as device:
            progress("measuring limits, reading the file")
            limits, read = measure_limits(device), read_alone(model)
            subject = Subject(
                arguments.model, model, device, limits, host_name(), checkout_commit()
            )
            for name in names:
                if time.monotonic() - began > arguments.minutes * 60:
                    left_out.append(name)
                    continue
                plan = section(name, device.runtime.kind)
                records += run_section(subject, plan, arguments.rounds, progress)
                # What is measured is kept, whatever happens to the next section.
                _write(arguments, text(markdown=True), records, limits)
    print(text(markdown=False))
    return 0


def _write(
    arguments: argparse.Namespace,
    markdown: str,
    records: "list[Speed]",
    limits: "MeasuredLimits",
) -> None:
    stored = {
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
