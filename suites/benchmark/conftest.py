"""Fixtures of the benchmarks: reference logits, computed once, and the cache flush of a sample."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from backend_hip import Device
from reference.model import Model
from suites.benchmark.cases import SpeedCase
from suites.benchmark.clock import CacheFlush
from suites.benchmark.proof import reference_of
from suites.benchmark.stored import checkout_commit
from suites.harness.endtoend import Expected


@pytest.fixture(scope="session")
def commit() -> str:
    return checkout_commit()


@pytest.fixture(scope="session")
def expected_of() -> Callable[[Model, SpeedCase], Expected]:
    """Reference logits of a case's prompt, computed once for all cases that share it."""
    models: dict[str, Model] = {}

    @cache
    def compute(name: str, prompt_tokens: int, kv_type_k: str, kv_type_v: str) -> Expected:
        case = SpeedCase("", name, "", "", prompt_tokens, 1, kv_type_k, kv_type_v)
        return reference_of(models[name], case)

    def expected(model: Model, case: SpeedCase) -> Expected:
        models[case.model] = model
        return compute(case.model, case.prompt_tokens, case.kv_type_k, case.kv_type_v)

    return expected


@pytest.fixture(scope="session")
def flush(device: Device) -> Iterator[CacheFlush]:
    cache_flush = CacheFlush(device)
    yield cache_flush
    cache_flush.free()
