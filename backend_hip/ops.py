"""One function per operation: check, choose the registry row, launch. Names as reference/ops.py.

`Values` is a device array with its logical row length; the number of rows is the flow's number of
tokens. Nothing here synchronises.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer
from backend_hip.dispatch import Kernels
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import WAVE
from backend_hip.weights import DeviceTensor
from reference.model.spec import Activation, LayerSpec, Pairing


@dataclass(frozen=True)
class Values:
    """float32 rows in device memory: `width` elements a row, room for `rows` of them.

    A view starts at row `first` of its buffer.
    """

    buffer: Buffer
    width: int
    rows: int
    first: int = 0

    def row(self, index: int) -> DevicePointer:
        return self.buffer.at((self.first + index) * self.width * 4)

    def from_row(self, first: int) -> "Values":
        """The rows from `first` on, as a view."""
        return Values(self.buffer, self.width, self.rows - first, self.first + first)

    @property
    def pointer(self) -> DevicePointer:
        return self.row(0)

    def download(self, rows: int, *shape: int) -> NDArray[np.float32]:
        """A host copy of the first `rows` rows, each reshaped to `shape`."""
        offset = self.first * self.width * 4
        return self.buffer.download((rows, *(shape or (self.width,))), np.float32, offset)


@dataclass(frozen=True)
class Flow:
    """What the ops of one command flow share.

    `step` is the device array of kernels/flow.h; `tokens` the number of tokens; `batched` chooses
    the batched products of `path`, otherwise the one-column kernel runs.
    """

    kernels: Kernels
    step: Buffer
    tokens: int
    batched: bool
    path: str
    max_cols: int


def embed(flow: Flow, table: DeviceTensor, x: Values, scale: float) -> None:
    """x[t] = scale * table[token t]."""
    _require("embed", "x", x.width, table.shape[1])
    key = ("embed", table.format, "any")
    grid = (_blocks(_blocks(x.width, 8), flow.kernels.block(key)), flow.tokens)
    flow.kernels.launch(key, grid, table.buffer, flow.step, x.pointer, x.width, scale)


def rms_norm(flow: Flow, x: Values, weight: DeviceTensor, y: Values, epsilon: float) -> None:
    """y = rms_norm(x) over pieces as long as the weight: a token's row, or each of its heads."""
    (width,) = weight.shape
    _require("rms_norm", "y", y.width, x.width)
    if x.width % width:
        _require("rms_norm", f"{weight.name}", width, x.width)
    count = flow.tokens * (x.width // width)
    flow.kernels.launch(
        ("rms_norm", "", "any"), (count, 1), x.pointer, weight.buffer, y.pointer, width, epsilon
    )


def add_rms_norm(
    flow: Flow, x: Values, out: Values, weight: DeviceTensor, y: Values, epsilon: float
) -> None:
    """x = x + out, y = rms_norm(x)."""
    _require("add_rms_norm", weight.name, weight.shape[0], x.width)
    _require("add_rms_norm", "out", out.width, x.width)
    flow.kernels.launch(
        ("add_rms_norm", "", "any"),
        (flow.tokens, 1),
        *(x.pointer, out.pointer, weight.buffer, x.pointer, y.pointer),
        *(x.width, epsilon),
    )


def add(flow: Flow, x: Values, out: Values) -> None:
    """x = x + out."""
    _require("add", "out", out.width, x.width)
    key = ("add", "", "any")
    count = flow.tokens * x.width
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    flow.kernels.launch(key, grid, x.pointer, out.pointer, x.pointer, count)


def linear(flow: Flow, x: Values, weight: DeviceTensor, y: Values) -> None:
    """y = x W^T, for one column or for all tokens in groups of at most max_cols."""
    rows, columns = weight.shape
    _require("linear", f"x for {weight.name}", x.width, columns)
    _require("linear", f"y for {weight.name}", y.width, rows)
    if not flow.batched:
        key = ("matvec", weight.format, "kparallel")
        grid = (_blocks(rows, flow.kernels.block(key) // WAVE), 1)
        flow.kernels.launch(key, grid, weight.buffer, x.pointer, y.pointer, rows, columns)
        return
    key = ("matvec_batched", weight.format, flow.path)
    per_block = flow.kernels.block(key) // (WAVE if flow.path == "kparallel" else 1)
    for start in range(0, flow.tokens, flow.max_cols):
        count = min(flow.max_cols, flow.tokens - start)
        flow.kernels.launch(
            key,
            (_blocks(rows, per_block), 1),
            *(weight.buffer, x.row(start), y.row(start), rows, columns, count),
        )


def rope(
    flow: Flow, x: Values, cosine: Buffer, sine: Buffer, layer: LayerSpec, pairing: Pairing
) -> None:
    """Rotates every head of x in place."""
    heads = x.width // layer.head_size
    flow.kernels.launch(
        ("rope", pairing, "any"),
        (heads, flow.tokens),
        *(x.pointer, cosine, sine, flow.step, layer.head_size, layer.rope.dimensions // 2),
    )


def kv_write(flow: Flow, k: Values, v: Values, keys: Buffer, values: Buffer, kv_types: str) -> None:
    """Stores the tokens' keys and values at the flow's positions."""
    _require("kv_write", "v", v.width, k.width)
    key = ("kv_write", kv_types, "any")
    grid = (_blocks(k.width, flow.kernels.block(key)), flow.tokens)
    flow.kernels.launch(key, grid, k.pointer, v.pointer, keys, values, flow.step, k.width)


def attention(
    flow: Flow,
    q: Values,
    keys: Buffer,
    values: Buffer,
    out: Values,
    layer: LayerSpec,
    scale: float,
    kv_types: str,
) -> None:
    """out = softmax(q K^T scale) V over the cache, causal, windowed where the layer slides."""
    _require("attention", "q", q.width, layer.head_count * layer.head_size)
    _require("attention", "out", out.width, q.width)
    flow.kernels.launch(
        ("attention", kv_types, "any"),
        (layer.head_count, flow.tokens),
        *(q.pointer, keys, values, out.pointer, flow.step),
        *(layer.head_count_kv, layer.window or 0, scale),
    )


def gated(flow: Flow, gate: Values, up: Values, inner: Values, activation: Activation) -> None:
    """inner = activation(gate) * up."""
    _require("gated", "up", up.width, gate.width)
    key = ("gated", activation, "any")
    count = flow.tokens * gate.width
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    flow.kernels.launch(key, grid, gate.pointer, up.pointer, inner.pointer, count)


def argmax(flow: Flow, logits: DevicePointer, result: Buffer, count: int) -> None:
    """result = {index of the largest logit, the step's stamp}."""
    flow.kernels.launch(("argmax", "", "any"), (1, 1), logits, flow.step, result, count)


def _blocks(count: int, per_block: int) -> int:
    return -(-count // per_block)


def _require(op: str, argument: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{op}: {argument} has {got} elements a row, expected {expected}")
