"""Every table of a stored file: pytest-benchmark's JSON, or the record of `assay bench`."""

import json
from pathlib import Path

from reports import reference_speed, speed
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
        return _texts(list(speed.tables(speed.read_rows(stored["rows"]))), markdown=markdown)
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


def _texts(tables: list[Table], *, markdown: bool) -> str:
    if not tables:
        raise ReportError("records: the file holds no row, expected at least one")
    return "\n\n".join(t.markdown() if markdown else t.terminal() for t in tables) + "\n"
