"""The text of a set of speeds, and the commit that they are of."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from reports.speed import Speed, tables
from reports.tables import EMULATED, EMULATED_NOTE
from suites.benchmark.limits import MeasuredLimits


def document(
    records: Sequence[Speed],
    limits: MeasuredLimits,
    left_out: Sequence[str],
    loads: Sequence[object],
    *,
    markdown: bool,
) -> str:
    """All tables with the limits under them, how loading went (`loads`: a line each), and what
    there was no time for.
    """
    parts = [table.markdown() if markdown else table.terminal() for table in tables(records)]
    if markdown:
        parts.insert(0, "# Speed")
    parts.append(limits.line())
    parts += [f"{line}." for line in dict.fromkeys(map(str, loads))]
    if records:
        first = records[0]
        parts.append(f"Commit {first.commit}; compiler {first.compiler}; host {first.host}.")
    if left_out:
        parts.append(f"Not run, because the time was up: {', '.join(left_out)}.")
    if limits.runtime == EMULATED:
        parts.append(EMULATED_NOTE)
    return "\n\n".join(parts) + "\n"


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
