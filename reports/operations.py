"""Single operations beside their limits: one of all layers in a graph, timed by device events."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from reports.records import ReportError
from reports.tables import ABSENT, Table

KIND = "operation"


@dataclass(frozen=True)
class Operation:
    """`count` runs of `op` in one graph; `seconds`: device time of each replay.

    `what`: the weights, or the cache's type. `columns`: activation columns of a product, sequences
    of the others. `context`: tokens in the cache, None where nothing reads it. `nbytes` and `flops`
    are of one replay: what it must read at least, and multiply. `limit_seconds`: the longer of both
    at the measured rates, `limit_of` says of which.
    """

    model: str
    runtime: str
    device: str
    op: str
    what: str
    path: str
    columns: int
    context: int | None
    count: int
    seconds: tuple[float, ...]
    nbytes: float
    flops: float
    limit_seconds: float
    limit_of: str
    note: str = ""

    @property
    def median(self) -> float:
        """Seconds of a replay."""
        return statistics.median(self.seconds)

    def stored(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"kind": KIND, **asdict(self)}


def read_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Operation, ...]:
    """The records of stored rows. Raises ReportError for one that is not whole."""
    names = [field.name for field in fields(Operation)]
    records = []
    for row in rows:
        missing = [name for name in names if name not in row]
        if missing:
            raise ReportError(f"records: an operation lacks {missing[0]}")
        values = {name: row[name] for name in names} | {"seconds": tuple(row["seconds"])}
        record = Operation(**values)
        if not record.seconds or not all(sample > 0 for sample in record.seconds):
            raise ReportError(f"records: an operation of {record.model} has no samples above 0")
        records.append(record)
    return tuple(records)


def tables(records: Sequence[Operation]) -> tuple[Table, ...]:
    """A table for each operation, in the records' order; ReportError where runtimes are mixed."""
    kinds = {(one.model, one.runtime, one.device) for one in records}
    if len(kinds) > 1:
        raise ReportError(f"tables: operations mix {sorted(kinds)}, expected one")
    ops = dict.fromkeys(one.op for one in records)
    return tuple(_table([one for one in records if one.op == op]) for op in ops)


def _table(records: Sequence[Operation]) -> Table:
    first = records[0]
    read = any(one.context is not None for one in records)
    headers = (
        *("what", "path", "columns", *(["context"] if read else []), "in a graph"),
        *(f"us [{first.runtime}]", "GB/s", "TFLOP/s", "limit us", "limited by"),
        *("share of limit", "note"),
    )
    rounds = sorted({len(one.seconds) for one in records})
    notes = (
        "A graph holds the operation of all layers, so that weights come from memory; median "
        f"(fastest to slowest) of {' to '.join(map(str, rounds))} replays in turn. GB/s and "
        "TFLOP/s are of the bytes and multiply-adds that are needed at least. Results are looked "
        "at for being finite; suites/correctness says whether they are right.",
    )
    return Table(
        f"{first.op}: {first.model}, {first.runtime} ({first.device})",
        headers,
        tuple(_row(one, read) for one in records),
        notes,
    )


def _row(one: Operation, read: bool) -> tuple[str, ...]:
    context = (ABSENT if one.context is None else f"{one.context:,}",) if read else ()
    span = f"{1e6 * min(one.seconds):,.1f} to {1e6 * max(one.seconds):,.1f}"
    return (
        *(one.what, one.path, str(one.columns), *context, str(one.count)),
        f"{1e6 * one.median:,.1f} ({span})",
        f"{one.nbytes / one.median / 1e9:,.1f}",
        f"{one.flops / one.median / 1e12:,.2f}",
        *(f"{1e6 * one.limit_seconds:,.1f}", one.limit_of),
        *(f"{100 * one.limit_seconds / one.median:.1f} %", one.note),
    )
