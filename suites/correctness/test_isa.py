"""Resources on gfx1201: the budgets hold, four sources agree, and each plant turns something red."""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from backend_hip.compile import KERNEL_FOLDER, flatten
from backend_hip.isa import (
    SIZES,
    WAVES,
    Figures,
    KernelResources,
    compile_assembly,
    figures_of,
    occupancy,
    survey,
    variants_of,
)
from backend_hip.isa_budgets import (
    BUDGETS,
    KNOWN,
    Budget,
    KnownBreak,
    broken_budgets,
    claims_of,
    known_break,
)
from backend_hip.offline import OfflineClang
from backend_hip.registry import REGISTRY, KernelRow
from backend_hip.runtimes.compilers import run_tool
from reference.model.errors import DeviceError
from reference.model.quant import FORMATS

REDUCED_FORMATS = ("Q4_K", "Q6_K")
REDUCED_SIZES = {**SIZES, "HEAD_SIZE": (128,), "EXPERTS": (256,)}
REDUCED = [r for r in REGISTRY if r.variant not in FORMATS or r.variant in REDUCED_FORMATS]
ALL_SIZES = {**SIZES, "MAX_COLS": (16, 32, 35, 40, 44, 48, 64)}


@pytest.fixture(scope="module")
def reduced(offline_clang: OfflineClang) -> list[KernelResources]:
    return survey(REDUCED, offline_clang, sizes=REDUCED_SIZES)


def new_breaks(kernels: Sequence[KernelResources]) -> list[str]:
    return [entry.text for entry in broken_budgets(kernels) if known_break(entry) is None]


# --- the budgets --------------------------------------------------------------------------------


def test_budgets_hold(reduced: list[KernelResources]) -> None:
    assert {kernel.row.key for kernel in reduced} == {row.key for row in REDUCED}
    assert new_breaks(reduced) == []


def test_every_budget_binds_what_it_names(reduced: list[KernelResources]) -> None:
    claimed = {claim for row in REGISTRY for claim in claims_of(row)}
    idle = [
        budget.name
        for budget in BUDGETS
        if (not budget.claim or budget.claim in claimed)
        and not any(budget.binds(kernel) for kernel in reduced)
    ]
    assert idle == []
    assert all(budget.figure in {field.name for field in fields(Figures)} for budget in BUDGETS)


def test_every_known_break_is_still_one(reduced: list[KernelResources]) -> None:
    used = {known_break(entry) for entry in broken_budgets(reduced)}
    gone = [entry for entry in KNOWN if entry not in used]
    assert gone == [], "nothing breaks these any more: remove them from KNOWN"


@pytest.mark.full
def test_budgets_hold_for_every_variant(offline_clang: OfflineClang) -> None:
    kernels = survey(REGISTRY, offline_clang, sizes=ALL_SIZES)
    assert {kernel.row.key for kernel in kernels} == {row.key for row in REGISTRY}
    assert new_breaks(kernels) == []
    assert disagreements(kernels) == []


# --- sources that must agree --------------------------------------------------------------------


def disagreements(kernels: Sequence[KernelResources]) -> list[str]:
    """Kernels whose occupancy is not what registers, LDS and block allow by our formula."""
    return [
        f"{kernel.name}: {figures.occupancy}, by the formula {ours}"
        for kernel in kernels
        for figures in [kernel.figures]
        for ours in [occupancy(figures.vgprs, figures.lds_nbytes, kernel.block, kernel.wave)]
        if figures.occupancy != ours
    ]


def test_occupancy_is_what_the_formula_gives(reduced: list[KernelResources]) -> None:
    assert len({kernel.figures.occupancy for kernel in reduced}) > 2
    assert disagreements(reduced) == []
    wrong = [replace(k, figures=replace(k.figures, occupancy=17)) for k in reduced]
    assert len(disagreements(wrong)) == len(wrong)


LDS_SIZES = (256, 4096, 4100, 16384, 24000, 32768, 48000, 65536)


def test_occupancy_limited_by_lds(plant: Callable[..., list[KernelResources]]) -> None:
    for block in (32, 64, 256):
        for nbytes in LDS_SIZES:
            kernels = plant(LDS_KERNEL.replace("NBYTES", str(nbytes)), block=block)
            assert [kernel.figures.lds_nbytes for kernel in kernels] == [nbytes] * len(WAVES)
            assert disagreements(kernels) == []


REMARKS = {
    "SGPRs": "sgprs",
    "VGPRs": "vgprs",
    "ScratchSize [bytes/lane]": "scratch_nbytes",
    "Occupancy [waves/SIMD]": "occupancy",
    "SGPRs Spill": "sgpr_spills",
    "VGPRs Spill": "vgpr_spills",
    "LDS Size [bytes/block]": "lds_nbytes",
}


@pytest.mark.parametrize("wave", WAVES)
@pytest.mark.parametrize("op", ["matvec_batched", "attention", "delta_rule"])
def test_the_compilers_remarks_say_the_same(
    op: str, wave: int, reduced: list[KernelResources], offline_clang: OfflineClang, tmp_path: Path
) -> None:
    kernel = next(k for k in reduced if k.row.op == op and k.wave == wave)
    text = tmp_path / kernel.source.file
    text.write_text(flatten(kernel.source.file))
    remark = "-Rpass-analysis=kernel-resource-usage"
    run = run_tool(offline_clang.command(kernel.source, text, tmp_path / "k.s", "-S", remark))
    mine = run.stderr[run.stderr.index(f"Function Name: {kernel.row.entry} ") :]
    said = dict(re.findall(r"remark: +([A-Z].*?): (\S+) \[-R", mine))
    figures = asdict(kernel.figures)
    assert {name: said[name] for name in REMARKS} == {
        name: str(figures[field]) for name, field in REMARKS.items()
    }


# Bytes of a kernel descriptor, and of its register's field, LLVM's AMDGPUUsage; the encoding's
# granule differs from that of the allocation.
DESCRIPTOR = struct.Struct("<II40xI")
ENCODED_GRANULE = {32: 8, 64: 4}


@pytest.mark.parametrize("wave", WAVES)
def test_the_linked_code_object_says_the_same(
    wave: int, reduced: list[KernelResources], offline_clang: OfflineClang, tmp_path: Path
) -> None:
    kernel = next(k for k in reduced if k.row.op == "attention" and k.wave == wave)
    text, target = tmp_path / kernel.source.file, tmp_path / "kernel.co"
    text.write_text(flatten(kernel.source.file))
    run = run_tool(offline_clang.command(kernel.source, text, target))
    assert run.returncode == 0, run.stderr
    code = target.read_bytes()
    lds, scratch, registers = DESCRIPTOR.unpack_from(code, descriptor_at(code, kernel.row.entry))
    granule = ENCODED_GRANULE[wave]
    figures = kernel.figures
    assert (lds, scratch) == (figures.lds_nbytes, figures.scratch_nbytes)
    assert (registers & 0x3F) + 1 == -(-figures.vgprs // granule)


def descriptor_at(code: bytes, entry: str) -> int:
    """File offset of the symbol `entry`.kd in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQII", code, table + i * size) for i in range(count)]
    (symbols,) = (section for section in sections if section[1] == 2)  # SHT_SYMTAB
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, section, address, _ = struct.unpack_from("<IBBHQQ", code, at)
        if code[names + name :].startswith(f"{entry}.kd\0".encode()):
            return int(address - sections[section][3] + sections[section][4])
    raise AssertionError(f"no {entry}.kd in the code object")


# --- planted kernels ----------------------------------------------------------------------------

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
