"""Torch and transformers, imported where they are installed, and their code run in float64.

Both come with the extra `parity`. Without it the suite skips and says so; under CI=true it fails.
"""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

INSTALL = 'pip install -e ".[parity]"'


def require(name: str) -> Any:
    """The module; where it is missing, everything in the calling test module skips."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        reason = f"{package} is not installed: {INSTALL}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():  # their own deprecations are not ours to fail on
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextmanager
def widened() -> Iterator[None]:
    """Lets transformers' code compute in float64 where it says float32.

    Its models upcast norms, softmax, RoPE and the delta rule `to(torch.float32)`, which in a
    float64 model is a downcast that would hide differences below 1e-7. Inside this context
    torch.float32 and .float() mean float64; the formulas stay as they are.
    """
    torch = require("torch")
    default = torch.get_default_dtype()
    saved = torch.float32, torch.float, torch.Tensor.float
    try:
        torch.set_default_dtype(torch.float64)
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(default)
