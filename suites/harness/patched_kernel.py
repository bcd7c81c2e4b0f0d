"""The self-test of validate: one kernel is patched in a copy of the engine, and must be seen.

Planted faults (selftest.py, plants.py) are changes of recorded data. This one goes the whole way: a
changed source is compiled, loaded as a fresh module, launched, recorded and judged. Beside it runs
a copy without a change, which must be ok, so that what is seen is the patch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from backend_hip.registry import REGISTRY, Key
from fixtures.faults import Change
from reference.model import Model
from reference.model.errors import InputError
from reference.model.trace import Trace
from suites.harness.kernels import path_of
from suites.harness.local import LocalRules, PointCheck, judge_trace
from suites.harness.patched import ROOT
from suites.harness.protocol import JudgedEngine, Progress, prefill_of
from suites.harness.verdict import Check, State, Verdict

NAME = "self-test: a patched kernel is seen"
LENGTH = 4
"""Tokens of the prompt that both copies are fed."""


@dataclass(frozen=True)
class KernelPatch:
    """`change` is in the code of the registry's kernel files `kernels`; the first diverged point
    must be of one of the judge's `ops`.
    """

    id: str
    what: str
    change: Change
    kernels: tuple[str, ...]
    ops: tuple[str, ...]


_KERNELS = "backend_hip/kernels"
_PRODUCT_OPS = ("linear", "per_layer_inputs")
PATCHES: tuple[KernelPatch, ...] = (
    KernelPatch(
        "serial-accumulator",
        "accumulators of the serial product start at 1",
        Change(f"{_KERNELS}/matvec_serial.hip", "sums[c] = 0.0f;", "sums[c] = 1.0f;"),
        ("matvec_serial.hip",),
        _PRODUCT_OPS,
    ),
    KernelPatch(
        "matrix-result",
        "results of the matrix unit are too large by 1",
        Change(
            f"{_KERNELS}/matvec_batched_matrix.hip",
            "= sum * scales[column];",
            "= sum * scales[column] + 1.0f;",
        ),
        ("matvec_batched_matrix.hip",),
        _PRODUCT_OPS,
    ),
    KernelPatch(
        "packed-result",
        "results of the matrix unit for few columns are too large by 1",
        Change(
            f"{_KERNELS}/matvec_packed.hip",
            "= sums[i] * scales[tile * SIDE + column];",
            "= sums[i] * scales[tile * SIDE + column] + 1.0f;",
        ),
        ("matvec_packed.hip",),
        _PRODUCT_OPS,
    ),
    KernelPatch(
        "accumulator",
        "accumulators of the dot product start at 1",
        Change(f"{_KERNELS}/dot.h", "sums[row][c] = 0.0f;", "sums[row][c] = 1.0f;"),
        ("matvec_batched.hip", "matvec.hip"),
        _PRODUCT_OPS,
    ),
    KernelPatch(
        "norm-mean",
        "RMS norm divides by one element too many",
        Change(f"{_KERNELS}/rms.h", "static_cast<float>(width)", "(width + 1.0f)"),
        ("rms_norm.hip",),
        ("rms_norm", "per_layer_inputs"),
    ),
)
"""The first whose kernels ran is planted; every model runs one of them on every path."""


class CopiedKernels(Protocol):
    """What was compiled and what was launched, by registry row."""

    @property
    def code_hashes(self) -> Mapping[Key, str]: ...
    @property
    def routes(self) -> Mapping[Key, int]: ...


class CopiedEngine(JudgedEngine, Protocol):
    """An engine whose kernels can be told apart from another's."""

    @property
    def kernels(self) -> CopiedKernels: ...


OpenCopy = Callable[[Sequence[Change]], AbstractContextManager[CopiedEngine]]
"""Opens a fresh engine made of changed sources and closes it at the end of the block."""


@dataclass(frozen=True)
class _Copy:
    """What one copy recorded, and the code that it launched."""

    trace: Trace
    hashes: Mapping[Key, str]


def with_self_test(
    verdict: Verdict,
    model: Model,
    open_copy: OpenCopy,
    tokens: Sequence[int],
    mode: str,
    declared: LocalRules,
    say: Progress,
    patches: Sequence[KernelPatch] = PATCHES,
) -> Verdict:
    """The verdict with the self-test's check; with a note where it is not ok already.

    `declared` has the path that the engine was built for. A device error is raised.
    """
    if verdict.state is not State.OK:
        note = "no kernel was patched to test the judge, because this run is not ok as it is"
        return replace(verdict, notes=(*verdict.notes, note))
    rules = replace(declared, path=path_of(mode, declared.path))
    check = self_test(model, open_copy, tuple(tokens)[:LENGTH], mode, rules, say, patches)
    return replace(verdict, checks=(*verdict.checks, check))


def self_test(
    model: Model,
    open_copy: OpenCopy,
    tokens: tuple[int, ...],
    mode: str,
    rules: LocalRules,
    say: Progress,
    patches: Sequence[KernelPatch] = PATCHES,
) -> Check:
    """Ok where the judge finds the patched kernel's op broken first, and the sound copy ok."""
    say("self-test: a copy of the engine")
    sound = _run(open_copy, (), tokens, mode)
    patch = next((patch for patch in patches if _rows(patch, sound.hashes)), None)
    if patch is None:
        return _failed("no kernel that ran has a patch in the list")
    try:
        patch.change.apply((ROOT / patch.change.file).read_text(encoding="utf-8"))
    except InputError as error:
        return _failed(f"patch {patch.id} can't be made: {error}")
    say(f"self-test: a copy in which {patch.what}")
    changed = _run(open_copy, (patch.change,), tokens, mode)
    rows = _rows(patch, sound.hashes)
    same = [row for row in rows if changed.hashes.get(row) in (None, sound.hashes[row])]
    if same:
        return _failed(f"patch {patch.id} did not change the code of {' '.join(same[0]).strip()}")
    found, seen = _until_broken(model, changed.trace, rules)
    if found is None:
        return _failed(f"the judge did not see that {patch.what}")
    if found.check.state is not State.DIVERGED or found.op not in patch.ops:
        what = f"{found.point.name} ({found.op}) {found.check.state.value}"
        return _failed(f"the judge called {what}, although {patch.what}")
    control, _ = _until_broken(model, sound.trace, rules, seen)
    if control is not None:
        return _failed(f"a copy without a patch is not ok either: {control.check.link}")
    detail = f"{patch.what}: found at {found.check.link}, {len(rows)} code objects differ"
    return Check(NAME, State.OK, 1, detail=detail, unit="faults")


def _failed(detail: str) -> Check:
    return Check(NAME, State.INVALID, 1, detail=detail, link=f"self-test: {detail}", unit="faults")


def _run(open_copy: OpenCopy, changes: Sequence[Change], tokens: Sequence[int], mode: str) -> _Copy:
    """A traced prefill of a fresh copy; only rows that were launched keep their hash."""
    trace = Trace(meta={"mode": mode})
    with open_copy(changes) as engine:
        prefill_of(engine, mode)(tokens, trace=trace)
        hashes, ran = engine.kernels.code_hashes, engine.kernels.routes
        return _Copy(trace, {key: hashes[key] for key, launches in ran.items() if launches})


def _rows(patch: KernelPatch, ran: Mapping[Key, str]) -> list[Key]:
    """The launched rows whose code has the patch's text in it."""
    return [key for key in ran if REGISTRY.find(*key).file in patch.kernels]


def _until_broken(
    model: Model, trace: Trace, rules: LocalRules, at_most: int | None = None
) -> tuple[PointCheck | None, int]:
    """The first of the first `at_most` points that is not ok, and how many were judged."""
    count = 0
    for point in judge_trace(model, trace, rules):
        count += 1
        if point.check.state is not State.OK:
            return point, count
        if count == at_most:
            break
    return None, count
