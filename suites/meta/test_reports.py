"""Reports: tables are made of verified records of one runtime, else there is an error and none."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from reports.__main__ import BAD_INPUT, main
from reports.records import Measurement, ReportError, load_records, write_text
from reports.tables import EMULATED_NOTE, document, mode_table, tables_of

# The figures of the source's 105-token table (facts of the R9700), as seconds for 105 tokens.
RATES = {"per-token": 72.3, "serial": 61.5, "kparallel": 187.1}


def row(rate: float, **changed: Any) -> dict[str, Any]:
    """One stored benchmark of five rounds whose median is `rate` tokens per second."""
    info: dict[str, Any] = {
        "schema_version": 2,
        "sweep": "mode",
        "model": "tiny-llama",
        "runtime": "emulated",
        "device": "Assay CPU",
        "host": "Some Processor, 2 threads",
        "prefill": "batched",
        "path": "kparallel",
        "prompt_tokens": 105,
        "max_cols": 40,
        "chunks": 3,
        "kv_type_k": "f16",
        "kv_type_v": "f16",
        "clock": "device events",
        "verdict": "ok",
        "max_abs_diff": 0.0,
        "limit": 0.0,
        "commit": "0123456789ab",
        "compiler": "g++ 12.2.0",
    } | changed
    middle = info["prompt_tokens"] / rate
    seconds = [middle * factor for factor in (1.25, 0.8, 1.0, 1.1, 0.9)]
    info.setdefault("host_seconds", seconds)
    return {"name": "case", "extra_info": info, "stats": {"data": seconds, "iterations": 1}}


def mode_rows(**changed: Any) -> list[dict[str, Any]]:
    return [
        row(RATES["per-token"], prefill="per-token", max_abs_diff=1e-5, limit=1e-3, **changed),
        row(RATES["serial"], path="serial", max_abs_diff=2e-4, limit=1e-2, **changed),
        row(RATES["kparallel"], **changed),
    ]


def stored(folder: Path, rows: list[Any]) -> Path:
    path = folder / "benchmark.json"
    path.write_text(json.dumps({"benchmarks": rows, "version": "5"}), encoding="utf-8")
    return path


def test_mode_table_shows_median_range_and_ratio(tmp_path: Path) -> None:
    records = load_records(stored(tmp_path, mode_rows()))
    (table,) = tables_of(records)
    assert table.headers == (
        *("prefill", "path", "MAX_COLS"),
        *("105 tokens: tok/s [emulated]", "x per-token (kparallel)"),
    )
    assert table.rows == (
        ("per-token", "kparallel", "-", "72.3 (57.8 to 90.4)", "1.00"),
        ("batched", "serial", "40", "61.5 (49.2 to 76.9)", "0.85"),
        ("batched", "kparallel", "40", "187.1 (149.7 to 233.9)", "2.59"),
    )


def test_ratio_is_taken_within_one_prompt_length(tmp_path: Path) -> None:
    rows = [*mode_rows(), row(42.0, prefill="per-token", prompt_tokens=17)]
    rows.append(row(23.0, path="serial", prompt_tokens=17))
    (table,) = tables_of(load_records(stored(tmp_path, rows)))
    cells = {line[:2]: line[3:] for line in table.rows}
    assert cells["batched", "serial"][1] == f"{23 / 42:.2f}"
    assert cells["batched", "serial"][3] == f"{61.5 / 72.3:.2f}"
    assert cells["batched", "kparallel"][:2] == ("-", "-"), "no figure where none was measured"


def test_max_cols_table_shows_chunks(tmp_path: Path) -> None:
    sweep = {16: (7, 155.0), 40: (3, 187.0), 64: (2, 153.0)}
    rows = [
        row(rate, sweep="max-cols", max_cols=columns, chunks=chunks)
        for columns, (chunks, rate) in sweep.items()
    ]
    (table,) = tables_of(load_records(stored(tmp_path, rows)))
    assert [line[:2] for line in table.rows] == [("16", "7"), ("40", "3"), ("64", "2")]
    assert [line[2].split()[0] for line in table.rows] == ["155.0", "187.0", "153.0"]


@pytest.mark.parametrize("markdown", [False, True])
def test_emulated_figures_say_what_they_are_not(tmp_path: Path, markdown: bool) -> None:
    text = document(load_records(stored(tmp_path, mode_rows())), markdown=markdown)
    assert EMULATED_NOTE in text
    assert "emulated (Some Processor, 2 threads)" in text, "whose host threads these were"
    assert "the host waited" not in text, "both clocks are the host's"
    assert "nothing about a GPU's speed" in EMULATED_NOTE
    gpu = document(
        load_records(stored(tmp_path, mode_rows(runtime="gfx1201", device="R9700"))),
        markdown=markdown,
    )
    assert EMULATED_NOTE not in gpu
    assert "the host waited 1.00 to 1.00 times as long" in gpu
    assert "[gfx1201]" in gpu


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("runtime", "gfx1201"),
        ("device", "R9700"),
        ("host", "other"),
        ("commit", "other"),
        ("compiler", "clang"),
    ],
)
def test_mixed_sets_are_refused(tmp_path: Path, name: str, other: str) -> None:
    rows = [*mode_rows(), row(100.0, prompt_tokens=17, **{name: other})]
    with pytest.raises(ReportError, match=rf"mixes {name} .*one column"):
        load_records(stored(tmp_path, rows))


def test_a_column_never_mixes_runtimes(tmp_path: Path) -> None:
    one = load_records(stored(tmp_path, mode_rows()))
    other = load_records(stored(tmp_path, mode_rows(runtime="gfx1201")))
    with pytest.raises(ReportError, match="one runtime"):
        mode_table([*one, *other])
    with pytest.raises(ReportError, match="mixes runtime"):
        tables_of([*one, *other])


def test_no_records_are_an_error_and_not_an_empty_table(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no measurement"):
        load_records(stored(tmp_path, []))
    with pytest.raises(ReportError, match="no measurement"):
        tables_of([])


def test_two_records_of_one_cell_are_refused(tmp_path: Path) -> None:
    records = load_records(stored(tmp_path, [*mode_rows(), row(190.0)]))
    with pytest.raises(ReportError, match="same mode, path and prompt"):
        tables_of(records)


INFO_FIELDS = [name for name in Measurement.__dataclass_fields__ if name != "seconds"]


@pytest.mark.parametrize("name", ["schema_version", *INFO_FIELDS])
def test_every_field_is_needed(tmp_path: Path, name: str) -> None:
    broken = row(100.0)
    del broken["extra_info"][name]
    with pytest.raises(ReportError, match=name):
        load_records(stored(tmp_path, [broken]))


BAD_VALUES = {
    "prompt_tokens": (0, -1, 1.5, "105", True, None),
    "max_cols": (0, [40]),
    "chunks": (0, None),
    "runtime": ("", 1, None),
    "path": ("",),
    "sweep": ("speed",),
    "prefill": ("Batched", ""),
    "verdict": ("diverged", "invalid", "", None),
    "limit": (-1.0, math.nan, math.inf, "0"),
    "max_abs_diff": (1e-6, math.nan, None),
    "host_seconds": ([], [1.0], [1.0, 1.0, 1.0, 1.0, math.nan], "1", [0.0] * 5),
    "schema_version": (1, "2", None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values]
)
def test_bad_values_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ReportError) as caught:
        load_records(stored(tmp_path, [row(100.0) | {}, _with(name, value)]))
    assert "\n" not in str(caught.value)


def _with(name: str, value: Any) -> dict[str, Any]:
    broken = copy.deepcopy(row(100.0))
    broken["extra_info"][name] = value
    return broken


def test_a_difference_just_above_its_limit_is_refused(tmp_path: Path) -> None:
    at_limit = row(100.0, path="serial", max_abs_diff=0.01, limit=0.01)
    assert load_records(stored(tmp_path, [at_limit]))
    above = row(100.0, path="serial", max_abs_diff=math.nextafter(0.01, 1), limit=0.01)
    with pytest.raises(ReportError, match="above its limit"):
        load_records(stored(tmp_path, [above]))


@pytest.mark.parametrize("data", [[], [0.0], [-1.0], [math.nan], [math.inf], "1", None, [True]])
def test_bad_samples_are_refused(tmp_path: Path, data: Any) -> None:
    broken = row(100.0)
    broken["stats"]["data"] = data
    with pytest.raises(ReportError, match="seconds above 0"):
        load_records(stored(tmp_path, [broken]))


def test_rounds_of_many_iterations_are_refused(tmp_path: Path) -> None:
    broken = row(100.0)
    broken["stats"]["iterations"] = 2
    with pytest.raises(ReportError, match="iterations"):
        load_records(stored(tmp_path, [broken]))


@pytest.mark.parametrize("content", ["", "[]", "{}", "3", '{"benchmarks": 3}', "\x00", "[" * 9999])
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ReportError):
        load_records(path)


def test_a_truncated_file_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = stored(tmp_path, mode_rows()).read_bytes()
    cut, out = tmp_path / "cut.json", tmp_path / "out.md"
    for length in range(0, len(whole), len(whole) // 20):
        cut.write_bytes(whole[:length])
        assert main([str(cut), "--markdown", str(out)]) == BAD_INPUT
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("name", ["missing.json", ".", "latin.json"])
def test_unreadable_files_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{}")
    assert main([str(tmp_path / name)]) == BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_command_prints_and_writes_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.md"
    assert main([str(stored(tmp_path, mode_rows())), "--markdown", str(out)]) == 0
    assert "187.1 (149.7 to 233.9)" in capsys.readouterr().out
    lines = out.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("|") for line in lines) == 5, "head, rule and three rows"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json", "out.md"]


def test_an_unwritable_target_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stored(tmp_path, mode_rows())
    assert main([str(source), "--markdown", str(tmp_path / "no" / "out.md")]) == BAD_INPUT
    assert main([str(source), "--markdown", str(tmp_path)]) == BAD_INPUT
    assert "can't be written" in capsys.readouterr().err
    with pytest.raises(ReportError):
        write_text(tmp_path / "benchmark.json" / "x", "text")
