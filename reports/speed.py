"""Speeds beside their limits: records of decode and prefill rows, and the tables made of them.

A limit is what the device's measured read rate or matrix rate allows for the bytes or FLOPs that
the model's shapes demand. Rows of one table were timed in turn.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from reports.records import ReportError
from reports.tables import ABSENT, Table

KIND = "speed"
PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class Speed:
    """One row. `seconds`: device time of each round, in which `tokens` tokens were made or fed.

    decode: `batch` sequences, each with `context` tokens in its cache. prefill: `context` is the
    prompt, `mode` per-token or batched. `limit_seconds`: the least time for these tokens, None
    where it was not measured; `limit_of` says of what. `base_seconds`: the row that this one is set
    against, `base_name`, in the same rounds, in which it made or fed `base_tokens`; None where it
    was not run. `base_limit_seconds`: that row's limit. `after`: tokens decoded after a prompt.
    `peer`: tok/s of llama.cpp on such a card. `max_abs_diff`: logits against per-token prefill.
    `note`: printed in the row. `layers`: how many, "12 of 40" where the model is cut.
    `matrix_products`: of 16 x 16 x 16 fragments in a decode step, None where none ran.
    """

    section: str
    phase: str
    model: str
    runtime: str
    device: str
    host: str
    mode: str
    path: str
    kv_type_k: str
    kv_type_v: str
    max_cols: int
    batch: int
    context: int
    chunks: int
    after: int
    tokens: int
    seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]
    limit_seconds: float | None
    limit_of: str
    base_name: str
    base_tokens: int
    base_seconds: tuple[float, ...] | None
    base_limit_seconds: float | None
    peer: float | None
    max_abs_diff: float | None
    verdict: str
    commit: str
    compiler: str
    note: str = ""
    layers: str = ""
    matrix_products: int | None = None

    @property
    def rate(self) -> float:
        """Median tokens per second, all sequences together."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def share_of_limit(self) -> float | None:
        """1: as fast as bytes or FLOPs allow."""
        if self.limit_seconds is None:
            return None
        return self.limit_seconds / statistics.median(self.seconds)

    @property
    def over_base(self) -> float | None:
        """How many times as fast as the base row."""
        if self.base_seconds is None:
            return None
        return self.rate * statistics.median(self.base_seconds) / self.base_tokens

    @property
    def base_ceiling(self) -> float | None:
        """What `over_base` would be if both rows reached their limits."""
        if self.limit_seconds is None or self.base_limit_seconds is None:
            return None
        return self.tokens / self.limit_seconds * self.base_limit_seconds / self.base_tokens

    def stored(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"kind": KIND, **asdict(self)}


def is_speed(row: Mapping[str, Any]) -> bool:
    """True for a row of pytest-benchmark's that holds one of these records."""
    return bool(row["extra_info"].get("kind") == KIND)


def read_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Speed, ...]:
    """The records of stored rows. Raises ReportError for one that is not whole or not proved."""
    return tuple(_read(row) for row in rows)


def _read(stored: Mapping[str, Any]) -> Speed:
    needed = [field.name for field in fields(Speed) if field.default is MISSING]
    missing = [name for name in needed if name not in stored]
    if missing:
        raise ReportError(f"records: a speed lacks {missing[0]}")
    values = {field.name: stored[field.name] for field in fields(Speed) if field.name in stored}
    for name in ("seconds", "host_seconds", "base_seconds"):
        values[name] = None if values[name] is None else tuple(values[name])
    record = Speed(**values)
    sets = (record.seconds, record.host_seconds, record.base_seconds or (1.0,))
    if not all(samples and all(sample > 0 for sample in samples) for samples in sets):
        raise ReportError(f"records: a speed of {record.model} has no samples above 0")
    if record.verdict != "ok" or record.phase not in PHASES:
        raise ReportError(
            f"records: a speed of {record.model} has phase {record.phase} and verdict "
            f"{record.verdict}, expected one of {', '.join(PHASES)} and ok"
        )
    return record


def tables(records: Sequence[Speed]) -> tuple[Table, ...]:
    """A table for each section, in the records' order; ReportError where runtimes are mixed."""
    found = []
    for section in dict.fromkeys(record.section for record in records):
        rows = [record for record in records if record.section == section]
        kinds = {
            (record.runtime, record.device, record.phase, record.model, record.base_name)
            for record in rows
        }
        if len(kinds) > 1:
            raise ReportError(f"tables: {section} mixes {sorted(kinds)}, expected one")
        found.append(_table(section, rows))
    return tuple(found)


def _table(section: str, rows: Sequence[Speed]) -> Table:
    first = rows[0]
    decode = first.phase == "decode"
    own: tuple[str, ...] = (
        ("batch", "context") if decode else ("mode", "prompt", "MAX_COLS", "chunks")
    )
    headers = (
        *("layers", "path", "KV", *own),
        *(f"tok/s [{first.runtime}]", f"x {first.base_name}", "limits allow"),
        *("limit tok/s", "share of limit", "peer", "x peer"),
        *(MATRIX_PRODUCTS if decode else "wall ms", "note"),
    )
    rounds = sorted({len(row.seconds) for row in rows})
    waits = [statistics.median(row.host_seconds) / statistics.median(row.seconds) for row in rows]
    notes = (
        f"Median (slowest to fastest) of {' to '.join(map(str, rounds))} rounds in turn, device "
        f"events around each; from call to result the host waited up to {max(waits):.2f} times as "
        "long.",
        *dict.fromkeys(f"Limit: {row.limit_of}." for row in rows if row.limit_seconds is not None),
        *(thresholds(rows) if decode else ("wall ms: median, from the call to the result.",)),
    )
    return Table(
        f"{section}: {first.model}, {first.runtime} ({first.device})",
        headers,
        tuple(_row(row, decode) for row in rows),
        notes,
    )


MATRIX_PRODUCTS = "matrix products"
_MATRIX_NOTE = (
    f"{MATRIX_PRODUCTS}: of 16 x 16 x 16 fragments in a step, computed from shapes and block sizes "
    "for the launches that were counted, not read from a counter."
)


def thresholds(rows: Sequence[Speed]) -> tuple[str, ...]:
    """From which batch on path matrix is faster than kparallel, for each context and KV type."""
    rates = {(row.path, row.kv_type_k, row.context, row.batch): row.rate for row in rows}
    ahead: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for (path, kind, context, batch), rate in sorted(rates.items()):
        beside = rates.get(("kparallel", kind, context, batch))
        if path == "matrix" and batch > 1 and beside is not None:
            ahead.setdefault((kind, context), []).append((batch, rate > beside))
    lines = [_MATRIX_NOTE] if any(row.matrix_products is not None for row in rows) else []
    for (kind, context), found in ahead.items():
        behind = [batch for batch, faster in found if not faster]
        first = [batch for batch, _ in found if batch > max(behind, default=0)]
        measured = ", ".join(str(batch) for batch, _ in found)
        where = f"from {first[0]} sequences on" if first else "at no number of sequences measured"
        lines.append(
            f"Context {context:,}, KV {kind}: matrix is faster than kparallel {where} (measured: "
            f"{measured})."
        )
    return tuple(lines)


def _row(row: Speed, decode: bool) -> tuple[str, ...]:
    own: tuple[str, ...] = (str(row.batch), f"{row.context:,}")
    if not decode:
        per_token = row.mode == "per-token"
        columns = (ABSENT, ABSENT) if per_token else (str(row.max_cols), str(row.chunks))
        prompt = f"{row.context:,}" + (f" + {row.after}" if row.after else "")
        own = (row.mode, prompt, *columns)
    slowest, fastest = row.tokens / max(row.seconds), row.tokens / min(row.seconds)
    limit = None if row.limit_seconds is None else row.tokens / row.limit_seconds
    share = row.share_of_limit
    wall = f"{1000 * statistics.median(row.host_seconds):,.1f}" if row.host_seconds else ABSENT
    products = ABSENT if row.matrix_products is None else f"{row.matrix_products:,}"
    return (
        *(row.layers or ABSENT, row.path, f"{row.kv_type_k}/{row.kv_type_v}", *own),
        f"{row.rate:,.1f} ({slowest:,.1f} to {fastest:,.1f})",
        *(_ratio(row.over_base), _ratio(row.base_ceiling)),
        ABSENT if limit is None else f"{limit:,.0f}",
        ABSENT if share is None else f"{100 * share:.1f} %",
        ABSENT if row.peer is None else f"{row.peer:,.0f}",
        _ratio(None if row.peer is None else row.rate / row.peer),
        products if decode else wall,
        row.note,
    )


def _ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"
