"""Every row of the table of tolerances decides: some op consults it, and widening it hides a fault.

The fault is one element of a point, moved by four limits: seen with the table as it is, and no
longer with the row's roundings a thousandfold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest

from backend_hip.registry import PATHS
from fixtures.golden import TINY_GATES
from reference.model import Model
from reference.model.trace import Trace
from suites.harness import local, local_tolerances
from suites.harness.check_kinds import CHECK_KINDS
from suites.harness.compare import Array, Comparison, compare
from suites.harness.fake_engine import FakeEngine
from suites.harness.local import LocalRules, PointCheck, judge_point, judge_trace
from suites.harness.plants import beyond
from suites.harness.promises import PROMISES, promise
from suites.harness.row_power import Used, blind_rows, power_of_rows, power_table, shares_by_op
from suites.harness.tolerances import TABLE, RowKey, consulted_rows, row
from suites.harness.verdict import State
from suites.meta.architecture_faults import FAKE, PLACES
from suites.meta.models import LLAMA, oracle_model, prompt, tiny_model

LENGTH = 9
WIDER = 1000
TRIED = 12
"""Points of a row that are tried until one shows that it decides."""


NAMES = (*TINY_GATES, LLAMA)
"""The golden models, whose weights are plain, and one with formats in super-blocks."""


def _model(name: str) -> Model:
    return tiny_model(name) if name == LLAMA else oracle_model(name)


@cache
def _clean(name: str, path: str) -> tuple[Trace, tuple[PointCheck, ...]]:
    model = _model(name)
    trace = Trace()
    asked = path if path in PATHS else "kparallel"
    FakeEngine(model, path=asked).prefill_batched(prompt(model, LENGTH), trace=trace)
    return trace, tuple(judge_trace(model, trace, LocalRules(path)))


def _consulting(key: RowKey) -> Iterator[tuple[str, str, PointCheck]]:
    """Model, path and point of each kind of point whose limit has the row in it."""
    path = key[1] if key[1] in (*PATHS, "digits") else "kparallel"
    seen: set[tuple[str, str]] = set()
    for name in NAMES:
        for point in _clean(name, path)[1]:
            kind = point.op, point.point.stem
            if key in point.rows and kind not in seen:
                seen.add(kind)
                yield name, path, point


def _bounded(name: str, path: str, point: PointCheck) -> tuple[Array, Array]:
    """What the point must be and its limit, flat, by the table as it is now."""
    found: list[tuple[Array, Array]] = []

    def watch(got: Array, want: Array, limit: Array) -> Comparison:
        found.append((want.reshape(-1), limit.reshape(-1)))
        return compare(got, want, limit)

    with mock.patch.object(local, "compare", watch):
        judge_point(_model(name), _clean(name, path)[0], LocalRules(path), point.point)
    return found[0]


def _planted(name: str, path: str, point: PointCheck, at: int) -> Trace:
    """The clean trace with one element of the point off by four limits."""
    clean = _clean(name, path)[0]
    want, limit = _bounded(name, path, point)
    values = clean[point.point.name].copy()
    values.reshape(-1)[at] = beyond(float(want[at]), float(limit[at]))
    trace = Trace(clean.tokens)
    trace._parts = {**clean._parts, point.point.name: [values]}
    return trace


def _widened(key: RowKey) -> Mapping[RowKey, local_tolerances.Row]:
    old = TABLE[key]
    return MappingProxyType(
        {**TABLE, key: replace(old, roundings=lambda n: WIDER * old.roundings(n))}
    )


def _hides(key: RowKey, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Points at which the planted fault is seen, and not seen once the row is wider."""
    hidden: list[str] = []
    for tried, (name, path, point) in enumerate(_consulting(key)):
        if hidden or tried == TRIED:
            break
        model, limit = _model(name), _bounded(name, path, point)[1]
        with monkeypatch.context() as patch:
            patch.setattr(local_tolerances, "TABLE", _widened(key))
            wide = _bounded(name, path, point)[1]
        # The element whose limit the row is most of.
        with np.errstate(invalid="ignore"):
            trace = _planted(name, path, point, int(np.nanargmax(wide / limit)))
        seen = judge_point(model, trace, LocalRules(path), point.point)
        assert seen.check.state is State.DIVERGED, point.point.name
        with monkeypatch.context() as patch:
            patch.setattr(local_tolerances, "TABLE", _widened(key))
            wider = judge_point(model, trace, LocalRules(path), point.point)
        if wider.check.state is State.OK:
            hidden.append(f"{point.point.name} of {name}")
    return hidden


@pytest.mark.parametrize("key", list(TABLE), ids="-".join)
def test_every_row_decides(key: RowKey, monkeypatch: pytest.MonkeyPatch) -> None:
    points = list(_consulting(key))
    assert points, "no op of any model consults this row: it limits nothing"
    assert _hides(key, monkeypatch), f"{[p.point.name for _, _, p in points]} do not depend on it"


def test_a_row_that_nothing_consults_is_seen() -> None:
    assert list(_consulting(("rms_norm", "serial"))) == []


def test_a_row_that_does_not_decide_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consulted row whose roundings are not used: widening it changes nothing."""
    monkeypatch.setattr("suites.meta.test_row_power._widened", lambda key: TABLE)
    assert _hides(("rope", "any"), monkeypatch) == []


@pytest.mark.parametrize("key", list(PROMISES), ids="-".join)
def test_every_promise_allows_nothing_and_has_its_check(key: RowKey) -> None:
    assert promise(*key) == 0
    assert PROMISES[key].judged_by in {kind.id for kind in CHECK_KINDS}
    assert key not in TABLE
    if PROMISES[key].judged_by == "local":
        assert any(
            key in point.rows for name in TINY_GATES for point in _clean(name, "kparallel")[1]
        )


def test_consulted_rows_are_those_of_the_block() -> None:
    with consulted_rows() as outer:
        row("rope")
        with consulted_rows() as inner:
            row("linear", "serial")
            row("router").roundings(64)
    row("add")
    assert outer == {("rope", "any")}
    assert inner == {("linear", "serial"), ("router", "any"), ("rms_norm", "any")}


# --- over outcomes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    fault: str
    red: tuple[str, ...]
    link: str = ""
    of_limit: float | None = None


def _used(*names: str) -> Used:
    used = Used()
    for name in names:
        used.add(_clean(name, "kparallel")[1])
    return used


def test_a_fault_counts_for_the_rows_of_the_checks_that_it_turned_red() -> None:
    outcomes = [
        _Outcome("late", ("local: rope", "decode: x"), "diverged: Qcur_pos-0 (rope)", 9.0),
        _Outcome("later", ("local, per-token: rope",), "diverged: Qcur_pos-0 (rope)", 5.0),
        _Outcome("other", ("local: rope",), "diverged: attn_norm-0 (rms_norm)", 2.0),
        _Outcome("stopped", ("device error",), "hipErrorIllegalAddress"),
    ]
    powers = {power.row: power for power in power_of_rows(_used("llama"), outcomes)}
    rope = powers["rope", "any"]
    assert rope.ops == ("rope",)
    assert rope.faults == ("late", "later", "other")
    assert rope.weakest == ("later", 5.0)
    assert rope.clean is not None
    assert 0 < rope.clean < 1
    assert powers["linear", "kparallel"].blind
    assert "linear kparallel" in blind_rows(powers.values())
    assert "rope any" not in blind_rows(powers.values())
    rows, heads = power_table(powers.values())
    assert all(len(cells) == len(heads) for cells in rows)
    assert ["rope any", "rope"] in [cells[:2] for cells in rows]


def test_head_room_is_that_of_the_worst_point() -> None:
    used = _used("llama", "qwen35")
    points = [p for name in ("llama", "qwen35") for p in _clean(name, "kparallel")[1]]
    for op, (name, share) in used.shares.items():
        mine = {p.check.of_limit or 0.0 for p in points if p.op == op}
        assert share == max(mine), op
        assert any(p.point.name == name and p.op == op for p in points)
    assert list(shares_by_op(used).values()) == sorted(
        used.shares.values(), key=lambda entry: -entry[1]
    )


def test_every_row_sees_a_fault_of_the_architectures_or_is_named() -> None:
    """The catalogue proves the rest; here the fake engine's faults go through the same sums."""
    used, outcomes = _used(*TINY_GATES), []
    for place in PLACES:
        if place.id not in FAKE:
            continue
        model, trace = oracle_model(place.model), Trace()
        FakeEngine(model, FAKE[place.id], max_cols=4).prefill_batched(
            prompt(model, LENGTH), trace=trace
        )
        points = [p for p in judge_trace(model, trace, LocalRules()) if p.point.name == place.point]
        (point,) = points
        red = (f"local: {point.op}",) if point.check.state is State.DIVERGED else ()
        link = f"diverged: {point.check.link}"
        outcomes.append(_Outcome(place.id, red, link, point.check.of_limit))
    powers = power_of_rows(used, outcomes)
    assert all(power.clean is not None or not power.ops for power in powers)
    weak = [p for p in powers if p.weakest and p.clean is not None and p.weakest[1] <= p.clean]
    assert weak == []
    print("\n".join(f"{' '.join(p.row)}: {', '.join(p.faults) or 'none'}" for p in powers))
    proven = {power.row for power in powers if not power.blind}
    assert {("rope", "any"), ("linear", "kparallel"), ("delta_read", "any")} <= proven
