"""Runs jobs in processes of their own, some at a time, each with a time limit.

A fault may break the device for good (an illegal address is sticky) or hang: both must end with
one process. They are forked from a server that has imported what they need and has no device open.
A process that is killed leaves its temporary files, so all of a run share one folder for them.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from suites.harness.interrupts import deaf, ended_as_by_interrupt

TIME_LIMIT_S = 300.0
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
    jobs: Sequence[Job],
    *,
    workers: int | Callable[[], int] = 0,
    time_limit_s: float = TIME_LIMIT_S,
) -> Iterator[Done]:
    """Yields each job's end as it comes; `workers` processes at a time, 0 for one a core. A
    function is asked before each start and once a second, for a number that changes.

    SIGTERM and SIGHUP count as an interrupt until the last job ended. However the run ends, its
    processes are ended and their temporary files are removed.
    """
    # Here and not in the processes: NumPy reads it when their server imports it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting, running = list(reversed(jobs)), list[_Running]()
    with ended_as_by_interrupt():
        folder = tempfile.mkdtemp(prefix="assay-faults-")
        try:
            while waiting or running:
                while waiting and len(running) < _at_a_time(workers):
                    _start(context, waiting.pop(), time_limit_s, folder, running)
                wait([turn.results for turn in running], timeout=1.0)
                for turn in list(running):
                    done = _ended(turn, time_limit_s)
                    if done is not None:
                        running.remove(turn)
                        yield done
        finally:
            with deaf():
                for turn in running:
                    turn.process.kill()
                    turn.process.join()
                shutil.rmtree(folder, ignore_errors=True)


def _at_a_time(workers: int | Callable[[], int]) -> int:
    return (workers() if callable(workers) else workers) or os.cpu_count() or 1


def _start(
    context: Any, job: Job, time_limit_s: float, folder: str, running: list[_Running]
) -> None:
    """Starts the job and notes it in `running`."""
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, sender, folder), daemon=True)
    process.start()
    sender.close()
    running.append(_Running(job, process, results, time.monotonic() + time_limit_s))


def _work(job: Job, sender: Connection, folder: str) -> None:
    """`folder` takes the temporary files of this process and of the tools that it runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt: the parent acts on it
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # The runtime's threads would compete with the other processes.
    os.environ.setdefault("ASSAY_CPU_THREADS", "1")
    try:
        done = Done(job, job.function(*job.arguments))
        pickle.dumps(done)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        done = Done(job, error=f"{type(error).__name__}: {error} ({where})")
    with contextlib.suppress(OSError):  # nobody listens any more
        sender.send(done)


def _end_with_parent(folder: str) -> None:
    """Ends this process once the one that waits for its result is gone: killed, say, and so without
    having removed `folder`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


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
