"""Every kind of check that a verdict can hold is turned red by a planted fault.

`PLANTS` has a fault for each row of check_kinds.py, planted where that kind judges: in the fake
engine, in the judge, or in the data that it gets. A row without one fails, and so does a fault that
leaves its kind green.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from reference.model.errors import DeviceError, Unsupported
from reference.model.trace import Trace
from suites.commands import compare as compare_command
from suites.harness import compare as compare_module
from suites.harness import replay
from suites.harness.check_kinds import CHECK_KINDS, kind_of, kinds_seen
from suites.harness.compare import compare
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault, patched, stale
from suites.harness.routing import RoutingJudge
from suites.harness.tail import BrokenLink
from suites.harness.tail_probe import told_apart
from suites.harness.traces import compare_traces
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict, check_of, device_failed
from suites.meta import (
    broken,
    test_batch_decode,
    test_entry_points,
    test_patched_kernel,
    test_recurrent,
    test_vacuous,
    test_validate,
)
from suites.meta.models import LLAMA, QWEN3, oracle_model, prompt, tiny_model

Judge = Callable[[], Verdict]
KNOWN = {case.id: case for case in test_validate.PLANTED}
STATES = {case.id: case.fault for case in test_recurrent.PLANTED}
STEPS = 2


def _fake(fault: Fault, name: str = LLAMA, **changes: Any) -> Judge:
    def judge() -> Verdict:
        model = tiny_model(name)
        options = Options(n_decode=STEPS, **changes)
        dense = test_validate.DENSE.setdefault(name, {})
        return validate(
            model, lambda: FakeEngine(model, fault), prompt(model), options, dense=dense
        )

    return judge


def _known(name: str) -> Judge:
    return _fake(KNOWN[name].fault, KNOWN[name].model)


def _attack(name: str) -> Judge:
    (case,) = [case for case in test_vacuous.ATTACKS if case.id == name]
    fault = case.fault
    if name == "state-of-the-graph":  # counts its reads
        fault = Fault(state=test_vacuous.transposed_when_untraced())
    return lambda: test_vacuous.attack(replace(case, fault=fault))


def _recurrent(name: str) -> Judge:
    return lambda: test_recurrent._validate(STATES[name])


def _unsupported() -> Verdict:
    def refuse() -> Any:
        raise Unsupported("registry: no kernel for matvec with Q6_K on path kparallel")

    model = tiny_model(LLAMA)
    return validate(model, refuse, prompt(model))


class _OtherTokens(FakeEngine):
    """Traces another prompt than the one that it was given."""

    def prefill_batched(self, tokens: Any, *, trace: Trace | None = None, **rest: Any) -> Any:
        result = super().prefill_batched(tokens, trace=trace, **rest)
        if trace is not None:
            trace.tokens = tuple(tokens[::-1])
        return result


def _other_tokens() -> Verdict:
    model = tiny_model(LLAMA)
    return validate(model, lambda: _OtherTokens(model), prompt(model), Options(n_decode=0))


def _late_positions(tables: Callable[..., Any]) -> Callable[..., Any]:
    """Positions behind the prompt are one too high."""
    length = len(prompt(tiny_model(LLAMA)))
    return lambda fr, pos, m: tables(fr, np.where(pos >= length, pos + 1, pos), m)


DECODED_ROPE = Fault(lambda: patched("reference.ops.rope_tables", _late_positions))


def _shifted_in_one_run() -> Verdict:
    return _fake(Fault(kv=test_validate._shifted_when_untraced()))()


def _routing() -> Verdict:
    """The engine took the two worst experts of eight."""
    model = oracle_model("qwen3moe")
    judge = RoutingJudge(model.spec)
    logits = np.linspace(1.0, 0.0, 8)[None]
    judge.feed(0, {0: np.array([[6, 7]])}, {0: logits}, {0: logits}, {0: logits})
    return Verdict((judge.check(),))


def _blind_to_nan() -> Verdict:
    def lenient(got: Any, want: Any, limit: Any) -> Any:
        return replace(compare(got, want, limit), ok=True)

    with mock.patch.object(compare_module, "compare", lenient):
        return _fake(CLEAN)()


def _self_test() -> Verdict:
    open_copy = test_patched_kernel._copies(tiny_model(LLAMA), changed=CLEAN)
    return Verdict((test_patched_kernel._check(open_copy),))


def _trace(value: float, tokens: tuple[int, ...] = (1, 2)) -> Trace:
    trace = Trace(tokens)
    trace.record("attn_norm-0", np.array([[value, 1.0], [2.0, 3.0]], np.float32))
    return trace


def _one(check: Check) -> Judge:
    return lambda: Verdict((check,))


def _same_file() -> Verdict:
    here = Path(__file__)
    return Verdict((compare_command._nothing_proven(Namespace(got=here, want=here)),))


WRONG_LOGITS = check_of(
    "per-token logits against the reference", compare(np.ones(1), np.full(1, 2.0), 0.5)
)

# kind -> what is planted, and how the verdict over it is got.
PLANTS: Mapping[str, tuple[str, Judge]] = {
    "support": ("no kernel for Q6_K", _unsupported),
    "device": ("an illegal address", lambda: Verdict((device_failed(DeviceError("illegal")),))),
    "trace-tokens": ("another prompt is traced", _other_tokens),
    "kv-write": ("K is written one slot too far", _known("kv-slot")),
    "recurrent-memory": ("the memory is transposed", _recurrent("transposed")),
    "local": ("RoPE is one position late", _known("rope")),
    "local-second-mode": ("another RoPE base token by token", _known("only-per-token-numerics")),
    "local-decoded": ("RoPE is late behind the prompt", _fake(DECODED_ROPE)),
    "local-narrow-flow": (
        "RoPE is late in flows of few columns",
        test_batch_decode.wrong_narrow_flow,
    ),
    "logits": ("a NaN logit", _known("nan-logit")),
    "told-apart": ("a model of zeros", lambda: Verdict((told_apart(np.zeros(8)),))),
    "routes": ("per-token kernels in both modes", _known("same-route")),
    "two-modes": ("a result of the other mode", _known("mode-is-a-lie")),
    "separate-results": ("one buffer for both modes", _known("same-buffer")),
    "no-poison": ("a logit that was never written", _known("poison-left")),
    "generations": ("one stamp for all", _attack("one-stamp")),
    "pair-logits": ("one logit off by its last bit", _known("one-ulp")),
    "pair-kv": ("K shifted in one mode", _shifted_in_one_run),
    "pair-state": ("memory off by its last bit", _recurrent("one-ulp-in-one-mode")),
    "eager": ("tracing changes a last bit", _known("traced-differs")),
    "eager-kv": (
        "K shifted in the untraced run",
        _fake(Fault(kv=test_vacuous.shifted_when_untraced()), modes=("batched",)),
    ),
    "eager-state": ("the memory transposed in it", _attack("state-of-the-graph")),
    "kernels": ("a kernel of another path", _known("same-route")),
    "tail-prefill": ("argmax did not run", _known("no-argmax")),
    "tail-decode": ("a stale staging copy", _known("stale-decode")),
    "tail-probes": ("a stale token for chosen logits", _fake(broken.on_tail("chosen", stale))),
    "bundle-tail": (
        "a bundle's tail whose staging was not written",
        _one(replay._link_check("sampler tail", BrokenLink("staging copy", "poison"))),
    ),
    "bundle-run": (
        "a bundle's run that is still not ok",
        _one(Check("validate", State.DIVERGED, 1)),
    ),
    "replay-logits": ("decode is off by last bits", _known("only-decode-one-ulp")),
    "replay-kv": (
        "decode shifts K",
        _fake(Fault(kv=lambda c, layer, mode: broken.shifted_kv(
            c, layer, "batched" if mode == "decode" else "none"))),
    ),
    "replay-state": ("decode transposes the memory", _recurrent("decode-loses-it")),
    "decode": (
        "another head map in decode",
        _fake(Fault(broken.HEAD_MAP, numerics_mode="decode"), QWEN3),
    ),
    "entry-points": ("prefill() drops a token", test_entry_points.dropped_token),
    "batched-decode": ("each row reads its neighbour's token", test_batch_decode.neighbours_token),
    "routing": ("the worst experts", _routing),
    "plants": ("a judge that passes everything", _blind_to_nan),
    "self-test": ("a patch that changes nothing", _self_test),
    "benchmark-logits": ("a logit off by two limits", _one(WRONG_LOGITS)),
    "two-traces": ("one file twice", _same_file),
    "same-prompt": ("another prompt", lambda: compare_traces(_trace(1), _trace(1, (2, 1)))),
    "trace-point": ("one value moved", lambda: compare_traces(_trace(1), _trace(2))),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECK_KINDS, ids=lambda kind: kind.id)
def test_a_planted_fault_turns_the_kind_red(
    kind: Any, record_property: Callable[[str, object], None]
) -> None:
    assert kind.id in PLANTS, f"no planted fault turns {kind.id} red: add one"
    what, judge = PLANTS[kind.id]
    red = {c.name: c.state.value for c in judge().checks if c.state is not State.OK}
    mine = {name: state for name, state in red.items() if kind_of(name) is kind}
    print(f"{kind.id}: {what} ({', '.join(mine) or 'stays green'})")
    record_property(kind.id, what)
    assert mine, f"{what} leaves {kind.id} green; red are {sorted(red)}"
    assert set(mine.values()) <= set(kind.failed)


def test_the_table_is_sound() -> None:
    assert set(PLANTS) == {kind.id for kind in CHECK_KINDS}
    assert len({kind.id for kind in CHECK_KINDS}) == len(CHECK_KINDS)
    assert all(kind.proves and kind.failed for kind in CHECK_KINDS)
    states = {state.value for state in State} - {"ok"}
    assert all(set(kind.failed) <= states for kind in CHECK_KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("local: kv_write", "kv-write"),
        ("local, per-token: kv_write", "kv-write"),
        ("local: rope", "local"),
        ("local, per-token: 11 sound ops", "local-second-mode"),
        ("local, decoded positions: 1 sound op", "local-decoded"),
        ("local, narrow flow: 7 sound ops", "local-narrow-flow"),
        ("kernels: batched prefill, traced", "kernels"),
        ("kernels: batched prefill, narrow flow", "kernels"),
        ("eager batched with trace equals untraced, narrow flow", "eager"),
        ("decode equals per-token prefill of the same tokens: KV contents", "replay-kv"),
        ("l_out-12", "trace-point"),
    ],
)
def test_names_have_the_kind_that_they_say(name: str, kind: str) -> None:
    assert kind_of(name).id == kind


@pytest.mark.parametrize("name", ["", "speed", "local", "prefill pair: speed", "logits: x"])
def test_a_check_of_no_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no kind has a check named"):
        Verdict((Check(name, State.OK, 1),))


@dataclass(frozen=True)
class _Outcome:
    fault: str
    red: tuple[str, ...]


def test_kinds_seen_counts_each_fault_once_a_kind() -> None:
    outcomes = [
        _Outcome("a", ("local: rope", "local: attention", "local: kv_write")),
        _Outcome("b", ("device error",)),
        _Outcome("c", ("local: rope",)),
    ]
    seen = kinds_seen(outcomes)
    assert seen["local"] == ["a", "c"]
    assert seen["kv-write"] == ["a"]
    assert seen["decode"] == []
    assert list(seen) == [kind.id for kind in CHECK_KINDS]
