"""`assay generate MODEL`: text from the engine or the reference."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from reference.forward import Reference
from reference.model import Model
from reference.model.errors import DeviceError, InputError
from reference.model.sampling import SamplingOptions, argmax, new_generator, sample
from suites.commands import common
from suites.harness.endtoend import References
from suites.harness.kernels import require_path
from suites.harness.pair import printing_judge
from suites.harness.protocol import PREFILL_MODES, Tail
from suites.harness.tail import broken_tail
from suites.harness.verdict import Verdict, write_json


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, greedily by default",
        description="Prints the continuation of a prompt. ASSAY_BATCHED_PREFILL=0|1|validate "
        "chooses the engine's prefill; validate compares both modes and sets the exit code. "
        "Control characters of the text are printed escaped; --json has it as it is.",
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
    drawn = "; needs --temperature above 0"
    parser.add_argument("--top-k", type=int, metavar="N", help=f"0: off (default: 0){drawn}")
    parser.add_argument("--top-p", type=float, metavar="P", help=f"1: off (default: 1){drawn}")
    parser.add_argument("--min-p", type=float, metavar="P", help=f"0: off (default: 0){drawn}")
    parser.add_argument(
        "--seed", type=int, metavar="S", help=f"seed of the draws (default: 0){drawn}"
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
    options, seed = _sampling(arguments)
    common.require_device(arguments.device)
    common.checking_from(arguments)
    common.require_writable("--json", arguments.json)
    switch = common.prefill_switch(None) or "on"
    if arguments.side == "reference" and switch == "validate":
        raise InputError(
            "--side is reference, expected engine because ASSAY_BATCHED_PREFILL is validate and "
            "compares the engine's prefill modes"
        )
    if arguments.side == "engine":
        modes = {"off": PREFILL_MODES[:1], "on": PREFILL_MODES[1:]}.get(switch, PREFILL_MODES)
        require_path(arguments.path, modes, "prefill")
    with common.ProgressReport() as progress:
        progress("reading the model")
        model = common.open_model(arguments, progress)
        tokens = common.prompt_tokens(arguments, model, arguments.n)
        verdict: Verdict | None = None
        if arguments.side == "reference":
            chosen = list(
                _until_end(_reference(arguments, model, tokens, options, seed), arguments, model)
            )
        else:

            def limit() -> float:
                references = References(
                    model, arguments.kv_type_k, arguments.kv_type_v, path=arguments.path
                )
                expected = references.feed(tokens)
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
                source = _engine(engine, tokens, options, seed)
                chosen = list(_until_end(source, arguments, model))
                verdict = engine.validation
    text = model.tokenizer.decode(chosen)
    print(common.printable(text))
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "schema": "assay.generate",
                "schema_version": 1,
                "model": str(arguments.model),
                "side": arguments.side,
                "prefill": switch if arguments.side == "engine" else None,
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


def _sampling(arguments: argparse.Namespace) -> tuple[SamplingOptions, int]:
    """Options and seed of the draws; InputError for one that greedy choice would ignore."""
    given = {
        name: getattr(arguments, name)
        for name in ("top_k", "top_p", "min_p", "seed")
        if getattr(arguments, name) is not None
    }
    seed = int(given.get("seed", 0))
    if seed < 0:
        raise InputError(f"--seed is {seed}, expected 0 or more")
    filters = {name: value for name, value in given.items() if name != "seed"}
    options = SamplingOptions(arguments.temperature, **filters)
    if given and options.temperature == 0:
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise InputError(
            f"{name} is for drawing, expected --temperature above 0 beside it because greedy "
            "choice ignores it"
        )
    return options, seed


def _until_end(source: Iterator[int], arguments: argparse.Namespace, model: Model) -> Iterator[int]:
    """At most `-n` tokens, ending behind an end-of-generation token."""
    ends = frozenset() if arguments.ignore_eos else frozenset(model.tokenizer.eog_ids)
    for _ in range(arguments.n):
        token = next(source)
        yield token
        if token in ends:
            return


def _reference(
    arguments: argparse.Namespace,
    model: Model,
    tokens: list[int],
    options: SamplingOptions,
    seed: int,
) -> Iterator[int]:
    reference = Reference(
        model,
        dtype=np.float32,
        kv_type_k=arguments.kv_type_k,
        kv_type_v=arguments.kv_type_v,
    )
    generator = new_generator(seed)
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
