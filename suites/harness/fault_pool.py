"""Runs jobs in processes of their own, some at a time, each with a time limit.

A fault may break the device for good (an illegal address is sticky) or hang: both must end with
one process. They are forked from a server that has imported what they need and has no device open.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

TIME_LIMIT_S = 120.0
_PRELOADED = ["suites.harness.fault_run"]


@dataclass(frozen=True)
class Job:
    """`function(*arguments)` by a name that another process can import; the result is pickled."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Done:
    """`error` is empty where `value` holds the result."""

    job: Job
    value: Any = None
    error: str = ""


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    results: Connection
    until: float


def run_jobs(
    jobs: Sequence[Job], *, workers: int = 0, time_limit_s: float = TIME_LIMIT_S
) -> Iterator[Done]:
    """Yields each job's end as it comes; `workers` processes at a time, by default one a core."""
    workers = workers or os.cpu_count() or 1
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting, running = list(reversed(jobs)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(context, waiting.pop(), time_limit_s))
            wait([turn.results for turn in running], timeout=1.0)
            for turn in list(running):
                done = _ended(turn, time_limit_s)
                if done is not None:
                    running.remove(turn)
                    yield done
    finally:
        for turn in running:
            turn.process.kill()
            turn.process.join()


def _start(context: Any, job: Job, time_limit_s: float) -> _Running:
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, sender), daemon=True)
    process.start()
    sender.close()
    return _Running(job, process, results, time.monotonic() + time_limit_s)


def _work(job: Job, sender: Connection) -> None:
    # The runtime's threads would compete with the other processes.
    os.environ.setdefault("ASSAY_CPU_THREADS", "1")
    try:
        sender.send(Done(job, job.function(*job.arguments)))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        sender.send(Done(job, error=f"{type(error).__name__}: {error} ({where})"))


def _ended(turn: _Running, time_limit_s: float) -> Done | None:
    try:
        if turn.results.poll():
            done: Done = turn.results.recv()
            turn.process.join()
            return done
    except EOFError:
        turn.process.join()
        return Done(turn.job, error=f"the process ended with code {turn.process.exitcode}")
    if time.monotonic() < turn.until:
        return None
    turn.process.kill()
    turn.process.join()
    return Done(turn.job, error=f"no end within {time_limit_s:.0f} s")
