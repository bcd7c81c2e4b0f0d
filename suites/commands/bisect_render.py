"""What `assay bisect` prints, its JSON form, and the bundle that it writes."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend_hip.matrix import default_chunk
from reference.model import Model
from suites import summary
from suites.commands import tables
from suites.commands.validate import header
from suites.harness import new_error
from suites.harness import verdict as harness_verdict
from suites.harness.bisect import Finding
from suites.harness.bundle import Bundle, model_arrays, versions
from suites.harness.hybrid import Search
from suites.harness.new_error import StageError
from suites.harness.replay import Replayed
from suites.harness.validate import Options
from suites.harness.verdict import State, Verdict, json_number

SCHEMA = "assay.bisect"
SCHEMA_VERSION = 1
SCHEMA_PATH = Path(harness_verdict.__file__).with_name("bisect.schema.json")
HEADS = ("point", "op", "accumulated", "new", "new of limit", "")


def render(
    found: Finding,
    verdict: Verdict,
    model: Model,
    columns: int,
    bundle: Path | None,
    *,
    asked_bundle: bool = False,
) -> str:
    """Header, the paragraph, the table of new errors, and the verdict as the last line."""
    if verdict.state is State.UNSUPPORTED and len(verdict.checks) == 1:
        return verdict.summary()  # nothing ran
    lines = [*header(verdict, model, columns), "", tables.paragraph(found.paragraph, columns, 0)]
    rows = error_rows(found)
    if rows:
        lines += ["", tables.table([_row(error, found) for error in rows], HEADS)]
    if asked_bundle:
        lines += ["", f"bundle    {bundle or 'none was written: nothing broke that it could hold'}"]
    lines += [*([] if asked_bundle else [""]), verdict.summary()]
    return "\n".join(lines)


def section(found: Finding, verdict: Verdict) -> str:
    """What broke as a CI's job summary shows it: the verdict, the paragraph, the table."""
    cell, facts = summary.cell, summary.facts_of(verdict)
    lines = [f"### {cell(f'assay bisect {facts.model}')}: {facts.state}", "", cell(facts.summary)]
    if facts.runtime:
        lines += ["", f"runtime {cell(facts.runtime)}, {facts.elements:,} values compared"]
    if found.paragraph:
        lines += ["", cell(found.paragraph)]
    rows = [_row(error, found) for error in error_rows(found)]
    return "\n".join([*lines, *(["", summary.markdown_table(HEADS, rows)] if rows else [])])


def error_rows(found: Finding) -> list[StageError]:
    """The first broken point with its neighbours, other broken ones, the logits."""
    if found.forward is None:
        return []
    centre = found.forward.broken
    first = found.forward.first_new
    name = centre.point.name if centre is not None else None
    if name is None and first is not None:
        name = first.point.name
    return new_error.shown(found.forward.errors, name)


def _row(error: StageError, found: Finding) -> tuple[str, ...]:
    broken = None if found.forward is None else found.forward.broken
    first = broken is not None and broken.point == error.point
    note = "breaks first" if first else ("broken" if error.broken else "")
    return (
        error.point.name,
        error.op,
        tables.figure(error.accumulated),
        tables.figure(error.new),
        _times(error.check.of_limit),
        note,
    )


def _times(of_limit: float | None) -> str:
    return "" if of_limit is None else f"{of_limit:.3g} x"


def to_json(found: Finding, verdict: Verdict, bundle: Path | None) -> dict[str, Any]:
    """The JSON form; bisect.schema.json describes it."""
    forward = found.forward
    damage = None if forward is None else forward.damage
    broken = None if forward is None or forward.broken is None else forward.broken
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "state": verdict.state.value,
        "exit_code": verdict.exit_code,
        "summary": verdict.summary(),
        "paragraph": found.paragraph,
        "kind": found.kind,
        "mode": found.case.mode,
        "tokens": list(found.case.tokens),
        "point": None if broken is None else broken.point.name,
        "op": None if broken is None else broken.op,
        "layer": None if broken is None else broken.point.layer,
        "tail": None if found.tail is None else _tail_facts(found),
        "kernels": [dict(identity) for identity in found.identities],
        "damage": None
        if damage is None
        else {
            "bad": damage.bad,
            "total": damage.total,
            "tokens": damage.tokens,
            "heads": damage.heads,
            "elements": damage.features,
            "values": damage.values,
            "part": "" if forward is None else forward.part,
            "worst": damage.worst,
        },
        "new_errors": [] if forward is None else [_error_json(error) for error in forward.errors],
        "hybrids": None
        if forward is None
        else {
            "stages": list(forward.hybrids.names),
            "agreed": forward.hybrids.agreed,
            "reference_first": _search_json(forward.hybrids.reference_first),
            "engine_first": _search_json(forward.hybrids.engine_first),
        },
        "bundle": None if bundle is None else str(bundle),
        "verdict": verdict.to_json(),
    }


def _error_json(error: StageError) -> dict[str, Any]:
    return {
        "point": error.point.name,
        "op": error.op,
        "accumulated": json_number(error.accumulated),
        "new": json_number(error.new),
        "new_of_limit": json_number(error.check.of_limit),
        "state": error.check.state.value,
    }


def _search_json(found: Search) -> dict[str, Any]:
    return {
        "stage": found.stage,
        "monotone": found.monotone,
        "turns": list(found.turns),
        "wrong": {str(cut): wrong for cut, wrong in found.wrong.items()},
    }


def _tail_facts(found: Finding) -> dict[str, Any]:
    assert found.tail is not None
    tail = found.tail.tail
    return {
        "place": found.tail.place,
        "link": found.tail.broken.link,
        "poison": tail.poison,
        "staged_token": tail.staged_token,
        "staged_stamp": tail.staged_stamp,
        "expected_stamp": tail.expected_stamp,
        "device_token": tail.device_token,
        "device_stamp": tail.device_stamp,
    }


def bundle_of(
    found: Finding,
    verdict: Verdict,
    arguments: argparse.Namespace,
    model: Model,
    options: Options,
    context_length: int,
) -> Bundle:
    """All that a replay needs."""
    case = found.case
    whole = found.kind != "point"
    broken = None if found.forward is None else found.forward.broken
    meta: dict[str, Any] = {
        "kind": found.kind,
        "summary": verdict.summary(),
        "paragraph": found.paragraph,
        "mode": case.mode,
        "path": case.path,
        "kv_type_k": case.kv_type_k,
        "kv_type_v": case.kv_type_v,
        "modes": list(options.modes),
        "n_decode": options.n_decode,
        "max_cols": arguments.max_cols,
        "chunk": arguments.chunk or default_chunk(arguments.path, arguments.max_cols),
        "context_length": context_length,
        "sequences": verdict.run["sequences"],
        "shuffle": arguments.shuffle,
        "sanitize": arguments.sanitize,
        "model": str(arguments.model),
        "model_sha256": model.file.sha256,
        "point": None if broken is None else broken.point.name,
        "op": None if broken is None else broken.op,
        "kernels": [dict(identity) for identity in found.identities],
        "runtime": verdict.run.get("runtime"),
        "planted_fault": verdict.run.get("planted_fault"),
        "options": _plain(vars(arguments)),
        "command": list(sys.argv),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("ASSAY_")},
        "versions": versions(),
    }
    if found.tail is not None:
        meta["tail"] = _tail_facts(found)
    tokens = tuple(verdict.run["tokens"]) if whole else case.tokens
    return Bundle(tokens, meta, {**found.arrays(), **model_arrays(model)})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Command line options as JSON can hold them."""
    return {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in options.items()
        if not callable(value)
    }


def render_replay(bundle: Bundle, result: Replayed, label: str, columns: int) -> str:
    """What was recorded, what happens here, whose code; the answer as the last line."""

    def entry(head: str, text: str) -> str:
        return tables.paragraph(f"{head:<9} {text}", columns)

    meta = bundle.meta
    lines = [
        entry("bundle", f"{meta['summary']}"),
        entry("model", f"{meta['model']} ({meta['model_sha256'][:12]}...)"),
    ]
    planted = meta["planted_fault"]
    if planted:
        lines.append(entry("planted", f"{planted}, when the bundle was made"))
    if result.recorded is not None:
        lines.append(entry("recorded", _judged(result.recorded)))
    lines.append(entry("here", f"runtime {label}: {_judged(result.here)}"))
    lines += [entry("note", note) for note in result.notes]
    lines.append(entry("kernels", code_text(result)))
    lines.append(_answer(result))
    return "\n".join(lines)


def _answer(result: Replayed) -> str:
    if result.proves_nothing:
        return f"invalid: {result.proves_nothing}"
    return "reproduces" if result.reproduces else "does not reproduce here"


def replay_section(bundle: Bundle, result: Replayed, label: str) -> str:
    """A replay as a CI's job summary shows it."""
    cell, answer = summary.cell, _answer(result)
    model = bundle.meta["model"]
    return "\n".join(
        [
            f"### {cell(f'assay bisect --replay {model}')}: {cell(answer)}",
            "",
            f"bundle: {cell(bundle.meta['summary'])}",
            "",
            f"here, runtime {cell(label)}: {cell(_judged(result.here))}",
            "",
            *(f"- {cell(note)}" for note in result.notes),
        ]
    )


def _judged(check: Any) -> str:
    if check.state is State.OK:
        share = tables.share(check.of_limit)
        return f"{check.name} is within today's limits" + (f" ({share} of them)" if share else "")
    place = f" {check.where}" if check.where else ""
    return f"{check.state.value}: {check.link}{place}" + (
        f"; {check.detail}" if check.detail and check.detail not in check.link else ""
    )


def code_text(result: Replayed) -> str:
    """Whether the kernels here are the ones that were recorded."""
    if not result.same_code:
        return "none were recorded"
    other = [row for row, same in result.same_code.items() if same is False]
    absent = [row for row, same in result.same_code.items() if same is None]
    if not other and not absent:
        return f"the same code objects ({', '.join(result.same_code)})"
    texts = [f"another code object: {', '.join(other)}"] if other else []
    texts += [f"not loaded here: {', '.join(absent)}"] if absent else []
    return "; ".join(texts)


def replay_to_json(bundle: Bundle, result: Replayed, label: str) -> dict[str, Any]:
    return {
        "schema": f"{SCHEMA}.replay",
        "schema_version": SCHEMA_VERSION,
        "reproduces": result.reproduces,
        "exit_code": result.exit_code,
        "recorded_summary": bundle.meta["summary"],
        "recorded": None if result.recorded is None else result.recorded.to_json(),
        "here": result.here.to_json(),
        "runtime": label,
        "same_code": dict(result.same_code),
        "notes": list(result.notes),
    }
