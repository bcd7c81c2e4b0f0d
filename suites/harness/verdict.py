"""What a run proves: checks in the order of the data flow, and the verdict over them.

The state of a verdict is the worst of its checks, in the stated order

    invalid > diverged > unsupported > ok

A verdict without checks is invalid, and so is an `ok` that compared no elements or that its own
figures contradict: nothing is green by default. `verdict.schema.json` beside this file describes
the JSON form.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from reference.model.cache import atomic_write
from reference.model.errors import DeviceError
from suites.harness.check_kinds import kind_of
from suites.harness.compare import Comparison

SCHEMA_VERSION = 3
SCHEMA_PATH = Path(__file__).with_name("verdict.schema.json")


PREMISES = frozenset({"launches", "statements", "faults", "results", "files", "tokens"})
"""Units of what must hold before a comparison can mean anything, and compares nothing itself."""


class State(Enum):
    """The four states; `exit_code` is the command line's and `severity` orders them."""

    OK = "ok"
    DIVERGED = "diverged"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"

    @property
    def exit_code(self) -> int:
        return {"ok": 0, "diverged": 1, "unsupported": 2, "invalid": 3}[self.value]

    @property
    def severity(self) -> int:
        return {"ok": 0, "unsupported": 1, "diverged": 2, "invalid": 3}[self.value]


@dataclass(frozen=True)
class Check:
    """One judged relation. `elements` counts what was compared, in `unit` (values, launches, ...).

    `measured` and `limit` belong to the worst element; `of_limit` is measured over limit: the share
    of what is allowed that was used up, infinite where nothing was allowed. `link` names in words
    what is broken if the check is not ok.
    """

    name: str
    state: State
    elements: int
    measured: float | None = None
    limit: float | None = None
    of_limit: float | None = None
    where: str = ""
    detail: str = ""
    link: str = ""
    unit: str = "values"

    def __post_init__(self) -> None:
        if not self.link:
            object.__setattr__(self, "link", self.name)
        if self.state is not State.OK:
            return
        if self.elements <= 0:
            self._overrule("compared nothing")
        elif self.measured is not None and self.limit is not None:
            # The condition for passing: NaN in either figure overrules too.
            if not self.measured <= self.limit:
                self._overrule(f"measured {self.measured} is not within {self.limit}")
        elif self.of_limit is not None and not self.of_limit <= 1.0:
            self._overrule(f"share of the limit {self.of_limit} is not within 1")

    def _overrule(self, reason: str) -> None:
        object.__setattr__(self, "state", State.INVALID)
        object.__setattr__(self, "detail", f"{self.detail}; {reason}" if self.detail else reason)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": kind_of(self.name).id,
            "state": self.state.value,
            "elements": self.elements,
            "unit": self.unit,
            "measured": json_number(self.measured),
            "limit": json_number(self.limit),
            "of_limit": json_number(self.of_limit),
            "where": self.where,
            "detail": self.detail,
            "link": self.link,
        }


@dataclass(frozen=True)
class Verdict:
    """The checks of one run in order, what the run was (`run`), and notes that judge nothing.

    Raises ValueError for a check that is in no row of check_kinds.py.
    """

    checks: tuple[Check, ...]
    run: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for check in self.checks:
            kind_of(check.name)

    @property
    def state(self) -> State:
        if self._proves_nothing:
            return State.INVALID
        return max((check.state for check in self.checks), key=lambda state: state.severity)

    @property
    def _proves_nothing(self) -> bool:
        """True where nothing failed, and every check is a premise of comparisons not made."""
        return all(c.state is State.OK and c.unit in PREMISES for c in self.checks)

    @property
    def exit_code(self) -> int:
        return self.state.exit_code

    @property
    def first_broken(self) -> Check | None:
        """The first check that has the verdict's state; None where all is ok or nothing ran."""
        if self.state is State.OK:
            return None
        return next((check for check in self.checks if check.state is self.state), None)

    @property
    def elements(self) -> int:
        """How many values were compared; launches, links and planted faults are not added up."""
        return sum(check.elements for check in self.checks if check.unit == "values")

    def summary(self) -> str:
        """`ok`, or the state and the first broken link, in one line."""
        if not self.checks:
            return "invalid: no checks ran"
        if self._proves_nothing:
            return "invalid: nothing was compared"
        broken = self.first_broken
        if broken is None:
            return "ok"
        return " ".join(f"{self.state.value}: {broken.link}".split())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "assay.verdict",
            "schema_version": SCHEMA_VERSION,
            "state": self.state.value,
            "exit_code": self.exit_code,
            "summary": self.summary(),
            "first_broken": None if self.first_broken is None else self.first_broken.name,
            "elements": self.elements,
            "run": dict(self.run),
            "notes": list(self.notes),
            "checks": [check.to_json() for check in self.checks],
        }

    def write(self, path: Path) -> None:
        """Writes the JSON form whole or not at all."""
        write_json(path, self.to_json())


def check_of(
    name: str,
    comparison: Comparison,
    *,
    link: str = "",
    detail: str = "",
    failed: State = State.DIVERGED,
) -> Check:
    """The check that a comparison amounts to.

    NaN on both sides and nothing compared prove nothing and are invalid; a NaN on one side, or a
    shape or dtype that differs, is `failed`.
    """
    state = State.OK if comparison.ok else failed
    if not comparison.ok and comparison.same_shape:
        both_nan = comparison.nan_got and comparison.nan_want
        if both_nan or not comparison.elements or comparison.invalid_limits:
            state = State.INVALID
    reason = comparison.reason()
    place = comparison.worst_backward
    return Check(
        name=name,
        state=state,
        elements=comparison.elements,
        measured=None if place is None else place.error,
        limit=None if place is None else place.limit,
        of_limit=comparison.of_limit,
        where="" if place is None else str(place),
        detail="; ".join(text for text in (detail, reason) if text),
        link=link,
    )


def behind(check: Check, broken_since: str) -> Check:
    """The check as it counts once `broken_since` (empty: nothing) is known to be broken.

    Wild values can leave no finite limit and NaN on both sides. By itself that proves nothing and
    is invalid; behind a broken point it is what that point led to, and must not outrank it.
    """
    if check.state is not State.INVALID or not broken_since:
        return check
    detail = f"{check.detail}; what it reads is wrong since {broken_since}"
    return replace(check, state=State.DIVERGED, detail=detail)


def device_failed(error: DeviceError) -> Check:
    """The check of a run that a device error ended: nothing can be said about what it computed."""
    text = " ".join(str(error).split())
    return Check("device", State.INVALID, 0, detail=text, link=text)


def fact(
    name: str,
    holds: bool,
    detail: str,
    *,
    failed: State,
    elements: int = 1,
    unit: str = "statements",
) -> Check:
    """A check of a statement that is true or false; `detail` says what was seen."""
    state = State.OK if holds else failed
    return Check(name, state, elements, detail=detail, link=name if holds else detail, unit=unit)


def counted(number: int, noun: str) -> str:
    """ "1 point", "2 points"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def json_number(value: float | None) -> float | str | None:
    """JSON knows no NaN and no infinity: those become the strings "nan", "inf", "-inf"."""
    if value is None or math.isfinite(value):
        return value
    return str(float(value))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    atomic_write(path, text.encode())


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """Checks by falling share of the limit, those that are not ok before all others."""
    return sorted(checks, key=lambda c: (c.state is State.OK, -(c.of_limit or 0.0)))
