"""Faults of dispatch, sampler tail and cache in the real engine on the CPU runtime.

Those of single operations are in the catalogue, fixtures/faults.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend_hip import ops, sampler
from backend_hip.device import Device, open_device
from backend_hip.dispatch import Kernels
from backend_hip.engine import Engine
from backend_hip.registry import PATHS, REGISTRY, Registry
from backend_hip.requirements import requirements
from reference.model import Model
from suites.harness.pair import printing_judge
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict
from suites.meta.engine_faults import kernel
from suites.meta.models import GEMMA3, LLAMA, QWEN3, prompt, tiny_model

STEPS = 3
CONTEXT = 64


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


def _validate(
    device: Device,
    name: str = LLAMA,
    engine: type[Engine] = Engine,
    registry: Registry = REGISTRY,
    kv_type: str = "f16",
    path: str = "kparallel",
) -> Verdict:
    model = tiny_model(name)
    options = Options(n_decode=STEPS, path=path, kv_type_k=kv_type, kv_type_v=kv_type)

    def open_engine() -> Engine:
        return engine(
            model,
            device,
            registry=registry,
            path=path,
            kv_type_k=kv_type,
            kv_type_v=kv_type,
            context_length=CONTEXT,
        )

    return validate(model, open_engine, prompt(model), options, context_length=CONTEXT)


@pytest.mark.parametrize("name", [LLAMA, QWEN3, GEMMA3])
def test_the_engine_as_it_is_is_ok(device: Device, name: str) -> None:
    verdict = _validate(device, name)
    assert verdict.summary() == "ok"
    assert all(check.elements > 0 for check in verdict.checks)


# Off by more than sums of kparallel and digits round and by less than serial's may.
WRONG_MATVEC = kernel("matvec.hip", (": sums[r][0];", ": sums[r][0] * 1.00005f;"))


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_decode_kernel_is_named_at_its_op_on_every_path(
    device: Device, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert _validate(device, path=path).summary() == "ok"
    WRONG_MATVEC(monkeypatch)
    verdict = _validate(device, path=path)
    assert verdict.summary() == "diverged: Qcur-0 (linear), per-token prefill"


class _OtherPath(Engine):
    """Asked for one path, multiplies on the other."""

    def _flow(self, tokens: int, **options: Any) -> ops.Flow:
        return replace(super()._flow(tokens, **options), path="kparallel")


def test_a_path_that_did_not_run_is_invalid(device: Device) -> None:
    model = tiny_model(LLAMA)

    def open_engine() -> Engine:
        engine = _OtherPath(model, device, path="serial", fused=False, context_length=CONTEXT)
        rows = requirements(model.spec, model.weights, "kparallel", "f16", "f16")
        engine.kernels = Kernels(device, REGISTRY, rows, {"MAX_COLS": engine.max_cols})
        return engine

    options = Options(n_decode=STEPS, path="serial")
    verdict = validate(model, open_engine, prompt(model), options, context_length=CONTEXT)
    assert verdict.state is State.INVALID
    assert "kernels: batched prefill: never ran matvec_batched " in verdict.summary()
    assert " kparallel too" in verdict.summary()


class _StillPerToken(Engine):
    """The switch says batched, the callers still run per-token."""

    def prefill_batched(self, *arguments: Any, **options: Any) -> Any:
        return self.prefill_per_token(*arguments, **options)


def test_batched_that_runs_per_token_is_invalid(device: Device) -> None:
    verdict = _validate(device, engine=_StillPerToken)
    assert verdict.exit_code == 3
    assert verdict.summary().startswith("invalid: both sides took the same route: ")


def test_no_argmax_in_the_batched_tail_is_named(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LM head and logits ran, argmax and the copy to staging did not: the original's bug."""
    queue = sampler.SamplerTail.queue

    def only_per_token(self: Any, flow: ops.Flow, logits: Any, count: int) -> None:
        if not flow.batched:
            queue(self, flow, logits, count)

    monkeypatch.setattr(sampler.SamplerTail, "queue", only_per_token)
    verdict = _validate(device)
    assert verdict.state is State.DIVERGED
    assert "logits agree exactly (max_abs_diff=0.000000 over" in verdict.summary()
    assert "the fault is after the forward pass: sampler tail: batched prefill" in verdict.summary()


def test_a_format_without_a_kernel_is_unsupported_before_anything_runs(device: Device) -> None:
    model = tiny_model(LLAMA)
    formats = {tensor.format.name for tensor in model.weights.matrices()}
    assert "Q6_K" in formats
    verdict = _validate(device, registry=REGISTRY.without("matvec_batched", "Q6_K"))
    assert verdict.state is State.UNSUPPORTED
    assert "Q6_K" in verdict.summary()
    assert len(verdict.checks) == 1


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_a_skipped_kv_write_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    """Attention then reads poison, which is NaN; it is not what is blamed."""
    monkeypatch.setattr(ops, "kv_write", lambda *arguments: None)
    verdict = _validate(device, kv_type=kv_type)
    assert verdict.summary() == "diverged: KV write: K of layer 0"


def test_the_switch_judges_a_real_pair_and_leaves_a_clean_state(device: Device) -> None:
    model = tiny_model(QWEN3)
    lines: list[str] = []
    judge = printing_judge(lines.append)
    with Engine(
        model, device, batched_prefill="validate", judge=judge, context_length=CONTEXT
    ) as engine:
        engine.prefill(prompt(model))
        verdict: Any = engine.validation
        assert verdict.state is State.OK
        judged = engine.decode(5).tail.logits, _kv(engine, model)
    with Engine(model, device, context_length=CONTEXT) as engine:
        engine.prefill(prompt(model))
        clean = engine.decode(5).tail.logits, _kv(engine, model)
    assert len(lines) == 1
    assert lines[0].startswith("prefillBatched validate[ok]: last-token logits max_abs_diff=0.0000")
    assert judged[0].tobytes() == clean[0].tobytes()
    assert judged[1] == clean[1]


def _kv(engine: Engine, model: Model) -> list[bytes]:
    layers = range(model.spec.layer_count)
    return [array.tobytes() for layer in layers for array in engine.kv_contents(layer)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("min(begin + share, count)", "min(begin + share, count - 1)"), "the last logit"),
        (("b.index < a.index", "b.index > a.index"), "a tie of first and last"),
        (("simt::lane() < WAVES", "simt::lane() < WAVES - 1"), "wave 7"),
        (("best.value == best.value ? best.index : NAN_TOKEN", "best.index"), "NaN at 0"),
    ],
    ids=["last-ignored", "ties-upwards", "last-wave-ignored", "nan-is-a-token"],
)
def test_corners_of_the_device_argmax(
    change: tuple[str, str], what: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel("argmax.hip", change)(monkeypatch)
    verdict = _validate(device, QWEN3)
    assert verdict.state is State.DIVERGED
    (probe,) = [check for check in verdict.checks if check.name == "sampler tail: chosen logits"]
    assert probe.state is State.DIVERGED
    assert probe.detail.startswith(f"{what}:")


def test_a_model_of_zeros_proves_nothing(device: Device) -> None:
    model = tiny_model(LLAMA)
    embedding = model.weights.top["token_embd"]
    zeros = replace(embedding, raw=np.zeros_like(embedding.raw))
    weights = replace(model.weights, top={**model.weights.top, "token_embd": zeros})
    dead = replace(model, weights=weights)
    verdict = validate(
        dead,
        lambda: Engine(dead, device, context_length=CONTEXT),
        prompt(model),
        Options(n_decode=STEPS),
        context_length=CONTEXT,
    )
    assert verdict.state is State.INVALID
    assert any("all logits of the reference are equal" in check.detail for check in verdict.checks)
