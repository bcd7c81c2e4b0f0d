"""Runs the catalogue once a session, in processes of their own, and prints the score at its end.

All tests that wait for it come last: until then it runs beside the others, so that no core is idle.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tabulate import tabulate

from fixtures.faults import load_faults
from suites import summary
from suites.harness.fault_pool import Job, run_jobs
from suites.harness.fault_run import Outcome, outcome_of, run_named
from suites.harness.fault_score import HEADS, Score, score_of
from suites.options import SUMMARY_FILE, parameters_of

EARLY: "pytest.StashKey[FaultRun]" = pytest.StashKey()
WORTH_STARTING = 20
"""Faults from which on they are run beside other tests."""
RUNS: "pytest.StashKey[list[FaultRun]]" = pytest.StashKey()

Table = tuple[str, list[str], list[list[str]]]
"""Title, heads, rows."""


class FaultRun:
    """The outcomes of one tier, as they come; a test waits for the one that it is about.

    `workers` processes (0: one a core) until the first test waits, which leaves its core to them.
    """

    def __init__(self, names: list[str], tier: str, workers: int = 0) -> None:
        self.names, self.tier, self.workers = names, tier, workers
        self.tables: list[Table] = []  # what tests have to show beside the score
        self._outcomes: dict[str, Outcome] = {}
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        jobs = [Job(name, run_named, (name, self.tier)) for name in self.names]
        for done in run_jobs(jobs, workers=lambda: self.workers):
            with self._news:
                outcome = outcome_of(done.job.name, done.value, done.error)
                self._outcomes[done.job.name] = outcome
                self._news.notify_all()

    def outcome(self, name: str) -> Outcome:
        with self._news:
            if name not in self._outcomes:
                self.workers = 0
            self._news.wait_for(lambda: name in self._outcomes or not self._thread.is_alive(), 1800)
            return self._outcomes[name]

    def score(self) -> Score:
        return score_of([self.outcome(name) for name in self.names], self.tier)


def waits(item: pytest.Item) -> bool:
    """True for a test that needs outcomes of a fault run."""
    return not {"fast_run", "full_run"}.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=waits)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the fast tier beside the tests that come before it, which use one core.

    Not while benchmarks are timed: those must have the machine for themselves.
    """
    config = session.config
    names = _wanted(session, "fast")
    if len(names) < WORTH_STARTING or config.getoption("--benchmark") or config.option.collectonly:
        return
    config.stash[EARLY] = _start(names, "fast", max(1, (os.cpu_count() or 1) // 2))


def _wanted(session: pytest.Session, tier: str) -> list[str]:
    """The faults that the session's tests are about; -k or a category may have left some out."""
    wanted = {
        parameters_of(item)["fault"].id
        for item in session.items
        if "fault" in parameters_of(item) and f"{tier}_run" in getattr(item, "fixturenames", ())
    }
    return [name for name in load_faults() if name in wanted]


def _start(names: list[str], tier: str, workers: int = 0) -> FaultRun:
    return FaultRun(names, tier, workers)


def _fault_run(request: pytest.FixtureRequest, tier: str) -> Iterator[FaultRun]:
    early = request.config.stash.get(EARLY, None)
    run = early if early is not None and early.tier == tier else None
    run = run or _start(_wanted(request.session, tier), tier)
    yield run
    request.config.stash.setdefault(RUNS, []).append(run)


@pytest.fixture(scope="session")
def fast_run(request: pytest.FixtureRequest) -> Iterator[FaultRun]:
    yield from _fault_run(request, "fast")


@pytest.fixture(scope="session")
def full_run(request: pytest.FixtureRequest) -> Iterator[FaultRun]:
    yield from _fault_run(request, "full")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for run in config.stash.get(RUNS, []):
        for title, heads, rows in run.tables:
            terminalreporter.section(title)
            terminalreporter.write_line(str(tabulate(rows, heads)))
        heads, rows = list(HEADS), run.score().rows()
        section = f"### Faults, {run.tier} tier\n\n{summary.markdown_table(heads, rows)}"
        summary.append(section, config.stash[SUMMARY_FILE])
        terminalreporter.section(f"faults, {run.tier} tier")
        terminalreporter.write_line(run.score().table())
