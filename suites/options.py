"""The options that pytest and the suites share, and what they select.

Options narrow: a test case is kept when each of its axes that an option names has one of the
option's values. A case has an axis as a parameter of that name (`model`, `prefill`, `path`,
`kv_type_k`, `kv_type_v`, `max_cols`) or as a field of a frozen record among its parameters
(`case.model`, `case.path`, ...). Tests without the axis are not touched. A value that no case has
is an error: what matches nothing must not look green.

--model also adds: a test that takes any model (the marker `any_model`) runs those that it names.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import MAX_COLS_LIMIT, PATHS
from backend_hip.runtimes import DEVICES
from backend_hip.runtimes.checking import LARGEST_SEED, Checking
from reference.model.errors import InputError
from suites.correctness.relations import FILE, Relation, parse_relation
from suites.harness.protocol import PREFILL_MODES

# Set by the root conftest for whoever makes cases.
SELECTION: "pytest.StashKey[Selection]" = pytest.StashKey()
DEVICE_KIND: "pytest.StashKey[str | None]" = pytest.StashKey()
ONLY_CPU = pytest.StashKey[bool]()
"""Set on a test that skips itself because only the CPU runtime has what it tests."""
SUMMARY_FILE = pytest.StashKey[str]()
"""What GITHUB_STEP_SUMMARY named when pytest began."""


def _one_of(what: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    names = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        values = tuple(text.split(","))
        if len(set(values)) != len(values) or not set(values) <= set(names):
            raise argparse.ArgumentTypeError(
                f"{what} is {text!r}, expected one or more of {','.join(names)}"
            )
        return values

    return parse


def _models(text: str) -> tuple[str, ...]:
    return (text,) if Path(text).is_file() else tuple(text.split(","))


def _columns(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(1 <= value <= MAX_COLS_LIMIT for value in values):
        raise argparse.ArgumentTypeError(
            f"max-cols is {text!r}, expected numbers from 1 to {MAX_COLS_LIMIT}, comma-separated"
        )
    return values


def _relation(text: str) -> Relation:
    try:
        return parse_relation(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}, expected a number from {least} on")
        return int(text)

    return parse


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(LARGEST_SEED)) or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"shuffle is {text!r}, expected a seed from 0 to 2^64 - 1")
    return int(text)


@dataclass(frozen=True)
class Selection:
    """The values that options name, by axis; an empty tuple where the option was not given."""

    model: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    kv_type_k: tuple[str, ...] = ()
    kv_type_v: tuple[str, ...] = ()
    max_cols: tuple[int, ...] = ()

    def given(self) -> Mapping[str, tuple[Any, ...]]:
        """The axes that narrow."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {axis: wanted for axis, wanted in values.items() if wanted}

    def keeps(self, parameters: Mapping[str, Any]) -> bool:
        """True for a case whose axes all have wanted values, or that has none of the axes."""
        found = {axis: axis_value(parameters, axis) for axis in self.given()}
        return all(value is None or value in self.given()[axis] for axis, value in found.items())

    def unmatched(self, cases: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """The given values, as options, that no kept case has."""
        kept = [case for case in cases if self.keeps(case)]
        return tuple(
            f"--{axis.replace('_', '-')} {value}"
            for axis, wanted in self.given().items()
            for value in wanted
            if not any(axis_value(case, axis) == value for case in kept)
        )


# What a parameter's value must be to count as that axis: `path` is also a name for files.
_KNOWN: Mapping[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "prefill": lambda value: value in PREFILL_MODES,
    "path": lambda value: isinstance(value, str) and value in PATHS,
    "kv_type_k": lambda value: isinstance(value, str) and value in KV_TYPES,
    "kv_type_v": lambda value: isinstance(value, str) and value in KV_TYPES,
    "max_cols": lambda value: isinstance(value, int),
}


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """A collected test's parameters by name; none where it has none."""
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def axis_value(parameters: Mapping[str, Any], axis: str) -> Any:
    """The case's value on an axis, None where it has no such axis."""
    records = [value for value in parameters.values() if is_dataclass(value)]
    for value in (parameters.get(axis), *(getattr(record, axis, None) for record in records)):
        if value is not None and _KNOWN[axis](value):
            return value
    return None


def add_options(add: Callable[..., None]) -> None:
    """Declares the options; `add` is a parser group's addoption."""
    add(
        "--device",
        choices=DEVICES,
        default="auto",
        metavar="D",
        help="runtime: amd (the machine's ROCm), cuda (NVIDIA's driver and NVRTC), cpu (emulates a "
        "device) or auto, the first present in this order (default: auto)",
    )
    add(
        "--model",
        action="extend",
        type=_models,
        metavar="MODELS",
        help="registry names or GGUF files, comma-separated or given several times; tests that "
        "take any model run these (default: those that each test names)",
    )
    add(
        "--prefill",
        type=_one_of("prefill", PREFILL_MODES),
        metavar="MODES",
        help="prefill modes, comma-separated: per-token,batched (default: both)",
    )
    add("--path", choices=PATHS, help="bundle of kernels (default: every one a test names)")
    for side in "kv":
        add(
            f"--kv-type-{side}",
            choices=tuple(KV_TYPES),
            help=f"storage type of {side.upper()} in the cache (default: every one a test names)",
        )
    add(
        "--max-cols",
        type=_columns,
        metavar="N",
        help=f"columns per batched product, 1 to {MAX_COLS_LIMIT}, comma-separated",
    )
    add(
        "--relation",
        action="append",
        type=_relation,
        metavar="ID",
        help=f"run only this case of {FILE}, by the id that a failure prints; may be given again",
    )
    add(
        "--relation-seed",
        type=_at_least(0),
        metavar="N",
        help="draw other relations and prompts, by this seed (default: the same ones every time)",
    )
    add(
        "--relation-walks",
        type=_at_least(1),
        metavar="N",
        help="relations to draw for each model and op (default: what the test says)",
    )
    add(
        "--require-gpu",
        action="store_true",
        help="fail where a GPU is missing instead of using the CPU runtime or skipping",
    )
    add(
        "--shuffle",
        type=_seed,
        metavar="SEED",
        help="the cpu runtime runs each launch in a seeded order, in its reverse, and interleaved; "
        "all must leave the same memory (default: off)",
    )
    add(
        "--sanitize",
        action="store_true",
        help="the cpu runtime runs stream work as late as HIP allows (default: off)",
    )
    add(
        "--benchmark",
        action="store_true",
        help="time the benchmarks (without it each runs once) and print their tables",
    )


def read_checking(option: Callable[[str], Any]) -> Checking:
    """What the session's device checks; `option` is pytest's config.getoption."""
    return Checking(shuffle=option("--shuffle"), sanitize=option("--sanitize"))


def read_selection(option: Callable[[str], Any]) -> Selection:
    """The selection from parsed options; `option` is pytest's config.getoption."""

    def one(name: str) -> tuple[str, ...]:
        value = option(name)
        return () if value is None else (value,)

    return Selection(
        model=tuple(dict.fromkeys(option("--model") or ())),
        prefill=option("--prefill") or (),
        path=one("--path"),
        kv_type_k=one("--kv-type-k"),
        kv_type_v=one("--kv-type-v"),
        max_cols=option("--max-cols") or (),
    )
