"""Tiny models and prompts for the tests of the judge, built once a session."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fixtures.golden import golden_model
from fixtures.tiny import TINY, build_tiny
from reference.model import Model, load_model
from suites.harness.fault_models import seeded_prompt

LLAMA, QWEN3, GEMMA3 = "tiny-llama", "tiny-qwen3", "tiny-gemma3"
LENGTH = 21
"""Longer than the sliding window of tiny-gemma3 (16), so that the window masks something."""


@cache
def _folder() -> TemporaryDirectory[str]:
    """One for all models of this process; it is removed when the process ends."""
    return TemporaryDirectory(prefix="assay-meta-", ignore_cleanup_errors=True)


@cache
def tiny_model(name: str) -> Model:
    return load_model(build_tiny(TINY[name], Path(_folder().name) / f"{name}.gguf"))


def prompt(model: Model, length: int = LENGTH, seed: int = 11) -> tuple[int, ...]:
    return seeded_prompt(model, length, seed)


@cache
def oracle_model(name: str) -> Model:
    """One of the golden models that llama.cpp's logits were recorded on."""
    return load_model(golden_model(name).path)
