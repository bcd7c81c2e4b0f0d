"""Columns of a batched product and tokens of a flow: neither place nor neighbours move a bit.

Each input of POOL goes through the product alone and one column wide; in a case it must come out
with the same bits wherever it stands, whatever stands beside it, and nothing may be written behind
the last column. Op `few` is the product of a decode step: each column is a sequence's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip import experts, ops
from backend_hip.device import Device
from backend_hip.experts import ExpertScratch, Routing
from backend_hip.ops import Values
from backend_hip.registry import REGISTRY, few_columns
from backend_hip.weights import DeviceTensor
from reference.model.errors import InputError
from reference.model.quant import FORMATS
from reference.model.spec import ExpertsSpec
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.correctness.relations import Mates

Floats = NDArray[np.float32]

FORMS = tuple(key.variant for key in REGISTRY if key.op == "matvec")
EXPERT_FORMS = tuple(form for form in ("F32", "F16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0"))
ROWS = 9
"""Rows of the matrix: two blocks of waves, the second with one row."""
_EXPERTS = ExpertsSpec(12, 3, 256)
_POISON = 0xFFFFFFFF

POOL: Mapping[str, Callable[[Floats], Floats]] = {
    "plain": lambda x: x,
    "other": lambda x: x[::-1],
    "outliers": lambda x: np.where(np.arange(len(x)) % 3 == 0, x * 50, x),
    "zeros": lambda x: x * 0,
    "huge": lambda x: x * np.float32(1e30),
    "tiny": lambda x: x * np.float32(1e-30),
    "NaN": lambda x: x + np.float32("nan"),
    "infinite": lambda x: x * np.float32("inf"),
}
"""The inputs that a pick chooses from, by what they make of normal numbers (K,)."""


def lengths_of(form: str) -> tuple[int, ...]:
    """Row lengths around what a wave takes in one step, 256 or 1,024 of a super-block's format, and
    around the 1,024 elements that shared memory holds of a column.
    """
    block = FORMATS[form].block_elements
    if block == 256:
        return (256, 512, 1024, 1280)
    if block == 32:
        return (32, 224, 256, 288, 1056)
    return (1, 7, 8, 9, 255, 256, 257, 1025)


class MatesRunner:
    """Runs cases on a device and keeps what each input gives alone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._alone: dict[tuple[Any, ...], Floats] = {}

    def differences(self, case: Mates) -> tuple[str, ...]:
        """What comes out otherwise than alone, a line each; empty: nothing."""
        _check(case)
        run = self._experts if case.op == "experts" else self._columns
        got, behind = run(case, case.picks, batched=True)
        found = [] if behind else ["something was written behind the last column"]
        for place, pick in enumerate(case.picks):
            want = self._alone_of(case, pick, run)
            if not _same(got[place], want):
                wrong = np.flatnonzero(got[place].view(np.uint32) != want.view(np.uint32))
                name = list(POOL)[pick]
                found.append(
                    f"column {place} of {len(case.picks)} ({name}): {len(wrong)} of {want.size} "
                    f"rows have other bits, first row {wrong[0]} got {got[place][wrong[0]]:.9g} "
                    f"want {want[wrong[0]]:.9g}"
                )
        return tuple(found)

    def _alone_of(self, case: Mates, pick: int, run: Callable[..., tuple[Floats, bool]]) -> Floats:
        key = (case.op, case.form, case.columns, pick)
        if key not in self._alone:
            self._alone[key] = run(case, (pick,), batched=False)[0][0]
        return self._alone[key]

    def _columns(
        self, case: Mates, picks: tuple[int, ...], *, batched: bool
    ) -> tuple[Floats, bool]:
        """Results (columns, ROWS), and whether what lies behind them was left alone."""
        matrix = _generator(case.form, case.columns, 0).standard_normal((ROWS, case.columns))
        key = ("matvec", case.form, "kparallel")
        if batched and case.op == "few":
            key = ("matvec_few", f"{case.form}@{case.max_cols}", "kparallel")
        elif batched:
            key = ("matvec_batched", case.form, "kparallel")
        with Lab(self._device) as lab:
            flow = lab.flow(
                [key],
                {"MAX_COLS": case.max_cols},
                tokens=range(len(picks)),
                batched=batched,
                max_cols=case.max_cols,
            )
            if case.op == "few":
                flow = replace(flow, sequences=len(picks))
            y = lab.output(len(picks) + case.max_cols, ROWS)
            x = np.stack([_input(case, pick) for pick in picks])
            ops.linear(flow, lab.values(x), lab.weight(case.form, matrix.astype(np.float32)), y)
            return _read(y, len(picks))

    def _experts(
        self, case: Mates, picks: tuple[int, ...], *, batched: bool
    ) -> tuple[Floats, bool]:
        """The routed sums (tokens, K); each input has a routing of its own."""
        width, spec, tokens = case.columns, _EXPERTS, len(picks)
        gate, up, down = _expert_matrices(case.form, width)
        logits = _generator(case.form, width, 2).standard_normal((len(POOL), spec.count))
        keys = [(op, case.form, "kparallel") for op in ("matvec_expert", "matvec_experts")]
        keys += [("gated", "silu", "any"), ("combine_experts", "", "any")]
        keys += [(op, f"@{spec.count}", "any") for op in ("route", "group_by_expert")]
        pairs = tokens * spec.used
        with Lab(self._device) as lab:
            flow = lab.flow(
                keys,
                {"MAX_COLS": case.max_cols},
                tokens=range(tokens),
                batched=batched,
                max_cols=case.max_cols,
            )
            routing = Routing(
                lab.values(logits[list(picks)].astype(np.float32)),
                lab.buffer(np.full(pairs, -1, dtype=np.int32)),
                lab.values(np.full((tokens, spec.used), np.nan, dtype=np.float32)),
                lab.buffer(np.full(spec.count + 1, -1, dtype=np.int32)),
                lab.buffer(np.full(pairs, -1, dtype=np.int32)),
            )
            experts.route(flow, spec, routing)
            experts.group_by_expert(flow, spec, routing)
            scratch = ExpertScratch(*(lab.output(pairs + case.max_cols, width) for _ in range(3)))
            out = lab.output(tokens + case.max_cols, width)
            experts.routed_sum(
                flow,
                lab.values(np.stack([_input(case, pick) for pick in picks])),
                spec,
                routing,
                (_stack(lab, case, gate), _stack(lab, case, up), _stack(lab, case, down)),
                lab.vector(np.linspace(0.5, 2, spec.count, dtype=np.float32)),
                "silu",
                scratch,
                out,
            )
            rows, behind = _read(out, tokens)
            inside = [_read(values, pairs)[1] for values in (scratch.gate, scratch.up, scratch.out)]
            return rows, behind and all(inside)


def _check(case: Mates) -> None:
    """Raises InputError for a case that nothing computes."""
    forms = EXPERT_FORMS if case.op == "experts" else FORMS
    few = few_columns("kparallel", len(case.picks)) if case.op == "few" else case.max_cols
    block = FORMATS[case.form].block_elements if case.form in forms else 1
    for holds, what, expected in (
        (case.form in forms, f"format is {case.form}", f"one of {', '.join(forms)}"),
        (case.columns % block == 0, f"length is {case.columns}", f"a multiple of {block}"),
        (case.max_cols == few, f"MAX_COLS is {case.max_cols}", f"{few}, as this step's kernel has"),
        (max(case.picks) < len(POOL), f"an input is {max(case.picks)}", f"below {len(POOL)}"),
    ):
        if not holds:
            raise InputError(f"relation {case.id}: {what}, expected {expected}")


def _generator(form: str, columns: int, what: int) -> np.random.Generator:
    return np.random.default_rng([FORMATS[form].ggml_type, columns, what])


def _input(case: Mates, pick: int) -> Floats:
    with np.errstate(invalid="ignore"):
        x = _generator(case.form, case.columns, 1).standard_normal(case.columns)
        made = list(POOL.values())[pick](x.astype(np.float32))
        return np.ascontiguousarray(made, dtype=np.float32)


@cache
def _expert_matrices(form: str, width: int) -> tuple[NDArray[np.uint8], ...]:
    """Blocks of gate, up and down, each (experts * width rows)."""
    draw = _generator(form, width, 0)
    rows = (_EXPERTS.count * width, width)
    return tuple(
        quantise(FORMATS[form], draw.standard_normal(rows).astype(np.float32)) for _ in range(3)
    )


def _stack(lab: Lab, case: Mates, raw: NDArray[np.uint8]) -> DeviceTensor:
    shape = (_EXPERTS.count, case.columns, case.columns)
    return lab.matrix(case.form, shape, raw)


def _read(values: Values, rows: int) -> tuple[Floats, bool]:
    """The first `rows` rows, and whether everything behind them is still poison."""
    every = values.buffer.download((values.buffer.nbytes // 4,), np.uint32)
    count = rows * values.width
    return (
        every[:count].view(np.float32).reshape(rows, values.width),
        bool((every[count:] == _POISON).all()),
    )


def _same(got: Floats, want: Floats) -> bool:
    """Equal bits, except that one NaN is like another, unless it is the poison of an element that
    was never written: a NaN's bits are no promise.
    """
    bits = got.view(np.uint32)
    both = np.isnan(got) & np.isnan(want) & (bits != _POISON)
    return bool(((bits == want.view(np.uint32)) | both).all())
