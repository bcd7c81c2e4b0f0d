"""`assay bench --sections ops`: single operations of a model, each of all its layers in a graph.

Products by format, shape and number of columns (product_operations.py); decode's attention by
context and KV type, with the control of kv_control.py; the rest of a step and a prompt's attention
(rest_operations.py). What the figures of a step are made
of, and where a change of one kernel shows.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from backend_hip import ops
from backend_hip.device import Progress
from reports.operations import Operation
from suites.benchmark.bench import Subject
from suites.benchmark.byte_model import step_bytes
from suites.benchmark.deadline import Deadline
from suites.benchmark.engine_runs import Runner
from suites.benchmark.kv_control import ExpandingRunner, open_runner
from suites.benchmark.operation_job import Job, fill, record_of, timed
from suites.benchmark.plans import OPS, Wanted
from suites.benchmark.product_operations import FEW, Products
from suites.benchmark.rest_operations import prompt_job, rest_jobs

ATTENTION, ARGMAX = "Attention of decode", "Argmax"
COLUMNS = {"gpu": (1, 2, 4, 8, 16, 17, 32, 40, 128, 512), "cpu": (1, 2, 17)}
BATCHES = {"gpu": (1, 8), "cpu": (1, 2)}
CONTEXTS = {"gpu": (128, 2048, 6900), "cpu": (17,)}
PRODUCT_PATHS = ("kparallel", "matrix")
PROMPT_TOKENS = 512  # of a flow, on path matrix
KINDS = (("f16", False), ("q8_0", False), ("q8_0", True))
_ARGMAX_COUNT = 8  # in a graph: one takes as long as an event is exact


def run_ops(
    subject: Subject, rounds: int, progress: Progress, deadline: Deadline, wanted: Wanted
) -> Iterator[list[Operation]]:
    """Records of every operation, as soon as those that are timed in turn are done.

    `wanted` leaves paths and columns of products, contexts and batches of attention.
    """
    size = "cpu" if subject.device.runtime.kind == "cpu" else "gpu"
    contexts = [one for one in CONTEXTS[size] if one in (wanted.contexts or CONTEXTS[size])]
    batches = [one for one in BATCHES[size] if one in (wanted.batches or BATCHES[size])]
    counts = [one for one in COLUMNS[size] if one in (wanted.batches or COLUMNS[size])]
    for path in (one for one in PRODUCT_PATHS if one in (wanted.paths or PRODUCT_PATHS)):
        progress(f"ops: products of path {path}")
        most = max(COLUMNS[size])
        options: dict[str, Any] = {"path": path, "sequences": FEW, "context_length": most}
        with closing(Runner(subject.model, subject.device, **options)) as runner:
            products = Products(subject, runner, path, most)
            for columns in counts:
                name = f"{OPS}: {columns} columns on {path}"
                if deadline.allows(name):
                    yield timed(runner, products.jobs(columns), rounds)
            products.free()
    for kind, expanded in KINDS if contexts and batches else ():
        progress(f"ops: attention with KV {kind}{', expanded' if expanded else ''}")
        deepest = max(contexts)
        with closing(
            open_runner(
                subject.model,
                subject.device,
                sequences=max(batches),
                context_length=deepest + 1,
                chunk=PROMPT_TOKENS,
                kv_type_k=kind,
                kv_type_v=kind,
                expanded=expanded,
            )
        ) as runner:
            runner.assume(deepest)
            for context in contexts:
                if not deadline.allows(f"{OPS}: attention at {context:,}, KV {kind}"):
                    continue
                jobs = [_attention(subject, runner, batch, context, kind) for batch in batches]
                yield timed(runner, jobs, rounds)
            if (kind, expanded) == KINDS[0]:
                jobs = [_argmax(subject, runner, batch) for batch in batches]
                jobs += rest_jobs(subject, runner, kind)
                yield timed(runner, jobs, rounds)
            if not expanded:
                tokens = min(runner.engine.chunk, deepest)
                yield timed(runner, [prompt_job(subject, runner, kind, tokens)], rounds)


def _attention(subject: Subject, runner: Runner, batch: int, context: int, kind: str) -> Job:
    """Attention of all layers for `batch` sequences with `context` tokens each, their own among
    them; first written out as f16 where the runner expands."""
    engine, spec = runner.engine, subject.model.spec
    s, cache = engine._scratch, engine._cache
    expands = isinstance(runner, ExpandingRunner)
    types = ",".join(2 * ["f16" if expands else kind])
    layers = [layer for layer in spec.layers if layer.delta_net is None]
    fill(s.q)

    def prepare() -> None:
        runner.place(context - 1)
        sequences = engine._sequences
        engine._write_step([row for i in range(batch) for row in sequences.following([1], i)])
        engine._step.queue_copy(batch)

    def queue() -> None:
        flow = engine._decode_flow(batch, context)
        if isinstance(runner, ExpandingRunner):
            runner.queue_expansion(batch, context)
        for layer in layers:
            width = layer.head_count * layer.head_size
            q, out = s.q.of_width(width), s.mixed.of_width(width)
            keys, values = cache.keys[layer.kv_layer], cache.values[layer.kv_layer]
            ops.attention(flow, q, keys, values, out, layer, spec.attention_scale, types)

    read = step_bytes(subject.model, [context] * batch, kind, kind).kv_read
    pairs = sum(
        layer.head_count * layer.head_size * min(context, layer.window or context)
        for layer in layers
    )
    what = f"KV {kind}" + (" written out as f16 first" if expands else "")
    note = "control" if expands else ""
    figures = (batch, len(layers), read, 4.0 * batch * pairs)
    record = record_of(subject, ATTENTION, what, "any", *figures, context=context, note=note)
    width = layers[-1].head_count * layers[-1].head_size
    return Job(record, queue, prepare, s.mixed.of_width(width))


def _argmax(subject: Subject, runner: Runner, batch: int) -> Job:
    """The largest of a row of logits for each sequence, both passes."""
    engine, vocabulary = runner.engine, subject.model.spec.vocab_size
    logits, tail = engine._scratch.logits, engine._tail
    fill(logits)
    flow = engine._flow(batch, batched=batch > 1, sequences=batch)

    def queue() -> None:
        for _ in range(_ARGMAX_COUNT):
            ops.argmax(flow, logits.row(0), tail._found, tail._result, vocabulary)

    nbytes = float(_ARGMAX_COUNT * batch * vocabulary * 4)
    figures = (batch, _ARGMAX_COUNT, nbytes, 0.0)
    note, what = "logits stay in the cache", f"{vocabulary:,} logits"
    return Job(record_of(subject, ARGMAX, what, "any", *figures, note=note), queue)
