"""What a loaded kernel takes of the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelUse:
    """Registers a lane, bytes a lane that do not fit into them, shared bytes a block, and blocks
    that a compute unit holds at a time."""

    registers: int
    local_nbytes: int
    shared_nbytes: int
    blocks_per_unit: int
