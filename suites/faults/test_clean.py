"""No alarm without a fault: the looks of the fault runs, on the engine as it is.

More runs: `assay faults --clean 1000`.
"""

import os

from suites.harness.clean_runs import alarms_of, clean_models, clean_run
from suites.harness.fault_pool import Job, run_jobs
from suites.harness.fault_run import LOOKS, looks_of


def test_clean_runs_raise_no_alarm() -> None:
    """Every tiny model under every look of the fast tier, the sanitizing one among them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    models = clean_models()
    assert len(models) > len(LOOKS)
    first = [n for n, look in enumerate(LOOKS) if look.tier == "fast"]
    assert first == list(range(len(looks_of("fast"))))
    jobs = [
        Job(f"{look}", alarms_of, (look * len(models) + part, len(models) // 2 + 1, models))
        for look in first
        for part in (0, len(models) // 2)
    ]
    done = list(run_jobs(jobs, time_limit_s=600))
    assert [end.error for end in done if end.error] == []
    assert [line for end in done for line in end.value] == []


def test_a_number_decides_a_run() -> None:
    models = clean_models()
    runs = [clean_run(number, models) for number in range(2 * len(models) * len(LOOKS))]
    assert runs == [clean_run(run.number, models) for run in runs]
    assert {(run.model, run.look.name) for run in runs} == {
        (model, look.name) for model in models for look in LOOKS
    }
    assert len({run.look.seed for run in runs}) == len(runs)
