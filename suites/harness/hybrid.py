"""Hybrid runs: one side up to a cut, the other after it, and the search for the cut that matters.

A model is a row of stages: the embedding, each layer, the output. At cut c the first c stages are
those of one side, all others those of the other side; everything that the first side recorded is
put in, so that layers which read an earlier layer's keys and values find those of that side too.
Whether a hybrid is wrong need not be monotone in the cut: two faults can cancel, or either can
spoil the end alone. So the turn that a binary search finds is checked one stage further on both
sides, and where that fails every cut is run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reference.model.spec import ModelSpec
from reference.model.trace import Trace, TracePoint, trace_points
from suites.harness.compare import Array
from suites.harness.verdict import counted

Wrong = Callable[[int], bool]

EVERY_CUT = 16
"""Up to so many stages every cut is run where the two searches do not name one stage."""


def stages(spec: ModelSpec) -> tuple[str, ...]:
    return ("embedding", *(f"layer {layer.index}" for layer in spec.layers), "output")


def _stage(spec: ModelSpec, point: TracePoint) -> int:
    if point.layer is not None:
        return point.layer + 1
    return 0 if point.name.startswith("inp_") else spec.layer_count + 1


def values_before(spec: ModelSpec, recorded: Trace, cut: int) -> Mapping[str, Array]:
    """What the first `cut` stages recorded."""
    return {
        point.name: recorded[point.name]
        for point in trace_points(spec)
        if point.name in recorded and _stage(spec, point) < cut
    }


@dataclass(frozen=True)
class Search:
    """`stage`: the one at which the result turns, None where the ends are alike.

    `wrong` holds every cut that was run. `monotone` is what was seen, not assumed: False where the
    result turns more than once; `turns` are then all stages at which it does.
    """

    stage: int | None
    wrong: Mapping[int, bool]
    monotone: bool = True
    turns: tuple[int, ...] = ()


def search(wrong: Wrong, count: int, known: Mapping[int, bool] | None = None) -> Search:
    """Finds the stage s of `count` with wrong(s) != wrong(s + 1), cuts being 0 to count."""
    seen = dict(known or {})

    def ask(cut: int) -> bool:
        if cut not in seen:
            seen[cut] = wrong(cut)
        return seen[cut]

    low, high = 0, count
    first, last = ask(low), ask(high)
    if first == last:
        return Search(None, dict(sorted(seen.items())))
    while high - low > 1:
        middle = (low + high) // 2
        if ask(middle) == first:
            low = middle
        else:
            high = middle
    beside = ask(max(low - 1, 0)) == first and ask(min(high + 1, count)) == last
    return Search(low, dict(sorted(seen.items())), True, (low,)) if beside else every(ask, count)


def every(wrong: Wrong, count: int) -> Search:
    """Runs every cut; the stage is the last turn of a result that may turn often."""
    seen = {cut: wrong(cut) for cut in range(count + 1)}
    turns = tuple(cut for cut in range(count) if seen[cut] != seen[cut + 1])
    return Search(turns[-1] if turns else None, seen, len(turns) <= 1, turns)


@dataclass(frozen=True)
class Hybrids:
    """Both searches. `reference_first`: reference up to the cut, engine after; wrong at cut 0.
    `engine_first`: the reverse; wrong at the last cut."""

    names: tuple[str, ...]
    reference_first: Search
    engine_first: Search

    @property
    def agreed(self) -> str | None:
        """The stage that both name."""
        one, other = self.reference_first, self.engine_first
        if one.stage is None or one.stage != other.stage or not (one.monotone and other.monotone):
            return None
        return self.names[one.stage]

    def text(self) -> str:
        """What the hybrids say, in a sentence."""
        runs = len(self.reference_first.wrong) + len(self.engine_first.wrong)
        if self.agreed is not None:
            return (
                f"Both hybrids name {_called(self.agreed)}: the reference up to and with it and "
                "the engine after it give right logits, the engine up to and with it and the "
                f"reference after it give wrong ones ({counted(runs, 'run')})."
            )
        if self.reference_first.stage is None and self.engine_first.stage is None:
            return (
                "The hybrids name nothing: the damage moves the last token's logits by less than "
                "their end-to-end limit."
            )
        first, last = self.span
        if first is not None and last is not None:
            return (
                f"The hybrids span {_called(first)} to {_called(last)}: engine first and reference "
                f"after goes wrong as soon as {_called(first)} is the engine's, reference first "
                f"and engine after stays wrong until {_called(last)} is the reference's. So more "
                f"than one stage breaks ({counted(runs, 'run')}, {self._seen()})."
            )
        one, other = self._one(self.reference_first), self._one(self.engine_first)
        return (
            "The hybrids do not agree, and not as several faults would make them: errors cancel "
            f"or need each other. Reference first and engine after {one}; engine first and "
            f"reference after {other} ({counted(runs, 'run')}, {self._seen()})."
        )

    def _seen(self) -> str:
        every_cut = len(self.names) + 1
        ran = (len(self.reference_first.wrong), len(self.engine_first.wrong))
        return "every cut" if ran == (every_cut, every_cut) else "of the cuts that were run"

    @property
    def span(self) -> tuple[str | None, str | None]:
        """The first and the last stage that break, where the searches say so."""
        last, first = self.reference_first, self.engine_first
        if not _in_order(last, first):
            return None, None
        assert first.stage is not None
        assert last.stage is not None
        return self.names[first.stage], self.names[last.stage]

    def _one(self, found: Search) -> str:
        if found.stage is None:
            return "does not turn at any cut"
        if found.monotone:
            return f"turns at {_called(self.names[found.stage])}"
        return "turns at " + ", ".join(self.names[turn] for turn in found.turns)


def _in_order(reference_first: Search, engine_first: Search) -> bool:
    """True where faults in one or more stages explain both: reference first turns at the last of
    them, engine first at the first."""
    last, first = reference_first.stage, engine_first.stage
    monotone = reference_first.monotone and engine_first.monotone
    return monotone and first is not None and last is not None and first <= last


def _called(stage: str) -> str:
    return stage if stage.startswith("layer") else f"the {stage}"


def run_hybrids(
    names: tuple[str, ...], reference_first: Wrong, engine_first: Wrong, plain_is_wrong: bool
) -> Hybrids:
    """Searches both ways. Every cut of both is run where they can't both be right, and where they
    name two stages of a model that is not too deep for it.

    `plain_is_wrong`: the engine alone, which is cut 0 of the one and the last of the other. The
    reference alone is right by definition.
    """
    count = len(names)
    one = search(reference_first, count, {0: plain_is_wrong, count: False})
    other = search(engine_first, count, {0: False, count: plain_is_wrong})
    apart = one.stage != other.stage and count <= EVERY_CUT
    if plain_is_wrong and (apart or not _in_order(one, other)):

        def remembered(found: Search, wrong: Wrong) -> Wrong:
            return lambda cut: found.wrong[cut] if cut in found.wrong else wrong(cut)

        one = every(remembered(one, reference_first), count)
        other = every(remembered(other, engine_first), count)
    return Hybrids(names, one, other)
