"""Resources on gfx1201: the budgets hold, and four sources of the figures agree."""

import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from backend_hip.compile import flatten
from backend_hip.isa import SIZES, WAVES, Figures, KernelResources, occupancy, survey
from backend_hip.isa_budgets import BUDGETS, KNOWN, broken_budgets, claims_of, known_break
from backend_hip.offline import OfflineClang
from backend_hip.registry import REGISTRY
from backend_hip.runtimes.compilers import run_tool
from reference.model.quant import FORMATS

REDUCED_FORMATS = ("Q4_K", "Q6_K")
REDUCED_SIZES = {**SIZES, "HEAD_SIZE": (128,), "EXPERTS": (256,)}
REDUCED = [
    row
    for row in REGISTRY
    for form in [row.variant.partition("/")[0]]  # "Q4_K/16" is one block shape of Q4_K
    if form not in FORMATS or form in REDUCED_FORMATS
]
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


def test_every_known_break_is_still_one(
    reduced: list[KernelResources], offline_clang: OfflineClang
) -> None:
    keys = (("attention", "q8_0,f16@256x4", "any"), ("matvec_batched", "Q4_K", "kparallel"))
    rows = [REGISTRY.find(*key) for key in keys]
    largest = survey(rows, offline_clang, sizes={**SIZES, "HEAD_SIZE": (256,), "MAX_COLS": (64,)})
    used = {known_break(entry) for entry in broken_budgets([*reduced, *largest])}
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
    mine = run.stderr.partition(f"Function Name: {kernel.row.entry} ")[2].partition("Function")[0]
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
