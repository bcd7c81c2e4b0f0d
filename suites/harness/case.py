"""A case file: one model, one prompt and the options of `assay validate` that show a fault.

A case is written by hand or by a tool; only `model` is needed, and what a case does not name stays
the default of the commit that runs it. Keys:

    model               a registered name, or a GGUF file: a path counts from the case file's folder
    tokens | prompt     [1, 2, 3] | "text"
    steps               greedy decode steps
    prefill             ["per-token"] or ["batched"] or both
    path, kv_type_k, kv_type_v, device      names, as the options of that name
    max_cols, chunk, sequences              numbers, as the options of that name
    broken              a regular expression that the first broken link must match
    schema, schema_version, note            "assay.case", 1, any text; all three may be left out
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fixtures.registry import is_registered, resolve_model
from reference.model.errors import InputError

SCHEMA = "assay.case"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Case:
    """What to run. None leaves an option to the command; `broken` is empty where any failure
    counts.
    """

    model: str
    tokens: tuple[int, ...] | None = None
    prompt: str | None = None
    steps: int | None = None
    prefill: tuple[str, ...] | None = None
    path: str | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    device: str | None = None
    max_cols: int | None = None
    chunk: int | None = None
    sequences: int | None = None
    broken: str = ""

    def arguments(self) -> list[str]:
        """Options for `assay validate`: only those that the case names, because an older commit
        may not know the others.
        """
        options: list[tuple[str, object | None]] = [
            ("--tokens", _joined(self.tokens)),
            ("--prompt", self.prompt),
            ("--steps", self.steps),
            ("--prefill", _joined(self.prefill)),
            ("--path", self.path),
            ("--kv-type-k", self.kv_type_k),
            ("--kv-type-v", self.kv_type_v),
            ("--device", self.device),
            ("--max-cols", self.max_cols),
            ("--chunk", self.chunk),
            ("--sequences", self.sequences),
        ]
        # With an equals sign, so that a text that starts with a dash is no option.
        return [f"{option}={value}" for option, value in options if value is not None]

    def to_json(self) -> dict[str, Any]:
        """The keys that say something, in the form of a case file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        said = {key: value for key, value in values.items() if value not in (None, "")}
        lists = {key: list(value) for key, value in said.items() if isinstance(value, tuple)}
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **said, **lists}


def _joined(values: tuple[Any, ...] | None) -> str | None:
    return None if values is None else ",".join(map(str, values))


def load_case(path: Path) -> Case:
    """Reads a case file; InputError names the key and what it should be."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"case: {path} can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"case: {path} is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"case: {path} holds {_shown(document)}, expected an object")
    return parse_case(document, str(path))


def parse_case(document: Mapping[str, Any], source: str) -> Case:
    """The case in a decoded file; `source` names the file in errors."""
    unknown = sorted(document.keys() - _KEYS.keys())
    if unknown:
        raise InputError(
            f"case: {source} has the key {unknown[0]!r}, expected only {', '.join(_KEYS)}"
        )
    for key, value in document.items():
        fits, expected = _KEYS[key]
        if not fits(value):
            raise InputError(f"case: {source}: {key} is {_shown(value)}, expected {expected}")
    if "model" not in document:
        raise InputError(f"case: {source} has no model, expected {_KEYS['model'][1]}")
    if "tokens" in document and "prompt" in document:
        raise InputError(f"case: {source} has tokens and a prompt, expected one of them")
    names = {field.name for field in fields(Case)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in document.items()
        if key in names
    }
    return Case(**values)


def case_model(case: Case, folder: Path, progress: Callable[[str], None]) -> Path:
    """The GGUF file of a case that was read in `folder`, absolute and present.

    A registered model is built here and once: every commit must see the same file.
    """
    if is_registered(case.model):
        return resolve_model(case.model, progress=progress).resolve()
    path = (folder / case.model).resolve()
    if not path.is_file():
        raise InputError(
            f"case: model is {case.model!r}, expected a registered name or a GGUF file; there is "
            f"no file {path}"
        )
    return path


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_pattern(value: object) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_list(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and value != [] and all(map(holds, value))


_NAME = (_is_text, "a name")
_POSITIVE = (lambda value: _is_number(value, 1), "a number from 1")
_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: value == SCHEMA, repr(SCHEMA)),
    "schema_version": (
        lambda value: _is_number(value, 1) and value == SCHEMA_VERSION,
        str(SCHEMA_VERSION),
    ),
    "note": (lambda value: isinstance(value, str), "a text"),
    "model": (_is_text, "a registered name or a GGUF file"),
    "tokens": (
        lambda value: _is_list(value, lambda token: _is_number(token, 0)),
        "a list of token ids such as [1, 2, 3]",
    ),
    "prompt": (_is_text, "a text"),
    "steps": (lambda value: _is_number(value, 0), "a number from 0"),
    "prefill": (lambda value: _is_list(value, _is_text), 'a list such as ["batched"]'),
    "path": _NAME,
    "kv_type_k": _NAME,
    "kv_type_v": _NAME,
    "device": _NAME,
    "max_cols": _POSITIVE,
    "chunk": _POSITIVE,
    "sequences": _POSITIVE,
    "broken": (_is_pattern, "a regular expression"),
}
