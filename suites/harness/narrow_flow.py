"""Products of few columns on path matrix, op by op: a traced prefill of as many tokens.

Which kernel multiplies on that path depends on the number of columns. Those for up to two tiles are
what decode steps of several sequences run, and such steps are compared with prefills of the same
kernels only. A prompt of more tokens sends none through them, a short one fills one tile; this one
fills a second.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backend_hip.registry import PACKED_MOST, PACKED_TILE
from reference.model.trace import Trace
from suites.harness.batch_plans import made_of
from suites.harness.generations import Generations
from suites.harness.kernels import kernels_check, packed_rows, product_rows
from suites.harness.left_behind import LeftBehind
from suites.harness.local import LocalRules
from suites.harness.pair import bits_check
from suites.harness.protocol import JudgedEngine, Prefilled, Progress
from suites.harness.run_options import Asked
from suites.harness.tail import broken_prefill, tail_check
from suites.harness.traced import TracedRun, judge_again
from suites.harness.verdict import Check, State, behind

NAME = "narrow flow"
TOKENS = PACKED_TILE + 1


def narrow_flow(
    engine: JudgedEngine,
    asked: Asked,
    traced: Sequence[TracedRun],
    generations: Generations,
    broken_since: str,
    say: Progress,
) -> tuple[list[Check], list[str]]:
    """The checks, or a note that says why there are none; neither on other paths.

    Resets the engine, and leaves the prompt's sequence behind. `traced` is what was judged before,
    `broken_since` what was found.
    """
    options = asked.options
    if options.path != "matrix" or "batched" not in options.modes:
        return [], []
    shown = next((run.result for run in traced if _is_narrow(run)), None)
    if shown is not None:  # and judged: only that packed products ran is left to say
        return [behind(check, broken_since) for check in _kernels(asked, [shown])], []
    if asked.room < TOKENS:
        return [], _unjudged(f"{TOKENS} tokens need more than a context of {asked.room}")
    what, prompt = f"prefill of {TOKENS} tokens", prompt_of(asked)
    say(f"engine batched {what} with every trace point")
    trace, results = Trace(meta={"mode": "batched"}), []
    for kept in (None, trace):
        engine.reset()
        result = engine.prefill_batched(prompt, trace=kept)
        if result.chunks != 1:
            why = f"{TOKENS} tokens go in {result.chunks} flows, which a larger --chunk makes one"
            return [], _unjudged(why)
        generations.add(f"batched {what}", result.tail, np.asarray(result.logits))
        results.append(result)
    declared = LocalRules(options.path, options.kv_type_k, options.kv_type_v)
    held = LeftBehind.of(engine, asked.model.spec)
    recorded = replace(trace, tokens=prompt)
    local = judge_again(asked.model, recorded, declared, NAME, what, say, held=held)
    since = broken_since or next((c.link for c in local if c.state is State.DIVERGED), "")
    name = f"eager batched with trace equals untraced, {NAME}"
    link = f"untraced logits differ from the traced run's, {what}"
    rows = [np.asarray(result.logits) for result in results]
    checks = [
        *local,
        bits_check(name, rows[0], rows[1], link, since),
        *_kernels(asked, results),
        tail_check(
            f"sampler tail: batched prefill, {NAME}", [broken_prefill(r, prompt) for r in results]
        ),
    ]
    return [behind(check, since) for check in checks], []


def prompt_of(asked: Asked) -> tuple[int, ...]:
    """What is fed."""
    return made_of(asked.tokens, TOKENS, 0, asked.model.spec.vocab_size)


def _kernels(asked: Asked, results: Sequence[Prefilled]) -> list[Check]:
    """The path's kernels multiplied, and those for few columns of every format that has them."""
    options = asked.options
    types = (options.kv_type_k, options.kv_type_v)
    rows = product_rows(asked.model, options.path, "batched", types)
    checks = [kernels_check(f"kernels: batched prefill, {NAME}", r, rows) for r in results]
    sound = next((check for check in checks if check.state is not State.OK), checks[0])
    missing = sorted(
        name for name in packed_rows(asked.model) if any(not r.routes.get(name) for r in results)
    )
    if sound.state is State.OK and missing:
        detail = f"never ran {', '.join(missing)}"
        return [replace(sound, state=State.INVALID, detail=detail, link=f"{sound.name}: {detail}")]
    return [sound]


def _is_narrow(run: TracedRun) -> bool:
    """True for a traced flow of as many tokens as packed products of two tiles take."""
    count = len(run.recorded.tokens)
    one_flow = run.mode == "batched" and run.result.chunks == 1
    return one_flow and PACKED_TILE < count <= PACKED_MOST


def _unjudged(why: str) -> list[str]:
    what = f"products of {TOKENS} to {PACKED_MOST} columns, which wide decode steps run,"
    return [f"{what} were not judged op by op: {why}"]
