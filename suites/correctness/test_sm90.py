"""The kernels compile for sm_90 through the CUDA runtime's libhiprtc and the machine's NVRTC."""

import ctypes

import pytest

from backend_hip.compile import OPTIONS, flatten
from backend_hip.dispatch import source_of
from backend_hip.engine import DEFAULT_MAX_COLS
from backend_hip.registry import REGISTRY, KernelRow
from backend_hip.runtimes import build, nvidia
from reference.model.errors import InputError
from suites.correctness.cuda_driver import library

SIZES = {"HEAD_SIZE": 128, "STATE_SIZE": 128, "EXPERTS": 256, "MAX_COLS": 8}
EM_CUDA = 190  # the ELF header's machine


def _rows() -> list[KernelRow]:
    """Every file, and through `embed` every format."""
    files: set[str] = set()
    rows = []
    for row in REGISTRY:
        if row.file not in files or row.op == "embed":
            rows.append(row)
        files.add(row.file)
    return rows


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NVRTC that the tests compile with; where there is none they are skipped, and say so."""
    try:
        found = nvidia.find_nvrtc(None)
    except InputError as error:
        pytest.skip(f"{error}")
    monkeypatch.setenv(nvidia.NVRTC, str(found.path))


@pytest.mark.parametrize("row", _rows(), ids=lambda row: "-".join(filter(None, row.key)))
@pytest.mark.usefixtures("nvrtc")
def test_compiles_for_sm90(row: KernelRow) -> None:
    source = source_of(
        row, {"MAX_COLS": DEFAULT_MAX_COLS}, SIZES.get(row.sized, 0), "cuda sm_90", 4
    )
    defines = [f"-D{name}={value}" for name, value in source.defines]
    options = [*OPTIONS, "--offload-arch=cuda sm_90", *defines]
    code = _compile(flatten(source.file), source.file, options)
    cubin = code[code.index(b"\x7fELF") :]
    assert int.from_bytes(cubin[18:20], "little") == EM_CUDA
    assert row.entry.encode() in cubin


@pytest.mark.parametrize("file", ["bandwidth.hip", "matrix_rate.hip", "expand_kv.hip"])
@pytest.mark.usefixtures("nvrtc")
def test_what_no_engine_launches_compiles_too(file: str) -> None:
    options = [*OPTIONS, "--offload-arch=cuda sm_90", "-DSIMT_BLOCK=256", "-DSIMT_WAVE=32"]
    assert b"\x7fELF" in _compile(flatten(file), file, options)


def _compile(text: str, name: str, options: list[str]) -> bytes:
    """The code object that libhiprtc makes; the runtime of this process is not touched."""
    hiprtc = library(build.CUDA, "libhiprtc.so")
    program, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    hiprtc.hiprtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        result = hiprtc.hiprtcCompileProgram(program, len(options), encoded)
        hiprtc.hiprtcGetProgramLogSize(program, ctypes.byref(nbytes))
        log = ctypes.create_string_buffer(nbytes.value)
        hiprtc.hiprtcGetProgramLog(program, log)
        assert (result, log.value) == (0, b"")
        assert hiprtc.hiprtcGetCodeSize(program, ctypes.byref(nbytes)) == 0
        code = ctypes.create_string_buffer(nbytes.value)
        assert hiprtc.hiprtcGetCode(program, code) == 0
        return code.raw
    finally:
        hiprtc.hiprtcDestroyProgram(ctypes.byref(program))
