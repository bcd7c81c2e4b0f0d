"""An engine made of the float32 reference, with plantable faults: how the judge is judged.

Both prefill modes feed one token at a time, so that a clean fake keeps the bit-equality that the
real engine's `kparallel` path promises; the routes that it reports differ as the real ones do.
Nothing outside the tests of the judge may use it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from reference.delta_net import RecurrentState
from reference.forward import DenseCache, Reference
from reference.model import Model, check_tokens
from reference.model.errors import DeviceError, InputError
from reference.model.sampling import argmax
from reference.model.trace import Trace
from suites.harness.kernels import family, packed_rows, product_rows
from suites.harness.protocol import ARGMAX_SAW_NAN, STAGING_POISON


@dataclass(frozen=True)
class FakeTail:
    poison: int
    staged_token: int
    staged_stamp: int
    expected_stamp: int
    device_token: int
    device_stamp: int
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class FakeStep:
    token: int
    tail: FakeTail
    fed_token: int
    position: int
    routes: dict[str, int]


@dataclass(frozen=True)
class FakePrefill:
    mode: Literal["per-token", "batched"]
    path: str
    n_tokens: int
    logits: NDArray[np.float32]
    tail: FakeTail
    fed_token: int
    routes: dict[str, int]
    chunks: int
    position: int
    logits_poisoned: int


@dataclass(frozen=True)
class FakePair:
    per_token: FakePrefill
    batched: FakePrefill
    kv_bits_equal: bool = True


def _same(value: Any, *_: Any) -> Any:
    return value


@dataclass(frozen=True)
class Fault:
    """What one broken engine does differently; every hook is the identity unless given.

    `numerics` is active while the forward pass runs (it patches reference functions), in both modes
    or in `numerics_mode` only. `logits` changes what the device holds before argmax. `tail` and
    `prefilled` and `stepped` change records; they get the one before as second argument, or None;
    `prefilled` the last one of the other mode.
    `kv` and `state` change what is read back of a layer. `at_chunk` may change the recurrent states
    in place between the chunks of a batched prefill, `at_reset` after a reset; it gets the states
    of before as second argument.
    """

    numerics: Callable[[], AbstractContextManager[Any]] = nullcontext
    numerics_mode: str | None = None
    logits: Callable[[NDArray[np.float32], str], NDArray[np.float32]] = _same
    tail: Callable[[FakeTail, FakeTail | None, str], FakeTail] = _same
    prefilled: Callable[[FakePrefill, FakePrefill | None], FakePrefill] = _same
    stepped: Callable[[FakeStep, FakeStep | None], FakeStep] = _same
    kv: Callable[[Any, int, str], Any] = _same
    state: Callable[[Any, int, str], Any] = _same
    at_chunk: Callable[[dict[int, RecurrentState]], None] = _same
    at_reset: Callable[[dict[int, RecurrentState], dict[int, RecurrentState]], None] = _same
    trace_only: bool = False


CLEAN = Fault()


class FakeEngine:
    """Fits suites.harness.protocol.JudgedEngine."""

    def __init__(
        self,
        model: Model,
        fault: Fault = CLEAN,
        *,
        path: str = "kparallel",
        kv_type_k: str = "f16",
        kv_type_v: str = "f16",
        max_cols: int = 40,
        dense: DenseCache | None = None,
        batched_prefill: str = "on",
        sequences: int = 1,
        context_length: int | None = None,
    ) -> None:
        self.batched_prefill = batched_prefill
        dense = {} if dense is None else dense
        self._sequences = [
            Reference(
                model, dtype=np.float32, kv_type_k=kv_type_k, kv_type_v=kv_type_v, dense=dense
            )
            for _ in range(sequences)
        ]
        self._reference = self._sequences[0]
        self._model, self._kv_types = model, (kv_type_k, kv_type_v)
        self._context = context_length or model.spec.context_length
        self._fault = fault
        self._path = path
        self._max_cols = max_cols
        self._stamp = 0
        self._mode = "none"
        self._last_tail: FakeTail | None = None
        self._last_prefill: dict[str, FakePrefill] = {}
        self._last_step: FakeStep | None = None

    @property
    def position(self) -> int:
        return self._reference.position

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(reference.position for reference in self._sequences)

    def _accept(self, tokens: Sequence[int], sequence: int) -> None:
        """Raises InputError for tokens that no longer fit."""
        check_tokens(list(tokens), self._model.spec, self._context - self.positions[sequence])

    @contextmanager
    def _at(self, sequence: int) -> Iterator[None]:
        """What is fed or read meanwhile is of that sequence."""
        self._reference = self._sequences[sequence]
        try:
            yield
        finally:
            self._reference = self._sequences[0]

    def reset(self) -> None:
        for sequence in range(len(self._sequences)):
            with self._at(sequence):
                before = {layer: state.copy() for layer, state in self._states.items()}
                self._reference.reset()
                self._fault.at_reset(self._states, before)

    @property
    def _states(self) -> dict[int, RecurrentState]:
        return self._reference._states

    def recurrent_state(self, layer: int, sequence: int = 0) -> RecurrentState:
        state = self._sequences[sequence].recurrent_state(layer)
        changed: RecurrentState = self._fault.state(state, layer, self._mode)
        return changed

    def close(self) -> None:
        for reference in self._sequences:
            reference.reset()

    def kv_contents(self, layer: int, sequence: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
        held = self._sequences[sequence].kv_contents(layer)
        contents = self._fault.kv(held, layer, self._mode)
        return contents[0], contents[1]

    def prefill(self, tokens: Sequence[int]) -> FakePrefill:
        if self.batched_prefill == "off":
            return self.prefill_per_token(tokens)
        return self.prefill_batched(tokens)

    def prefill_per_token(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> FakePrefill:
        self._accept(tokens, sequence)
        routes = self._routes("per-token", len(tokens))
        with self._at(sequence):
            return self._prefill("per-token", tokens, trace, routes, len(tokens), logits)

    def prefill_batched(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> FakePrefill:
        self._accept(tokens, sequence)
        chunks = -(-len(tokens) // self._max_cols)
        routes = self._routes("batched", chunks)
        with self._at(sequence):
            return self._prefill("batched", tokens, trace, routes, chunks, logits)

    def _routes(self, mode: str, launches: int, sequences: int = 1) -> dict[str, int]:
        about = (self._model, self._path, mode, self._kv_types)
        rows = set(product_rows(*about, sequences=sequences)[0])
        if self._path == "matrix" and mode == "batched":
            # As of the real one's few columns, which are of the same family.
            packed = packed_rows(self._model)
            rows = rows - {family(row) for row in packed} | packed
        return {**dict.fromkeys(sorted(rows), launches), "argmax any": 1}

    def _prefill(
        self,
        mode: Literal["per-token", "batched"],
        tokens: Sequence[int],
        trace: Trace | None,
        routes: dict[str, int],
        chunks: int,
        logits: Literal["last", "all"],
    ) -> FakePrefill:
        self._mode = mode
        self._reference.half_products = mode == "batched" and self._path == "matrix"
        wanted = Trace() if trace is None else trace
        rows = []
        with self._numerics(mode, trace is not None):
            for place, token in enumerate(tokens):
                if mode == "batched" and place and place % self._max_cols == 0:
                    self._fault.at_chunk(self._states)
                rows.append(self._reference.decode(token, trace=wanted))
        self._reference.half_products = False
        if trace is not None:
            self._keep_last_row(trace)
        row = self._fault.logits(rows[-1].copy(), mode)
        before = rows[:-1] if logits == "all" else []
        result = FakePrefill(
            mode=mode,
            path=self._path,
            n_tokens=len(tokens),
            logits=np.stack([*before, row]),
            tail=self._tail(row, mode),
            fed_token=tokens[-1],
            routes=routes,
            chunks=chunks,
            position=self._reference.position,
            logits_poisoned=0,
        )
        other = self._last_prefill.get("per-token" if mode == "batched" else "batched")
        result = self._fault.prefilled(result, other)
        self._last_prefill[mode] = result
        return result

    def decode(self, token: int, *, sequence: int = 0) -> FakeStep:
        self._accept((token,), sequence)
        self._mode = "decode"
        with self._at(sequence), self._numerics("decode", False):
            row = self._reference.decode(token)
        row = self._fault.logits(row.copy(), "decode")
        tail, position = self._tail(row, "decode"), self.positions[sequence]
        step = FakeStep(tail.staged_token, tail, token, position, self._routes("per-token", 1))
        step = self._fault.stepped(step, self._last_step)
        self._last_step = step
        return step

    def decode_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> list[FakeStep]:
        """One sequence after the other, with the stamp that a common step gives them all."""
        self._mode = "decode"
        self._stamp += 1
        chosen = range(len(self._sequences)) if sequences is None else sequences
        routes = self._routes("decode batch", 1, len(chosen))
        done = []
        for token, sequence in zip(tokens, chosen, strict=True):
            self._accept((token,), sequence)
        for token, sequence in zip(tokens, chosen, strict=True):
            with self._at(sequence), self._numerics("decode batch", False):
                self._reference.half_products = self._path == "matrix"
                row = self._reference.decode(token)
                self._reference.half_products = False
            tail = self._tail_of(self._fault.logits(row.copy(), "decode batch"), "decode batch")
            position = self.positions[sequence]
            done.append(FakeStep(tail.staged_token, tail, token, position, routes))
        return done

    def step_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> list[int]:
        return [step.token for step in self.decode_batch(tokens, sequences)]

    def step(self, token: int, *, sequence: int = 0) -> int:
        """The token that staging holds; DeviceError where it is none of this very step."""
        self._accept((token,), sequence)
        self._mode = "decode"
        with self._at(sequence), self._numerics("decode", False):
            row = self._reference.decode(token)
        tail = self._tail(self._fault.logits(row.copy(), "decode"), "decode")
        if tail.staged_stamp != tail.expected_stamp or tail.staged_token < 0:
            raise DeviceError(
                f"sampler tail: staging holds token {tail.staged_token} of step "
                f"{tail.staged_stamp}, expected a token of step {tail.expected_stamp}"
            )
        return tail.staged_token

    def run_tail(self, logits: NDArray[np.float32]) -> list[FakeTail]:
        self._stamp += 1
        return [self._tail_of(row.copy(), "chosen") for row in logits]

    def _numerics(self, mode: str, traced: bool) -> AbstractContextManager[Any]:
        wrong_mode = self._fault.numerics_mode not in (None, mode)
        if wrong_mode or (self._fault.trace_only and not traced):
            return nullcontext()
        return self._fault.numerics()

    def _tail(self, row: NDArray[np.float32], mode: str) -> FakeTail:
        self._stamp += 1
        return self._tail_of(row, mode)

    def _tail_of(self, row: NDArray[np.float32], mode: str) -> FakeTail:
        try:
            token = argmax(row)
        except InputError:
            token = ARGMAX_SAW_NAN
        clean = FakeTail(STAGING_POISON, token, self._stamp, self._stamp, token, self._stamp, row)
        tail = self._fault.tail(clean, self._last_tail, mode)
        self._last_tail = tail
        return tail

    @staticmethod
    def _keep_last_row(trace: Trace) -> None:
        """Token by token records the final norm and logits of each; an engine keeps the last."""
        arrays = {
            name: array.astype(np.float32) if array.dtype.kind == "f" else array
            for name, array in trace.arrays.items()
        }
        trace._parts.clear()
        for name, array in arrays.items():
            trace.record(name, array[-1:] if name.startswith("result_") else array)


@contextmanager
def patched(
    target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces the function at the dotted path `target` by `wrap(original)` for a while."""
    module_name, name = target.rsplit(".", 1)
    module = __import__(module_name, fromlist=[name])
    with mock.patch.object(module, name, wrap(getattr(module, name))):
        yield


def stale(tail: FakeTail, before: FakeTail | None) -> FakeTail:
    """`tail` as it looks when this step's staging copy never ran: the step before is left there."""
    if before is None:
        return replace(tail, staged_token=STAGING_POISON, staged_stamp=0)
    return replace(tail, staged_token=before.staged_token, staged_stamp=before.staged_stamp)
