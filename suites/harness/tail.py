"""The sampler tail as a chain of links, judged in the order in which data passes through them.

    logits -> host argmax -> device argmax -> staging copy -> generation stamp -> token emitted
           -> token fed back

Staging holds an illegal id before every step and every step has a stamp, so a stale read is a fact
and not a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reference.model.errors import InputError
from reference.model.sampling import argmax
from suites.harness.compare import same_bits
from suites.harness.protocol import ARGMAX_SAW_NAN, Prefilled, Stepped, Tail
from suites.harness.verdict import Check, State, counted

LINKS = (
    "logits",
    "host argmax",
    "device argmax",
    "staging copy",
    "generation stamp",
    "token emitted",
    "token fed back",
)


@dataclass(frozen=True)
class BrokenLink:
    """One of LINKS and what was seen there."""

    link: str
    detail: str

    def __str__(self) -> str:
        return f"{self.link}: {self.detail}"


def broken_tail(tail: Tail) -> BrokenLink | None:
    """The first broken link from logits to generation stamp; None where the chain holds."""
    logits = np.asarray(tail.logits)
    if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
        return BrokenLink("logits", f"shape {logits.shape} dtype {logits.dtype}, expected float32")
    not_finite = int(np.count_nonzero(~np.isfinite(logits)))
    if not_finite:
        first = int(np.flatnonzero(~np.isfinite(logits))[0])
        return BrokenLink("logits", f"{not_finite} of {logits.size} not finite, first at {first}")
    try:
        token = argmax(logits)
    except InputError as error:
        return BrokenLink("host argmax", str(error))
    stamp = tail.expected_stamp
    if tail.device_token != token or tail.device_stamp != stamp:
        return BrokenLink("device argmax", _device_detail(tail, token))
    if tail.staged_token == tail.poison:
        return BrokenLink("staging copy", f"staging still holds its poison {tail.poison}")
    if tail.staged_token != tail.device_token:
        age = "" if tail.staged_stamp == stamp else f", stamped {tail.staged_stamp} and so stale"
        return BrokenLink(
            "staging copy",
            f"staged token {tail.staged_token}{age}, the device has {tail.device_token} "
            f"for step {stamp}",
        )
    if tail.staged_stamp != stamp:
        return BrokenLink(
            "generation stamp",
            f"staged stamp is {tail.staged_stamp}, expected {stamp}: the token is an old one",
        )
    return None


def _device_detail(tail: Tail, token: int) -> str:
    if tail.device_stamp != tail.expected_stamp:
        return (
            f"did not run for step {tail.expected_stamp}: the device holds token "
            f"{tail.device_token} of step {tail.device_stamp}, host argmax is {token}"
        )
    if tail.device_token == ARGMAX_SAW_NAN:
        return f"reports NaN, but the logits are finite and host argmax is {token}"
    if tail.device_token == tail.poison:
        return f"left its poison {tail.poison}, host argmax is {token}"
    return f"chose token {tail.device_token}, host argmax is {token}"


def broken_prefill(
    result: Prefilled, tokens: Sequence[int] = (), start: int = 0
) -> BrokenLink | None:
    """The tail of a prefill; its logits must be the last row that the caller got.

    `tokens`, where known, are what was fed from position `start`; the device must have read the
    last of them.
    """
    last_token = tokens[-1] if tokens else None
    held = start + len(tokens)
    if tokens and (result.n_tokens, result.position) != (len(tokens), held):
        return BrokenLink(
            "token fed back",
            f"the prefill of {len(tokens)} tokens says that it fed {result.n_tokens} and is at "
            f"position {result.position}",
        )
    if last_token is not None and result.fed_token != last_token:
        return BrokenLink(
            "token fed back", f"the prefill read {result.fed_token} last, not {last_token}"
        )
    if not len(result.logits) or not same_bits(
        np.asarray(result.logits[-1]), np.asarray(result.tail.logits)
    ):
        return BrokenLink(
            "logits", "the row returned is not the row that the sampler's buffer holds"
        )
    return broken_tail(result.tail)


def broken_step(step: Stepped, fed: int) -> BrokenLink | None:
    """The tail of one decode step to which `fed` was given."""
    broken = broken_tail(step.tail)
    if broken is not None:
        return broken
    if step.token != step.tail.staged_token:
        return BrokenLink(
            "token emitted", f"{step.token}, but staging holds {step.tail.staged_token}"
        )
    if step.fed_token != fed:
        return BrokenLink(
            "token fed back", f"the step read token {step.fed_token}, the one emitted was {fed}"
        )
    return None


def tail_check(name: str, found: Sequence[BrokenLink | None], *, exact_logits: str = "") -> Check:
    """One check over the tails of a prefill or of several steps.

    `exact_logits` says, where it is known, that the forward pass is right, and to how much.
    """
    elements = len(found) * len(LINKS)
    for step, broken in enumerate(found):
        if broken is None:
            continue
        place = f"step {step}: " if len(found) > 1 else ""
        link = f"{name}: {place}{broken}"
        if exact_logits and broken.link not in LINKS[:2]:
            link = f"{exact_logits}; the fault is after the forward pass: {link}"
        return Check(
            name,
            State.DIVERGED,
            elements,
            where=f"{place}{broken.link}",
            detail=broken.detail,
            link=link,
            unit="links",
        )
    detail = f"{counted(len(found), 'tail')} of {len(LINKS)} links"
    return Check(name, State.OK, elements, detail=detail, unit="links")
