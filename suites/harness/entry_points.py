"""What production calls is held to what was judged: `prefill`, `step`, and a second prefill.

The checks before this one read every link back through `prefill_per_token`, `prefill_batched` and
`decode`. A caller that only wants tokens goes through two thinner entries, and a conversation feeds
its second turn behind the first one without a reset; only here do these three run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from suites.harness.compare import compare
from suites.harness.generations import Generations
from suites.harness.pair import bits_check, is_exact, pair_limit
from suites.harness.protocol import JudgedEngine, Prefilled, Progress, prefill_of
from suites.harness.steps import Decoded
from suites.harness.tail import broken_prefill
from suites.harness.verdict import Check, State, behind, check_of, counted, fact

NAME = "production entry points"
_MEANT: Mapping[str, str] = {"on": "batched", "off": "per-token"}


@dataclass(frozen=True)
class Judged:
    """What the run has judged already: one prefill per mode, the last of which was decoded from.

    `end_to_end` is the absolute limit of the prompt's last logits. `mixed`: turns of both modes may
    follow each other; not where one may route a token otherwise than the other.
    """

    tokens: tuple[int, ...]
    results: Mapping[str, Prefilled]
    decoded: Decoded
    path: str
    end_to_end: float
    vocab_size: int
    mixed: bool = True


def entry_points(
    engine: JudgedEngine,
    judged: Judged,
    generations: Generations,
    broken_since: str,
    say: Progress,
) -> tuple[Check, list[str]]:
    """One check over the three entries, and its notes; the first that differs is its link.

    Resets the engine, and leaves it behind a second turn. `broken_since`: what was found before.
    """
    say("production entry points")
    entries = _Entries(engine, judged, generations, broken_since)
    elements, worst = 0, 0.0
    for check in entries.checks():
        elements += check.elements
        if check.state is not State.OK:
            return behind(replace(check, elements=elements), broken_since), entries.notes
        worst = max(worst, check.of_limit or 0.0)
    detail = ", ".join(entries.ran)
    return Check(NAME, State.OK, elements, of_limit=worst, detail=detail), entries.notes


class _Entries:
    """`ran` and `notes` say in words what was run and what could not be, as `checks` goes on."""

    def __init__(
        self, engine: JudgedEngine, judged: Judged, generations: Generations, broken_since: str
    ) -> None:
        self._engine, self._judged = engine, judged
        self._generations, self._broken_since = generations, broken_since
        self.ran: list[str] = []
        self.notes: list[str] = []

    def checks(self) -> Iterator[Check]:
        """Runs one entry after the other; a caller that sees one fail stops here."""
        yield from self._production_prefill()
        yield from self._production_steps()
        if len(self._judged.tokens) < 2:
            self.notes.append("a prompt of one token has no second turn: none was fed")
            return
        for mode in self._judged.results:
            yield from self._second_turn(mode)

    def _production_prefill(self) -> Iterator[Check]:
        judged, switch = self._judged, self._engine.batched_prefill
        meant = _MEANT.get(switch, "")
        want = judged.results.get(meant)
        if want is None:
            why = f"runs {meant}, which was not judged" if meant else "compares both modes itself"
            self.notes.append(
                f"production prefill was not run: with the switch {switch!r} it {why}"
            )
            return
        entry = "production prefill"
        self._engine.reset()
        got = self._engine.prefill(judged.tokens)
        self._generations.add(entry, got.tail, np.asarray(got.logits))
        yield self._says(
            got.mode == meant, f"{entry}: ran {got.mode}, the switch {switch!r} means {meant}"
        )
        yield self._at(entry, got.position, len(judged.tokens))
        # The same mode of the same tokens: equal bits on every path.
        link = f"{entry}: logits differ from the judged prefill"
        yield bits_check(
            NAME, np.asarray(got.logits), np.asarray(want.logits), link, self._broken_since
        )
        broken = broken_prefill(got, judged.tokens)
        yield self._says(broken is None, f"{entry}: {broken}")
        other = dict(got.routes) != dict(want.routes)
        yield self._says(not other, f"{entry}: launched other kernels than the judged prefill")
        self.ran.append(f"{meant} prefill")

    def _production_steps(self) -> Iterator[Check]:
        """`step` fed what the judged steps were fed, behind a prefill of the mode that they had."""
        judged, engine = self._judged, self._engine
        decoded = judged.decoded
        if not decoded.fed:
            return
        mode = tuple(judged.results)[-1]
        if _MEANT.get(engine.batched_prefill) != mode:
            engine.reset()
            self._feed(mode, judged.tokens, f"{mode} prefill before production steps")
        for index, fed in enumerate(decoded.fed):
            want = decoded.generated[index + 1]
            if decoded.tails[index] is not None or not 0 <= want < judged.vocab_size:
                # `step` refuses what it can't trust, with an error that would hide the verdict.
                self.notes.append(
                    f"production steps ended before step {index}: the judged decode is broken there"
                )
                return
            before = engine.position
            got = engine.step(fed)
            entry = f"production step {index}"
            yield self._says(got == want, f"{entry}: token {got}, the judged decode chose {want}")
            yield self._at(entry, engine.position, before + 1)
        self.ran.append(counted(len(decoded.fed), "step"))

    def _second_turn(self, mode: str) -> Iterator[Check]:
        """The prompt in two halves, the second by `mode`, against the judged whole prompt."""
        judged = self._judged
        tokens, want = judged.tokens, judged.results[mode]
        entry = f"second prefill without a reset, {mode}"
        cut = len(tokens) // 2
        first = "batched" if "batched" in judged.results and judged.mixed else mode
        self._engine.reset()
        self._feed(first, tokens[:cut], f"first turn before a {mode} one")
        got = self._feed(mode, tokens[cut:], entry)
        yield self._at(entry, got.position, len(tokens))
        yield self._at(entry, self._engine.position, len(tokens))
        link = f"{entry}: logits differ from the whole prompt's"
        last, whole = np.asarray(got.logits)[-1:], np.asarray(want.logits)[-1:]
        if is_exact(judged.path):
            yield bits_check(NAME, last, whole, link, self._broken_since)
        elif not judged.mixed and mode == "batched":
            # Half as many columns run other kernels, whose rounding can send a token elsewhere.
            self.notes.append(
                f"{entry}: logits were not compared, because at near-ties path {judged.path} "
                "routes half a prompt otherwise than all of it"
            )
        else:
            limit = pair_limit(judged.path, judged.end_to_end)
            yield check_of(NAME, compare(last, whole, limit), link=link)
        self.ran.append(f"second {mode} turn at position {cut}")

    def _feed(self, mode: str, tokens: tuple[int, ...], what: str) -> Prefilled:
        result = prefill_of(self._engine, mode)(tokens)
        self._generations.add(what, result.tail, np.asarray(result.logits))
        return result

    def _at(self, entry: str, position: int, expected: int) -> Check:
        return self._says(
            position == expected, f"{entry}: position is {position}, expected {expected}"
        )

    @staticmethod
    def _says(holds: bool, otherwise: str) -> Check:
        return fact(NAME, holds, "" if holds else otherwise, failed=State.DIVERGED)
