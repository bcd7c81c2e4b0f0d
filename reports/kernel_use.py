"""What batched products take of the device by MAX_COLS: measured on the card, and static figures.

A static figure explains a measured speed and does not replace it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from reports.records import ReportError
from reports.tables import ABSENT, Table

KIND = "kernel use"


@dataclass(frozen=True)
class BatchedKernel:
    """The batched product of path kparallel for one format at one MAX_COLS.

    `share`: of the bytes of the model's plain products. From the driver, None where there is none
    to ask: registers a lane, bytes a lane that don't fit into them, shared bytes a block, and the
    threads that a compute unit holds at a time (`threads`) of those that it could
    (`most_threads`). `static_...`: of the build for gfx1201 at wave 32, None where `static_missing`
    says why: registers and spilled registers a lane, waves a SIMD of at most 16.
    """

    model: str
    runtime: str
    device: str
    max_cols: int
    format: str
    share: float
    registers: int | None
    local_nbytes: int | None
    shared_nbytes: int | None
    threads: int | None
    most_threads: int | None
    static_registers: int | None
    static_spills: int | None
    static_waves: int | None
    static_missing: str

    def stored(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"kind": KIND, **asdict(self)}

    @property
    def summary(self) -> str:
        """For the note of a row that this kernel decides the speed of."""
        parts = []
        if self.registers is not None:
            parts.append(
                f"{self.registers} registers, {self.local_nbytes} B spilled, {self._occupancy}"
            )
        if self.static_registers is not None:
            parts.append(
                f"gfx1201 {self.static_registers} VGPR, {self.static_spills} spilled, "
                f"{self.static_waves} of 16 waves"
            )
        return f"{self.format}: {'; '.join(parts)}" if parts else ""

    @property
    def _occupancy(self) -> str:
        if self.threads is None or not self.most_threads:
            return ABSENT
        return f"{100 * self.threads / self.most_threads:.0f} % occupied"

    def cells(self) -> tuple[str, ...]:
        """Of the table's row."""
        figures = (
            *(self.registers, self.local_nbytes, self.shared_nbytes),
            *(self.static_registers, self.static_spills, self.static_waves),
        )
        texts = [ABSENT if figure is None else f"{figure:,}" for figure in figures]
        occupied = self._occupancy.removesuffix(" occupied")
        head = (str(self.max_cols), self.format, f"{100 * self.share:.0f} %")
        return (*head, *texts[:3], occupied, *texts[3:])


def read_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[BatchedKernel, ...]:
    """The records of stored rows. Raises ReportError for one that is not whole."""
    names = [field.name for field in fields(BatchedKernel)]
    for row in rows:
        missing = [name for name in names if name not in row]
        if missing:
            raise ReportError(f"records: a kernel's use lacks {missing[0]}")
    return tuple(BatchedKernel(**{name: row[name] for name in names}) for row in rows)


def tables(records: Sequence[BatchedKernel]) -> tuple[Table, ...]:
    """One table for each model on each device."""
    kinds = dict.fromkeys((one.model, one.runtime, one.device) for one in records)
    return tuple(
        _table([one for one in records if (one.model, one.runtime, one.device) == kind])
        for kind in kinds
    )


def _table(records: Sequence[BatchedKernel]) -> Table:
    first = records[0]
    own = ("registers", "spilled bytes", "shared bytes", "occupied")
    static = ("VGPR", "spilled", "waves of 16")
    headers = (
        *("MAX_COLS", "format", "of weights"),
        *(f"{name} [{first.runtime}]" for name in own),
        *(f"{name} [gfx1201, static]" for name in static),
    )
    notes = [
        "Registers and spilled bytes are of a lane, shared bytes of a block; occupied: threads "
        "that a compute unit holds at a time, of those that it could. gfx1201: the compiler's "
        "figures at wave 32, no kernel ran."
    ]
    if first.registers is None:
        notes.append(f"{first.runtime}: {first.device} has no registers to ask for.")
    notes += dict.fromkeys(
        f"gfx1201: {one.static_missing}." for one in records if one.static_missing
    )
    return Table(
        f"Batched products of path kparallel: {first.model}, {first.runtime} ({first.device})",
        headers,
        tuple(one.cells() for one in records),
        tuple(notes),
    )
