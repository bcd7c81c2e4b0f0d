"""The shape of the damage in one trace point, in words: where it is and what stands there instead.

Pure functions over an engine's value (`got`), what its op should have made (`want`) and the limit
of each element. Nothing here judges: it describes what a judge has found to be broken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from suites.harness.compare import Array
from suites.harness.damage_values import relation
from suites.harness.verdict import counted

LANES = 32
STRIPE = 8
"""Elements that a lane takes at a time in a kparallel product (kernels/dot.h)."""
BLOCKS = (256, 32)
"""Elements of a k-quant's block, and of its parts and the simple formats' blocks."""
SHOWN_RUNS = 3


@dataclass(frozen=True)
class Layout:
    """What the rows and elements of a point are.

    Row i is token `first_token` + i of `tokens`. A row is `heads` times its head size; 1 where it
    is no list of heads. The engine took `chunk` tokens a flow and at most `columns` a product;
    token by token both are 1.
    """

    tokens: int
    first_token: int = 0
    heads: int = 1
    chunk: int = 1
    columns: int = 1

    @property
    def batched(self) -> bool:
        return self.chunk > 1


@dataclass(frozen=True)
class Damage:
    """`bad` of `total` elements are above their limit. Each text is a clause, empty where there is
    nothing to say: which tokens, heads, features; what the bad elements hold instead."""

    bad: int
    total: int
    tokens: str
    heads: str
    features: str
    values: str
    worst: str
    mask: NDArray[np.bool_] = field(repr=False)

    @property
    def shares(self) -> str:
        if self.bad == self.total:
            return f"all {counted(self.total, 'element')} are above their limit"
        return f"{self.bad:,} of {counted(self.total, 'element')} are above their limit"

    def __str__(self) -> str:
        where = ", ".join(text for text in (self.tokens, self.heads, self.features) if text)
        first = f"{self.shares}: {where}" if where else self.shares
        return "; ".join(text for text in (first, self.values, self.worst) if text)


def describe(
    got: Array,
    want: Array,
    limit: Array,
    layout: Layout,
    inputs: Mapping[str, Array] | None = None,
) -> Damage:
    """Describes (rows, ...) arrays of one size; `inputs` are what the op read, by point."""
    rows = len(got)
    shape = (rows, layout.heads, -1)
    got, want, limit = (np.asarray(array).reshape(shape) for array in (got, want, limit))
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want)
        mask = ~(error <= limit)
    bad = int(np.count_nonzero(mask))
    if not bad:
        return Damage(0, mask.size, "", "", "", "", "", mask)
    flows = (layout.chunk, layout.columns) if layout.batched else (0, 0)
    return Damage(
        bad,
        mask.size,
        tokens_text(np.flatnonzero(mask.any(axis=(1, 2))), rows, layout),
        _heads_text(np.flatnonzero(mask.any(axis=(0, 2))), layout),
        features_text(np.flatnonzero(mask.any(axis=(0, 1))), mask.shape[2], layout.heads > 1),
        relation(got, want, mask, inputs or {}, *flows),
        _worst(got, want, error, limit, layout),
        mask,
    )


# --- tokens -------------------------------------------------------------------------------------


def tokens_text(rows: NDArray[np.int64], count: int, layout: Layout) -> str:
    """Which of `count` rows: all, a range, a column of every product, the last part of a chunk."""
    tokens = rows + layout.first_token
    if len(rows) == count:
        return "at every token" if count > 1 else f"at token {tokens[0]}, the only one recorded"
    last = layout.first_token + count - 1
    if len(tokens) == 1:
        return f"at token {tokens[0]} only{_place(int(tokens[0]), last, layout)}"
    pattern = _column_pattern(tokens, last, layout) if layout.batched else ""
    if pattern:
        return pattern
    first, end = int(tokens[0]), int(tokens[-1])
    if end - first + 1 == len(tokens):
        if len(tokens) == count - 1:
            return f"at all tokens but the {'first' if end == last else 'last'}"
        if end == last:
            return f"from token {first} to the last, {last}{_boundary(first, layout)}"
        return f"at tokens {first} to {end}{_boundary(first, layout)}"
    step = _step(tokens)
    if step > 1 and len(tokens) > 2:
        return f"at every {_ordinal(step)} token from {first} to {end}"
    return f"at tokens {runs(tokens)}"


def _place(token: int, last: int, layout: Layout) -> str:
    if token == last:
        return ", the last"
    if token == 0:
        return ", the first"
    if not layout.batched:
        return ""
    if token % layout.chunk == 0:
        return ", the first of a chunk"
    if (token + 1) % layout.chunk == 0:
        return ", the last of a chunk"
    return ""


def _boundary(token: int, layout: Layout) -> str:
    if not layout.batched or not token:
        return ""
    if token % layout.chunk == 0:
        return f", where chunk {token // layout.chunk} begins (chunks of {layout.chunk})"
    if layout.columns > 1 and token % layout.chunk % layout.columns == 0:
        return f", where a group of {layout.columns} columns begins"
    return ""


def _column_pattern(tokens: NDArray[np.int64], last: int, layout: Layout) -> str:
    """Damage that repeats with the chunk or the product, or sits in the last partial one."""
    every = np.arange(layout.first_token, last + 1, dtype=np.int64)
    column = every % layout.chunk % layout.columns
    mine = np.isin(every, tokens)
    hit = np.unique(column[mine])
    groups = every // layout.chunk * layout.chunk + every % layout.chunk // layout.columns
    repeats = len(np.unique(groups)) > 1 and np.array_equal(mine, np.isin(column, hit))
    if repeats and len(hit) < len(np.unique(column)):
        noun = "column" if len(hit) == 1 else "columns"
        return f"at {noun} {runs(hit)} of every product of up to {layout.columns} columns"
    several = last // layout.chunk > layout.first_token // layout.chunk
    edges = {"last": (every + 1) % layout.chunk == 0, "first": every % layout.chunk == 0}
    edges["last"] |= every == last
    for edge, of_chunk in edges.items():
        if several and len(tokens) > 1 and np.array_equal(mine, of_chunk):
            return f"at the {edge} token of every chunk (chunks of {layout.chunk})"
        if several and len(tokens) > 1 and np.array_equal(mine, ~of_chunk):
            return f"at all but the {edge} token of every chunk (chunks of {layout.chunk})"
    count = last + 1
    part = count % layout.chunk
    first = count - part
    if part and first and np.array_equal(tokens, np.arange(first, count)):
        return f"at tokens {first} to {last}, the last and partial chunk ({part} of {layout.chunk})"
    group = layout.chunk % layout.columns
    inside = (every % layout.chunk >= layout.chunk - group) & (every < first)
    if group and inside.any() and np.array_equal(tokens, every[inside]):
        return (
            f"at tokens {runs(tokens)}, the last and partial group of columns of each whole chunk "
            f"({group} of {layout.columns})"
        )
    if last // layout.chunk and np.array_equal(tokens, every[every >= layout.chunk]):
        return f"from token {layout.chunk} on, where chunk 1 begins (chunks of {layout.chunk})"
    return ""


# --- heads and features -------------------------------------------------------------------------


def _heads_text(hit: NDArray[np.int64], layout: Layout) -> str:
    if layout.heads == 1:
        return ""
    if len(hit) == layout.heads:
        return "in every head"
    noun = "head" if len(hit) == 1 else "heads"
    return f"in {noun} {runs(hit)} of {layout.heads}"


def features_text(hit: NDArray[np.int64], count: int, in_heads: bool) -> str:
    """Which elements of a row, or of each head: all, an end, a block, a lane, a stride."""
    of = "each head" if in_heads else "a row"
    if len(hit) == count:
        return "" if in_heads else "in every element of a row"
    first, end = int(hit[0]), int(hit[-1])
    if end - first + 1 == len(hit):
        return _range(first, end, count, of)
    for pattern in _strides(hit, count):
        return f"in {pattern} of {of}"
    return f"in {len(hit):,} of {count:,} elements of {of} ({runs(hit)})"


def _range(first: int, end: int, count: int, of: str) -> str:
    size = end - first + 1
    if size == 1:
        place = " (the last)" if end == count - 1 else ""
        return f"in element {first}{place} of {of}"
    if first and end == count - 1:
        tail = next((f", what is left after whole blocks of {b}" for b in BLOCKS
                     if count % b == size), "")  # fmt: skip
        half = ", its second half" if 2 * size == count else tail
        return f"in the last {size:,} of {count:,} elements of {of}{half}"
    if not first:
        half = ", its first half" if 2 * size == count else ""
        return f"in the first {size:,} of {count:,} elements of {of}{half}"
    block = next((b for b in (*BLOCKS, STRIPE) if size == b and first % b == 0), 0)
    what = f", one block of {block}" if block else ""
    return f"in elements {first} to {end} of {count:,} of {of}{what}"


def _strides(hit: NDArray[np.int64], count: int) -> Iterator[str]:
    every = np.arange(count, dtype=np.int64)

    def explained(key: NDArray[np.int64]) -> NDArray[np.int64] | None:
        values = np.unique(key[hit])
        whole = np.array_equal(np.flatnonzero(np.isin(key, values)), hit)
        return values if whole and 2 * len(values) <= len(np.unique(key)) else None

    for size in (2, 4, 8, 16):
        found = explained(every % size)
        if found is not None and len(found) == 1:
            if size == 2:
                yield f"every {'odd' if found[0] else 'even'} element"
            else:
                yield f"every element whose index is {found[0]} mod {size}"
    lanes = explained(every % LANES)
    if lanes is not None and count > LANES:
        noun = "lane" if len(lanes) == 1 else "lanes"
        yield f"{noun} {runs(lanes)} of every wave (index mod {LANES})"
    stripes = explained(every // STRIPE % LANES)
    if stripes is not None and count > STRIPE:
        noun = "lane" if len(stripes) == 1 else "lanes"
        yield f"the {STRIPE}-element stripes of {noun} {runs(stripes)}"
    for block in BLOCKS:
        inside = explained(every % block)
        if inside is not None and count > block:
            yield f"elements {runs(inside)} of every block of {block}"


# --- words --------------------------------------------------------------------------------------


def runs(indices: Sequence[int] | NDArray[np.int64]) -> str:
    """ "0 to 3, 7 and 9": ascending indices as ranges, the first few and how many indices more."""
    found: list[tuple[int, int]] = []
    for index in (int(i) for i in indices):
        if found and index == found[-1][1] + 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    texts = [str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in found]
    if len(texts) > SHOWN_RUNS:
        more = sum(end - first + 1 for first, end in found[SHOWN_RUNS:])
        return f"{', '.join(texts[:SHOWN_RUNS])} and {more:,} more"
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]


def _step(tokens: NDArray[np.int64]) -> int:
    steps = np.unique(np.diff(tokens))
    return int(steps[0]) if len(steps) == 1 else 0


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _worst(got: Array, want: Array, error: Array, limit: Array, layout: Layout) -> str:
    with np.errstate(all="ignore"):
        share = np.where(error == 0, 0.0, error / limit)
    place = int(np.argmax(np.where(np.isnan(share), np.inf, share)))
    row, head, element = (int(i) for i in np.unravel_index(place, error.shape))
    where = f"token {row + layout.first_token}"
    where += f" head {head}" if layout.heads > 1 else ""
    index = (row, head, element)
    allowed = float(limit[index])
    # Nine significant digits tell any two float32 apart, which equal bits are about.
    digits = 7 if allowed else 9
    return (
        f"worst at {where} element {element}: got {float(got[index]):.{digits}g}, "
        f"want {float(want[index]):.{digits}g}, allowed {allowed:.3g}"
    )
