"""Records of the reference's speed: what is not whole or not proved makes no table."""

from dataclasses import replace
from typing import Any

import pytest

from reports.records import ReportError
from reports.reference_speed import ReferenceSpeed, is_reference_speed, read_rows, table

RECORD = ReferenceSpeed(
    model="smollm2",
    task="decode",
    tokens=16,
    after=105,
    threads=2,
    seconds=(1.0, 2.0, 4.0),
    peer_seconds=(3.0, 6.0, 5.0),
    max_abs_diff=1e-5,
    limit=1e-3,
    programs="NumPy against torch.",
    verdict="ok",
)


def _row(record: ReferenceSpeed = RECORD, **changes: Any) -> dict[str, Any]:
    return {"name": "row", "extra_info": record.stored() | changes}


def test_a_record_survives_storage() -> None:
    row = _row()
    assert is_reference_speed(row)
    assert not is_reference_speed({"extra_info": {"sweep": "mode"}})
    assert read_rows([row]) == (RECORD,)


def test_the_ratio_is_of_medians_and_the_peer_comes_first() -> None:
    assert RECORD.ratio == 5.0 / 2.0
    text = table([RECORD, replace(RECORD, task="prefill", after=0)]).terminal()
    assert "decode of 16 after 105" in text
    assert "prefill of 16" in text
    assert "8.0 (4.0 to 16.0)" in text
    assert text.count("2.50") == 2
    assert "NumPy against torch." in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "diverged"}, "verdict diverged"),
        ({"task": "training"}, "task training"),
        ({"seconds": [1.0, 0.0]}, "no samples above 0"),
        ({"seconds": []}, "no samples above 0"),
        ({"peer_seconds": []}, "no samples above 0"),
        ({"seconds": [float("nan")]}, "no samples above 0"),
        ({"max_abs_diff": 1.0}, "expected at most"),
        ({"max_abs_diff": float("nan")}, "expected at most"),
    ],
)
def test_an_unproved_or_broken_record_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        read_rows([_row(**changes)])


def test_a_missing_field_is_named() -> None:
    row = _row()
    del row["extra_info"]["threads"]
    with pytest.raises(ReportError, match="lacks threads"):
        read_rows([row])
