"""Fixtures of the correctness suite."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backend_hip.engine import Engine
from backend_hip.offline import OfflineClang, find_clang
from backend_hip.runtimes.checking import OFF, checking_of, set_checking
from reference.model.errors import InputError
from suites.options import DEVICE_KIND, ONLY_CPU


@pytest.fixture
def engine_for(load: Callable[[str], Any], engine_factory: Callable[..., Engine]) -> Any:
    """engine_for(model name, **options) -> a reset Engine, shared between tests where it can be."""
    return lambda name, **options: engine_factory(load(name), **options)


@pytest.fixture(scope="session")
def offline_clang() -> OfflineClang:
    """The clang for gfx1201. Without one the test does not run, and fails in CI."""
    try:
        return find_clang()
    except InputError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


@pytest.fixture
def cpu_session(request: pytest.FixtureRequest) -> None:
    """For tests that drive the CPU runtime in this process, which has one runtime only."""
    kind = request.config.stash[DEVICE_KIND]
    if kind not in ("cpu", None):
        request.node.stash[ONLY_CPU] = True
        pytest.skip(f"tests the CPU runtime, and this process runs on {kind}: use --device cpu")


@pytest.fixture(autouse=True)
def _raw_runtime_unchecked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of the bare CPU runtime do on purpose what --shuffle and --sanitize report."""
    session = checking_of()
    bare = request.module.__name__.rpartition(".")[2].startswith("test_cpu_runtime")
    if not (bare and session.is_on):
        yield
        return
    set_checking(OFF)
    yield
    set_checking(session)
