"""Products of few columns on path matrix, op by op: a traced prefill of as many tokens.

Which kernel multiplies on that path depends on the number of columns. Those for few columns are
what decode steps of several sequences run, and such steps are compared with prefills of the same
kernels only. A prompt of another length sends no product through them; this one does.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backend_hip import packed
from backend_hip.dispatch import route_name
from backend_hip.registry import PACKED_FORMATS, PACKED_MOST, PACKED_TILE
from reference.model import Model
from reference.model.trace import Trace
from suites.harness.batch_decode import Batch
from suites.harness.generations import Generations
from suites.harness.kernels import products_of
from suites.harness.local import LocalRules
from suites.harness.pair import bits_check
from suites.harness.protocol import JudgedEngine, Prefilled, Progress
from suites.harness.traced import TracedRun, judge_again
from suites.harness.verdict import Check, State, behind, fact

NAME = "few columns"
TOKENS = PACKED_TILE + 3
"""A whole tile of columns, and one that is partly filled."""


def few_columns(
    engine: JudgedEngine,
    batch: Batch,
    traced: Sequence[TracedRun],
    generations: Generations,
    broken_since: str,
    say: Progress,
) -> tuple[list[Check], list[str]]:
    """The checks, or a note that says why there are none; neither where none is needed.

    Resets the engine, and leaves the prompt's sequence behind. `traced` is what was judged before,
    `broken_since` what was found.
    """
    options = batch.options
    if options.path != "matrix" or "batched" not in options.modes:
        return [], []
    if any(_shows_few(run) for run in traced):
        return [], []
    if batch.room < TOKENS:
        return [], _unjudged(f"{TOKENS} tokens need more than a context of {batch.room}")
    what = f"prefill of {TOKENS} tokens"
    say(f"engine batched {what} with every trace point")
    prompt, trace = prompt_of(batch), Trace(meta={"mode": "batched"})
    rows = []
    for recorded in (None, trace):
        engine.reset()
        result = engine.prefill_batched(prompt, trace=recorded)
        rows.append(np.asarray(result.logits))
        generations.add(f"batched {what}", result.tail, rows[-1])
    if result.chunks != 1:
        return [], _unjudged(f"{TOKENS} tokens go in {result.chunks} flows, expected one")
    declared = LocalRules(options.path, options.kv_type_k, options.kv_type_v)
    name = f"eager batched with trace equals untraced, {NAME}"
    link = f"untraced logits differ from the traced run's, {what}"
    checks = [
        *judge_again(batch.model, replace(trace, tokens=prompt), declared, NAME, what, say),
        bits_check(name, rows[0], rows[1], link, broken_since),
        _kernels(batch.model, result),
    ]
    return [behind(check, broken_since) for check in checks], []


def prompt_of(batch: Batch) -> tuple[int, ...]:
    """The judged prompt's tokens, moved up by one with each time that they are repeated."""
    given, vocabulary = batch.tokens, batch.model.spec.vocab_size
    return tuple((given[i % len(given)] + i // len(given)) % vocabulary for i in range(TOKENS))


def _kernels(model: Model, result: Prefilled) -> Check:
    """The kernels for few columns did run, of every format that has them."""
    forms = {tensor.format.name for tensor in model.weights.matrices()} & set(PACKED_FORMATS)
    ran = products_of(result.routes)
    missing = sorted({route_name(packed.product_key([form])) for form in forms} - set(ran))
    detail = f"never ran {', '.join(missing)}" if missing else f"ran {', '.join(sorted(ran))}"
    return fact(
        f"kernels: batched prefill, {NAME}",
        not missing,
        detail,
        failed=State.INVALID,
        elements=sum(ran.values()),
        unit="launches",
    )


def _shows_few(run: TracedRun) -> bool:
    """True for a traced flow of as many tokens as packed products of two tiles take."""
    count = len(run.recorded.tokens)
    one_flow = run.mode == "batched" and run.result.chunks == 1
    return one_flow and PACKED_TILE < count <= PACKED_MOST


def _unjudged(why: str) -> list[str]:
    what = f"products of up to {PACKED_MOST} columns, which decode steps of several sequences run,"
    return [f"{what} were not judged op by op: {why}"]
