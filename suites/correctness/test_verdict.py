"""The verdict of `assay validate` on the engine, for any model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from backend_hip import Device, Engine
from fixtures.faults import Change
from reference.model import Model
from suites.harness.patched import patched_engine
from suites.harness.protocol import PREFILL_MODES
from suites.harness.validate import Options, validate
from suites.harness.verdict import Verdict

PROMPT_TOKENS = 5
N_DECODE = 3


Record = Callable[[Verdict], Verdict]


def _verdict(model: Model, device: Device, options: Options, record: Record) -> Verdict:
    tokens = np.random.default_rng(7).integers(0, model.spec.vocab_size, PROMPT_TOKENS).tolist()
    verdict = record(validate(model, lambda: Engine(model, device), tokens, options))
    assert all(check.elements > 0 for check in verdict.checks)
    return verdict


@pytest.mark.any_model("tiny-llama3", "oracle-qwen35moe")
def test_verdict_is_ok(
    model: str, load: Callable[[str], Model], device: Device, record_verdict: Record
) -> None:
    verdict = _verdict(load(model), device, Options(n_decode=N_DECODE), record_verdict)
    assert verdict.summary() == "ok"
    assert any("pair" in check.name for check in verdict.checks)


@pytest.mark.parametrize("prefill", PREFILL_MODES)
@pytest.mark.any_model("tiny-llama3")
def test_verdict_of_one_mode_is_ok(
    model: str, prefill: str, load: Callable[[str], Model], device: Device, record_verdict: Record
) -> None:
    verdict = _verdict(
        load(model), device, Options(modes=(prefill,), n_decode=N_DECODE), record_verdict
    )
    assert verdict.summary() == "ok"
    assert not any("pair" in check.name for check in verdict.checks)


@pytest.mark.any_model("tiny-llama3")
def test_a_patched_kernel_is_seen(
    model: str, load: Callable[[str], Model], device: Device, record_verdict: Record
) -> None:
    """The judge of this very device sees a changed kernel, compiled and run on it."""
    loaded, kind = load(model), device.runtime.kind

    @contextmanager
    def open_copy(changes: Sequence[Change]) -> Iterator[Any]:
        with (
            patched_engine(changes) as copied,
            copied.open_device(kind) as opened,
            copied.engine(loaded, opened) as engine,
        ):
            yield engine

    tokens = np.random.default_rng(7).integers(0, loaded.spec.vocab_size, PROMPT_TOKENS).tolist()
    options = Options(n_decode=0)
    verdict = validate(loaded, lambda: Engine(loaded, device), tokens, options, open_copy=open_copy)
    assert verdict.summary() == "ok"
    record_verdict(verdict)
    assert verdict.checks[-1].name == "self-test: a patched kernel is seen"
