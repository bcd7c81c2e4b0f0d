"""`assay isa`: what every kernel costs on gfx1201, compiled here without ROCm, against budgets."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend_hip.isa import SIZES, WAVES, KernelResources, survey
from backend_hip.isa_budgets import BUDGETS, Broken, broken_budgets, known_break
from backend_hip.offline import ARCHITECTURE, OfflineClang, find_clang
from backend_hip.registry import MAX_COLS_LIMIT, REGISTRY, KernelRow
from reference.model.errors import InputError
from suites import summary
from suites.commands import common, tables
from suites.harness import verdict
from suites.harness.verdict import write_json

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(verdict.__file__).with_name("isa.schema.json")
COLUMNS = {
    "VGPR": "vgprs",
    "SGPR": "sgprs",
    "LDS": "lds_nbytes",
    "scratch": "scratch_nbytes",
    "V spill": "vgpr_spills",
    "S spill": "sgpr_spills",
    "waves": "occupancy",
    "WMMA": "wmma",
    "16 B": "wide_loads",
    "dot4": "dot4",
}
"""Heads of the table, and the figure below each."""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "isa",
        help="registers, LDS, spills and occupancy of every kernel on gfx1201, without a GPU",
        description="Compiles the registry's kernels for gfx1201 with clang 18 or newer (no ROCm "
        "needed) and prints: VGPR per lane, SGPR per wave, LDS bytes a block, scratch bytes a "
        "lane, spilled registers, waves per SIMD (16 at most), and how many matrix instructions, "
        "loads of 16 bytes a lane and dot products of four bytes the code holds. Exit 1 when a "
        "budget is broken, 2 when there is no such clang.",
    )
    paths = ", ".join(dict.fromkeys(row.path for row in REGISTRY))
    only = {"op": "this op", "format": "this format", "path": f"one of {paths}"}
    for field, what in only.items():
        parser.add_argument(f"--{field}", metavar=field[0].upper(), help=f"only {what}")
    default = ",".join(map(str, SIZES["MAX_COLS"]))
    parser.add_argument(
        "--max-cols",
        default=default,
        metavar="LIST",
        help=f"columns of the batched products, 1 to {MAX_COLS_LIMIT} each (default: {default})",
    )
    parser.add_argument(
        "--wave",
        default=",".join(map(str, WAVES)),
        metavar="LIST",
        help="lanes per wave: 32, 64 or both (default: both)",
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_writable("--json", arguments.json)
    columns = _numbers("--max-cols", arguments.max_cols, range(1, MAX_COLS_LIMIT + 1))
    waves = _numbers("--wave", arguments.wave, WAVES)
    rows = choose(arguments.op, arguments.format, arguments.path)
    clang = find_clang()
    sizes = {**SIZES, "MAX_COLS": columns}
    with common.ProgressReport() as progress:
        kernels = survey(rows, clang, sizes=sizes, waves=waves, progress=progress)
    if not kernels:
        raise InputError(f"--wave is {arguments.wave}, expected one that these kernels are for")
    broken = broken_budgets(kernels)
    code = int(any(known_break(entry) is None for entry in broken))
    print(render(kernels, broken))
    summary.append(markdown(kernels, broken))
    if arguments.json is not None:
        write_json(arguments.json, document(kernels, broken, clang, code))
    return code


def choose(op: str | None, form: str | None, path: str | None) -> list[KernelRow]:
    """The registry's rows that the filters leave; InputError where one leaves none."""
    rows = list(REGISTRY)
    for option, index, wanted in (("--op", 0, op), ("--format", 1, form), ("--path", 2, path)):
        if wanted is None:
            continue
        there = list(dict.fromkeys(row.key[index] for row in rows if row.key[index]))
        rows = [row for row in rows if row.key[index] == wanted]
        if not rows:
            raise InputError(
                f"{option} is {wanted}, expected one of {', '.join(there) or 'none'} because only "
                "these are left in the registry"
            )
    return rows


def _numbers(option: str, text: str, allowed: Sequence[int]) -> tuple[int, ...]:
    """A comma-separated list of allowed numbers, each once, in the order given."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) in allowed for part in parts):
        limits = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 2 else "32, 64 or 32,64"
        raise InputError(f"{option} is {text!r}, expected {limits}, comma-separated")
    return tuple(dict.fromkeys(map(int, parts)))


def resource_table(kernels: Sequence[KernelResources]) -> str:
    """One row a kernel; a figure that is 0 in every row stands below the table instead."""
    figures = [asdict(kernel.figures) for kernel in kernels]
    shown = {h: name for h, name in COLUMNS.items() if any(row[name] for row in figures)}
    rows = [
        [kernel.name, *(f"{row[name]:,}" for name in shown.values())]
        for kernel, row in zip(kernels, figures, strict=True)
    ]
    zeros = ", ".join(head for head in COLUMNS if head not in shown)
    table = tables.table(rows, ["kernel", *shown])
    return table + (f"\n0 in every row: {zeros}" if zeros else "")


def _budget_rows(
    kernels: Sequence[KernelResources], broken: Sequence[Broken]
) -> list[tuple[str, str]]:
    """Every budget and how it stands: kernels bound, broken, known."""
    rows = []
    for budget in BUDGETS:
        bound = sum(budget.binds(kernel) for kernel in kernels)
        breaks = [entry for entry in broken if entry.budget == budget]
        known = sum(known_break(entry) is not None for entry in breaks)
        state = f"{bound - len(breaks)} of {bound} kernels" if bound else "binds none of these"
        rows.append((budget.name, state + (f", {known} known breaks" if known else "")))
    return rows


def render(kernels: Sequence[KernelResources], broken: Sequence[Broken]) -> str:
    """The table, the budgets, what is accepted for now and what is broken."""
    new = [entry for entry in broken if known_break(entry) is None]
    accepted = dict.fromkeys(filter(None, map(known_break, broken)))
    columns = tables.width()
    lines = [
        resource_table(kernels),
        "",
        tables.table(_budget_rows(kernels, broken), ["budget", "kept by"]),
        "",
        *(
            tables.paragraph(f"known: {known.name}: {known.reason}", columns, 4)
            for known in accepted
        ),
        *(tables.paragraph(f"broken: {entry.text}", columns, 4) for entry in new),
        f"ok: {len(kernels)} kernels" if not new else f"{len(new)} budgets broken",
    ]
    return "\n".join(lines)


def markdown(kernels: Sequence[KernelResources], broken: Sequence[Broken]) -> str:
    """The section for a job summary: budgets, and what breaks them."""
    said = [f"- {summary.cell(e.text)}" for e in broken if known_break(e) is None]
    title = f"### assay isa, {len(kernels)} kernels for {ARCHITECTURE}"
    table = summary.markdown_table(["budget", "kept by"], _budget_rows(kernels, broken))
    return "\n".join([title, "", table, "", *said])


def document(
    kernels: Sequence[KernelResources], broken: Sequence[Broken], clang: OfflineClang, code: int
) -> dict[str, Any]:
    """The JSON form; isa.schema.json describes it."""
    return {
        "schema": "assay.isa",
        "schema_version": SCHEMA_VERSION,
        "exit_code": code,
        "architecture": ARCHITECTURE,
        "compiler": clang.version.splitlines()[0],
        "kernels": [
            {
                "op": kernel.row.op,
                "variant": kernel.row.variant,
                "path": kernel.row.path,
                "file": kernel.source.file,
                "entry": kernel.row.entry,
                "defines": dict(kernel.source.defines),
                "sizes": dict(kernel.sizes),
                "wave": kernel.wave,
                "block": kernel.block,
                **asdict(kernel.figures),
            }
            for kernel in kernels
        ],
        "budgets": [
            {"name": budget.name, "figure": budget.figure, "limit": budget.limit}
            | {"least": budget.least, "reason": budget.reason}
            | {"bound": sum(budget.binds(kernel) for kernel in kernels)}
            for budget in BUDGETS
        ],
        "broken": [
            {"kernel": entry.kernel.name, "budget": entry.budget.name, "value": entry.value}
            | {"known": known.reason if (known := known_break(entry)) else None}
            for entry in broken
        ],
    }
