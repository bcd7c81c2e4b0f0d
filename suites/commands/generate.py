"""`assay generate MODEL`: text from the engine or the reference."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from backend_hip.switch import mode_from_environment
from reference.forward import Reference
from reference.model import Model
from reference.model.errors import DeviceError, InputError
from reference.model.sampling import SamplingOptions, argmax, new_generator, sample
from suites.commands import common
from suites.harness.endtoend import References
from suites.harness.pair import printing_judge
from suites.harness.protocol import Tail
from suites.harness.tail import broken_tail
from suites.harness.verdict import Verdict, write_json


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, greedily by default",
        description="Prints the continuation of a prompt. ASSAY_BATCHED_PREFILL=0|1|validate "
        "chooses the engine's prefill; validate compares both modes and sets the exit code.",
    )
    common.add_model(parser)
    common.add_prompt(parser)
    parser.add_argument(
        "-n", type=int, default=32, metavar="N", help="tokens to generate (default: 32)"
    )
    parser.add_argument(
        "--side",
        choices=("engine", "reference"),
        default="engine",
        help="who computes (default: engine)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0: off (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default: 1)")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off (default: 0)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the draws (default: 0)"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at an end-of-generation token"
    )
    common.add_engine(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.n < 1:
        raise InputError(f"-n is {arguments.n}, expected at least 1 token")
    if arguments.seed < 0:
        raise InputError(f"--seed is {arguments.seed}, expected 0 or more")
    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    options = SamplingOptions(
        arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p
    )
    switch = mode_from_environment() or "on"
    with common.ProgressReport() as progress:
        progress("reading the model")
        model = common.open_model(arguments, progress)
        tokens = common.prompt_tokens(arguments, model, arguments.n)
        verdict: Verdict | None = None
        if arguments.side == "reference":
            chosen = list(
                _until_end(_reference(arguments, model, tokens, options), arguments, model)
            )
        else:

            def limit() -> float:
                expected = References(model, arguments.kv_type_k, arguments.kv_type_v).feed(tokens)
                return float(expected.limits[-1])

            engine = common.open_engine(
                arguments,
                model,
                len(tokens) + arguments.n,
                progress,
                batched_prefill=switch,
                judge=printing_judge(progress.line, limit),
            )
            with engine:
                source = _engine(engine, tokens, options, arguments.seed)
                chosen = list(_until_end(source, arguments, model))
                verdict = engine.validation
    text = model.tokenizer.decode(chosen)
    print(text)
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "schema": "assay.generate",
                "schema_version": 1,
                "model": str(arguments.model),
                "side": arguments.side,
                "prefill": switch,
                "tokens": tokens,
                "generated": chosen,
                "text": text,
                "verdict": None if verdict is None else verdict.to_json(),
            },
        )
    if verdict is None:
        return 0
    if verdict.exit_code:
        print(verdict.summary(), file=sys.stderr)
    return verdict.exit_code


def _until_end(source: Iterator[int], arguments: argparse.Namespace, model: Model) -> Iterator[int]:
    """At most `-n` tokens, ending behind an end-of-generation token."""
    ends = frozenset() if arguments.ignore_eos else frozenset(model.tokenizer.eog_ids)
    for _ in range(arguments.n):
        token = next(source)
        yield token
        if token in ends:
            return


def _reference(
    arguments: argparse.Namespace, model: Model, tokens: list[int], options: SamplingOptions
) -> Iterator[int]:
    reference = Reference(
        model,
        dtype=np.float32,
        kv_type_k=arguments.kv_type_k,
        kv_type_v=arguments.kv_type_v,
    )
    generator = new_generator(arguments.seed)
    row = reference.prefill(tokens)[-1]
    while True:
        token = sample(row, options, generator)
        yield token
        row = reference.decode(token)


def _engine(engine: Any, tokens: list[int], options: SamplingOptions, seed: int) -> Iterator[int]:
    generator = new_generator(seed)
    tail = engine.prefill(tokens).tail
    while True:
        token = _emitted(tail) if options.temperature == 0 else _drawn(tail, options, generator)
        yield token
        tail = engine.decode(token).tail


def _emitted(tail: Tail) -> int:
    """The staged token, never a stale one."""
    broken = broken_tail(tail)
    if broken is not None:
        raise DeviceError(f"generate: sampler tail is broken at {broken}")
    return int(tail.staged_token)


def _drawn(tail: Tail, options: SamplingOptions, generator: np.random.Generator) -> int:
    argmax(tail.logits)  # NaN is an error before it is a distribution
    return sample(tail.logits, options, generator)
