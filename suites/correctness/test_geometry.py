"""Random models of published geometry, and the reference's choice between kept and streamed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from backend_hip.device import Device
from fixtures import geometry
from fixtures.geometry import build, tensor_nbytes
from fixtures.geometry_table import (
    GEMMA4_31B,
    GEOMETRIES,
    QWEN3_8B,
    QWEN36_35B_A3B,
    first_layers,
    geometry_case,
)
from fixtures.q4_k_m import formats, more_bits
from fixtures.random_blocks import random_blocks
from fixtures.registry import is_large, is_registered, model_names, resolve_model
from fixtures.tiny_case import MIX, TinyCase, TinyDeltaNet, TinyExperts, TinySliding
from reference import dense
from reference.dense import DenseCache, dense_nbytes
from reference.dequant import dequantise
from reference.forward import Reference
from reference.model import Model, load_model
from reference.model.errors import InputError, Unsupported
from reference.model.quant import FORMATS
from suites import cli
from suites.harness.compare import same_bits
from suites.parity.tolerances import require_agreement

# The published geometries with short rows: the same code paths, formats and kinds of layers.
SMALL = TinyCase(
    "small", "qwen3", MIX, 2025, 9, 256, 4, 2, 64, 512, tied=False, vocab_size=400,
    context_length=512, pre="qwen2",
)  # fmt: skip
MINIATURES = {
    QWEN3_8B.id: replace(first_layers(QWEN3_8B, 2), embedding_length=256, heads=4, kv_heads=2,
                         feed_forward_length=512, vocab_size=400, context_length=512),
    QWEN36_35B_A3B.id: replace(first_layers(QWEN36_35B_A3B, 2), embedding_length=256, heads=4,
                               head_size=64, rope=replace(QWEN36_35B_A3B.rope, dimensions=16),
                               vocab_size=400, context_length=512,
                               experts=TinyExperts(8, 3, 256, shared_length=256),
                               delta_net=TinyDeltaNet(64, 2, 4, interval=2)),
    GEMMA4_31B.id: replace(first_layers(GEMMA4_31B, 2), embedding_length=256, heads=4,
                           kv_heads=(4, 1), head_size=128, feed_forward_length=512,
                           vocab_size=400, context_length=512, sliding_window=16,
                           sliding=TinySliding((True, False), 64, raw_key_values=True)),
}  # fmt: skip
TOKENS = list(range(5, 22))  # 17


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(build(SMALL, tmp_path_factory.mktemp("geometry") / "small.gguf"))


@pytest.fixture(scope="module", params=MINIATURES)
def miniature(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyCase, Path]:
    case = MINIATURES[request.param]
    return case, build(case, tmp_path_factory.mktemp("miniature") / f"{case.id}.gguf")


# --- the table ----------------------------------------------------------------------------------


def test_the_mix_is_q4_k_m() -> None:
    """Qwen3-8B: blocks 0-3 and 31-35 and every third between have heavy attn_v and ffn_down."""
    stored = {tensor.name: form for tensor, form in formats(QWEN3_8B)}
    heavy = [i for i in range(36) if stored[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert heavy == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert heavy == [i for i in range(36) if stored[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert heavy == [i for i in range(36) if more_bits(i, 36)]
    assert stored["output.weight"] == "Q6_K"
    assert stored["token_embd.weight"] == stored["blk.0.attn_q.weight"] == "Q4_K"
    assert stored["blk.0.attn_norm.weight"] == "F32"


def test_the_mix_counts_attn_v_through() -> None:
    """Gemma 4's full layers have none, so its 50 are counted; Qwen3.6 has 10 beside 30 fused."""
    gemma = {tensor.name: form for tensor, form in formats(GEMMA4_31B)}
    values = [form for name, form in gemma.items() if name.endswith("attn_v.weight")]
    assert [form == "Q6_K" for form in values] == [more_bits(i, 50) for i in range(50)]
    assert gemma["token_embd.weight"] == "Q6_K"
    qwen = {tensor.name: form for tensor, form in formats(QWEN36_35B_A3B)}
    values = [form for name, form in qwen.items() if name.endswith("attn_v.weight")]
    assert [form == "Q6_K" for form in values] == [more_bits(i, 40) for i in range(10)]
    assert qwen["blk.0.attn_qkv.weight"] == "Q5_K"
    assert qwen["blk.0.ffn_gate_inp.weight"] == qwen["blk.0.ssm_conv1d.weight"] == "F32"
    assert qwen["blk.0.ffn_down_exps.weight"] == "Q6_K"


def test_sizes_in_gib() -> None:
    """Of the tensors; Qwen3-8B in Q4_K_M is known to have 4.68."""
    sizes = {
        name: sum(tensor_nbytes(*entry) for entry in formats(case)) / 2**30
        for name, case in GEOMETRIES.items()
    }
    assert {name: f"{size:.2f}" for name, size in sizes.items()} == {
        QWEN3_8B.id: "4.68",
        QWEN36_35B_A3B.id: "19.71",
        GEMMA4_31B.id: "17.39",
    }


def test_names_and_cuts() -> None:
    assert geometry_case("geometry-qwen3-8b") is QWEN3_8B
    cut = geometry_case("geometry-gemma4-31b-12l")
    assert cut is not None
    assert cut.layers == len(cut.kv_heads) == len(cut.sliding.layers) == 12  # type: ignore[union-attr,arg-type]
    assert len(list(formats(cut))) < len(list(formats(GEMMA4_31B)))
    assert geometry_case("geometry-qwen3-9b") is None
    assert geometry_case("tiny-qwen3") is None
    assert is_registered("geometry-qwen3-8b-1l")
    assert is_large("geometry-qwen3-8b-1l")
    assert not set(GEOMETRIES) & set(model_names())
    for layers in (0, 37):
        with pytest.raises(InputError, match="expected 1 to 36"):
            geometry_case(f"geometry-qwen3-8b-{layers}l")


# --- files --------------------------------------------------------------------------------------


def test_a_built_file_is_what_the_table_says(miniature: tuple[TinyCase, Path]) -> None:
    case, path = miniature
    model = load_model(path)
    stored = {info.name: (info.shape, info.format.name) for info in model.file.tensors.values()}
    assert stored == {tensor.name: (tensor.shape, form) for tensor, form in formats(case)}
    assert model.spec.layer_count == case.layers
    assert model.tokenizer.encode("hello")
    read = gguf.GGUFReader(path)
    assert {tensor.name for tensor in read.tensors} == set(stored)
    for tensor in read.tensors:
        assert tensor.data.tobytes() == model.file.raw(tensor.name).tobytes()


def test_the_engine_agrees_with_the_reference(
    miniature: tuple[TinyCase, Path], tmp_path: Path, device: Device
) -> None:
    """The whole verdict on the session's device; 17 tokens are two flows."""
    record = tmp_path / "verdict.json"
    options = {"--tokens": ",".join(map(str, TOKENS)), "--device": device.runtime.kind}
    options |= {"--max-cols": "16", "--json": str(record)}
    arguments = [word for pair in options.items() for word in pair]
    assert cli.main(["validate", str(miniature[1]), *arguments]) == 0
    assert record.is_file()


def test_logits_are_numbers_that_differ(miniature: tuple[TinyCase, Path]) -> None:
    logits = Reference(load_model(miniature[1])).prefill(TOKENS, logits="all")
    assert np.isfinite(logits).all()
    assert (np.ptp(logits, axis=1) > 1).all()


def test_the_same_geometry_gives_the_same_bytes(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "MAX_THREADS", 1)
    again = build(SMALL, tmp_path / "again.gguf")
    assert again.read_bytes() == small.file.path.read_bytes()
    other = build(replace(SMALL, seed=1), tmp_path / "other.gguf")
    assert other.read_bytes() != again.read_bytes()


def test_pieces_cover_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut everywhere: no byte between the tensors' ends is left as the disk gave it."""
    monkeypatch.setattr(geometry, "PIECE_BLOCKS", 3)
    model = load_model(build(SMALL, tmp_path / "cut.gguf"))
    checked = 0
    for tensor in model.weights.matrices():
        blocks = tensor.raw.reshape(-1).view(FORMATS[tensor.format.name].dtype)
        assert (blocks["d"] > 0).all()
        checked += len(blocks)
    assert checked > 1000


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    lines: list[str] = []
    path = build(SMALL, tmp_path / "x.gguf", progress=lines.append)
    whole = path.stat().st_size // 2**20
    assert lines[-1] == f"writing small, {whole} of {whole} MiB"


@pytest.mark.parametrize("form", ["Q4_K", "Q5_K", "Q6_K"])
def test_values_have_the_spread_that_was_asked_for(form: str) -> None:
    """A tenth is far more than the spread of 10^6 values strays, and less than any wrong field."""
    rng = np.random.Generator(np.random.PCG64(7))
    for wanted in (1 / np.sqrt(21504), 0.5):
        raw = random_blocks(rng, form, 4096, wanted)
        values = dequantise(FORMATS[form], raw.reshape(1, -1))
        assert 0.9 * wanted < values.std() < 1.1 * wanted
        assert abs(values.mean()) < 0.1 * wanted
        assert len(np.unique(raw.view(FORMATS[form].dtype)["d"])) > 10


def test_a_format_without_a_rule_is_refused() -> None:
    with pytest.raises(Unsupported, match="format is Q8_0; supported: Q4_K"):
        random_blocks(np.random.default_rng(1), "Q8_0", 1, 1.0)
    with pytest.raises(Unsupported, match="multiples of 256"):
        list(formats(replace(SMALL, embedding_length=320)))


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(InputError, match="GiB left, expected at least"):
        build(SMALL, tmp_path / "x.gguf")
    assert cli.main(["geometry", "qwen3-8b", "--out", str(tmp_path / "x.gguf")]) == 2
    assert not list(tmp_path.iterdir())


# --- names and command --------------------------------------------------------------------------


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Qwen3-8B's name means its miniature, and the cache is empty."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    small = {name: replace(case, id=name) for name, case in MINIATURES.items()}
    monkeypatch.setattr("fixtures.geometry_table.GEOMETRIES", small)
    monkeypatch.setattr("suites.commands.geometry.GEOMETRIES", small)
    return tmp_path / "models"


def test_a_name_is_built_once_into_the_cache(shrunk: Path) -> None:
    shrunk.mkdir()
    old = shrunk / f"geometry-qwen3-8b-{'0' * 16}.gguf"
    other = shrunk / f"geometry-qwen3-8b-1l-{'0' * 16}.gguf"
    old.touch()
    other.touch()
    path = resolve_model("geometry-qwen3-8b")
    assert sorted(shrunk.iterdir()) == sorted([path, other])  # no superseded file of that name
    written = path.stat().st_mtime_ns
    assert resolve_model("geometry-qwen3-8b") == path
    assert path.stat().st_mtime_ns == written
    assert load_model(resolve_model("geometry-qwen3-8b-1l")).spec.layer_count == 1


def test_the_command_writes_what_it_says(
    shrunk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    arguments = ["geometry", "qwen3-8b", "--out", str(out), "--layers", "1", "--seed", "3"]
    assert cli.main([*arguments, "--json", str(tmp_path / "facts.json")]) == 0
    assert f"{out}: " in capsys.readouterr().out
    assert (tmp_path / "facts.json").is_file()
    assert load_model(out).spec.layer_count == 1
    assert cli.main(["geometry"]) == 0
    assert "gemma4-31b" in capsys.readouterr().out
    assert cli.main(["geometry", "qwen3-8b", "--layers", "1"]) == 0
    assert str(shrunk) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("llama-7b",), "name is 'llama-7b', expected one of"),
        (("qwen3-8b", "--layers", "0"), "layers is 0, expected 1 to 36"),
        (("qwen3-8b", "--layers", "37"), "layers is 37"),
        (("qwen3-8b", "--seed", "5"), "--seed is 5, expected --out too"),
        (("qwen3-8b", "--seed", "-1", "--out", "x"), "--seed is -1"),
        (("qwen3-8b", "--out", "no/where.gguf"), "a folder that exists"),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["geometry", *arguments]) == 2
    assert text in capsys.readouterr().err


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
    shapes = [tensor.shape for tensor, _ in formats(SMALL) if len(tensor.shape) == 2]
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
