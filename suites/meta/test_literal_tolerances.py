"""No test and no judge holds a tolerance of its own: how far off a value may be stands in a table.

Looked for in syntax trees, with constants folded and names that hold a plain number followed:

    a tolerance argument   a number other than 0 as rtol, atol, rel, abs, rel_tol, abs_tol, delta
    a default tolerance    allclose, isclose, approx and their kin called without their own limits
    a small bound          an ordering against a number of at most SMALL, alone or in a sum or
                           product (`x < 1e-2 * y`, `x <= y * (1 + 1e-9)`); equality is exact and
                           no tolerance, nor is a number that a function gets
    a bounded difference   an ordering of |a - b| against any number but 0
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = (
    "suites/harness/tolerances.py",
    "suites/harness/local_tolerances.py",
    "suites/parity/tolerances.py",
)
SMALL = 2.0**-6
KEYWORDS = frozenset({"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol", "delta", "places"})

# Function -> the arguments that must all be given: a default of the others is a tolerance.
COMPARISONS: Mapping[str, frozenset[str]] = {
    "allclose": frozenset({"rtol", "atol"}),
    "isclose": frozenset({"rtol", "atol"}),
    "assert_allclose": frozenset({"rtol"}),
    "assert_close": frozenset({"rtol", "atol"}),
    "assert_almost_equal": frozenset({"decimal"}),
    "assert_array_almost_equal": frozenset({"decimal"}),
    "assertAlmostEqual": frozenset({"delta"}),
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
Names = Mapping[str, float]


def literal_tolerances(text: str) -> list[tuple[int, str]]:
    """(line, what) of each in a module's source."""
    tree = ast.parse(text)
    names = dict(_numbers(tree))
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in _in_call(node, names)]
        elif isinstance(node, ast.Compare):
            found += [(node.lineno, what) for what in _in_comparison(node, names)]
    return sorted(set(found))


def _numbers(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Names that are given a number, anywhere in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _value(node.value, {})
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    yield target.id, value


def _value(node: ast.AST, names: Names) -> float | None:
    """The number that an expression of numbers alone is; None for anything else."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return names.get(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, names)
            return None if value is None else -value
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left, names), _value(right, names)
            if one is None or other is None:
                return None
            return _folded(one, op, other)
    return None


def _folded(one: float, op: ast.operator, other: float) -> float | None:
    try:
        match op:
            case ast.Add():
                return one + other
            case ast.Sub():
                return one - other
            case ast.Mult():
                return one * other
            case ast.Div():
                return one / other
            case ast.Pow():
                return float(one**other)
    except (ArithmeticError, TypeError):
        return None
    return None


def _in_call(node: ast.Call, names: Names) -> Iterator[str]:
    function = ast.unparse(node.func).split(".")[-1]
    given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    for name in KEYWORDS & given.keys():
        if _value(given[name], names):
            yield f"{name} is a number"
    if function in COMPARISONS:
        missing = COMPARISONS[function]
        if "math" in ast.unparse(node.func).split("."):
            missing = frozenset({"rel_tol"})
        extra = [_value(argument, names) for argument in node.args[2:]]
        if any(extra):
            yield f"{function} gets a number as its tolerance"
        elif not extra and not missing <= given.keys():
            yield f"{function} uses a default tolerance"
    if function == "approx" and not given.keys() & {"rel", "abs"}:
        if any(_value(argument, names) for argument in node.args[1:]):
            yield "approx gets a number as its tolerance"
        elif len(node.args) < 2:
            yield "approx uses a default tolerance"


def _in_comparison(node: ast.Compare, names: Names) -> Iterator[str]:
    operands = [node.left, *node.comparators]
    for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
        if not isinstance(op, _ORDER):
            continue
        numbers = [abs(n) for side in (left, right) for n in _terms(side, names)]
        if any(0 < number <= SMALL for number in numbers):
            yield "an ordering against a small number"
        elif any(_is_difference(side) for side in (left, right)) and any(numbers):
            yield "a difference is bounded by a number"


def _terms(node: ast.AST, names: Names) -> Iterator[float]:
    """Numbers that an operand is, or that are added or multiplied in it; not those in calls."""
    value = _value(node, names)
    if value is not None:
        yield value
    if isinstance(node, ast.BinOp):
        yield from _terms(node.left, names)
        yield from _terms(node.right, names)
    elif isinstance(node, ast.UnaryOp):
        yield from _terms(node.operand, names)


def _is_difference(node: ast.AST) -> bool:
    """True where some part is the absolute value of a difference."""
    return any(
        isinstance(part, ast.Call)
        and ast.unparse(part.func).split(".")[-1] in ("abs", "absolute", "fabs")
        and any(isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub) for x in part.args)
        for part in ast.walk(node)
    )


def _files() -> list[Path]:
    files = [*(ROOT / "suites").rglob("*.py"), ROOT / "conftest.py"]
    return sorted(file for file in files if file.relative_to(ROOT).as_posix() not in TABLES)


def test_no_file_holds_a_tolerance_of_its_own() -> None:
    found = [
        f"{file.relative_to(ROOT).as_posix()}:{line} {what}"
        for file in _files()
        if file != Path(__file__).resolve()
        for line, what in literal_tolerances(file.read_text(encoding="utf-8"))
    ]
    assert len(_files()) > 100
    assert found == []


PLANTED = [
    ("np.testing.assert_allclose(a, b, rtol=1e-6)", "rtol is a number"),
    ("np.testing.assert_allclose(a, b)", "assert_allclose uses a default tolerance"),
    ("np.allclose(a, b, rtol=limit)", "allclose uses a default tolerance"),
    ("np.allclose(a, b, 0.1, 0)", "allclose gets a number as its tolerance"),
    ("math.isclose(a, b)", "isclose uses a default tolerance"),
    ("torch.testing.assert_close(a, b, rtol=limit, atol=1e-9)", "atol is a number"),
    ("assert a == pytest.approx(b)", "approx uses a default tolerance"),
    ("assert a == approx(b, 1e-3)", "approx gets a number as its tolerance"),
    ("assert a == pytest.approx(b, abs=2 * 1e-3)", "abs is a number"),
    ("NOISE = 1e-9\nassert a == pytest.approx(b, rel=NOISE)", "rel is a number"),
    ("assert error < 1e-4", "an ordering against a small number"),
    ("assert 1e-4 > error", "an ordering against a small number"),
    ("assert error <= 2.0**-20 * size", "an ordering against a small number"),
    ("assert a <= b * (1 + 1e-9)", "an ordering against a small number"),
    ("assert np.all(step >= -1e-12)", "an ordering against a small number"),
    ("NOISE: float = 1e-9\nassert a <= b + NOISE", "an ordering against a small number"),
    ("def f():\n    near = 1e-3\n    return a < near", "an ordering against a small number"),
    ("assert abs(a - b) < 0.5", "a difference is bounded by a number"),
    ("assert np.max(np.abs(a - b)) <= 3", "a difference is bounded by a number"),
]


@pytest.mark.parametrize(("text", "what"), PLANTED, ids=[text for text, _ in PLANTED])
def test_a_planted_tolerance_is_seen(text: str, what: str) -> None:
    assert [found for _, found in literal_tolerances(text)] == [what]


@pytest.mark.parametrize(
    "text",
    [
        "assert share == 1e-3",
        "assert x[1] == 0.25 * y",
        "np.testing.assert_allclose(a, b, rtol=row.share)",
        "np.allclose(a, b, rtol=limit, atol=0.0)",
        "assert a == pytest.approx(b, rel=FORMS.share)",
        "assert np.abs(a - b).max() <= limit",
        "assert np.all(abs(a - b) > 0)",
        "assert 0.75 * wanted < values.std()",
        "x[1] *= 1e-4",
        "assert error < limit(1e-3)",
        "assert count > 0 and 2 * count < 100",
        "assert ok is True and True <= done",
    ],
)
def test_what_is_no_tolerance_passes(text: str) -> None:
    assert literal_tolerances(text) == []
