"""What a row of a speed table must prove before it is timed, and what is refused."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend_hip import Device
from backend_hip.results import StepResult
from reference.model import Model
from suites.benchmark import row_proof
from suites.benchmark.engine_runs import Runner
from suites.benchmark.plans import SpeedRow
from suites.benchmark.row_proof import prove_decode, prove_prefill
from suites.harness.tolerances import RELATED_LOGITS

TOKENS = tuple(range(5, 22))  # 17
DECODE = SpeedRow("decode", "kparallel", "f16", "f16", 17, steps=2)
BATCHED = SpeedRow("batched", "kparallel", "f16", "f16", 17)


@pytest.fixture
def runner(device: Device, load: Callable[[str], Model]) -> Any:
    runner = Runner(load("tiny-llama"), device, context_length=64)
    yield runner
    runner.close()


def test_sound_rows_are_proved(runner: Runner) -> None:
    runner.assume(17)
    assert prove_decode(runner, DECODE, [7]).note == ""
    runner.engine.reset()
    per_token = runner.prefill("per-token", TOKENS)
    assert prove_prefill(runner, BATCHED, TOKENS, per_token).max_abs_diff == 0


def test_a_sequence_that_says_something_else_alone_is_refused(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.assume(17)
    sound = runner.inspect
    together = iter([True])

    def inspect(tokens: Sequence[int], sequences: Sequence[int]) -> list[StepResult]:
        (step,) = sound(tokens, sequences)
        return [step if next(together, False) else replace(step, token=-1)]

    monkeypatch.setattr(runner, "inspect", inspect)
    with pytest.raises(AssertionError, match="1 of 1 sequences emit another token"):
        prove_decode(runner, DECODE, [7])
    other = replace(DECODE, path="serial")
    together = iter([True])
    with pytest.raises(AssertionError, match="1 of 1 sequences emit another token"):
        prove_decode(runner, other, [7])  # kernels of kparallel ran
    together = iter([True])
    monkeypatch.setattr(runner, "step", lambda tokens: [-1 for _ in tokens])
    with pytest.raises(AssertionError, match="read back it is"):
        prove_decode(runner, DECODE, [7])


def test_a_path_that_rounds_otherwise_must_give_logits_of_the_same_network(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, serial = runner.inspect, {"matvec_batched Q4_K serial": 1}
    decode, batched = replace(DECODE, path="serial"), replace(BATCHED, path="serial")

    def moved_by(share: float) -> None:
        """Together, the logits are off by so much of their spread."""
        calls = iter([share])

        def inspect(tokens: Sequence[int], sequences: Sequence[int]) -> list[StepResult]:
            (step,) = sound(tokens, sequences)
            spread = np.float32(next(calls, 0.0) * step.tail.logits.std())
            tail = replace(step.tail, logits=step.tail.logits + spread)
            return [replace(step, tail=tail, routes=serial)]

        monkeypatch.setattr(runner, "inspect", inspect)

    runner.assume(17)
    moved_by(0.9 * RELATED_LOGITS)
    assert prove_decode(runner, decode, [7]).note == "1 of 1 tokens as alone"
    for share in (1.1 * RELATED_LOGITS, math.nan):
        moved_by(share)
        with pytest.raises(AssertionError, match="of their spread other together than alone"):
            prove_decode(runner, decode, [7])
    runner.engine.reset()
    per_token = runner.prefill("per-token", TOKENS)
    monkeypatch.setattr(row_proof, "require_route", lambda *arguments: None)
    assert prove_prefill(runner, batched, TOKENS, per_token).note == "logits off by 0"
    other = replace(per_token, logits=np.roll(per_token.logits, 1))
    with pytest.raises(AssertionError, match="of their spread other than per-token prefill"):
        prove_prefill(runner, batched, TOKENS, other)


@pytest.mark.parametrize(("bit", "reason"), [(0, "logits differ from"), (30, "not finite|differ")])
def test_wrong_batched_logits_are_refused(runner: Runner, bit: int, reason: str) -> None:
    runner.engine.reset()
    per_token = runner.prefill("per-token", TOKENS)
    logits = per_token.logits.copy()
    logits.view(np.uint32)[0, 7] ^= 1 << bit
    with pytest.raises(AssertionError, match=reason):
        prove_prefill(runner, BATCHED, TOKENS, replace(per_token, logits=logits))


def test_batched_prefill_that_is_dead_code_is_refused(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.engine.reset()
    per_token = runner.prefill("per-token", TOKENS)
    monkeypatch.setattr(runner.engine, "prefill_batched", runner.engine.prefill_per_token)
    for path in ("kparallel", "serial"):
        with pytest.raises(AssertionError, match=f"batched {path} ran as per-token prefill"):
            prove_prefill(runner, replace(BATCHED, path=path), TOKENS, per_token)
