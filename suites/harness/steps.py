"""Greedy decoding under judgement: the engine runs ahead, the references follow with its tokens.

Because the references are fed what the engine fed, every step is compared, also after a flip of
two nearly equal tokens.
"""

from dataclasses import dataclass

import numpy as np

from suites.harness.compare import Comparison, compare_logits
from suites.harness.endtoend import Expected
from suites.harness.protocol import JudgedEngine, Prefilled, Progress, Stepped
from suites.harness.tail import BrokenLink, broken_step
from suites.harness.verdict import Check, State, counted


@dataclass(frozen=True)
class Decoded:
    """`fed[i]` went into step i; `generated` starts with the prefill's token.

    `stopped` says why fewer steps ran than were asked for.
    """

    fed: tuple[int, ...]
    generated: tuple[int, ...]
    steps: tuple[Stepped, ...]
    tails: tuple[BrokenLink | None, ...]
    stopped: str = ""


def decode(
    engine: JudgedEngine, prefilled: Prefilled, count: int, vocab_size: int, say: Progress
) -> Decoded:
    """Runs up to `count` steps from the token that the prefill's sampler emitted."""
    token = int(prefilled.tail.staged_token)
    generated: list[int] = [token]
    fed: list[int] = []
    done: list[Stepped] = []
    tails: list[BrokenLink | None] = []
    stopped = ""
    for index in range(count):
        if not 0 <= token < vocab_size:
            link = f"{token} is no token id, step {index} can't be fed"
            stopped = f"decoding stopped: {link}"
            tails.append(BrokenLink("token emitted", link))
            break
        say(f"decode step {index + 1} of {count}")
        before = engine.position
        step = engine.decode(token)
        broken = broken_step(step, token)
        if broken is None and not step.position == engine.position == before + 1:
            broken = BrokenLink(
                "token fed back", f"position went from {before} to {step.position}, expected +1"
            )
        tails.append(broken)
        fed.append(token)
        done.append(step)
        token = int(step.token)
        generated.append(token)
    return Decoded(tuple(fed), tuple(generated), tuple(done), tuple(tails), stopped)


def continuation(decoded: Decoded, expected: Expected) -> tuple[Check, list[str]]:
    """Logits and greedy choice of every step against the reference, as one check and its notes."""
    name = "decode: logits and greedy token against reference"
    elements = 0
    worst: tuple[int, Comparison] | None = None
    notes: list[str] = []
    for index, step in enumerate(decoded.steps):
        limit, want = float(expected.limits[index]), expected.logits[index]
        found = compare_logits(np.asarray(step.tail.logits), want, limit)
        elements += found.comparison.elements
        if worst is None or (found.comparison.of_limit or 0) > (worst[1].of_limit or 0):
            worst = (index, found.comparison)
        if not found.ok:
            place = found.comparison.worst_backward
            link = f"decode step {index}: logits against the reference"
            if found.comparison.ok:
                link = f"decode step {index}: token {found.top1_got}, expected {found.top1_want}"
            return Check(
                name,
                State.DIVERGED,
                elements,
                measured=None if place is None else place.error,
                limit=limit,
                of_limit=found.comparison.of_limit,
                where=f"step {index} {place or ''}".strip(),
                detail=found.comparison.reason(),
                link=link,
            ), notes
        if not found.top1_equal:
            notes.append(
                f"near-tie at step {index}: engine chose {found.top1_got}, reference "
                f"{found.top1_want}, margin {found.margin:.3g} within twice the limit {limit:.3g}"
            )
    if worst is None or worst[1].worst_backward is None:
        return Check(name, State.INVALID, 0, detail="no step ran"), notes
    index, comparison = worst
    place = comparison.worst_backward
    assert place is not None
    return Check(
        name,
        State.OK,
        elements,
        measured=place.error,
        limit=place.limit,
        of_limit=comparison.of_limit,
        where=f"step {index} {place}",
        detail=f"{counted(len(decoded.steps), 'step')}, {counted(len(notes), 'near-tie')}",
    ), notes
