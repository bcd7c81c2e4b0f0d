"""Hypothesis draws relations: lengths from the engine's constants and one above and below each.

Every choice lists the plainest value first, so that a failing case shrinks to a short prompt, small
chunks, no split, no earlier prompt and the default types.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from backend_hip.registry import FEW_COLUMNS, few_columns
from backend_hip.wave import WAVE
from reference.model.spec import ModelSpec
from suites.correctness.relation_mates import EXPERT_FORMS, FORMS, POOL, lengths_of
from suites.correctness.relations import FILLS, Mates, Piece, Walk

LONGEST = 105
"""Three attention tiles, two default chunks and more than one of every MAX_COLS below."""
SHORTER = 65
"""With other types than the default: two tiles. Each pair has a canonical run of its own."""
MAX_COLS = (1, 7, 32, 33, 40, 64)
"""Compiled for each value, so these few: one, odd, a wave, above it, the default, the most."""
MATES_MAX_COLS = (1, 8, 40)
KV_PAIRS = (("f16", "f16"), ("f32", "f32"), ("f16", "f32"), ("f32", "f16"))
TILE = WAVE  # keys of one tile of kernels/attention.hip
SLOW = 17  # tokens; longer pieces are not fed or read back one token at a time, "g" apart

# Batched often, because the canonical way is the other one and takes longer.
_WAYS = ("g", "b", "b", "b", "d", "s", "e", "t", "G", "B", "B", "E", "T")
_QUICK = {"d": "b", "s": "b", "e": "t", "G": "B", "E": "T"}
"""How a long piece is fed instead."""


@dataclass(frozen=True)
class Axes:
    """What walks are drawn from."""

    max_cols: Sequence[int] = MAX_COLS
    kv_pairs: Sequence[tuple[str, str]] = KV_PAIRS
    longest: int = LONGEST
    seed: int = 0


def positions(spec: ModelSpec, max_cols: int, chunk: int, longest: int) -> list[int]:
    """Lengths and cuts worth trying, ascending: 1 to 4 (a convolution's history and around it) and
    -1, 0, +1 around the first multiples of chunk, MAX_COLS, attention tile and each window.
    """
    constants = {chunk, max_cols, TILE, *(layer.window or TILE for layer in spec.layers)}
    around = {c * k + d for c in constants for k in (1, 2, 3) for d in (-1, 0, 1)}
    return sorted(n for n in {1, 2, 3, 4, longest} | around if 1 <= n <= longest)


def chunks(max_cols: int, longest: int) -> list[int]:
    """Chunks worth trying, ascending: around MAX_COLS and the tile, tiny ones, the whole prompt."""
    around = {c + d for c in (max_cols, TILE) for d in (-1, 0, 1)}
    return sorted(n for n in {1, 2, 7, longest} | around if 1 <= n <= longest)


@st.composite
def walks(draw: st.DrawFn, model: str, spec: ModelSpec, axes: Axes | None = None) -> Walk:
    """A walk of one model."""
    axes = axes or Axes()
    pair = draw(st.sampled_from(axes.kv_pairs))
    longest = axes.longest if pair == KV_PAIRS[0] else min(axes.longest, SHORTER)
    max_cols = draw(st.sampled_from(axes.max_cols))
    chunk = draw(st.sampled_from(chunks(max_cols, longest)))
    places = positions(spec, max_cols, chunk, longest)
    few = [place for place in places if place <= TILE]
    pieces = draw(_pieces(places, most=4))
    earlier = draw(st.one_of(st.just(()), _pieces(few, most=2)))
    return Walk(
        model=model,
        kv_type_k=pair[0],
        kv_type_v=pair[1],
        max_cols=max_cols,
        chunk=chunk,
        seed=axes.seed,
        fill=draw(st.sampled_from(tuple(FILLS))),
        calls=draw(st.sampled_from((1, 1, 1, 1, 2))),
        earlier=earlier,
        pieces=pieces,
    )


def _pieces(places: Sequence[int], most: int) -> st.SearchStrategy[tuple[Piece, ...]]:
    """A prompt that ends, and is cut, at drawn places; each place says how its piece is fed."""
    cut = st.tuples(st.sampled_from(places), st.sampled_from(_WAYS))
    cuts = st.lists(cut, min_size=1, max_size=most, unique_by=lambda found: found[0])
    return cuts.map(_between)


def _between(cuts: list[tuple[int, str]]) -> tuple[Piece, ...]:
    """The pieces up to each (end, way)."""
    pieces, start = [], 0
    for end, way in sorted(cuts):
        tokens = end - start
        pieces.append(Piece(way if tokens <= SLOW else _QUICK.get(way, way), tokens))
        start = end
    return tuple(pieces)


@st.composite
def mates(
    draw: st.DrawFn, op: str, forms: Sequence[str] = (), max_cols: Sequence[int] = MATES_MAX_COLS
) -> Mates:
    """Columns of one product, or tokens of one flow through experts, with any neighbours; of a
    decode step's product (op few) the number of columns chooses the kernel.
    """
    form = draw(st.sampled_from(forms or (EXPERT_FORMS if op == "experts" else FORMS)))
    length = draw(st.sampled_from((256,) if op == "experts" else lengths_of(form)))
    if op == "few":
        around = {few + d for few in FEW_COLUMNS for d in (-1, 0, 1)}
        count = draw(st.sampled_from(sorted({2, 3} | {n for n in around if n <= max(FEW_COLUMNS)})))
        columns = few_columns("kparallel", count)
    else:
        columns = draw(st.sampled_from(max_cols))
        around = {k * columns + d for k in (1, 2) for d in (-1, 0, 1)}
        count = draw(st.sampled_from(sorted({1, 2, 3} | around - {0})))
    pick = st.integers(0, len(POOL) - 1)
    picks = draw(st.lists(pick, min_size=count, max_size=count))
    return Mates(op, form, columns, length, tuple(picks))
