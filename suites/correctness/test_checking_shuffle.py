"""--shuffle: a launch whose result depends on an order is reported, whatever the seed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import matrix, packed
from backend_hip.attention_shape import PARTIAL_EXTRA, SPLIT_KEYS
from backend_hip.compile import KERNEL_FOLDER, OPTIONS, flatten
from backend_hip.device import Buffer, Device, Kernel, Module
from backend_hip.half_columns import PACKED_NBYTES, SUPERBLOCK
from backend_hip.registry import Key
from backend_hip.runtimes.checking import Checking, recover, set_checking
from backend_hip.tuning import shape_of
from reference.model.errors import DeviceError
from reference.model.quant import FORMATS
from reference.quantise import quantise
from suites.correctness.checks import barriers_in, checked, finding, without_barrier
from suites.correctness.fused import (
    FusedLaunch,
    norm_gate_up,
    norm_pack,
    norm_qkv,
    product,
    rope_store,
)
from suites.correctness.lab import Lab, normal
from suites.correctness.ordered import ORDERED

SEEDS = range(20)
Launch = Callable[[], None]
Setup = Callable[[Lab], Launch]
Ordered = Callable[[str, int, int], NDArray[np.int32]]


def _launch(
    lab: Lab, key: Key, grid: tuple[int, int], *arguments: Any, position: int = 0, rows: int = 1
) -> Launch:
    """A launch of one kernel; "step" among the arguments stands for the flow's step."""
    flow = lab.flow([key], {}, tokens=[0] * rows, position=position)
    given = [flow.step if argument == "step" else argument for argument in arguments]
    return lambda: flow.kernels.launch(key, grid, *given)


def _argmax(lab: Lab) -> Launch:
    logits = normal(1, 1000)
    logits[100] = 9.0  # not in the wave that reduces: else a missing barrier would do no harm
    found = lab.buffer(np.zeros(2, dtype=np.int32))
    return _launch(lab, ("argmax_blocks", "", "any"), (1, 1), lab.buffer(logits), found, 1000)


def _rms_norm(lab: Lab) -> Launch:
    x, weight = lab.buffer(normal(2, 3, 300)), lab.buffer(normal(3, 300))
    y = lab.buffer(normal(4, 3, 300))
    return _launch(lab, ("rms_norm", "", "any"), (3, 1), x, weight, y, 300, 1e-6)


def _add_rms_norm(lab: Lab) -> Launch:
    x, out, weight = (lab.buffer(normal(seed, 3, 300)) for seed in (2, 3, 4))
    y = lab.buffer(normal(5, 3, 300))
    key = ("add_rms_norm", "", "any")
    return _launch(lab, key, (3, 1), x, out, weight, x, y, 300, 1e-6)


def _delta_rule(lab: Lab) -> Launch:
    count, heads, size = 3, 2, 64
    q, k, v = (lab.buffer(normal(seed, count, heads, size)) for seed in (1, 2, 3))
    decay, beta = (lab.buffer(-np.abs(normal(seed, count, heads))) for seed in (4, 5))
    memory = lab.buffer(normal(6, heads, size, size))
    out = lab.buffer(normal(7, count, heads, size))
    key = ("delta_rule", f"@{size}", "any")
    values = (q, k, v, decay, beta, memory, out, "step", heads, heads * size, count)
    return _launch(lab, key, (heads, 1), *values, rows=count)


def _cache(lab: Lab, kind: str, size: int, context: int) -> tuple[Buffer, Buffer]:
    """Keys and values of one KV head, which is whole blocks."""
    keys, values = (normal(seed, context, size) for seed in (3, 4))
    if kind == "f32":
        return lab.buffer(keys), lab.buffer(values)
    packed = (quantise(FORMATS[kind.upper()], side) for side in (keys, values))
    # Bytes of all rows, then the scales that stood before each block of them.
    blocks = [side.reshape(-1, 34) for side in packed]
    first, second = (np.concatenate([b[:, 2:].ravel(), b[:, :2].ravel()]) for b in blocks)
    return lab.buffer(first), lab.buffer(second)


def _attention(kind: str) -> Setup:
    """Three rows whose keys lie in two splits."""

    def setup(lab: Lab) -> Launch:
        count, group, size, context = 3, 2, 64, SPLIT_KEYS + 20
        q, out = (lab.buffer(normal(seed, count, group, size)) for seed in (1, 2))
        key = ("attention", f"{kind},{kind}@{size}x{group}", "any")
        arguments = (q, *_cache(lab, kind, size, context), out, "step", count, 1, context, 0, 0.125)
        return _launch(lab, key, (1, 1), *arguments, position=context - count, rows=count)

    return setup


def _attention_split(kind: str) -> Setup:
    def setup(lab: Lab) -> Launch:
        group, size, context = 2, 64, SPLIT_KEYS - 5
        q, out = (lab.buffer(normal(seed, 1, group, size)) for seed in (1, 2))
        key = ("attention_split", f"{kind},{kind}@{size}x{group}", "any")
        partials = lab.buffer(normal(5, group, size + PARTIAL_EXTRA))
        buffers = (q, *_cache(lab, kind, size, context), out, partials, "step")
        return _launch(lab, key, (1, 1), *buffers, 1, 1, context, 0, 0.125, position=context - 1)

    return setup


def _attention_merge(lab: Lab) -> Launch:
    """More splits than the block has threads."""
    size, splits = 64, 131
    partials = np.abs(normal(1, splits, size + PARTIAL_EXTRA)) + np.float32(1)
    partials[:, size] += np.arange(splits) % 7
    key = ("attention_merge", f"@{size}x1", "any")
    arguments = (lab.buffer(partials), lab.buffer(normal(2, size)), "step", splits, 0)
    return _launch(lab, key, (1, 1), *arguments, position=splits * SPLIT_KEYS - 1)


def _group_by_expert(lab: Lab) -> Launch:
    experts, pairs = 40, 64
    chosen = np.random.default_rng(1).integers(0, experts, pairs).astype(np.int32)
    offsets, slots = (lab.buffer(np.zeros(n, dtype=np.int32)) for n in (experts + 1, pairs))
    key = ("group_by_expert", f"@{experts}", "any")
    return _launch(lab, key, (1, 1), lab.buffer(chosen), offsets, slots, pairs)


# Columns of one product: what the stage holds at once, and more than that.
STAGE = shape_of("x86_64", "matvec")["STAGE"]
FITS, EXCEEDS = 256, STAGE + 300


def _fused(launch: FusedLaunch, lab: Lab) -> Launch:
    return _launch(lab, launch.key, launch.grid, *launch.arguments)


def _matvec(columns: int) -> Setup:
    key = ("matvec", "F32", "kparallel")
    return lambda lab: _fused(product(lab, key, 19, columns), lab)


def _matvec_few(lab: Lab) -> Launch:
    """Three columns, two of which are staged at a time."""
    return _fused(product(lab, ("matvec_few", "F32@4", "kparallel"), 19, 300, 3), lab)


def _norm_qkv(columns: int) -> Setup:
    key = ("norm_qkv", "F32,F32", "kparallel")
    return lambda lab: _fused(norm_qkv(lab, key, 10, 4, columns), lab)


def _norm_gate_up(columns: int) -> Setup:
    key = ("norm_gate_up", "silu,F32", "kparallel")
    return lambda lab: _fused(norm_gate_up(lab, key, 11, columns), lab)


def _norm_pack(lab: Lab) -> Launch:
    return _fused(norm_pack(lab, 768), lab)


def _rope_store(lab: Lab) -> Launch:
    return _fused(rope_store(lab, ("rope_store", "neox,normed,f32,f32", "any"), 1, 192), lab)


def _peaked(columns: int) -> NDArray[np.float32]:
    """One value that decides the scale, and which only one wave sees."""
    x = normal(1, columns)
    x[600] = 1e4
    return x


def _to_half(lab: Lab) -> Launch:
    columns = 700
    x = lab.buffer(_peaked(columns))
    halves, scales = (lab.buffer(normal(seed, 704)) for seed in (2, 3))
    return _launch(lab, ("to_half", "", "any"), (1, 1), x, halves, scales, columns, 704)


def _to_packed(lab: Lab) -> Launch:
    columns = 768
    x = lab.buffer(_peaked(columns))
    packed = lab.buffer(normal(2, columns // SUPERBLOCK * PACKED_NBYTES // 4))
    scales = lab.buffer(normal(3, 16))
    return _launch(lab, ("to_packed", "", "any"), (1, 1), x, packed, scales, columns)


def _product(form: str, tile: int, columns: int) -> Setup:
    """A product of as many columns as a block of the matrix unit has."""

    def setup(lab: Lab) -> Launch:
        rows = 19
        product = ("matvec_batched", f"{form}/{tile}", "matrix")
        keys = [("to_half", "", "any"), ("weights_to_half", form, "any"), product]
        flow = lab.flow(keys, {}, tokens=[0] * tile, longest=columns)
        x, y = lab.values(normal(1, tile, columns)), lab.values(normal(2, tile, rows))
        weight, held = lab.weight(form, normal(3, rows, columns)), flow.halves
        assert held is not None
        return lambda: matrix.multiply(flow.kernels, held, x.pointer, weight, y.pointer, tile, tile)

    return setup


def _product_packed(lab: Lab) -> Launch:
    """A product in parts of K, each of more superblocks than are staged at once."""
    rows, columns, count = 19, 9 * SUPERBLOCK, 5
    keys: list[Key] = [
        ("to_packed", "", "any"),
        ("sum_parts", "", "any"),
        packed.product_key(["Q4_K"]),
    ]
    flow = lab.flow(keys, {}, tokens=[0] * count, longest=columns)
    x, y = lab.values(normal(1, count, columns)), lab.values(normal(2, count, rows))
    weight, held = lab.weight("Q4_K", normal(3, rows, columns)), flow.halves
    assert held is not None
    return lambda: matrix.multiply(flow.kernels, held, x.pointer, weight, y.pointer, count)


@dataclass(frozen=True)
class BarrierCase:
    """One barrier of one kernel, and a launch whose result it decides."""

    file: str
    index: int
    setup: Setup
    kernel: str

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.index}"


CASES = (
    BarrierCase("argmax.hip", 0, _argmax, "argmax_blocks"),
    BarrierCase("rms_norm.hip", 0, _rms_norm, "rms_norm"),
    BarrierCase("rms_norm.hip", 0, _add_rms_norm, "add_rms_norm"),
    BarrierCase("delta_net.hip", 0, _delta_rule, "delta_rule"),
    BarrierCase("delta_net.hip", 2, _delta_rule, "delta_rule"),
    # The byte unit's, and the one behind staged queries, are passed for q8_0 alone.
    *(BarrierCase("attention.hip", i, _attention("q8_0"), "attention_rows") for i in range(2)),
    *(BarrierCase("attention.hip", i, _attention("f32"), "attention_rows") for i in range(2, 7)),
    BarrierCase("attention.hip", 7, _attention_split("q8_0"), "attention_split"),
    *(
        BarrierCase("attention.hip", i, _attention_split("f32"), "attention_split")
        for i in range(8, 12)
    ),
    *(BarrierCase("attention_merge.hip", i, _attention_merge, "attention_merge") for i in range(3)),
    BarrierCase("route.hip", 0, _group_by_expert, "group_by_expert"),
    BarrierCase("route.hip", 1, _group_by_expert, "group_by_expert"),
    BarrierCase("matvec.hip", 0, _matvec(FITS), "matvec"),
    BarrierCase("matvec.hip", 1, _matvec(EXCEEDS), "matvec"),
    BarrierCase("matvec_batched.hip", 0, _matvec_few, "matvec_batched"),
    BarrierCase("norm_qkv.hip", 0, _norm_qkv(FITS), "norm_qkv"),
    BarrierCase("norm_qkv.hip", 1, _norm_qkv(EXCEEDS), "norm_qkv"),
    BarrierCase("norm_qkv.hip", 2, _norm_qkv(FITS), "norm_qkv"),
    BarrierCase("norm_gate_up.hip", 0, _norm_gate_up(FITS), "norm_gate_up"),
    BarrierCase("norm_gate_up.hip", 1, _norm_gate_up(EXCEEDS), "norm_gate_up"),
    BarrierCase("norm_gate_up.hip", 2, _norm_gate_up(FITS), "norm_gate_up"),
    BarrierCase("to_half.hip", 0, _to_half, "to_half"),
    BarrierCase("to_packed.hip", 0, _to_packed, "to_packed"),
    *(BarrierCase("matvec_packed.hip", i, _product_packed, "matvec_packed") for i in range(2)),
    *(BarrierCase("norm_pack.hip", i, _norm_pack, "norm_pack") for i in range(3)),
    *(BarrierCase("rope_store.hip", i, _rope_store, "rope_store") for i in range(3)),
    BarrierCase("matvec_halves.hip", 1, _product("F32", 64, 200), "matvec_halves_64"),
    *(
        BarrierCase("matvec_batched_matrix.hip", i, _product("F32", 16, 200), "matvec_batched_16")
        for i in range(1, 5)
    ),
)
# Files whose fragments come from shared memory: no lane shows another operands from registers.
_NO_UNIT = (
    *("matvec_batched_matrix.hip", "matvec_halves.hip", "weights_to_half.hip"),
    "matrix_rate.hip",
)
# Barriers that no result rests on.
WITHOUT_EFFECT = {
    ("delta_net.hip", 1): "makes the compiler read the keys again, which keeps registers free",
    **{
        (file, 0): "operands in registers are exchanged by matvec_packed alone" for file in _NO_UNIT
    },
}


def test_every_barrier_of_every_kernel_has_a_case() -> None:
    files = sorted(path.name for path in KERNEL_FOLDER.glob("*.hip"))
    there = {(file, index) for file in files for index in range(barriers_in(file))}
    assert there == {*WITHOUT_EFFECT, *((case.file, case.index) for case in CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_missing_barrier_is_reported_in_every_seed(
    case: BarrierCase, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(seed: int) -> str:
        """What a launch in fresh memory is told, "" when it is clean."""
        text = ""
        try:
            with Lab(device) as lab:
                launch = case.setup(lab)
                set_checking(Checking(shuffle=seed))
                try:
                    launch()
                except DeviceError as error:
                    text = str(error)
                    recover()
                set_checking(Checking())
        except DeviceError:
            recover()
            assert text, "memory was damaged, which freeing it shows, and the launch was clean"
        return text

    with checked(device, Checking()):
        assert [report(seed) for seed in SEEDS] == [""] * len(SEEDS)
        without_barrier(monkeypatch, case.file, case.index)
        for seed in SEEDS:
            text = report(seed)
            assert f"kernel {case.kernel} (launch " in text
            assert f"of seed {seed}" in text
            assert "a barrier" in text or "illegal memory access" in text


# --- what no kernel of the product does ----------------------------------------------------------


@pytest.fixture
def ordered(device: Device) -> Iterator[Ordered]:
    """ordered(kernel, grid, words): one launch over a zeroed int32 array; what it left."""
    code = device.compile(
        flatten("simt.h") + ORDERED,
        "ordered.hip",
        [*OPTIONS, f"--offload-arch={device.architecture}", "-DSIMT_BLOCK=64"],
    )
    module = Module(code, "ordered.hip")

    def launch(name: str, grid: int, words: int) -> NDArray[np.int32]:
        buffer = Buffer(device, words * 4, "ordered")
        buffer.clear()
        Kernel(module, name, "P", 64).launch(device.stream, (grid, 1), buffer)
        result = buffer.download((words,), np.int32)
        buffer.free()
        return result

    yield launch
    module.unload()


def test_blocks_that_depend_on_each_other_are_reported(device: Device, ordered: Ordered) -> None:
    with checked(device, Checking()):
        for seed in SEEDS:
            set_checking(Checking(shuffle=seed))
            with finding(
                "kernel last_block (launch ", "the order in which blocks run",
                "argument 0 differs at byte 4 of its allocation of 8 bytes",
                "last written by thread 3 of block (", "blocks are not independent",
            ):  # fmt: skip
                ordered("last_block", 5, 2)


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_wide_access_beside_its_boundary_is_reported(
    what: str, device: Device, ordered: Ordered
) -> None:
    """A host's processor takes any address; a GPU loses the device."""
    with checked(device, Checking()), finding("thread 5: access to", "no multiple of 16 bytes"):
        ordered(f"wide_{what}_beside_its_boundary", 1, 64)


def test_waves_that_share_without_a_barrier_are_interleaved(
    device: Device, ordered: Ordered
) -> None:
    # Each wave run as a whole would always read back what it wrote itself.
    with checked(device, Checking()):
        for seed in SEEDS:
            set_checking(Checking(shuffle=seed))
            with finding("kernel shared_by_waves", "waves interleaved", "a barrier is missing"):
                ordered("shared_by_waves", 1, 64)


def test_a_clean_kernel_leaves_the_bits_that_it_leaves_unshuffled(
    device: Device, ordered: Ordered
) -> None:
    with checked(device, Checking()):
        plain = ordered("own_place", 7, 7 * 64)
        np.testing.assert_array_equal(plain, np.tile(np.arange(64), 7))
        for seed in SEEDS:
            set_checking(Checking(shuffle=seed))
            np.testing.assert_array_equal(ordered("own_place", 7, 7 * 64), plain)
