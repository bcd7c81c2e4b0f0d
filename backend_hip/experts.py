"""Routed experts on the device: route, group, multiply, combine. Names as in reference/moe.py."""

from dataclasses import dataclass, replace

from backend_hip.device import Buffer
from backend_hip.ops import Flow, Values, gated
from backend_hip.wave import WAVE
from backend_hip.weights import DeviceTensor
from reference.model.spec import Activation, ExpertsSpec


@dataclass(frozen=True)
class Routing:
    """Device arrays of one chunk's routing.

    `logits` (T, count); `chosen` int32 and `weights` float32 (T, used); `offsets` (count + 1) and
    `slots` (T * used) int32: pairs by expert.
    """

    logits: Values
    chosen: Buffer
    weights: Values
    offsets: Buffer
    slots: Buffer


@dataclass(frozen=True)
class ExpertScratch:
    """Activations with a row per (token, place) pair."""

    gate: Values
    up: Values
    out: Values


def route(flow: Flow, experts: ExpertsSpec, routing: Routing) -> None:
    """Chooses each token's experts from its logits, and weighs them."""
    flow.kernels.launch(
        ("route", f"@{experts.count}", "any"),
        (flow.tokens, 1),
        *(routing.logits.pointer, routing.chosen, routing.weights.pointer, experts.used),
    )


def group_by_expert(flow: Flow, experts: ExpertsSpec, routing: Routing) -> None:
    """Orders the chosen pairs by expert, which only a batched flow needs."""
    if flow.batched:
        flow.kernels.launch(
            ("group_by_expert", f"@{experts.count}", "any"),
            (1, 1),
            *(routing.chosen, routing.offsets, routing.slots, flow.tokens * experts.used),
        )


def routed_sum(
    flow: Flow,
    x: Values,
    experts: ExpertsSpec,
    routing: Routing,
    matrices: tuple[DeviceTensor, DeviceTensor, DeviceTensor],
    scales: DeviceTensor,
    activation: Activation,
    scratch: ExpertScratch,
    out: Values,
) -> None:
    """out = the weighted sum of each token's experts' gated blocks. `matrices`: gate, up, down."""
    gate, up, down = matrices
    _product(flow, x, gate, routing, experts, scratch.gate, share=experts.used)
    _product(flow, x, up, routing, experts, scratch.up, share=experts.used)
    pairs = replace(flow, tokens=flow.tokens * experts.used)
    gated(pairs, scratch.gate, scratch.up, scratch.gate, activation)
    _product(flow, scratch.gate, down, routing, experts, scratch.out, share=1)
    key = ("combine_experts", "", "any")
    flow.kernels.launch(
        key,
        (-(-out.width // flow.kernels.block(key)), flow.tokens),
        *(scratch.out.pointer, routing.chosen, routing.weights.pointer, scales.buffer),
        *(out.pointer, out.width, experts.used),
    )


def _product(
    flow: Flow,
    x: Values,
    weight: DeviceTensor,
    routing: Routing,
    experts: ExpertsSpec,
    y: Values,
    *,
    share: int,
) -> None:
    """One product per pair with its expert's matrix; pair p reads row p / share of x."""
    _, rows, columns = weight.shape
    if x.width != columns or y.width != rows:
        raise ValueError(
            f"experts: {weight.name} is {rows} x {columns}, expected {y.width} x {x.width}"
        )
    op = "matvec_experts" if flow.batched else "matvec_expert"
    key = (op, weight.format, "kparallel")
    row_blocks = -(-rows // (flow.kernels.block(key) // WAVE))
    if flow.batched:
        flow.kernels.launch(
            key,
            (row_blocks, experts.count),
            *(weight.buffer, x.pointer, y.pointer, routing.offsets, routing.slots),
            *(rows, columns, share),
        )
    else:
        flow.kernels.launch(
            key,
            (row_blocks, flow.tokens * experts.used),
            *(weight.buffer, x.pointer, y.pointer, routing.chosen, rows, columns, share),
        )
