"""The score of a fault run: caught, by category and tier, how well localised, and what is dead."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fixtures.faults import CATEGORIES
from suites.harness.fault_run import Outcome

MUST_CATCH_ALL = ("sampler", "control", "kv")
"""Categories whose faults both tiers must catch without exception."""
HEADS = ("category", "faults", "caught, fast", "caught, full", "right place")
FAST_SHARE = 0.95
LOCALISED_SHARE = 0.95


@dataclass(frozen=True)
class Score:
    """Outcomes of one run up to `tier`; every share is of the faults that are not dead."""

    outcomes: tuple[Outcome, ...]
    tier: str

    @property
    def dead(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.dead]

    @property
    def alive(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.dead]

    @property
    def missed(self) -> list[Outcome]:
        """Not seen although this tier must see them."""
        late = [o for o in self.alive if not o.caught_by(self.tier)]
        return late if self.tier == "full" else [o for o in late if o.wanted_tier == "fast"]

    @property
    def misplaced(self) -> list[Outcome]:
        """Seen, but another place was named first than the catalogue says."""
        return [outcome for outcome in self.alive if outcome.caught and not outcome.localised]

    def share(self, tier: str, category: str = "") -> float:
        """Share caught by a tier; NaN where there is no fault."""
        mine = [o for o in self.alive if category in ("", o.category)]
        return sum(o.caught_by(tier) for o in mine) / len(mine) if mine else float("nan")

    @property
    def localised_share(self) -> float:
        caught = [outcome for outcome in self.alive if outcome.caught]
        return sum(o.localised for o in caught) / len(caught) if caught else float("nan")

    def problems(self, *, complete: bool) -> list[str]:
        """Why the run is not good enough; empty where it is. Shares count in a complete run only.

        Conditions are stated for passing, so that a share of nothing (NaN) fails.
        """
        found = [f"dead: {o.fault}: {o.dead}" for o in self.dead]
        found += [f"missed: {o.fault} ({o.category})" for o in self.missed]
        if not complete:
            return found + [f"misplaced: {o.fault}: {o.link}" for o in self.misplaced]
        if not self.share("fast") >= FAST_SHARE:
            found.append(f"fast tier caught {self.share('fast'):.1%}, expected {FAST_SHARE:.0%}")
        for category in MUST_CATCH_ALL:
            if not self.share("fast", category) >= 1.0:
                found.append(f"fast tier caught {self.share('fast', category):.1%} of {category}")
        if not self.localised_share >= LOCALISED_SHARE:
            found.append(f"{self.localised_share:.1%} localised, expected {LOCALISED_SHARE:.0%}")
        return found

    def rows(self) -> list[list[str]]:
        """Category, faults, caught fast, caught in all, named at the right place."""
        rows = []
        for category in (*CATEGORIES, ""):
            mine = [o for o in self.alive if category in ("", o.category)]
            if not mine:
                continue
            caught = [o for o in mine if o.caught]
            rows.append(
                [
                    category or "all",
                    str(len(mine)),
                    _of(sum(o.caught_by("fast") for o in mine), len(mine)),
                    _of(len(caught), len(mine)) if self.tier == "full" else "",
                    _of(sum(o.localised for o in caught), len(caught)),
                ]
            )
        return rows

    def table(self) -> str:
        return str(tabulate(self.rows(), HEADS))


def score_of(outcomes: Sequence[Outcome], tier: str) -> Score:
    return Score(tuple(outcomes), tier)


def _of(part: int, whole: int) -> str:
    return f"{part}/{whole}" + (f" ({part / whole:.0%})" if whole else "")
