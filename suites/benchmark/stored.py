"""The text of a set of speeds, and the commit that they are of."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from reports.stored import tables_of
from reports.tables import EMULATED, EMULATED_NOTE, Table
from suites.benchmark.limits import MeasuredLimits


class Stored(Protocol):
    """A record of reports: Speed, Operation or BatchedKernel."""

    def stored(self) -> dict[str, Any]: ...


def document(rows: Sequence[Stored], closing: Sequence[str], *, markdown: bool) -> str:
    """All tables, then what is said under them."""
    parts = ["# Speed"] if markdown else []
    parts += [table.markdown() if markdown else table.terminal() for table in tables(rows)]
    return "\n\n".join([*parts, *closing]) + "\n"


def tables(rows: Sequence[Stored]) -> tuple[Table, ...]:
    """The tables of records of any kind."""
    return tables_of([row.stored() for row in rows])


def closing_lines(
    limits: MeasuredLimits,
    left_out: Sequence[str],
    loads: Sequence[object],
    *,
    commit: str,
    compiler: str,
    host: str,
) -> list[str]:
    """What was measured beside the rows, how loading went (`loads`: a line each), of what the
    figures are, and what there was no time for."""
    lines = [limits.line(), *(f"{line}." for line in dict.fromkeys(map(str, loads)))]
    lines.append(f"Commit {commit}; compiler {compiler}; host {host}.")
    if left_out:
        lines.append(f"Not run, because the time was up: {', '.join(left_out)}.")
    if limits.runtime == EMULATED:
        lines.append(EMULATED_NOTE)
    return lines


def checkout_commit() -> str:
    """The checkout's commit, marked where files differ from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str | None:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return f"{head} with changes" if git("status", "--porcelain") else head
