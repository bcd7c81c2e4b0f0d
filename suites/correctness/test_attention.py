"""Attention and KV write on the device: float64's values, and the same bits however it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import ops
from backend_hip.attention_shape import (
    PARTIAL_EXTRA,
    SPLIT_KEYS,
    padded,
    passes,
    rows_per_block,
    split_bucket,
    splits_for,
)
from backend_hip.device import Buffer, Device
from backend_hip.kv_cache import CacheTensor, dequantised, packed_blocks
from backend_hip.kv_types import KV_TYPES
from backend_hip.ops import Splits, Values
from backend_hip.requirements import head_sizes
from backend_hip.state import FlowRow
from reference.kv_cache import stored
from reference.model.quant import FORMATS
from reference.model.spec import LayerSpec, RopeSpec
from reference.quantise import quantise
from suites.correctness.lab import Lab
from suites.harness import bounds
from suites.harness.compare import compare

Floats = NDArray[np.float32]
SPARE = 7  # unwritten cache rows after the last key: they hold poison and must not matter


@dataclass(frozen=True)
class AttentionCase:
    """`length` keys in the cache, the last `tokens` of them queries."""

    length: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    types: str

    @property
    def id(self) -> str:
        return (
            f"n{self.length}-t{self.tokens}-h{self.heads}/{self.kv_heads}x{self.head_size}"
            f"-w{self.window}-{self.types}"
        )

    @property
    def layer(self) -> LayerSpec:
        rope = RopeSpec("neox", self.head_size, 10000.0, 1.0)
        return LayerSpec(0, self.heads, self.kv_heads, self.head_size, 64, self.window, rope)

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    @property
    def width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        sizes = head_sizes(self.layer)
        return [
            ("kv_write", self.types, "any"),
            ("attention", f"{self.types}@{sizes}", "any"),
            ("attention_split", f"{self.types}@{sizes}", "any"),
            ("attention_merge", f"@{sizes}", "any"),
        ]


class Bench:
    """Random queries of every position, and keys and values written to a cache on the device."""

    def __init__(self, lab: Lab, case: AttentionCase, *, start: int = 0, seed: int = 0) -> None:
        self.lab, self.case, self.start = lab, case, start
        generator = np.random.default_rng([seed, case.length, case.heads, case.head_size])
        shape = (case.length, case.kv_heads, case.head_size)
        self.q = generator.standard_normal((case.length, case.heads, case.head_size)).astype(
            np.float32
        )
        self.k, self.v = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))

    def open(self, rows: int) -> None:
        """A cache of `rows` positions, all poison."""
        kinds = [KV_TYPES[name] for name in self.case.types.split(",")]
        buffers = [
            self.lab.buffer(np.full(rows * kind.row_nbytes(self.case.width), 255, dtype=np.uint8))
            for kind in kinds
        ]
        heads, size = self.case.kv_heads, self.case.head_size
        self.tensors = [
            CacheTensor(buffer, kind, rows, heads, size)
            for buffer, kind in zip(buffers, kinds, strict=True)
        ]

    def share(self, other: "Bench") -> None:
        self.tensors = other.tensors

    @property
    def cache(self) -> tuple[Buffer, Buffer]:
        return self.tensors[0].buffer, self.tensors[1].buffer

    def write(self) -> None:
        case = self.case
        flow = self.lab.flow(case.keys, {}, rows=self._rows(range(case.length)))
        k, v = (self.lab.values(side.reshape(case.length, case.width)) for side in (self.k, self.v))
        ops.kv_write(flow, k, v, *self.cache, case.layer, case.types)

    def _rows(self, positions: Sequence[int]) -> list[FlowRow]:
        return [FlowRow(0, position, self.start) for position in positions]

    def attend(self, positions: Sequence[int], splits: int | None = None) -> Floats:
        """Results of consecutive rows, or with `splits` of a decode step of these rows."""
        return attend([(self, position) for position in positions], splits)

    def contents(self) -> tuple[Floats, Floats]:
        keys, values = (
            dequantised(*tensor.read(self.start, self.case.length)) for tensor in self.tensors
        )
        return keys, values


def attend(rows: Sequence[tuple[Bench, int]], splits: int | None) -> Floats:
    """One flow over rows of (bench, position), whose benches share one cache."""
    bench = rows[0][0]
    case, lab = bench.case, bench.lab
    queries = np.stack([owner.q[position] for owner, position in rows]).reshape(len(rows), -1)
    cut = None
    if splits is not None:
        floats = len(rows) * case.heads * splits * (case.head_size + PARTIAL_EXTRA)
        cut = Splits(splits, lab.output(1, floats).buffer)
    where = [FlowRow(0, position, owner.start) for owner, position in rows]
    flow = lab.flow(case.keys, {}, rows=where, splits=cut)
    out: Values = lab.output(len(rows), case.heads * case.head_size)
    ops.attention(flow, lab.values(queries), *bench.cache, out, case.layer, case.scale, case.types)
    return lab.read(out)


def opened(lab: Lab, case: AttentionCase) -> Bench:
    bench = Bench(lab, case)
    bench.open(case.length + SPARE)
    bench.write()
    return bench


S = SPLIT_KEYS
_EDGES = (1, 2, 31, 32, 33, 105, S - 1, S, S + 1)
LONG = AttentionCase(2 * S + 3, 2 * S + 3, 4, 2, 32, None, "f16,f16")
CASES = [
    *(AttentionCase(n, n, 4, 2, 32, None, "f32,f32") for n in _EDGES),
    *(AttentionCase(n, 1, 9, 3, 64, None, "f16,f16") for n in _EDGES),
    *(AttentionCase(n, 5, 8, 2, 128, None, "q8_0,q8_0") for n in (5, 33, S - 1, S, S + 1)),
    *(AttentionCase(n, n, 3, 1, 32, 16, "f16,f32") for n in (15, 16, 17, 47, 48, 49, 105)),
    *(AttentionCase(n, 3, 8, 1, 64, 33, "f32,f16") for n in (32, 33, 34, 65, 66, 97)),
    *(AttentionCase(n, 4, 2, 1, 64, 40, "q8_0,f16") for n in (S + 39, S + 40, S + 41, 2 * S)),
    AttentionCase(105, 40, 28, 4, 32, 1, "f32,f32"),
    AttentionCase(70, 5, 4, 1, 256, 512, "f16,f16"),
    AttentionCase(70, 5, 8, 1, 256, None, "f16,q8_0"),
    AttentionCase(40, 9, 4, 2, 512, None, "f16,f16"),
    AttentionCase(40, 40, 2, 2, 48, None, "f32,f32"),
    AttentionCase(40, 11, 3, 1, 36, None, "f16,f32"),
    AttentionCase(40, 11, 3, 1, 36, None, "f32,f16"),
    AttentionCase(40, 11, 5, 1, 96, None, "q8_0,q8_0"),
    AttentionCase(40, 11, 9, 1, 64, None, "q8_0,f32"),
    AttentionCase(40, 11, 2, 2, 8, None, "f16,f16"),
    AttentionCase(600, 2, 4, 2, 32, 512, "f16,f16"),
    LONG,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows_of_a_sequence(case: AttentionCase, device: Device) -> None:
    start = case.length - case.tokens
    with Lab(device) as lab:
        bench = opened(lab, case)
        got = bench.attend(range(start, case.length))
        keys, values = bench.contents()
    for kind, held, written in zip(
        case.types.split(","), (keys, values), (bench.k, bench.v), strict=True
    ):
        assert held.tobytes() == stored(kind, written).tobytes()
    kinds = case.types.split(",")
    want, limit = bounds.attention(
        bench.q[start:], keys, values, start, case.window, case.scale, (kinds[0], kinds[1])
    )
    result = compare(got.astype(np.float64), want, limit)
    assert result.elements == case.tokens * case.heads * case.head_size
    assert result.ok, result.reason()


CUT = [
    replace(LONG, types=types, heads=heads, kv_heads=kv_heads, head_size=size, window=window)
    for types, heads, kv_heads, size, window in (
        ("f16,f16", 4, 1, 128, None),
        ("q8_0,q8_0", 8, 2, 128, None),
        ("f32,q8_0", 7, 1, 64, None),
        ("f16,f32", 3, 1, 32, 20),
        ("q8_0,f16", 8, 1, 256, S),
        ("f32,f32", 3, 1, 36, 1),
    )
]
# Around tiles of lanes, splits and buckets.
PLACES = (0, 1, 15, 16, 31, 32, S - 2, S - 1, S, S + 1, 2 * S - 1, 2 * S, 2 * S + 2)


@pytest.mark.parametrize("case", CUT, ids=lambda case: case.id)
def test_the_bits_do_not_depend_on_how_the_work_is_cut(case: AttentionCase, device: Device) -> None:
    with Lab(device) as lab:
        bench = opened(lab, case)
        together = bench.attend(range(case.length))
        assert np.isfinite(together).all()
        for position in PLACES:
            want = together[position].tobytes()
            # The last row of a chunk that begins elsewhere, and alone.
            for first in {max(position - 4, 0), position}:
                assert bench.attend(range(first, position + 1))[-1].tobytes() == want, position
            # A decode step, with just enough splits and with more.
            least = splits_for(position + 1)
            for splits in sorted({least, split_bucket(position + 1, 8 * S), 4}):
                got = bench.attend([position], splits)
                assert got[0].tobytes() == want, (position, splits)


@pytest.mark.parametrize("types", ["f16,f16", "q8_0,q8_0"])
def test_a_decode_step_of_several_sequences(types: str, device: Device) -> None:
    case = replace(LONG, types=types, head_size=64)
    with Lab(device) as lab:
        room = case.length + SPARE
        benches = [Bench(lab, case, start=i * room, seed=i) for i in range(3)]
        benches[0].open(3 * room)
        for bench in benches:
            bench.share(benches[0])
            bench.write()
        rows = [(benches[2], 2 * S + 1), (benches[0], 3), (benches[1], S)]
        got = attend(rows, 4)
        for (bench, position), result in zip(rows, got, strict=True):
            assert result.tobytes() == bench.attend([position])[0].tobytes()


@pytest.mark.parametrize("position", [S, 2 * S])
def test_a_grid_with_too_few_splits_gives_nan(position: int, device: Device) -> None:
    with Lab(device) as lab:
        bench = opened(lab, LONG)
        assert np.isnan(bench.attend([position], position // S)).all()
        assert np.isfinite(bench.attend([position], position // S + 1)).all()


def test_each_query_head_reads_its_own_kv_head(device: Device) -> None:
    # Every KV head holds one constant, so a wrong head map shows as the wrong constant.
    for heads, kv_heads in ((28, 4), (9, 3), (8, 1), (1, 1), (18, 2)):
        case = AttentionCase(5, 1, heads, kv_heads, 32, None, "f32,f32")
        constants = np.arange(1, kv_heads + 1, dtype=np.float32)
        with Lab(device) as lab:
            bench = Bench(lab, case)
            bench.v[:] = constants[:, None]
            bench.k[:] = 0
            bench.open(5)
            bench.write()
            expected = np.repeat(constants, heads // kv_heads)[:, None]
            for splits in (None, 1, 2):
                got = bench.attend([4], splits).reshape(heads, 32)
                assert np.array_equal(got, np.broadcast_to(expected, got.shape)), (heads, splits)


def _extreme_blocks() -> Floats:
    """(n, 2, 64): ties of rounding, the largest and smallest scales, zeros, one large value."""
    generator = np.random.default_rng(8)
    rows = [
        generator.standard_normal(64),
        np.r_[127, np.arange(63) + 0.5],  # scale 1: every value but the first is a tie
        np.r_[-127, -(np.arange(63) + 0.5)],
        np.zeros(64),
        np.full(64, -0.0),
        generator.standard_normal(64) * 1e-9,
        generator.standard_normal(64) * 1e6,
        np.r_[1e-3 * generator.standard_normal(63), 40],
        np.r_[-128, np.ones(63)],
        np.full(64, -3.25),
    ]
    return np.stack([np.stack([row, row[::-1]]) for row in rows]).astype(np.float32)


def test_q8_0_stores_the_bytes_of_gguf(device: Device) -> None:
    k = _extreme_blocks()
    v = np.random.default_rng(9).standard_normal(k.shape).astype(np.float32)
    case = AttentionCase(len(k), 1, 4, 2, 64, None, "q8_0,q8_0")
    with Lab(device) as lab:
        bench = Bench(lab, case)
        bench.k, bench.v = k, v
        bench.open(len(k) + SPARE)
        bench.write()
        for tensor, values in zip(bench.tensors, (k, v), strict=True):
            got = packed_blocks(*tensor.read(0, len(k)))
            assert got.tobytes() == quantise(FORMATS["Q8_0"], values).tobytes()
            rest = [tensor.read(len(k), SPARE)[i].view(np.uint8) for i in range(2)]
            assert all((part == 255).all() for part in rest), "written past the rows"


def test_q8_0_says_so_where_a_value_is_not_finite(device: Device) -> None:
    case = AttentionCase(3, 1, 2, 1, 64, None, "q8_0,q8_0")
    for bad in (np.nan, np.inf, -np.inf):
        with Lab(device) as lab:
            bench = Bench(lab, case)
            bench.k[1, 0, 40] = bad
            bench.open(3)
            bench.write()
            keys, values = bench.contents()
        assert np.array_equal(np.isnan(keys), np.isnan(stored("q8_0", bench.k)))
        assert np.isnan(keys[1, 0, 32:]).all()
        assert np.isfinite(keys[1, 0, :32]).all()
        assert np.isfinite(values).all()


def test_q8_0_beside_large_elements(device: Device) -> None:
    """Queries and scales whose largest is far above the rest, which units are shares of."""
    case = AttentionCase(S + 40, 5, 4, 1, 128, None, "q8_0,q8_0")
    start = case.length - case.tokens
    with Lab(device) as lab:
        bench = Bench(lab, case)
        bench.q[:, 0, 5] = 1e4
        bench.q[:, 1] *= 1e-20
        bench.q[:, 2] = 0
        bench.k[:, 0, 5] = 0
        bench.v[7] *= 1e4
        bench.v[S:] *= 1e-9
        bench.open(case.length + SPARE)
        bench.write()
        got = bench.attend(range(start, case.length))
        keys, values = bench.contents()
    want, limit = bounds.attention(
        bench.q[start:], keys, values, start, None, case.scale, ("q8_0", "q8_0")
    )
    result = compare(got.astype(np.float64), want, limit)
    assert result.ok, result.reason()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_q8_0_gives_nan_where_a_query_or_a_block_is_not_finite(bad: float, device: Device) -> None:
    case = AttentionCase(5, 1, 4, 1, 64, None, "q8_0,q8_0")
    for side in ("q", "k", "v"):
        with Lab(device) as lab:
            bench = Bench(lab, case)
            getattr(bench, side)[-1, 0, 40] = bad
            bench.open(5)
            bench.write()
            got = bench.attend([4]).reshape(4, 64)
        hit = np.zeros((4, 64), dtype=np.bool_)
        if side == "q":
            hit[0] = True
        else:
            hit[:, 0 if side == "k" else 32 :] = True
        assert np.array_equal(np.isnan(got), hit), side
        assert np.isfinite(got[~hit]).all(), side


def test_shapes_stay_within_shared_memory() -> None:
    for size in (2, 32, 36, 64, 96, 128, 192, 256, 512):
        for group in (1, 2, 3, 4, 5, 7, 8, 9, 16, 32):
            heads = -(-group // passes(size, group))
            rows = rows_per_block(size, group)
            assert heads * passes(size, group) >= group
            # Parts of scores and of mixed values, weights times scales, merged rows.
            assert 4 * padded(heads) * size <= 4096, (size, group)
            factors = -(-size // 32) * (SPLIT_KEYS * padded(heads) + 8)
            floats = 4096 + factors + rows * heads * size
            assert floats * 4 <= 47 * 1024, (size, group)


def test_buckets_are_few_and_large_enough() -> None:
    context = 6_900
    buckets = {split_bucket(positions, context) for positions in range(1, context + 1)}
    assert len(buckets) == 7
    assert max(buckets) == splits_for(context)
    for positions in (1, S, S + 1, 2 * S + 1, context):
        assert split_bucket(positions, context) >= splits_for(positions)
