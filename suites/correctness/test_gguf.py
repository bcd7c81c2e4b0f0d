"""The GGUF reader: equal to gguf-py on good files, one clear line on every kind of bad one."""

import hashlib
import struct
import tracemalloc
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.golden import TINY_GATES, golden_model
from fixtures.registry import resolve_model
from reference.model.errors import AssayError, InputError, Unsupported
from reference.model.gguf import read_gguf

GOOD = (
    *(f"oracle-{name}" for name in TINY_GATES),
    "tiny-llama",
    "tiny-gemma3-q5_1",
    "tiny-qwen3-f32",
    "tiny-gemma4moe",
    "tiny-qwen35-nextn",
    "tiny-qwen3moe-q6_k",
)
F32, Q4_0 = 0, 2


def _string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def _pair(key: str | bytes, kind: int, content: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + content


def _tensor(
    name: str = "t", dims: tuple[int, ...] = (32,), kind: int = F32, offset: int = 0
) -> bytes:
    head = _string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", kind, offset)


def _file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(1024),
    alignment: int = 32,
) -> bytes:
    """A whole file; `counts` (tensors, pairs) may lie."""
    n_tensors, n_pairs = counts if counts is not None else (len(tensors), len(pairs))
    head = magic + version + struct.pack("<QQ", n_tensors, n_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack
HUGE = 2**63


@dataclass(frozen=True)
class BadCase:
    """A damaged file and what the one line about it must say."""

    id: str
    content: bytes
    says: str
    error: type[AssayError] = InputError


BAD = (
    BadCase("empty", b"", "0 bytes"),
    BadCase("short", b"GG", "2 bytes"),
    BadCase("magic", _file(magic=b"GGML"), "magic is b'GGML'"),
    BadCase("version-0", _file(version=U32(0)), "version is 0", Unsupported),
    BadCase(
        "version-1", _file(version=U32(1)), r"version is 1, expected one of \(2, 3\)", Unsupported
    ),
    BadCase("version-4", _file(version=U32(4)), "version is 4", Unsupported),
    BadCase("big-endian", _file(version=struct.pack(">I", 3)), "big endian", Unsupported),
    BadCase("pair-count", _file(counts=(0, HUGE)), "metadata pairs needs"),
    BadCase("tensor-count", _file(counts=(HUGE, 0)), "tensor descriptions needs"),
    BadCase("counts-swapped", _file((_pair("k", Kind.UINT8, b"1"),), counts=(1, 0)), "."),
    BadCase("key-length", _file((U64(HUGE),)), "metadata key 0 needs"),
    BadCase("key-utf8", _file((_pair(b"\xff\xfe", Kind.UINT8, b"1"),)), "is not UTF-8"),
    BadCase("value-utf8", _file((_pair("k", Kind.STRING, _string(b"a\xc3")),)), "'k' is not UTF-8"),
    BadCase("value-length", _file((_pair("k", Kind.STRING, U64(HUGE)),)), "'k' needs"),
    BadCase("value-type", _file((_pair("k", 99, b""),)), "'k' holds type 99", Unsupported),
    BadCase("bool", _file((_pair("k", Kind.BOOL, b"\x02"),)), "'k' holds 2, expected 0 or 1"),
    BadCase("key-twice", _file((_pair("k", Kind.UINT8, b"1"),) * 2), "'k' appears twice"),
    BadCase("array-count", _file((_pair("k", Kind.ARRAY, U32(Kind.UINT64) + U64(HUGE)),)), "needs"),
    BadCase(
        "strings-count", _file((_pair("k", Kind.ARRAY, U32(Kind.STRING) + U64(HUGE)),)), "needs"
    ),
    BadCase(
        "strings-length",
        _file((_pair("k", Kind.ARRAY, U32(Kind.STRING) + U64(2) + _string("a") + U64(HUGE)),)),
        "string 1 of 'k' needs",
    ),
    BadCase(
        "strings-end",
        _file((_pair("k", Kind.ARRAY, U32(Kind.STRING) + U64(2) + _string("a")),), data=b""),
        "string 1 of 'k'|are left",
    ),
    BadCase(
        "nested",
        _file((_pair("k", Kind.ARRAY, U32(Kind.ARRAY) + U64(1)),)),
        "array inside an array",
        Unsupported,
    ),
    BadCase(
        "alignment-0", _file((_pair("general.alignment", Kind.UINT32, U32(0)),)), "power of two"
    ),
    BadCase("alignment-24", _file((_pair("general.alignment", Kind.UINT32, U32(24)),)), "is 24"),
    BadCase(
        "alignment-text",
        _file((_pair("general.alignment", Kind.STRING, _string("32")),)),
        "'32', expected a power of two",
    ),
    BadCase("dims-0", _file((), (_tensor(dims=()),), data=bytes(9999)), "'t' has 0 dimensions"),
    BadCase("dims-5", _file((), (_tensor(dims=(1,) * 5),)), "'t' has 5 dimensions"),
    BadCase("dims-many", _file((), (_string("t") + U32(2**32 - 1),)), "dimensions|needs"),
    BadCase("dim-zero", _file((), (_tensor(dims=(32, 0)),)), "expected none to be 0"),
    BadCase("dim-huge", _file((), (_tensor(dims=(2**62, 2**62)),)), "ends at byte"),
    BadCase("wraps", _file((), (_tensor(dims=(2**32, 2**32)),)), "ends at byte"),
    BadCase("type-99", _file((), (_tensor(kind=99),)), r"'t' .*\(99\).*Q4_K", Unsupported),
    BadCase("type-iq4", _file((), (_tensor(kind=23),)), r"IQ4_XS \(23\).*Q6_K", Unsupported),
    BadCase("type-i8", _file((), (_tensor(kind=24),)), r"I8 \(24\)", Unsupported),
    BadCase("row", _file((), (_tensor(dims=(48, 2), kind=Q4_0),)), "rows of 48 .*multiple of 32"),
    BadCase("offset-unaligned", _file((), (_tensor(offset=16),)), "offset 16, expected a multiple"),
    BadCase("offset-outside", _file((), (_tensor(offset=HUGE),)), "ends at byte"),
    BadCase("offset-end", _file((), (_tensor(offset=1024 - 96),)), "ends at byte"),
    BadCase("overlap", _file((), (_tensor("a"), _tensor("b", offset=96))), "'b' overlaps 'a'"),
    BadCase("same-place", _file((), (_tensor("a"), _tensor("b"))), "overlaps"),
    BadCase("name-twice", _file((), (_tensor("a"), _tensor("a", offset=128))), "'a' appears twice"),
    BadCase(
        "name-utf8", _file((), (_string(b"\x80") + bytes(99),)), "name of tensor 0 is not UTF-8"
    ),
)


def _fails(path: Path, error: type[AssayError] = AssayError) -> str:
    """The text of the error that reading `path` raises: one line that names the file."""
    with pytest.raises(error) as caught:
        read_gguf(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_damage_is_one_line(case: BadCase, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(case.content)
    tracemalloc.start()
    try:
        with pytest.raises(case.error, match=case.says):
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    _fails(path, case.error)
    assert peak < 2**20  # no count in a file of 2 KB may reserve memory


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    """The builder of the cases above makes good files, so it is the damage that is refused."""
    array = U32(Kind.STRING) + U64(2) + _string(b"\xf0\x9f") + _string("b")
    pairs = (
        _pair("general.alignment", Kind.UINT32, U32(64)),
        _pair("k.tokens", Kind.ARRAY, array),
        _pair("k.flag", Kind.BOOL, b"\x01"),
    )
    tensors = (_tensor("a", (32, 2), Q4_0), _tensor("b", (7,), F32, 64))
    path = tmp_path / "good.gguf"
    data = bytes(range(256))
    for version in (2, 3):
        path.write_bytes(_file(pairs, tensors, version=U32(version), data=data, alignment=64))
        file = read_gguf(path)
        assert file.version == version
        assert file.metadata["k.tokens"][0].encode("utf-8", "surrogateescape") == b"\xf0\x9f"
        assert file.metadata["k.flag"] is True
        assert file.tensors["a"].shape == (2, 32)
        assert file.raw("a").shape == (2, 18)
        assert file.raw("a").tobytes() == data[:36]
        assert file.raw("b").tobytes() == data[64 : 64 + 28]
        assert not file.raw("a").flags.writeable
        with pytest.raises(InputError, match="c is not one of the 2 tensors"):
            file.raw("c")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "does not exist" in _fails(tmp_path / "missing.gguf")
    assert "not a regular file" in _fails(tmp_path)
    with pytest.raises(InputError, match=r"does not exist|cannot be read"):
        read_gguf("a\0b")


@cache
def _content(name: str) -> bytes:
    return resolve_model(name).read_bytes()


@cache
def _data_start(name: str) -> int:
    return min(info.offset for info in read_gguf(resolve_model(name)).tensors.values())


@pytest.mark.parametrize("part", range(20))
def test_truncation(part: int, tmp_path: Path) -> None:
    """Ten cuts through header, metadata and tensor table, ten through the data."""
    content, start = _content("tiny-llama"), _data_start("tiny-llama")
    cut = start * part // 10 if part < 10 else start + (len(content) - 1 - start) * (part - 10) // 9
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:cut])
    _fails(path, InputError)


@pytest.mark.parametrize("model", GOOD)
def test_equals_gguf_py(model: str) -> None:
    path = resolve_model(model)
    want, got = gguf.GGUFReader(path), read_gguf(path)
    fields = {key: field for key, field in want.fields.items() if not key.startswith("GGUF.")}
    assert list(got.metadata) == list(fields)
    for key, field in fields.items():
        value: Any = got.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert list(got.tensors) == [tensor.name for tensor in want.tensors]
    for tensor in want.tensors:
        info = got.tensors[tensor.name]
        assert info.format.ggml_type == tensor.tensor_type
        assert info.shape == tuple(int(length) for length in reversed(tensor.shape))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        raw = got.raw(tensor.name)
        assert raw.size > 0
        assert raw.tobytes() == tensor.data.tobytes()
    assert got.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_golden_records_belong_to_their_models() -> None:
    for name in TINY_GATES:
        file = read_gguf(golden_model(name).path)
        assert name.startswith(file.metadata["general.architecture"])


_FLIPS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(["tiny-llama", "oracle-gemma3"]), flips=_FLIPS)
def test_flipped_bytes_never_escape(
    name: str, flips: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Header, metadata and tensor table with some bytes replaced: read, or refused in one line."""
    content = bytearray(_content(name))
    for place, value in flips:
        content[int(place * _data_start(name))] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except AssayError:
        _fails(path)
        return
    for tensor in file.tensors:
        assert file.raw(tensor).nbytes == file.tensors[tensor].nbytes
