"""What simt.h promises, on the chosen device: ids, shared memory, wave operations, rounding.

test_cpu_runtime.py has the same promises at both wave sizes, without the device layer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip.compile import OPTIONS, flatten
from backend_hip.device import Buffer, Device, Kernel, Module
from backend_hip.wave import WAVE

BLOCK = 64
COLUMNS = 40
SOURCE = """
SIMT_KERNEL(position, int32_t* out) {
  const int block = (simt::block_z() * simt::grid_y() + simt::block_y()) * simt::grid_x()
                    + simt::block_x();
  out[block * SIMT_BLOCK + simt::thread()] = simt::wave() * 1000 + simt::lane();
}
SIMT_KERNEL(shared_memory, int32_t* out) {
  SIMT_SHARED(int32_t, box, SIMT_BLOCK);
  const int at = simt::block_x() * SIMT_BLOCK + simt::thread();
  box[simt::thread()] = at;
  simt::sync();
  out[at] = box[SIMT_BLOCK - 1 - simt::thread()];
}
SIMT_KERNEL(columns_sum, const float* in, float* out, int32_t n) {
  float values[COLUMNS];
  SIMT_UNROLL
  for (int c = 0; c < COLUMNS; ++c) values[c] = in[simt::thread() * COLUMNS + c];
  simt::wave_sum(values, n);
  SIMT_UNROLL
  for (int c = 0; c < COLUMNS; ++c) out[simt::thread() * COLUMNS + c] = values[c];
}
SIMT_KERNEL(part_of_the_butterfly, const float* in, float* out) {
  float values[3];
  for (int c = 0; c < 3; ++c) values[c] = in[simt::thread() * 3 + c];
  simt::butterfly<16, 8>(values, 2);
  for (int c = 0; c < 3; ++c) out[simt::thread() * 3 + c] = values[c];
}
template <int HIGH, int N>
SIMT_DEVICE void spread(const float* in, float* out, int32_t* first) {
  float values[N];
  for (int c = 0; c < N; ++c) values[c] = in[simt::thread() * 8 + c];
  first[simt::thread()] = simt::spread_sum<HIGH>(values);
  for (int c = 0; c < N; ++c) out[simt::thread() * 8 + c] = values[c];
}
SIMT_KERNEL(spread_most, const float* in, float* out, int32_t* first) {
  float values[4];
  for (int c = 0; c < 4; ++c) values[c] = in[simt::thread() * 4 + c];
  first[simt::thread()] = simt::spread_max<SIMT_WAVE / 2>(values);
  out[simt::thread()] = values[0];
}
SIMT_KERNEL(spread_4_of_8, const float* in, float* out, int32_t* first) {
  spread<4, 4>(in, out, first);
}
SIMT_KERNEL(spread_8_of_2, const float* in, float* out, int32_t* first) {
  spread<1, 8>(in, out, first);
}
SIMT_KERNEL(spread_1_of_32, const float* in, float* out, int32_t* first) {
  spread<16, 1>(in, out, first);
}
SIMT_KERNEL(spread_2_of_1, const float* in, float* out, int32_t* first) {
  spread<0, 2>(in, out, first);
}
SIMT_KERNEL(words, const uint32_t* in, float* bytes, float* halves, uint32_t* again,
            int32_t* dots) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  simt::signed_bytes_to_floats(in[i], bytes + 4 * i);
  simt::halves_to_floats(in[i], halves + 2 * i);
  const simt::Pair pair = simt::load8(in + i / 2 * 2);
  again[i] = pair.word[i % 2];
  dots[i] = simt::dot4(in[i], in[i ^ 1], -i);
}
SIMT_KERNEL(wave_operations, const float* in, float* maximum, float* rotated, float* flipped) {
  const float v = in[simt::thread()];
  maximum[simt::thread()] = simt::wave_max(v);
  rotated[simt::thread()] = simt::shuffle(v, (simt::lane() + 5) & (SIMT_WAVE - 1));
  flipped[simt::thread()] = simt::shuffle_xor(v, 3);
}
SIMT_KERNEL(from_half, const uint32_t* codes, float* out, int32_t n) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  if (i < n) out[i] = simt::half_to_float(static_cast<uint16_t>(codes[i]));
}
SIMT_KERNEL(to_half, const float* in, uint32_t* codes, int32_t n) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  if (i < n) codes[i] = simt::float_to_half(in[i]);
}
SIMT_KERNEL(rounded, const float* a, const float* b, const float* c, float* out, int32_t n) {
  const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
  if (i >= n) return;
  out[i] = a[i] * b[i] + c[i];
  out[n + i] = simt::fma(a[i], b[i], c[i]);
  out[2 * n + i] = a[i] / b[i];
  out[3 * n + i] = simt::sqrt(a[i]);
}
"""

Run = Callable[..., list[NDArray[Any]]]


@pytest.fixture(scope="module")
def run(device: Device) -> Iterator[Run]:
    """run(kernel, signature, grid, arguments): what each array among them holds afterwards."""
    code = device.compile(
        flatten("simt.h") + SOURCE,
        "simt.hip",
        [
            *(*OPTIONS, f"--offload-arch={device.architecture}", f"-DSIMT_BLOCK={BLOCK}"),
            *(f"-DSIMT_WAVE={WAVE}", f"-DCOLUMNS={COLUMNS}"),
        ],
    )
    module = Module(code, "simt.hip")

    def launch(
        name: str, signature: str, grid: tuple[int, int], *arguments: Any
    ) -> list[NDArray[Any]]:
        buffers: dict[int, Buffer] = {}
        for place, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                buffers[place] = Buffer(device, argument.nbytes, "test")
                buffers[place].upload(argument)
        given = [buffers.get(place, argument) for place, argument in enumerate(arguments)]
        Kernel(module, name, signature, BLOCK).launch(device.stream, grid, *given)
        result = []
        for place, buffer in buffers.items():
            like = arguments[place]
            result.append(buffer.download(like.shape, like.dtype))
            buffer.free()
        return result

    yield launch
    module.unload()


def _blocks(count: int) -> tuple[int, int]:
    return (-(-count // BLOCK), 1)


def test_every_thread_of_a_grid_runs_once(run: Run) -> None:
    (got,) = run("position", "P", (5, 3), np.full(15 * BLOCK, -1, dtype=np.int32))
    thread = np.arange(BLOCK)
    np.testing.assert_array_equal(got, np.tile(thread // WAVE * 1000 + thread % WAVE, 15))


def test_shared_memory_is_seen_after_a_barrier(run: Run) -> None:
    (got,) = run("shared_memory", "P", (7, 1), np.zeros(7 * BLOCK, dtype=np.int32))
    want = np.arange(7 * BLOCK).reshape(7, BLOCK)[:, ::-1]
    np.testing.assert_array_equal(got.reshape(7, BLOCK), want)


@pytest.mark.parametrize("count", [0, 1, COLUMNS - 1, COLUMNS])
def test_wave_sum_is_one_butterfly_bit_for_bit(count: int, run: Run) -> None:
    rng = np.random.default_rng(count)
    values = rng.standard_normal((BLOCK, COLUMNS)).astype(np.float32) * np.float32(1e3)
    values *= np.float32(10.0) ** rng.integers(-4, 4, values.shape).astype(np.float32)
    _, got = run("columns_sum", "PPi", (1, 1), values, np.zeros_like(values), count)
    tree = values.reshape(-1, WAVE, COLUMNS)
    offset = WAVE // 2
    while offset:
        tree = tree + tree[:, np.arange(WAVE) ^ offset]
        offset //= 2
    want = np.where(np.arange(COLUMNS) < count, tree.reshape(BLOCK, COLUMNS), values)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def _butterfly(values: NDArray[np.float32], high: int, low: int) -> NDArray[np.float32]:
    """(threads, columns) after the steps high, high / 2 .. low."""
    tree = values.reshape(-1, WAVE, values.shape[-1])
    while high >= low and high > 0:
        tree = tree + tree[:, np.arange(WAVE) ^ high]
        high //= 2
    return tree.reshape(values.shape)


def test_part_of_a_butterfly_leaves_the_other_columns(run: Run) -> None:
    values = np.random.default_rng(2).standard_normal((BLOCK, 3)).astype(np.float32)
    _, got = run("part_of_the_butterfly", "PP", (1, 1), values, np.zeros_like(values))
    want = np.where(np.arange(3) < 2, _butterfly(values, 16, 8), values)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(("columns", "lanes"), [(4, 8), (8, 2), (1, 32), (2, 1)])
def test_a_spread_sum_has_the_bits_of_the_butterfly(columns: int, lanes: int, run: Run) -> None:
    values = np.random.default_rng(columns).standard_normal((BLOCK, 8)).astype(np.float32)
    outs = (np.zeros_like(values), np.zeros(BLOCK, dtype=np.int32))
    _, got, first = run(f"spread_{columns}_of_{lanes}", "PPP", (1, 1), values, *outs)
    sums, kept = _butterfly(values, lanes // 2, 1), max(columns // lanes, 1)
    for thread in range(BLOCK):
        held = sums[thread, first[thread] : first[thread] + kept]
        assert len(held) == kept
        assert got[thread, :kept].tobytes() == held.tobytes(), thread
    # Every group of lanes holds every column.
    for group in first.reshape(-1, lanes):
        assert set(group) == set(range(0, columns, kept))


def test_a_spread_max_is_the_greatest_of_the_wave(run: Run) -> None:
    values = np.random.default_rng(6).standard_normal((BLOCK, 4)).astype(np.float32)
    outs = (np.zeros(BLOCK, dtype=np.float32), np.zeros(BLOCK, dtype=np.int32))
    _, got, first = run("spread_most", "PPP", (1, 1), values, *outs)
    greatest = values.reshape(-1, WAVE, 4).max(axis=1)
    for wave, column in enumerate(first.reshape(-1, WAVE)):
        assert set(column) == set(range(4))
        assert np.array_equal(got.reshape(-1, WAVE)[wave], greatest[wave, column])


def test_words_become_bytes_and_halves_exactly(run: Run) -> None:
    words = np.random.default_rng(4).integers(0, 2**32, 64 * BLOCK, dtype=np.uint32)
    words[:256] = np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    outs = (np.zeros(4 * words.size, np.float32), np.zeros(2 * words.size, np.float32))
    grid = (words.size // BLOCK, 1)
    more = (np.zeros_like(words), np.zeros(words.size, np.int32))
    _, signed, halves, again, dots = run("words", "PPPPP", grid, words, *outs, *more)
    np.testing.assert_array_equal(signed, words.view(np.int8).astype(np.float32))
    want = words.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(halves[numbers], want[numbers])
    assert np.isnan(halves[~numbers]).all()
    np.testing.assert_array_equal(again, words)
    bytes_of = words.view(np.int8).reshape(-1, 2, 4).astype(np.int64)
    products = (bytes_of * bytes_of[:, ::-1]).sum(axis=-1).reshape(-1)
    np.testing.assert_array_equal(dots, products - np.arange(words.size))


def test_wave_max_and_shuffles(run: Run) -> None:
    values = np.random.default_rng(3).standard_normal(BLOCK).astype(np.float32)
    outs = [np.zeros_like(values) for _ in range(3)]
    answer = run("wave_operations", "PPPP", (1, 1), values, *outs)
    maximum, rotated, flipped = (out.reshape(-1, WAVE) for out in answer[1:])
    by_wave, lanes = values.reshape(-1, WAVE), np.arange(WAVE)
    np.testing.assert_array_equal(maximum, np.broadcast_to(by_wave.max(1)[:, None], by_wave.shape))
    np.testing.assert_array_equal(rotated, by_wave[:, (lanes + 5) % WAVE])
    np.testing.assert_array_equal(flipped, by_wave[:, lanes ^ 3])


@pytest.mark.parametrize(
    ("values", "want"),
    [({7: np.nan}, np.nan), ({}, 0.0), ({0: np.nan, 31: np.inf}, np.nan), ({31: np.inf}, np.inf)],
)
def test_wave_max_keeps_nan_and_prefers_plus_zero(
    values: dict[int, float], want: float, run: Run
) -> None:
    lanes = np.where(np.arange(BLOCK) % 3 == 0, np.float32(0.0), np.float32(-0.0))
    for lane, value in values.items():
        lanes[lane] = value
    outs = [np.ones_like(lanes) for _ in range(3)]
    got = run("wave_operations", "PPPP", (1, 1), lanes, *outs)[1][:WAVE]
    np.testing.assert_array_equal(got, np.full(WAVE, want, dtype=np.float32))
    assert not np.signbit(got[~np.isnan(got)]).any()


def test_every_half_converts_as_in_numpy(run: Run) -> None:
    codes = np.arange(65536, dtype=np.uint32)
    out = np.zeros(65536, dtype=np.float32)
    got = run("from_half", "PPi", _blocks(65536), codes, out, 65536)[1]
    want = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])
    assert np.isnan(got[~numbers]).all()
    assert (~numbers).sum() == 2046


def test_floats_round_to_the_nearest_even_half(run: Run) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves + np.append(halves[1:], np.float32(65536.0))) / 2
    around = [np.nextafter(middles, np.float32(end)) for end in (np.inf, -np.inf)]
    anything = np.random.default_rng(11).integers(0, 2**32, 100_000, dtype=np.uint32)
    ends = np.array([np.inf], dtype=np.float32)
    values = np.concatenate([ends, halves, middles, *around, anything.view(np.float32)])
    values = np.concatenate([values, -values])
    codes = np.zeros(values.size, dtype=np.uint32)
    got = run("to_half", "PPi", _blocks(values.size), values, codes, values.size)[1]
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(np.float16)
    numbers = ~np.isnan(values)
    low = got.astype(np.uint16)
    np.testing.assert_array_equal(low[numbers], want.view(np.uint16)[numbers])
    assert np.isnan(low[~numbers].view(np.float16)).all()
    assert numbers.sum() > 250_000


def test_each_written_operation_rounds_once_and_only_fma_is_fused(run: Run) -> None:
    rng = np.random.default_rng(5)
    count = 10_000
    a, b = (rng.uniform(1, 2, count).astype(np.float32) for _ in range(2))
    c = -(a * b)  # leaves nothing but what the product's rounding lost
    tiny = np.float32(2.0**-126)
    a[:100] *= tiny  # products and roots of denormals, quotients that are denormal
    b[:50] *= np.float32(0.25)
    c[:100] = 0
    out = np.zeros(4 * count, dtype=np.float32)
    got = run("rounded", "PPPPi", _blocks(count), a, b, c, out, count)[3].reshape(4, count)
    fused = (a.astype(np.float64) * b + c).astype(np.float32)  # a product of floats is exact there
    want = np.stack([a * b + c, fused, a / b, np.sqrt(a)])
    assert (want[0] != want[1]).sum() > count // 2, "the data tell a fused operation apart"
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
