"""What `assay bench` and the decode benchmarks time: sections of rows that are timed in turn."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backend_hip.engine import DEFAULT_MAX_COLS
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import PATHS
from reference.model.errors import InputError
from suites.benchmark.cases import MAX_COLS, MAX_COLS_PROMPTS, MODE_PROMPTS

# Around every threshold: the matrix units' 16 rows, and where another path takes over.
BATCHES = {"gpu": (1, 2, 3, 4, 5, 8, 15, 16, 17, 32), "cpu": (1, 2, 3)}
KV_BATCHES = {"gpu": (1, 8), "cpu": (1, 2)}
CONTEXTS = {"gpu": (128, 2048, 6900), "cpu": (17,)}
PROMPTS = {"gpu": MODE_PROMPTS["gpu"], "cpu": (17,)}
SWEPT_PROMPTS = {"gpu": MAX_COLS_PROMPTS["gpu"], "cpu": (17,)}
MAX_COLS_SWEPT = {"gpu": MAX_COLS, "cpu": (16, 40)}
# After 105 tokens: the whole of a short answer, by path.
WALL_PROMPT, WALL_STEPS = {"gpu": 105, "cpu": 17}, 8
STEPS = {"gpu": 16, "cpu": 2}
MAX_COLS_SECTION = "max-cols"
EXPANDED = "q8_0"  # the KV type that has a control


@dataclass(frozen=True)
class SpeedRow:
    """One row. decode: `batch` sequences at `context`, `steps` steps a sample. prefill: a prompt of
    `context` tokens in `mode`, then `steps` decoded ones. `expanded`: the cache is written out as
    f16 before each step, and attention reads that (kv_control.py)."""

    mode: str
    path: str
    kv_type_k: str
    kv_type_v: str
    context: int
    batch: int = 1
    steps: int = 0
    max_cols: int = DEFAULT_MAX_COLS
    expanded: bool = False

    @property
    def phase(self) -> str:
        return "decode" if self.mode == "decode" else "prefill"

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.batch * self.steps if self.phase == "decode" else self.context + self.steps

    @property
    def id(self) -> str:
        """Readable, and selectable with -k."""
        kv = f"{self.kv_type_k}-{self.kv_type_v}" + ("-expanded" if self.expanded else "")
        return f"{self.mode}-{self.path}-b{self.batch}-c{self.context}-{kv}"

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Of `open_runner`; rows with the same ones share an engine."""
        return (
            ("path", self.path),
            ("kv_type_k", self.kv_type_k),
            ("kv_type_v", self.kv_type_v),
            ("max_cols", self.max_cols),
            ("expanded", self.expanded),
        )


@dataclass(frozen=True)
class Section:
    """Rows of one table; `base` gives the row that another is set against, `base_name` says it.

    Rows of one context or prompt make a group: they are timed in turn, and hold their bases.
    """

    name: str
    title: str
    rows: tuple[SpeedRow, ...]
    base: Callable[[SpeedRow], SpeedRow]
    base_name: str

    def groups(self) -> list[tuple[SpeedRow, ...]]:
        """The rows by context, in their order."""
        contexts = dict.fromkeys(row.context for row in self.rows)
        return [tuple(row for row in self.rows if row.context == one) for one in contexts]

    def narrowed(self, wanted: "Wanted") -> "Section":
        """Only the rows that are wanted, with their bases and kparallel's rows beside them."""
        kept: set[SpeedRow] = set()
        for row in filter(wanted.keeps, self.rows):
            exact = replace(row, path="kparallel")
            kept |= {row, self.base(row)} | ({exact} & set(self.rows))
        return replace(self, rows=tuple(row for row in self.rows if row in kept))


@dataclass(frozen=True)
class Wanted:
    """Which rows are run; empty: all. `contexts` are of decode rows, `prompts` of prefill rows."""

    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()

    def keeps(self, row: SpeedRow) -> bool:
        """True where no list leaves the row out."""
        decode = row.phase == "decode"
        places = self.contexts if decode else self.prompts
        return (
            (not places or row.context in places)
            and (not self.paths or row.path in self.paths)
            and (not decode or not self.batches or row.batch in self.batches)
        )


def _decode(size: str) -> Section:
    rows = (
        SpeedRow("decode", path, "f16", "f16", context, batch, STEPS[size])
        for context in CONTEXTS[size]
        for batch in BATCHES[size]
        for path in decode_paths()
    )
    return Section(
        "decode",
        "Decode by batch and context",
        tuple(rows),
        lambda row: replace(row, batch=1, path="kparallel"),
        "one sequence (kparallel)",
    )


def _kv(size: str) -> Section:
    kinds = [kind for kind in KV_TYPES if kind != "f32"]
    rows = []
    for context, batch in itertools.product(CONTEXTS[size][-2:], KV_BATCHES[size]):
        for path, kind in itertools.product(decode_paths(), kinds):
            row = SpeedRow("decode", path, kind, kind, context, batch, STEPS[size])
            rows += [row, *([replace(row, expanded=True)] if kind == EXPANDED else [])]
    return Section(
        "kv",
        "Decode by KV type",
        tuple(rows),
        lambda row: replace(row, kv_type_k="f16", kv_type_v="f16", expanded=False),
        "KV f16/f16",
    )


def _modes(prompt: int, steps: int) -> Iterable[SpeedRow]:
    for path in decode_paths():
        yield SpeedRow("per-token", path, "f16", "f16", prompt, steps=steps)
    for path in PATHS:
        yield SpeedRow("batched", path, "f16", "f16", prompt, steps=steps)


def _per_token(row: SpeedRow) -> SpeedRow:
    return replace(row, mode="per-token", path="kparallel", max_cols=DEFAULT_MAX_COLS)


def _prefill(size: str) -> Section:
    rows = tuple(row for prompt in PROMPTS[size] for row in _modes(prompt, 0))
    return Section("prefill", "Prefill by mode and path", rows, _per_token, "per-token")


def _wall(size: str) -> Section:
    rows = tuple(_modes(WALL_PROMPT[size], WALL_STEPS))
    return Section("wall", "Prompt and answer by path", rows, _per_token, "per-token")


def _max_cols(size: str) -> Section:
    rows = tuple(
        SpeedRow("batched", "kparallel", "f16", "f16", prompt, max_cols=columns)
        for prompt in SWEPT_PROMPTS[size]
        for columns in MAX_COLS_SWEPT[size]
    )
    return Section(
        MAX_COLS_SECTION,
        "MAX_COLS of batched prefill",
        rows,
        lambda row: replace(row, max_cols=DEFAULT_MAX_COLS),
        f"MAX_COLS {DEFAULT_MAX_COLS}",
    )


_SECTIONS: Mapping[str, Callable[[str], Section]] = {
    "decode": _decode,
    "kv": _kv,
    "prefill": _prefill,
    "wall": _wall,
    MAX_COLS_SECTION: _max_cols,
}
SECTIONS = tuple(_SECTIONS)
OPS = "ops"  # operations.py
ALL_SECTIONS = (*SECTIONS, OPS)


def section(name: str, device_kind: str | None, wanted: Wanted | None = None) -> Section:
    """A section at the size that the runtime can afford. InputError where none of it is wanted."""
    whole = _SECTIONS[name]("cpu" if device_kind in ("cpu", None) else "gpu")
    found = whole.narrowed(wanted or Wanted())
    if not found.rows:
        raise InputError(
            f"bench: section {name} has no row that --batches, --contexts, --prompts and --paths "
            f"leave; its rows have contexts or prompts of "
            f"{', '.join(str(one) for one in dict.fromkeys(row.context for row in whole.rows))}"
        )
    return found


def decode_paths() -> tuple[str, ...]:
    """Paths that differ in decode: `serial` has no kernels of its own for it."""
    return tuple(path for path in PATHS if path != "serial")
