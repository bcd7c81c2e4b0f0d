"""Faults planted in copies of a run's own data: every one must be seen, or the run proves nothing.

A copy is first made clean (finite, a chain that holds), so that the planted fault is the only one
and is found for its own reason.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.model.sampling import argmax
from suites.harness import compare as comparator
from suites.harness import tail as tail_module
from suites.harness.compare import Array
from suites.harness.protocol import Prefilled
from suites.harness.verdict import Check, State

NAME = "planted faults are caught"
Proofs = Callable[[Prefilled, Prefilled], list[Check]]


@dataclass(frozen=True)
class Plant:
    """A fault, in what it was planted, and whether the judge saw it."""

    place: str
    what: str
    seen: bool

    def __str__(self) -> str:
        return f"{self.what} ({self.place})"


def planted_faults(
    per_token: Prefilled | None,
    batched: Prefilled | None,
    limit: float,
    proofs: Proofs | None,
    more: Sequence[Plant] = (),
) -> Check:
    """One check over all planted faults. `limit` is the run's absolute logit limit.

    With both prefill modes the faults of the pair are planted too, and `more` holds those that were
    planted where their data was. An unknown (NaN) limit plants against 0.
    """
    subject = batched or per_token
    if subject is None or not subject.logits.size:
        detail = "no data to plant faults in"
        return Check(NAME, State.INVALID, 0, detail=detail, unit="faults")
    limit = limit if np.isfinite(limit) else 0.0
    plants = [*_logit_plants(subject, limit), *_tail_plants(subject)]
    if per_token is not None and batched is not None and proofs is not None:
        plants += _pair_plants(per_token, batched, proofs)
    return caught([*plants, *more])


def caught(plants: Sequence[Plant]) -> Check:
    """The check over faults that were planted."""
    missed = [str(plant) for plant in plants if not plant.seen]
    if missed:
        link = f"the judge did not see a planted fault: {missed[0]}"
        detail = "; ".join(missed)
        return Check(NAME, State.INVALID, len(plants), detail=detail, link=link, unit="faults")
    places = Counter(plant.place for plant in plants)
    detail = "in " + ", ".join(f"{place} {count}" for place, count in places.items())
    return Check(NAME, State.OK, len(plants), detail=detail, unit="faults")


def _clean_logits(subject: Prefilled) -> Array:
    return np.nan_to_num(np.array(subject.logits[-1], dtype=np.float32), posinf=0, neginf=0)


def _logit_plants(subject: Prefilled, limit: float) -> Iterator[Plant]:
    want = _clean_logits(subject)
    for index in sorted({0, want.size // 2, want.size - 1}):
        got = want.copy()
        # Twice the limit, but at least the next number that float32 has.
        moved = np.float32(got[index] + max(2 * limit, 2 * float(np.spacing(np.abs(got[index])))))
        got[index] = moved
        found = comparator.compare(got, want, limit)
        place = found.worst_backward
        seen = not found.ok and found.above_limit == 1 and place is not None
        seen = bool(seen and place is not None and place.flat == index)
        yield Plant("logits", "one logit moved", seen)
        got[index] = np.nan
        found = comparator.compare(got, want, limit)
        yield Plant("logits", "a NaN", not found.ok and found.nan_got == 1)
        found = comparator.compare(got, got.copy(), limit)
        yield Plant("logits", "NaN on both sides", not found.ok and found.nan_want == 1)
    nothing = comparator.compare(want[:0], want[:0], limit)
    yield Plant("logits", "nothing compared", not nothing.ok)


def _tail_plants(subject: Prefilled) -> Iterator[Plant]:
    logits = _clean_logits(subject)
    stamp, token = subject.tail.expected_stamp, argmax(logits)
    tail: Any = subject.tail
    clean = replace(
        tail,
        logits=logits,
        staged_token=token,
        device_token=token,
        staged_stamp=stamp,
        device_stamp=stamp,
    )
    if tail_module.broken_tail(clean) is not None:
        yield Plant("sampler tail", "nothing, and a sound tail was called broken", False)
    faults = {
        "an old stamp": ("generation stamp", {"staged_stamp": stamp - 1}),
        "no argmax": ("device argmax", {"device_stamp": stamp - 1}),
        "staging not written": ("staging copy", {"staged_token": tail.poison}),
        "another token staged": ("staging copy", {"staged_token": token + 1}),
        "another token chosen": ("device argmax", {"device_token": token + 1}),
    }
    for plant, (link, change) in faults.items():
        found = tail_module.broken_tail(replace(clean, **change))
        yield Plant("sampler tail", plant, found is not None and found.link == link)


def _pair_plants(per_token: Prefilled, batched: Prefilled, proofs: Proofs) -> Iterator[Plant]:
    side: Any = batched
    stamped = replace(side.tail, expected_stamp=per_token.tail.expected_stamp)
    faults = {
        "the same route twice": replace(side, routes=dict(per_token.routes)),
        "the same buffer twice": replace(side, logits=per_token.logits),
        "the same generation twice": replace(side, tail=stamped),
        "poison left": replace(side, logits_poisoned=1),
        "the same mode twice": replace(side, mode=per_token.mode),
    }
    before = [check.state is State.INVALID for check in proofs(per_token, batched)]
    for plant, changed in faults.items():
        after = [check.state is State.INVALID for check in proofs(per_token, changed)]
        newly = any(now and not then for then, now in zip(before, after, strict=True))
        yield Plant("prefill pair", plant, newly or any(before))
