"""The one table of check kinds: every check that a verdict can hold, and what it proves.

A verdict refuses a check whose name is in no row (a programming error, raised when the verdict is
made), and suites/meta/test_check_kinds.py plants a fault for each row that turns it red.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_MODE = "(per-token|batched)"


@dataclass(frozen=True)
class CheckKind:
    """`pattern` matches the whole name of a check; rows are tried in order and the first wins.

    `failed` holds the states that a check of this kind takes when it does not hold.
    """

    id: str
    pattern: str
    proves: str
    failed: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


CHECK_KINDS: tuple[CheckKind, ...] = (
    CheckKind(
        "support",
        "support",
        "the engine has a kernel for everything that the model needs",
        ("unsupported",),
    ),
    CheckKind(
        "device",
        "device",
        "the device ran everything that was queued without an error",
        ("invalid",),
    ),
    CheckKind(
        "trace-tokens",
        "trace: tokens",
        "what was traced is the prompt that was asked for",
        ("invalid",),
    ),
    CheckKind(
        "kv-write",
        "local(, .+)?: kv_write",
        "the cache holds the recorded K and V, rounded to the storage type, bit for bit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "recurrent-memory",
        "local(, .+)?: recurrent state",
        "delta net layers hold what the recorded inputs make of an empty state",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "local",
        "local: .+",
        "each operation alone, on the engine's own recorded inputs, is within its rounding bound",
        ("diverged", "unsupported", "invalid"),
    ),
    CheckKind(
        "local-second-mode",
        f"local, {_MODE}: .+",
        "the same for the prefill mode that is traced second",
        ("diverged", "unsupported", "invalid"),
    ),
    CheckKind(
        "local-decoded",
        "local, decoded positions: .+",
        "the same at the positions that only decoding had, traced in a prefill of these tokens",
        ("diverged", "unsupported", "invalid"),
    ),
    CheckKind(
        "local-narrow-flow",
        "local, narrow flow: .+",
        "the same of path matrix's kernels for few columns, which common steps run",
        ("diverged", "unsupported", "invalid"),
    ),
    CheckKind(
        "logits",
        f"logits: {_MODE} prefill against reference",
        "last-token logits are within the end-to-end limit of the float64 reference",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "told-apart",
        "reference tells tokens apart",
        "the reference's logits are not all equal, so that a fault can show in them",
        ("invalid",),
    ),
    CheckKind(
        "routes",
        "prefill pair: routes differ",
        "the two prefill modes ran different kernels, by the launch counters",
        ("invalid",),
    ),
    CheckKind(
        "two-modes",
        "prefill pair: two modes of one prompt",
        "the two results are of both modes, one prompt and one position",
        ("invalid",),
    ),
    CheckKind(
        "separate-results",
        "prefill pair: separate results",
        "the two results are separate buffers of separate generations",
        ("invalid",),
    ),
    CheckKind(
        "no-poison",
        f"(prefill pair|{_MODE} prefill): no poison left",
        "every logit was written, none still holds the pattern of before",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "generations",
        "generation stamps advance",
        "every result of the run is a new one: a higher stamp, and memory of its own",
        ("invalid",),
    ),
    CheckKind(
        "pair-logits",
        "prefill pair: last-token logits",
        "batched and per-token logits have equal bits, or are within the path's limit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "pair-kv",
        "prefill pair: KV contents",
        "batched and per-token prefill leave equal bits in the KV cache",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "pair-state",
        "prefill pair: recurrent state",
        "batched and per-token prefill leave equal bits in recurrent states",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "eager",
        f"eager {_MODE} with trace equals untraced(, narrow flow)?",
        "tracing changes nothing: launches one by one and untraced ones give equal bits",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "eager-kv",
        f"eager {_MODE} with trace equals untraced: KV contents",
        "traced and untraced runs leave equal bits in the KV cache, where no pair is compared",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "eager-state",
        f"eager {_MODE} with trace equals untraced: recurrent state",
        "traced and untraced runs leave equal recurrent states, where no pair is compared",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "kernels",
        f"kernels: ({_MODE} prefill(, .+)?|decode)",
        "exactly the kernels that the limits are for multiplied, by the launch counters",
        ("invalid",),
    ),
    CheckKind(
        "tail-prefill",
        f"sampler tail: {_MODE} prefill(, narrow flow)?",
        "logits, argmax, staging copy, stamp and token agree after a prefill",
        ("diverged",),
    ),
    CheckKind(
        "tail-decode",
        "sampler tail: decode",
        "the same after every decode step, and the token is fed back",
        ("diverged",),
    ),
    CheckKind(
        "tail-probes",
        "sampler tail: chosen logits",
        "ties, last elements and NaN come out of the sampler tail as they must",
        ("diverged",),
    ),
    CheckKind(
        "bundle-tail",
        "recorded tail|sampler tail(, .+)?",
        "the sampler tail of a repro bundle holds on the engine here",
        ("diverged",),
    ),
    CheckKind(
        "bundle-run",
        "validate",
        "the run that a repro bundle describes is ok on the engine here",
        ("diverged", "invalid", "unsupported"),
    ),
    CheckKind(
        "replay-logits",
        f"decode equals {_MODE} prefill of the same tokens",
        "decoding gives the logits of a prefill of the same tokens, bit for bit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "replay-kv",
        f"decode equals {_MODE} prefill of the same tokens: KV contents",
        "decoding leaves the KV cache of a prefill of the same tokens, bit for bit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "replay-state",
        f"decode equals {_MODE} prefill of the same tokens: recurrent state",
        "decoding leaves the recurrent states of a prefill of the same tokens, bit for bit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "decode",
        "decode: logits and greedy token against reference",
        "logits of every decode step are within their limit, and the greedy token agrees",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "entry-points",
        "production entry points",
        "what generation calls, and a second turn without a reset, give what was judged",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "batched-decode",
        "batched decode",
        "sequences that decode together give and leave behind the bits of each alone",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "routing",
        "routing: engine against reference",
        "tokens go to the reference's experts, or to ones that rounding can't tell from them",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "plants",
        "planted faults are caught",
        "the judge sees every fault that was planted in copies of this run's data",
        ("invalid",),
    ),
    CheckKind(
        "self-test",
        "self-test: a patched kernel is seen",
        "the judge sees a kernel whose source was changed, and names its operation",
        ("invalid",),
    ),
    CheckKind(
        "benchmark-logits",
        "per-token logits against the reference",
        "what is timed computes the reference's logits, within their limit",
        ("diverged", "invalid"),
    ),
    CheckKind(
        "two-traces",
        "two traces",
        "two trace files are not copies of one another",
        ("invalid",),
    ),
    CheckKind("same-prompt", "tokens", "both trace files are of one prompt", ("invalid",)),
    CheckKind(
        "trace-point",
        r"inp_embd|inp_per_layer|result_norm|result_output|[A-Za-z]\w*-\d+",
        "one trace point of a file is within its limit of the other file's, or has equal bits",
        ("diverged", "unsupported", "invalid"),
    ),
)


def kind_of(name: str) -> CheckKind:
    """The kind of the check with this name. Raises ValueError for a name in no row."""
    for kind in CHECK_KINDS:
        if kind.matches(name):
            return kind
    raise ValueError(
        f"check kinds: no kind has a check named {name!r}; add a row, and a fault that turns it red"
    )


def is_trace_point(name: str) -> bool:
    """True for what can be the name of a trace point: `{point}-{layer}`, or one of the whole."""
    return CHECK_KINDS[-1].matches(name)


class Judged(Protocol):
    """What became of a planted fault: its id and the names of all checks that were red."""

    @property
    def fault(self) -> str: ...
    @property
    def red(self) -> Sequence[str]: ...


def kinds_seen(outcomes: Iterable[Judged]) -> dict[str, list[str]]:
    """Every kind with the faults that turned a check of it red.

    Names that are none of a verdict's checks ("device error", "refusal") count for no kind.
    """
    seen: dict[str, list[str]] = {kind.id: [] for kind in CHECK_KINDS}
    for outcome in outcomes:
        first = (next((k.id for k in CHECK_KINDS if k.matches(name)), "") for name in outcome.red)
        for kind in dict.fromkeys(first):
            if kind:
                seen[kind].append(outcome.fault)
    return seen
