"""What each kernel of the registry costs on gfx1201: compiled offline, read from the assembly.

Figures come from the metadata that the code object carries (`.amdgpu_metadata`, see LLVM's
AMDGPUUsage), the occupancy from clang's own comment, instructions from the kernel's text. Whatever
is missing or of an unknown form is an error, never a zero.
"""

import hashlib
import itertools
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backend_hip.compile import KERNEL_FOLDER, KernelSource, flatten, read_cached, seal, unseal
from backend_hip.dispatch import source_of
from backend_hip.offline import OfflineClang, options
from backend_hip.registry import FEW_COLUMNS, KernelRow
from backend_hip.runtimes.compilers import run_tool
from reference.model.cache import atomic_write, cache_folder
from reference.model.errors import DeviceError

SIZES: Mapping[str, tuple[int, ...]] = {
    "MAX_COLS": (40,),
    "HEAD_SIZE": (64, 128, 256),
    "GROUP": (4,),
    "EXPERTS": (128, 256),
    "STATE_SIZE": (128,),
}
"""Values of the defines that rows leave open, by name: those of the models at hand."""
_OWN_SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {"matvec_few": {"MAX_COLS": FEW_COLUMNS}}
"""Of ops whose kernels exist for these values only, whatever is asked for."""
WAVES = (32, 64)
ARCHITECTURE = "gfx1201"

# RDNA4's limits, from LLVM's AMDGPUBaseInfo (getTotalNumVGPRs, getVGPRAllocGranule, gfx1201's
# Feature1_5xVGPRs) and its AMDGPUSubtarget (getOccupancyWithLocalMemSize).
MAX_WAVES = 16  # per SIMD
SIMDS = 4  # that share a work-group processor's LDS
LDS_NBYTES = 128 * 1024  # per work-group processor
_VGPRS = {32: 1536, 64: 768}  # per SIMD and lane, by wave size
_VGPR_GRANULE = {32: 24, 64: 12}

# Of a kernel; its arguments' are indented deeper.
_SCALAR = re.compile(r"^(?: {4})?(\.\w+): +(\S+)$", re.MULTILINE)
_WIDE_LOAD = re.compile(r"(global|flat|buffer|ds)_load(_tr)?_b128")

Sizes = Mapping[str, Sequence[int]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    """One kernel of one code object.

    Registers are per lane (vgprs) and per wave (sgprs); spills count registers; LDS is per block,
    scratch per lane, in bytes; occupancy is waves per SIMD; wmma, wide_loads (16 bytes a lane from
    memory or LDS) and dot4 count instructions in the text, not executions.
    """

    vgprs: int
    sgprs: int
    lds_nbytes: int
    scratch_nbytes: int
    vgpr_spills: int
    sgpr_spills: int
    occupancy: int
    wmma: int
    wide_loads: int
    dot4: int
    code_nbytes: int


@dataclass(frozen=True)
class KernelResources:
    """A registry row at one wave size and one choice of its open defines."""

    row: KernelRow
    source: KernelSource
    sizes: tuple[tuple[str, int], ...]  # the open defines, such as MAX_COLS
    wave: int
    block: int
    figures: Figures

    @property
    def name(self) -> str:
        sizes = (f"{name}={value}" for name, value in self.sizes)
        return " ".join([*filter(None, self.row.key), *sizes, f"wave{self.wave}"])


def survey(
    rows: Iterable[KernelRow],
    clang: OfflineClang,
    *,
    sizes: Sizes = SIZES,
    waves: Sequence[int] = WAVES,
    folder: Path = KERNEL_FOLDER,
    progress: Progress | None = None,
) -> list[KernelResources]:
    """Resources of every row at each of its sizes and at each wave size, in the rows' order.

    Each code object is compiled once, in parallel, and its assembly kept in the cache folder "isa".
    Raises ValueError for a define that `sizes` has no values for, DeviceError with clang's messages
    where a kernel does not compile or its assembly is not understood.
    """
    variants = [(row, *variant) for row in rows for variant in variants_of(row, sizes, waves)]
    sources = list(dict.fromkeys(source for *_, source in variants))
    assembly: dict[KernelSource, str] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        texts = pool.map(lambda source: compile_assembly(clang, source, folder), sources)
        for done, (source, text) in enumerate(zip(sources, texts, strict=True), start=1):
            assembly[source] = text
            if progress is not None:
                progress(f"compiling for gfx1201: {done}/{len(sources)} {source.name}")
    return [
        KernelResources(
            row,
            source,
            tuple(chosen.items()),
            wave,
            dict(source.defines)["SIMT_BLOCK"],
            figures_of(assembly[source], row.entry, wave),
        )
        for row, chosen, wave, source in variants
    ]


def variants_of(
    row: KernelRow, sizes: Sizes = SIZES, waves: Sequence[int] = WAVES
) -> list[tuple[dict[str, int], int, KernelSource]]:
    """Open defines, wave size and source for every combination that a row can be built for.

    At another wave size than the registry's a block keeps its threads, but holds one wave at least.
    """
    sizes = {**sizes, **_OWN_SIZES.get(row.op, {})}
    names = [*row.parameters, *filter(None, [row.sized]), *(["GROUP"] if row.grouped else [])]
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ValueError(
            f"isa: {row.key} needs {', '.join(unknown)}, expected defines among {', '.join(sizes)} "
            "because only they have values; add them to SIZES"
        )
    found = []
    for values in itertools.product(*(sizes[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        size, group = chosen[row.sized] if row.sized else 0, chosen.get("GROUP", 1)
        source = source_of(row, chosen, size, ARCHITECTURE, group)
        for wave in (wave for wave in waves if wave in row.waves):
            defines = dict(source.defines)
            defines |= {"SIMT_WAVE": wave, "SIMT_BLOCK": max(wave, defines["SIMT_BLOCK"])}
            found.append((chosen, wave, KernelSource(source.file, tuple(defines.items()))))
    return found


def compile_assembly(clang: OfflineClang, source: KernelSource, folder: Path) -> str:
    """A source's assembly, from the cache or from clang. DeviceError where clang refuses it."""
    text = flatten(source.file, folder)
    parts = ("isa 1", text, *options(source), clang.version)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache_folder("isa") / f"{key}.s.z"
    content = read_cached(path)
    kept = None if content is None else unseal(content, key)
    if kept is not None:
        return zlib.decompress(kept).decode()
    with tempfile.TemporaryDirectory() as made:
        kernel, target = Path(made) / source.file, Path(made) / "kernel.s"
        kernel.write_text(text)
        run = run_tool(clang.command(source, kernel, target, "-S"))
        if run.returncode != 0:
            raise DeviceError(f"isa: {source.name} does not compile for gfx1201:\n{run.stderr}")
        assembly = target.read_text()
    atomic_write(path, seal(zlib.compress(assembly.encode()), key))
    return assembly


def figures_of(assembly: str, entry: str, wave: int) -> Figures:
    """Reads one kernel's figures. DeviceError for anything missing, twice there, or not a number,
    and for a kernel built at another wave size."""
    facts = _metadata(assembly, entry)
    if facts[".wavefront_size"] != str(wave):
        raise _odd(entry, f"wave size {facts['.wavefront_size']}, expected {wave}")
    start = _place(assembly, f"\n{entry}:", entry)
    body = assembly[start : _place(assembly, f"\t.size\t{entry}, ", entry)]
    comments = assembly[start:].partition("; Kernel info:")[2].partition("\n\t.text")[0]
    mnemonics = re.findall(r"^\t([a-z]\w+)", body, re.MULTILINE)
    return Figures(
        vgprs=_number(facts, ".vgpr_count", entry),
        sgprs=_number(facts, ".sgpr_count", entry),
        lds_nbytes=_number(facts, ".group_segment_fixed_size", entry),
        scratch_nbytes=_number(facts, ".private_segment_fixed_size", entry),
        vgpr_spills=_number(facts, ".vgpr_spill_count", entry),
        sgpr_spills=_number(facts, ".sgpr_spill_count", entry),
        occupancy=_comment(comments, "Occupancy", entry),
        wmma=sum(name.startswith(("v_wmma", "v_swmmac")) for name in mnemonics),
        wide_loads=sum(_WIDE_LOAD.match(name) is not None for name in mnemonics),
        dot4=sum(name.startswith("v_dot4") for name in mnemonics),
        code_nbytes=_comment(comments, "codeLenInByte", entry),
    )


def occupancy(vgprs: int, lds_nbytes: int, block: int, wave: int) -> int:
    """Waves per SIMD that registers and LDS allow: what `Figures.occupancy` must equal.

    Registers are given in granules; LDS holds whole blocks, whose waves are spread over the SIMDs
    of a work-group processor (rounded up: the SIMD that has most).
    """
    granule = _VGPR_GRANULE[wave]
    by_registers = _VGPRS[wave] // (granule * max(1, math.ceil(vgprs / granule)))
    blocks = LDS_NBYTES // lds_nbytes if lds_nbytes else MAX_WAVES * SIMDS
    by_lds = math.ceil(blocks * math.ceil(block / wave) / SIMDS)
    return min(MAX_WAVES, by_registers, by_lds)


def _metadata(assembly: str, entry: str) -> dict[str, str]:
    """Scalars of the kernel's entry in the code object's metadata; keys keep their dot."""
    block = re.search(r"^\t\.amdgpu_metadata\n(.*?)^\t\.end_amdgpu_metadata", assembly, re.M | re.S)
    kernels = [] if block is None else re.split(r"^  - ", block[1], flags=re.MULTILINE)[1:]
    found = [dict(_SCALAR.findall(kernel)) for kernel in kernels]
    mine = [facts for facts in found if facts.get(".name") == entry]
    if len(mine) != 1 or ".wavefront_size" not in mine[0]:
        raise _odd(entry, f"{len(mine)} complete entries in the metadata, expected 1")
    return mine[0]


def _number(facts: Mapping[str, str], key: str, entry: str) -> int:
    value = facts.get(key, "nothing")
    if not value.isdecimal():
        raise _odd(entry, f"{key} is {value}, expected a number")
    return int(value)


def _comment(comments: str, name: str, entry: str) -> int:
    found: list[str] = re.findall(rf"^; {name} ?[:=] (.*)$", comments, re.MULTILINE)
    if len(found) != 1 or not found[0].isdecimal():
        raise _odd(
            entry, f"comment {name} is {' and '.join(found) or 'missing'}, expected 1 number"
        )
    return int(found[0])


def _place(assembly: str, mark: str, entry: str) -> int:
    if assembly.count(mark) != 1:
        raise _odd(entry, f"{mark.strip()} stands {assembly.count(mark)} times, expected once")
    return assembly.index(mark)


def _odd(entry: str, what: str) -> DeviceError:
    return DeviceError(f"isa: {entry}: the assembly is not understood: {what}")
