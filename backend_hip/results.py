"""What the engine hands to whoever judges it: facts about a prefill or a step, no opinion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

PrefillMode = Literal["per-token", "batched"]


@dataclass(frozen=True)
class TailRecord:
    """Every link of the sampler tail of one step.

    logits -> device argmax (`device_token`) -> staging copy (`staged_token`, `staged_stamp`).
    `poison` was in staging before the step; `expected_stamp` is the step's number. `logits` (V,)
    float32 were read back from the device after the step.
    """

    poison: int
    staged_token: int
    staged_stamp: int
    expected_stamp: int
    device_token: int
    device_stamp: int
    logits: NDArray[Any]


@dataclass(frozen=True)
class StepResult:
    """One decode step. `token` is what the engine emits, `fed_token` what the kernels read.

    `routes` holds the step's launches by registry row, as in PrefillResult.
    """

    token: int
    tail: TailRecord
    fed_token: int
    position: int
    routes: Mapping[str, int]


@dataclass(frozen=True)
class PrefillResult:
    """One prefill. `logits` are (1 or T, V) float32; `position` is that after the prompt.

    `routes` holds kernel launches by registry row ("op variant path"), graph replays included;
    `logits_poisoned` counts last-token logits that still held the poison pattern.
    """

    mode: PrefillMode
    path: str
    n_tokens: int
    chunks: int
    logits: NDArray[Any]
    tail: TailRecord
    fed_token: int
    routes: Mapping[str, int]
    position: int
    logits_poisoned: int


@dataclass(frozen=True)
class PrefillPair:
    """The same prompt through both prefill modes of one engine, from the same position."""

    per_token: PrefillResult
    batched: PrefillResult
    kv_bits_equal: bool
