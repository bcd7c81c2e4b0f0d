"""`assay bisect MODEL`: what broke, where, and what the damage looks like; with a repro bundle."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backend_hip.matrix import default_chunk
from backend_hip.runtimes import select_runtime
from reference.model import Model
from reference.model.errors import DeviceError, InputError
from suites import summary
from suites.commands import bisect_git, bisect_render, common, tables
from suites.commands import validate as validating
from suites.harness.bisect import Finding, bisect, device_ended
from suites.harness.bisect_forward import Flows
from suites.harness.bundle import Bundle, model_of
from suites.harness.replay import replay
from suites.harness.validate import Options
from suites.harness.verdict import Verdict, write_json

EPILOG = (
    "`accumulated` is how far the engine's own run is from the float64 reference at a point, "
    "`new` what the op adds when it reads the reference's values, both as shares of the largest "
    "magnitude there; `new of limit` holds the latter to the op's own limit. A bundle is one .npz "
    "file that replays with --replay; a model of at most 16 MiB travels inside."
)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bisect",
        help="where it broke: layer, op, token and element; or which commit broke it",
        description="Validates MODEL and, where the verdict is not ok, looks for what broke first, "
        "where, and what the damage looks like. Exit code: that of the verdict, 0 where there is "
        "nothing to bisect. With --replay FILE: 1 where the bundle reproduces here, 0 where it "
        "does not, 3 where its own record shows no fault. With --git GOOD BAD: which commit broke "
        "it.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, or a registered name: smollm2, gemma3-270m, tiny-qwen3, ...",
    )
    validating.add_options(parser)
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE.npz", help="write a repro bundle of what broke"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE.npz", help="replay a repro bundle instead of MODEL"
    )
    bisect_git.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    asked = {
        "MODEL": arguments.model is not None,
        "--replay": arguments.replay is not None,
        "--git": arguments.git is not None,
    }
    ways = [name for name, given in asked.items() if given]
    if len(ways) != 1:
        got = " and ".join(ways) if ways else "none of them"
        raise InputError(f"bisect: got {got}, expected one of {', '.join(asked)}")
    if ways != ["MODEL"]:
        for name in ("prompt", "tokens", "prefill", "bundle", "chunk", "sequences"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} goes with MODEL, expected it without {ways[0]}")
    if arguments.git is not None:
        return bisect_git.run(arguments)
    if arguments.case is not None:
        raise InputError(f"--case goes with --git, expected it without {ways[0]}")
    common.require_device(arguments.device)
    common.require_writable("--json", arguments.json)
    common.require_writable("--bundle", arguments.bundle)
    return _replay(arguments) if arguments.replay is not None else _bisect(arguments)


def _bisect(arguments: argparse.Namespace) -> int:
    if arguments.bundle is not None and arguments.bundle.suffix != ".npz":
        raise InputError(f"--bundle is {arguments.bundle}, expected a name that ends in .npz")
    options = validating.read_options(arguments)
    chunk = arguments.chunk or default_chunk(arguments.path, arguments.max_cols)
    flows = Flows(chunk, arguments.max_cols)
    failed: DeviceError | None = None
    with common.ProgressReport() as progress:
        stages = Stages(progress)
        stages("reading the model")
        model = common.open_model(arguments, stages)
        common.require_apart("--bundle", arguments.bundle, model.file.path)
        tokens = common.prompt_tokens(arguments, model, options.n_decode)
        positions = len(tokens) + options.n_decode
        opener = opener_for(arguments, model, positions, stages)
        context = common.context_for(model, positions)
        try:
            found = bisect(
                model, opener, tokens, options, flows, context_length=context, progress=stages
            )
        except DeviceError as error:
            # What can't be compiled has not run, and has no verdict.
            if str(error).startswith("compile:"):
                raise
            failed = error
            found = device_ended(
                error, tokens, options, stages.last, asked_bundle=arguments.bundle is not None
            )
        verdict = validating.with_run(found.verdict, arguments, model, opener.label)
        written = _bundle(found, verdict, arguments, model, options, context, stages)
    asked = arguments.bundle is not None
    print(bisect_render.render(found, verdict, model, tables.width(), written, asked_bundle=asked))
    summary.append(bisect_render.section(found, verdict))
    if arguments.json is not None:
        write_json(arguments.json, bisect_render.to_json(found, verdict, written))
    if failed is not None:
        raise failed
    return verdict.exit_code


class Stages:
    """A progress that remembers the last stage it was told of."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self.last = ""

    def __call__(self, text: str) -> None:
        self.last = text
        self._progress(text)


def _bundle(
    found: Finding,
    verdict: Verdict,
    arguments: argparse.Namespace,
    model: Model,
    options: Options,
    context_length: int,
    progress: Callable[[str], None],
) -> Path | None:
    """Writes the bundle that was asked for; where it is, None where there is nothing to keep."""
    path: Path | None = arguments.bundle
    if path is None or found.exit_code in (0, 2) or found.device_failed:
        return None
    progress(f"writing {path}")
    made = bisect_render.bundle_of(found, verdict, arguments, model, options, context_length)
    made.save(path)
    return path


def _check_as_recorded(arguments: argparse.Namespace, meta: Mapping[str, Any]) -> None:
    """The recorded --shuffle and --sanitize, where the runtime here has them and none is asked."""
    asked = common.checking_from(arguments).is_on
    if not asked and select_runtime(arguments.device).kind == "cpu":
        arguments.shuffle, arguments.sanitize = meta["shuffle"], meta["sanitize"]


def opener_for(
    arguments: argparse.Namespace, model: Model, positions: int, progress: Callable[[str], None]
) -> common.EngineOpener:
    """The one place where bisect gets its engines from."""
    return common.EngineOpener(arguments, model, positions, progress)


def _replay(arguments: argparse.Namespace) -> int:
    bundle = Bundle.load(arguments.replay)
    common.require_apart("--json", arguments.json, arguments.replay)
    with common.ProgressReport() as progress, model_of(bundle) as model:
        meta = bundle.meta
        for name in ("max_cols", "chunk", "path", "kv_type_k", "kv_type_v"):
            setattr(arguments, name, meta[name])
        arguments.sequences = meta["sequences"]
        _check_as_recorded(arguments, meta)
        opener = opener_for(arguments, model, meta["context_length"], progress)
        result = replay(bundle, model, opener, progress)
    print(bisect_render.render_replay(bundle, result, opener.label, tables.width()))
    summary.append(bisect_render.replay_section(bundle, result, opener.label))
    if arguments.json is not None:
        write_json(arguments.json, bisect_render.replay_to_json(bundle, result, opener.label))
    return result.exit_code
