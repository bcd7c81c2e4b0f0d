"""The CPU runtime runs kernels right: launches, wave operations, shared memory, halves."""

import ctypes
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from suites.correctness.cpu_driver import (
    BLOCK,
    call,
    device_memory,
    download,
    kernel,
    launch,
    runtime,
    upload,
)

pytestmark = pytest.mark.usefixtures("cpu_session")


def test_add_through_extra_and_through_kernel_params() -> None:
    n = 3 * BLOCK - 7
    a = np.arange(n, dtype=np.float32)
    da, db = upload(a), upload(a[::-1].copy())
    packed, separate = device_memory(a.nbytes), device_memory(a.nbytes)
    launch(kernel("add"), (3, 1, 1), da, db, packed, ctypes.c_int32(n))
    values = [ctypes.c_void_p(int(p)) for p in (da, db, separate)] + [ctypes.c_int32(n)]
    addresses = (ctypes.c_void_p * 4)(*[ctypes.addressof(value) for value in values])
    hip = runtime().hip
    call(hip.hipModuleLaunchKernel(kernel("add"), 3, 1, 1, BLOCK, 1, 1, 0, None, addresses, None))
    for out in (packed, separate):
        np.testing.assert_array_equal(download(out, n, np.float32), np.full(n, n - 1))


def test_arguments_of_every_kind_arrive_at_their_offsets() -> None:
    out = device_memory(24)
    launch(
        *(kernel("mixed_arguments"), (2, 3, 1), ctypes.c_float(1.5)),
        *(ctypes.c_uint64(0x1122334455667788), out, ctypes.c_int32(-2)),
    )
    want = [0x3FC00000, 0x55667788, 0x11223344, 0xFFFFFFFE, 2, 3]
    assert download(out, 6, np.uint32).tolist() == want


@pytest.mark.parametrize(("block", "wave"), [(32, 32), (64, 64), (256, 32), (256, 64)])
def test_every_thread_of_a_three_dimensional_grid_runs_once(block: int, wave: int) -> None:
    grid = (5, 3, 2)
    out = device_memory(30 * block * 4)
    launch(kernel("position", block, wave), grid, out, block=block)
    got = download(out, (30, block // wave, wave), np.uint32)
    want = np.arange(block // wave)[:, None] * 1000 + np.arange(wave)[None, :]
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def test_stacks_have_the_alignment_that_compilers_assume() -> None:
    # Vector code faults or not by luck when it is off, so the address itself is looked at.
    out = device_memory(256 * 4)
    launch(kernel("stack_alignment", 256), (1, 1, 1), out, block=256)
    np.testing.assert_array_equal(download(out, 256, np.uint32), np.zeros(256))


def test_python_threads_launch_at_the_same_time() -> None:
    n = 20_000
    inputs = [np.full(n, i, dtype=np.float32) for i in range(4)]
    pointers = [upload(a) for a in inputs]
    outputs = [device_memory(n * 4) for _ in inputs]
    blocks = -(-n // BLOCK)

    def work(i: int) -> None:
        for _ in range(10):
            launch(
                kernel("add"),
                (blocks, 1, 1),
                pointers[i],
                pointers[i],
                outputs[i],
                ctypes.c_int32(n),
            )

    kernel("add")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in enumerate(outputs):
        np.testing.assert_array_equal(download(out, n, np.float32), np.full(n, 2 * i))


def butterfly(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """values (wave, lane, column): the sum over lanes by v = v + v[lane ^ offset]."""
    lanes = np.arange(values.shape[1])
    offset = len(lanes) // 2
    while offset:
        values = values + values[:, lanes ^ offset]
        offset //= 2
    return values


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("columns", [1, 2, 39, 40, 64])
def test_wave_sum_has_the_bits_of_a_butterfly(columns: int, wave: int) -> None:
    rng = np.random.default_rng([columns, wave])
    values = rng.standard_normal((128, 64)) * 2.0 ** rng.integers(-12, 12, (128, 64))
    values = values.astype(np.float32)
    out = device_memory(values.nbytes)
    launch(
        *(kernel("columns_sum", 128, wave), (1, 1, 1), upload(values), out),
        ctypes.c_int32(columns),
        block=128,
    )
    got = download(out, (128 // wave, wave, 64), np.float32)[..., :columns]
    by_wave = values.reshape(128 // wave, wave, 64)[..., :columns]
    np.testing.assert_array_equal(got.view(np.uint32), butterfly(by_wave).view(np.uint32))
    in_order = np.zeros_like(by_wave[:, 0])
    for lane in range(wave):
        in_order = in_order + by_wave[:, lane]
    # The data tell orders apart, or equality above would say nothing. One column may agree by luck.
    assert columns < 39 or (in_order != got[:, 0]).any()


@pytest.mark.parametrize("wave", [32, 64])
def test_wave_max_and_shuffles(wave: int) -> None:
    values = np.random.default_rng(3).standard_normal(BLOCK).astype(np.float32)
    outs = [device_memory(values.nbytes) for _ in range(3)]
    launch(kernel("wave_operations", BLOCK, wave), (1, 1, 1), upload(values), *outs)
    shape = (BLOCK // wave, wave)
    maximum, rotated, flipped = (download(out, shape, np.float32) for out in outs)
    by_wave = values.reshape(-1, wave)
    lanes = np.arange(wave)
    np.testing.assert_array_equal(maximum, np.broadcast_to(by_wave.max(1)[:, None], by_wave.shape))
    np.testing.assert_array_equal(rotated, by_wave[:, (lanes + 5) % wave])
    np.testing.assert_array_equal(flipped, by_wave[:, lanes ^ 3])


@pytest.mark.parametrize(
    ("values", "want"),
    [({7: np.nan}, np.nan), ({}, 0.0), ({0: np.nan, 31: np.inf}, np.nan), ({31: np.inf}, np.inf)],
)
def test_wave_max_keeps_nan_and_prefers_plus_zero(values: dict[int, float], want: float) -> None:
    lanes = np.where(np.arange(BLOCK) % 3 == 0, np.float32(0.0), np.float32(-0.0))
    for lane, value in values.items():
        lanes[lane] = value
    outs = [device_memory(lanes.nbytes) for _ in range(3)]
    launch(kernel("wave_operations"), (1, 1, 1), upload(lanes), *outs)
    got = download(outs[0], BLOCK, np.float32)[:32]
    expected = np.full(32, want, dtype=np.float32)
    np.testing.assert_array_equal(got, expected)
    assert not np.signbit(got[~np.isnan(got)]).any()


def test_shared_memory_is_poisoned_in_every_block() -> None:
    blocks = 7
    fresh, turned = device_memory(blocks * BLOCK * 4), device_memory(blocks * BLOCK * 4)
    launch(kernel("shared_memory"), (blocks, 1, 1), fresh, turned)
    got = download(fresh, blocks * BLOCK, np.uint32)
    np.testing.assert_array_equal(got, np.full(blocks * BLOCK, 0xFFFFFFFF))
    want = np.arange(blocks * BLOCK).reshape(blocks, BLOCK)[:, ::-1]
    np.testing.assert_array_equal(download(turned, (blocks, BLOCK), np.uint32), want)


BOTH_CONVERSIONS = pytest.mark.parametrize(
    "options", [(), ("-DSIMT_CPU_PORTABLE_HALF=1",)], ids=["machine", "portable"]
)


@BOTH_CONVERSIONS
def test_every_half_converts_as_in_numpy(options: tuple[str, ...]) -> None:
    codes = np.arange(65536, dtype=np.uint32)
    out = device_memory(codes.nbytes)
    launch(kernel("from_half", BLOCK, 32, *options), (65536 // BLOCK, 1, 1), upload(codes), out)
    got = download(out, 65536, np.float32)
    want = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])
    assert np.isnan(got[~numbers]).all()
    assert (~numbers).sum() == 2046


@BOTH_CONVERSIONS
def test_floats_round_to_the_nearest_even_half(options: tuple[str, ...]) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves + np.append(halves[1:], np.float32(65536.0))) / 2
    rng = np.random.default_rng(11)
    anything = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    up, down = np.float32(np.inf), np.float32(-np.inf)
    positive = np.concatenate(
        [
            np.array([np.inf], dtype=np.float32),
            halves,
            middles,
            np.nextafter(middles, up),
            np.nextafter(middles, down),
            anything,
        ]
    )
    values = np.concatenate([positive, -positive])
    assert values.dtype == np.float32
    out = device_memory(values.nbytes)
    blocks = -(-values.size // BLOCK)
    launch(
        *(kernel("to_half", BLOCK, 32, *options), (blocks, 1, 1)),
        *(upload(values), out, ctypes.c_int32(values.size)),
    )
    got = download(out, values.size, np.uint32).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(np.float16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(got[numbers], want.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers].view(np.float16)).all()
    assert numbers.sum() > 250_000
