"""What a repro bundle holds; a damaged or edited one is refused, an empty one proves nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suites.harness.bundle import Bundle
from suites.meta.test_bisect_bundle import _bundle_of, _dispatch_fault, _main


@pytest.fixture(autouse=True)
def _switch_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b.npz"
    assert _bundle_of(_dispatch_fault, path) == 1
    return path


def test_a_bundle_says_all_that_a_replay_needs(bundle: Path) -> None:
    found = Bundle.load(bundle)
    assert (found.kind, len(found.tokens)) == ("point", 13)
    assert set(found.inputs) == {"ffn_norm-2"}
    assert found.arrays["got"].dtype == np.float32
    assert found.arrays["want"].dtype == np.float64
    assert found.arrays["model"].nbytes > 1000
    meta = found.meta
    assert all(meta["versions"][name] for name in ("python", "numpy", "hip-python", "assay"))
    (row,) = [entry["row"] for entry in meta["kernels"]]
    assert row.startswith("matvec_batched ")
    assert all(len(entry["code_sha256"]) == 64 for entry in meta["kernels"])
    assert meta["options"]["max_cols"] == 8
    assert len(meta["model_sha256"]) == 64


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def _without(array: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        kept = Bundle.load(path)
        arrays = {name: value for name, value in kept.arrays.items() if name != array}
        Bundle(kept.tokens, kept.meta, arrays).save(path)

    return change


def _meta(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        kept = Bundle.load(path)
        Bundle(kept.tokens, {**kept.meta, **changes}, kept.arrays).save(path)

    return change


def _other_shape(path: Path) -> None:
    kept = Bundle.load(path)
    inputs = {name: value[:, :-1] if name.startswith("input:") else value
              for name, value in kept.arrays.items()}  # fmt: skip
    Bundle(kept.tokens, kept.meta, inputs).save(path)


def _raw(path: Path, **changes: Any) -> None:
    """Changes the file as any tool can that knows nothing of the digest."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = {**json.loads(str(arrays["meta"])), **changes.pop("meta", {})}
    np.savez_compressed(path, **{**arrays, **changes, "meta": np.array(json.dumps(meta))})


def _edited(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        value = Bundle.load(path).arrays[name]
        _raw(path, **{name: np.zeros_like(value)})

    return change


def _other_tokens(path: Path) -> None:
    kept = Bundle.load(path)
    Bundle((1, 10**6), kept.meta, kept.arrays).save(path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "is not a whole bundle"),
        (_flip, "bundle"),
        (lambda path: path.write_bytes(b""), "is not a whole bundle"),
        (lambda path: path.write_text("hello"), "is not a whole bundle"),
        (lambda path: path.unlink(), "is not a file"),
        (lambda path: np.savez(path, a=np.zeros(3)), "has no array meta"),
        (_without("got"), "array got is missing"),
        (_meta(kind="other"), "kind is other, expected one of point, tail, run"),
        (_meta(kind="tail"), "meta has no usable tail"),
        (_meta(point="ffn_up-77"), "point is ffn_up-77, which its model does not have"),
        (_meta(model_sha256="0" * 64), "has another SHA-256"),
        (_meta(sanitize=None), "meta has no usable sanitize"),
        (_meta(max_cols="many"), "meta has no usable max_cols"),
        (_meta(max_cols=True), "meta has no usable max_cols"),
        (_meta(shuffle=True), "meta has no usable shuffle"),
        (_meta(max_cols=0), "max_cols is 0, expected 1 to 64"),
        (_meta(context_length=0), "context_length is 0, expected 1 to "),
        (_meta(context_length=-1), "context_length is -1, expected 1 to "),
        (_meta(context_length=10**12), "context_length is 1000000000000, expected 1 to "),
        (_meta(n_decode=10**30), f"n_decode is {10**30}, expected 0 to "),
        (_meta(n_decode=-1), "n_decode is -1, expected 0 to "),
        (_edited("got"), "have another SHA-256"),
        (_edited("limit"), "have another SHA-256"),
        (_edited("input:ffn_norm-2"), "have another SHA-256"),
        (lambda path: _raw(path, meta={"summary": "ok"}), "have another SHA-256"),
        (lambda path: _raw(path, meta={"sha256": None}), "meta has no usable sha256"),
        (lambda path: _raw(path, more=np.ones(2)), "have another SHA-256"),
        (_meta(modes=["sideways"]), "prefill is sideways"),
        (_meta(path="quick"), "path is quick"),
        (_other_shape, "array of ffn_norm-2 is (13, 255), expected 13 rows of 256 values"),
        (_meta(mode="sideways"), "mode is sideways, expected one of per-token, batched"),
        (_meta(kv_type_k="f7"), "kv-type-k is f7"),
        (_other_tokens, "id 1000000 at place 1"),
    ],
)
def test_a_damaged_bundle_is_one_line(
    bundle: Path,
    damage: Callable[[Path], Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    damage(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("assay: ")
    assert text in last
    assert "Traceback" not in captured.err


def _filled(path: Path, value: float, got: float) -> None:
    """Inputs and result of one value each, with a digest that is right."""
    kept = Bundle.load(path)
    fill = {name: value for name in kept.arrays if name.startswith("input:")} | {"got": got}
    arrays = {name: np.full_like(old, fill[name]) if name in fill else old
              for name, old in kept.arrays.items()}  # fmt: skip
    Bundle(kept.tokens, kept.meta, arrays).save(path)


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
@pytest.mark.parametrize(
    ("value", "got", "text"),
    [
        (0.0, 0.0, "the bundle's own record is within today's limits: it shows no fault"),
        (np.nan, np.nan, "invalid: what ran here proves nothing: "),
    ],
    ids=["zeros", "nan"],
)
def test_a_record_that_shows_no_fault_proves_nothing(
    value: float,
    got: float,
    text: str,
    broken: bool,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _filled(path, value, got)
    with pytest.MonkeyPatch.context() as patch:
        if broken:  # zeros hide this fault, and nothing may be called sound on their word
            _dispatch_fault(patch)
        document = tmp_path / "r.json"
        replay = ("bisect", "--replay", path, "--device", "cpu", "--json", document)
        assert _main(*replay) == 3
    last = " ".join(capsys.readouterr().out.split())
    assert text in last
    assert json.loads(document.read_text())["exit_code"] == 3


def test_a_record_without_inputs_proves_nothing(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _without("input:ffn_norm-2")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 3
    assert "invalid: the bundle's own record proves nothing: " in capsys.readouterr().out


def test_a_model_that_does_not_travel_along_must_be_the_same_file(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.npz"
    path.write_bytes(bundle.read_bytes())
    _without("model")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 0
    _meta(model="tiny-llama")(path)
    assert _main("bisect", "--replay", path, "--device", "cpu") == 2
    assert "because the bundle was made with that file" in capsys.readouterr().err
