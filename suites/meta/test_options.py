"""pytest's options: they narrow, they never make an empty run green, and --benchmark works."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from suites.options import Selection

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "suites/benchmark/test_prefill.py"
USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)
NOTHING_RAN = int(pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class Case:
    model: str = "tiny-llama"
    path: str = "kparallel"
    max_cols: int = 40


def test_options_narrow_by_parameter_and_by_field_of_a_record() -> None:
    selection = Selection(model=("tiny-llama",), max_cols=(16, 40))
    assert selection.keeps({"model": "tiny-llama", "max_cols": 16})
    assert selection.keeps({"case": Case()})
    assert not selection.keeps({"case": Case(model="tiny-qwen3")})
    assert not selection.keeps({"model": "tiny-llama", "max_cols": 8})
    assert not selection.keeps({"model": "tiny-qwen3"})
    assert selection.keeps({"name": "tiny-qwen3"})


def test_a_test_without_the_axis_is_not_touched() -> None:
    selection = Selection(path=("serial",))
    assert selection.keeps({})
    assert selection.keeps({"path": Path("serial")}), "a file's path is no kernel path"
    assert selection.keeps({"path": "some/file"})


def test_every_value_must_match_a_kept_case() -> None:
    cases = [{"case": Case()}, {"case": Case(model="tiny-qwen3", path="serial")}, {}]
    assert Selection(path=("serial",)).unmatched(cases) == ()
    assert Selection(max_cols=(40, 41)).unmatched(cases) == ("--max-cols 41",)
    both = Selection(model=("tiny-llama",), path=("serial",))
    assert both.unmatched(cases) == ("--model tiny-llama", "--path serial"), "no case has both"
    assert Selection(path=("serial",)).unmatched([{}]) == ("--path serial",)


def run_pytest(
    *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder or ROOT, env=environment, capture_output=True, text=True, check=False
    )


USAGE_ERRORS = {
    "gpu required of the cpu runtime": (
        ("--require-gpu", "--device", "cpu", BENCHMARKS),
        "expected a GPU",
    ),
    "no such model": (("--model", "tiny-lama", BENCHMARKS), "tiny-lama"),
    "no such file": (("--model", "./nowhere.gguf", BENCHMARKS), "is no file"),
    "no such device": (("--device", "tpu", BENCHMARKS), "--device"),
    "columns out of range": (("--max-cols", "0", BENCHMARKS), "1 to 64"),
    "seed out of range": (("--shuffle", str(2**64), BENCHMARKS), "expected a seed from 0"),
    "columns no number": (("--max-cols", "forty", BENCHMARKS), "1 to 64"),
    "mode unknown": (("--prefill", "batched,fast", BENCHMARKS), "per-token,batched"),
    "path that no case has": (("--path", "serial", "suites/meta/test_reports.py"), "--path serial"),
    "mode that no path has": (
        ("--prefill", "per-token", "--path", "serial", BENCHMARKS),
        "no collected test has",
    ),
    "store without timing": (("--benchmark-json", "x.json", BENCHMARKS), "needs --benchmark"),
    "timing without timing": (("--benchmark", "--benchmark-disable", BENCHMARKS), "contradicts"),
}


@pytest.mark.parametrize("name", USAGE_ERRORS)
def test_usage_errors_run_nothing(name: str, tmp_path: Path) -> None:
    arguments, text = USAGE_ERRORS[name]
    run = run_pytest(*arguments)
    assert run.returncode == USAGE_ERROR, run.stdout + run.stderr
    assert text in run.stdout + run.stderr
    assert "passed" not in run.stdout


SKIPPED_TEST = """
import pytest

@pytest.fixture
def device(): pytest.skip("gone")

def test_on_a_device(device): ...

def test_with_a_skip_inside(): pytest.skip("not here")
"""


def test_a_run_that_skipped_everything_is_not_green(tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(SKIPPED_TEST, encoding="utf-8")
    plugin = ("-p", "conftest", "-c", str(ROOT / "pyproject.toml"), "--device", "cpu")
    run = run_pytest(*plugin, str(file))
    assert run.returncode == NOTHING_RAN, run.stdout + run.stderr
    assert "2 skipped" in run.stdout
    assert "gone" in run.stdout


FAKE_GPU = """
import conftest
from backend_hip.runtimes import RuntimeInfo

conftest.select_runtime = lambda device: RuntimeInfo("amd", None, "hiprtc", "a GPU by name only")
"""


@pytest.mark.parametrize("required", [False, True])
def test_required_gpu_turns_skips_about_devices_into_failures(
    tmp_path: Path, required: bool
) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(SKIPPED_TEST + "\ndef test_plain(): ...\n", encoding="utf-8")
    (tmp_path / "fake_gpu.py").write_text(FAKE_GPU, encoding="utf-8")
    plugins = ("-p", "conftest", "-p", "fake_gpu", "-c", str(ROOT / "pyproject.toml"))
    required_flag = ("--require-gpu",) if required else ()
    run = run_pytest(*plugins, *required_flag, str(file), PYTHONPATH=str(tmp_path))
    summary = run.stdout.splitlines()[-1]
    expected = "1 passed, 1 skipped, 1 error" if required else "1 passed, 2 skipped"
    assert expected in summary, run.stdout + run.stderr
    assert "--require-gpu" in run.stdout or not required
    assert run.returncode == int(required)


def test_benchmark_leaves_tables_and_records(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    run = run_pytest(
        *("--benchmark", "--benchmark-json", str(target), "--device", "cpu"),
        *("-k", "p17", "--prefill", "batched", "--path", "kparallel", BENCHMARKS),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[emulated]" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]
    (row,) = json.loads(target.read_text(encoding="utf-8"))["benchmarks"]
    assert row["extra_info"]["verdict"] == "ok"
    assert row["extra_info"]["max_abs_diff"] == 0
    assert len(row["stats"]["data"]) == len(row["extra_info"]["host_seconds"]) == 5


def test_benchmark_that_times_nothing_is_not_green(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    run = run_pytest(
        *("--benchmark", "--benchmark-json", str(target)),
        *("-k", "narrow_by_parameter", "suites/meta/test_options.py"),
    )
    assert run.returncode == int(pytest.ExitCode.TESTS_FAILED), run.stdout
    assert "no benchmark was timed" in run.stdout
    assert list(tmp_path.iterdir()) == []


COUNTED_BENCHMARK = """
def test_runs_once(benchmark):
    calls = []
    benchmark(lambda: calls.append(1))
    assert len(calls) == 1
"""


def test_without_the_flag_a_benchmark_runs_once(tmp_path: Path) -> None:
    before = sorted((ROOT / "runs").glob("*"))
    file = tmp_path / "test_sample.py"
    file.write_text(COUNTED_BENCHMARK, encoding="utf-8")
    plugin = ("-p", "conftest", "-c", str(ROOT / "pyproject.toml"))
    run = run_pytest(*plugin, str(file))
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
    assert sorted((ROOT / "runs").glob("*")) == before
    timed = run_pytest(*plugin, "--benchmark", "--benchmark-json", str(tmp_path / "x"), str(file))
    assert timed.returncode == 1, "with the flag the same benchmark runs many rounds"
    assert not (tmp_path / "x").exists(), "and its row has no verdict"


def test_without_the_flag_nothing_is_timed_or_written(tmp_path: Path) -> None:
    before = sorted((ROOT / "runs").glob("*"))
    command = ("-k", "p17", "--path", "serial", f"--rootdir={ROOT}", "-c", f"{ROOT}/pyproject.toml")
    run = run_pytest(*command, str(ROOT / BENCHMARKS), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed, 26 deselected" in run.stdout, "what options leave out is not skipped"
    assert "tok/s" not in run.stdout
    assert sorted((ROOT / "runs").glob("*")) == before
    assert list(tmp_path.iterdir()) == [], "pytest-benchmark's own folder is not left behind"


CORRECTNESS = ("--collect-only", "suites/correctness")


def selected(*options: str) -> set[str]:
    """Ids of the collected tests of the correctness suite that have a model as a parameter."""
    run = run_pytest(*CORRECTNESS, *options)
    assert run.returncode == 0, run.stderr
    ids = [line for line in run.stdout.splitlines() if "::" in line]
    return {
        line.partition("::")[2] for line in ids if re.search(r"\[.*(tiny|oracle)-|smollm2", line)
    }


def test_a_model_selects_its_tests_and_is_added_where_any_model_goes() -> None:
    found = selected("--model", "tiny-qwen3,tiny-gemma3", "--prefill", "per-token")
    assert "test_every_tensor_moves_the_logits[tiny-qwen3]" in found
    assert "test_every_tensor_moves_the_logits[tiny-llama]" not in found
    assert "test_modes_agree_bit_for_bit[tiny-gemma3-f16-f32]" in found
    assert "test_verdict_of_one_mode_is_ok[tiny-qwen3-per-token]" in found
    assert not any("batched" in name for name in found)
    assert not any("oracle-" in name for name in found if "unknown_names" not in name)
    # tiny-qwen2-q4_k is no case of these tests.
    added = selected("--model", "tiny-qwen2-q4_k", "--kv-type-k", "f32")
    assert "test_modes_agree_bit_for_bit[tiny-qwen2-q4_k-f32-f16]" in added
    assert "test_verdict_is_ok[tiny-qwen2-q4_k]" in added
    assert "test_eager_equals_graph[tiny-qwen2-q4_k]" in added


def test_a_published_model_selects_what_runs_it() -> None:
    found = selected("--model", "smollm2")
    assert "test_published_model_agrees_with_llama_cpp[smollm2]" in found
    assert "test_verdict_is_ok[smollm2]" in found


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--model", "tiny-qwen3", "--model", "smollm2"), {"tiny-qwen3", "smollm2"}),
        ((), {"tiny-llama", "more"}),
    ],
)
def test_the_models_that_run_are_named(options: tuple[str, ...], names: set[str]) -> None:
    run = run_pytest("--collect-only", "suites/correctness/test_prefill_modes.py", *options)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("assay: models"))
    words = set(line.removeprefix("assay: models ").replace(",", "").split())
    assert words == names if options else words > names


def test_header_names_the_runtime_and_its_checks() -> None:
    checks = ("--shuffle", "7", "--sanitize")
    run = run_pytest("-v", "--collect-only", "--device", "cpu", *checks, "-k", "header", __file__)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("assay: runtime"))
    assert "runtime cpu (emulated), compiler " in line
    assert line.endswith(", --shuffle 7 --sanitize")
