"""`assay trace MODEL`: one forward pass with every trace point kept, as a file."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from reference.forward import Reference
from reference.model import Model
from reference.model.errors import InputError
from reference.model.trace import Trace, trace_points
from suites.commands import common
from suites.harness.kernels import require_path
from suites.harness.protocol import PREFILL_MODES
from suites.harness.verdict import write_json

_DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float64": np.float64}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="write every intermediate value of one forward pass to a file",
        description="Writes an .npz with one array per trace point, logits, tokens and meta "
        "(JSON), to be compared by `assay compare`, on another machine too.",
    )
    common.add_model(parser)
    common.add_prompt(parser)
    parser.add_argument(
        "--side", choices=("reference", "engine"), required=True, help="who computes"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="trace file to write (.npz)"
    )
    parser.add_argument(
        "--prefill",
        choices=PREFILL_MODES,
        help="prefill mode of the engine (default: batched, per-token where "
        "ASSAY_BATCHED_PREFILL=0)",
    )
    parser.add_argument(
        "--logits",
        choices=("last", "all"),
        default="last",
        help="logits of the last token or of every token (default: last)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        default="float64",
        help="arithmetic of the reference (default: float64)",
    )
    common.add_engine(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    common.require_device(arguments.device)
    common.checking_from(arguments)
    common.require_writable("--out", arguments.out)
    common.require_writable("--json", arguments.json)
    if arguments.out.suffix != ".npz":
        raise InputError(f"--out is {arguments.out}, expected a name that ends in .npz")
    prefill = None if arguments.side == "reference" else _mode(arguments)
    if arguments.side == "reference" and arguments.prefill is not None:
        raise InputError(
            "--prefill is a choice of the engine, expected it without --side reference"
        )
    with common.ProgressReport() as progress:
        progress("reading the model")
        model = common.open_model(arguments, progress)
        tokens = common.prompt_tokens(arguments, model, 0)
        trace = Trace()
        progress(f"{arguments.side} forward pass over {len(tokens)} tokens")
        if arguments.side == "reference":
            runtime = f"numpy {arguments.dtype}"
            _reference(arguments, model, tokens, trace)
        else:
            with common.open_engine(arguments, model, len(tokens), progress) as engine:
                runtime = engine.device.label
                feed = {
                    "batched": engine.prefill_batched,
                    "per-token": engine.prefill_per_token,
                }[str(prefill)]
                feed(tokens, trace=trace, logits=arguments.logits)
        trace.meta = _meta(arguments, model, runtime, prefill)
        progress(f"writing {arguments.out}")
        trace.save(arguments.out)
    summary = {
        "schema": "assay.trace",
        "schema_version": 1,
        "file": str(arguments.out),
        "points": len(trace.arrays),
        "tokens": list(trace.tokens),
        "meta": trace.meta,
    }
    if arguments.json is not None:
        write_json(arguments.json, summary)
    print(f"{arguments.out}: {summary['points']} trace points of {len(tokens)} tokens, {runtime}")
    return 0


def _reference(
    arguments: argparse.Namespace, model: Model, tokens: list[int], trace: Trace
) -> None:
    reference = Reference(
        model,
        dtype=_DTYPES[arguments.dtype],
        kv_type_k=arguments.kv_type_k,
        kv_type_v=arguments.kv_type_v,
    )
    reference.prefill(tokens, trace=trace, logits=arguments.logits)


def _mode(arguments: argparse.Namespace) -> str:
    """The engine's prefill mode, as --prefill or the switch of the environment says."""
    asked = None if arguments.prefill is None else (str(arguments.prefill),)
    switch = common.prefill_switch(asked)
    if asked is None and switch == "validate":
        raise InputError(
            "a trace is of one prefill mode, expected --prefill because ASSAY_BATCHED_PREFILL is "
            "validate (both)"
        )
    mode = asked[0] if asked else ("per-token" if switch == "off" else "batched")
    require_path(arguments.path, (mode,))
    return mode


def _meta(
    arguments: argparse.Namespace, model: Model, runtime: str, prefill: str | None
) -> dict[str, Any]:
    engine = arguments.side == "engine"
    return {
        "side": arguments.side,
        "runtime": runtime,
        "model": str(arguments.model),
        "model_sha256": model.file.sha256,
        "architecture": model.spec.architecture,
        "prefill": prefill,
        "dtype": "float32" if engine else arguments.dtype,
        "path": arguments.path if engine else None,
        "kv_type_k": arguments.kv_type_k,
        "kv_type_v": arguments.kv_type_v,
        "logits": arguments.logits,
        "points": [point.name for point in trace_points(model.spec)],
    }
