"""Which kernels multiplied, by the engine's launch counters: the rows of tolerances.py follow them.

A path is a property of batched prefill. Per-token prefill and decode send every product through
one-column kernels of a path of their own, and routed experts run kernels of kparallel in both
modes, so a run of `--path serial` that is judged throughout by serial's wider row would pass a
wrong matvec.
"""

import re
from collections.abc import Mapping, Sequence

from backend_hip import packed
from backend_hip.dispatch import route_name
from backend_hip.fused import fused_keys, why_not_fused
from backend_hip.fused_batch import product_keys, why_not_fused_batch
from backend_hip.registry import (
    DIGIT_FORMATS,
    PACKED_FORMATS,
    PACKED_MOST,
    PATHS,
    few_columns,
    one_column_path,
)
from backend_hip.requirements import requirements
from reference.model import Model
from reference.model.errors import InputError
from suites.harness.protocol import Prefilled, Stepped
from suites.harness.verdict import Check, State

EXPERTS = "kparallel"
"""The path of routed experts, whatever path was asked for."""

_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "per-token": ("matvec", "matvec_expert", "matvec_add", "norm_qkv", "norm_gate_up"),
    "batched": ("matvec_batched", "matvec_batched_packed", "matvec_experts"),
    "decode batch": ("matvec_few", "matvec_experts"),
}
"""The ops of the registry that multiply by a weight matrix, by prefill mode; in a decode step of
several sequences on a path that has kernels for few columns."""

Rows = frozenset[str]
"""Registry rows as routes name them."""


def path_of(mode: str, path: str) -> str:
    """The path of the kernels that a prefill mode runs in an engine built for `path`. Formats that
    "digits" has no kernels for run those of kparallel there."""
    if mode == "batched":
        return path
    return "digits" if path == "matrix" else "kparallel"


def require_path(path: str, modes: tuple[str, ...], option: str = "--prefill") -> None:
    """Refuses a path that is none, and one that is not run by these prefill modes alone."""
    if path not in PATHS:
        raise InputError(f"path is {path}, expected one of {', '.join(PATHS)}")
    if all(path_of(mode, path) != path for mode in modes):
        raise InputError(
            f"path {path} is a path of batched prefill; {option} {','.join(modes)} does not run it"
            + (": its kernels of one token are judged beside it" if path == "matrix" else "")
        )


def product_rows(
    model: Model, path: str, mode: str, kv_types: tuple[str, str], *, sequences: int = 1
) -> tuple[Rows, ...]:
    """The sets of rows, as `family` names them, that a prefill of this mode, or a decode step of
    `sequences` rows, may multiply with, each of them whole.

    A token alone goes through fused kernels where the model has them, except under a trace.
    """
    keys = requirements(model.spec, model.weights, path, *kv_types, sequences)
    fused_batch = mode == "decode batch" and path == "matrix" and sequences <= PACKED_MOST
    if fused_batch and not why_not_fused_batch(model.spec, model.weights):
        head = packed.product_key([model.weights.lm_head.format.name])
        fused = [head, *product_keys(model.weights)]
        return (frozenset(family(route_name(key)) for key in fused),)
    columns = few_columns(path, sequences)
    if mode == "decode batch" and not columns:
        mode = "batched"
    keys = [key for key in keys if key[0] != "matvec_few" or key[1].endswith(f"@{columns}")]
    found = [frozenset(family(route_name(key)) for key in keys if key[0] in _PRODUCTS[mode])]
    fused_by = (model.spec, model.weights, path, ",".join(kv_types))
    if mode == "per-token" and not why_not_fused(*fused_by):
        head_format = model.weights.lm_head.format.name
        head = ("matvec", head_format, one_column_path(path, head_format))
        fused = [head, *fused_keys(*fused_by)]
        found.append(frozenset(route_name(key) for key in fused if key[0] in _PRODUCTS[mode]))
    return tuple(found)


def packed_rows(model: Model) -> Rows:
    """The rows of path matrix for few columns, of every format of the model that has them."""
    forms = {tensor.format.name for tensor in model.weights.matrices()} & set(PACKED_FORMATS)
    return frozenset(route_name(packed.product_key([form])) for form in forms)


def family(route: str) -> str:
    """A route without the block shape behind its format ("Q4_K/64" is "Q4_K"), and a packed product
    as the batched one that it stands for: which runs depends on how many columns there are."""
    route = re.sub(r"^matvec_batched_packed (\w+),\1 ", r"matvec_batched \1 ", route)
    return re.sub(r"/\d+ ", " ", route)


def products_of(routes: Mapping[str, int]) -> dict[str, int]:
    """The launches of matrix products among `routes` ("op variant path" to launches)."""
    ops = {op for names in _PRODUCTS.values() for op in names}
    return {name: n for name, n in routes.items() if n > 0 and name.split(" ")[0] in ops}


def kernel_checks(
    model: Model,
    path: str,
    kv_types: tuple[str, str],
    prefills: Sequence[tuple[str, Prefilled]],
    decoded: Sequence[Stepped],
) -> list[Check]:
    """The limits are those of the kernels that multiplied, so it has to be them.

    `prefills`: what stands behind the mode in the check's name, and the result.
    """
    wanted = {mode: product_rows(model, path, mode, kv_types) for mode in _PRODUCTS}
    checks = [
        # A mode that is none is judged by the pair's checks; here it has no rows to have run.
        kernels_check(f"kernels: {result.mode} prefill{how}", result, wanted.get(result.mode, ()))
        for how, result in prefills
    ]
    return [*checks, _decode_check(decoded, wanted["per-token"])] if decoded else checks


def _decode_check(decoded: Sequence[Stepped], wanted: Sequence[Rows]) -> Check:
    """Exactly one of the `wanted` sets of rows multiplied in each step of decoding."""
    name = "kernels: decode"
    checks = [kernels_check(name, step, wanted) for step in decoded]
    bad = next((check for check in checks if check.state is not State.OK), None)
    if bad is not None:
        return bad
    launches = sum(check.elements for check in checks)
    return Check(name, State.OK, launches, detail=checks[0].detail, unit="launches")


def kernels_check(name: str, result: Prefilled | Stepped, wanted: Sequence[Rows]) -> Check:
    """Exactly one of the `wanted` sets multiplied here: each of its rows ran, and no other."""
    ran = products_of(result.routes)
    launches = sum(ran.values())
    families = {family(name) for name in ran}
    # The set that what ran resembles most; the first, which is not fused, where nothing did.
    rows = max(wanted, key=lambda each: len(each & families), default=frozenset())
    missing, other = sorted(rows - families), sorted(families - rows)
    if rows and not missing and not other:
        detail = f"ran {', '.join(sorted(ran))}"
        return Check(name, State.OK, launches, detail=detail, unit="launches")
    problems = [f"never ran {', '.join(missing)}"] if missing else []
    problems += [f"ran {', '.join(other)} too"] if other else []
    detail = "; ".join(problems) or "no product is known for this mode"
    return Check(
        name, State.INVALID, launches, detail=detail, link=f"{name}: {detail}", unit="launches"
    )


def path_check(name: str, result: Prefilled) -> Check:
    """Every product of this prefill ran on the path that its mode runs: for want of the model."""
    ran = products_of(result.routes)
    ops = _PRODUCTS.get(result.mode, ())
    paths = {op: path_of(result.mode, result.path) for op in ops}
    paths |= {op: EXPERTS for op in ops if op.startswith("matvec_expert")}
    other = [row for row in sorted(ran) if not _is_of(row, paths)]
    launches = sum(ran.values())
    if ran and not other:
        return Check(name, State.OK, launches, unit="launches")
    detail = f"ran {', '.join(other)}" if other else "no product was counted"
    return Check(
        name, State.INVALID, launches, detail=detail, link=f"{name}: {detail}", unit="launches"
    )


def _is_of(route: str, paths: Mapping[str, str]) -> bool:
    """Whether the row of a route belongs to the path that its op should run."""
    op, variant, ran = route.split(" ")
    wanted = paths.get(op, "")
    if wanted == "digits" and set(DIGIT_FORMATS).isdisjoint(variant.split(",")):
        wanted = "kparallel"
    return wanted == ran
