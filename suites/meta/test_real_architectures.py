"""The real engine on every golden model, and where the catalogue looks for its faults."""

import re
from collections.abc import Iterator

import pytest

from backend_hip.device import Device, open_device
from backend_hip.engine import Engine
from fixtures.faults import load_faults
from fixtures.golden import TINY_GATES
from suites.harness.validate import Options, validate
from suites.meta.architecture_faults import PLACES, Place
from suites.meta.models import oracle_model, prompt

MAX_COLS = 8
CONTEXT = 64
SHARED = [place for place in PLACES if place.id in load_faults()]
"""Faults that are planted in the fake engine and in the real one."""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


@pytest.mark.parametrize("name", list(TINY_GATES))
def test_the_engine_as_it_is_is_ok(device: Device, name: str) -> None:
    model = oracle_model(name)
    verdict = validate(
        model,
        lambda: Engine(model, device, max_cols=MAX_COLS, context_length=CONTEXT),
        prompt(model),
        Options(n_decode=2),
        context_length=CONTEXT,
    )
    assert verdict.summary() == "ok"
    assert all(check.elements > 0 for check in verdict.checks)


@pytest.mark.parametrize("place", SHARED, ids=lambda place: place.id)
def test_one_fault_has_one_place(place: Place) -> None:
    """Whoever runs it: `where` of the catalogue means the point of the fake engine's fault."""
    fault = load_faults()[place.id]
    assert fault.model == f"oracle-{place.model}"
    assert re.search(fault.where, f"diverged: {place.point} ({place.op})")


def test_the_catalogue_has_the_fake_engines_faults() -> None:
    """One is left out: the real engine has no reversed view of a row to read by mistake."""
    assert {place.id for place in PLACES} - {p.id for p in SHARED} == {"per-layer-input-reversed"}
