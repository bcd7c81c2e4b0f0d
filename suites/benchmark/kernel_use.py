"""What the batched products of a MAX_COLS sweep take: asked of the driver, and compiled offline."""

from collections.abc import Mapping
from typing import NamedTuple

from backend_hip import Device
from backend_hip.device import Progress
from backend_hip.dispatch import Kernels
from backend_hip.isa import Figures, survey
from backend_hip.offline import find_clang
from backend_hip.registry import REGISTRY
from backend_hip.wave import WAVE
from reference.model import Model
from reference.model.errors import DeviceError, InputError
from reports.kernel_use import BatchedKernel

OP, PATH = "matvec_batched", "kparallel"


class Static(NamedTuple):
    """Figures of the build for gfx1201 by (format, MAX_COLS), or why there are none."""

    figures: Mapping[tuple[str, int], Figures]
    missing: str


def format_shares(model: Model) -> dict[str, float]:
    """Formats of a model's plain products with their share of the bytes, the largest first."""
    nbytes: dict[str, int] = {}
    for tensor in model.weights.matrices():
        name = tensor.format.name
        nbytes[name] = nbytes.get(name, 0) + tensor.raw.nbytes
    whole = sum(nbytes.values())
    ranked = sorted(nbytes.items(), key=lambda item: -item[1])
    return {name: count / whole for name, count in ranked}


def static_figures(
    formats: list[str], max_cols: list[int], progress: Progress | None = None
) -> Static:
    """Compiles the products for gfx1201 where there is a clang for it."""
    rows = [REGISTRY.find(OP, name, PATH) for name in formats]
    try:
        found = survey(
            rows, find_clang(), sizes={"MAX_COLS": max_cols}, waves=(WAVE,), progress=progress
        )
    except (InputError, DeviceError) as error:
        return Static({}, " ".join(str(error).split()).removeprefix("gfx1201: "))
    return Static(
        {(one.row.variant, dict(one.sizes)["MAX_COLS"]): one.figures for one in found}, ""
    )


def batched_kernels(
    name: str,
    model: Model,
    device: Device,
    engines: Mapping[int, Kernels],
    progress: Progress | None = None,
) -> list[BatchedKernel]:
    """A record for each format of each engine; `engines`: loaded kernels by MAX_COLS."""
    shares = format_shares(model)
    static = static_figures(list(shares), list(engines), progress)
    emulated = device.runtime.kind == "cpu"
    records = []
    for max_cols, kernels in engines.items():
        for form, share in shares.items():
            key = (OP, form, PATH)
            use, figures = kernels.use(key), static.figures.get((form, max_cols))
            record = BatchedKernel(
                model=name,
                runtime=device.label,
                device=device.name,
                max_cols=max_cols,
                format=form,
                share=share,
                registers=None if emulated else use.registers,
                local_nbytes=None if emulated else use.local_nbytes,
                shared_nbytes=None if emulated else use.shared_nbytes,
                threads=None if emulated else use.blocks_per_unit * kernels.block(key),
                most_threads=None if emulated else device.threads_per_unit,
                static_registers=None if figures is None else figures.vgprs,
                static_spills=None if figures is None else figures.vgpr_spills,
                static_waves=None if figures is None else figures.occupancy,
                static_missing=static.missing,
            )
            records.append(record)
    return records
