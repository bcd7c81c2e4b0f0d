"""Files written whole or not at all, and trace files read whole or refused."""

import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reference.model.cache import atomic_write, cache_folder
from reference.model.errors import InputError
from reference.model.trace import LOGITS, Trace


def test_a_file_is_replaced_whole_with_the_usual_mode(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    expected = tmp_path / "plain"
    expected.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(expected.stat().st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.json", "plain"]


def test_a_link_is_followed_and_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write(pipe, b"piped")
    assert os.read(reader, 10) == b"piped"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    "place", ["missing/out.json", "file/out.json", "x" * 300], ids=["missing", "file", "long"]
)
def test_what_can_not_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written") as caught:
        atomic_write(tmp_path / place, b"new")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_unusable_cache_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for base in (tmp_path / "file", Path("/proc/nowhere"), Path("/dev/null")):
        monkeypatch.setenv("ASSAY_CACHE", str(base))
        with pytest.raises(InputError, match="ASSAY_CACHE names another folder"):
            cache_folder("kernels")


def _trace(path: Path, **changes: object) -> Path:
    content: dict[str, object] = {
        "tokens": np.array([1, 2], dtype=np.int32),
        "logits": np.zeros((1, 4), dtype=np.float32),
        "inp_embd": np.zeros((2, 3), dtype=np.float32),
        "meta": np.array(json.dumps({"model": "x"})),
    } | changes
    np.savez(path, **{k: v for k, v in content.items() if v is not None})  # type: ignore[arg-type]
    return path


def test_a_trace_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    trace = Trace((3, 4), {"side": "engine"})
    trace.record("inp_embd", np.arange(6, dtype=np.float32).reshape(2, 3))
    trace.record(LOGITS, np.ones((1, 5), dtype=np.float32))
    trace.save(tmp_path / "t.npz")
    back = Trace.load(tmp_path / "t.npz")
    assert back.tokens == (3, 4)
    assert back.meta == {"side": "engine"}
    assert list(back.arrays) == ["inp_embd", LOGITS]
    assert np.array_equal(back["inp_embd"], trace["inp_embd"])


DAMAGE: dict[str, Callable[[Path], Path]] = {
    "missing": lambda folder: folder / "nothing.npz",
    "folder": lambda folder: folder,
    "empty": lambda folder: _write(folder, b""),
    "text": lambda folder: _write(folder, b"{}"),
    "npy": lambda folder: _npy(folder),
    "no-meta": lambda folder: _trace(folder / "t.npz", meta=None),
    "no-tokens": lambda folder: _trace(folder / "t.npz", tokens=None),
    "no-logits": lambda folder: _trace(folder / "t.npz", logits=None),
    "meta-list": lambda folder: _trace(folder / "t.npz", meta=np.array("[]")),
    "meta-number": lambda folder: _trace(folder / "t.npz", meta=np.array(5)),
    "meta-deep": lambda folder: _trace(folder / "t.npz", meta=np.array("[" * 99999)),
    "meta-nan": lambda folder: _trace(folder / "t.npz", meta=np.array('{"a": NaN}')),
    "tokens-float": lambda folder: _trace(folder / "t.npz", tokens=np.array([1.5])),
    "tokens-2d": lambda folder: _trace(folder / "t.npz", tokens=np.zeros((2, 2), dtype=int)),
    "tokens-0d": lambda folder: _trace(folder / "t.npz", tokens=np.array(1)),
    "complex": lambda folder: _trace(folder / "t.npz", inp_embd=np.zeros((2, 3), dtype=complex)),
    "strings": lambda folder: _trace(folder / "t.npz", inp_embd=np.array(["a", "b"])),
    "dates": lambda folder: _trace(folder / "t.npz", inp_embd=np.zeros(2, dtype="M8[s]")),
    "scalar": lambda folder: _trace(folder / "t.npz", inp_embd=np.array(1.0)),
    "pickle": lambda folder: _trace(folder / "t.npz", inp_embd=np.array([object()])),
    "truncated": lambda folder: _cut(_trace(folder / "t.npz")),
    "huge": lambda folder: _huge(folder),
}


def _write(folder: Path, content: bytes) -> Path:
    (folder / "t.npz").write_bytes(content)
    return folder / "t.npz"


def _npy(folder: Path) -> Path:
    np.save(folder / "t.npy", np.zeros(3))
    return folder / "t.npy"


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


def _huge(folder: Path) -> Path:
    """A header that claims a million million values."""
    path = _trace(folder / "t.npz")
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    text = header.ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("l_out-0.npy", content)
    return path


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_trace_files_cost_one_line(damage: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trace: ") as caught:
        Trace.load(DAMAGE[damage](tmp_path))
    assert "\n" not in str(caught.value)
