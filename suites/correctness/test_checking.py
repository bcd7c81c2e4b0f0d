"""The checks' control, and the engine's own faults that they turn into facts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend_hip.device import Device, Kernel, Stream
from backend_hip.engine import Engine
from backend_hip.runtimes import RuntimeInfo
from backend_hip.runtimes.checking import Checking, checking_of, require_checkable, set_checking
from reference.model.errors import DeviceError, InputError, Unsupported
from suites.cli import main
from suites.correctness.checks import checked, finding

MODEL = "tiny-qwen3"
TOKENS = (3, 1, 4)
AMD = RuntimeInfo("amd", None, "hiprtc", "the machine's ROCm")


def test_only_the_cpu_runtime_checks() -> None:
    require_checkable(AMD, Checking())
    for checking in (Checking(shuffle=0), Checking(sanitize=True)):
        with pytest.raises(Unsupported, match=r"supported: --device cpu"):
            require_checkable(AMD, checking)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(InputError, match="expected a seed"):
        Checking(shuffle=seed)


def test_the_checks_switch_any_number_of_times(device: Device) -> None:
    with checked(device, Checking()):
        for seed in range(5):
            for checking in (Checking(seed), Checking(seed, True), Checking(sanitize=True)):
                set_checking(checking)
                assert checking_of() == checking
        set_checking(Checking())
        assert checking_of() == Checking()


# --- planted in the engine ------------------------------------------------------------------------


def _skip_synchronise(patch: pytest.MonkeyPatch, method: str) -> None:
    """Inside one method of the engine the stream is not waited for."""
    original = getattr(Engine, method)

    def broken(self: Engine, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Stream, "synchronise", lambda stream: None)
            return original(self, *arguments)

    patch.setattr(Engine, method, broken)


def test_a_token_that_was_not_waited_for_is_stale(
    device: Device, engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(MODEL)
    with checked(device, Checking(sanitize=True)):
        engine.prefill_batched(TOKENS)
        _skip_synchronise(monkeypatch, "_advance")
        with pytest.raises(DeviceError, match="staging holds token -1 of step -1"):
            engine.step(1)
        monkeypatch.undo()


def test_input_that_is_written_while_its_copy_is_queued_is_reported(
    device: Device, engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(MODEL)
    with checked(device, Checking(sanitize=True)):
        _skip_synchronise(monkeypatch, "_write_step")
        with finding("to the device", "host memory was written while a copy from it was queued"):
            engine.prefill_per_token(TOKENS)
        monkeypatch.undo()


def test_a_kernel_on_a_stream_of_its_own_comes_too_late(
    device: Device, engine_for: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(MODEL)
    with checked(device, Checking(sanitize=True)):
        tokens = [engine.prefill_batched(TOKENS).tail.staged_token]
        engine.reset()
        other, launch = Stream(), Kernel.launch

        def astray(self: Kernel, stream: Stream, *arguments: Any) -> None:
            launch(self, other if self.entry == "argmax" else stream, *arguments)

        monkeypatch.setattr(Kernel, "launch", astray)
        tail = engine.prefill_batched(TOKENS).tail
        monkeypatch.undo()
        assert tail.staged_stamp != tail.expected_stamp
        other.synchronise()
        other.free()
        assert tokens[0] >= 0


# --- the command line -----------------------------------------------------------------------------


def test_the_verdict_says_what_was_checked(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "verdict.json"
    options = ["--device", "cpu", "-n", "2", "--shuffle", "5", "--sanitize", "--json", str(target)]
    with checked(device, Checking()):
        assert main(["validate", MODEL, *options]) == 0
        device.stream.synchronise()
        set_checking(Checking())
    run = json.loads(target.read_text())["run"]
    assert (run["shuffle"], run["sanitize"]) == (5, True)
    assert "--shuffle 5 --sanitize" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_bad_seed_is_one_line(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", MODEL, f"--shuffle={seed}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"assay: --shuffle is {seed}, expected a seed from 0 to 2^64 - 1"


@pytest.mark.parametrize("command", [["generate", MODEL], ["trace", MODEL, "--out", "t.npz"]])
def test_the_reference_has_nothing_to_check(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--side", "reference", "--sanitize"]) == 2
    assert "expected engine" in capsys.readouterr().err
