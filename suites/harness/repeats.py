"""How often a commit is probed when its fault shows only sometimes, and how sure that makes us.

A faulty commit fails a run with probability `rate`, a sound one with probability `noise` (0: the
judge never errs). A commit is bad once K runs fail and good once K of n can't fail any more.
Probabilities are computed in exact fractions of the decimals that were typed.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import comb

from reference.model.errors import InputError

DEFAULT_ERROR = 0.01
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Plan:
    """n runs a commit, of which K failing make it bad.

    `miss` is the probability that a faulty commit is called good, `false_alarm` that a sound one is
    called bad.
    """

    runs: int
    failing: int
    rate: float
    noise: float
    miss: float
    false_alarm: float

    def decided(self, failed: int, clean: int) -> bool | None:
        """True: bad, False: good, None: more runs are needed."""
        if failed >= self.failing:
            return True
        return False if clean > self.runs - self.failing else None

    def error_over(self, good: int, bad: int) -> float:
        """Probability that one or more of so many verdicts is wrong, at most."""
        right = (1 - Fraction(self.miss)) ** good * (1 - Fraction(self.false_alarm)) ** bad
        return float(1 - right)


def fewer_than(failing: int, runs: int, probability: Fraction) -> Fraction:
    """Probability that fewer than `failing` of `runs` fail (binomial)."""
    other = 1 - probability
    terms = (
        comb(runs, count) * probability**count * other ** (runs - count)
        for count in range(min(failing, runs + 1))
    )
    return sum(terms, start=Fraction(0))


def plan_runs(
    rate: float = 1.0,
    error: float | None = None,
    *,
    failing: int = 1,
    noise: float = 0.0,
    runs: int | None = None,
) -> Plan:
    """The fewest runs that keep both errors of a verdict within `error`, or the errors of `runs`.

    For failing=1 the fewest are ceil(log(error) / log(1 - rate)). Raises InputError for figures
    that are no probabilities and where no number of runs up to MAX_RUNS does it.
    """
    _require("--rate", rate, 0 < rate <= 1, "a probability above 0, at most 1")
    _require("--noise", noise, 0 <= noise < rate, f"a probability from 0 to below the rate {rate}")
    _require("--at-least", failing, 1 <= failing <= MAX_RUNS, f"a number from 1 to {MAX_RUNS:,}")
    if runs is not None:
        allowed = f"a number from --at-least ({failing}) to {MAX_RUNS:,}"
        _require("--probes", runs, failing <= runs <= MAX_RUNS, allowed)
        if error is not None:
            raise InputError("--error goes with a computed number of probes, expected no --probes")
        return _plan(runs, failing, rate, noise)
    wanted = DEFAULT_ERROR if error is None else error
    _require("--error", wanted, 0 < wanted < 1, "a probability above 0 and below 1")
    plan = _plan(_fewest(failing, _exact(rate), _exact(wanted)), failing, rate, noise)
    if not plan.false_alarm <= wanted:
        raise InputError(
            f"--at-least is {failing}, expected more because {plan.runs} runs of a sound commit "
            f"would call it bad with probability {plan.false_alarm:.3g}, above {wanted}"
        )
    return plan


def _plan(runs: int, failing: int, rate: float, noise: float) -> Plan:
    miss = fewer_than(failing, runs, _exact(rate))
    false_alarm = 1 - fewer_than(failing, runs, _exact(noise))
    return Plan(runs, failing, rate, noise, float(miss), float(false_alarm))


def _fewest(failing: int, rate: Fraction, error: Fraction) -> int:
    """The smallest n whose probability of a miss is at most `error`; that falls as n grows."""
    too_few, enough = failing - 1, failing
    while fewer_than(failing, enough, rate) > error:
        if enough == MAX_RUNS:
            raise InputError(
                f"--rate is {float(rate):g}, expected more because even {MAX_RUNS:,} probes a "
                f"commit would miss such a fault with probability above {float(error):g}"
            )
        too_few, enough = enough, min(2 * enough, MAX_RUNS)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fewer_than(failing, middle, rate) > error:
            too_few = middle
        else:
            enough = middle
    return enough


def _exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))


def _require(option: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"{option} is {value}, expected {expected}")
