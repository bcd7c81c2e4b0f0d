"""Tiny models and the registry: what the other tests stand on."""

import hashlib
import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from fixtures import registry
from fixtures.golden import GATE, PUBLISHED, TINY_GATES, published_model
from fixtures.registry import PublishedFile, model_names, published_files, resolve_model
from fixtures.tiny import FORMAT_NAMES, MIX, TINY, build_tiny
from fixtures.tiny_metadata import add_metadata, add_vocabulary
from reference.dequant import dequantise
from reference.forward import Reference
from reference.model import load_model
from reference.model.architectures import ARCHITECTURES
from reference.model.errors import InputError
from reference.model.gguf import GGUFFile, read_gguf
from reference.model.quant import FORMATS

IN_EVERY_FORMAT = ("llama", "qwen3", "gemma3")
IN_FOUR_FORMATS = (
    *("qwen2", "qwen3moe", "gemma4", "gemma4e", "gemma4moe"),
    *("qwen35", "qwen35moe"),
)
EVERY_TINY = pytest.mark.parametrize("model", TINY)
MEGABYTE = 2**20


def _values(file: GGUFFile, name: str) -> np.ndarray:
    return dequantise(file.tensors[name].format, file.raw(name))


def test_ids_cover_shapes_and_formats() -> None:
    every = ["", *(f"-{name.lower()}" for name in FORMAT_NAMES)]
    four = ["", "-q8_0", "-q4_k", "-q6_k"]
    want = [f"tiny-{shape}{end}" for shape in IN_EVERY_FORMAT for end in every]
    want += [f"tiny-{shape}{end}" for shape in IN_FOUR_FORMATS for end in four]
    assert [*TINY][: len(want)] == want
    assert {case.architecture for case in TINY.values()} == set(ARCHITECTURES)
    assert all(case.id == name for name, case in TINY.items())
    assert len({case.seed for case in TINY.values()}) == len(TINY)
    assert TINY["tiny-llama"].seed == 0x83376619, "seeds depend on names alone"
    assert set(FORMATS) - set(FORMAT_NAMES) == {"Q2_K", "Q3_K"}


@EVERY_TINY
def test_same_case_same_bytes(model: str, tmp_path: Path) -> None:
    case = TINY[model]
    one = build_tiny(case, tmp_path / "one.gguf").read_bytes()
    assert one == build_tiny(case, tmp_path / "two.gguf").read_bytes()
    assert (
        one != build_tiny(replace(case, seed=case.seed + 1), tmp_path / "three.gguf").read_bytes()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.gguf",
        "three.gguf",
        "two.gguf",
    ]


@EVERY_TINY
def test_tiny_models_are_small_and_hold_what_they_say(model: str) -> None:
    case, path = TINY[model], resolve_model(model)
    long_experts = case.experts is not None and case.experts.length == 256
    rows = 9 if case.embedding_length > 2048 else 1  # of times as many elements as others'
    largest = 2.25 if long_experts or case.ffn_length_of(0) > 2048 else 1.25
    assert path.stat().st_size < max(largest, rows / 2) * MEGABYTE
    loaded = load_model(path)
    spec, file = loaded.spec, loaded.file
    assert (spec.architecture, spec.layer_count) == (case.architecture, case.layers)
    assert spec.skipped_blocks == case.prediction_blocks
    assert (spec.embedding_length, spec.vocab_size) == (case.embedding_length, case.vocab_size)
    assert ("output.weight" in file.tensors) != case.tied
    assert ("rope_freqs.weight" in file.tensors) == case.rope.factors
    for layer in spec.layers:
        i = layer.index
        assert (layer.head_count, layer.head_count_kv) == (case.heads, case.kv_heads_of(i))
        assert layer.head_size == case.head_size_of(i)
        assert layer.window == (case.sliding_window if case.slides(i) else None)
        assert layer.owns_kv == (case.owns_kv(i) and not case.recurrent(i))
        assert (layer.delta_net is not None) == case.recurrent(i)
        assert (layer.experts is not None) == case.routed(i)
        if layer.feed_forward_length:
            assert layer.feed_forward_length == case.ffn_length_of(i)
    assert any(layer.head_count > layer.head_count_kv for layer in spec.layers)
    names = {info.format.name for info in file.tensors.values() if len(info.shape) == 2}
    if case.format != MIX:
        assert case.format in names
    else:
        assert {"Q4_K", "Q6_K"} <= names
    ids = loaded.tokenizer.encode("the cat said 漢")
    assert max(ids) < case.vocab_size
    assert (ids[0] == loaded.tokenizer.bos_id) == (not case.architecture.startswith("qwen"))


def test_tiny_models_expose_mistakes() -> None:
    """Shapes that tell apart what a careless pass would mix up; see fixtures/tiny.py."""
    cases = TINY.values()
    assert any(case.head_size * case.heads != case.embedding_length for case in cases)
    assert any(case.head_size != case.embedding_length // case.heads for case in cases)
    layers = [(case, i) for case in cases for i in range(case.layers)]
    groups = {case.heads // case.kv_heads_of(i) for case, i in layers}
    assert len(groups) >= 4
    counts = {case.experts.count for case in cases if case.experts}
    assert counts == {5, 6, 12, 34}, "no power of two, and one above a wave"
    nets = {case.delta_net for case in cases if case.delta_net}
    # Tiled and grouped key heads differ only where there are several with several value heads each.
    assert all(net.value_heads > net.key_heads > 1 for net in nets)
    assert {case.tied for case in cases} == {True, False}
    rows = {
        info.shape[-1] % 256
        for case in cases
        for info in read_gguf(resolve_model(case.id)).tensors.values()
        if len(info.shape) == 2
    }
    assert {0, 64, 96, 128, 160, 192} <= rows
    for case in cases:
        if case.architecture.startswith("gemma"):
            windows = {layer.window for layer in load_model(resolve_model(case.id)).spec.layers}
            assert windows == {case.sliding_window, None}


@EVERY_TINY
def test_tiny_weights_are_alive(model: str) -> None:
    """Norm weights away from 1, matrices near 1 / sqrt(fan in), nothing zero or infinite.

    test_sensitivity.py shows that each of them moves the logits.
    """
    file = read_gguf(resolve_model(model))
    for name, info in file.tensors.items():
        values = _values(file, name).astype(np.float64)
        assert np.all(np.isfinite(values)), name
        assert np.all(np.any(values != 0, axis=-1)), name
        if len(info.shape) == 1 and info.shape[0] > 1 and "norm" in name:
            assert np.ptp(values) > 0.5 * values.mean() > 0, name
        elif name.startswith("blk.") and len(info.shape) > 1 and "conv1d" not in name:
            gain = np.sqrt(np.mean(values**2) * info.shape[-1])
            assert 0.9 < gain < 2.4, name  # up to 2, and the few values of a gate stray by a tenth


def _part_names(name: str) -> list[str]:
    """What the rows of a fused tensor belong to, by the GGUF naming of the separate ones."""
    prefix, _, rest = name.rpartition(".")
    if prefix.endswith("ffn_gate_up_exps"):
        return [prefix.replace("gate_up", part) + "." + rest for part in ("gate", "up")]
    if prefix.endswith("attn_qkv"):
        return [prefix.replace("qkv", part) + "." + rest for part in "qkv"]
    return [name]


@pytest.mark.parametrize(
    "model", ["tiny-llama-fused", "tiny-qwen2-fused", "tiny-qwen3moe-fused", "tiny-gemma4moe"]
)
def test_fused_tensors_equal_separate_ones(model: str, tmp_path: Path) -> None:
    """The same rows written as separate tensors give the same logits, bit for bit."""
    case, fused = TINY[model], gguf.GGUFReader(resolve_model(model))
    writer = gguf.GGUFWriter(tmp_path / "apart.gguf", case.architecture)
    add_metadata(writer, case)
    add_vocabulary(writer, case)
    sizes = [case.heads * case.head_size, *[case.kv_heads_of(0) * case.head_size] * 2]
    written = 0
    for tensor in fused.tensors:
        parts = _part_names(tensor.name)
        rows = -2 if tensor.data.ndim > 1 else -1
        cuts = np.cumsum(sizes)[:2] if len(parts) == 3 else len(parts)
        for part, data in zip(parts, np.split(tensor.data, cuts, axis=rows), strict=True):
            writer.add_tensor(part, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
        written += len(parts) - 1
    assert written > 0
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits = [
        Reference(load_model(path)).prefill(range(40), logits="all")
        for path in (resolve_model(model), tmp_path / "apart.gguf")
    ]
    assert np.array_equal(logits[0], logits[1])
    assert np.ptp(logits[0]) > 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    broken = replace(TINY["tiny-llama"], vocab_size=319)
    with pytest.raises(AssertionError, match="vocabulary has 320 entries, not 319"):
        build_tiny(broken, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_registry_builds_once_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    first = resolve_model("tiny-qwen3-q5_0")
    assert first.is_relative_to(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert resolve_model("tiny-qwen3-q5_0") == first
    assert first.stat().st_mtime_ns == stamp
    monkeypatch.setattr(registry, "_sources", lambda modules: (b"another builder",))
    assert resolve_model("tiny-qwen3-q5_0") != first


def test_names_win_and_paths_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-llama").write_bytes(b"not a model")
    (tmp_path / "here.gguf").write_bytes(b"")
    assert resolve_model("tiny-llama") != Path("tiny-llama")
    assert resolve_model("./tiny-llama") == Path("tiny-llama")
    assert resolve_model("here.gguf") == Path("here.gguf")
    assert resolve_model(Path("absent.gguf")) == Path("absent.gguf")
    assert resolve_model("no/such.gguf") == Path("no/such.gguf")


@pytest.mark.parametrize("name", ["", "tiny", "tiny-bert", "tiny-llama-q9_9", "oracle-", "SMOLLM2"])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(
        InputError, match=f"model is {name!r}.*smollm2.*tiny-qwen3.*oracle-gemma4moe.*q6_k"
    ):
        resolve_model(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_missing_packages_name_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    row = published_files()[name]
    with pytest.raises(InputError, match=re.escape(f"pip install {row.requires}")):
        resolve_model(name)
    assert f"{row.package}=={row.version}" in row.requires


def _fake_package(row: PublishedFile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec(row.module, None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: spec)


def test_a_changed_package_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = published_files()["smollm2"]
    (tmp_path / row.file).write_bytes(b"something else")
    _fake_package(row, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=f"expected {row.sha256}"):
        resolve_model("smollm2")


@pytest.mark.parametrize("good", [True, False])
def test_assembling_is_all_or_nothing(
    good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"weights"
    row = replace(
        published_files()["gemma3-270m"],
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
    )
    calls: list[Path] = []

    def assemble(path: Path) -> None:
        calls.append(path)
        path.write_bytes(content if good else content[:-1])

    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    monkeypatch.setattr(registry, "published_files", lambda: {row.name: row})
    _fake_package(row, tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, row.module, SimpleNamespace(assemble=assemble))
    said: list[str] = []
    if good:
        path = resolve_model(row.name, progress=said.append)
        assert path.read_bytes() == content
        assert said[0].startswith("assembling")
        resolve_model(row.name)
    else:
        with pytest.raises(InputError, match=f"expected {row.sha256}"):
            resolve_model(row.name)
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [row.file] * good


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_are_those_of_the_goldens(model: str) -> None:
    row, golden = published_files()[model], published_model(model)
    assert row.sha256 == golden.sha256
    if importlib.util.find_spec(row.module) is None:
        pytest.skip(f"pip install {row.requires}")
    path = resolve_model(model)
    assert path.stat().st_size == row.nbytes
    file = read_gguf(path)
    assert file.sha256 == row.sha256
    assert len(file.metadata["tokenizer.ggml.tokens"]) == golden.runs[GATE].last_logits.size


def test_every_name_is_listed_once() -> None:
    names = model_names()
    assert len(set(names)) == len(names) == len(PUBLISHED) + len(TINY) + len(TINY_GATES)
