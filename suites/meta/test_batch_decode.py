"""Faults in steps of several sequences, planted one by one, in engines that are right alone."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend_hip.registry import MATRIX_TILES, PACKED_MOST, PACKED_TILE
from reference.forward import DenseCache
from suites.harness.batch_decode import NAME
from suites.harness.batch_plans import LONGEST, MANY, SEQUENCES, Plan, few, many, plans_of
from suites.harness.fake_engine import FakeEngine, FakeStep
from suites.harness.fault_models import seeded_prompt
from suites.harness.kernels import family
from suites.harness.narrow_flow import TOKENS
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict
from suites.meta import broken
from suites.meta.models import LLAMA, prompt, tiny_model

Chosen = Sequence[int] | None
DENSE: DenseCache = {}
ROWS = (SEQUENCES + 1, *(n + d for n in (PACKED_TILE, PACKED_MOST) for d in (-1, 0, 1)), 64)


class _NextSequencesToken(FakeEngine):
    """Row r reads the token of the row behind it."""

    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        return super().decode_batch([*tokens[1:], tokens[0]], sequences)


class _RowsBySequence(FakeEngine):
    """Results come by sequence, whatever order was asked for."""

    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        done = super().decode_batch(tokens, sequences)
        return done if sequences is None else [done[i] for i in np.argsort(sequences)]


class _LastBit(FakeEngine):
    """The last row's logits are off by one bit, in memory of the results' own."""

    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        *first, last = super().decode_batch(tokens, sequences)
        logits = last.tail.logits.copy()
        logits[0] = np.nextafter(logits[0], np.float32(0))
        return [*first, replace(last, tail=replace(last.tail, logits=logits))]


class _FirstTokenForAll(FakeEngine):
    def step_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[int]:
        emitted = super().step_batch(tokens, sequences)
        return [emitted[0]] * len(emitted)


class _OneResult(FakeEngine):
    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        return super().decode_batch(tokens, sequences)[:1]


class _OldStamps(FakeEngine):
    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        first, *rest = super().decode_batch(tokens, sequences)
        old = [replace(s, tail=replace(s.tail, staged_stamp=s.tail.staged_stamp - 1)) for s in rest]
        return [first, *old]


class _OneColumnKernels(FakeEngine):
    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        routes = self._routes("per-token", len(tokens))
        return [replace(s, routes=routes) for s in super().decode_batch(tokens, sequences)]


class _WritesIntoTheFirst(FakeEngine):
    """What a sequence leaves behind is read from sequence 0."""

    def kv_contents(self, layer: int, sequence: int = 0) -> Any:
        return super().kv_contents(layer, 0)


class _PrefillsTheFirst(FakeEngine):
    def prefill_batched(self, tokens: Sequence[int], *, sequence: int = 0, **rest: Any) -> Any:
        return super().prefill_batched(tokens, sequence=0, **rest)


class _FourRows(FakeEngine):
    """Rows behind the fourth get its token."""

    def decode_batch(self, tokens: Sequence[int], sequences: Chosen = None) -> list[FakeStep]:
        return super().decode_batch([tokens[min(row, 3)] for row in range(len(tokens))], sequences)


class _WrongNarrowFlow(FakeEngine):
    """RoPE is a position late in flows of as many tokens as packed products take, and in no other:
    a prompt of a tile at most, or of more than two, does not meet it."""

    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> Any:
        few = PACKED_TILE < len(tokens) <= PACKED_MOST
        with broken.ROPE_POSITION() if few else nullcontext():
            return super().prefill_batched(tokens, **rest)


class _NotPacked(FakeEngine):
    """Few columns run the batched kernels that packed ones stand for."""

    def _routes(self, mode: str, launches: int, sequences: int = 1) -> dict[str, int]:
        routes = super()._routes(mode, launches, sequences)
        return {family(route): count for route, count in routes.items()}


class _OneRowOfMany(FakeEngine):
    """Only the last row where the logits of all tokens were asked for."""

    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> Any:
        result = super().prefill_batched(tokens, **rest)
        return replace(result, logits=result.logits[-1:])


def judged(
    engine: type[FakeEngine], sequences: int = SEQUENCES, length: int | None = None, **build: Any
) -> Verdict:
    model = tiny_model(LLAMA)
    options = Options(n_decode=1, **build)
    path = options.path
    return validate(
        model,
        lambda: engine(model, sequences=sequences, path=path),
        seeded_prompt(model, length, 5) if length else prompt(model),
        options,
        dense=DENSE,
    )


def neighbours_token() -> Verdict:
    return judged(_NextSequencesToken)


def wrong_narrow_flow() -> Verdict:
    return judged(_WrongNarrowFlow, 1, PACKED_TILE, path="matrix")


def _check(verdict: Verdict) -> Check:
    (check,) = [check for check in verdict.checks if check.name == NAME]
    return check


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (_NextSequencesToken, "sequence 1 in row 0 of 3: logits differ from the sequence alone"),
        (_RowsBySequence, "sequence 1 in row 0 of 3: logits differ from the sequence alone"),
        (_LastBit, "sequence 0 in row 2 of 3: logits differ from the sequence alone"),
        (_FirstTokenForAll, "step_batch emits"),
        (_OneResult, "1 results of 3 rows"),
        (_OldStamps, "sequence 2 in row 1 of 3: generation stamp"),
        (_WritesIntoTheFirst, "sequence 1: "),
        (_PrefillsTheFirst, "sequence 2, "),
    ],
)
def test_only_this_check_sees_it(engine: type[FakeEngine], words: str) -> None:
    verdict = judged(engine)
    assert [check.name for check in verdict.checks if check.state is not State.OK] == [NAME]
    assert verdict.state is State.DIVERGED
    assert words in verdict.summary()
    assert NAME in verdict.summary()


def test_steps_by_the_kernels_for_one_column_prove_nothing() -> None:
    verdict = judged(_OneColumnKernels)
    assert verdict.state is State.INVALID
    assert "never ran matvec_few" in verdict.summary()


@pytest.mark.parametrize("modes", [("per-token",), ("batched",), ("per-token", "batched")])
def test_a_sound_engine_passes(modes: tuple[str, ...]) -> None:
    verdict = judged(FakeEngine, modes=modes)
    assert verdict.summary() == "ok"
    check = _check(verdict)
    assert check.elements > 2 * SEQUENCES * tiny_model(LLAMA).spec.vocab_size
    assert check.detail == "3 sequences, 7 steps, up to 27 positions"


@pytest.mark.parametrize("length", [PACKED_TILE, PACKED_MOST + 1])
def test_few_columns_of_path_matrix_are_judged_op_by_op(length: int) -> None:
    verdict = judged(FakeEngine, 1, length, path="matrix")
    assert verdict.summary() == "ok"
    assert [check for check in verdict.checks if check.name.startswith("local, narrow flow: ")]
    verdict = judged(_WrongNarrowFlow, 1, length, path="matrix")
    assert verdict.summary() == f"diverged: Qcur_pos-0 (rope), prefill of {TOKENS} tokens"


@pytest.mark.parametrize("length", [PACKED_TILE, PACKED_TILE + 1])
def test_few_columns_by_other_kernels_prove_nothing(length: int) -> None:
    """Whether the prompt itself has so few tokens or a flow of its own is fed."""
    verdict = judged(_NotPacked, 1, length, path="matrix")
    assert verdict.state is State.INVALID
    assert "kernels: batched prefill, narrow flow: never ran matvec_batched_packed" in (
        verdict.summary()
    )


@pytest.mark.parametrize("path", ["kparallel", "matrix"])
def test_logits_of_fewer_positions_than_were_fed_are_refused(path: str) -> None:
    verdict = judged(_OneRowOfMany, path=path)
    assert verdict.summary().endswith("tokens of sequence 0 alone: logits of 1 positions")


@pytest.mark.parametrize("length", [PACKED_TILE + 1, PACKED_MOST])
def test_a_prompt_of_few_columns_is_traced_once(length: int) -> None:
    verdict = judged(FakeEngine, 1, length, path="matrix")
    (check,) = [check for check in verdict.checks if "narrow flow" in check.name]
    assert check.name.startswith("kernels: ")
    assert not [note for note in verdict.notes if "op by op" in note]


def test_a_second_tile_of_rows_is_judged_on_path_matrix() -> None:
    assert judged(_FourRows).summary() == "ok"
    verdict = judged(FakeEngine, MANY, path="matrix")
    assert verdict.summary() == "ok"
    assert _check(verdict).detail.endswith(", then 17 sequences, 2 steps, up to 32 positions")
    verdict = judged(_FourRows, MANY, path="matrix")
    assert "in row 4 of 17: logits differ" in verdict.summary()


def test_rows_that_are_not_judged_are_said() -> None:
    verdict = judged(FakeEngine, MANY - 1, path="matrix")
    assert verdict.summary() == "ok"
    assert _check(verdict).detail.endswith(", then 16 sequences, 2 steps, up to 16 positions")
    (note,) = [note for note in verdict.notes if "second tile" in note]
    assert note.endswith("the engine holds 16 sequences (--sequences 17)")


@pytest.mark.parametrize("path", ["kparallel", "matrix"])
def test_more_sequences_judge_no_width_less(path: str) -> None:
    """What few rows run is judged beside what many run."""
    fewer = {len(order) for plan in plans_of(path, MANY, 5) for order in plan.orders}
    more = {len(order) for plan in plans_of(path, 64, 5) for order in plan.orders}
    assert more >= {width for width in fewer if width < MANY} | {64}
    assert path == "kparallel" or PACKED_MOST in more


class _SmallChunks(FakeEngine):
    """Flows of 16 tokens, whose products give other bits than those of 17."""

    def prefill_batched(self, tokens: Sequence[int], **rest: Any) -> Any:
        result = super().prefill_batched(tokens, **rest)
        return replace(result, chunks=-(-len(tokens) // PACKED_TILE))


def test_flows_that_are_too_short_for_wide_steps_are_said() -> None:
    verdict = judged(_SmallChunks, MANY, path="matrix")
    assert verdict.summary() == "ok"
    assert _check(verdict).detail == "3 sequences, 5 steps, up to 27 positions"
    (note,) = [note for note in verdict.notes if "17 rows were not judged" in note]
    assert "in one flow" in note


def test_wider_steps_of_an_exact_path_are_judged_where_the_engine_has_them() -> None:
    verdict = judged(FakeEngine, 9)
    assert verdict.summary() == "ok"
    assert _check(verdict).detail.endswith(", then 9 sequences, 6 steps, up to 19 positions")
    assert "in row 4 of 9: logits differ" in judged(_FourRows, 9).summary()


def test_the_longest_sequence_is_as_long_as_the_prompt() -> None:
    verdict = judged(FakeEngine, length=30)
    assert _check(verdict).detail == "3 sequences, 7 steps, up to 36 positions"
    assert few(LONGEST + 1, "kparallel").longest == LONGEST + 6


@pytest.mark.parametrize(
    ("sequences", "build", "why"),
    [
        (1, {}, "the engine holds 1 sequence, 3 are needed"),
        (SEQUENCES, {"path": "serial"}, "path serial does not promise"),
    ],
)
def test_what_is_not_run_is_said(sequences: int, build: dict[str, Any], why: str) -> None:
    verdict = judged(FakeEngine, sequences, **build)
    assert verdict.summary() == "ok"
    assert NAME not in [check.name for check in verdict.checks]
    assert [note for note in verdict.notes if why in note]


class _StepTakesMore(FakeEngine):
    def step(self, token: int, *, sequence: int = 0) -> int:
        full = self.positions[sequence] == self._context
        return 0 if full else super().step(token, sequence=sequence)


class _PromptTakesMore(FakeEngine):
    def prefill_batched(self, tokens: Sequence[int], *, sequence: int = 0, **rest: Any) -> Any:
        if self.positions[sequence] < self._context:
            self._last = super().prefill_batched(tokens, sequence=sequence, **rest)
        return self._last


@pytest.mark.parametrize("path", ["kparallel", "matrix"])
@pytest.mark.parametrize(
    ("engine", "word"),
    [(FakeEngine, "ok"), (_StepTakesMore, "step"), (_PromptTakesMore, "prompt")],
)
def test_a_full_sequence_takes_no_more(engine: type[FakeEngine], word: str, path: str) -> None:
    context = few(1, path).longest - 1
    model = tiny_model(LLAMA)
    verdict = validate(
        model,
        lambda: engine(model, sequences=SEQUENCES, path=path, context_length=context),
        prompt(model)[:5],
        Options(n_decode=1, path=path),
        dense=DENSE,
        context_length=context,
    )
    said = f"diverged: {NAME}: sequence 1 takes token {context + 1} of {context} as a {word}"
    assert verdict.summary() == (word if word == "ok" else said)


def test_no_room_for_the_steps_is_said() -> None:
    model = tiny_model(LLAMA)
    steps = max(few(1, "kparallel").behind(sequence) for sequence in range(SEQUENCES))
    verdict = validate(
        model,
        lambda: FakeEngine(model, sequences=SEQUENCES),
        prompt(model)[:steps],
        Options(n_decode=0),
        context_length=steps,
    )
    assert verdict.summary() == "ok"
    assert [note for note in verdict.notes if "tokens and a prompt need more" in note]


@pytest.mark.parametrize(
    "plan",
    [
        few(5, "kparallel"),
        few(40, "matrix"),
        *(many(rows, path) for rows in ROWS for path in ("kparallel", "matrix")),
    ],
    ids=lambda plan: f"{plan.rows}-{'one-flow' if plan.one_flow else plan.flow}",
)
def test_each_sequence_stands_in_a_row_of_another_number(plan: Plan) -> None:
    sequences = range(len(plan.lengths))
    assert sorted(plan.orders[0]) == list(sequences)
    assert all(row != sequence for row, sequence in enumerate(plan.orders[0]))
    steps = [plan.behind(sequence) for sequence in sequences]
    ends = [length + fed for length, fed in zip(plan.lengths, steps, strict=True)]
    assert max(ends) == plan.longest
    assert len(set(plan.lengths)) >= min(plan.rows, 12)
    # Path matrix runs another kernel for each number of tiles, and for one column.
    if plan.one_flow:
        counts = {*plan.lengths, *ends, *map(len, (*plan.orders, *plan.production))}
        assert len({sum(count > tile for tile in (1, *MATRIX_TILES)) for count in counts}) == 1
    assert plan.flow is None or plan.flow == PACKED_TILE
