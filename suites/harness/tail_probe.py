"""Shows the sampler tail logits that a model seldom makes: ties, last elements, NaN, each wave.

Greedy steps of a real prompt never reach these corners, so a device argmax that breaks ties upwards
or ignores the last logit would pass every one of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.ops import argmax_blocks
from suites.harness.generations import Generations
from suites.harness.protocol import ARGMAX_SAW_NAN, JudgedEngine, Tail
from suites.harness.verdict import Check, State

NAME = "sampler tail: chosen logits"
_STRIDE = 256  # threads of the argmax block: neighbours in one thread are this far apart
_WAVE = 32
_SEED = 20_260_101


@dataclass(frozen=True)
class Probe:
    """Logits (V,) float32 and the token that the tail must emit for them."""

    what: str
    logits: NDArray[Any]
    token: int


def noise(vocabulary: int) -> NDArray[np.float32]:
    """Logits (V,) that are no model's."""
    return np.random.default_rng(_SEED).uniform(-20, 5, vocabulary).astype(np.float32)


def probes(vocabulary: int) -> Iterator[Probe]:
    """Every corner that fits into the vocabulary."""
    ground = noise(vocabulary)

    def peaks(what: str, *places: int) -> Probe:
        logits = ground.copy()
        logits[list(places)] = 9.25
        return Probe(what, logits, min(places))

    last = vocabulary - 1
    yield peaks("the last logit", last)
    yield peaks("a tie of first and last", 0, last)
    for wave in range(min(_STRIDE, vocabulary) // _WAVE):
        yield peaks(f"wave {wave}", wave * _WAVE + 3)
    if vocabulary > _STRIDE + 4:
        yield peaks("a tie against the order of threads", _STRIDE + 4, 5)
        yield peaks("a tie against the order of waves", _STRIDE + 4, _WAVE + 8)
    blocks = argmax_blocks(vocabulary)
    for block in sorted({1, blocks // 2, blocks - 1} - {0, blocks}):
        first = block * -(-vocabulary // blocks)
        yield peaks(f"the first logit of block {block}", first)
        yield peaks(f"a tie of blocks {block - 1} and {block}", first - 1, first)
    below = ground - np.float32(30)  # what a lane without a logit brings must not win: 0, say
    below[last] = -8.5
    yield Probe("all below zero", below, last)
    yield Probe("all equal", np.full(vocabulary, 1.5, dtype=np.float32), 0)
    yield Probe("all minus infinity", np.full(vocabulary, -np.inf, dtype=np.float32), 0)
    zeros = ground - np.float32(30)
    zeros[[3, last]] = -0.0, 0.0  # equal, whatever their bits
    yield Probe("zeros of both signs", zeros, 3)
    endless = ground.copy()
    endless[last] = np.inf
    yield Probe("infinity at the end", endless, last)
    for place, sign in ((0, 1), (vocabulary // 2, -1), (last, 1)):
        logits = ground.copy()
        logits[place] = np.copysign(np.float32(np.nan), sign)
        yield Probe(f"NaN at {place}", logits, ARGMAX_SAW_NAN)


def steps_of(vocabulary: int, rows: int) -> Iterator[tuple[Probe, ...]]:
    """Each probe alone, then steps of `rows`, so that every row of a step is shown all of them."""
    every = list(probes(vocabulary))
    yield from ((probe,) for probe in every)
    if rows > 1:
        for first in range(len(every)):
            yield tuple(every[(first + row) % len(every)] for row in range(rows))


def right(probe: Probe, tail: Tail) -> bool:
    """True where device and staging hold the probe's token, of this very step."""
    fresh = tail.staged_stamp == tail.device_stamp == tail.expected_stamp
    return fresh and tail.staged_token == tail.device_token == probe.token


def told_apart(logits: NDArray[Any]) -> Check:
    """Logits that are all equal (a model of zeros, say) would agree with many a broken engine."""
    spread = float(np.ptp(logits))
    name = "reference tells tokens apart"
    if spread > 0:
        return Check(name, State.OK, int(logits.size), detail=f"logits span {spread:.4g}")
    detail = "all logits of the reference are equal, so no fault could show in them"
    return Check(name, State.INVALID, int(logits.size), detail=detail)


def run_step(engine: JudgedEngine, step: Sequence[Probe]) -> Iterator[tuple[str, Probe, Tail]]:
    """Shows the tail one step: what is in each row, where it has several, the probe, the tail."""
    tails = engine.run_tail(np.stack([probe.logits for probe in step]))
    for row, (probe, tail) in enumerate(zip(step, tails, strict=True)):
        where = f" in row {row} of {len(step)}" if len(step) > 1 else ""
        yield f"{probe.what}{where}", probe, tail


def probe_check(engine: JudgedEngine, vocabulary: int, generations: Generations) -> Check:
    """Runs every probe through each row of the engine's tail; names the first that goes wrong."""
    count, rows = 0, len(engine.positions)
    for step in steps_of(vocabulary, rows):
        for row, (what, probe, tail) in enumerate(run_step(engine, step)):
            if row == 0:  # of one step all rows have one stamp
                generations.add(f"the tail of {what}", tail)
            count += 1
            if not right(probe, tail):
                fresh = tail.staged_stamp == tail.device_stamp == tail.expected_stamp
                detail = (
                    f"{what}: staged token {tail.staged_token}, device token {tail.device_token}, "
                    f"expected {probe.token}" + ("" if fresh else "; not of this step")
                )
                link = f"{NAME}: {detail}"
                return Check(NAME, State.DIVERGED, count, detail=detail, link=link, unit="probes")
    detail = f"{count} chosen rows of logits, in steps of 1 and of {rows}"
    return Check(NAME, State.OK, count, detail=detail, unit="probes")
