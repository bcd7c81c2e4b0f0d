"""What does not round at all: ops whose results must be equal, whatever kernel made them.

They stand beside the rows of local_tolerances.py and allow nothing, so that a reader of the tables
sees every op. `promise(op)` is the limit, 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from suites.harness.local_tolerances import RowKey, consult


@dataclass(frozen=True)
class Promise:
    """An op that does not round: nothing is allowed, so it has no roundings and no magnitude.

    `judged_by` is the kind of check (check_kinds.py) that holds the engine to it.
    """

    op: str
    rounding: str
    judged_by: str
    reason: str


_PROMISES = (
    Promise("copy", "any", "local", "The same values under a second name."),
    Promise(
        "routing",
        "any",
        "local",
        "A comparison of the engine's own logits does not round; ties go to the lowest index.",
    ),
    Promise("kv_write", "any", "kv-write", "Rounding to the storage type is a function."),
    Promise(
        "argmax", "any", "tail-prefill", "A comparison does not round; ties go to the lowest id."
    ),
    Promise(
        "prefill_pair",
        "kparallel",
        "pair-logits",
        "Batched and per-token columns run one inline dot product: the contract is equal bits.",
    ),
)

PROMISES: Mapping[RowKey, Promise] = {(p.op, p.rounding): p for p in _PROMISES}


def promise(op: str, rounding: str = "any") -> float:
    """The limit of an op that promises not to round, which is 0. KeyError where there is none."""
    found = PROMISES[op, rounding]
    consult((found.op, found.rounding))
    return 0.0
