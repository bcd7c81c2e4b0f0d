"""`assay limits`: the table of tolerances, and with a model how much of it the engine uses."""

import argparse
import textwrap
from typing import Any

from reference.model import Model
from reference.model.trace import Trace
from suites.commands import common, tables
from suites.harness.kernels import path_of, require_path
from suites.harness.local import LocalRules, PointCheck, first_broken, judge_trace
from suites.harness.promises import PROMISES
from suites.harness.protocol import PREFILL_MODES, prefill_of
from suites.harness.row_power import Used, shares_by_op
from suites.harness.tolerances import END_TO_END, TABLE, TRACE_FILES, Row, RowKey
from suites.harness.verdict import json_number, write_json

SCHEMA_VERSION = 1
LENGTHS = (64, 2048)
"""Lengths of a sum that roundings are shown for: a head, and a row of a matrix."""
FIXED = 17 + 11 + 2 * 9 + 5 * 2
"""Columns of the terminal that op, path and roundings take, with the gaps between columns."""
MAGNITUDE = 24


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "limits",
        help="what each operation may be off by and why; with a model, how much of it is used",
        description="Prints the table of tolerances: each row allows `roundings` times 2^-24 of "
        "its magnitude for a sum of n terms. With MODEL the engine runs a traced prefill, and the "
        "share of its limit that each operation's worst element uses is printed too.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a GGUF file or registered name")
    common.add_prompt(parser)
    parser.add_argument(
        "--prefill",
        choices=PREFILL_MODES,
        default="batched",
        help="mode to trace (default: batched)",
    )
    common.add_engine(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    require_path(arguments.path, (arguments.prefill,))
    used, label, code = Used(), "", 0
    lines = [table(used), ""]
    if arguments.model is not None:
        with common.ProgressReport() as progress:
            model = common.open_model(arguments, progress)
            points, label = measure(arguments, model, progress)
        used.add(points)
        broken = first_broken(points)
        lines = [table(used), "", head_room(used), ""]
        lines.append(f"model     {arguments.model}, runtime {label}, {arguments.prefill} prefill")
        if broken is not None:
            lines.append(f"above its limit: {broken.check.link}; `assay validate` gives a verdict")
            code = broken.check.state.exit_code
    lines.append(end_to_end(tables.width()))
    print("\n".join(lines))
    if arguments.json is not None:
        write_json(arguments.json, document(used, arguments, label))
    return code


def measure(
    arguments: argparse.Namespace, model: Model, progress: Any
) -> tuple[list[PointCheck], str]:
    """Every point of a traced prefill, judged, and the runtime's label."""
    tokens = common.prompt_tokens(arguments, model, 0)
    engine = common.open_engine(arguments, model, len(tokens), progress)
    with engine:
        trace = Trace()
        prefill_of(engine, arguments.prefill)(tokens, trace=trace)
        path = path_of(arguments.prefill, arguments.path)
        rules = LocalRules(path, arguments.kv_type_k, arguments.kv_type_v)
        return list(judge_trace(model, trace, rules, progress=progress)), engine.device.label


def _roundings(row: Row) -> list[str]:
    return [f"{row.roundings(length):.4g}" for length in LENGTHS]


def table(used: Used) -> str:
    """One row each, with its reason; rows that no operation of the model consulted say so."""
    rows = [
        _cells(used, (row.op, row.rounding), _roundings(row), row.magnitude, row.reason)
        for row in TABLE.values()
    ]
    rows += [
        _cells(used, (p.op, p.rounding), ["0"] * len(LENGTHS), "", p.reason)
        for p in PROMISES.values()
    ]
    heads = ["op", "path", *(f"n={length:,}" for length in LENGTHS), "magnitude"]
    heads += ["used"] if used.rows else []
    heads.append("reason")
    return tables.table(rows, heads)


def _cells(used: Used, key: RowKey, roundings: list[str], magnitude: str, reason: str) -> list[str]:
    worst = used.worst_of(key)
    share = [tables.share(worst[2]) if worst is not None else "-"] if used.rows else []
    room = tables.width() - FIXED - MAGNITUDE - (8 if share else 0)
    wrapped = [_wrapped(magnitude, MAGNITUDE), *share, _wrapped(reason, max(24, room))]
    return [*key, *roundings, *wrapped]


def _wrapped(text: str, room: int) -> str:
    return "\n".join(textwrap.wrap(text, room))


def head_room(used: Used) -> str:
    """How much of its limit each operation's worst element uses."""
    rows = [
        [op, tables.share(share), point, ", ".join(sorted(" ".join(row) for row in used.rows[op]))]
        for op, (point, share) in shares_by_op(used).items()
    ]
    return tables.table(rows, ["operation", "of limit", "worst point", "rows of its limit"])


def end_to_end(columns: int) -> str:
    text = (
        f"logits may be off by {END_TO_END.distance_factor:g} times the distance between the "
        f"float32 and the float64 reference and {END_TO_END.kv_factor:g} times that between the "
        f"reference with and without rounding of its KV cache; on path matrix "
        f"{END_TO_END.product_factor:g} times that with and without halves; trace files by "
        f"{TRACE_FILES.share:g} of a row's largest magnitude"
    )
    return tables.paragraph(text, columns, 2)


def document(used: Used, arguments: argparse.Namespace, label: str) -> dict[str, Any]:
    rows = [
        {
            "op": row.op,
            "path": row.rounding,
            "roundings": {str(length): row.roundings(length) for length in LENGTHS},
            "magnitude": row.magnitude,
            "reason": row.reason,
            **_used(used, (row.op, row.rounding)),
        }
        for row in TABLE.values()
    ]
    promises = [
        {"op": p.op, "path": p.rounding, "reason": p.reason, **_used(used, (p.op, p.rounding))}
        for p in PROMISES.values()
    ]
    return {
        "schema": "assay.limits",
        "schema_version": SCHEMA_VERSION,
        "model": arguments.model,
        "runtime": label or None,
        "rows": rows,
        "exact": promises,
        "operations": {
            op: {
                "of_limit": json_number(share),
                "point": point,
                "rows": sorted(" ".join(row) for row in used.rows[op]),
            }
            for op, (point, share) in used.shares.items()
        },
        "end_to_end": {
            "distance_factor": END_TO_END.distance_factor,
            "kv_factor": END_TO_END.kv_factor,
            "product_factor": END_TO_END.product_factor,
            "reason": END_TO_END.reason,
        },
        "trace_files": {"share": TRACE_FILES.share, "reason": TRACE_FILES.reason},
    }


def _used(used: Used, key: RowKey) -> dict[str, Any]:
    worst = used.worst_of(key)
    return {"of_limit": None if worst is None else json_number(worst[2])}
