"""What one sequence gives does not depend on which of the engine's sequences it is.

Most checks speak of sequence 0. Here a few tokens go through each prefill mode and a step behind
it, in the first sequence and then in the last, by the kernels of one sequence, whichever the path:
logits and what is left behind must have the same bits, and the first one's must stay as they were.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from suites.harness.batch_plans import NAME, made_of
from suites.harness.compare import Array
from suites.harness.generations import Generations
from suites.harness.left_behind import LeftBehind
from suites.harness.pair import bits_check
from suites.harness.protocol import JudgedEngine, prefill_of
from suites.harness.run_options import Asked
from suites.harness.verdict import Check

TOKENS = 2  # of each prompt


def elsewhere(
    engine: JudgedEngine, asked: Asked, generations: Generations, broken_since: str
) -> Iterator[Check]:
    """Nothing where the engine holds one sequence or has no room. Resets the engine."""
    last, modes, spec = len(engine.positions) - 1, asked.options.modes, asked.model.spec
    length = len(modes) * (TOKENS + 1)
    if last < 1 or asked.room < length:
        return
    tokens = made_of(asked.tokens, length, 0, spec.vocab_size)
    engine.reset()
    first = _fed(engine, asked, generations, tokens, 0)
    left = LeftBehind.of(engine, spec)
    there = _fed(engine, asked, generations, tokens, last)
    what = f"{NAME}: sequence {last}"
    for (name, got), (_, want) in zip(there, first, strict=True):
        link = f"{what}, {name}: logits differ from the same in sequence 0"
        yield bits_check(NAME, got, want, link, broken_since)
    for sequence, other in ((last, "the same in sequence 0"), (0, "before the other was fed")):
        where = f"{NAME}: sequence {sequence} alone: {{}} against {other}"
        held = LeftBehind.of(engine, spec, sequence)
        for check in held.checks_against(left, length, what, where):
            yield replace(check, name=NAME)


def _fed(
    engine: JudgedEngine,
    asked: Asked,
    generations: Generations,
    tokens: tuple[int, ...],
    sequence: int,
) -> list[tuple[str, Array]]:
    """Logits (V,) of each prompt's last token and of the step behind it, with their names."""
    found = []
    for index, mode in enumerate(asked.options.modes):
        prompt = tokens[index * (TOKENS + 1) :][:TOKENS]
        result = prefill_of(engine, mode)(prompt, sequence=sequence)
        generations.add(f"{mode} prefill of sequence {sequence}", result.tail, result.logits)
        step = engine.decode(tokens[index * (TOKENS + 1) + TOKENS], sequence=sequence)
        generations.add(f"a step of sequence {sequence}", step.tail)
        found += [
            (f"{mode} prefill", np.asarray(result.logits)[-1]),
            (f"a step behind {mode} prefill", np.asarray(step.tail.logits)),
        ]
    return found
