"""`assay geometry`: writes a model of published geometry with random weights."""

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fixtures.geometry import build, tensor_nbytes
from fixtures.geometry_table import GEOMETRIES, PREFIX, SEED, first_layers
from fixtures.q4_k_m import formats
from fixtures.registry import resolve_model
from reference.model.cache import cache_folder
from reference.model.errors import InputError
from suites.commands import common
from suites.harness.verdict import write_json

_SCHEMA = {"schema": "assay.geometry", "schema_version": 1}
NAMES = tuple(name.removeprefix(PREFIX) for name in GEOMETRIES)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "geometry",
        help="write a model of published geometry with random weights, for speed and memory",
        description="Writes a GGUF file with the shapes of a published model in llama.cpp's "
        "Q4_K_M mix and random weights: memory and speed don't depend on values. Every command "
        "also takes the name geometry-NAME, or geometry-NAME-12l for the first 12 layers, and "
        "builds the file in the cache folder on first use.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: the cache)")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="only the first N layers (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, metavar="N", help=f"of the weights (default: {SEED})"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        common.require_writable("--json", arguments.json)
        _list(arguments.json)
        return 0
    case = GEOMETRIES.get(PREFIX + arguments.name.removeprefix(PREFIX))
    if case is None:
        raise InputError(
            f"geometry: name is {arguments.name!r}, expected one of {', '.join(NAMES)}"
        )
    if arguments.seed < 0:
        raise InputError(f"--seed is {arguments.seed}, expected 0 or more")
    if arguments.out is None and arguments.seed != SEED:
        raise InputError(f"--seed is {arguments.seed}, expected --out too: the cache has one seed")
    case = first_layers(case, case.layers if arguments.layers is None else arguments.layers)
    common.require_writable("--out", arguments.out)
    common.require_writable("--json", arguments.json)
    started = time.perf_counter()
    with common.ProgressReport() as progress:
        if arguments.out is None:
            path = resolve_model(case.id, progress=progress)
        else:
            path = build(replace(case, seed=arguments.seed), arguments.out, progress=progress)
    elapsed_s = time.perf_counter() - started
    nbytes = path.stat().st_size
    print(f"{path}: {nbytes / 2**30:.2f} GiB, {elapsed_s:.1f} s")
    if arguments.json is not None:
        facts = {**_SCHEMA, "name": case.id, "layers": case.layers, "seed": arguments.seed}
        write_json(
            arguments.json, facts | {"path": str(path), "nbytes": nbytes, "elapsed_s": elapsed_s}
        )
    return 0


def _list(json: Path | None) -> None:
    sizes = [
        (name, case, sum(tensor_nbytes(*entry) for entry in formats(case)))
        for name, case in zip(NAMES, GEOMETRIES.values(), strict=True)
    ]
    rows = [
        (name, case.architecture, str(case.layers), f"{nbytes / 2**30:.2f}")
        for name, case, nbytes in sizes
    ]
    print(common.table(rows, ("name", "architecture", "layers", "GiB")))
    free = shutil.disk_usage(cache_folder("models")).free
    print(f"{cache_folder('models')}: {free / 2**30:.1f} GiB left")
    if json is not None:
        there = {name: {"layers": case.layers, "nbytes": n} for name, case, n in sizes}
        write_json(json, {**_SCHEMA, "geometries": there})
