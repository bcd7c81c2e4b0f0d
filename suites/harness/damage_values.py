"""What damaged elements hold instead of what they should: zeros, poison, a multiple, a neighbour.

A relation is named where it explains the damage: what it leaves unexplained is at most the share of
the damage that the tolerance table's row says.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from suites.harness.compare import Array
from suites.harness.tolerances import RELATION

Mask = NDArray[np.bool_]

MATCHED_ELEMENTS = 1 << 24
"""Tokens or heads are matched with one another up to so many comparisons of elements."""


def relation(
    got: Array, want: Array, mask: Mask, inputs: Mapping[str, Array], chunk: int, columns: int = 0
) -> str:
    """The simplest relation between got and want (rows, heads, size) over `mask`; empty for none.

    `chunk` is the engine's tokens a flow, `columns` those of a product, 0 for token by token.
    """
    bad = got[mask]
    if got.dtype.kind == "f" and not np.isfinite(bad).all():
        finite = mask & np.isfinite(got)
        others = relation(got, want, finite, inputs, chunk, columns) if finite.any() else ""
        text = _not_finite(got, mask)
        return f"{text}; of the others: {others}" if others else text
    wide, exact = got.astype(np.float64), want.astype(np.float64)
    damage = _norm(wide[mask] - exact[mask])
    if not np.isfinite(damage) or damage == 0:
        return ""
    for text, model in _hypotheses(wide, exact, mask, inputs, chunk, columns):
        left = _norm(wide[mask] - model[mask])
        if left <= RELATION.share * damage:  # NaN, where the model has no value, does not pass
            return text
    return ""


def _not_finite(got: Array, mask: Mask) -> str:
    bad = np.ascontiguousarray(got[mask])
    nan, infinite = int(np.isnan(bad).sum()), int(np.isinf(bad).sum())
    # The engine poisons with bytes of 0xFF, whatever the type.
    poison = int(np.count_nonzero((bad.view(np.uint8).reshape(len(bad), -1) == 0xFF).all(axis=1)))
    texts = []
    if poison == len(bad):
        return "they hold the poison of fresh memory: never written, or computed from what was not"
    if nan:
        text = f"{nan:,} of them are NaN" if nan < len(bad) else "they are NaN"
        if poison == nan:
            text += ", the poison of fresh memory"
        elif poison:
            text += f", {poison:,} of these the poison of fresh memory"
        texts.append(text)
    if infinite:
        texts.append(f"{infinite:,} of them are infinite")
    return ", ".join(texts)


def _hypotheses(
    got: Array, want: Array, mask: Mask, inputs: Mapping[str, Array], chunk: int, columns: int
) -> Iterator[tuple[str, Array]]:
    yield "they are 0", np.zeros_like(want)
    for name, value in inputs.items():
        if value.size == want.size:
            yield f"they are the input {name}, unchanged", value.reshape(want.shape)
    if np.count_nonzero(mask) < RELATION.elements:
        return  # a few elements fit anything below
    yield from _rows(want, chunk, columns)
    yield from _elements(want)
    if want.shape[1] > 1:
        yield from _matched(got, want, mask, 1, "head")
    yield from _matched(got, want, mask, 0, "token")
    yield from _fitted(got, want, mask)


def _rows(want: Array, chunk: int, columns: int) -> Iterator[tuple[str, Array]]:
    """Another token's values."""
    steps = {1: "the token before (column c - 1)", -1: "the token after (column c + 1)"}
    if 1 < columns != chunk:
        steps |= {columns: f"the same column of the product before ({columns} tokens back)"}
    if chunk > 1:
        steps |= {chunk: f"the same place of the chunk before ({chunk} tokens back)"}
    for step, name in steps.items():
        if abs(step) < len(want):
            yield f"they are the values of {name}", _shifted(want, step, 0)
    if len(want) > 1:
        yield "they are the values of token 0", np.broadcast_to(want[:1], want.shape)
        if 1 < chunk < len(want):
            first = np.arange(len(want)) // chunk * chunk
            yield "they are the values of the first token of their chunk", want[first]


def _elements(want: Array) -> Iterator[tuple[str, Array]]:
    """Another element of the same row or head."""
    size = want.shape[2]
    if size > 1:
        yield "they are the values of the element before", _shifted(want, 1, 2)
        yield "they are the values of the element after", _shifted(want, -1, 2)
        yield "they are the values in reverse order", want[:, :, ::-1]
    if size % 2 == 0:
        pairs = want.reshape(*want.shape[:2], size // 2, 2)[..., ::-1].reshape(want.shape)
        yield "neighbours are swapped", pairs
        yield "the two halves are swapped", np.roll(want, size // 2, axis=2)


def _matched(
    got: Array, want: Array, mask: Mask, axis: int, noun: str
) -> Iterator[tuple[str, Array]]:
    """Tokens or heads that hold others: each damaged one is matched with the nearest one."""
    hit = np.flatnonzero(mask.any(axis=tuple({0, 1, 2} - {axis})))
    count = want.shape[axis]
    if len(hit) * count * (want.size // count) > MATCHED_ELEMENTS:
        return
    taken = np.arange(count)
    for one in hit:
        inside = mask.take(one, axis)
        mine = got.take(one, axis)[inside]
        distances = [_norm(mine - want.take(other, axis)[inside]) for other in range(count)]
        taken[one] = int(np.argmin(distances))
    pairs = [f"{one} holds {noun} {taken[one]}" for one in hit if taken[one] != one]
    shown = f", {noun} ".join(pairs[:3]) + (" and so on" if len(pairs) > 3 else "")
    if pairs:
        yield f"{noun} {shown}", want.take(taken, axis)


def _fitted(got: Array, want: Array, mask: Mask) -> Iterator[tuple[str, Array]]:
    """One number for all: a factor, an offset, a constant; then a factor for each row or head."""
    bad, right = got[mask], want[mask]
    energy = float(right @ right)
    if energy > 0:
        factor = float(bad @ right) / energy
        word = "want with its sign turned" if _near(factor, -1.0) else f"want x {factor:.6g}"
        yield f"got is {word}", factor * want
    offset = float(np.median(bad - right))
    yield f"got is want {'+' if offset >= 0 else '-'} {abs(offset):.6g}", want + offset
    constant = float(np.median(bad))
    yield f"they are all {constant:.6g}", np.full_like(want, constant)
    for axes, name in (((1, 2), "token"), ((2,), "head of each token")):
        inside = np.where(mask, want, 0.0)
        energies = np.sum(inside * inside, axis=axes, keepdims=True)
        several = np.count_nonzero(mask) >= RELATION.elements * np.count_nonzero(energies)
        if not several or (name != "token" and want.shape[1] == 1):
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            products = np.sum(np.where(mask, got * want, 0.0), axis=axes, keepdims=True)
            factors = np.where(energies > 0, products / energies, 1.0)
        low, high = float(factors[energies > 0].min()), float(factors[energies > 0].max())
        yield f"got is want times a factor of each {name} ({low:.6g} to {high:.6g})", factors * want


def _near(value: float, target: float) -> bool:
    return bool(abs(value - target) <= RELATION.share)


def _shifted(want: Array, step: int, axis: int) -> Array:
    """want moved by `step` along an axis; NaN where nothing moves in."""
    moved = np.roll(want, step, axis=axis)
    index: list[slice] = [slice(None)] * want.ndim
    index[axis] = slice(0, step) if step > 0 else slice(step, None)
    moved[tuple(index)] = np.nan
    return moved


def _norm(values: Array) -> float:
    return float(np.sqrt(np.sum(np.square(values))))
