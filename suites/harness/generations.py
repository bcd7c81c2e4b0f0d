"""Every result of a run is a new one: its generation stamp is higher and its memory its own.

A prefill that returned what an earlier one left would agree with it bit for bit, and prove nothing.
Stamps come from the device, where each flow writes its own number.
"""

from dataclasses import dataclass, field

import numpy as np

from suites.harness.compare import Array
from suites.harness.protocol import Tail
from suites.harness.verdict import Check, State

NAME = "generation stamps advance"


@dataclass
class Generations:
    """Results in the order in which they were made; `add` each of them once."""

    _made: list[tuple[str, int, Array]] = field(default_factory=list)
    _problem: str = ""

    def add(self, what: str, tail: Tail, logits: Array | None = None) -> None:
        """`logits` are what the caller got, where that is another array than the tail's."""
        own = np.asarray(tail.logits if logits is None else logits)
        stamp = tail.expected_stamp
        for other, before, theirs in self._made:
            if self._problem:
                break
            if stamp <= before:
                self._problem = f"{what} has stamp {stamp}, {other} before it had {before}"
            elif np.shares_memory(own, theirs):
                self._problem = f"{what} and {other} are one buffer"
        self._made.append((what, stamp, own))

    def check(self) -> Check:
        """Invalid where a result may be an old one."""
        count = len(self._made)
        if self._problem:
            link = f"a result may be an old one: {self._problem}"
            return Check(NAME, State.INVALID, count, detail=link, link=link, unit="results")
        return Check(NAME, State.OK, count, detail=f"{count} results", unit="results")
