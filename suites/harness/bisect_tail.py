"""Runs the sampler tails of a case again and says what broke behind the forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from suites.harness import steps
from suites.harness.compare import same_bits
from suites.harness.protocol import ARGMAX_SAW_NAN, JudgedEngine, Prefilled, Progress, Tail
from suites.harness.rerun import after_another_prompt
from suites.harness.tail import BrokenLink, broken_prefill, broken_tail
from suites.harness.tail_probe import right, run_step, steps_of
from suites.harness.verdict import counted


@dataclass(frozen=True)
class TailFinding:
    """The first broken tail. `place` names the run it belongs to; `modes_agree`: the logits of both
    prefills have equal bits (None: only one mode ran), `entries` of them."""

    place: str
    broken: BrokenLink
    tail: Tail
    modes_agree: bool | None
    entries: int


def rerun_tails(
    engine: JudgedEngine,
    tokens: Sequence[int],
    modes: Sequence[str],
    n_decode: int,
    vocabulary: int,
    say: Progress,
) -> TailFinding | None:
    """Prefills in every mode and decodes, as validate does; the first broken tail, if any."""
    results: dict[str, Prefilled] = {}
    for mode in modes:
        say(f"bisect: {mode} prefill, for its sampler tail")
        results[mode] = after_another_prompt(engine, mode, tokens, vocabulary)(tuple(tokens))
    first, *others = results.values()
    agree = all(same_bits(np.asarray(first.logits[-1]), np.asarray(o.logits[-1])) for o in others)
    known = agree if others else None
    entries = int(np.asarray(first.logits[-1]).size)
    for mode, result in results.items():
        broken = broken_prefill(result, tokens)
        if broken is not None:
            return TailFinding(f"the {mode} prefill", broken, result.tail, known, entries)
    decoded = steps.decode(engine, results[modes[-1]], n_decode, vocabulary, say)
    for index, broken in enumerate(decoded.tails):
        if broken is not None:
            tail = decoded.steps[min(index, len(decoded.steps) - 1)].tail if decoded.steps else None
            tail = results[modes[-1]].tail if tail is None else tail
            return TailFinding(f"decode step {index}", broken, tail, known, entries)
    return None


def rerun_probes(engine: JudgedEngine, vocabulary: int, say: Progress) -> TailFinding | None:
    """The first chosen row of logits that the tail gets wrong."""
    say("bisect: chosen logits through the sampler tail")
    for step in steps_of(vocabulary, len(engine.positions)):
        for what, probe, tail in run_step(engine, step):
            if not right(probe, tail):
                detail = f"{what}: token {tail.staged_token}, expected {probe.token}"
                broken = broken_tail(tail)
                if broken is None or broken.link == "logits":
                    broken = BrokenLink("device argmax", detail)
                place = f"a row of chosen logits ({what})"
                return TailFinding(place, broken, tail, None, vocabulary)
    return None


def sentences(found: TailFinding) -> list[str]:
    """What the forward pass did, which link broke and what the records show."""
    lines = []
    if found.broken.link not in ("logits", "host argmax"):
        if found.modes_agree:
            lines.append(
                "The forward pass is right: the last token's logits of both prefills agree bit "
                f"for bit ({found.entries:,} entries), and the fault is behind them, in the "
                "sampler tail."
            )
        else:
            lines.append("The fault is behind the logits, in the sampler tail.")
    lines.append(f"In {found.place} the first broken link is the {found.broken.link}.")
    lines += _facts(found)
    return lines


def _facts(found: TailFinding) -> list[str]:
    tail, link = found.tail, found.broken.link
    old = tail.expected_stamp - tail.staged_stamp
    staging = f"token {tail.staged_token} with stamp {tail.staged_stamp}"
    match link:
        case "staging copy" | "generation stamp":
            if tail.staged_token == tail.poison:
                return [
                    f"Staging still holds the poison {tail.poison} that was put there before the "
                    f"step: nothing was copied into it. The argmax on the device is right, token "
                    f"{tail.device_token} with stamp {tail.device_stamp}."
                ]
            if tail.staged_stamp == tail.poison:
                return [
                    f"Staging holds token {tail.staged_token}, but its stamp is still the poison "
                    f"{tail.poison} that was put there before the step, expected "
                    f"{tail.expected_stamp}: a part of the result was copied. {_device(tail)}"
                ]
            if old:
                return [
                    f"The staging stamp is old: staging holds {staging}, expected stamp "
                    f"{tail.expected_stamp}, so the token that is emitted is a stale one from "
                    f"{counted(old, 'step')} before. {_device(tail)}"
                ]
            return [
                f"Staging holds {staging}, which is this step's, but another token than the device "
                f"chose. {_device(tail)}"
            ]
        case "device argmax":
            if tail.device_stamp != tail.expected_stamp:
                stale = tail.staged_token == tail.device_token
                return [
                    f"The argmax did not run in this step: its stamp is old, {tail.device_stamp}, "
                    f"expected {tail.expected_stamp}. The device still holds token "
                    f"{tail.device_token} of that earlier step"
                    + (
                        f", and the staging stamp is old too: {staging}, a stale argmax."
                        if stale
                        else f"; staging holds {_staging(tail)}."
                    )
                ]
            return [f"{_argmax(tail)} Its stamp is this step's, so it ran, and chose wrong."]
        case "token emitted" | "token fed back":
            return [f"What was seen: {found.broken.detail}. The tail up to staging is right."]
    return [f"What was seen: {found.broken.detail}."]


def _staging(tail: Tail) -> str:
    if tail.staged_token == tail.poison:
        return (
            f"the poison that was put there before the step (token {tail.staged_token}, stamp "
            f"{tail.staged_stamp}): nothing was copied"
        )
    return f"token {tail.staged_token} with stamp {tail.staged_stamp}"


def _device(tail: Tail) -> str:
    return (
        f"The device's argmax is right: token {tail.device_token} with stamp {tail.device_stamp}. "
        "The copy to staging, or what waits for it, is at fault."
    )


def _argmax(tail: Tail) -> str:
    logits = np.asarray(tail.logits)
    if np.isnan(logits).any():
        return f"The device's argmax gave {tail.device_token} although a logit is NaN."
    best = int(np.argmax(logits))
    if tail.device_token == ARGMAX_SAW_NAN:
        return f"The device's argmax reports a NaN, but all {logits.size:,} logits are finite."
    if not 0 <= tail.device_token < logits.size:
        return f"The device's argmax gave {tail.device_token}, which is no token id."
    ties = np.flatnonzero(logits == logits[best])
    if tail.device_token in ties:
        return (
            f"The device's argmax took token {tail.device_token} of a tie whose lowest index is "
            f"{best}."
        )
    return (
        f"The device's argmax chose token {tail.device_token} (logit "
        f"{float(logits[tail.device_token]):.6g}); the largest logit is that of token {best} "
        f"({float(logits[best]):.6g})."
    )
