"""Random models of published geometry, and the reference's choice between kept and streamed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fixtures.geometry import QWEN3_8B, Geometry, build, main, more_bits, tensors
from reference import dense
from reference.dense import DenseCache, dense_nbytes
from reference.dequant import dequantise
from reference.forward import Reference
from reference.model import Model, load_model
from reference.model.errors import InputError
from suites.harness.compare import same_bits
from suites.parity.tolerances import require_agreement

SMALL = Geometry("small", 9, 256, 512, 4, 2, 64, 400, 512)
TOKENS = list(range(5, 22))  # 17


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(build(SMALL, tmp_path_factory.mktemp("geometry") / "small.gguf"))


def test_the_mix_is_q4_k_m() -> None:
    """Qwen3-8B: blocks 0-3 and 32-35 and every third between have heavy attn_v and ffn_down."""
    formats = {name: form for name, _, form in tensors(QWEN3_8B)}
    heavy = [i for i in range(36) if formats[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert heavy == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert heavy == [i for i in range(36) if formats[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert heavy == [i for i in range(36) if more_bits(i, 36)]
    assert formats["output.weight"] == "Q6_K"
    assert formats["token_embd.weight"] == formats["blk.0.attn_q.weight"] == "Q4_K"


def test_a_built_file_is_what_the_table_says(small: Model) -> None:
    stored = {info.name: (info.shape, info.format.name) for info in small.file.tensors.values()}
    assert stored == {name: (shape, form) for name, shape, form in tensors(SMALL)}
    assert small.spec.layer_count == SMALL.layers
    assert small.tokenizer.encode("hello")


def test_the_same_geometry_gives_the_same_bytes(small: Model, tmp_path: Path) -> None:
    again = build(SMALL, tmp_path / "again.gguf")
    assert again.read_bytes() == small.file.path.read_bytes()
    other = build(replace(SMALL, seed=1), tmp_path / "other.gguf")
    assert other.read_bytes() != again.read_bytes()


def test_values_are_centred_with_the_spread_of_a_trained_matrix(small: Model) -> None:
    """A quarter of the spread is far more than the mean of 10^5 values strays."""
    checked = 0
    for layer in small.weights.layers:
        for role in ("attn_q", "ffn_down"):
            tensor = layer[role]
            values = dequantise(tensor.format, tensor.raw)
            wanted = 1 / np.sqrt(tensor.shape[1])
            assert 0.75 * wanted < values.std() < 1.25 * wanted
            assert abs(values.mean()) < 0.25 * wanted
            checked += 1
    assert checked == 2 * SMALL.layers


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(InputError, match="GiB left, expected at least"):
        build(SMALL, tmp_path / "x.gguf")
    assert main([str(tmp_path / "x.gguf")]) == 2
    assert not list(tmp_path.iterdir())


# --- kept or streamed ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_streamed_weights_give_the_logits_of_kept_ones(
    small: Model, dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "STREAM_ELEMENTS", 3 * 256)  # three rows a block: cut everywhere
    cache: DenseCache = {}
    kept = Reference(small, dtype=dtype, dense=cache)
    left: DenseCache = {}
    streamed = Reference(small, dtype=dtype, dense=left, dense_budget_nbytes=0)
    assert (kept.weights_mode, streamed.weights_mode) == ("kept", "streamed")
    want, got = kept.prefill(TOKENS, logits="all"), streamed.prefill(TOKENS, logits="all")
    assert np.ptp(want) > 1
    row = "model_float32" if dtype is np.float32 else "model_float64"
    require_agreement(got, want, row, share_of="range")
    assert len(cache) == len(small.weights.matrices())
    assert not left


def test_streamed_experts_are_not_kept(load: Callable[[str], Model]) -> None:
    model = load("tiny-qwen3moe")
    cache: DenseCache = {}
    streamed = Reference(model, dense=cache, dense_budget_nbytes=0)
    want = Reference(model).prefill(TOKENS)
    require_agreement(streamed.prefill(TOKENS), want, "model_float32", share_of="range")
    assert streamed.weights_mode == "streamed"
    assert not cache


def test_the_budget_decides(small: Model) -> None:
    need = dense_nbytes(small.weights)
    shapes = [shape for name, shape, _ in tensors(SMALL) if len(shape) == 2]
    embedding = 4 * SMALL.vocab_size * SMALL.embedding_length  # only rows of it are read
    assert need == sum(4 * rows * columns for rows, columns in shapes) - embedding
    assert Reference(small, dense_budget_nbytes=need).weights_mode == "kept"
    assert Reference(small, dense_budget_nbytes=need - 1).weights_mode == "streamed"


def test_what_is_kept_already_counts_and_is_used(small: Model) -> None:
    cache: DenseCache = {}
    Reference(small, dense=cache).prefill(TOKENS)
    again = Reference(small, dense=cache, dense_budget_nbytes=0)
    assert again.weights_mode == "kept"
    held = cache.pop("output.weight")
    streamed = Reference(small, dense=cache, dense_budget_nbytes=held.nbytes - 1)
    assert streamed.weights_mode == "streamed"
    cache["blk.0.attn_q.weight"] = np.zeros_like(cache["blk.0.attn_q.weight"])
    changed = streamed.prefill(TOKENS)
    assert not same_bits(changed, Reference(small).prefill(TOKENS))
    assert "output.weight" not in cache


def test_available_memory_is_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Model
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   7 kB\n", encoding="ascii")
    monkeypatch.setattr(dense, "_MEMINFO", meminfo)
    assert dense.available_memory_nbytes() == 7 * 1024
    assert Reference(small).weights_mode == "streamed"
    monkeypatch.setattr(dense, "_MEMINFO", tmp_path / "none")
    assert dense.available_memory_nbytes() > 2**20
    monkeypatch.delattr("os.sysconf")
    with pytest.raises(InputError, match="expected a dense budget"):
        Reference(small)


def test_a_negative_budget_is_refused(small: Model) -> None:
    with pytest.raises(InputError, match="expected >= 0"):
        Reference(small, dense_budget_nbytes=-1)
