"""The speed tables' own guard: rows are proved, timed in turn, and say what they are against."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend_hip import Device
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import PATHS
from reference.model import Model
from reference.model.errors import InputError, Unsupported
from reports import kernel_use, operations, speed
from reports.__main__ import main as reports_main
from reports.records import ReportError
from reports.speed import Speed, read_rows, tables, thresholds
from suites import cli
from suites.benchmark.engine_runs import Runner, finite_values
from suites.benchmark.interleave import Timed, in_turn
from suites.benchmark.operations import ARGMAX, ATTENTION
from suites.benchmark.peer import peer_decode, peer_prefill
from suites.benchmark.plans import SECTIONS, SpeedRow, Wanted, section
from suites.benchmark.product_operations import PRODUCT
from suites.benchmark.rest_operations import PROMPT, REST
from suites.harness.compare import same_bits

MODEL = "tiny-llama"
TOKENS = tuple(range(5, 22))  # 17
DECODE = SpeedRow("decode", "kparallel", "f16", "f16", 17, steps=2)
BATCHED = SpeedRow("batched", "kparallel", "f16", "f16", 17)


@pytest.fixture
def runner(device: Device, load: Callable[[str], Model]) -> Any:
    runner = Runner(load(MODEL), device, context_length=64)
    yield runner
    runner.close()


# --- assumed contexts ---------------------------------------------------------------------------


def test_an_assumed_context_is_full_and_finite(runner: Runner) -> None:
    runner.assume(40)
    assert runner.engine.position == 40
    for layer in range(runner.model.spec.layer_count):
        for part in runner.engine.kv_contents(layer):
            assert len(part) == 40
            assert np.isfinite(part).all()
            assert part.std() > 0
    first = runner.step([7])
    assert runner.engine.position == 41
    runner.place(40)
    assert runner.step([7]) == first


def test_what_is_assumed_counts(runner: Runner) -> None:
    """The step reads the whole context: other values in it give other logits."""
    logits = []
    for seed in (1, 2):
        runner.assume(40, seed)
        logits.append(runner.engine.decode(7).tail.logits)
    assert not same_bits(logits[0], logits[1])


@pytest.mark.parametrize("length", [-1, 64])
def test_a_context_outside_the_cache_is_refused(runner: Runner, length: int) -> None:
    with pytest.raises(InputError, match="expected 0 to 63"):
        runner.assume(length)


def test_sequences_hold_values_of_their_own(device: Device, load: Callable[[str], Model]) -> None:
    runner = Runner(load(MODEL), device, sequences=3, context_length=64)
    runner.assume(40)
    tokens = [7, 7, 7]
    steps = runner.engine.decode_batch(tokens)
    logits = [step.tail.logits for step in steps]
    assert not any(same_bits(logits[0], other) for other in logits[1:])
    runner.place(40)
    assert runner.step(tokens) == [step.token for step in steps]
    runner.place(40)
    assert runner.step_of([7], [2]) == [steps[2].token]
    runner.close()


def test_every_kv_type_has_finite_values() -> None:
    views = {"f32": np.float32, "f16": np.float16}
    for kind in (*KV_TYPES, "q8_0"):
        raw = finite_values(np.random.default_rng(1), kind)
        assert kind not in views or np.isfinite(raw.view(views[kind])).all()
        assert len(np.unique(raw)) > 100
    with pytest.raises(Unsupported, match="KV type is q3"):
        finite_values(np.random.default_rng(1), "q3")


# --- timing and plans ---------------------------------------------------------------------------


def test_things_are_timed_in_turn_there_and_back(device: Device) -> None:
    ran: list[str] = []

    def timed(name: str) -> Timed:
        return Timed(lambda: ran.append(name), lambda: ran.append(f"prepare {name}"))

    samples = in_turn(device, {name: timed(name) for name in "abc"}, rounds=3)
    assert [name for name in ran if len(name) == 1] == [*"abc", *"cba", *"abc", *"cba"]
    assert ran[:4] == ["prepare a", "a", "prepare b", "b"]
    assert all(len(held.device) == len(held.host) == 3 for held in samples.values())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SECTIONS)
def test_every_row_has_its_base_in_its_section(name: str, kind: str) -> None:
    plan = section(name, kind)
    assert len(set(plan.rows)) == len(plan.rows) > 0
    assert {plan.base(row) for row in plan.rows} <= set(plan.rows)
    assert {row.path for row in plan.rows} <= set(PATHS)
    # The exact path stands beside every other.
    assert {replace(row, path="kparallel") for row in plan.rows} <= set(plan.rows)


def test_the_sweep_stands_around_the_thresholds() -> None:
    rows = section("decode", "cuda").rows
    assert {row.batch for row in rows} == {1, 2, 3, 4, 5, 8, 15, 16, 17, 32}
    assert {row.context for row in rows} == {128, 2048, 6900}
    assert {row.max_cols for row in section("max-cols", "cuda").rows} == {
        16,
        32,
        35,
        40,
        44,
        48,
        64,
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_wanted_keeps_its_bases(name: str) -> None:
    whole = section(name, "cuda")
    wanted = Wanted(batches=(8,), contexts=(6900,), prompts=(105,), paths=("matrix",))
    if name == "max-cols":
        wanted = replace(wanted, paths=())
    rows = section(name, "cuda", wanted).rows
    assert 0 < len(rows) < len(whole.rows) or name == "wall"
    assert {whole.base(row) for row in rows} <= set(rows)
    assert {replace(row, path="kparallel") for row in rows} <= set(rows)
    assert {row.context for row in rows} <= {6900, 105}
    groups = section(name, "cuda").groups()
    assert [row for group in groups for row in group] == list(whole.rows)
    assert all(len({row.context for row in group}) == 1 for group in groups)


def test_q8_0_has_its_control_in_the_same_group() -> None:
    rows = section("kv", "cuda").rows
    deep = [row for row in rows if (row.context, row.batch) == (6900, 8)]
    kinds = {(row.path, row.kv_type_k, row.expanded) for row in deep}
    for path in ("kparallel", "matrix"):
        assert {(path, "f16", False), (path, "q8_0", False), (path, "q8_0", True)} <= kinds


def test_the_peer_stands_beside_its_own_card_only() -> None:
    f16 = ("f16", "f16")
    assert peer_decode("NVIDIA H200", "geometry-qwen3-8b", f16, 2048, 8) == 839
    assert peer_prefill("NVIDIA H200", "geometry-qwen3-8b", f16, "batched", 658) == 8257
    assert peer_decode("NVIDIA H200", "geometry-qwen3-8b", f16, 2048, 3) is None
    assert peer_decode("NVIDIA H200", "geometry-qwen3-8b", ("f16", "q8_0"), 2048, 8) is None
    assert peer_decode("Radeon RX 9070 XT", "geometry-qwen3-8b", f16, 2048, 8) is None
    assert peer_prefill("NVIDIA H200", "geometry-gemma4-31b", f16, "batched", 658) is None


# --- records and tables -------------------------------------------------------------------------

ONE = Speed(
    "Decode", "decode", "m", "cuda sm_90", "card", "host", "decode", "kparallel", "f16", "f16", 40,
    1, 2048, 0, 0, 16, (0.05, 0.04, 0.06), (0.06, 0.05, 0.07), 0.02, "bytes", "one sequence", 16,
    (0.05, 0.04, 0.06), 0.02, 200.0, None, "ok", "c", "nvrtc",
)  # fmt: skip
EIGHT = replace(
    ONE, batch=8, tokens=128, seconds=(0.1, 0.08, 0.16), limit_seconds=0.04, peer=None, note="n"
)


def test_figures_of_a_row() -> None:
    """8 sequences, 16 steps in 0.1 s: 1,280 tok/s; one made 320; bytes allow 4 times as much."""
    assert (ONE.rate, EIGHT.rate) == (320, 1280)
    assert (ONE.over_base, EIGHT.over_base) == (1, 4)
    assert EIGHT.base_ceiling == 4
    assert f"{ONE.share_of_limit:.3f} {EIGHT.share_of_limit:.3f}" == "0.400 0.400"
    bare = replace(ONE, limit_seconds=None, base_seconds=None)
    assert (bare.share_of_limit, bare.over_base, bare.base_ceiling) == (None, None, None)


def test_a_table_says_all_of_it() -> None:
    (table,) = tables([ONE, EIGHT])
    row = dict(zip(table.headers, table.rows[1], strict=True))
    assert row["tok/s [cuda sm_90]"] == "1,280.0 (800.0 to 1,600.0)"
    assert (row["x one sequence"], row["limits allow"]) == ("4.00", "4.00")
    assert (row["limit tok/s"], row["share of limit"]) == ("3,200", "40.0 %")
    assert (row["peer"], row["x peer"], row["note"]) == ("-", "-", "n")
    assert dict(zip(table.headers, table.rows[0], strict=True))["x peer"] == "1.60"
    assert len(tables([ONE, replace(EIGHT, section="other")])) == 2


def test_a_table_says_where_matrix_takes_over() -> None:
    def row(path: str, batch: int, seconds: float) -> Speed:
        return replace(EIGHT, path=path, batch=batch, seconds=(seconds,))

    rows = [row("kparallel", batch, 0.1) for batch in (1, 2, 4, 8)]
    rows += [row("matrix", batch, took) for batch, took in ((2, 0.2), (4, 0.05), (8, 0.04))]
    (line,) = thresholds(rows)
    assert line == (
        "Context 2,048, KV f16: matrix is faster than kparallel from 4 sequences on (measured: "
        "2, 4, 8)."
    )
    (line,) = thresholds([*rows[:4], row("matrix", 8, 0.2)])
    assert "at no number of sequences measured (measured: 8)" in line
    assert "16 x 16 x 16" in thresholds([replace(ONE, matrix_products=7)])[0]


def test_runtimes_are_never_mixed() -> None:
    with pytest.raises(ReportError, match="mixes"):
        tables([ONE, replace(EIGHT, runtime="emulated")])


def test_records_survive_json_and_damage_is_told() -> None:
    stored = json.loads(json.dumps(EIGHT.stored()))
    assert read_rows([stored]) == (EIGHT,)
    for change, text in (
        ({"verdict": "diverged"}, "verdict diverged"),
        ({"seconds": []}, "no samples above 0"),
        ({"seconds": [0.0]}, "no samples above 0"),
        ({"phase": "sleep"}, "phase sleep"),
    ):
        with pytest.raises(ReportError, match=text):
            read_rows([stored | change])
    with pytest.raises(ReportError, match="lacks batch"):
        read_rows([{key: value for key, value in stored.items() if key != "batch"}])


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_tables_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # After an even number of rounds, there and back, another job has run last.
    arguments = ["bench", MODEL, "--device", "cpu", "--rounds", "2", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--json", str(tmp_path / "copy.json")]) == 0
    text = capsys.readouterr().out
    assert "share of limit" in text
    assert "tok/s [emulated]" in text
    assert "Limits measured in this run" in text
    assert text.count("weights uploaded: ") == text.count("file read alone: ") == 1
    stored = json.loads((tmp_path / "speed.json").read_text())
    assert stored == json.loads((tmp_path / "copy.json").read_text())
    expected = [row for name in SECTIONS for row in section(name, "cpu").rows]
    of_kind = {
        kind: [row for row in stored["rows"] if row["kind"] == kind]
        for kind in (speed.KIND, kernel_use.KIND, operations.KIND)
    }
    assert len(read_rows(of_kind[speed.KIND])) == len(expected)
    assert {row["max_cols"] for row in of_kind[kernel_use.KIND]} == {16, 40}
    assert {row["op"] for row in of_kind[operations.KIND]} == {
        *(PRODUCT, ATTENTION, ARGMAX, REST, PROMPT)
    }
    assert sum(map(len, of_kind.values())) == len(stored["rows"])
    assert stored["schema"] == "assay.bench"
    assert stored["limits"]["read_bytes_per_s"] > 0
    assert (tmp_path / "speed.md").read_text().startswith("# Speed")
    assert reports_main([str(tmp_path / "speed.json")]) == 0
    assert "share of limit" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(0, 10_000, 61))
    monkeypatch.setattr(
        "suites.benchmark.deadline.time", SimpleNamespace(monotonic=lambda: next(ticks))
    )
    arguments = ["bench", MODEL, "--device", "cpu", "--rounds", "1", "--minutes", "1.5"]
    assert cli.main([*arguments, "--sections", "wall,kv"]) == 0
    assert "Not run, because the time was up: kv." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sections", "decode,sleep"), "--sections is decode,sleep"),
        (("--sections", "kv,kv"), "--sections is kv,kv"),
        (("--rounds", "0"), "--rounds is 0 and --minutes 60.0, expected finite numbers above 0"),
        *((("--minutes", m), "expected finite numbers above 0") for m in ("0", "nan", "inf", "-1")),
        (("--out", "no/where"), "a folder that exists"),
        (("--batches", "1,two"), "--batches is 1,two, expected numbers"),
        (("--paths", "quick"), "--paths is quick, expected some of kparallel"),
        (("--sections", "kv", "--contexts", "17,18"), "--contexts has 18, which no row of"),
        (("--batches", "1,99"), "--batches has 99, which no row of sections decode,kv,"),
        (("--prompts", "5"), "has here; they have 17"),
        (("--sections", "kv", "--paths", "serial"), "has here; they have kparallel, matrix"),
        (("--sections", "wall", "--batches", "1"), "no row of sections wall has here"),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", MODEL, "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err
