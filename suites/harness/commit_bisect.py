"""Which commit broke a verdict: proves both ends, then lets a search choose what to probe next.

Knows neither git nor models: a `Search` names commits and a `probe` runs the one that is checked
out. A commit that can't be judged is skipped; where skipped commits hide the first bad one, all
that it could be are the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from reference.model.errors import AssayError, InputError
from suites.harness.repeats import Plan


class Mark(Enum):
    """What a commit is to the search; the values are git bisect's words."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Run:
    """One probe: `text` is "ok", the first broken link, or why nothing could be judged."""

    mark: Mark
    text: str


@dataclass(frozen=True)
class Judged:
    """One commit after `runs` probes, of which `failed` were bad."""

    commit: str
    mark: Mark
    text: str
    runs: int
    failed: int


class Search(Protocol):
    """Chooses commits between a good and a bad one. Hashes are full ones."""

    def check_out(self, commit: str) -> None:
        """Makes a commit the one that a probe runs."""

    def start(self, good: str, bad: str) -> None:
        """Begins; `good` is an ancestor of `bad`."""

    def current(self) -> str:
        """The commit that is checked out: the next one to probe."""
        ...

    def mark(self, commit: str, mark: Mark) -> None:
        """Records what a commit is and checks out the next one."""

    def candidates(self) -> tuple[str, ...]:
        """What the first bad commit can still be, skipped ones among them."""
        ...


@dataclass(frozen=True)
class Finding:
    """`judged` in the order of probing, the good and the bad end first.

    `first_bad` is None where skipped commits leave several `candidates`.
    """

    first_bad: str | None
    candidates: tuple[str, ...]
    judged: tuple[Judged, ...]
    plan: Plan

    def of(self, commit: str) -> Judged | None:
        return next((entry for entry in self.judged if entry.commit == commit), None)

    @property
    def skipped(self) -> tuple[Judged, ...]:
        return tuple(entry for entry in self.judged if entry.mark is Mark.SKIP)

    @property
    def error(self) -> float:
        """Probability that one or more of the verdicts is wrong, at most."""
        marks = [entry.mark for entry in self.judged]
        return self.plan.error_over(marks.count(Mark.GOOD), marks.count(Mark.BAD))


def judge(commit: str, probe: Callable[[], Run], plan: Plan) -> Judged:
    """Probes one commit until it is decided. One run that can't be judged skips the commit: the
    others are then too few for the promised error.
    """
    failed: list[str] = []
    clean = 0
    while (bad := plan.decided(len(failed), clean)) is None:
        run = probe()
        if run.mark is Mark.SKIP:
            return Judged(commit, Mark.SKIP, run.text, len(failed) + clean + 1, len(failed))
        if run.mark is Mark.BAD:
            failed.append(run.text)
        else:
            clean += 1
    mark, text = (Mark.BAD, failed[0]) if bad else (Mark.GOOD, "ok")
    return Judged(commit, mark, text, len(failed) + clean, len(failed))


def find(
    search: Search,
    good: str,
    bad: str,
    probe: Callable[[], Run],
    plan: Plan,
    say: Callable[[Judged], None],
) -> Finding:
    """Finds the first bad commit after `good` up to `bad`; `say` hears of every judged commit.

    Raises InputError where an end is not what it is said to be.
    """
    judged: list[Judged] = []

    def settle(commit: str) -> Judged:
        judged.append(judge(commit, probe, plan))
        say(judged[-1])
        return judged[-1]

    search.check_out(good)
    _require_good(settle(good))
    search.check_out(bad)
    _require_bad(settle(bad))
    search.start(good, bad)
    while True:
        known = {entry.commit for entry in judged}
        candidates = search.candidates()
        if known.issuperset(candidates):
            break
        commit = search.current()
        if commit in known:
            raise AssayError(f"bisect: asked for {commit} again, expected a commit not yet judged")
        search.mark(commit, settle(commit).mark)
    first = candidates[0] if len(candidates) == 1 else None
    return Finding(first, candidates, tuple(judged), plan)


def _require_good(end: Judged) -> None:
    if end.mark is Mark.BAD:
        raise InputError(f"bisect: GOOD diverges too: {end.text}")
    if end.mark is Mark.SKIP:
        raise InputError(f"bisect: GOOD can't be judged: {end.text}")


def _require_bad(end: Judged) -> None:
    if end.mark is Mark.GOOD:
        runs = "its run" if end.runs == 1 else f"{end.runs - end.failed} of {end.runs} runs"
        raise InputError(f"bisect: BAD does not diverge: {runs} ended with ok")
    if end.mark is Mark.SKIP:
        raise InputError(f"bisect: BAD can't be judged: {end.text}")
