"""One operation to be timed: what a graph holds, and the record that its samples go into."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from backend_hip.dispatch import CountedGraph, Kernels
from backend_hip.ops import Values
from reports.operations import Operation
from suites.benchmark.bench import Subject
from suites.benchmark.engine_runs import Runner
from suites.benchmark.interleave import Timed, in_turn


@dataclass(frozen=True)
class Job:
    """What a graph holds (`queue`), and the record without its samples; `prepare` before each.

    `results`: where the last operation leaves float32 rows, a row for each of the record's columns.
    """

    record: Operation
    queue: Callable[[], None]
    prepare: Callable[[], object] = lambda: None
    results: Values | None = None


def timed(runner: Runner, jobs: list[Job], rounds: int) -> list[Operation]:
    """Captures each job, replays all in turn, and looks at what they leave."""
    kernels, graphs = runner.engine.kernels, []
    things = {}
    for index, job in enumerate(jobs):
        job.prepare()
        with kernels.capture() as captured:
            job.queue()
        graphs.append(captured[0])
        things[index] = Timed(_replay(kernels, captured[0]), job.prepare)
    samples = in_turn(runner.device, things, rounds)
    for job in jobs:
        if job.results is not None:
            values = job.results.download(job.record.columns)
            assert np.isfinite(values).all(), f"{job.record.op} {job.record.what}: not finite"
    for graph in graphs:
        graph.free()
    return [
        replace(job.record, seconds=tuple(samples[index].device)) for index, job in enumerate(jobs)
    ]


def _replay(kernels: Kernels, graph: CountedGraph) -> Callable[[], None]:
    return lambda: kernels.replay(graph)


def record_of(
    subject: Subject,
    op: str,
    what: str,
    path: str,
    columns: int,
    count: int,
    nbytes: float,
    flops: float,
    context: int | None = None,
    note: str = "",
) -> Operation:
    """A record that lacks only its samples."""
    limits = subject.limits
    times = {"bytes": nbytes / limits.read_bytes_per_s}
    if limits.matrix_flops_per_s is not None:
        times["FLOPs"] = flops / limits.matrix_flops_per_s
    limit_of = max(times, key=lambda name: times[name])
    return Operation(
        model=subject.name,
        runtime=subject.device.label,
        device=subject.device.name,
        op=op,
        what=what,
        path=path,
        columns=columns,
        context=context,
        count=count,
        seconds=(),
        nbytes=nbytes,
        flops=flops,
        limit_seconds=times[limit_of],
        limit_of=limit_of,
        note=note,
    )


def fill(values: Values) -> None:
    """Standard normal everywhere."""
    count = values.buffer.nbytes // 4
    values.buffer.upload(np.random.default_rng(1).standard_normal(count, np.float32))
