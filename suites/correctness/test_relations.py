"""Every way through the engine gives the same bits: relations that hypothesis draws, or pinned.

`--relation ID` runs one case, `--relation-seed N` draws others than CI does, `--relation-walks N`
draws more or fewer. What is compared stands in relation_runs.py and relation_mates.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backend_hip.device import Device
from backend_hip.engine import Engine
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import MAX_COLS_LIMIT
from fixtures.registry import is_large
from reference.model import Model
from reference.model.errors import DeviceError, InputError
from suites.correctness.relation_mates import EXPERT_FORMS, FORMS, POOL, MatesRunner
from suites.correctness.relation_runs import Walker, walk_tokens
from suites.correctness.relation_strategies import Axes, mates, walks
from suites.correctness.relations import (
    ALL_LOGITS,
    FILLS,
    MATES_OPS,
    WAYS,
    Mates,
    Piece,
    Relation,
    Walk,
    parse_relation,
    replay_command,
)

MODELS = (
    *("tiny-llama", "tiny-qwen3", "tiny-gemma3"),
    *("oracle-gemma4e", "oracle-gemma4moe", "oracle-qwen35d64", "oracle-qwen35moe"),
)
WALKS = 10  # for each model
WALKS_LARGE = 3  # for a published model or a file
PRODUCTS = 60  # for each op

# A whole block of 256 tokens around its edges, and cuts at constants with the most about them.
PINNED = (
    "tiny-llama:f16,f16:m64:n512:s0:poison:x1:-:b255+d1",
    "tiny-llama:f16,f16:m40:n256:s0:poison:x1:-:b256+B1",
    "tiny-llama:f32,f16:m64:n64:s0:finite:x1:-:b257",
    "tiny-gemma3:f16,f16:m40:n40:s0:poison:x1:b105:b1+b14+b1+b1+b22+b1+b1+b63+b1",
    "tiny-gemma3:f16,f16:m40:n7:s0:poison:x1:-:b105",
    "tiny-gemma3:f16,f16:m40:n512:s0:poison:x2:b105:b41",
    "oracle-qwen35d64:f16,f16:m40:n40:s0:poison:x2:b105:b1+b2+b3+b1+b34+b64",
    "oracle-gemma4e:f16,f16:m40:n40:s0:poison:x2:b105:E20+b21",
    "columns:Q4_K:m7:k512:6.0.7.3.0.4.0.5.0",
    "experts:Q4_K:m8:k256:6.0.7.0.0.0.0.0.0.0.0.5",
    "few:Q4_K:m4:k1280:6.0.7",
    "few:Q8_0:m16:k288:6.0.7.3.0.4.0.5.0",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "relation" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--relation")
        cases = asked or [parse_relation(text) for text in PINNED]
        metafunc.parametrize("relation", cases, ids=lambda case: case.id)


@pytest.fixture
def walker(load: Callable[[str], Model], device: Device) -> Iterator[Walker]:
    with Walker(load, partial(_open, device=device)) as made:
        yield made


@pytest.fixture(scope="module")
def products(device: Device) -> MatesRunner:
    return MatesRunner(device)


def _open(model: Model, *, device: Device, **options: Any) -> Engine:
    return Engine(model, device, **options)


def assert_holds(relation: Relation, walker: Walker, products: MatesRunner) -> None:
    """Fails with what differs and with the commands that run this very case again."""
    if isinstance(relation, Mates):
        found, also = products.differences(relation), None
    else:
        found = walker.differences(relation)
        tokens = walk_tokens(walker.spec(relation), relation.seed, relation.length)
        also = relation.validate_command(tokens)
    commands = [f"replay: {replay_command(relation)}", *([f"also: {also}"] if also else [])]
    assert not found, "\n".join(["the relation does not hold:", *found, *commands])


def test_this_relation_holds(relation: Relation, walker: Walker, products: MatesRunner) -> None:
    assert_holds(relation, walker, products)


def _check_drawn(
    config: pytest.Config,
    cases: st.SearchStrategy[Any],
    count: int,
    holds: Callable[[Relation], None],
) -> None:
    """`holds` for `count` drawn cases; a failing one is shrunk first."""
    seed, asked = config.getoption("--relation-seed"), config.getoption("--relation-walks")
    dead: list[str] = []

    @settings(
        max_examples=count if asked is None else asked,
        deadline=None,
        database=None,
        derandomize=seed is None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(cases)
    def check(relation: Relation) -> None:
        # A device error kills every later call, so the case that met it can't be shrunk.
        assert not dead, dead[0]
        try:
            holds(relation)
        except DeviceError as error:
            dead.append(f"{error}\nreplay: {replay_command(relation)}")
            raise

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    check()


@pytest.mark.any_model(*MODELS)
def test_every_way_gives_the_same_bits(
    model: str,
    load: Callable[[str], Model],
    walker: Walker,
    products: MatesRunner,
    pytestconfig: pytest.Config,
) -> None:
    large = is_large(model)
    axes = Axes(seed=pytestconfig.getoption("--relation-seed") or 0)
    cases = walks(model, load(model).spec, axes)
    _check_drawn(
        pytestconfig,
        cases,
        WALKS_LARGE if large else WALKS,
        lambda case: assert_holds(case, walker, products),
    )


@pytest.mark.parametrize("op", MATES_OPS)
def test_place_and_neighbours_change_no_bit(
    op: str, walker: Walker, products: MatesRunner, pytestconfig: pytest.Config
) -> None:
    _check_drawn(
        pytestconfig, mates(op), PRODUCTS, lambda case: assert_holds(case, walker, products)
    )


# --- ids ----------------------------------------------------------------------------------------

_PIECES = st.lists(
    st.builds(Piece, st.sampled_from((*WAYS, *ALL_LOGITS)), st.integers(1, 10_000)), max_size=5
).map(tuple)
_TYPES = st.sampled_from(tuple(KV_TYPES))
_ANY_WALK = st.builds(
    Walk,
    st.one_of(st.sampled_from(MODELS), st.text(min_size=1)),
    *(_TYPES, _TYPES, st.integers(1, MAX_COLS_LIMIT), st.integers(1), st.integers(0)),
    *(st.sampled_from(tuple(FILLS)), st.integers(1, 99), _PIECES, _PIECES.filter(bool)),
)
_ANY_MATES = st.builds(
    Mates,
    st.sampled_from(MATES_OPS),
    *(st.sampled_from((*FORMS, *EXPERT_FORMS)), st.integers(1, MAX_COLS_LIMIT), st.integers(1)),
    st.lists(st.integers(0, len(POOL) - 1), min_size=1).map(tuple),
)


@given(st.one_of(_ANY_WALK, _ANY_MATES))
@settings(derandomize=True, database=None)
def test_an_id_parses_back_to_its_case(case: Relation) -> None:
    assert parse_relation(case.id) == case


BAD_IDS = {
    "empty": "",
    "a field missing": "tiny-llama:f16,f16:m7:n7:s0:poison:x1:b8",
    "no pieces": "tiny-llama:f16,f16:m7:n7:s0:poison:x1:-:-",
    "unknown way": "tiny-llama:f16,f16:m7:n7:s0:poison:x1:-:q8",
    "no tokens": "tiny-llama:f16,f16:m7:n7:s0:poison:x1:-:b0",
    "unknown type": "tiny-llama:f16,q4_0:m7:n7:s0:poison:x1:-:b8",
    "unknown content": "tiny-llama:f16,f16:m7:n7:s0:ones:x1:-:b8",
    "too many columns": "tiny-llama:f16,f16:m65:n7:s0:poison:x1:-:b8",
    "written otherwise": "tiny-llama:f16,f16:m07:n7:s0:poison:x1:-:b8",
    "no column": "columns:Q4_K:m7:k512:",
    "no number": "columns:Q4_K:m7:k512:0.a",
}


@pytest.mark.parametrize("text", BAD_IDS.values(), ids=BAD_IDS)
def test_another_text_is_no_id(text: str) -> None:
    with pytest.raises(InputError, match=r"^relation: "):
        parse_relation(text)


@pytest.mark.parametrize(
    "text",
    [
        "columns:Q9:m7:k512:0",
        "columns:Q4_K:m7:k100:0",
        "columns:Q4_K:m7:k256:8",
        "few:Q4_K:m8:k256:0.1",
    ],
)
def test_a_product_that_cannot_be_is_refused(
    text: str, walker: Walker, products: MatesRunner
) -> None:
    with pytest.raises(InputError, match=r"^relation (columns|few):.*, expected "):
        assert_holds(parse_relation(text), walker, products)
