"""Every table of a stored file: pytest-benchmark's JSON, or the record of `assay bench`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import kernel_use, operations, reference_speed, speed
from reports.records import ReportError, load_records
from reports.tables import Table, document


def stored_document(path: Path, *, markdown: bool) -> str:
    """All tables as one text. Raises ReportError where the file is not one or has no row."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"records: {path} can't be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ReportError(f"records: {path} is not JSON, perhaps cut off: {error}") from None
    if isinstance(stored, dict) and "rows" in stored and "benchmarks" not in stored:
        return _texts(list(tables_of(stored["rows"])), markdown=markdown)
    rest = stored if isinstance(stored, dict) else {}
    tables = list(
        speed.tables(speed.read_rows([row["extra_info"] for row in rest.get("speed", [])]))
    )
    if rest.get("reference_speed"):
        tables.append(reference_speed.table(reference_speed.read_rows(rest["reference_speed"])))
    # Where there is no other row, one of prefill must be there, or there is nothing to say.
    parts = (
        [document(load_records(path), markdown=markdown)]
        if rest.get("benchmarks") or not tables
        else []
    )
    if tables:
        parts.append(_texts(tables, markdown=markdown))
    return "\n".join(parts)


def tables_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """Tables of the stored records of `assay bench`, of each kind in turn."""
    of_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_kind.setdefault(str(row.get("kind", speed.KIND)), []).append(row)
    other = sorted(set(of_kind) - set(_KINDS))
    if other:
        raise ReportError(f"records: kind is {other[0]}, expected one of {', '.join(_KINDS)}")
    return tuple(
        table for kind, make in _KINDS.items() if kind in of_kind for table in make(of_kind[kind])
    )


_KINDS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], tuple[Table, ...]]] = {
    speed.KIND: lambda rows: speed.tables(speed.read_rows(rows)),
    kernel_use.KIND: lambda rows: kernel_use.tables(kernel_use.read_rows(rows)),
    operations.KIND: lambda rows: operations.tables(operations.read_rows(rows)),
}


def _texts(tables: list[Table], *, markdown: bool) -> str:
    if not tables:
        raise ReportError("records: the file holds no row, expected at least one")
    return "\n\n".join(t.markdown() if markdown else t.terminal() for t in tables) + "\n"
