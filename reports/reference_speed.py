"""The NumPy reference beside Hugging Face transformers on one machine: records and their table.

Rows are stored by pytest-benchmark in the file of the prefill benchmarks, under a list of their
own, because they measure no device.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from reports.records import ReportError
from reports.tables import Table

KIND = "reference-speed"
TASKS = ("prefill", "decode")


@dataclass(frozen=True)
class ReferenceSpeed:
    """One task on one model, timed in turn by both programs in one process.

    `tokens` are fed at a time: a whole prompt, or one token after another, `after` a prompt.
    `seconds` and `peer_seconds`: one sample a round. `max_abs_diff`: of the two programs' logits.
    """

    model: str
    task: str
    tokens: int
    after: int
    threads: int
    seconds: tuple[float, ...]
    peer_seconds: tuple[float, ...]
    max_abs_diff: float
    limit: float
    programs: str
    verdict: str

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer, by medians."""
        return statistics.median(self.peer_seconds) / statistics.median(self.seconds)

    def stored(self) -> dict[str, Any]:
        """What pytest-benchmark keeps as extra_info."""
        return {"kind": KIND, **asdict(self)}


def is_reference_speed(row: Mapping[str, Any]) -> bool:
    """True for a stored row of this kind."""
    return bool(row["extra_info"].get("kind") == KIND)


def read_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[ReferenceSpeed, ...]:
    """The records of stored rows. Raises ReportError for one that is not whole or not proved."""
    return tuple(_read(row) for row in rows)


def _read(row: Mapping[str, Any]) -> ReferenceSpeed:
    info = row["extra_info"]
    missing = [field.name for field in fields(ReferenceSpeed) if field.name not in info]
    if missing:
        raise ReportError(f"records: reference speed lacks {missing[0]}")
    values = {field.name: info[field.name] for field in fields(ReferenceSpeed)}
    record = ReferenceSpeed(
        **values | {name: tuple(values[name]) for name in ("seconds", "peer_seconds")}
    )
    sets = (record.seconds, record.peer_seconds)
    if not all(samples and all(sample > 0 for sample in samples) for samples in sets):
        raise ReportError(f"records: reference speed of {record.model} has no samples above 0")
    if record.task not in TASKS or record.verdict != "ok":
        raise ReportError(
            f"records: reference speed of {record.model} has task {record.task} and verdict "
            f"{record.verdict}, expected one of {', '.join(TASKS)} and ok"
        )
    if not record.max_abs_diff <= record.limit:
        raise ReportError(
            f"records: reference speed of {record.model} has max_abs_diff {record.max_abs_diff}, "
            f"expected at most {record.limit}: two different results have no common speed"
        )
    return record


def table(records: Sequence[ReferenceSpeed]) -> Table:
    """Tokens per second of both programs and the ratio of their medians."""
    rows = tuple(
        (
            record.model,
            f"{record.task} of {record.tokens}" + (f" after {record.after}" * bool(record.after)),
            str(record.threads),
            _rate(record.tokens, record.seconds),
            _rate(record.tokens, record.peer_seconds),
            f"{record.ratio:.2f}",
        )
        for record in records
    )
    rounds = sorted({len(record.seconds) for record in records})
    notes = (
        f"Tokens per second, median (slowest to fastest) of {' to '.join(map(str, rounds))} rounds "
        "taken in turn in one process; float32, logits of the last token only.",
        *dict.fromkeys(record.programs for record in records),
    )
    headers = ("model", "task", "threads", "reference", "transformers", "ratio")
    return Table("Reference against Hugging Face transformers", headers, rows, notes)


def _rate(tokens: int, seconds: Sequence[float]) -> str:
    middle, slowest, fastest = statistics.median(seconds), max(seconds), min(seconds)
    return f"{tokens / middle:,.1f} ({tokens / slowest:,.1f} to {tokens / fastest:,.1f})"
