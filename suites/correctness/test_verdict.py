"""The verdict of `assay validate` on the engine, for any model."""

from collections.abc import Callable

import numpy as np
import pytest

from backend_hip import Device, Engine
from reference.model import Model
from suites.harness.validate import Options, validate

PROMPT_TOKENS = 5
N_DECODE = 3


@pytest.mark.any_model("tiny-llama3", "oracle-qwen35moe")
def test_verdict_is_ok(model: str, load: Callable[[str], Model], device: Device) -> None:
    loaded = load(model)
    tokens = np.random.default_rng(7).integers(0, loaded.spec.vocab_size, PROMPT_TOKENS).tolist()
    verdict = validate(loaded, lambda: Engine(loaded, device), tokens, Options(n_decode=N_DECODE))
    assert verdict.summary() == "ok"
    assert all(check.elements > 0 for check in verdict.checks)
