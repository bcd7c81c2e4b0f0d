"""The machinery of the fault catalogue: rows, copies of the engine, processes, score."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import backend_hip.engine
import backend_hip.ops
from fixtures.faults import Change, Fault, find_fault, load_faults, read_fault
from reference.model.errors import InputError
from suites import cli
from suites.commands import faults as command
from suites.harness.fault_models import fault_model
from suites.harness.fault_pool import Job, run_jobs
from suites.harness.fault_run import LOOKS, Outcome, is_supported, outcome_of, run_fault
from suites.harness.fault_score import score_of
from suites.harness.patched import ROOT, patched_engine

OPS = "backend_hip/ops.py"
GOOD: dict[str, Any] = {
    "id": "a-fault",
    "what": "something",
    "model": "tiny-qwen3",
    "where": "linear",
    "tier": "fast",
    "changes": [{"file": OPS, "old": "a", "new": "b"}],
}
STALE = "stale-staging"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tier": "slow"}, "tier is slow, expected one of"),
        ({"changes": []}, "changes is empty"),
        ({"changes": [{"file": OPS, "old": "a", "new": "a"}]}, "old and new are the same"),
        ({"changes": [{"file": OPS, "old": "a"}]}, "a change has wrong fields"),
        ({"changes": [{"file": "suites/cli.py", "old": "a", "new": "b"}]}, "file is suites/cli.py"),
        (
            {"changes": [{"file": "backend_hip/runtimes/build.py", "old": "a", "new": "b"}]},
            "outside runtimes",
        ),
        ({"changes": [{"file": "backend_hip/../x", "old": "a", "new": "b"}]}, "expected one of"),
        ({"edit": "other"}, "edit is other"),
        ({"when": "now"}, "has ['when']"),
    ],
)
def test_a_wrong_row_is_refused(change: dict[str, Any], message: str) -> None:
    assert read_fault("kv", GOOD).id == "a-fault"
    with pytest.raises(InputError) as caught:
        read_fault("kv", {**GOOD, **change})
    assert message in str(caught.value)


def test_a_row_that_lacks_a_field_is_refused() -> None:
    for field in GOOD:
        row = {name: value for name, value in GOOD.items() if name != field}
        with pytest.raises(InputError, match="lacks"):
            read_fault("kv", row)


@pytest.mark.parametrize(("text", "count"), [("none", 0), ("a tab and a tab", 2)])
def test_a_change_must_be_there_once(text: str, count: int) -> None:
    with pytest.raises(InputError, match=f"is {count} times in"):
        Change(OPS, "a tab", "x").apply(text)
    assert Change(OPS, "a tab", "x").apply("on a tab of") == "on x of"


def test_an_unknown_id_names_near_ones() -> None:
    with pytest.raises(InputError, match=STALE):
        find_fault("stale-logits")


def test_every_change_fits_the_source_as_it_is() -> None:
    """Without running anything, so that a changed engine shows its dead faults at once."""
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in _changed_files()}
    dead = []
    for fault in load_faults().values():
        texts = dict(sources)
        try:
            for change in fault.changes:
                texts[change.file] = change.apply(texts[change.file])
            for file in {change.file for change in fault.changes if change.file.endswith(".py")}:
                compile(texts[file], file, "exec")
        except (InputError, SyntaxError) as error:
            dead.append(f"{fault.id}: {error}")
    assert dead == []


def _changed_files() -> set[str]:
    return {change.file for fault in load_faults().values() for change in fault.changes}


def test_a_copy_leaves_the_engine_as_it_is() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("backend")}
    path = list(sys.path)
    with patched_engine(find_fault(STALE).changes) as copy:
        assert copy.engine is not backend_hip.engine.Engine
        assert copy.changed_files == ("backend_hip/sampler.py",)
        assert sys.modules["backend_hip.ops"] is backend_hip.ops
    after = {name: module for name, module in sys.modules.items() if name.startswith("backend")}
    assert after == before
    assert sys.path == path


def _fault(**changes: Any) -> Fault:
    return replace(find_fault(STALE), **changes)


@pytest.mark.parametrize(
    "change",
    [
        Change(OPS, "not in any file", "x"),
        Change(OPS, "def embed(", "def embed("[:-1]),
        Change(
            "backend_hip/kernels/argmax.hip", "best = wave_best(best);\n    if", "no C++\n    if"
        ),
        Change(OPS, "def rope(", "def other_name("),
    ],
    ids=["not-there", "no-python", "no-kernel", "no-such-function"],
)
def test_a_fault_that_can_not_run_is_dead_and_not_caught(change: Change) -> None:
    outcome = run_fault(_fault(changes=(change,)), "fast")
    assert outcome.dead
    assert not outcome.caught
    assert score_of([outcome], "fast").problems(complete=False)


def test_no_change_of_meaning_is_a_miss() -> None:
    """What changes nothing must not be caught: the judge does not know that it was planted."""
    outcome = run_fault(_fault(changes=(Change(OPS, "def embed(", "def embed ("),)), "fast")
    assert (outcome.dead, outcome.tier, outcome.caught) == ("", "", False)
    assert score_of([outcome], "fast").problems(complete=False) == [f"missed: {STALE} (sampler)"]


def test_the_place_that_was_named_is_judged() -> None:
    right = run_fault(find_fault(STALE), "fast")
    assert (right.tier, right.localised) == ("fast", True)
    wrong = run_fault(_fault(where="rope"), "fast")
    assert (wrong.tier, wrong.localised) == ("fast", False)
    assert score_of([wrong], "fast").problems(complete=False)[0].startswith("misplaced: ")


def _outcome(**changes: Any) -> Outcome:
    return replace(Outcome("x", "kv", "fast", "fast", "plain", "diverged", "link", True), **changes)


def test_a_score_of_nothing_is_not_good() -> None:
    assert score_of([], "fast").problems(complete=True)
    assert score_of([_outcome()], "fast").problems(complete=False) == []


def test_the_categories_that_must_be_whole_are() -> None:
    many = [_outcome(fault=f"f{n}", category=c) for n, c in enumerate(["sampler", "control"] * 50)]
    late = _outcome(tier="full", wanted_tier="full")
    problems = score_of([*many, _outcome(), late], "full").problems(complete=True)
    assert problems == ["fast tier caught 50.0% of kv"]


# --- processes ------------------------------------------------------------------------------------


def _value(number: int) -> int:
    return number + 1


def _raise() -> None:
    raise KeyError("gone")


def _die() -> None:
    os._exit(7)


def _hang() -> None:
    time.sleep(600)


def test_jobs_end_whatever_becomes_of_their_processes() -> None:
    jobs = [
        Job("value", _value, (1,)),
        Job("raise", _raise, ()),
        Job("die", _die, ()),
        Job("hang", _hang, ()),
    ]
    done = {end.job.name: end for end in run_jobs(jobs, workers=2, time_limit_s=20.0)}
    assert done["value"].value == 2
    assert done["raise"].error.startswith("KeyError: 'gone' (test_catalogue.py:")
    assert done["die"].error == "the process ended with code 7"
    assert done["hang"].error == "no end within 20 s"


def _meet(folder: Path, mine: str, other: str) -> str:
    """Ends once the process of the other name is there too."""
    (folder / mine).touch()
    _until((folder / other).exists)
    return mine


def test_the_number_of_processes_may_grow_meanwhile(tmp_path: Path) -> None:
    jobs = [Job("a", _meet, (tmp_path, "a", "b")), Job("b", _meet, (tmp_path, "b", "a"))]
    asked = iter([1, 1])
    done = run_jobs(jobs, workers=lambda: next(asked, 2), time_limit_s=20.0)
    assert {end.job.name: end.value for end in done} == {"a": "a", "b": "b"}
    assert list(asked) == []


def _leave_files() -> str:
    """What a fault's job leaves when it is killed; the folder that tools would use too."""
    folder = tempfile.mkdtemp(prefix="assay-fault-")
    assert os.path.dirname(folder) == os.environ["TMPDIR"]
    return folder


def _leave_files_and_hang() -> None:
    _leave_files()
    time.sleep(600)


def test_no_temporary_file_outlives_its_run() -> None:
    jobs = [Job("ends", _leave_files, ()), Job("hangs", _leave_files_and_hang, ())]
    done = {end.job.name: end for end in run_jobs(jobs, workers=2, time_limit_s=15.0)}
    assert done["hangs"].error == "no end within 15 s"
    assert not os.path.exists(os.path.dirname(done["ends"].value))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name
)
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "from suites.harness.fault_pool import Job, run_jobs\n"
        "from suites.meta.test_catalogue import _leave_files_and_hang\n"
        "if __name__ == '__main__':\n"
        "    list(run_jobs([Job(n, _leave_files_and_hang, ()) for n in 'ab'], workers=2))\n"
    )
    script, temporary, log = tmp_path / "run.py", tmp_path / "temporary", tmp_path / "log"
    script.write_text(program)
    temporary.mkdir()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
            stderr=stream,
        )
        _until(lambda: len(list(temporary.glob("assay-faults-*/assay-fault-*"))) == 2)
        process.send_signal(number)
        process.wait(timeout=30)
    _until(lambda: not list(temporary.glob("assay-*")))
    said = log.read_text()  # of the run itself; its processes end without a word
    assert "Error" not in said
    assert said.count("Traceback") == (0 if number is signal.SIGKILL else 1)
    assert said.splitlines()[-1:] in ([], ["KeyboardInterrupt"])


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, "not reached within 60 s"
        time.sleep(0.05)


def test_a_process_that_ended_without_a_word_proves_nothing() -> None:
    outcome = outcome_of(STALE, None, "the process ended with code 7")
    assert outcome.dead == "the process ended with code 7"


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-of-this-name"], "no fault is named nothing-of-this-name"),
        (["--category", "tea"], "--category is tea, expected one of sampler"),
        (["--category", "kv", "rope-*"], "no fault is named rope-*"),
        (["--jobs", "-1"], "--jobs is -1, expected"),
        (["--clean", "0"], "--clean is 0, expected 1 or more"),
        (["--clean", "3", STALE], "--clean runs the engine as it is"),
        (["--json", "/nowhere/f.json", STALE], "--json is /nowhere/f.json"),
    ],
)
def test_a_wrong_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["faults", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_a_second_plant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["validate", "tiny-qwen3", "--plant", STALE, "--plant", STALE])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument --plant: got {STALE} and {STALE}, expected one fault at a time" in line


def test_a_copy_that_can_not_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["validate", "tiny-qwen3", "--tokens", "1,2", "--device", "cpu", "--plant", STALE]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", full)
        assert cli.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("assay: patched engine: a copy of backend_hip can't be written to ")
    assert "(No space left on device); TMPDIR names another folder" in line

    def partly(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr("shutil.copytree", partly)
    assert cli.main(arguments) == 2
    assert "No space left on device: 'b'" in capsys.readouterr().err.splitlines()[-1]


def test_the_list_holds_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in load_faults())


def test_filters_add_up() -> None:
    assert [fault.id for fault in command.choose([STALE], "sampler")] == [STALE]
    assert len(command.choose(["stale-*"], None)) > 1


def test_a_look_that_the_engine_has_no_kernel_for_is_passed_over() -> None:
    """Its refusal would count as a fault that was seen, and hide the looks behind it."""
    looks = {look.name: look for look in LOOKS}
    odd = fault_model("tiny-llama-odd")
    assert {name for name, look in looks.items() if not is_supported(odd, look)} == {"blocks"}
    assert all(is_supported(fault_model("tiny-qwen3"), look) for look in LOOKS)
