"""Sequences that decode together are held to what each of them gives alone, bit for bit.

Everything before this check decodes one sequence. Here several prompts of other lengths stand in
sequences of their own and advance in common steps: their products run other kernels, and every row
of a step has another position, cache and recurrent state. What each gives alone is
one prefill of all its tokens by the same engine, with the logits of every position: the checks
before this one hold prefills to the reference, and decoding alone to a prefill.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from reference.model import Model
from reference.model.sampling import argmax
from suites.harness.compare import Array
from suites.harness.generations import Generations
from suites.harness.kernels import kernels_check, product_rows
from suites.harness.left_behind import LeftBehind
from suites.harness.pair import bits_check, is_exact
from suites.harness.protocol import JudgedEngine, Prefilled, Progress, prefill_of
from suites.harness.run_options import Options
from suites.harness.tail import broken_prefill, broken_step
from suites.harness.verdict import Check, State, behind, counted, fact

NAME = "batched decode"
SEQUENCES = 3
"""What a judged engine holds: the fewest that put a column alone behind a full group of two, the
smallest group that a kernel keeps in shared memory. More cost nothing but KV memory."""
LENGTHS = (7, 2, 13)
"""Tokens of the prompts, all in one tile of keys: other positions for every row of a step. With all
steps none is longer than 16, the columns of a tile of the matrix unit: more run other kernels."""
ORDERS = ((2, 0, 1), (0, 2), (2, 1))
"""The sequences of each step by row: all, none in the row of its number, then parts. Of the last
step, which is production's, only the next tokens are read back."""
STEPS = len(ORDERS)


@dataclass(frozen=True)
class Batch:
    """`tokens` is the judged prompt, of which the prompts here are made. `room`: of the context."""

    model: Model
    tokens: tuple[int, ...]
    options: Options
    room: int


@dataclass
class _Alone:
    """What one sequence gives with no other beside it: `logits` (tokens, V) of every position."""

    logits: Array
    left: LeftBehind


@dataclass
class _Run:
    """`fed` counts the steps of each sequence so far."""

    engine: JudgedEngine
    batch: Batch
    generations: Generations
    broken_since: str
    fed: list[int] = field(default_factory=lambda: [0] * SEQUENCES)

    def checks(self) -> Iterator[Check]:
        """Runs one part after the other; a caller that sees one fail stops here."""
        alone = []
        for sequence in range(SEQUENCES):
            what, tokens = f"tokens of sequence {sequence} alone", self._tokens(sequence)
            self.engine.reset()
            made = self._feed(what, tokens, into=0, logits="all")
            broken, rows = broken_prefill(made, tokens), len(made.logits)
            yield self._says(broken is None, f"{NAME}: {what}: {broken}")
            yield self._says(rows == len(tokens), f"{NAME}: {what}: logits of {rows} positions")
            left = LeftBehind.of(self.engine, self.batch.model.spec)
            alone.append(_Alone(np.array(made.logits, copy=True), left))
        self.engine.reset()
        for sequence, expected in enumerate(alone):
            yield from self._prefill(sequence, expected)
        for order in ORDERS[:-1]:
            yield from self._step(order, alone)
        yield from self._production_step(ORDERS[-1], alone)
        yield from self._left_behind(alone)

    def _prompt(self, sequence: int) -> tuple[int, ...]:
        """Other tokens in each sequence and place, so that none can be taken for another."""
        batch = self.batch
        length = min(LENGTHS[sequence], batch.room - STEPS)
        given, vocabulary = batch.tokens, batch.model.spec.vocab_size
        return tuple(
            (given[i % len(given)] + sequence + i // len(given)) % vocabulary for i in range(length)
        )

    def _token(self, sequence: int, index: int) -> int:
        """What step `index` of a sequence is fed: chosen here, so that it is always an id."""
        vocabulary = self.batch.model.spec.vocab_size
        return (self.batch.tokens[-1] + 1 + sequence + SEQUENCES * index) % vocabulary

    def _tokens(self, sequence: int) -> tuple[int, ...]:
        """All that a sequence is fed."""
        steps = sum(sequence in order for order in ORDERS)
        fed = (self._token(sequence, index) for index in range(steps))
        return (*self._prompt(sequence), *fed)

    def _feed(self, what: str, tokens: tuple[int, ...], *, into: int, logits: str) -> Prefilled:
        feed = prefill_of(self.engine, self.batch.options.modes[-1])
        result = feed(tokens, sequence=into, logits=logits)
        self.generations.add(what, result.tail, np.asarray(result.logits))
        return result

    def _prefill(self, sequence: int, alone: _Alone) -> Iterator[Check]:
        what = f"{NAME}: prompt of sequence {sequence}"
        prompt = self._prompt(sequence)
        got, length = self._feed(what, prompt, into=sequence, logits="last"), len(prompt)
        yield self._bits(what, np.asarray(got.logits)[-1], alone.logits[length - 1])
        held = self.engine.positions[sequence]
        yield self._says(
            got.position == held == length, f"{what}: position is {held}, expected {length}"
        )

    def _step(self, order: tuple[int, ...], alone: list[_Alone]) -> Iterator[Check]:
        tokens = [self._token(sequence, self.fed[sequence]) for sequence in order]
        results = self.engine.decode_batch(tokens, order)
        yield self._says(
            len(results) == len(order), f"{NAME}: {len(results)} results of {len(order)} rows"
        )
        self.generations.add(f"{NAME}: step of {order}", results[0].tail)
        model, options = self.batch.model, self.batch.options
        types = (options.kv_type_k, options.kv_type_v)
        rows = product_rows(model, options.path, "decode batch", types, sequences=SEQUENCES)
        yield replace(kernels_check(f"{NAME} of {order}", results[0], rows), name=NAME)
        for row, (sequence, token, got) in enumerate(zip(order, tokens, results, strict=True)):
            what = f"{NAME}, sequence {sequence} in row {row} of {len(order)}"
            yield self._bits(what, np.asarray(got.tail.logits), self._want(sequence, alone))
            broken = broken_step(got, token)
            yield self._says(broken is None, f"{what}: {broken}")
            yield self._advanced(what, sequence, got.position)

    def _production_step(self, order: tuple[int, ...], alone: list[_Alone]) -> Iterator[Check]:
        tokens = [self._token(sequence, self.fed[sequence]) for sequence in order]
        emitted = self.engine.step_batch(tokens, order)
        want = [argmax(self._want(sequence, alone)) for sequence in order]
        yield self._says(
            list(emitted) == want, f"{NAME}: step_batch emits {list(emitted)}, expected {want}"
        )
        for sequence in order:
            yield self._advanced(
                f"{NAME}, sequence {sequence}", sequence, self.engine.positions[sequence]
            )

    def _want(self, sequence: int, alone: list[_Alone]) -> Array:
        """Logits (V,) of the token that is fed next."""
        row: Array = alone[sequence].logits[len(self._prompt(sequence)) + self.fed[sequence]]
        return row

    def _advanced(self, what: str, sequence: int, position: int) -> Check:
        self.fed[sequence] += 1
        expected = len(self._prompt(sequence)) + self.fed[sequence]
        held = self.engine.positions[sequence]
        return self._says(
            position == held == expected, f"{what}: position is {held}, expected {expected}"
        )

    def _left_behind(self, alone: list[_Alone]) -> Iterator[Check]:
        for sequence, expected in enumerate(alone):
            left = LeftBehind.of(self.engine, self.batch.model.spec, sequence)
            what = f"{NAME}, sequence {sequence}"
            length = len(self._prompt(sequence)) + self.fed[sequence]
            where = f"{what}: {{}} against the sequence alone"
            for check in left.checks_against(expected.left, length, what, where):
                yield replace(check, name=NAME)

    def _bits(self, what: str, got: Array, want: Array) -> Check:
        link = f"{what}: logits differ from the sequence alone"
        return bits_check(NAME, got, want, link, self.broken_since)

    @staticmethod
    def _says(holds: bool, otherwise: str) -> Check:
        return fact(NAME, holds, "" if holds else otherwise, failed=State.DIVERGED)


def batch_decode(
    engine: JudgedEngine,
    batch: Batch,
    generations: Generations,
    broken_since: str,
    say: Progress,
) -> tuple[Check | None, str]:
    """The check, or None and a note that says why nothing was run.

    Resets the engine, and leaves the sequences behind. `broken_since`: what was found before.
    """
    why = _why_not(engine, batch)
    if why:
        return None, f"decode steps of several sequences were not judged: {why}"
    say("sequences that decode together")
    elements = 0
    for check in _Run(engine, batch, generations, broken_since).checks():
        elements += check.elements
        if check.state is not State.OK:
            return behind(replace(check, elements=elements), broken_since), ""
    steps = counted(STEPS, "common step")
    detail = f"{counted(SEQUENCES, 'sequence')}, {steps}"
    return Check(NAME, State.OK, elements, measured=0.0, limit=0.0, of_limit=0.0, detail=detail), ""


def _why_not(engine: JudgedEngine, batch: Batch) -> str:
    held = len(engine.positions)
    if held < SEQUENCES:
        return f"the engine holds {counted(held, 'sequence')}, {SEQUENCES} are needed"
    path, mode = batch.options.path, batch.options.modes[-1]
    # Products on the matrix unit give a column the same bits beside any others of its tile.
    if not is_exact(path) and (path, mode) != ("matrix", "batched"):
        return f"path {path} does not promise that they give the bits of each alone"
    if batch.room <= STEPS:
        return f"{STEPS} steps and a prompt need more than a context of {batch.room}"
    return ""
