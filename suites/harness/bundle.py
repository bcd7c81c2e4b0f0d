"""A repro bundle: one file that holds what broke and all that is needed to run it again.

An .npz with `tokens`, `meta` (JSON text), the arrays of the kind of finding, and `model`, the bytes
of the GGUF file, where that is small. `meta.sha256` is that of all the rest, so that a bundle with
a part from elsewhere is refused. `meta.kind` is

    point   the broken op: inputs as `input:NAME`, `got`, `want`, `limit`
    tail    a sampler tail: `logits` (V,) and the records of device and staging in `meta.tail`
    run     anything else: the whole validate run
"""

import hashlib
import io
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.results import TailRecord
from fixtures.registry import resolve_model
from reference.model import Model, check_tokens, load_model
from reference.model.cache import atomic_write
from reference.model.errors import AssayError, InputError
from reference.model.npz import read_npz
from suites.harness.rerun import Case

SCHEMA = "assay.bisect.bundle"
SCHEMA_VERSION = 3
MODEL_NBYTES = 16 << 20
"""A model file up to this size travels inside the bundle."""
KINDS = ("point", "tail", "run")
INPUT = "input:"
PACKAGES = ("assay", "numpy", "hip-python", "gguf")

_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "kind": str, "summary": str, "mode": str, "path": str, "kv_type_k": str, "kv_type_v": str,
    "modes": list, "n_decode": int, "max_cols": int, "chunk": int, "context_length": int,
    "model": str, "model_sha256": str, "kernels": list, "command": list,
    "sequences": int, "planted_fault": (str, type(None)),
    "shuffle": (int, type(None)), "sanitize": bool, "sha256": str,
}  # fmt: skip
_ARRAYS = {"point": ("got", "want", "limit"), "tail": ("logits",), "run": ()}
_TAIL = ("poison", "staged_token", "staged_stamp", "expected_stamp", "device_token", "device_stamp")


@dataclass(frozen=True)
class Bundle:
    """`meta` and arrays as above; `tokens` are the prompt's ids."""

    tokens: tuple[int, ...]
    meta: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    @property
    def kind(self) -> str:
        return str(self.meta["kind"])

    @property
    def case(self) -> Case:
        meta = self.meta
        return Case(self.tokens, meta["mode"], meta["path"], meta["kv_type_k"], meta["kv_type_v"])

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]:
        """What the broken op read, by trace point."""
        return {
            name.removeprefix(INPUT): value
            for name, value in self.arrays.items()
            if name.startswith(INPUT)
        }

    @property
    def tail(self) -> TailRecord:
        record = {name: int(self.meta["tail"][name]) for name in _TAIL}
        return TailRecord(**record, logits=self.arrays["logits"])

    def save(self, path: Path) -> None:
        """Writes the bundle whole or not at all."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            "tokens": np.asarray(self.tokens, dtype=np.int32),
            **self.arrays,
        }
        meta = json.loads(json.dumps({**self.meta, **_schema()}))
        meta["sha256"] = _digest(meta, arrays)
        np.savez_compressed(buffer, meta=np.array(json.dumps(meta)), **arrays)
        atomic_write(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> "Bundle":
        """Reads what `save` wrote; InputError, one line, for anything else."""
        arrays, meta = read_npz(path, "bundle", "bundle", "assay bisect")
        problem = _problem(meta, arrays)
        if problem:
            raise InputError(f"bundle: {path}: {problem}")
        tokens = tuple(int(token) for token in arrays.pop("tokens"))
        return Bundle(tokens, meta, arrays)


def _schema() -> dict[str, Any]:
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}


def _digest(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of all arrays (name, dtype, shape, bytes) and of all meta but the digest itself."""
    rest = {name: value for name, value in meta.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        digest.update(json.dumps([name, value.dtype.str, value.shape]).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance, except that true and false are no whole numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _problem(meta: Any, arrays: Mapping[str, NDArray[Any]]) -> str:
    """What is wrong with the content; empty where nothing is."""
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        return f"schema is not {SCHEMA}, expected what `assay bisect` wrote"
    if meta.get("schema_version") != SCHEMA_VERSION:
        return f"schema version is {meta.get('schema_version')}, expected {SCHEMA_VERSION}"
    for name, kind in _FIELDS.items():
        if not _is(meta.get(name), kind):
            return f"meta has no usable {name}"
    if meta["kind"] not in KINDS:
        return f"kind is {meta['kind']}, expected one of {', '.join(KINDS)}"
    tail = meta.get("tail")
    if meta["kind"] == "tail" and not (
        isinstance(tail, dict) and all(_is(tail.get(name), int) for name in _TAIL)
    ):
        return "meta has no usable tail"
    if meta["kind"] == "point" and not isinstance(meta.get("point"), str):
        return "meta has no usable point"
    for name in ("tokens", *_ARRAYS[meta["kind"]]):
        if name not in arrays:
            return f"array {name} is missing"
    if arrays["tokens"].ndim != 1 or arrays["tokens"].dtype.kind not in "iu":
        return "tokens are no whole numbers"
    for name, value in arrays.items():
        if value.dtype.kind not in "fiu" or value.ndim < 1:
            return f"array {name} holds no numbers"
    shapes = {arrays[name].shape for name in _ARRAYS[meta["kind"]]}
    if len(shapes) > 1:
        return "got, want and limit have several shapes"
    if meta["sha256"] != _digest(meta, arrays):
        return "arrays and meta have another SHA-256 than the one recorded with them"
    return ""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def model_arrays(model: Model) -> dict[str, NDArray[np.uint8]]:
    """The model's file as an array `model`, where it is small enough to travel along."""
    path = model.file.path
    if path.stat().st_size > MODEL_NBYTES:
        return {}
    return {"model": np.frombuffer(path.read_bytes(), dtype=np.uint8)}


@contextmanager
def model_of(bundle: Bundle) -> Iterator[Model]:
    """The bundle's model: what it carries, else the file at its path if that is the same file."""
    wanted = bundle.meta["model_sha256"]
    with tempfile.TemporaryDirectory(prefix="assay-replay-") as folder:
        if "model" in bundle.arrays:
            content = bundle.arrays["model"].astype(np.uint8).tobytes()
            if hashlib.sha256(content).hexdigest() != wanted:
                raise InputError("bundle: the model inside has another SHA-256 than meta says")
            path = Path(folder) / "model.gguf"
            path.write_bytes(content)
        else:
            path = _model_elsewhere(bundle, wanted)
        model = load_model(path)
        check_tokens(bundle.tokens, model.spec, model.spec.context_length)
        yield model


def _model_elsewhere(bundle: Bundle, wanted: str) -> Path:
    name = bundle.meta["model"]
    try:
        path = resolve_model(name)
        found = load_model(path).file.sha256
    except AssayError as error:
        raise InputError(f"bundle: its model {name} is needed here: {error}") from None
    if found != wanted:
        raise InputError(
            f"bundle: model {name} has SHA-256 {found[:12]}..., expected {wanted[:12]}... because "
            "the bundle was made with that file"
        )
    return path
