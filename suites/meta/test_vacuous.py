"""Engines that would agree with everything: each must be refused, with the reason named.

None of them computes anything wrong where the judge looks; what they return proves nothing, because
it was made before, by another kernel, or by the very thing that it is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference.model import Model
from reference.model.errors import InputError
from reference.model.trace import Trace
from suites.harness import traces
from suites.harness.compare import compare
from suites.harness.fake_engine import CLEAN, FakeEngine, FakePrefill, FakeStep, FakeTail, Fault
from suites.harness.generations import Generations
from suites.harness.traces import compare_traces
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict
from suites.meta import broken, test_recurrent
from suites.meta.models import LLAMA, oracle_model, prompt, tiny_model

PER_TOKEN = ("per-token",)


class _OldResult(FakeEngine):
    """The untraced prefill of a prompt returns what the traced one returned."""

    _known: dict[Any, FakePrefill]

    def _prefill(self, mode: Any, tokens: Sequence[int], trace: Any, *rest: Any) -> FakePrefill:
        self._known = getattr(self, "_known", {})
        result = super()._prefill(mode, tokens, trace, *rest)
        key = (mode, tuple(tokens))
        if trace is not None:
            self._known[key] = result
        return self._known.get(key, result)


class _OldLogits(FakeEngine):
    """The untraced prefill writes no logits: the row of the traced one is still there."""

    _row: Any = None

    def _prefill(self, mode: Any, tokens: Sequence[int], trace: Any, *rest: Any) -> FakePrefill:
        result = super()._prefill(mode, tokens, trace, *rest)
        if trace is not None:
            self._row = result.logits[-1].copy()
            return result
        if self._row is None:
            return result
        self._stamp -= 1
        return replace(result, logits=self._row[None].copy(), tail=self._tail(self._row, mode))

    def run_tail(self, logits: Any) -> list[FakeTail]:
        self._row = logits[-1].copy()
        return super().run_tail(logits)


class _DecodeIsPrefill(FakeEngine):
    """A decode step runs the kernels of a batched prefill."""

    def decode(self, token: int, *, sequence: int = 0) -> FakeStep:
        step = super().decode(token, sequence=sequence)
        return replace(step, routes=self._routes("batched", 1))


class _ReplayIsPerToken(FakeEngine):
    """A batched prefill that is longer than the prompt goes token by token."""

    def prefill_batched(self, tokens: Sequence[int], **options: Any) -> FakePrefill:
        result = super().prefill_batched(tokens, **options)
        longer = len(tokens) > len(prompt(self._model))
        return replace(result, routes=self._routes("per-token", 1)) if longer else result


class _ReplayIsDecode(FakeEngine):
    """The prefill of prompt and decoded tokens returns the row that decoding left."""

    def prefill_batched(self, tokens: Sequence[int], **options: Any) -> FakePrefill:
        result = super().prefill_batched(tokens, **options)
        if len(tokens) > len(prompt(self._model)) and self._last_step is not None:
            row = self._last_step.tail.logits
            return replace(result, logits=row[None], tail=replace(result.tail, logits=row))
        return result


def _stamp_of_one(tail: FakeTail, before: FakeTail | None, mode: str) -> FakeTail:
    return replace(tail, staged_stamp=1, expected_stamp=1, device_stamp=1)


def _further(result: FakePrefill, before: FakePrefill | None) -> FakePrefill:
    return replace(result, position=result.position + 1)


def _fewer(result: FakePrefill, before: FakePrefill | None) -> FakePrefill:
    return replace(result, n_tokens=result.n_tokens - 1)


def _poisoned(result: FakePrefill, before: FakePrefill | None) -> FakePrefill:
    return replace(result, logits_poisoned=1)


def shifted_when_untraced() -> Callable[[Any, int, str], Any]:
    """K as the untraced prefill leaves it: what is read after the first snapshot."""
    reads: dict[int, int] = {}

    def kv(contents: Any, layer: int, mode: str) -> Any:
        reads[layer] = reads.get(layer, 0) + 1
        return broken.shifted_kv(contents, layer, "batched" if reads[layer] == 2 else "none")

    return kv


def transposed_when_untraced() -> Callable[[Any, int, str], Any]:
    reads: dict[int, int] = {}

    def state(held: Any, layer: int, mode: str) -> Any:
        reads[layer] = reads.get(layer, 0) + 1
        return test_recurrent._transposed(held) if (layer, reads[layer]) == (1, 2) else held

    return state


@dataclass(frozen=True)
class Attack:
    id: str
    words: str
    engine: type[FakeEngine] = FakeEngine
    fault: Fault = CLEAN
    modes: tuple[str, ...] = ("per-token", "batched")
    steps: int = 2
    state: State = State.INVALID
    model: str = LLAMA


ATTACKS = [
    Attack("old-result", "a result may be an old one: per-token prefill has stamp", _OldResult),
    Attack("old-result-alone", "a result may be an old one", _OldResult, modes=PER_TOKEN),
    Attack(
        "old-logits",
        "untraced logits differ from the traced run's",
        _OldLogits,
        state=State.DIVERGED,
    ),
    Attack(
        "old-logits-alone",
        "untraced logits differ from the traced run's",
        _OldLogits,
        modes=PER_TOKEN,
        steps=0,
        state=State.DIVERGED,
    ),
    Attack(
        "one-stamp",
        "a result may be an old one: chosen logits has stamp 1",
        fault=Fault(tail=_stamp_of_one),
        modes=PER_TOKEN,
    ),
    Attack(
        "decode-is-prefill", "kernels: decode: never ran matvec Q4_K kparallel", _DecodeIsPrefill
    ),
    Attack("replay-is-per-token", "decoded tokens: never ran matvec_batched", _ReplayIsPerToken),
    Attack("replay-is-decode", "batched prefill and decode step 1 are one buffer", _ReplayIsDecode),
    Attack(
        "position",
        "prefill of 21 tokens says that it fed 21 and is at position 22",
        fault=Fault(prefilled=_further),
        steps=0,
        state=State.DIVERGED,
    ),
    Attack(
        "count",
        "prefill of 21 tokens says that it fed 20 and is at position 21",
        fault=Fault(prefilled=_fewer),
        modes=PER_TOKEN,
        state=State.DIVERGED,
    ),
    Attack(
        "poison-left",
        "logits never written: 1",
        fault=Fault(prefilled=_poisoned),
        modes=PER_TOKEN,
        steps=0,
    ),
    Attack(
        "kv-of-the-graph",
        "untraced KV cache against the traced run's: K of layer 1",
        fault=Fault(kv=shifted_when_untraced()),
        modes=PER_TOKEN,
        steps=0,
        state=State.DIVERGED,
    ),
    Attack(
        "state-of-the-graph",
        "untraced recurrent state against the traced run's: memory of layer 1",
        fault=Fault(state=transposed_when_untraced()),
        modes=PER_TOKEN,
        steps=0,
        state=State.DIVERGED,
        model=test_recurrent.MODEL,
    ),
]


def attack(case: Attack) -> Verdict:
    model: Model = tiny_model(LLAMA) if case.model == LLAMA else oracle_model(case.model)
    options = Options(modes=case.modes, n_decode=case.steps)
    return validate(model, lambda: case.engine(model, case.fault), prompt(model), options)


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.id)
def test_what_proves_nothing_is_refused(case: Attack) -> None:
    verdict = attack(case)
    assert case.words in verdict.summary()
    assert verdict.state is case.state


@pytest.mark.parametrize("modes", [PER_TOKEN, ("batched",), ("per-token", "batched")])
@pytest.mark.parametrize("n_decode", [0, 2])
def test_every_result_of_a_sound_run_is_counted(modes: tuple[str, ...], n_decode: int) -> None:
    model = tiny_model(LLAMA)
    options = Options(modes=modes, n_decode=n_decode)
    verdict = validate(model, lambda: FakeEngine(model), prompt(model), options)
    assert verdict.summary() == "ok"
    checks = {check.name: check for check in verdict.checks}
    probes = checks["sampler tail: chosen logits"].elements
    # Each mode: another prompt, chosen logits, the judged run, traced and untraced.
    replayed = n_decode + 1 if n_decode else 0
    # Production: its prefill where its mode is judged, else one before steps; two turns a mode.
    production = 2 * len(modes) + ("batched" in modes or n_decode > 0)
    wanted = len(modes) * 6 + replayed + probes + production
    assert checks["generation stamps advance"].elements == wanted
    assert ("kernels: decode" in checks) is bool(n_decode)
    assert (f"{modes[0]} prefill: no poison left" in checks) is (len(modes) == 1)


def _tail(stamp: int, row: Any) -> FakeTail:
    return FakeTail(-1, 0, stamp, stamp, 0, stamp, row)


def test_generations_need_new_stamps_and_new_memory() -> None:
    row = np.zeros(8, np.float32)
    made = Generations()
    assert made.check().state is State.INVALID  # nothing was made
    made.add("one", _tail(1, row))
    made.add("two", _tail(2, row.copy()))
    assert (made.check().state, made.check().elements) == (State.OK, 2)
    shared, equal, older = Generations(), Generations(), Generations()
    for other, second in (
        (shared, _tail(2, row[2:])),
        (equal, _tail(1, row.copy())),
        (older, _tail(0, row.copy())),
    ):
        other.add("one", _tail(1, row))
        other.add("two", second)
        assert other.check().state is State.INVALID
    assert "two and one are one buffer" in shared.check().link
    assert "two has stamp 1, one before it had 1" in equal.check().link


def test_a_verdict_that_compared_no_value_is_invalid() -> None:
    counted = Check("kernels: batched prefill", State.OK, 4, unit="launches")
    verdict = Verdict((counted,))
    assert (verdict.state, verdict.exit_code) == (State.INVALID, 3)
    assert verdict.summary() == "invalid: nothing was compared"
    assert verdict.first_broken is None
    worse = Verdict((counted, Check("support", State.UNSUPPORTED, 0, link="no kernel")))
    assert worse.summary() == "unsupported: no kernel"


# --- assay compare -------------------------------------------------------------------------------


def _trace(**meta: Any) -> Trace:
    trace = Trace((1, 2), meta)
    trace.record("attn_norm-0", np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    trace.record("ffn_moe_topk-0", np.array([[1, 2], [3, 4]], np.int32))
    return trace


def test_compare_plants_faults_too() -> None:
    for exact in (True, False):
        verdict = compare_traces(_trace(), _trace(), exact=exact)
        (check,) = [c for c in verdict.checks if c.name == "planted faults are caught"]
        assert (check.state, check.unit) == (State.OK, "faults")
        assert check.elements == 5


def test_traces_that_do_not_say_what_they_are_of_are_refused() -> None:
    facts = {"model_sha256": "a", "architecture": "llama", "logits": "last"}
    stored = {"kv_type_k": "f16", "kv_type_v": "f16"}
    whole = facts | stored
    traces.require_comparable(_trace(**whole), _trace(**whole))
    for field in whole:
        less = {name: value for name, value in whole.items() if name != field}
        with pytest.raises(InputError, match=f"meta has no {field} in either file"):
            traces.require_comparable(_trace(**less), _trace(**less))


def test_a_trace_of_no_known_point_is_refused() -> None:
    trace = _trace()
    trace.record("my point", np.zeros((2, 2), np.float32))
    with pytest.raises(InputError, match="an array is named 'my point', expected a trace point"):
        traces.require_comparable(trace, trace)


@pytest.mark.parametrize("exact", [True, False])
def test_a_blind_compare_is_invalid(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "compare", lambda got, want, limit: compare(want, want, limit))
    verdict = compare_traces(_trace(), _trace(), exact=exact)
    assert verdict.state is State.INVALID
    assert "the judge did not see a planted fault: one value moved" in verdict.summary()
