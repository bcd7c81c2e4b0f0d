"""Timing records: what one row of pytest-benchmark's stored JSON says, checked field by field.

A file becomes a tuple of Measurement or one ReportError; nothing is skipped in silence. A row
without the verdict `ok` is refused: a time means something only for a path that gave right numbers.
"""

import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
SWEEPS = ("mode", "max-cols")
MODES = ("per-token", "batched")


class ReportError(Exception):
    """A record file, or a set of records, that no table can be made of. One line of text."""


@dataclass(frozen=True)
class Measurement:
    """One verified and timed prefill case.

    `seconds`: one sample a round, of the whole prompt, by `clock`; `host_seconds`: the same rounds
    by the host's clock. `runtime`: what produced the figure (`emulated`, `gfx1201`); `host`: the
    machine's processor and how many threads of it the runtime may use.
    `max_abs_diff` and `limit`: the logits' comparison that preceded the timing.
    """

    sweep: str
    model: str
    runtime: str
    device: str
    host: str
    prefill: str
    path: str
    prompt_tokens: int
    max_cols: int
    chunks: int
    kv_type_k: str
    kv_type_v: str
    clock: str
    host_seconds: tuple[float, ...]
    verdict: str
    max_abs_diff: float
    limit: float
    commit: str
    compiler: str
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return self.prompt_tokens / statistics.median(self.seconds)

    @property
    def rate_range(self) -> tuple[float, float]:
        """Tokens per second of the slowest and the fastest round."""
        return self.prompt_tokens / max(self.seconds), self.prompt_tokens / min(self.seconds)

    @property
    def subject(self) -> tuple[str, ...]:
        """What must be equal for two figures to stand in one column."""
        return (self.model, self.runtime, self.device, self.kv_type_k, self.kv_type_v, self.clock)


def load_records(path: str | Path) -> tuple[Measurement, ...]:
    """Reads the records of one stored file. Raises ReportError for anything that is not right."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"records: {path} can't be read: {error}") from None
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ReportError(f"records: {path} is not JSON, perhaps cut off: {error}") from None
    rows = content.get("benchmarks") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise ReportError(f"records: {path} has no list `benchmarks`, expected stored benchmarks")
    records = tuple(_measurement(row, f"{path}, row {place}") for place, row in enumerate(rows))
    require_one_runtime(records, str(path))
    return records


def require_one_runtime(records: Sequence[Measurement], source: str) -> None:
    """Refuses an empty set and one whose figures come from several runtimes or builds."""
    if not records:
        raise ReportError(f"records: {source} holds no measurement, expected at least one")
    for name in ("runtime", "device", "host", "compiler", "commit"):
        found = sorted({str(getattr(record, name)) for record in records})
        if len(found) > 1:
            raise ReportError(
                f"records: {source} mixes {name} {' and '.join(found)}, expected one, because "
                "their figures can't stand in one column"
            )


def _measurement(row: Any, where: str) -> Measurement:
    if not isinstance(row, dict):
        raise ReportError(f"records: {where} is {type(row).__name__}, expected an object")
    where = f"{where} ({row.get('name', 'no name')})"
    info, stats = row.get("extra_info"), row.get("stats")
    if not isinstance(info, dict) or not isinstance(stats, dict):
        raise ReportError(f"records: {where} lacks extra_info or stats")
    if info.get("schema_version") != SCHEMA_VERSION:
        raise ReportError(
            f"records: {where} has schema_version {info.get('schema_version')}, expected "
            f"{SCHEMA_VERSION}"
        )
    iterations = stats.get("iterations")
    if iterations != 1:
        raise ReportError(f"records: {where} has {iterations} iterations a round, expected 1")
    values = {
        field.name: _field(info, field.name, field.type, where)
        for field in fields(Measurement)
        if field.name != "seconds"
    }
    record = Measurement(**values, seconds=_samples(stats, "data", where))
    _require_meaning(record, where)
    return record


def _field(info: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    if name not in info:
        raise ReportError(f"records: {where} lacks extra_info.{name}")
    value = info[name]
    if kind is str and isinstance(value, str) and value:
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if kind is float and _is_number(value) and value >= 0:
        return float(value)
    if kind not in (str, int, float):
        return _samples(info, name, where)
    raise ReportError(f"records: {where} has {name} {value!r}, expected {_EXPECTED[kind]}")


_EXPECTED: Mapping[Any, str] = {
    str: "some text",
    int: "a whole number above 0",
    float: "a finite number, 0 or above",
}


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _samples(holder: Mapping[str, Any], name: str, where: str) -> tuple[float, ...]:
    values = holder.get(name)
    if (
        not isinstance(values, list)
        or not values
        or not all(_is_number(value) and value > 0 for value in values)
    ):
        raise ReportError(
            f"records: {where} has {name} {values!r:.60}, expected a list of seconds above 0"
        )
    return tuple(float(value) for value in values)


def _require_meaning(record: Measurement, where: str) -> None:
    if record.sweep not in SWEEPS or record.prefill not in MODES:
        raise ReportError(
            f"records: {where} is of sweep {record.sweep} and prefill {record.prefill}, expected "
            f"one of {', '.join(SWEEPS)} and one of {', '.join(MODES)}"
        )
    if record.verdict != "ok":
        raise ReportError(f"records: {where} has the verdict {record.verdict}, expected ok")
    if not record.max_abs_diff <= record.limit:
        raise ReportError(
            f"records: {where} has max_abs_diff {record.max_abs_diff} above its limit "
            f"{record.limit}, expected a verified path"
        )
    if len(record.host_seconds) != len(record.seconds):
        raise ReportError(
            f"records: {where} has {len(record.host_seconds)} host samples, expected "
            f"{len(record.seconds)} because each round is timed by both clocks"
        )


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises ReportError where it can't be written."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ReportError(f"records: {path} can't be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, a report is meant to be read
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ReportError(f"records: {path} can't be written: {error.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
