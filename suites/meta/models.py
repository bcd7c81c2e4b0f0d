"""Tiny models and prompts for the tests of the judge, built once a session."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from fixtures.tiny import TINY, build_tiny
from reference.model import Model, load_model

LLAMA, QWEN3, GEMMA3 = "tiny-llama", "tiny-qwen3", "tiny-gemma3"
LENGTH = 21
"""Longer than the sliding window of tiny-gemma3 (16), so that the window masks something."""


@cache
def tiny_model(name: str) -> Model:
    folder = Path(mkdtemp(prefix="assay-meta-"))
    return load_model(build_tiny(TINY[name], folder / f"{name}.gguf"))


def prompt(model: Model, length: int = LENGTH, seed: int = 11) -> tuple[int, ...]:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return tuple(int(token) for token in rng.integers(0, model.spec.vocab_size, length))
