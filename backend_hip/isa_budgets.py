"""What a kernel may cost on gfx1201: one table, with a reason each, held by suites/correctness.

A budget reads the registry: it binds every row that its fields name, so a new row is bound as soon
as it exists. A budget that the present kernels break stands in KNOWN with what is to be done; an
entry there that nothing breaks any more fails the suite, so the list only gets shorter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend_hip.isa import KernelResources
from backend_hip.registry import KernelRow

CLAIMS = ("wmma", "wide_loads", "dot4")
"""What a registry row may claim: fields of `isa.Figures` that count instructions."""


@dataclass(frozen=True)
class Budget:
    """`figure` of isa.Figures is at most, or with `least` at least, `limit`; each other field that
    is not empty narrows the rows that this binds."""

    figure: str
    limit: int
    reason: str
    least: bool = False
    ops: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    waves: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    claim: str = ""

    @property
    def name(self) -> str:
        """Such as "matvec_batched Q4_K|Q6_K kparallel MAX_COLS=40 wave64: occupancy >= 10"."""
        words = ["|".join(names) for names in (self.ops, self.variants, self.paths) if names]
        words += [f"{name}={value}" for name, value in self.sizes]
        words += [f"wave{wave}" for wave in self.waves]
        words += [f"claims {self.claim}"] if self.claim else []
        rows = " ".join(words) or "every kernel"
        return f"{rows}: {self.figure} {'>=' if self.least else '<='} {self.limit}"

    def binds(self, kernel: KernelResources) -> bool:
        row = kernel.row
        named = (
            (self.ops, row.op),
            (self.variants, row.variant),
            (self.paths, row.path),
            (self.waves, kernel.wave),
        )
        return (
            all(not wanted or value in wanted for wanted, value in named)
            and set(self.sizes) <= set(kernel.sizes)
            and (not self.claim or self.claim in claims_of(row))
        )

    def keeps(self, kernel: KernelResources) -> bool:
        value: int = getattr(kernel.figures, self.figure)
        return value >= self.limit if self.least else value <= self.limit


@dataclass(frozen=True)
class KnownBreak:
    """A break of a budget on `figure`, accepted for now up to (or down to) `limit` in the rows."""

    figure: str
    op: str
    path: str
    limit: int
    reason: str

    @property
    def name(self) -> str:
        return f"{self.op} {self.path}: {self.figure} up to {self.limit}"

    def covers(self, broken: "Broken") -> bool:
        row = broken.kernel.row
        named = (row.op, row.path, broken.budget.figure) == (self.op, self.path, self.figure)
        within = broken.value >= self.limit if broken.budget.least else broken.value <= self.limit
        return named and within


@dataclass(frozen=True)
class Broken:
    """A kernel that breaks a budget."""

    budget: Budget
    kernel: KernelResources

    @property
    def value(self) -> int:
        value: int = getattr(self.kernel.figures, self.budget.figure)
        return value

    @property
    def text(self) -> str:
        budget = self.budget
        bound = f"at {'least' if budget.least else 'most'} {budget.limit}"
        return (
            f"{self.kernel.name}: {budget.figure} is {self.value}, expected {bound} "
            f"because {budget.reason}"
        )


BUDGETS: tuple[Budget, ...] = (
    Budget("vgpr_spills", 0, "a spilled register goes through memory in the inner loop"),
    Budget("scratch_nbytes", 0, "scratch is memory: an array that was meant to be registers"),
    Budget("sgpr_spills", 0, "spilled scalars take vector registers and a lane move each way"),
    Budget(
        "occupancy",
        10,
        "fewer waves a SIMD do not hide the latency of the weight stream at the default MAX_COLS",
        least=True,
        ops=("matvec_batched",),
        variants=("Q4_K", "Q6_K"),
        paths=("kparallel",),
        waves=(64,),
        sizes=(("MAX_COLS", 40),),
    ),
    Budget("wmma", 1, "the row claims matrix units", least=True, claim="wmma"),
    Budget("wide_loads", 1, "the row claims 16-byte loads", least=True, claim="wide_loads"),
    Budget("dot4", 1, "the row claims dot products of four bytes", least=True, claim="dot4"),
)

_HOISTED = (
    "the base address and the condition of each column are kept in two scalars each (80 at "
    "MAX_COLS 40, of 106); goes where they are made anew for each unit (LEAN in tuning.py)"
)
_LAST_STEP = (
    "the condition of each column's result is kept in two scalars in wave64, at many columns more "
    "than there are; goes when results are stored in two turns"
)
_HEADS_OF_256 = (
    "keys of q8_0 and values of f16 with heads of 256 in groups of four need 257 registers of 256"
)
# Limits are the worst of all formats at MAX_COLS 64 and wave64.
KNOWN: tuple[KnownBreak, ...] = (
    KnownBreak("sgpr_spills", "matvec_batched", "kparallel", 34, _LAST_STEP),
    KnownBreak("sgpr_spills", "matvec_few", "kparallel", 40, _HOISTED),
    KnownBreak("sgpr_spills", "matvec_batched", "serial", 190, _HOISTED),
    KnownBreak("sgpr_spills", "matvec_experts", "kparallel", 52, _LAST_STEP),
    KnownBreak("vgpr_spills", "attention", "any", 1, _HEADS_OF_256),
    KnownBreak("scratch_nbytes", "attention", "any", 8, _HEADS_OF_256),
)


def claims_of(row: KernelRow) -> tuple[str, ...]:
    """What a row claims, itself and by its path. ValueError for a claim that no budget checks."""
    claims = (*row.claims, *(["wmma"] if row.path == "matrix" else []))
    unknown = [claim for claim in claims if claim not in CLAIMS]
    if unknown:
        raise ValueError(
            f"registry: {row.key} claims {', '.join(unknown)}, expected some of {', '.join(CLAIMS)}"
        )
    return claims


def broken_budgets(
    kernels: Iterable[KernelResources], budgets: Sequence[Budget] = BUDGETS
) -> list[Broken]:
    """Every budget that a kernel breaks, known or not."""
    return [
        Broken(budget, kernel)
        for kernel in kernels
        for budget in budgets
        if budget.binds(kernel) and not budget.keeps(kernel)
    ]


def known_break(broken: Broken, known: Sequence[KnownBreak] = KNOWN) -> KnownBreak | None:
    """The entry that accepts a break for now."""
    return next((entry for entry in known if entry.covers(broken)), None)
