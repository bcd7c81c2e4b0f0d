"""`assay validate MODEL`: reference against engine, mode against mode, link by link."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from backend_hip.matrix import default_chunk
from backend_hip.runtimes.checking import Checking
from fixtures.faults import find_fault
from reference.model import Model
from reference.model.errors import DeviceError
from suites import summary
from suites.commands import common, tables
from suites.commands.planting import planted
from suites.harness.protocol import PREFILL_MODES
from suites.harness.traced import PER_TOKEN_TRACED
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict, counted, device_failed

DEFAULT_STEPS = 16
SHOWN_IDS = 8
VALIDATE_LINE = (
    "The line `prefillBatched validate[...]` compares the last-token logits of the two prefill "
    "modes: ref is per-token, batched is batched, idx the element that differs most. tol is what "
    "they may differ by: 0 on path kparallel, which promises equal bits in both modes, and twice "
    "the logit limit on paths serial and matrix, which sum in another order or round factors. "
    "Column `of limit` says how much of its limit a check used: 100 % is the limit itself. Both "
    "modes are traced where both are judged, per-token the first "
    f"{PER_TOKEN_TRACED} tokens of the prompt."
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
    add_options(parser)
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="after a run that is ok, also patch one kernel in a copy of the engine: the judge "
        "must see it, else the verdict is invalid",
    )
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a run of validate is made of, besides the model."""
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
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="sequences of the engine, 1 to 64: from 3 on, common decode steps of so many rows "
        "and of fewer are judged (default: 3; 17 on path matrix where 17 caches take at most "
        "1 GiB)",
    )
    common.add_engine(parser)
    common.add_json(parser)


def read_options(arguments: argparse.Namespace) -> Options:
    """InputError for prefill modes that are none or that the environment forbids."""
    asked = None
    if arguments.prefill is not None:
        asked = tuple(part.strip() for part in arguments.prefill.split(","))
    switch = common.prefill_switch(asked)
    modes = asked or (PREFILL_MODES[:1] if switch == "off" else PREFILL_MODES)
    return Options(
        modes=tuple(sorted(modes, key=list(PREFILL_MODES).index)) if _known(modes) else modes,
        n_decode=arguments.steps,
        path=arguments.path,
        kv_type_k=arguments.kv_type_k,
        kv_type_v=arguments.kv_type_v,
    )


def run(arguments: argparse.Namespace) -> int:
    options = read_options(arguments)
    common.require_device(arguments.device)
    common.checking_from(arguments)
    common.require_writable("--json", arguments.json)
    with common.ProgressReport() as progress:
        progress("reading the model")
        model = common.open_model(arguments, progress)
        tokens = common.prompt_tokens(arguments, model, options.n_decode)
        opener = common.EngineOpener(arguments, model, len(tokens) + options.n_decode, progress)
        try:
            verdict = validate(
                model,
                opener,
                tokens,
                options,
                context_length=common.context_for(model, len(tokens) + options.n_decode),
                progress=progress,
                open_copy=opener.copy if arguments.self_test else None,
            )
        except DeviceError as error:
            # What can't be compiled has not run, and has no verdict.
            if not str(error).startswith("compile:"):
                failed = Verdict((device_failed(error),), run={"tokens": tokens, **asdict(options)})
                _report(with_run(failed, arguments, model, opener.label), arguments)
            raise
    verdict = with_run(verdict, arguments, model, opener.label)
    print(render(verdict, model, tables.width()))
    _report(verdict, arguments)
    return verdict.exit_code


def _report(verdict: Verdict, arguments: argparse.Namespace) -> None:
    """Where a machine or a CI looks for it."""
    summary.append(summary.section_of("assay validate", verdict))
    if arguments.json is not None:
        verdict.write(arguments.json)


def _known(modes: tuple[str, ...]) -> bool:
    return all(mode in PREFILL_MODES for mode in modes)


def with_run(verdict: Verdict, arguments: argparse.Namespace, model: Model, label: str) -> Verdict:
    """The verdict with what was run, as the header of its table says it."""
    facts = {
        "command": arguments.command,
        "model": str(arguments.model),
        "file": model.file.path.name,
        "architecture": model.spec.architecture,
        "runtime": label,
        "self_test": getattr(arguments, "self_test", False),
        "max_cols": arguments.max_cols,
        "chunk": arguments.chunk or default_chunk(arguments.path, arguments.max_cols),
        **common.checking_from(arguments).facts(),
        "planted_fault": getattr(arguments, "plant", None),
    }
    notes = verdict.notes
    fault = planted(arguments)
    if fault is not None and verdict.state is State.OK:
        notes = (
            *notes,
            f"the planted fault {fault.id} was not seen, if it was reached at all: the catalogue "
            f"plants it under {fault.model}, and some need --path matrix or another KV type",
        )
    return Verdict(verdict.checks, run={**facts, **verdict.run}, notes=notes)


def render(verdict: Verdict, model: Model, columns: int) -> str:
    """Header, table of checks, notes, continuation, and the verdict as the last line."""
    if verdict.state is State.UNSUPPORTED and len(verdict.checks) == 1:
        return verdict.summary()  # nothing ran
    run = verdict.run

    def entry(head: str, text: str) -> str:
        return tables.paragraph(f"{head:<9} {text}", columns)

    lengths = run.get("traced", {})
    lines = [
        *header(verdict, model, columns),
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


def _sequences(run: Mapping[str, Any]) -> str:
    """How many the engine held, where one was opened."""
    return f", {counted(run['sequences'], 'sequence')}" if "sequences" in run else ""


def _checked(run: Mapping[str, Any]) -> str:
    """What the runtime checked besides, as a tail of the engine's line."""
    options = Checking(run.get("shuffle"), run.get("sanitize", False)).options
    return f", {options}" if options else ""


def header(verdict: Verdict, model: Model, columns: int) -> list[str]:
    """Model, engine and prompt of a run, an entry each."""
    run = verdict.run
    entries = {
        "model": f"{run['model']} ({run['architecture']}, {model.spec.layer_count} layers)",
        "engine": f"runtime {run['runtime']}, path {run.get('path', '')}, KV "
        f"{run.get('kv_type_k', '')}/{run.get('kv_type_v', '')}, max-cols {run['max_cols']}, "
        f"chunk {run['chunk']}{_sequences(run)}{_checked(run)}",
        "prompt": f"{len(run['tokens'])} tokens: {_ids(run['tokens'])}",
    }
    if run.get("planted_fault"):
        fault = find_fault(run["planted_fault"])
        entries["planted"] = f"{fault.id}: {fault.what}"
        if fault.model != run["model"]:
            entries["planted"] += f" (the catalogue plants it under {fault.model})"
    return [tables.paragraph(f"{head:<9} {text}", columns) for head, text in entries.items()]


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
