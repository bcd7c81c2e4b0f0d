"""`assay validate MODEL`: reference against engine, mode against mode, link by link."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend_hip.switch import mode_from_environment
from reference.model import Model
from suites.commands import common
from suites.harness.protocol import PREFILL_MODES, JudgedEngine
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict

DEFAULT_STEPS = 16


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "validate",
        help="does the engine compute what the reference computes, and if not, what broke first",
        description="Runs reference and engine on one prompt and prints the verdict: ok (exit 0), "
        "diverged (1), unsupported (2) or invalid (3: the run can't prove anything).",
    )
    common.add_model(parser)
    common.add_prompt(parser)
    parser.add_argument(
        "--prefill",
        metavar="M",
        help="prefill modes to judge: per-token, batched or both, comma-separated (default: both; "
        "per-token alone where ASSAY_BATCHED_PREFILL=0)",
    )
    parser.add_argument(
        "-n",
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"greedy decode steps after the prompt, in tokens (default: {DEFAULT_STEPS})",
    )
    common.add_engine(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    switch = mode_from_environment()
    if arguments.prefill is not None:
        modes = tuple(part.strip() for part in arguments.prefill.split(","))
    else:
        modes = ("per-token",) if switch == "off" else PREFILL_MODES
    options = Options(
        modes=tuple(sorted(modes, key=list(PREFILL_MODES).index)) if _known(modes) else modes,
        n_decode=arguments.steps,
        path=arguments.path,
        kv_type_k=arguments.kv_type_k,
        kv_type_v=arguments.kv_type_v,
    )
    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    with common.ProgressReport() as progress:
        progress("reading the model")
        model = common.open_model(arguments, progress)
        tokens = common.prompt_tokens(arguments, model, options.n_decode)
        opener = _Opener(arguments, model, len(tokens) + options.n_decode, progress)
        verdict = validate(
            model,
            opener,
            tokens,
            options,
            context_length=common.context_for(model, len(tokens) + options.n_decode),
            progress=progress,
        )
    verdict = _with_run(verdict, arguments, model, opener.label)
    print(render(verdict, model))
    if arguments.json is not None:
        verdict.write(arguments.json)
    return verdict.exit_code


def _known(modes: tuple[str, ...]) -> bool:
    return all(mode in PREFILL_MODES for mode in modes)


@dataclass
class _Opener:
    """Opens the engine when the judge asks for it, and remembers which runtime it runs on."""

    arguments: argparse.Namespace
    model: Model
    positions: int
    progress: Callable[[str], None]
    label: str = "none"

    def __call__(self) -> JudgedEngine:
        engine = common.open_engine(self.arguments, self.model, self.positions, self.progress)
        self.label = engine.device.label
        return engine


def _with_run(verdict: Verdict, arguments: argparse.Namespace, model: Model, label: str) -> Verdict:
    facts = {
        "command": "validate",
        "model": str(arguments.model),
        "file": model.file.path.name,
        "architecture": model.spec.architecture,
        "runtime": label,
        "max_cols": arguments.max_cols,
        "chunk": arguments.chunk or arguments.max_cols,
    }
    return Verdict(verdict.checks, run={**facts, **verdict.run}, notes=verdict.notes)


def render(verdict: Verdict, model: Model) -> str:
    """Header, table of checks, notes, continuation, and the verdict as the last line."""
    if verdict.state is State.UNSUPPORTED and len(verdict.checks) == 1:
        return verdict.summary()  # nothing ran
    run = verdict.run
    lines = [
        f"model     {run['model']} ({run['architecture']}, {model.spec.layer_count} layers)",
        f"engine    runtime {run['runtime']}, path {run.get('path', '')}, KV "
        f"{run.get('kv_type_k', '')}/{run.get('kv_type_v', '')}, max-cols {run['max_cols']}, "
        f"chunk {run['chunk']}",
        f"prompt    {len(run['tokens'])} tokens: {common.shorten(str(run['tokens']), 70)}",
        "",
        common.table(
            [
                (
                    check.name,
                    check.state.value,
                    f"{check.elements:,}",
                    common.figure(check.measured),
                    common.figure(check.limit),
                    common.figure(check.headroom),
                    _place(check),
                )
                for check in verdict.checks
            ],
            ["check", "state", "compared", "measured", "limit", "head-room", "where"],
        ),
        "",
    ]
    lines += [f"note      {note}" for note in verdict.notes]
    if "validate_line" in run:
        lines.append(str(run["validate_line"]))
    if run.get("generated"):
        lines.append(f"continuation  {continuation(model, run['generated'])}")
    broken = verdict.first_broken
    if broken is not None and broken.detail and broken.detail not in broken.link:
        lines.append(f"detail    {broken.detail}")
    lines.append(verdict.summary())
    return "\n".join(lines)


def _place(check: Check) -> str:
    """Where the worst element is, unless there is nothing to see there."""
    if check.state is State.OK and check.measured == 0:
        return check.detail.partition(";")[0]
    return common.shorten(check.where or check.detail, 60)


def continuation(model: Model, generated: list[int]) -> str:
    """The generated text, quoted, or the ids where they can't be decoded."""
    if all(0 <= token < model.spec.vocab_size for token in generated):
        return repr(model.tokenizer.decode(generated))
    return str(generated)
