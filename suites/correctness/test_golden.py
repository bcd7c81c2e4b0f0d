"""The goldens: records are whole, and parts of a file are joined to exactly what was recorded."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fixtures import golden
from fixtures.golden import (
    AS_USED,
    GATE,
    GREEDY_PROMPT,
    PUBLISHED,
    TINY_GATES,
    golden_model,
    published_model,
)
from fixtures.registry import resolve_model
from reference.model.errors import InputError
from reference.model.gguf import read_gguf
from suites.correctness.oracles import ORACLES, golden_of
from suites.harness.tolerances import recorded_margin_limit

MEGABYTE = 2**20


@pytest.mark.parametrize("model", ORACLES)
def test_golden_records_are_whole(model: str) -> None:
    golden = golden_of(model)
    vocab_size = len(read_gguf(golden.path).metadata["tokenizer.ggml.tokens"])
    assert [*golden.prompts][:6] == [1, 3, 17, 40, 79, 121]
    assert golden.meta["weights_f32"] is True
    assert hashlib.sha256(golden.path.read_bytes()).hexdigest() == golden.sha256
    assert golden.greedy_ids.shape == golden.greedy_margins.shape == (16,)
    assert golden.greedy_ids[0] == golden.prompts[GREEDY_PROMPT].logits[-1].argmax()
    assert (golden.meta["type_k"], golden.meta["flash_attn"]) == ("f32", "off")
    for count, prompt in golden.prompts.items():
        assert prompt.tokens.shape == (count,)
        assert prompt.logits.shape == (prompt.positions.size, vocab_size)
        assert prompt.positions[-1] == count - 1
        assert np.all(np.isfinite(prompt.logits))
        assert np.all(np.diff(prompt.positions) > 0)
    assert resolve_model(model) == golden.path


def test_no_golden_file_is_too_large_for_git() -> None:
    sizes = [path.stat().st_size for path in golden.FOLDER.rglob("*") if path.is_file()]
    assert len(sizes) > 2 * len(TINY_GATES)
    assert max(sizes) < MEGABYTE


def test_parts_are_joined_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    want = golden_model("qwen35").sha256
    path = golden_model("qwen35").path
    assert path.is_relative_to(tmp_path)
    stamp = path.stat().st_mtime_ns
    assert golden_model("qwen35").path == path
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:-1])  # damaged in the cache: joined again
    assert hashlib.sha256(golden_model("qwen35").path.read_bytes()).hexdigest() == want
    assert [found.name for found in (tmp_path / "models").iterdir()] == [path.name]


@pytest.mark.parametrize("fault", ["missing", "changed", "swapped"])
def test_wrong_parts_are_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden_model("qwen35")  # its record is read from the real folder
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "qwen35"
    folder.mkdir()
    first, second = sorted((golden.FOLDER / "qwen35").glob("*.part?"))
    contents = [first.read_bytes(), second.read_bytes()]
    if fault == "changed":
        contents[1] = contents[1][:-1] + bytes([contents[1][-1] ^ 1])
    elif fault == "swapped":
        contents.reverse()
    for place, content in enumerate(contents[: 1 if fault == "missing" else 2]):
        (folder / f"qwen35-q4_k_m.gguf.part{place}").write_bytes(content)
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=f"expected {golden_model('qwen35').sha256}"):
        _ = golden_model("qwen35").path
    assert not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_records_are_whole(model: str) -> None:
    golden = published_model(model)
    assert {*golden.runs} == {GATE, AS_USED}
    for run in golden.runs.values():
        assert run.top20_ids.shape == run.top20_logits.shape == (len(golden.ids), 20)
        best = np.argsort(-run.last_logits, kind="stable")[:20]
        assert np.array_equal(run.top20_ids[-1], best)
        assert np.array_equal(run.top20_logits[-1], run.last_logits[best])
        assert run.greedy_ids[0] == best[0]
        margin = run.last_logits[best[0]] - run.last_logits[best[1]]
        assert abs(run.greedy_margins[0] - margin) <= recorded_margin_limit(run.last_logits)


@pytest.mark.parametrize("loader", [golden_model, published_model])
def test_unknown_records_are_refused(loader: object) -> None:
    assert callable(loader)
    with pytest.raises(InputError, match="'nope', expected one of"):
        loader("nope")
