"""Tables of checks, made to fit: columns where there is room, else a line of its own for the place.

Text is wrapped and never cut. Without a terminal a table is at most PLAIN columns wide.
"""

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from suites.harness.verdict import Check, State

PLAIN = 120
WIDE = 110
"""From here on measured figures and places have columns of their own."""
NARROWEST = 40


def width() -> int:
    """Columns to fill."""
    if sys.stdout is None or not sys.stdout.isatty():
        return PLAIN
    return max(NARROWEST, shutil.get_terminal_size((PLAIN, 24)).columns)


def figure(value: float | None) -> str:
    """A number for a table: three significant digits, nothing where there is none."""
    return "" if value is None else f"{value:.3g}"


def share(of_limit: float | None) -> str:
    """How much of its limit a check used: 29 %."""
    if of_limit is None:
        return ""
    if not math.isfinite(of_limit):
        return "above 0" if of_limit > 0 else str(of_limit)
    return f"{100 * of_limit:.3g} %"


def amount(check: Check) -> str:
    """What was compared and in which unit: 1 value, 2,712 launches."""
    unit = check.unit[:-1] if check.elements == 1 else check.unit
    return f"{check.elements:,} {unit}"


def place(check: Check) -> str:
    """Where the worst element is, unless both values are equal there; then what there is to say."""
    if check.measured == 0 and (check.state is State.OK or check.detail):
        return check.detail.partition(";")[0]
    return check.where or check.detail


def check_table(checks: Sequence[Check], columns: int, first: str = "check") -> str:
    """One row a check, at most `columns` wide; `first` heads the column of names."""
    return _wide(checks, columns, first) if columns >= WIDE else _narrow(checks, columns, first)


def _wide(checks: Sequence[Check], columns: int, first: str) -> str:
    fixed = [
        (
            check.state.value,
            amount(check),
            figure(check.measured),
            figure(check.limit),
            share(check.of_limit),
        )
        for check in checks
    ]
    heads = ("state", "compared", "measured", "limit", "of limit")
    used = sum(_column(head, [row[i] for row in fixed]) for i, head in enumerate(heads))
    # Two spaces between columns; the names get what they need up to about a half of the rest.
    room = columns - used - 2 * (len(heads) + 1)
    names = min(max(len(check.name) for check in checks), max(24, room // 2))
    return _table(
        [(check.name, *row, place(check)) for check, row in zip(checks, fixed, strict=True)],
        [first, *heads, "where"],
        [names, *[None] * len(heads), max(16, room - names)],
    )


def _narrow(checks: Sequence[Check], columns: int, first: str) -> str:
    """Name, state, amount and share; figures and place of a check on lines below it, indented."""
    cells = [(first, "state", "compared", "of limit")]
    cells += [(c.name, c.state.value, amount(c), share(c.of_limit)) for c in checks]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    widths[0] = min(widths[0], max(16, columns - sum(widths[1:]) - 2 * 3))
    lines: list[str] = []
    for row, check in zip(cells, (None, *checks), strict=True):
        head, *rest = _lines(row[0], widths[0])
        texts = zip((head, *row[1:]), widths, strict=True)
        lines += ["  ".join(f"{text:<{size}}" for text, size in texts).rstrip(), *rest]
        if check is None:
            lines.append("  ".join("-" * size for size in widths))
            continue
        below = []
        if check.measured is not None and (check.measured != 0 or check.state is not State.OK):
            below.append(f"{figure(check.measured)} of {figure(check.limit)}".removesuffix(" of "))
        below += [place(check)] if place(check) else []
        lines += [f"    {line}" for text in below for line in _lines(text, columns - 4)]
    return "\n".join(lines)


def _lines(text: str, room: int) -> list[str]:
    return textwrap.wrap(text, room) or [""]


def _column(head: str, cells: Sequence[str]) -> int:
    """Width that tabulate gives a column: it pads heads by two."""
    return max(len(head) + 2, *(len(cell) for cell in cells))


def _table(
    rows: Sequence[Sequence[str]], heads: Sequence[str], widths: Sequence[int | None]
) -> str:
    wrapped = [
        ["\n".join(_lines(cell, w)) if w else cell for cell, w in zip(row, widths, strict=True)]
        for row in rows
    ]
    return table(wrapped, heads)


def wrapped(rows: Sequence[Sequence[str]], heads: Sequence[str], columns: int) -> str:
    """A table at most `columns` wide, as far as its last column can be wrapped."""
    used = [_column(head, [row[i] for row in rows]) for i, head in enumerate(heads[:-1])]
    room = max(NARROWEST, columns - sum(used) - 2 * len(used))
    return _table(rows, heads, [*[None] * len(used), room])


def table(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    text = tabulate(rows, headers=heads, tablefmt="simple", disable_numparse=True)
    return "\n".join(line.rstrip() for line in str(text).splitlines())


def paragraph(text: str, columns: int, indent: int = 10) -> str:
    """Wrapped text whose later lines are indented."""
    lines = _lines(text, max(NARROWEST, columns) - indent)
    return ("\n" + " " * indent).join(lines)
