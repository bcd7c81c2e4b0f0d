"""Tables from records: prefill mode and path by prompt length, and MAX_COLS by prompt length.

Pure functions from records to text. A cell is `median (slowest to fastest)` in tokens per second.
Rows and columns appear in the order of the records' values, not of their speed.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from reports.records import MODES, Measurement, ReportError, require_one_runtime

EMULATED = "emulated"
EMULATED_NOTE = (
    "These figures are from the CPU runtime, which emulates the device on host threads: they show "
    "that the paths run and are right, and say nothing about a GPU's speed."
)
ABSENT = "-"


@dataclass(frozen=True)
class Table:
    """One table with its title and the lines that belong under it."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def terminal(self) -> str:
        body = tabulate(self.rows, self.headers, tablefmt="simple", **_LAYOUT)
        return "\n".join((self.title, body, *self.notes))

    def markdown(self) -> str:
        body = tabulate(self.rows, self.headers, tablefmt="github", **_LAYOUT)
        return "\n\n".join((f"## {self.title}", body, *self.notes))


# Cells are finished text: tabulate must neither parse nor reformat them.
_LAYOUT: dict[str, object] = {"disable_numparse": True, "stralign": "right"}


def tables_of(records: Sequence[Measurement]) -> tuple[Table, ...]:
    """Every table that the records allow, by subject. Raises ReportError for an empty or mixed set.

    A mixed set holds figures of several runtimes, devices, compilers or commits.
    """
    require_one_runtime(records, "the set of records")
    tables = []
    for subject in dict.fromkeys(record.subject for record in records):
        same = [record for record in records if record.subject == subject]
        for sweep, build in _BUILDERS.items():
            part = [record for record in same if record.sweep == sweep]
            if part:
                tables.append(build(part))
    return tuple(tables)


def document(records: Sequence[Measurement], *, markdown: bool) -> str:
    """All tables as one text, ended by a newline."""
    tables = tables_of(records)
    parts = [table.markdown() if markdown else table.terminal() for table in tables]
    heading = ["# Prefill benchmark"] if markdown else []
    return "\n\n".join([*heading, *parts, *_closing(records)]) + "\n"


def mode_table(records: Sequence[Measurement]) -> Table:
    """Median tok/s by prefill mode and path, and its ratio to per-token prefill of that prompt."""
    label = _label(records)
    prompts = sorted({record.prompt_tokens for record in records})
    cells = _unique(
        records, lambda r: (r.prefill, r.path, r.max_cols, r.prompt_tokens), "mode, path and prompt"
    )
    base: dict[int, Measurement] = {}
    for record in records:
        if record.prefill == "per-token":
            base.setdefault(record.prompt_tokens, record)
    rows = []
    for kind in sorted({(r.prefill, r.path, r.max_cols) for r in records}, key=_mode_order):
        row = [kind[0], kind[1], ABSENT if kind[0] == "per-token" else str(kind[2])]
        for prompt in prompts:
            cell = cells.get((*kind, prompt))
            row += [_rate(cell), _ratio(cell, base.get(prompt))]
        rows.append(tuple(row))
    headers = ["prefill", "path", "MAX_COLS"]
    for prompt in prompts:
        headers += [f"{prompt} tokens: tok/s [{label}]", "x per-token"]
    return Table(
        f"Prefill mode and path: {_subject(records[0])}", tuple(headers), tuple(rows), _notes(cells)
    )


def max_cols_table(records: Sequence[Measurement]) -> Table:
    """Chunks and median tok/s of batched prefill by MAX_COLS."""
    label = _label(records)
    kinds = sorted({(r.path, r.prompt_tokens) for r in records})
    cells = _unique(
        records, lambda r: (r.max_cols, r.path, r.prompt_tokens), "MAX_COLS, path and prompt"
    )
    rows = []
    for max_cols in sorted({record.max_cols for record in records}):
        row = [str(max_cols)]
        for kind in kinds:
            cell = cells.get((max_cols, *kind))
            row += [ABSENT if cell is None else str(cell.chunks), _rate(cell)]
        rows.append(tuple(row))
    headers = ["MAX_COLS"]
    for path, prompt in kinds:
        named = f", {path}" if len({path for path, _ in kinds}) > 1 else ""
        headers += [f"{prompt} tokens{named}: chunks", f"tok/s [{label}]"]
    paths = " and ".join(dict.fromkeys(path for path, _ in kinds))
    title = f"MAX_COLS of batched prefill, {paths}: {_subject(records[0])}"
    return Table(title, tuple(headers), tuple(rows), _notes(cells))


_BUILDERS: dict[str, Callable[[Sequence[Measurement]], Table]] = {
    "mode": mode_table,
    "max-cols": max_cols_table,
}


def _mode_order(kind: tuple[str, str, int]) -> tuple[int, int, int]:
    prefill, path, max_cols = kind
    return (MODES.index(prefill), int(path == "kparallel"), max_cols)


def _label(records: Sequence[Measurement]) -> str:
    """The runtime of a column; ReportError where figures of two would share it."""
    labels = sorted({record.runtime for record in records})
    if len(labels) != 1:
        raise ReportError(
            f"tables: records are from {' and '.join(labels) or 'no runtime'}, expected one "
            "runtime, because figures of two can't stand in one column"
        )
    return labels[0]


def _unique(
    records: Iterable[Measurement], key: Callable[[Measurement], Hashable], what: str
) -> dict[Hashable, Measurement]:
    cells: dict[Hashable, Measurement] = {}
    for record in records:
        if key(record) in cells:
            raise ReportError(f"tables: two records have the same {what} {key(record)}")
        cells[key(record)] = record
    return cells


def _rate(record: Measurement | None) -> str:
    if record is None:
        return ABSENT
    slowest, fastest = record.rate_range
    return f"{record.rate:,.1f} ({slowest:,.1f} to {fastest:,.1f})"


def _ratio(record: Measurement | None, base: Measurement | None) -> str:
    return ABSENT if record is None or base is None else f"{record.rate / base.rate:.2f}"


def _subject(record: Measurement) -> str:
    return (
        f"{record.model}, {record.runtime} ({record.device}), "
        f"KV {record.kv_type_k}/{record.kv_type_v}"
    )


def _notes(cells: dict[Hashable, Measurement]) -> tuple[str, ...]:
    records = list(cells.values())
    rounds = sorted({len(record.seconds) for record in records})
    counted = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    batched = [record for record in records if record.prefill == "batched"]
    verified = []
    for path in dict.fromkeys(record.path for record in batched):
        same = [record for record in batched if record.path == path]
        worst = max(same, key=lambda record: record.max_abs_diff)
        verified.append(f"{path} {worst.max_abs_diff:.6f} (limit {worst.limit:.6f})")
    lines = [
        f"Median (slowest to fastest) of {counted} rounds, timed by {records[0].clock}; every row "
        "was verified before and after its timing."
    ]
    shares = [
        statistics.median(record.host_seconds) / statistics.median(record.seconds)
        for record in records
    ]
    lines.append(f"The host's clock shows {min(shares):.2f} to {max(shares):.2f} times that time.")
    if verified:
        lines.append(
            f"Largest difference of last-token logits to per-token prefill: {', '.join(verified)}."
        )
    return tuple(lines)


def _closing(records: Sequence[Measurement]) -> list[str]:
    first = records[0]
    lines = [f"Commit {first.commit}; compiler {first.compiler}."]
    if any(record.runtime == EMULATED for record in records):
        lines.append(EMULATED_NOTE)
    return lines
