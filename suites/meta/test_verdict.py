"""A verdict cannot be green by default; its JSON form follows the published schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suites.harness.compare import compare
from suites.harness.verdict import (
    SCHEMA_PATH,
    Check,
    State,
    Verdict,
    check_of,
    fact,
    json_number,
    worst_first,
)

OK = Check("Qcur-0", State.OK, 3, measured=0.5, limit=1.0, of_limit=0.5)
DIVERGED = Check("Kcur-0", State.DIVERGED, 3, link="bent rod")
UNSUPPORTED = Check("Vcur-0", State.UNSUPPORTED, 0)
INVALID = Check("kqv_out-0", State.INVALID, 0)


def test_no_checks_is_invalid() -> None:
    verdict = Verdict(())
    assert verdict.state is State.INVALID
    assert verdict.exit_code == 3
    assert verdict.summary() == "invalid: no checks ran"


@pytest.mark.parametrize(
    ("checks", "state", "code", "summary"),
    [
        ((OK,), State.OK, 0, "ok"),
        ((OK, DIVERGED, OK), State.DIVERGED, 1, "diverged: bent rod"),
        ((OK, UNSUPPORTED), State.UNSUPPORTED, 2, "unsupported: Vcur-0"),
        ((UNSUPPORTED, DIVERGED), State.DIVERGED, 1, "diverged: bent rod"),
        ((DIVERGED, OK, INVALID), State.INVALID, 3, "invalid: kqv_out-0"),
    ],
    ids=["ok", "diverged", "unsupported", "diverged-over-unsupported", "invalid-over-all"],
)
def test_the_worst_check_decides(
    checks: tuple[Check, ...], state: State, code: int, summary: str
) -> None:
    verdict = Verdict(checks)
    assert (verdict.state, verdict.exit_code, verdict.summary()) == (state, code, summary)


def test_first_broken_is_the_first_of_the_worst() -> None:
    second = Check("l_out-0", State.DIVERGED, 1)
    broken = Verdict((OK, DIVERGED, second)).first_broken
    assert broken is DIVERGED
    assert Verdict((OK,)).first_broken is None


@pytest.mark.parametrize(
    "check",
    [
        Check("Qcur-0", State.OK, 0),
        Check("Qcur-0", State.OK, -1),
        Check("Qcur-0", State.OK, 1, measured=2.0, limit=1.0),
        Check("Qcur-0", State.OK, 1, measured=float("nan"), limit=1.0),
        Check("Qcur-0", State.OK, 1, measured=0.0, limit=float("nan")),
        Check("Qcur-0", State.OK, 1, of_limit=float("nan")),
        Check("Qcur-0", State.OK, 1, of_limit=1.5),
    ],
    ids=["nothing", "negative", "above", "nan-measured", "nan-limit", "nan-share", "share"],
)
def test_ok_that_its_own_figures_contradict_is_invalid(check: Check) -> None:
    assert check.state is State.INVALID
    assert Verdict((check,)).state is State.INVALID


def test_check_of_nan_on_one_side_is_diverged_on_both_sides_invalid() -> None:
    nan, number = np.array([np.nan, 1]), np.array([0.0, 1])
    assert check_of("one", compare(nan, number, 1.0)).state is State.DIVERGED
    assert check_of("other", compare(number, nan, 1.0)).state is State.DIVERGED
    assert check_of("both", compare(nan, nan, 1.0)).state is State.INVALID


def test_check_of_nothing_is_invalid_and_of_a_wrong_shape_diverged() -> None:
    empty = np.zeros(0)
    assert check_of("empty", compare(empty, empty, 1.0)).state is State.INVALID
    assert check_of("shape", compare(np.zeros(2), np.zeros(3), 1.0)).state is State.DIVERGED


def test_fact() -> None:
    assert fact("sky is up", True, "seen", failed=State.INVALID).state is State.OK
    failed = fact("sky is up", False, "sky is down", failed=State.INVALID)
    assert (failed.state, failed.link) == (State.INVALID, "sky is down")


def test_worst_first_puts_broken_checks_before_good_ones() -> None:
    loose = Check("l_out-0", State.OK, 1, of_limit=0.1)
    assert [check.name for check in worst_first([loose, DIVERGED, OK])] == [
        "Kcur-0",
        "Qcur-0",
        "l_out-0",
    ]


def test_json_numbers() -> None:
    assert json_number(None) is None
    assert json_number(1.5) == 1.5
    assert [json_number(float(text)) for text in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]


# The part of JSON Schema that verdict.schema.json uses; an unknown keyword fails the test.
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_KEYWORDS = {
    "$schema", "title", "description", "type", "const", "enum", "required", "properties",
    "additionalProperties", "items", "minLength", "minimum",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What in `value` breaks `schema`, each with its path."""
    assert set(schema) <= _KEYWORDS, f"{path}: keywords {set(schema) - _KEYWORDS} are not checked"
    found: list[str] = []
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, _TYPES[kind]) and not isinstance(value, bool) for kind in kinds
    ):
        return [f"{path}: {value!r} is no {kinds}"]
    if "const" in schema and value != schema["const"]:
        found.append(f"{path}: {value!r} is not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{path}: too short")
    if isinstance(value, int) and "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path}: {value} below {schema['minimum']}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{path}: no {key}" for key in schema.get("required", []) if key not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{path}: unknown {key}" for key in value if key not in properties]
        for key in value.keys() & properties.keys():
            found += violations(value[key], properties[key], f"{path}.{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{path}[{index}]")
    return found


def _verdicts() -> list[Verdict]:
    infinite = check_of("l_out-0", compare(np.array([1.0]), np.array([2.0]), 0.0))
    return [
        Verdict(()),
        Verdict((OK,), run={"model": "m"}, notes=("a note",)),
        Verdict((OK, DIVERGED, UNSUPPORTED, INVALID, infinite)),
    ]


@pytest.mark.parametrize("index", range(3))
def test_json_form_follows_the_schema(index: int, tmp_path: Path) -> None:
    schema = json.loads(SCHEMA_PATH.read_text())
    path = tmp_path / "verdict.json"
    _verdicts()[index].write(path)
    document = json.loads(path.read_text())
    assert violations(document, schema) == []
    assert [file.name for file in tmp_path.iterdir()] == ["verdict.json"]


def test_the_schema_check_sees_what_is_wrong() -> None:
    schema = json.loads(SCHEMA_PATH.read_text())
    document = Verdict((OK,)).to_json()
    for key, value in [("state", "green"), ("exit_code", 7), ("elements", -1), ("checks", [{}])]:
        assert violations({**document, key: value}, schema)
    assert violations({key: document[key] for key in document if key != "summary"}, schema)
    assert violations({**document, "extra": 1}, schema)
