"""What the judge needs of an engine, as structure: `backend_hip.Engine` and the fakes both fit.

Fields mean what backend_hip/engine.py says; nothing here is implemented.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from reference.model.trace import Trace

STAGING_POISON = -1
"""The illegal token id that staging holds before every step."""
ARGMAX_SAW_NAN = -2
"""What the device argmax writes when a logit was NaN."""
PREFILL_MODES: tuple[str, ...] = ("per-token", "batched")

Progress = Callable[[str], None]


class Tail(Protocol):
    """What the sampler tail of one step left behind, read back from device and staging."""

    @property
    def poison(self) -> int: ...
    @property
    def staged_token(self) -> int: ...
    @property
    def staged_stamp(self) -> int: ...
    @property
    def expected_stamp(self) -> int: ...
    @property
    def device_token(self) -> int: ...
    @property
    def device_stamp(self) -> int: ...
    @property
    def logits(self) -> NDArray[Any]: ...


class Prefilled(Protocol):
    """One prompt fed; `routes` counts the launches that ran per registry row."""

    @property
    def mode(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def logits(self) -> NDArray[Any]: ...
    @property
    def tail(self) -> Tail: ...
    @property
    def fed_token(self) -> int: ...
    @property
    def routes(self) -> Mapping[str, int]: ...
    @property
    def chunks(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def logits_poisoned(self) -> int: ...


class Stepped(Protocol):
    """One token decoded; `routes` counts the launches of this step per registry row."""

    @property
    def routes(self) -> Mapping[str, int]: ...

    @property
    def token(self) -> int: ...
    @property
    def tail(self) -> Tail: ...
    @property
    def fed_token(self) -> int: ...
    @property
    def position(self) -> int: ...


class Pair(Protocol):
    """Both prefill modes of one prompt, as the engine's `validate` switch hands them over.

    `kv_bits_equal` speaks of all that the sequence left behind: KV contents and recurrent states.
    """

    @property
    def per_token(self) -> Prefilled: ...
    @property
    def batched(self) -> Prefilled: ...
    @property
    def kv_bits_equal(self) -> bool: ...


class Recurrent(Protocol):
    """A delta net layer's state: `memory` (NV, DS, DS) and `tail` (taps - 1, channels), float32."""

    @property
    def memory(self) -> NDArray[Any]: ...
    @property
    def tail(self) -> NDArray[Any]: ...


class JudgedEngine(Protocol):
    """An engine of one or more sequences; what is given none speaks of sequence 0.

    `positions` has one for each. `decode_batch` and `step_batch` advance the given sequences by one
    token each in one step, with results in their order.
    `prefill` and `step` are what a caller that only wants tokens calls: the mode that
    `batched_prefill` ("on", "off", "validate") means, and one token decoded of which only the next
    token is read back.
    """

    @property
    def position(self) -> int: ...
    @property
    def positions(self) -> tuple[int, ...]: ...
    @property
    def batched_prefill(self) -> str: ...
    def reset(self) -> None: ...
    def prefill(self, tokens: Sequence[int]) -> Prefilled: ...
    def step(self, token: int, *, sequence: int = 0) -> int: ...
    def prefill_per_token(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> Prefilled: ...
    def prefill_batched(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> Prefilled: ...
    def decode(self, token: int, *, sequence: int = 0) -> Stepped: ...
    def decode_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> Sequence[Stepped]: ...
    def step_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> Sequence[int]: ...
    def run_tail(self, logits: NDArray[Any]) -> Sequence[Tail]: ...
    def kv_contents(self, layer: int, sequence: int = 0) -> tuple[NDArray[Any], NDArray[Any]]: ...
    def recurrent_state(self, layer: int, sequence: int = 0) -> Recurrent: ...
    def close(self) -> None: ...


def prefill_of(engine: JudgedEngine, mode: str) -> Callable[..., Prefilled]:
    """The engine's entry for a prefill mode of PREFILL_MODES."""
    return engine.prefill_batched if mode == "batched" else engine.prefill_per_token
