"""Seeded runs of the engine as it is: every one that is not ok is a wrong alarm.

The same looks as those that faults are judged by, each time with other prompts and, where the
schedule is shuffled, another shuffle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fixtures.registry import model_names, published_files
from reference.model.errors import DeviceError
from suites.harness.fault_models import fault_model
from suites.harness.fault_run import LOOKS, Look, is_environment, judge
from suites.harness.verdict import State

GROUP = 20
"""Runs that share a process: starting one costs more than a run of a tiny model."""


@dataclass(frozen=True)
class CleanRun:
    """One run; its number decides everything about it."""

    number: int
    model: str
    look: Look


def clean_models() -> tuple[str, ...]:
    """One tiny model of every shape and every architecture; formats by the mixed files."""
    names = [name for name in model_names() if name not in published_files()]
    return tuple(n for n in names if n.startswith("oracle-") or n.count("-") == 1)


def clean_run(number: int, models: Sequence[str]) -> CleanRun:
    """Run number `number`: all models under one look, then under the next, then other prompts."""
    place = number % (len(models) * len(LOOKS))
    look = LOOKS[place // len(models)]
    checking = look.checking
    if checking.shuffle is not None:
        checking = replace(checking, shuffle=number)
    look = replace(look, seed=1000 + number, checking=checking)
    return CleanRun(number, models[place % len(models)], look)


def alarms_of(first: int, count: int, models: tuple[str, ...]) -> list[str]:
    """Runs `count` runs from number `first` on; one line for each that is not ok.

    Raises what a machine without compiler, disk or memory raises: that is no alarm of the judge.
    """
    alarms = []
    for number in range(first, first + count):
        run = clean_run(number, models)
        try:
            verdict = judge(fault_model(run.model), run.look)
            said = "" if verdict.state is State.OK else verdict.summary()
        except DeviceError as error:
            said = " ".join(str(error).split())
            if is_environment(said):
                raise
        if said:
            alarms.append(f"run {number}: {run.model}, look {run.look.name}: {said}")
    return alarms
