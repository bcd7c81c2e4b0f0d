"""Sequences that decode together are held to what each of them gives alone, bit for bit.

Everything before this check decodes one sequence. Here several prompts of other lengths stand in
sequences of their own and advance in common steps: their products run other kernels, and every row
of a step has another position, cache and recurrent state. What each gives alone is a prefill of its
tokens by the same engine, with the logits of each step's: the checks before this one hold prefills
to the reference, and decoding alone to a prefill.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from backend_hip.registry import PACKED_TILE
from reference.model.errors import InputError
from reference.model.sampling import argmax
from suites.harness.batch_plans import MANY, SEQUENCES, Plan, made_of, plans_of
from suites.harness.batch_plans import NAME as NAME
from suites.harness.compare import Array
from suites.harness.elsewhere import elsewhere
from suites.harness.generations import Generations
from suites.harness.kernels import kernels_check, product_rows
from suites.harness.left_behind import LeftBehind
from suites.harness.pair import bits_check, is_exact
from suites.harness.protocol import JudgedEngine, Prefilled, Progress, prefill_of
from suites.harness.run_options import Asked
from suites.harness.tail import BrokenLink, broken_prefill, broken_step
from suites.harness.verdict import Check, State, behind, counted, fact


@dataclass(frozen=True)
class _Fed:
    """A flow of a prefill, and what of its tail does not hold."""

    result: Prefilled
    broken: BrokenLink | None


@dataclass
class _Alone:
    """What one sequence gives with no other beside it.

    `logits` (1 + its steps, V): of the prompt's last token, then of every token behind it.
    """

    logits: Array
    left: LeftBehind


@dataclass
class _Run:
    """`fed` counts the tokens of each sequence behind its prompt so far; `parted`: the engine feeds
    in more flows than the plan allows, and nothing was compared."""

    engine: JudgedEngine
    batch: Asked
    plan: Plan
    generations: Generations
    broken_since: str
    fed: Counter[int] = field(default_factory=Counter)
    parted: bool = False

    def checks(self) -> Iterator[Check]:
        """Runs one part after the other; a caller that sees one fail stops here."""
        alone: list[_Alone] = []
        if self.plan.rows == SEQUENCES:
            yield from elsewhere(self.engine, self.batch, self.generations, self.broken_since)
        for sequence in range(len(self.plan.lengths)):
            self.engine.reset()
            yield from self._alone(sequence, alone)
            if self.parted:
                return
        self.engine.reset()
        # Not in their order, so that what one is fed can spoil those before and behind it.
        turned = (*range(1, len(alone)), 0)
        for sequence in turned:
            yield from self._prefill(sequence, alone[sequence])
        for order in self.plan.orders:
            yield from self._step(order, alone)
        for order in self.plan.production:
            yield from self._production_step(order, alone)
        for sequence in turned if self.plan.turn else ():
            yield from self._turn(sequence, alone[sequence])
        yield from self._refusals()
        yield from self._left_behind(alone)

    def _alone(self, sequence: int, alone: list[_Alone]) -> Iterator[Check]:
        """Feeds one sequence all its tokens and adds what it gives to `alone`."""
        what, prompt = f"tokens of sequence {sequence} alone", self._prompt(sequence)
        before, tokens = list[_Fed](), self._behind(sequence)
        wanted = 1 + len(tokens)
        if self.plan.one_flow:
            tokens = (*prompt, *tokens)
        else:
            before = self._feed(what, prompt, into=sequence)
        parts = self._feed(what, tokens, into=sequence, logits="all")
        if self.plan.one_flow:
            self.parted = any(part.result.chunks > 1 for part in parts)
        for part in (*before, *parts):
            yield self._says(part.broken is None, f"{NAME}: {what}: {part.broken}")
        count = sum(len(part.result.logits) for part in parts)
        yield self._says(count == len(tokens), f"{NAME}: {what}: logits of {count} positions")
        rows = [np.asarray(part.result.logits) for part in (*before[-1:], *parts)]
        logits = np.concatenate(rows)[-wanted:].copy()  # the rest is let go
        left = LeftBehind.of(self.engine, self.batch.model.spec, sequence)
        alone.append(_Alone(logits, left))

    def _prompt(self, sequence: int) -> tuple[int, ...]:
        """Other tokens in each sequence and place, so that none can be taken for another."""
        batch = self.batch
        length = min(self.plan.lengths[sequence], batch.room - self.plan.behind(sequence))
        return made_of(batch.tokens, length, sequence, batch.model.spec.vocab_size)

    def _token(self, sequence: int, index: int) -> int:
        """Token `index` behind a sequence's prompt: chosen here, so that it is always an id."""
        vocabulary = self.batch.model.spec.vocab_size
        count = len(self.plan.lengths)
        return (self.batch.tokens[-1] + 1 + sequence + count * index) % vocabulary

    def _behind(self, sequence: int) -> tuple[int, ...]:
        """What a sequence is fed in all steps and in its second turn."""
        return tuple(self._token(sequence, i) for i in range(self.plan.behind(sequence)))

    def _feed(
        self, what: str, tokens: tuple[int, ...], *, into: int, logits: str = "last"
    ) -> list[_Fed]:
        feed, flow = prefill_of(self.engine, self.batch.options.modes[-1]), self.plan.flow
        done = []
        for first in range(0, len(tokens), flow or len(tokens)):
            part = tokens[first : first + (flow or len(tokens))]
            start = self.engine.positions[into]
            result = feed(part, sequence=into, logits=logits)
            self.generations.add(what, result.tail, np.asarray(result.logits))
            done.append(_Fed(result, broken_prefill(result, part, start)))
        return done

    def _prefill(self, sequence: int, alone: _Alone) -> Iterator[Check]:
        what = f"{NAME}: prompt of sequence {sequence}"
        prompt = self._prompt(sequence)
        got = self._feed(what, prompt, into=sequence)[-1].result
        # The LM head of one row may be another kernel's than that of a whole flow.
        if not self.plan.one_flow:
            yield self._bits(what, np.asarray(got.logits)[-1], alone.logits[0])
        held, length = self.engine.positions[sequence], len(prompt)
        yield self._says(
            got.position == held == length, f"{what}: position is {held}, expected {length}"
        )

    def _step(self, order: tuple[int, ...], alone: list[_Alone]) -> Iterator[Check]:
        tokens = [self._token(sequence, self.fed[sequence]) for sequence in order]
        if len(order) == 1:
            results = [self.engine.decode(tokens[0], sequence=order[0])]
        else:
            results = list(self.engine.decode_batch(tokens, self._named(order)))
        yield self._says(
            len(results) == len(order), f"{NAME}: {len(results)} results of {len(order)} rows"
        )
        self.generations.add(f"{NAME}: step of {order}", results[0].tail)
        model, options = self.batch.model, self.batch.options
        types = (options.kv_type_k, options.kv_type_v)
        mode = "decode batch" if len(order) > 1 else "per-token"
        rows = product_rows(model, options.path, mode, types, sequences=len(order))
        yield replace(kernels_check(f"{NAME} of {order}", results[0], rows), name=NAME)
        for row, (sequence, token, got) in enumerate(zip(order, tokens, results, strict=True)):
            what = f"{NAME}, sequence {sequence} in row {row} of {len(order)}"
            yield self._bits(what, np.asarray(got.tail.logits), self._want(sequence, alone))
            broken = broken_step(got, token)
            yield self._says(broken is None, f"{what}: {broken}")
            yield self._advanced(what, sequence, got.position)

    def _production_step(self, order: tuple[int, ...], alone: list[_Alone]) -> Iterator[Check]:
        tokens = [self._token(sequence, self.fed[sequence]) for sequence in order]
        if len(order) == 1:
            emitted = [self.engine.step(tokens[0], sequence=order[0])]
        else:
            emitted = list(self.engine.step_batch(tokens, self._named(order)))
        want = [argmax(self._want(sequence, alone)) for sequence in order]
        entry = "step" if len(order) == 1 else "step_batch"
        yield self._says(emitted == want, f"{NAME}: {entry} emits {emitted}, expected {want}")
        for sequence in order:
            yield self._advanced(
                f"{NAME}, sequence {sequence}", sequence, self.engine.positions[sequence]
            )

    def _named(self, order: tuple[int, ...]) -> tuple[int, ...] | None:
        """None, which means all, where these are all sequences of the engine in their order."""
        return None if order == tuple(range(len(self.engine.positions))) else order

    def _turn(self, sequence: int, alone: _Alone) -> Iterator[Check]:
        """A second turn behind the steps."""
        what = f"{NAME}: second turn of sequence {sequence}"
        start = self.fed[sequence]
        tokens = tuple(self._token(sequence, start + index) for index in range(self.plan.turn))
        got = self._feed(what, tokens, into=sequence)[-1].result
        yield self._bits(what, np.asarray(got.logits)[-1], alone.logits[-1])
        self.fed[sequence] += self.plan.turn
        held = len(self._prompt(sequence)) + self.fed[sequence]
        yield self._says(got.position == held, f"{what}: position is {got.position}, not {held}")

    def _want(self, sequence: int, alone: list[_Alone]) -> Array:
        """Logits (V,) of the token that is fed next."""
        row: Array = alone[sequence].logits[1 + self.fed[sequence]]
        return row

    def _advanced(self, what: str, sequence: int, position: int) -> Check:
        self.fed[sequence] += 1
        expected = len(self._prompt(sequence)) + self.fed[sequence]
        held = self.engine.positions[sequence]
        return self._says(
            position == held == expected, f"{what}: position is {held}, expected {expected}"
        )

    def _refusals(self) -> Iterator[Check]:
        """What no longer fits is refused, whatever room the others have, and moves nothing.

        A prompt that is a token too long, and behind a sequence that fills its context a token as a
        step, as a prompt and in a common step.
        """
        held, room = self.engine.positions, self.batch.room
        feed = prefill_of(self.engine, self.batch.options.modes[-1])
        tries: list[tuple[str, Callable[[], object]]] = []
        too_many = (0,) * (room + 1 - held[0])
        prompt = partial(feed, too_many, sequence=0)
        tries.append((f"sequence 0 takes {room + 1} tokens as a prompt", prompt))
        for full in [sequence for sequence, count in enumerate(held) if count == room]:
            what = f"sequence {full} takes token {room + 1} of {room}"
            others = [other for other, count in enumerate(held) if count < room][:1]
            pair, step = (*others, full), self.engine.step
            tries += [
                (f"{what} as a step", partial(step, 0, sequence=full)),
                (f"{what} as a prompt", partial(feed, (0,), sequence=full)),
                (
                    f"{what} in a common step",
                    partial(self.engine.step_batch, [0] * len(pair), pair),
                ),
            ]
        for what, attempt in tries:
            refused = False
            try:
                attempt()
            except InputError:
                refused = True
            yield self._says(refused, f"{NAME}: {what}")
            moved = self.engine.positions
            yield self._says(moved == held, f"{NAME}: refused, positions are {moved}, not {held}")

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
    batch: Asked,
    generations: Generations,
    broken_since: str,
    say: Progress,
) -> tuple[list[Check], list[str]]:
    """The check, none where nothing was run, and notes that say what was not, and why.

    Resets the engine, and leaves the sequences behind. `broken_since`: what was found before.
    """
    path, held = batch.options.path, len(engine.positions)
    plans = plans_of(path, held, len(batch.tokens))
    why = _why_not(engine, batch, plans[0])
    if why:
        # Steps of one sequence are none of several, and the same on every path.
        found = list(elsewhere(engine, batch, generations, broken_since))
        bad = next((check for check in found if check.state is not State.OK), None)
        note = f"decode steps of several sequences were not judged: {why}"
        return ([] if bad is None else [behind(bad, broken_since)]), [note]
    elements, notes, ran = 0, list[str](), list[Plan]()
    for plan in plans:
        why = _why_not_this(plan, batch)
        if not why:
            say(f"{counted(plan.rows, 'sequence')} that decode together")
            run = _Run(engine, batch, plan, generations, broken_since)
            for check in run.checks():
                elements += check.elements
                if check.state is not State.OK:
                    return [behind(replace(check, elements=elements), broken_since)], notes
            why = _PARTED.format(plan.longest) if run.parted else ""
        if why:
            notes.append(f"decode steps of {plan.rows} rows were not judged: {why}")
        else:
            ran.append(plan)
    if path == "matrix" and held < MANY:
        notes.append(
            f"decode steps of more than {PACKED_TILE} rows, which fill a second tile of the matrix "
            f"unit, were not judged: the engine holds {held} sequences (--sequences {MANY})"
        )
    detail = ", then ".join(plan.described(batch.room) for plan in ran)
    check = Check(NAME, State.OK, elements, measured=0.0, limit=0.0, of_limit=0.0, detail=detail)
    return [check], notes


_PARTED = "they need prompts of {} tokens in one flow, a larger --chunk"


def _why_not(engine: JudgedEngine, batch: Asked, narrow: Plan) -> str:
    held = len(engine.positions)
    if held < SEQUENCES:
        return f"the engine holds {counted(held, 'sequence')}, {SEQUENCES} are needed"
    path, mode = batch.options.path, batch.options.modes[-1]
    # Products on the matrix unit give a column the same bits beside any others of its tile.
    if not is_exact(path) and (path, mode) != ("matrix", "batched"):
        return f"path {path} does not promise that they give the bits of each alone"
    behind = max(narrow.behind(sequence) for sequence in range(narrow.rows))
    if batch.room <= behind:
        return f"{behind} tokens and a prompt need more than a context of {batch.room}"
    return ""


def _why_not_this(plan: Plan, batch: Asked) -> str:
    """Wide steps need a whole prompt; narrow ones make do with a shorter one."""
    if plan.rows > SEQUENCES and batch.room < plan.longest:
        return f"they need a context of {plan.longest}, it is {batch.room}"
    return ""
