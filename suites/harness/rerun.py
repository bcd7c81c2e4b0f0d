"""Runs the case that broke again, on either side and with values of the other side put in."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.forward import DenseCache
from reference.model import Model
from reference.model.trace import LOGITS, Trace
from suites.harness.compare import Array
from suites.harness.endtoend import Expected, PointDistance, References, distance
from suites.harness.kernels import path_of
from suites.harness.local import LocalRules
from suites.harness.protocol import JudgedEngine, Prefilled, Progress, prefill_of
from suites.harness.routing import Choices, FollowingReference, choices_of
from suites.harness.verdict import State

PROMPT_BEFORE = 8
"""Tokens of another prompt that the engine sees before a run that must not remember them."""


def other_prompt(tokens: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """A prompt to go before the judged one: what it leaves behind must not show."""
    return tuple((token + 1) % vocabulary for token in tokens[::-1][:PROMPT_BEFORE])


def after_another_prompt(
    engine: JudgedEngine, mode: str, tokens: Sequence[int], vocabulary: int
) -> Callable[..., Prefilled]:
    """The entry of a mode, on an engine that was reset behind another prompt than `tokens`."""
    feed = prefill_of(engine, mode)
    engine.reset()
    feed(other_prompt(tokens, vocabulary))
    engine.reset()
    return feed


@dataclass(frozen=True)
class Case:
    """What to run: token ids from position 0, one prefill mode, what the engine was built as."""

    tokens: tuple[int, ...]
    mode: str
    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"

    @property
    def rules(self) -> LocalRules:
        return LocalRules(path_of(self.mode, self.path), self.kv_type_k, self.kv_type_v)


@dataclass
class LaunchTrace(Trace):
    """A trace that also says which kernels were launched for each point: since the one before.

    `routes` is the engine's live count of launches by registry row (None: not known).
    """

    routes: Mapping[Any, int] | None = None
    launched: dict[str, dict[Any, int]] = field(default_factory=dict)
    _before: Counter[Any] = field(default_factory=Counter)

    def record(self, name: str, value: NDArray[Any]) -> None:
        super().record(name, value)
        if self.routes is None:
            return
        now = Counter(self.routes)
        mine = self.launched.setdefault(name, {})
        for key, count in (now - self._before).items():
            mine[key] = mine.get(key, 0) + count
        self._before = now


def run_engine(
    engine: JudgedEngine, model: Model, case: Case, given: Mapping[str, Array] | None = None
) -> LaunchTrace:
    """One traced run from a reset; `given` are values to go on with instead of the engine's own."""
    feed = after_another_prompt(engine, case.mode, case.tokens, model.spec.vocab_size)
    kernels = getattr(engine, "kernels", None)
    trace = LaunchTrace(
        meta={"mode": case.mode},
        replacements=given or {},
        routes=None if kernels is None else kernels.routes,
    )
    if trace.routes is not None:
        trace._before = Counter(trace.routes)
    feed(case.tokens, trace=trace)
    trace.tokens = case.tokens
    return trace


def run_untraced(engine: JudgedEngine, model: Model, case: Case) -> Array:
    """Last-token logits (V,) of the case as production runs it."""
    feed = after_another_prompt(engine, case.mode, case.tokens, model.spec.vocab_size)
    row: Array = np.asarray(feed(case.tokens).logits)[-1]
    return row


class ReferenceTrace(Trace):
    """Keeps a float64 reference run in the engine's dtypes and measures the engine against it."""

    def __init__(self, engine: Trace) -> None:
        super().__init__()
        self._engine = engine
        self.distances: dict[str, PointDistance] = {}

    def record(self, name: str, value: NDArray[Any]) -> None:
        self.distances[name] = distance(self._engine, name, value)
        with np.errstate(over="ignore"):
            kept = value.astype(np.int32 if value.dtype.kind == "i" else np.float32)
        super().record(name, kept)


@dataclass(frozen=True)
class Judged:
    """The reference's run of a case: what to expect of the last token, every value, distances.

    `choices` are experts that it followed because the engine's were near-ties.
    """

    expected: Expected
    trace: ReferenceTrace
    choices: Choices


def run_reference(
    model: Model, case: Case, plain: Trace, dense: DenseCache, say: Progress
) -> Judged:
    """The references on the case's tokens, routed as the engine was where that is no error."""
    choices = choices_of(plain, model.spec)
    for followed in (choices, {}) if choices else ({},):
        references = References(
            model, case.kv_type_k, case.kv_type_v, path=case.rules.path, dense=dense
        )
        references.choices.update(followed)
        trace = ReferenceTrace(plain)
        expected = references.feed(case.tokens, trace=trace, progress=say)
        if not followed or references.routing.check().state is State.OK:
            break
    return Judged(expected, trace, followed)


def run_reference_on(
    model: Model, case: Case, choices: Choices, dense: DenseCache, given: Mapping[str, Array]
) -> Array:
    """Last-token logits (V,) of the float64 reference that goes on with the `given` values."""
    reference = FollowingReference(
        model,
        dtype=np.float64,
        kv_type_k=case.kv_type_k,
        kv_type_v=case.kv_type_v,
        dense=dense,
        choices=choices,
    )
    with np.errstate(all="ignore"):
        logits: Array = reference.prefill(case.tokens, trace=Trace(replacements=given))[-1]
    return logits


def last_logits(trace: Trace) -> Array:
    row: Array = trace[LOGITS][-1]
    return row
