"""Exact relations as data: one way through the engine, or one product among other columns.

A promise of path kparallel is an equality of bits between two ways to compute the same thing. A
`Walk` is one way to feed a prompt, compared with the canonical way (relation_runs.py). `Mates` is
one product whose columns have neighbours, compared with each column alone (relation_mates.py).
Both have an id of one printable word that parses back to the same case:

    tiny-gemma3:f16,f32:m7:n39:s0:poison:x1:b41:g16+B24+d1
    model       K,V     |  |   |  cache  |  |   pieces: 16 tokens through the graph, 24 batched
                        |  |   seed      |  |   with all logits, 1 decoded
                        |  chunk         |  an earlier prompt on the same engine, or -
                        MAX_COLS         how often the pieces are fed, with a reset between

    columns:Q4_K:m7:k512:0.3.0       inputs 0, 3 and 0 of the pool as the columns of one product
    experts:Q8_0:m8:k256:1.0         inputs 1 and 0 as the tokens of one flow through experts
    few:Q8_0:m4:k256:1.0             inputs 1 and 0 as the sequences of one decode step
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import MAX_COLS_LIMIT
from reference.model.errors import InputError

FILE = "suites/correctness/test_relations.py"
FILLS = {"poison": 0xFF, "zero": 0x00, "finite": 0x41}
"""Bytes that the cache holds before a prompt. 0xFF is NaN and what a reset writes; 0x41 makes
f16 2.6 and f32 12.1, which no NaN check would notice."""
WAYS = {
    "g": "per token through the graph",
    "b": "batched",
    "d": "decode",
    "s": "step",
    "e": "per token, traced and so eager",
    "t": "batched and traced",
}
MATES_OPS = ("columns", "experts", "few")
ALL_LOGITS = ("G", "B", "E", "T")
"""The prefill ways, asked for the logits of every position."""
_PIECE = re.compile(r"([a-zA-Z])([1-9][0-9]*)")


@dataclass(frozen=True)
class Piece:
    """The next `tokens` tokens of the prompt, fed one way: a key of WAYS or of ALL_LOGITS."""

    way: str
    tokens: int

    def __post_init__(self) -> None:
        _require(self.way in (*WAYS, *ALL_LOGITS), "a piece's way", self.way, _known_ways())
        _require(self.tokens >= 1, "a piece's length", self.tokens, "at least 1 token")

    @property
    def id(self) -> str:
        return f"{self.way}{self.tokens}"


@dataclass(frozen=True)
class Walk:
    """One way to feed a prompt to a new engine of path kparallel.

    The engine first gets `earlier`, a prompt of other tokens, and is reset. Then its cache is
    filled as `fill` says and `pieces` are fed; that happens `calls` times with a reset between.
    `seed` chooses the tokens. Nothing else has run on the engine: the id says all of its history.
    """

    model: str
    kv_type_k: str
    kv_type_v: str
    max_cols: int
    chunk: int
    seed: int
    fill: str
    calls: int
    earlier: tuple[Piece, ...]
    pieces: tuple[Piece, ...]
    path: ClassVar[str] = "kparallel"

    def __post_init__(self) -> None:
        for kind in (self.kv_type_k, self.kv_type_v):
            _require(kind in KV_TYPES, "a KV type", kind, ", ".join(KV_TYPES))
        limit = MAX_COLS_LIMIT
        _require(1 <= self.max_cols <= limit, "MAX_COLS", self.max_cols, f"1 to {limit}")
        _require(self.chunk >= 1, "chunk", self.chunk, "at least 1")
        _require(self.seed >= 0, "seed", self.seed, "at least 0")
        _require(self.fill in FILLS, "the cache's content", self.fill, ", ".join(FILLS))
        _require(self.calls >= 1, "calls", self.calls, "at least 1")
        _require(bool(self.pieces), "the list of pieces", "empty", "at least one piece")

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def positions(self) -> int:
        """Room that the cache must have."""
        return max(self.length, sum(piece.tokens for piece in self.earlier))

    @property
    def id(self) -> str:
        return (
            f"{self.model}:{self.kv_type_k},{self.kv_type_v}:m{self.max_cols}:n{self.chunk}:"
            f"s{self.seed}:{self.fill}:x{self.calls}:{_join(self.earlier)}:{_join(self.pieces)}"
        )

    def validate_command(self, tokens: Sequence[int]) -> str | None:
        """`assay validate` for the same relation, where it can be said: one prefill, nothing else.

        `tokens` is the whole prompt. Both prefill modes are compared, whichever the walk took.
        """
        (first, *rest) = self.pieces
        if rest or self.earlier or self.calls > 1 or first.way.lower() not in "gb":
            return None
        return (
            f"assay validate {shlex.quote(self.model)} --tokens {','.join(map(str, tokens))} -n 0 "
            f"--max-cols {self.max_cols} --chunk {self.chunk} "
            f"--kv-type-k {self.kv_type_k} --kv-type-v {self.kv_type_v}"
        )


@dataclass(frozen=True)
class Mates:
    """One batched product: `picks` names the input that each column (op columns), token (op
    experts) or sequence of a decode step (op few) holds, by its place in relation_mates.POOL.
    `columns` is the length of an input.
    """

    op: str
    form: str
    max_cols: int
    columns: int
    picks: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(self.op in MATES_OPS, "op", self.op, f"one of {', '.join(MATES_OPS)}")
        limit = MAX_COLS_LIMIT
        _require(1 <= self.max_cols <= limit, "MAX_COLS", self.max_cols, f"1 to {limit}")
        _require(self.columns >= 1, "the length of an input", self.columns, "at least 1")
        _require(bool(self.picks), "the list of inputs", "empty", "at least one input")

    @property
    def id(self) -> str:
        picks = ".".join(map(str, self.picks))
        return f"{self.op}:{self.form}:m{self.max_cols}:k{self.columns}:{picks}"


Relation = Walk | Mates


def parse_relation(text: str) -> Relation:
    """The case with that id. Raises InputError where no case has it."""
    try:
        relation = _parse(text)
    except ValueError:
        relation = None
    if relation is None or relation.id != text:
        raise InputError(
            f"relation: id is {text!r}, expected one as a failing run prints it, such as "
            "tiny-llama:f16,f16:m7:n7:s0:poison:x1:-:b8 or columns:Q4_K:m7:k512:0.1"
        )
    return relation


def replay_command(relation: Relation) -> str:
    """What runs exactly this case."""
    return f"pytest {FILE} --relation {shlex.quote(relation.id)}"


def _parse(text: str) -> Relation:
    """Raises ValueError where fields are missing or no numbers."""
    if text.startswith(tuple(f"{op}:" for op in MATES_OPS)):
        op, form, max_cols, columns, inputs = text.split(":")
        picks = tuple(int(pick) for pick in inputs.split("."))
        return Mates(op, form, _number(max_cols, "m"), _number(columns, "k"), picks)
    # From the right, because a model may be a path with a colon in it.
    model, types, max_cols, chunk, seed, fill, calls, earlier, pieces = text.rsplit(":", 8)
    kv_type_k, kv_type_v = types.split(",")
    return Walk(
        model=model,
        kv_type_k=kv_type_k,
        kv_type_v=kv_type_v,
        max_cols=_number(max_cols, "m"),
        chunk=_number(chunk, "n"),
        seed=_number(seed, "s"),
        fill=fill,
        calls=_number(calls, "x"),
        earlier=() if earlier == "-" else _pieces(earlier),
        pieces=_pieces(pieces),
    )


def _number(text: str, letter: str) -> int:
    if not text.startswith(letter):
        raise ValueError(text)
    return int(text.removeprefix(letter))


def _pieces(text: str) -> tuple[Piece, ...]:
    found = [_PIECE.fullmatch(part) for part in text.split("+")]
    if None in found:
        raise ValueError(text)
    return tuple(Piece(match[1], int(match[2])) for match in found if match)


def _join(pieces: Sequence[Piece]) -> str:
    return "+".join(piece.id for piece in pieces) or "-"


def _known_ways() -> str:
    words = [f"{letter} ({meaning})" for letter, meaning in WAYS.items()]
    return ", ".join([*words, f"or {', '.join(ALL_LOGITS)} for all logits"])


def _require(holds: bool, what: str, value: object, expected: str) -> None:
    if not holds:
        raise InputError(f"relation: {what} is {value}, expected {expected}")
