"""`assay validate MODEL`: reference against engine, mode against mode, link by link."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backend_hip.runtimes.checking import Checking
from reference.model import Model
from suites.commands import common, tables
from suites.harness.protocol import PREFILL_MODES, JudgedEngine
from suites.harness.traced import PER_TOKEN_TRACED
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict

DEFAULT_STEPS = 16
SHOWN_IDS = 8
VALIDATE_LINE = (
    "The line `prefillBatched validate[...]` compares the last-token logits of the two prefill "
    "modes: ref is per-token, batched is batched, idx the element that differs most. tol is what "
    "they may differ by: 0 on path kparallel, which promises equal bits in both modes, and twice "
    "the logit limit on path serial, which sums in another order. Column `of limit` says how much "
    "of its limit a check used: 100 % is the limit itself. Both modes are traced where both are "
    f"judged, per-token the first {PER_TOKEN_TRACED} tokens of the prompt."
)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "validate",
        help="does the engine compute what the reference computes, and if not, what broke first",
        description="Runs reference and engine on one prompt and prints the verdict: ok (exit 0), "
        "diverged (1), unsupported (2) or invalid (3: the run can't prove anything).",
        epilog=VALIDATE_LINE,
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
    asked = None
    if arguments.prefill is not None:
        asked = tuple(part.strip() for part in arguments.prefill.split(","))
    switch = common.prefill_switch(asked)
    modes = asked or (PREFILL_MODES[:1] if switch == "off" else PREFILL_MODES)
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
    print(render(verdict, model, tables.width()))
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
        **common.checking_from(arguments).facts(),
    }
    return Verdict(verdict.checks, run={**facts, **verdict.run}, notes=verdict.notes)


def render(verdict: Verdict, model: Model, columns: int) -> str:
    """Header, table of checks, notes, continuation, and the verdict as the last line."""
    if verdict.state is State.UNSUPPORTED and len(verdict.checks) == 1:
        return verdict.summary()  # nothing ran
    run = verdict.run

    def entry(head: str, text: str) -> str:
        return tables.paragraph(f"{head:<9} {text}", columns)

    lengths = run.get("traced", {})
    lines = [
        entry("model", f"{run['model']} ({run['architecture']}, {model.spec.layer_count} layers)"),
        entry(
            "engine",
            f"runtime {run['runtime']}, path {run.get('path', '')}, KV "
            f"{run.get('kv_type_k', '')}/{run.get('kv_type_v', '')}, max-cols {run['max_cols']}, "
            f"chunk {run['chunk']}{_checked(run)}",
        ),
        entry("prompt", f"{len(run['tokens'])} tokens: {_ids(run['tokens'])}"),
        entry("traced", ", ".join(f"{mode} ({n} tokens)" for mode, n in lengths.items())),
        "",
        tables.check_table(verdict.checks, columns),
        "",
    ]
    lines += [entry("note", note) for note in verdict.notes]
    if "validate_line" in run:
        lines.append(str(run["validate_line"]))
    if run.get("generated"):
        lines.append(f"continuation  {continuation(model, run['generated'])}")
    broken = verdict.first_broken
    if broken is not None and broken.detail and broken.detail not in broken.link:
        lines.append(entry("detail", broken.detail))
    lines.append(verdict.summary())
    return "\n".join(lines)


def _checked(run: Mapping[str, Any]) -> str:
    """What the runtime checked besides, as a tail of the engine's line."""
    options = Checking(run.get("shuffle"), run.get("sanitize", False)).options
    return f", {options}" if options else ""


def _ids(tokens: list[int]) -> str:
    """The prompt, or both ends of a long one; --json has every id."""
    if len(tokens) <= 2 * SHOWN_IDS:
        return str(tokens)
    first, last = (", ".join(map(str, part)) for part in (tokens[:SHOWN_IDS], tokens[-SHOWN_IDS:]))
    return f"[{first}, ..., {last}]"


def continuation(model: Model, generated: list[int]) -> str:
    """The generated text, quoted, or the ids where they can't be decoded."""
    if all(0 <= token < model.spec.vocab_size for token in generated):
        return repr(model.tokenizer.decode(generated))
    return str(generated)
