"""Tables fit their width and lose nothing; what is printed can't steer a terminal."""

import re
from dataclasses import replace

import pytest

from suites.commands import common, tables
from suites.commands.tables import PLAIN, amount, check_table, share
from suites.harness.verdict import Check, State, counted

WHERE = "blk_moe_weights-29 [123,4,56] got -0.0162519366 want -0.0162519404"
CHECKS = [
    Check("short", State.OK, 1, measured=0.0, limit=0.0, of_limit=0.0, detail="1 point"),
    Check(
        "decode equals batched prefill of the same tokens: recurrent state",
        State.DIVERGED,
        123_456_789,
        measured=1.23456e-7,
        limit=9.87654e-8,
        of_limit=1.25,
        where=WHERE,
    ),
    Check("prefill pair: routes differ", State.OK, 2712, detail="ran a, b, c", unit="launches"),
]


@pytest.mark.parametrize("columns", [60, 72, 80, 100, 109, 110, PLAIN, 200])
def test_a_table_fits_and_loses_nothing(columns: int) -> None:
    text = check_table(CHECKS, columns)
    assert max(map(len, text.splitlines())) <= columns
    words = re.sub(r"\s+", "", text)
    for check in CHECKS:
        for part in (check.state.value, amount(check), share(check.of_limit)):
            assert re.sub(r"\s+", "", part) in words
    # Wrapped columns stand beside each other, so their words are looked for one by one.
    for word in (*WHERE.split(), *CHECKS[1].name.split(), "1.23e-07", "9.88e-08"):
        assert word in text


def test_a_row_has_a_unit_and_a_share_of_its_limit() -> None:
    (row,) = [line for line in check_table(CHECKS[:1], PLAIN).splitlines() if "short" in line]
    assert "1 value " in row
    assert "0 %" in row
    assert amount(CHECKS[2]) == "2,712 launches"
    assert share(0.29) == "29 %"
    assert share(float("inf")) == "above 0"
    assert share(None) == ""
    assert [counted(n, "point") for n in (0, 1, 2)] == ["0 points", "1 point", "2 points"]
    assert "of limit" in check_table(CHECKS, PLAIN).splitlines()[0]
    assert "head" not in check_table(CHECKS, PLAIN)


def test_a_pipe_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert tables.width() == PLAIN
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert tables.width() == 80


def test_an_ok_that_is_nowhere_has_no_place() -> None:
    assert tables.place(replace(CHECKS[0], detail="1 point; x-0: near")) == "1 point"
    assert tables.place(CHECKS[1]) == WHERE
    bits = replace(CHECKS[1], measured=0.0, detail="equal numbers, other bits")
    assert tables.place(bits) == "equal numbers, other bits"
    assert tables.place(replace(bits, detail="")) == WHERE


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext é 漢 \u200d", "plain\n\ttext é 漢 \u200d"),
        ("\x1b[31m red \x07", "\\x1b[31m red \\x07"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202etxt", "\\u202etxt"),
        ("\ud800", "\\ud800"),
    ],
)
def test_controls_are_printed_escaped(text: str, shown: str) -> None:
    assert common.printable(text) == shown
