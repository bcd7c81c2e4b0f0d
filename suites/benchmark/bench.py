"""Runs a section: builds its engines, proves its rows, times them in turn, makes the records."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_hip import Device
from backend_hip.device import Progress
from backend_hip.weights import LoadReport
from fixtures.geometry_table import whole_layers
from reference.model import Model
from reports.kernel_use import BatchedKernel
from reports.speed import Speed
from suites.benchmark.byte_model import flow_weight_bytes, prefill_flops, step_bytes
from suites.benchmark.deadline import Deadline
from suites.benchmark.engine_runs import Runner
from suites.benchmark.interleave import Samples, Timed, in_turn
from suites.benchmark.kernel_use import batched_kernels
from suites.benchmark.kv_control import open_runner
from suites.benchmark.limits import MeasuredLimits
from suites.benchmark.peer import peer_decode, peer_prefill
from suites.benchmark.plans import MAX_COLS_SECTION, Section, SpeedRow
from suites.benchmark.row_proof import RowProof, prove_decode, prove_prefill

Options = tuple[tuple[str, Any], ...]
SEED = 2025


@dataclass(frozen=True)
class Subject:
    """What is measured, and the facts that every record carries.

    `loads` gets the report of each engine's weights, `kernels` what the products of a MAX_COLS
    sweep take.
    """

    name: str
    model: Model
    device: Device
    limits: MeasuredLimits
    host: str
    commit: str
    loads: list[LoadReport] = field(default_factory=list)
    kernels: list[BatchedKernel] = field(default_factory=list)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random token ids, the same for every row."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(SEED)))
        vocabulary = self.model.spec.vocab_size
        return tuple(int(token) for token in rng.integers(0, vocabulary, count))


def run_section(
    subject: Subject,
    section: Section,
    rounds: int,
    progress: Progress,
    deadline: Deadline | None = None,
) -> Iterator[list[Speed]]:
    """Proves and times the rows of a section, a group after the other, engines kept side by side.

    Raises InputError where the engines do not fit into memory together, AssertionError where a row
    is not right.
    """
    with ExitStack() as stack:
        runners = {
            options: stack.enter_context(closing(_runner(subject, section, options, progress)))
            for options in dict.fromkeys(row.options for row in section.rows)
        }
        swept = {row.max_cols: runners[row.options].engine.kernels for row in section.rows}
        if len(swept) > 1:
            named = (subject.name, subject.model, subject.device)
            subject.kernels.extend(batched_kernels(*named, swept, progress))
        for number, rows in enumerate(section.groups()):
            name = f"{section.name} at {rows[0].context:,}"
            if number and deadline is not None and not deadline.allows(name):
                continue
            progress(f"{name}: proving {len(rows)} rows")
            proofs = prove_rows(subject, rows, runners)
            progress(f"{name}: timing {len(rows)} rows, {rounds} rounds in turn")
            timed = {row: timed_row(subject, runners[row.options], row) for row in rows}
            samples = in_turn(subject.device, timed, rounds)
            again = prove_rows(subject, rows, runners)
            assert again == proofs, f"{name}: results after the timing differ from before"
            yield [record(subject, section, row, proofs[row], samples, runners) for row in rows]


def _runner(subject: Subject, section: Section, options: Options, progress: Progress) -> Runner:
    rows = [row for row in section.rows if row.options == options]
    runner = open_runner(
        subject.model,
        subject.device,
        sequences=max(row.batch for row in rows),
        context_length=max(row.context + row.steps for row in rows) + 1,
        progress=progress,
        **dict(options),
    )
    subject.loads.append(runner.engine.weights.loading)
    deepest = max((row.context for row in rows if row.phase == "decode"), default=0)
    runner.assume(deepest)
    return runner


def prove_rows(
    subject: Subject, rows: Sequence[SpeedRow], runners: Mapping[Options, Runner]
) -> dict[SpeedRow, RowProof]:
    """What was verified of each row. Per-token logits of a prompt are computed once."""
    logits: dict[tuple[object, ...], Any] = {}
    proofs = {}
    for row in rows:
        runner = runners[row.options]
        if row.phase == "decode":
            proofs[row] = prove_decode(runner, row, subject.tokens(row.batch))
            continue
        tokens = subject.tokens(row.context)
        key = (row.context, row.kv_type_k, row.kv_type_v)
        if key not in logits:
            runner.engine.reset()
            logits[key] = runner.prefill("per-token", tokens)
        proofs[row] = prove_prefill(runner, row, tokens, logits[key])
    return proofs


def timed_row(subject: Subject, runner: Runner, row: SpeedRow) -> Timed:
    """What one sample of a row runs."""
    tokens = subject.tokens(row.batch if row.phase == "decode" else row.context)

    def decode() -> None:
        fed = list(tokens)
        for _ in range(row.steps):
            fed = runner.step(fed)

    def prefill() -> None:
        result = runner.prefill(row.mode, tokens)
        fed = [result.tail.staged_token]
        for _ in range(row.steps):
            fed = runner.step(fed)

    if row.phase == "decode":
        return Timed(decode, lambda: runner.place(row.context))
    return Timed(prefill, runner.engine.reset)


def limit_of(subject: Subject, row: SpeedRow, runner: Runner) -> tuple[float, str]:
    """Least seconds of one sample, and of what: bytes, or FLOPs where their time is longer."""
    kv, limits = (row.kv_type_k, row.kv_type_v), subject.limits
    rate = limits.read_bytes_per_s
    measured = f"the read rate measured in this run, {rate / 1e9:,.0f} GB/s"
    bytes_name = f"bytes of weights, cache and states over {measured}"

    def steps_s(first: int, count: int) -> float:
        """`count` steps from `first` cached tokens on; bytes grow linearly between the ends."""
        ends = [
            step_bytes(subject.model, [context] * row.batch, *kv).seconds(rate)
            for context in (first, first + count - 1)
        ]
        return count * statistics.mean(ends) if count else 0.0

    if row.phase == "decode":
        return steps_s(row.context, row.steps), bytes_name
    decoded = steps_s(row.context, row.steps)
    if row.mode == "per-token":
        return steps_s(0, row.context) + decoded, bytes_name
    chunk = runner.engine.chunk
    whole, rest = divmod(row.context, chunk)
    nbytes = whole * flow_weight_bytes(subject.model, chunk)
    nbytes += flow_weight_bytes(subject.model, rest) if rest else 0.0
    nbytes += subject.model.weights.lm_head.raw.nbytes
    by_bytes = nbytes / rate
    if limits.matrix_flops_per_s is not None:
        by_flops = prefill_flops(subject.model, row.context) / limits.matrix_flops_per_s
        if by_flops > by_bytes:
            matrix = f"{limits.matrix_flops_per_s / 1e12:,.0f} TFLOP/s"
            return (
                by_flops + decoded,
                f"FLOPs of the prompt over the measured matrix rate, {matrix}",
            )
    return by_bytes + decoded, f"bytes of weights, once a flow, over {measured}"


def record(
    subject: Subject,
    section: Section,
    row: SpeedRow,
    proof: RowProof,
    samples: Mapping[SpeedRow, Samples],
    runners: Mapping[Options, Runner],
) -> Speed:
    """The record of one timed row."""
    # The format that most bytes of the weights have stands first.
    takes = [one for one in subject.kernels if one.max_cols == row.max_cols]
    sweep = takes[0].summary if section.name == MAX_COLS_SECTION and takes else ""
    base = section.base(row)
    limit_s, what = limit_of(subject, row, runners[row.options])
    base_limit_s = limit_of(subject, base, runners[base.options])[0] if base in samples else None
    kv = (row.kv_type_k, row.kv_type_v)
    named = (subject.device.name, subject.name, kv)
    decode = row.phase == "decode"
    whole_prompt = not decode and not row.steps
    prompt_peer = peer_prefill(*named, row.mode, row.context) if whole_prompt else None
    decode_peer = peer_decode(*named, row.context, row.batch) if decode else None
    layers, whole = subject.model.spec.layer_count, whole_layers(subject.name)
    kinds = [f"{kind}>f16" if row.expanded else kind for kind in kv]
    return Speed(
        section=section.title,
        phase=row.phase,
        model=subject.name,
        runtime=subject.device.label,
        device=subject.device.name,
        host=subject.host,
        mode=row.mode,
        path=row.path,
        kv_type_k=kinds[0],
        kv_type_v=kinds[1],
        max_cols=row.max_cols,
        batch=row.batch,
        context=row.context,
        chunks=proof.chunks,
        after=0 if decode else row.steps,
        tokens=row.tokens,
        seconds=tuple(samples[row].device),
        host_seconds=tuple(samples[row].host),
        limit_seconds=limit_s,
        limit_of=what,
        base_name=section.base_name,
        base_tokens=base.tokens,
        base_seconds=tuple(samples[base].device) if base in samples else None,
        base_limit_seconds=base_limit_s,
        peer=None if row.expanded else decode_peer or prompt_peer,
        max_abs_diff=proof.max_abs_diff,
        verdict="ok",
        commit=subject.commit,
        compiler=subject.device.runtime.compiler,
        note="; ".join(filter(None, (proof.note, sweep))),
        layers=f"{layers} of {whole}" if whole not in (None, layers) else str(layers),
        matrix_products=proof.matrix_products,
    )
