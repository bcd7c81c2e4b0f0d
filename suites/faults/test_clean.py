"""No alarm without a fault: the looks of the fault runs, on the engine as it is.

More runs: `assay faults --clean 1000`.
"""

from collections.abc import Sequence

import pytest

from suites.harness.clean_runs import alarms_of, clean_models, clean_run
from suites.harness.fault_pool import Job, run_jobs
from suites.harness.fault_run import LOOKS


def _alarms(numbers: Sequence[int], models: tuple[str, ...]) -> list[str]:
    half = -(-len(numbers) // 2)
    jobs = [
        Job(f"from {part[0]}", alarms_of, (part[0], len(part), models))
        for part in (numbers[:half], numbers[half:])
    ]
    done = list(run_jobs(jobs, time_limit_s=1200))
    assert [end.error for end in done if end.error] == []
    assert sum(end.job.arguments[1] for end in done) == len(numbers)
    return [line for end in done for line in end.value]


def test_no_alarm_under_shuffle_and_sanitize() -> None:
    """Every tiny model once; plain looks at them are all over the other suites."""
    models = clean_models()
    (look,) = [place for place, look in enumerate(LOOKS) if look.name == "checked"]
    assert LOOKS[look].checking.sanitize
    assert LOOKS[look].checking.shuffle is not None
    first = look * len(models)
    assert _alarms(range(first, first + len(models)), models) == []


@pytest.mark.full
def test_no_alarm_under_any_look() -> None:
    models = clean_models()
    assert _alarms(range(len(models) * len(LOOKS)), models) == []


def test_a_number_decides_a_run() -> None:
    models = clean_models()
    runs = [clean_run(number, models) for number in range(2 * len(models) * len(LOOKS))]
    assert runs == [clean_run(run.number, models) for run in runs]
    assert {(run.model, run.look.name) for run in runs} == {
        (model, look.name) for model in models for look in LOOKS
    }
    assert len({run.look.seed for run in runs}) == len(runs)
