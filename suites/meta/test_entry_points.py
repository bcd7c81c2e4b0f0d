"""Faults in what production calls, planted one by one, in engines that are right elsewhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from suites.harness.entry_points import NAME
from suites.harness.fake_engine import FakeEngine, FakePrefill
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict
from suites.meta.models import LLAMA, prompt, tiny_model

BOTH = ("per-token", "batched")


class _DropsAToken(FakeEngine):
    def prefill(self, tokens: Sequence[int]) -> FakePrefill:
        return super().prefill(tokens[1:] or tokens)


class _OtherToken(FakeEngine):
    def prefill(self, tokens: Sequence[int]) -> FakePrefill:
        return super().prefill((tokens[0] + 1, *tokens[1:]))


class _SwitchIgnored(FakeEngine):
    def prefill(self, tokens: Sequence[int]) -> FakePrefill:
        return self.prefill_per_token(tokens)


class _OldResult(FakeEngine):
    """Hands over what the last batched prefill of these tokens returned, after running."""

    _old: FakePrefill | None = None

    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> FakePrefill:
        result = super().prefill_batched(tokens, **rest)
        if list(tokens) == list(prompt(tiny_model(LLAMA))):
            self._old = self._old or result
        return result

    def prefill(self, tokens: Sequence[int]) -> FakePrefill:
        result = super().prefill(tokens)
        return self._old or result


class _ReturnsTheFedToken(FakeEngine):
    def step(self, token: int, *, sequence: int = 0) -> int:
        super().step(token, sequence=sequence)
        return token


class _StepsTwice(FakeEngine):
    def step(self, token: int, *, sequence: int = 0) -> int:
        staged = super().step(token, sequence=sequence)
        super().step(token, sequence=sequence)
        return staged


class _BatchedFromZero(FakeEngine):
    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> FakePrefill:
        self._reference.reset()
        return super().prefill_batched(tokens, **rest)


class _PerTokenFromZero(FakeEngine):
    def prefill_per_token(self, tokens: Sequence[int], **rest: Any) -> FakePrefill:
        self._reference.reset()
        return super().prefill_per_token(tokens, **rest)


class _ForgetsTheFirstTurn(FakeEngine):
    """The position goes on, and what was there before is fed as the second turn's own tokens."""

    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> FakePrefill:
        before = self.position
        if before:
            self._reference.reset()
            for _ in range(before):
                self._reference.decode(int(tokens[0]))
        return super().prefill_batched(tokens, **rest)


def judged(
    engine: type[FakeEngine], modes: tuple[str, ...] = BOTH, n_decode: int = 2, **build: Any
) -> Verdict:
    model = tiny_model(LLAMA)
    options = Options(modes=modes, n_decode=n_decode)
    return validate(model, lambda: engine(model, **build), prompt(model), options)


def dropped_token() -> Verdict:
    return judged(_DropsAToken)


def _entry(verdict: Verdict) -> Check:
    (check,) = [check for check in verdict.checks if check.name == NAME]
    return check


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (_DropsAToken, "production prefill: position is"),
        (_OtherToken, "production prefill: logits differ from the judged prefill"),
        (_SwitchIgnored, "production prefill: ran per-token, the switch 'on' means batched"),
        (_ReturnsTheFedToken, "production step 0: token"),
        (_StepsTwice, "production step 0: position is"),
        (_BatchedFromZero, "second prefill without a reset, batched: position is"),
        (_PerTokenFromZero, "second prefill without a reset, per-token: position is"),
        (_ForgetsTheFirstTurn, "second prefill without a reset, batched: logits differ"),
    ],
)
def test_only_this_check_sees_it(engine: type[FakeEngine], words: str) -> None:
    verdict = judged(engine)
    assert [check.name for check in verdict.checks if check.state is not State.OK] == [NAME]
    assert verdict.state is State.DIVERGED
    assert words in verdict.summary()


def test_an_old_result_has_an_old_stamp() -> None:
    verdict = judged(_OldResult)
    assert verdict.state is State.INVALID
    assert "production prefill has stamp" in verdict.summary()


@pytest.mark.parametrize("modes", [("per-token",), ("batched",), BOTH])
@pytest.mark.parametrize("n_decode", [0, 2])
@pytest.mark.parametrize("switch", ["on", "off", "validate"])
def test_a_sound_engine_passes(modes: tuple[str, ...], n_decode: int, switch: str) -> None:
    verdict = judged(FakeEngine, modes, n_decode, batched_prefill=switch)
    assert verdict.summary() == "ok"
    check = _entry(verdict)
    assert check.elements > tiny_model(LLAMA).spec.vocab_size
    meant = {"on": "batched", "off": "per-token"}.get(switch)
    assert (f"{meant} prefill" in check.detail.split(", ")) is (meant in modes)
    assert any("production prefill was not run" in note for note in verdict.notes) is (
        meant not in modes
    )
    assert ("2 steps" in check.detail) is (n_decode == 2)


def test_on_a_bounded_path_the_second_turn_has_the_limit_of_the_pair() -> None:
    model = tiny_model(LLAMA)
    options = Options(n_decode=1, path="serial")
    tokens = prompt(model)
    sound = validate(model, lambda: FakeEngine(model, path="serial"), tokens, options)
    assert sound.summary() == "ok"
    wrong = validate(model, lambda: _ForgetsTheFirstTurn(model, path="serial"), tokens, options)
    assert "second prefill without a reset, batched: logits differ" in wrong.summary()
    assert np.isfinite(_entry(wrong).measured or np.nan)


def test_a_prompt_of_one_token_has_no_second_turn() -> None:
    model = tiny_model(LLAMA)
    verdict = validate(model, lambda: FakeEngine(model), prompt(model)[:1], Options(n_decode=1))
    assert verdict.summary() == "ok"
    assert "a prompt of one token has no second turn: none was fed" in verdict.notes
    assert _entry(verdict).elements > 0
