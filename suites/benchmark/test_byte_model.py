"""The byte and FLOP model against figures worked out by hand, and the measured limits' kernels."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backend_hip import Device
from backend_hip.bandwidth import GRAIN_NBYTES, Bandwidth
from backend_hip.matrix_rate import MatrixLoop
from backend_hip.wave import WAVE
from fixtures.geometry import build_shapes
from fixtures.geometry_table import GEMMA4_31B, QWEN3_8B, QWEN36_35B_A3B
from reference.model import Model, load_model
from reference.model.errors import InputError
from suites.benchmark.byte_model import (
    flow_weight_bytes,
    kv_nbytes_per_token,
    prefill_flops,
    state_nbytes,
    step_bytes,
    touched_experts,
)
from suites.benchmark.limits import CPU_NBYTES, MeasuredLimits, measure_limits
from suites.benchmark.load_speed import read_alone


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A published geometry without its weights; two of them with a short vocabulary, for speed."""
    folder = tmp_path_factory.mktemp("shapes")
    cases = {
        "qwen3": QWEN3_8B,
        "qwen3.6": replace(QWEN36_35B_A3B, vocab_size=400),
        "gemma4": replace(GEMMA4_31B, vocab_size=400),
    }

    def load(name: str) -> Model:
        path = Path(folder / f"{name}.gguf")
        return load_model(path if path.is_file() else build_shapes(cases[name], path))

    return load


def test_kv_bytes_of_a_token(shapes: Callable[[str], Model]) -> None:
    """Qwen3-8B: 36 layers x 2 x 8 heads x 128 values; q8_0 stores 32 values in 34 bytes."""
    spec = shapes("qwen3").spec
    assert kv_nbytes_per_token(spec, "f16", "f16") == 36 * 2 * 8 * 128 * 2 == 147_456
    assert kv_nbytes_per_token(spec, "q8_0", "q8_0") == 36 * 2 * 8 * 128 // 32 * 34 == 78_336
    assert kv_nbytes_per_token(spec, "f32", "f16") == 147_456 * 3 // 2
    # 10 of 40 layers attend, 2 heads of 256.
    assert kv_nbytes_per_token(shapes("qwen3.6").spec, "f16", "f16") == 10 * 2 * 2 * 256 * 2
    # 50 layers of 16 heads x 256 and 10 of 4 x 512.
    gemma = 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert kv_nbytes_per_token(shapes("gemma4").spec, "f16", "f16") == gemma


def test_states_of_a_sequence(shapes: Callable[[str], Model]) -> None:
    """30 delta nets: 32 heads of 128 x 128, and 3 earlier tokens of 8,192 channels."""
    assert state_nbytes(shapes("qwen3.6").spec) == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert state_nbytes(shapes("qwen3").spec) == 0


def test_experts_that_a_batch_touches() -> None:
    """256 experts, 8 chosen: about 8, 57 and 102 different ones at 1, 8 and 16 tokens."""
    assert [round(touched_experts(256, 8, tokens)) for tokens in (1, 8, 16)] == [8, 57, 102]
    assert touched_experts(8, 8, 1) == 8


def test_a_step_reads_each_weight_once(shapes: Callable[[str], Model]) -> None:
    model = shapes("qwen3")
    one, eight = (step_bytes(model, [2048] * batch, "f16", "f16") for batch in (1, 8))
    # All but the embedding table, of which a row of 2,304 bytes is read for each sequence.
    stored = sum(info.nbytes for info in model.file.tensors.values())
    table = model.file.tensors["token_embd.weight"].nbytes
    assert sum(one.weights.values()) == stored - table + 2304
    assert sum(eight.weights.values()) == stored - table + 8 * 2304
    assert (one.kv_read, eight.kv_read) == (2048 * 147_456, 8 * 2048 * 147_456)
    assert (one.kv_written, eight.kv_written) == (147_456, 8 * 147_456)
    assert one.states == 0
    assert one.seconds(1e9) == one.total / 1e9
    # At 4.3 TB/s: about 5,000 tokens a second for 8 sequences at 2,048, as the plan says.
    assert 4_700 < 8 / eight.seconds(4.3e12) < 5_100


def test_quantised_kv_lifts_the_limit(shapes: Callable[[str], Model]) -> None:
    """8 sequences of 6,900 tokens: 12.8 GB with f16 and 9.0 with q8_0."""
    model, contexts = shapes("qwen3"), [6900] * 8
    f16, q8 = (step_bytes(model, contexts, kind, kind).total for kind in ("f16", "q8_0"))
    assert round(f16 / q8, 2) == 1.42


def test_windows_bound_what_is_read(shapes: Callable[[str], Model]) -> None:
    model = shapes("gemma4")
    at = [step_bytes(model, [context], "f16", "f16").kv_read for context in (1024, 1025, 4096)]
    full = 10 * 4 * 512 * 2 * 2
    assert (at[1] - at[0], at[2] - at[0]) == (full, 3072 * full)


def test_experts_and_states_of_a_step(shapes: Callable[[str], Model]) -> None:
    model = shapes("qwen3.6")
    one, sixteen = (step_bytes(model, [0] * batch, "f16", "f16") for batch in (1, 16))
    stored = model.weights.layers[0]["ffn_up_exps"].raw.nbytes * 40
    ratio = sixteen.weights["ffn_up_exps"] / one.weights["ffn_up_exps"]
    assert round(one.weights["ffn_up_exps"]) == stored * 8 // 256
    assert f"{ratio:.1f}" == "12.7"
    assert sixteen.states == 16 * 2 * state_nbytes(model.spec)
    assert flow_weight_bytes(model, 16) < sum(sixteen.weights.values())


def test_flops_of_a_prompt(shapes: Callable[[str], Model]) -> None:
    """Qwen3-8B has 6.95e9 weights in its layers; attention and the head are small beside it."""
    model = shapes("qwen3")
    weights = 36 * (4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 12288)
    head = 2 * 151_936 * 4096
    assert prefill_flops(model, 1) == 2 * weights + 36 * 4 * 32 * 128 + head
    pairs = 658 * 659 // 2
    assert prefill_flops(model, 658) == 658 * 2 * weights + 36 * 4 * 32 * 128 * pairs + head


def test_flops_of_windows_and_experts(shapes: Callable[[str], Model]) -> None:
    gemma, qwen = shapes("gemma4"), shapes("qwen3.6")
    steps = [prefill_flops(gemma, count) for count in (1024, 1025, 1026)]
    # Beyond the window a token costs the sliding layers the same as the one before.
    more = (steps[2] - steps[1]) - (steps[1] - steps[0])
    assert more == 10 * 4 * 32 * 512
    per_token = prefill_flops(qwen, 2) - prefill_flops(qwen, 1)
    # About 3e9 weights are active, as the model's name says; the head is read once a prompt.
    assert 2 * 2.4e9 < per_token < 2 * 3.3e9


# --- measured limits ----------------------------------------------------------------------------


def test_the_copy_copies_and_the_read_reads(device: Device) -> None:
    rng = np.random.Generator(np.random.PCG64(4))
    words = rng.integers(0, 2**32, 3 * GRAIN_NBYTES // 4, dtype=np.uint32)
    with closing(Bandwidth(device, words.nbytes)) as bandwidth:
        bandwidth.source.upload(words)
        bandwidth.target.poison()
        bandwidth.copy()
        bandwidth.read()
        assert np.array_equal(bandwidth.target.download(words.shape, np.uint32), words)
        assert np.bitwise_xor.reduce(bandwidth.sums()) == np.bitwise_xor.reduce(words)
        assert (bandwidth.copied_nbytes, bandwidth.read_nbytes) == (2 * words.nbytes, words.nbytes)
    with pytest.raises(InputError, match="expected a multiple of"):
        Bandwidth(device, GRAIN_NBYTES + 16)


def test_the_matrix_loop_multiplies(device: Device) -> None:
    """Chain c's results are all rounds * 7.5 * (1 + c), kernels/matrix_rate.hip."""
    with closing(MatrixLoop(device, 3)) as loop:
        loop.run()
        sums = loop.sums()
        results = 16 * 16 // WAVE
        assert np.array_equal(sums, np.full_like(sums, results * 3 * 7.5 * sum(range(1, 9))))
        assert loop.flops == sums.size // WAVE * 3 * 8 * 2 * 16**3


def test_limits_are_measured(device: Device) -> None:
    limits = measure_limits(device, nbytes=GRAIN_NBYTES, rounds=2)
    assert limits.runtime == device.label
    assert limits.copy_bytes_per_s > 0
    assert limits.read_bytes_per_s > 0
    assert limits.matrix_flops_per_s is not None
    assert limits.matrix_flops_per_s > 0
    assert CPU_NBYTES % GRAIN_NBYTES == 0
    with pytest.raises(InputError, match="rounds is 0"):
        measure_limits(device, nbytes=GRAIN_NBYTES, rounds=0)


def test_stored_limits() -> None:
    limits = MeasuredLimits("emulated", "a card", 2.0e9, 3.0e9, None, 64)
    assert limits.stored()["read_bytes_per_s"] == 3.0e9
    assert "3.0 GB/s" in limits.line()
    assert "not measured" in limits.line()


def test_reading_alone_reads_every_tensor(load: Callable[[str], Model]) -> None:
    model = load("tiny-llama-fused")
    report = read_alone(model)
    assert report.nbytes == sum(info.nbytes for info in model.file.tensors.values())
    assert report.elapsed_s > 0
    assert "file read alone: " in str(report)
