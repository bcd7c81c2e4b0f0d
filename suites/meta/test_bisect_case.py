"""A case file is read as it is meant or refused in one line; a probe's ending means one thing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reference.model.errors import InputError
from suites.harness import probe_main
from suites.harness.case import Case, case_model, load_case, parse_case
from suites.harness.commit_bisect import Mark, Run
from suites.harness.commit_probe import Probe, make_overlay, probe_environment, read_run, reason

FULL = {
    "schema": "assay.case",
    "schema_version": 1,
    "note": "what this shows",
    "model": "tiny-llama",
    "tokens": [1, 2, 3],
    "steps": 1,
    "prefill": ["per-token", "batched"],
    "path": "kparallel",
    "kv_type_k": "f16",
    "kv_type_v": "f32",
    "device": "cpu",
    "max_cols": 4,
    "chunk": 2,
    "broken": "inp_embd",
}


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_full_case(tmp_path: Path) -> None:
    case = load_case(_write(tmp_path / "case.json", json.dumps(FULL)))
    assert case.arguments() == [
        "--tokens=1,2,3",
        "--steps=1",
        "--prefill=per-token,batched",
        "--path=kparallel",
        "--kv-type-k=f16",
        "--kv-type-v=f32",
        "--device=cpu",
        "--max-cols=4",
        "--chunk=2",
    ]
    assert case.to_json() == {key: value for key, value in FULL.items() if key != "note"}
    assert parse_case(case.to_json(), "again") == case


def test_a_case_names_only_what_it_needs() -> None:
    assert parse_case({"model": "tiny-llama"}, "c").arguments() == []
    assert Case("m", prompt="--json").arguments() == ["--prompt=--json"]
    assert Case("m").to_json() == {"schema": "assay.case", "schema_version": 1, "model": "m"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": ""}, 'model is ""'),
        ({"model": 3}, "model is 3, expected a registered name or a GGUF file"),
        ({"schema": "assay.verdict"}, "expected 'assay.case'"),
        ({"schema_version": 2}, "schema_version is 2, expected 1"),
        ({"schema_version": True}, "schema_version is true"),
        ({"token": [1]}, "has the key 'token', expected only schema,"),
        ({"tokens": []}, "tokens is []"),
        ({"tokens": [1, -1]}, "expected a list of token ids"),
        ({"tokens": [1, True]}, "expected a list of token ids"),
        ({"tokens": "1,2"}, "expected a list of token ids"),
        ({"tokens": [1.0]}, "expected a list of token ids"),
        ({"prompt": "text"}, "has tokens and a prompt"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": None}, "steps is null"),
        ({"prefill": "batched"}, "prefill is"),
        ({"device": ["cpu"]}, "device is"),
        ({"max_cols": 0}, "max_cols is 0"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"broken": "("}, "expected a regular expression"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_case_that_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = _write(tmp_path / "case.json", json.dumps({**FULL, **change}))
    with pytest.raises(InputError) as raised:
        load_case(path)
    assert text in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[1]", "expected an object"),
        ("{}", "has no model"),
        ("[" * 100_000, "is no JSON"),
        ('{"model": "m", "steps": NaN}', "steps is NaN"),
    ],
)
def test_a_file_that_is_no_case(tmp_path: Path, content: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        load_case(_write(tmp_path / "case.json", content))


def test_a_case_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="can't be read"):
            load_case(path)
    binary = tmp_path / "b"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no JSON"):
        load_case(binary)


def test_a_models_path_counts_from_the_case_file(tmp_path: Path) -> None:
    model = _write(tmp_path / "m.gguf", "x")
    assert case_model(Case("m.gguf"), tmp_path, print) == model.resolve()
    assert case_model(Case("./m.gguf"), tmp_path, print) == model.resolve()
    built = case_model(Case("tiny-llama"), tmp_path, print)
    assert built.is_absolute()
    assert built.is_file()
    with pytest.raises(InputError, match="there is no file"):
        case_model(Case("smollm7"), tmp_path, print)


# --- what a probe's ending means ------------------------------------------------------------------


def _verdict(state: str, **more: Any) -> dict[str, Any]:
    summary = state if state == "ok" else f"{state}: inp_embd (embed)"
    return {
        "schema": "assay.verdict", "state": state, "summary": summary, "elements": 5, **more
    }  # fmt: skip


TRACEBACK = "Traceback (most recent call last):\n  File 'x'\nModuleNotFoundError: No module x\n"
COMPILER = "assay: compile: embed.hip failed, X\n    f.h: In function\n    f.h:1: error: y\n"
BROKEN_LINK = "diverged: inp_embd (embed)"


@pytest.mark.parametrize(
    ("code", "document", "log", "broken", "wanted"),
    [
        (0, _verdict("ok"), "", "", Run(Mark.GOOD, "ok")),
        (1, _verdict("diverged"), "", "", Run(Mark.BAD, BROKEN_LINK)),
        (3, _verdict("invalid"), "", "", Run(Mark.BAD, "invalid: inp_embd (embed)")),
        (1, _verdict("diverged"), "", "inp_.*embed", Run(Mark.BAD, BROKEN_LINK)),
        (
            *(1, _verdict("diverged"), "", "l_out"),
            Run(Mark.SKIP, f"another failure: {BROKEN_LINK} (the case expects 'l_out')"),
        ),
        (2, _verdict("unsupported"), "", "", Run(Mark.SKIP, "unsupported: inp_embd (embed)")),
        # Python ends with 1 where an import fails: the code of a divergence.
        (
            *(1, None, TRACEBACK, ""),
            Run(Mark.SKIP, "does not build or run: ModuleNotFoundError: No module x"),
        ),
        (
            *(3, None, COMPILER, ""),
            Run(
                Mark.SKIP,
                "does not build or run: compile: embed.hip failed, X; f.h:1: error: y",
            ),
        ),
        (2, None, "assay: path is q\n", "", Run(Mark.SKIP, "does not build or run: path is q")),
        (0, None, "", "", Run(Mark.SKIP, "does not build or run: it gave no reason")),
        (-11, None, "", "", Run(Mark.SKIP, "ended by SIGSEGV: it gave no reason")),
        (0, _verdict("diverged"), "", "", Mark.SKIP),
        (1, _verdict("ok"), "", "", Mark.SKIP),
        (-11, _verdict("ok"), "", "", Mark.SKIP),
        (0, _verdict("ok", elements=0), "", "", Mark.SKIP),
        (0, _verdict("ok", elements="many"), "", "", Mark.SKIP),
        (0, _verdict("splendid"), "", "", Mark.SKIP),
        (probe_main.FOREIGN, _verdict("ok"), "assay: x was imported\n", "", Mark.SKIP),
    ],
)
def test_what_an_ending_means(
    code: int, document: dict[str, Any] | None, log: str, broken: str, wanted: Run | Mark
) -> None:
    got = read_run(code, document, log, broken)
    assert got == wanted if isinstance(wanted, Run) else got.mark is wanted
    assert "\n" not in got.text


def test_the_reason_is_the_last_of_assays_own_lines() -> None:
    assert (
        reason("assay: note\nmore\nassay: the reason\n  assay: /usr/bin/g++ ended\n")
        == "the reason"
    )
    assert reason("first\nlast\n\n") == "last"


# --- the process ----------------------------------------------------------------------------------


def _tree(folder: Path, main: str) -> Path:
    """A tree whose `assay` is the text `main`."""
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / "__init__.py").write_text("")
    (folder / "suites" / "__main__.py").write_text(main)
    return folder


def _probe(tmp_path: Path, main: str, timeout_s: float = 60.0) -> Probe:
    return Probe(Case("m"), Path("m.gguf"), _tree(tmp_path / "tree", main), tmp_path, timeout_s)


WRITE = (
    "import json, sys\n"
    "path = sys.argv[-1].removeprefix('--json=')\n"
    "document = {'schema': 'assay.verdict', 'state': 'ok', 'summary': 'ok', 'elements': 1}\n"
    "open(path, 'w').write(json.dumps(document))\n"
)


def test_a_tree_is_run_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    main = f"import os\nassert os.getcwd() == {str(tmp_path / 'tree')!r}\n{WRITE}"
    assert _probe(tmp_path, main)() == Run(Mark.GOOD, "ok")
    assert not list(tmp_path.rglob("__pycache__"))
    assert not list(tmp_path.glob("tmp*"))


def test_a_package_from_elsewhere_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "installed"
    (elsewhere / "reports").mkdir(parents=True)
    (elsewhere / "reports" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    run = _probe(tmp_path, f"import reports\n{WRITE}")()
    assert run.mark is Mark.SKIP
    assert f"reports was imported from {elsewhere}" in run.text


def test_a_hang_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    started = tmp_path / "child"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    main = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)\n"
    )
    begun = time.monotonic()
    run = _probe(tmp_path, main, timeout_s=3.0)()
    assert run == Run(Mark.SKIP, "hangs: no verdict within 3 s")
    assert time.monotonic() - begun < 30
    for _ in range(100):
        if not _runs(int(started.read_text())):
            break
        time.sleep(0.05)
    assert not _runs(int(started.read_text()))


def _runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_the_environment_of_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("ASSAY_CACHE", "cache")
    monkeypatch.setenv("ASSAY_BATCHED_PREFILL", "0")
    environment = probe_environment(Path("/tree"))
    assert environment["PYTHONPATH"] == f"/tree{os.pathsep}before"
    assert environment["ASSAY_CACHE"] == str(tmp_path / "cache")
    assert "ASSAY_BATCHED_PREFILL" not in environment
    monkeypatch.delenv("ASSAY_CACHE")
    monkeypatch.delenv("PYTHONPATH")
    assert "ASSAY_CACHE" not in probe_environment(Path("/tree"))
    assert probe_environment(Path("/tree"))["PYTHONPATH"] == "/tree"


def test_an_overlay_takes_the_engine_alone(tmp_path: Path) -> None:
    engine = tmp_path / "tree" / "backend_hip"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text("")
    overlay = make_overlay(tmp_path, tmp_path / "tree")
    program = (
        "import backend_hip, reference.ops, suites.harness.verdict, fixtures, reports, sys\n"
        f"sys.path.insert(0, {str(Path(probe_main.__file__).parent)!r})\nimport probe_main\n"
        f"print(list(probe_main.foreign_modules({str(overlay)!r})))\n"
        "print(list(probe_main.foreign_modules('/elsewhere'))[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=probe_environment(overlay),
        capture_output=True,
        text=True,
        check=True,
    )
    own, foreign = done.stdout.splitlines()
    assert own == "[]"
    assert "backend_hip" in foreign
    assert (overlay / "backend_hip").resolve() == engine.resolve()
    assert (overlay / "reference").resolve() == Path(probe_main.__file__).resolve().parents[2] / (
        "reference"
    )


def test_signals_have_names() -> None:
    assert "SIGKILL" in read_run(-signal.SIGKILL, None, "", "").text
    assert "signal 250" in read_run(-250, None, "", "").text
