"""What each row of the table of tolerances decides: which ops it limits, and which faults it sees.

A judged point knows the rows that its limit was made of (`PointCheck.rows`). Over clean runs that
gives a row's ops and its head-room, over planted faults the ones that a check based on it saw, and
by how much: the distance between the largest share of the limit that a clean run uses and the
smallest that a fault was seen with is what the row has to spare.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from suites.harness.local import PointCheck
from suites.harness.promises import PROMISES
from suites.harness.tolerances import TABLE, RowKey

_LOCAL = re.compile(r"local(?:, [^:]+)?: (\w+)")
_LINK = re.compile(r"\((\w+)\)")


class Judged(Protocol):
    """An Outcome of fault_run.py: `link` and `of_limit` are of the check that was named first."""

    @property
    def fault(self) -> str: ...
    @property
    def red(self) -> Sequence[str]: ...
    @property
    def link(self) -> str: ...
    @property
    def of_limit(self) -> float | str | None: ...


@dataclass
class Used:
    """What clean runs made of the table; `add` takes the points of one of them.

    `rows`: op to the rows that it consulted. `shares`: op to its worst point and the share of the
    limit that this used, 1 being all of it.
    """

    rows: dict[str, frozenset[RowKey]] = field(default_factory=dict)
    shares: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, points: Iterable[PointCheck]) -> None:
        for point in points:
            self.rows[point.op] = self.rows.get(point.op, frozenset()) | point.rows
            used = point.check.of_limit
            if used is not None and not used <= self.shares.get(point.op, ("", -1.0))[1]:
                self.shares[point.op] = (point.point.name, used)

    def ops_of(self, row: RowKey) -> tuple[str, ...]:
        return tuple(op for op, rows in self.rows.items() if row in rows)

    def worst_of(self, row: RowKey) -> tuple[str, str, float] | None:
        """Op, point and share of the op that uses most of a limit with this row in it."""
        found = [(op, *self.shares[op]) for op in self.ops_of(row) if op in self.shares]
        return max(found, key=lambda entry: entry[2], default=None)


@dataclass(frozen=True)
class RowPower:
    """One row: its ops, the most that a clean run uses, and the faults that it saw.

    `weakest` is the fault seen with the smallest share of the limit, above 1, where it was named
    first and its share is known.
    """

    row: RowKey
    ops: tuple[str, ...]
    clean: float | None
    faults: tuple[str, ...]
    weakest: tuple[str, float] | None

    @property
    def blind(self) -> bool:
        """True where no planted fault was seen by a check that this row limits."""
        return not self.faults


def power_of_rows(used: Used, outcomes: Sequence[Judged]) -> list[RowPower]:
    """Every row and promise of an op, in the order of the tables."""
    red = {outcome.fault: _ops_of(outcome.red) for outcome in outcomes}
    powers = []
    for row in (*TABLE, *(key for key, p in PROMISES.items() if p.judged_by == "local")):
        ops, worst = used.ops_of(row), used.worst_of(row)
        seen = [outcome for outcome in outcomes if red[outcome.fault] & set(ops)]
        shares = [
            (outcome.fault, float(outcome.of_limit))  # "inf" where it was read back from JSON
            for outcome in seen
            if outcome.of_limit is not None and set(_LINK.findall(outcome.link)) & set(ops)
        ]
        powers.append(
            RowPower(
                row,
                ops,
                None if worst is None else worst[2],
                tuple(outcome.fault for outcome in seen),
                min(shares, key=lambda entry: entry[1], default=None),
            )
        )
    return powers


def _ops_of(names: Iterable[str]) -> set[str]:
    """The ops of the local checks among `names`."""
    return {match[1] for match in map(_LOCAL.fullmatch, names) if match is not None}


def blind_rows(powers: Iterable[RowPower]) -> list[str]:
    """Rows that no fault proves: a limit that nothing is known to exceed."""
    return [" ".join(power.row) for power in powers if power.blind]


def power_table(powers: Iterable[RowPower]) -> tuple[list[list[str]], list[str]]:
    """Rows and heads of the table that is printed."""
    rows = []
    for power in powers:
        name, share = power.weakest or ("", None)
        rows.append(
            [
                " ".join(power.row),
                ", ".join(power.ops),
                "" if power.clean is None else f"{100 * power.clean:.3g} %",
                str(len(power.faults)),
                "" if share is None else f"{100 * share:.3g} %",
                name,
            ]
        )
    return rows, ["row", "ops", "clean run uses", "faults seen", "weakest", "fault"]


def shares_by_op(used: Used) -> Mapping[str, tuple[str, float]]:
    """Op to its worst point and share, the nearest to its limit first."""
    return dict(sorted(used.shares.items(), key=lambda entry: -entry[1][1]))
