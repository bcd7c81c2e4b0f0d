"""Every limit bites and every limit holds.

Bites: one element moved by a few limits is found at its own point, for each kind of point. Holds:
the bounds on how errors pass through functions are compared with what random errors really do.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from backend_hip.attention_shape import SPLIT_KEYS
from backend_hip.registry import REGISTRY
from backend_hip.wave import WAVE
from fixtures.golden import TINY_GATES
from reference import ops
from reference.delta_net import RecurrentState, step_form
from reference.model.spec import Activation, DeltaNetSpec
from reference.model.trace import Trace, trace_points
from suites.harness import bounds_delta_net, kernel_shapes, sensitivity
from suites.harness.compare import Array
from suites.harness.fake_engine import FakeEngine
from suites.harness.local import LocalRules, PointCheck, first_broken, judge_trace
from suites.harness.tolerances import (
    FLOAT64_BOUND_SHARE,
    FLOAT64_NOISE,
    SMALLEST_SHARE,
    TABLE,
    USEFUL_BOUND,
)
from suites.meta.models import oracle_model, prompt

LENGTH = 9


def _points() -> list[tuple[str, str]]:
    """(model, point): the first point of each stem that each kind of layer has."""
    seen: dict[tuple[str, bool, bool], tuple[str, str]] = {}
    for name in TINY_GATES:
        spec = oracle_model(name).spec
        for point in trace_points(spec):
            layer = None if point.layer is None else spec.layers[point.layer]
            kind = (
                point.stem,
                layer is not None and layer.delta_net is not None,
                layer is not None and layer.experts is not None,
            )
            seen.setdefault(kind, (name, point.name))
    return list(seen.values())


@cache
def _clean(name: str) -> tuple[Trace, dict[str, PointCheck]]:
    model = oracle_model(name)
    trace = Trace()
    FakeEngine(model).prefill_batched(prompt(model, LENGTH), trace=trace)
    points = {p.point.name: p for p in judge_trace(model, trace, LocalRules())}
    return trace, points


@pytest.mark.parametrize(("name", "point"), _points())
def test_one_element_off_by_some_limits_is_found_at_its_point(name: str, point: str) -> None:
    model = oracle_model(name)
    clean, points = _clean(name)
    comparison = points[point].comparison
    assert comparison is not None
    place = comparison.worst_backward
    assert place is not None
    values = clean[point].copy()
    flat = values.reshape(-1)
    if values.dtype.kind == "i":  # another expert, and not one that the token has already
        token = values[place.index[0]]
        flat[place.flat] = next(e for e in range(8) if e not in token)
    else:
        step = max(4 * place.limit, float(np.spacing(np.float32(abs(place.want)))))
        flat[place.flat] = np.float32(place.want + step)
    trace = Trace(clean.tokens)
    trace._parts = {**clean._parts, point: [values]}
    found = first_broken(list(_until(judge_trace(model, trace, LocalRules()), point)))
    assert found is not None
    assert found.point.name == point


def _until(points: Iterator[PointCheck], last: str) -> list[PointCheck]:
    """The points up to `last`; later ones only inherit."""
    taken: list[PointCheck] = []
    for point in points:
        taken.append(point)
        if point.point.name == last:
            break
    return taken


def test_no_limit_is_far_above_what_float32_does() -> None:
    """A clean run uses some share of every op's limit; one that it never nears would hide faults.

    Exact ops have a limit of 0. The embedding's scale is a power of two here and rounds nothing.
    """
    used: dict[str, float] = {}
    for name in TINY_GATES:
        for point in _clean(name)[1].values():
            used[point.op] = max(used.get(point.op, 0.0), point.check.of_limit or 0.0)
    assert {op for op, share in used.items() if share == 0.0} == {"embed", "copy", "routing"}
    assert {op: share for op, share in used.items() if 0.0 < share < SMALLEST_SHARE} == {}


# --- errors passed on ----------------------------------------------------------------------------


def _random(seed: int, *shape: int, spread: float = 3.0) -> Array:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return rng.standard_normal(shape) * spread


def _moved(x: Array, error: Array, seed: int) -> Array:
    """x with every element at one end of its interval or the other."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    moved: Array = x + error * rng.choice([-1.0, 1.0], x.shape)
    return moved


def _within(change: Array, bound: Array) -> bool:
    """The change of a float64 value is within its bound, both rounded."""
    return bool(np.all(change <= bound * (1 + FLOAT64_BOUND_SHARE) + FLOAT64_NOISE))


@pytest.mark.parametrize("size", [1e-7, 1e-3, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_errors_pass_through_scalar_functions_as_bounded(size: float, seed: int) -> None:
    x = _random(seed, 20_000)
    error = np.abs(_random(seed + 100, 20_000, spread=size))
    moved = _moved(x, error, seed + 200)
    bounds: dict[str, tuple[Callable[[Array], Array], Array]] = {
        "sigmoid": (ops.sigmoid, sensitivity.sigmoid(x, error)),
        "tanh": (np.tanh, sensitivity.soft_cap(x, error)),
        "softplus": (lambda v: np.logaddexp(0.0, v), sensitivity.softplus(x, error)),
        "silu": (ops.silu, sensitivity.activation(x, error, "silu")),
        "gelu": (ops.gelu_tanh, sensitivity.activation(x, error, "gelu_tanh")),
    }
    for name, (function, bound) in bounds.items():
        change = np.abs(function(moved) - function(x))
        assert _within(change, bound), name
        # A bound that is far from what happens would hide faults. The median is of elements whose
        # slope is not nearly zero; the share is 1 for a linear function.
        assert np.median(bound / np.maximum(change, 1e-300)) < 4, name


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1e-6, 1e-2])
def test_errors_pass_through_a_gate_as_bounded(kind: Activation, size: float) -> None:
    gate, up = _random(1, 200, 64), _random(2, 200, 64)
    errors = [np.abs(_random(seed, 200, 64, spread=size)) for seed in (3, 4)]
    bound = sensitivity.gated(gate, up, errors[0], errors[1], kind)
    moved = ops.gated(_moved(gate, errors[0], 5), _moved(up, errors[1], 6), kind)
    assert _within(np.abs(moved - ops.gated(gate, up, kind)), bound)


@pytest.mark.parametrize("size", [1e-7, 1e-2, 10.0])
def test_errors_pass_through_a_norm_as_bounded(size: float) -> None:
    x, weight = _random(1, 300, 64), _random(2, 64)
    error = np.abs(_random(3, 300, 64, spread=size))
    bound = sensitivity.rms_norm(x, weight, 1e-6, error)
    moved = ops.rms_norm(_moved(x, error, 4), weight, 1e-6)
    assert _within(np.abs(moved - ops.rms_norm(x, weight, 1e-6)), bound)


NET = DeltaNetSpec(state_size=16, key_heads=2, value_heads=4, conv_kernel=4)


def _delta_inputs(
    tokens: int, seed: int, strength: float
) -> tuple[Array, Array, Array, Array, Array]:
    """q, k, v, log decay and beta in float32; `strength` near 1 forgets least and corrects most."""
    q, k = (_random(seed + i, tokens, 2, 16) for i in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -np.abs(_random(seed + 2, tokens, 4, spread=1 - strength))
    beta = np.full((tokens, 4), strength)
    v = _random(seed + 3, tokens, 4, 16)
    q, k, v, decay, beta = (x.astype(np.float32) for x in (q / 4, k, v, decay, beta))
    return q, k, v, decay, beta


@pytest.mark.parametrize("tokens", [1, 2, 40, 400])
@pytest.mark.parametrize("strength", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_float32_recurrence_is_within_its_bound(tokens: int, strength: float, seed: int) -> None:
    q, k, v, decay, beta = _delta_inputs(tokens, seed * 10, strength)
    tiled = np.arange(4) % 2
    state = RecurrentState.zero(NET, np.dtype(np.float32))
    out = step_form(q[:, tiled], k[:, tiled], v, decay, beta, state)
    assert out.dtype == np.float32
    result = bounds_delta_net.delta_rule(q, k, v, decay, beta, NET)
    for got, (want, limit) in ((out, result.out), (state.memory, result.memory)):
        assert np.all(np.isfinite(limit))
        assert np.all(np.abs(got - want) <= limit)
    # It does not grow without end: the limit stays far below what a fault changes.
    want, limit = result.out
    assert np.max(limit[-1]) < USEFUL_BOUND * np.max(np.abs(want))


def test_equal_keys_do_not_blow_the_bound_up() -> None:
    """The worst case for bounds taken element by element: the same key at every token."""
    q, k, v, decay, beta = _delta_inputs(400, 7, 0.9)
    k[:] = k[0]
    want, limit = bounds_delta_net.delta_rule(q, k, v, 0 * decay, beta, NET).out
    assert np.max(limit) < USEFUL_BOUND * np.max(np.abs(want))


# --- the table -----------------------------------------------------------------------------------


def test_no_rounding_is_written_outside_the_table() -> None:
    """The unit roundoff is what every tolerance is made of: only the table may name it."""
    tables = {"local_tolerances.py", "tolerances.py"}
    for file in sorted(Path(bounds_delta_net.__file__).parent.glob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text()))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert file.name in tables or not words & {"UNIT_ROUNDOFF", "gamma"}, file.name
    used = {
        str(call.args[0].value)
        for file in Path(bounds_delta_net.__file__).parent.glob("bounds*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "row"
        and isinstance(call.args[0], ast.Constant)
    }
    assert used <= {op for op, _ in TABLE}
    assert {"gelu_argument", "gelu_sum", "gelu_products", "exponent", "softplus_argument"} <= used


def test_kernel_shapes_are_those_that_are_launched() -> None:
    """Limits of sums depend on how many lanes share them."""
    blocks = {row.op: row.block for row in REGISTRY}
    assert blocks["rms_norm"] == blocks["add_rms_norm"] == kernel_shapes.NORM_BLOCK
    assert blocks["attention"] == blocks["attention_split"]
    assert blocks["attention"] == kernel_shapes.ATTENTION_WAVES * WAVE
    assert kernel_shapes.ATTENTION_CHAIN * kernel_shapes.ATTENTION_WAVES == SPLIT_KEYS
    assert 2**kernel_shapes.TREE_LEVELS == WAVE
    source = Path(kernel_shapes.__file__).read_text()
    assigned = {
        target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name in ("NORM_BLOCK", "ATTENTION_WAVES", "ATTENTION_CHAIN", "TREE_LEVELS"):
        assert not isinstance(assigned[name], ast.Constant), name
