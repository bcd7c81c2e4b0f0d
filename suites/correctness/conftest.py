"""Fixtures of the correctness suite."""

from collections.abc import Callable
from typing import Any

import pytest

from backend_hip.engine import Engine


@pytest.fixture
def engine_for(load: Callable[[str], Any], engine_factory: Callable[..., Engine]) -> Any:
    """engine_for(model name, **options) -> a reset Engine, shared between tests where it can be."""
    return lambda name, **options: engine_factory(load(name), **options)
