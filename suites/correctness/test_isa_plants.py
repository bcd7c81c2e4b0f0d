"""Planted kernels: each turns the budget red that it should; a planted text stops the parser."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from backend_hip.compile import KERNEL_FOLDER
from backend_hip.isa import (
    WAVES,
    KernelResources,
    compile_assembly,
    figures_of,
    survey,
    variants_of,
)
from backend_hip.isa_budgets import (
    BUDGETS,
    Budget,
    KnownBreak,
    broken_budgets,
    claims_of,
    known_break,
)
from backend_hip.offline import OfflineClang
from backend_hip.registry import REGISTRY, KernelRow
from reference.model.errors import DeviceError
from suites.correctness.test_isa import disagreements, new_breaks

HEAD = '#include "simt.h"\nSIMT_KERNEL(planted, float* x, const int32_t* at) {\n'
LDS_KERNEL = HEAD + (
    "SIMT_SHARED(float, s, NBYTES / 4);\n"
    "for (int i = simt::thread(); i < NBYTES / 4; i += SIMT_BLOCK) s[i] = x[i];\n"
    "simt::sync();\nx[simt::thread()] = s[at[simt::thread()]]; }\n"
)
PLAIN_KERNEL = HEAD + "x[simt::thread()] += 1.0f; }\n"
LOCAL_ARRAY = HEAD + (
    "float local[256];\n"
    "for (int i = 0; i < 256; ++i) local[i] = x[i * SIMT_BLOCK + simt::thread()];\n"
    "float sum = 0.0f;\nfor (int i = 0; i < 256; ++i) sum += local[at[i] & 255];\n"
    "x[simt::thread()] = sum; }\n"
)
VOLATILE_ARRAY = HEAD + (
    "volatile float local[8];\nfor (int i = 0; i < 8; ++i) local[i] = x[i];\n"
    "x[simt::thread()] = local[3]; }\n"
)
SUMS = HEAD + (
    "float sums[COUNT];\nSIMT_UNROLL\nfor (int c = 0; c < COUNT; ++c) sums[c] = 0.0f;\n"
    "for (int k = 0; k < at[0]; ++k) {\nconst float w = x[k * SIMT_BLOCK + simt::thread()];\n"
    "SIMT_UNROLL\nfor (int c = 0; c < COUNT; ++c) sums[c] = simt::fma(w, sums[c], w);\n}\n"
    "SIMT_UNROLL\nfor (int c = 0; c < COUNT; ++c) x[c * SIMT_BLOCK + simt::thread()] = sums[c]; }\n"
)
MATRIX_KERNEL = (
    "typedef _Float16 half8 __attribute__((ext_vector_type(8)));\n"
    "typedef _Float16 half4 __attribute__((ext_vector_type(4)));\n"
    "typedef float float8 __attribute__((ext_vector_type(8)));\n"
    "typedef float float4 __attribute__((ext_vector_type(4)));\n"
    '#include "simt.h"\nSIMT_KERNEL(planted, PIECE* a, ACCUMULATOR* c) {\n'
    "const int t = simt::thread();\n"
    "c[t] = __builtin_amdgcn_wmma_f32_16x16x16_f16_wWAVE_gfx12(a[t], a[t + 64], c[t]); }\n"
)
DOT_KERNEL = HEAD + (
    "const int t = simt::thread();\n"
    "x[t] = __builtin_amdgcn_sudot4(true, at[t], true, at[t + 64], at[t + 128], false); }\n"
)
PLANTED = KernelRow("planted", "", "any", "planted.hip", "planted", "PP", 64)


@pytest.fixture
def plant(offline_clang: OfflineClang, tmp_path: Path) -> Callable[..., list[KernelResources]]:
    """plant(text, **fields of the row) -> its resources at both wave sizes."""
    for header in KERNEL_FOLDER.glob("*.h"):
        (tmp_path / header.name).write_text(header.read_text())

    def make(text: str, **changes: object) -> list[KernelResources]:
        (tmp_path / PLANTED.file).write_text(text)
        row = replace(PLANTED, **changes)  # type: ignore[arg-type]
        return survey([row], offline_clang, folder=tmp_path)

    return make


def broken_figures(kernels: Sequence[KernelResources]) -> set[str]:
    return {entry.budget.figure for entry in broken_budgets(kernels)}


LDS_SIZES = (256, 4096, 4100, 16384, 24000, 32768, 48000, 65536)


def test_occupancy_limited_by_lds(plant: Callable[..., list[KernelResources]]) -> None:
    for block in (32, 64, 256):
        for nbytes in LDS_SIZES:
            kernels = plant(LDS_KERNEL.replace("NBYTES", str(nbytes)), block=block)
            assert [kernel.figures.lds_nbytes for kernel in kernels] == [nbytes] * len(WAVES)
            assert disagreements(kernels) == []


def test_a_plain_kernel_breaks_nothing(plant: Callable[..., list[KernelResources]]) -> None:
    assert [k.figures.occupancy for k in plant(PLAIN_KERNEL)] == [16, 16]
    assert new_breaks(plant(PLAIN_KERNEL)) == []


@pytest.mark.parametrize("text", [LOCAL_ARRAY, VOLATILE_ARRAY], ids=["indexed", "volatile"])
def test_an_array_in_memory_breaks_the_scratch_budget(
    text: str, plant: Callable[..., list[KernelResources]]
) -> None:
    kernels = plant(text)
    assert all(kernel.figures.scratch_nbytes > 0 for kernel in kernels)
    assert len(new_breaks(kernels)) == len(WAVES)
    assert new_breaks(kernels)[0].startswith("planted any wave32: scratch_nbytes is ")


def test_more_sums_than_registers_spill(plant: Callable[..., list[KernelResources]]) -> None:
    kernels = plant(SUMS.replace("COUNT", "300"))
    assert broken_figures(kernels) >= {"vgpr_spills", "scratch_nbytes"}


def test_twice_the_sums_lower_the_occupancy(plant: Callable[..., list[KernelResources]]) -> None:
    fewer, more = (plant(SUMS.replace("COUNT", count)) for count in ("60", "120"))
    for half, whole in zip(fewer, more, strict=True):
        assert half.figures.occupancy > whole.figures.occupancy
    wave64 = [kernels[1] for kernels in (fewer, more)]
    budget = replace(BUDGETS[3], ops=(), variants=(), paths=(), sizes=())
    assert budget.figure == "occupancy"
    assert [len(broken_budgets([kernel], [budget])) for kernel in wave64] == [0, 1]


def test_a_batched_product_of_more_columns_holds_more_registers(
    offline_clang: OfflineClang,
) -> None:
    row = REGISTRY.find("matvec_batched", "Q4_K", "kparallel")
    sizes = {"MAX_COLS": (16, 64)}
    narrow, wide = survey([row], offline_clang, sizes=sizes, waves=(64,))
    assert narrow.figures.vgprs < wide.figures.vgprs
    assert narrow.figures.occupancy > wide.figures.occupancy


def test_the_path_matrix_needs_matrix_instructions(
    plant: Callable[..., list[KernelResources]],
) -> None:
    assert broken_figures(plant(PLAIN_KERNEL, path="matrix")) == {"wmma"}
    for wave, piece, accumulator in ((32, "half8", "float8"), (64, "half4", "float4")):
        text = MATRIX_KERNEL.replace("WAVE", str(wave))
        text = text.replace("PIECE", piece).replace("ACCUMULATOR", accumulator)
        (kernel,) = plant(text, path="matrix", waves=(wave,))
        assert kernel.wave == wave
        assert kernel.figures.wmma == 1
        assert broken_budgets([kernel]) == []


def test_what_a_row_claims_must_be_there(plant: Callable[..., list[KernelResources]]) -> None:
    assert broken_figures(plant(PLAIN_KERNEL, claims=("wide_loads",))) == {"wide_loads"}
    assert broken_figures(plant(PLAIN_KERNEL, claims=("dot4",))) == {"dot4"}
    dots = plant(DOT_KERNEL, claims=("dot4",))
    assert [kernel.figures.dot4 for kernel in dots] == [1, 1]
    assert broken_budgets(dots) == []
    wide = HEAD + "struct alignas(16) Four { float v[4]; };\nFour* p = (Four*)x;\n"
    wide += "p[simt::thread()] = p[at[simt::thread()]]; }\n"
    assert [kernel.figures.wide_loads for kernel in plant(wide, claims=("wide_loads",))] == [1, 1]
    with pytest.raises(ValueError, match="claims fast, expected some of wmma"):
        claims_of(replace(PLANTED, claims=("fast",)))


def test_a_known_break_covers_its_rows_up_to_its_limit(
    plant: Callable[..., list[KernelResources]],
) -> None:
    (broken, _) = broken_budgets(plant(LOCAL_ARRAY))
    entry = KnownBreak("scratch_nbytes", "planted", "any", broken.value, "a plant")
    assert known_break(broken, [entry]) == entry
    others = {"figure": "vgpr_spills", "op": "x", "path": "x", "limit": broken.value - 1}
    for name, value in others.items():
        assert known_break(broken, [replace(entry, **{name: value})]) is None  # type: ignore[arg-type]
    assert Budget("wmma", 2, "x", least=True).keeps(broken.kernel) is False


# --- the parser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assembly(offline_clang: OfflineClang) -> str:
    _, _, source = variants_of(REGISTRY.find("add", "", "any"), waves=(32,))[0]
    text = compile_assembly(offline_clang, source, KERNEL_FOLDER)
    assert figures_of(text, "add", 32).occupancy == 16
    return text


ODD = {
    "count missing": ("    .vgpr_count:", "    .vector_count:", ".vgpr_count is nothing"),
    "count in words": ("    .vgpr_spill_count: 0", "    .vgpr_spill_count: none", "is none"),
    "count below 0": ("    .sgpr_spill_count: 0", "    .sgpr_spill_count: -1", "is -1"),
    "other unit": ("    .private_segment_fixed_size: 0", "    .private_size: 0", "is nothing"),
    "no occupancy": ("; Occupancy:", "; Waves:", "Occupancy is missing"),
    "an expression": ("; Occupancy: 16", "; Occupancy: max(16, x)", "Occupancy is max"),
    "no metadata": ("\t.amdgpu_metadata", "\t.metadata", "0 complete entries"),
    "other name": ("    .name:           add\n", "    .name: plus\n", "0 complete entries"),
    "no label": ("\nadd:", "\nplus:", "add: stands 0 times"),
    "no end": ("\t.size\tadd, ", "\t.size\tplus, ", "stands 0 times"),
    "other wave": ("    .wavefront_size: 32", "    .wavefront_size: 64", "wave size 64"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_understood_is_an_error(name: str, assembly: str) -> None:
    before, after, said = ODD[name]
    assert before in assembly
    with pytest.raises(DeviceError, match=re.escape(said)):
        figures_of(assembly.replace(before, after), "add", 32)


def test_a_define_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs HEIGHT, expected defines among MAX_COLS"):
        variants_of(replace(PLANTED, parameters=("HEIGHT",)))


def test_a_kernel_that_does_not_compile_is_an_error(
    plant: Callable[..., list[KernelResources]],
) -> None:
    with pytest.raises(DeviceError, match=r"planted\.hip .*does not compile for gfx1201:\n(.|\n)*"):
        plant(HEAD + "x[0] = nothing; }\n")


def test_assembly_is_kept_and_damage_noticed(
    offline_clang: OfflineClang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    row = REGISTRY.find("add", "", "any")
    first = survey([row], offline_clang)
    gone = replace(offline_clang, path=str(tmp_path / "gone"))
    assert survey([row], gone) == first
    for file in (tmp_path / "isa").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError):
        survey([row], gone)
    assert survey([row], offline_clang) == first
    other = replace(gone, version=f"{gone.version} other")
    with pytest.raises(FileNotFoundError):
        survey([row], other)
