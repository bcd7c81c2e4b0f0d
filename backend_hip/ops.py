"""One function per operation: check, choose the registry row, launch. Names as reference/ops.py.

`Values` is a device array with its logical row length; the number of rows is the flow's number of
tokens. Nothing here synchronises.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_hip import attention_shape, matrix
from backend_hip.device import Buffer
from backend_hip.dispatch import Kernels
from backend_hip.half_columns import HalfColumns
from backend_hip.kv_types import KV_TYPES
from backend_hip.launch_arguments import DevicePointer
from backend_hip.registry import few_columns, one_column_path
from backend_hip.requirements import head_sizes
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

    def of_width(self, width: int) -> "Values":
        """The same memory as rows of `width`, for a layer that is narrower than the widest."""
        if width > self.width or self.first:
            raise ValueError(f"values: width {width} does not fit in {self.width}")
        return Values(self.buffer, width, self.rows)

    def from_row(self, first: int) -> "Values":
        """The rows from `first` on, as a view."""
        return Values(self.buffer, self.width, self.rows - first, self.first + first)

    @property
    def offset_nbytes(self) -> int:
        """Of row 0 in the buffer."""
        return self.first * self.width * 4

    @property
    def pointer(self) -> DevicePointer:
        return self.row(0)

    def download(self, rows: int, *shape: int) -> NDArray[np.float32]:
        """A host copy of the first `rows` rows, each reshaped to `shape`."""
        return self.buffer.download(
            (rows, *(shape or (self.width,))), np.float32, self.offset_nbytes
        )


@dataclass(frozen=True)
class Splits:
    """Decode's attention: a block for each of `count` splits of a row's keys, whose results lie in
    `partials` until they are merged."""

    count: int
    partials: Buffer


@dataclass(frozen=True)
class Flow:
    """What the ops of one command flow share.

    `step` is the device array of kernels/flow.h; `tokens` the number of rows, which belong to
    `sequences` sequences in equal parts; `batched` chooses the batched products of `path`,
    otherwise the one-column kernel runs. `splits` None: the rows are consecutive ones of one
    sequence, whose attention needs no partial results. `halves` is what path matrix needs.
    """

    kernels: Kernels
    step: Buffer
    tokens: int
    batched: bool
    path: str
    max_cols: int
    sequences: int = 1
    splits: Splits | None = None
    halves: HalfColumns | None = None


def embed(flow: Flow, table: DeviceTensor, x: Values, factor: float) -> None:
    """x[t] = factor * table[token t]."""
    _require("embed", "x", x.width, table.shape[1])
    key = ("embed", table.format, "any")
    grid = (_blocks(_blocks(x.width, 8), flow.kernels.block(key)), flow.tokens)
    flow.kernels.launch(key, grid, table.buffer, flow.step, x.pointer, x.width, factor)


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


def _elementwise(flow: Flow, op: str, x: Values, *arguments: object, rows: int = 0) -> None:
    """Launches an entry of arithmetic.hip over all of x, which is its first argument."""
    count = (rows or flow.tokens) * x.width
    key = (op, "", "any")
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    flow.kernels.launch(key, grid, x.pointer, *arguments)


def add(flow: Flow, x: Values, out: Values) -> None:
    """x = x + out."""
    _require("add", "out", out.width, x.width)
    _elementwise(flow, "add", x, out.pointer, x.pointer, flow.tokens * x.width)


def add_bias(flow: Flow, x: Values, bias: DeviceTensor) -> None:
    """x = x + bias, row by row."""
    _require("add_bias", bias.name, bias.shape[0], x.width)
    _elementwise(flow, "add_bias", x, bias.buffer, flow.tokens * x.width, x.width)


def add_scaled(flow: Flow, x: Values, other: Values, factor: float) -> None:
    """x = (x + other) * factor."""
    _require("add_scaled", "other", other.width, x.width)
    count = flow.tokens * x.width
    _elementwise(flow, "add_scaled", x, other.pointer, x.pointer, factor, count)


def scale(flow: Flow, x: Values, factor: float) -> None:
    """x = x * factor."""
    _elementwise(flow, "scale", x, factor, flow.tokens * x.width)


def soft_cap(flow: Flow, x: Values, cap: float) -> None:
    """x = cap * tanh(x / cap)."""
    _elementwise(flow, "soft_cap", x, cap, flow.tokens * x.width)


def sigmoid_gated(flow: Flow, x: Values, gate: Values) -> None:
    """x = x * sigmoid(gate), with one gate per element or one per row."""
    count = flow.tokens * x.width
    if gate.width == 1:
        _elementwise(flow, "sigmoid_gated_rows", x, gate.pointer, count, x.width)
        return
    _require("sigmoid_gated", "gate", gate.width, x.width)
    _elementwise(flow, "sigmoid_gated", x, gate.pointer, count)


def split_gate(flow: Flow, both: Values, q: Values, gate: Values, head_size: int) -> None:
    """Heads of [query, gate] apart."""
    _require("split_gate", "both", both.width, q.width + gate.width)
    key = ("split_gate", "", "any")
    count = flow.tokens * q.width
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    flow.kernels.launch(key, grid, both.pointer, q.pointer, gate.pointer, count, head_size)


def linear(
    flow: Flow, x: Values, weight: DeviceTensor, y: Values, *, same_input: bool = False
) -> None:
    """y = x W^T, for one column or for all tokens: at once on path matrix, else in groups of at
    most max_cols. `same_input`: the flow's last product had this x, unchanged since."""
    rows, columns = weight.shape
    _require("linear", f"x for {weight.name}", x.width, columns)
    _require("linear", f"y for {weight.name}", y.width, rows)
    if not flow.batched:
        key = ("matvec", weight.format, one_column_path(flow.path, weight.format))
        grid = (flow.kernels.resident_blocks(key, rows), 1)
        flow.kernels.launch(key, grid, weight.buffer, x.pointer, y.pointer, rows, columns)
        return
    if flow.path == "matrix":
        if flow.halves is None:
            raise ValueError("linear: halves is None, expected memory because the path is matrix")
        matrix.multiply(
            *(flow.kernels, flow.halves, x.pointer, weight, y.pointer, flow.tokens),
            same_input=same_input,
        )
        return
    few = few_columns(flow.path, flow.sequences)
    if few:
        key = ("matvec_few", f"{weight.format}@{few}", flow.path)
    else:
        key = ("matvec_batched", weight.format, flow.path)
    serial = flow.path == "serial"
    per_block = flow.kernels.block(key) if serial else flow.kernels.rows_per_block(key)
    columns_at_once = few or flow.max_cols
    for start in range(0, flow.tokens, columns_at_once):
        count = min(columns_at_once, flow.tokens - start)
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


def kv_write(
    flow: Flow,
    k: Values,
    v: Values,
    keys: Buffer,
    values: Buffer,
    layer: LayerSpec,
    kv_types: str,
) -> None:
    """Stores the tokens' keys and values at the flow's positions."""
    width = layer.head_count_kv * layer.head_size
    _require("kv_write", "k", k.width, width)
    _require("kv_write", "v", v.width, width)
    key = ("kv_write", kv_types, "any")
    flow.kernels.launch(
        key,
        (_blocks(width, flow.kernels.block(key)), flow.tokens),
        *(k.pointer, v.pointer, keys, values, flow.step),
        *(width, layer.head_size, cache_rows(keys, width, kv_types)),
    )


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
    heads, window = layer.head_count_kv, layer.window or 0
    size, group = layer.head_size, layer.head_count // heads
    blocks = heads * attention_shape.passes(size, group)
    held_rows = cache_rows(keys, heads * size, kv_types)
    sizes = head_sizes(layer)
    if flow.splits is None:
        rows = attention_shape.rows_per_block(size, group)
        flow.kernels.launch(
            ("attention", f"{kv_types}@{sizes}", "any"),
            (blocks, _blocks(flow.tokens, rows)),
            *(q.pointer, keys, values, out.pointer, flow.step),
            *(flow.tokens, heads, held_rows, window, scale),
        )
        return
    splits, partials = flow.splits.count, flow.splits.partials
    flow.kernels.launch(
        ("attention_split", f"{kv_types}@{sizes}", "any"),
        (blocks, flow.tokens * splits),
        *(q.pointer, keys, values, out.pointer, partials, flow.step),
        *(splits, heads, held_rows, window, scale),
    )
    if splits > 1:
        flow.kernels.launch(
            ("attention_merge", f"@{sizes}", "any"),
            (layer.head_count, flow.tokens),
            *(partials, out.pointer, flow.step, splits, window),
        )


def cache_rows(keys: Buffer, width: int, kv_types: str) -> int:
    """Positions that a cache tensor of `width` elements each has room for, of all sequences."""
    return keys.nbytes // KV_TYPES[kv_types.partition(",")[0]].row_nbytes(width)


def gated(flow: Flow, gate: Values, up: Values, inner: Values, activation: Activation) -> None:
    """inner = activation(gate) * up."""
    _require("gated", "up", up.width, gate.width)
    key = ("gated", activation, "any")
    count = flow.tokens * gate.width
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    flow.kernels.launch(key, grid, gate.pointer, up.pointer, inner.pointer, count)


def gated_layer(
    flow: Flow, gate: Values, per_layer: Values, layer: int, activation: Activation
) -> None:
    """gate = activation(gate) * one layer's piece of per_layer, which is (tokens, layers * P)."""
    key = ("gated_strided", activation, "any")
    count = flow.tokens * gate.width
    grid = (_blocks(count, flow.kernels.block(key)), 1)
    piece = per_layer.buffer.at((per_layer.first * per_layer.width + layer * gate.width) * 4)
    flow.kernels.launch(
        key, grid, gate.pointer, piece, gate.pointer, count, gate.width, per_layer.width
    )


ARGMAX_BLOCKS = 128
"""Blocks of the first pass of argmax at most; each leaves one of `found` for each row."""
FOUND_NBYTES = 8
ARGMAX_SHARE = 1024
"""Logits that are worth a block."""


def argmax_blocks(count: int) -> int:
    """Blocks of the first pass over so many logits, which take equal shares of neighbours."""
    return min(_blocks(count, ARGMAX_SHARE), ARGMAX_BLOCKS)


def argmax(flow: Flow, logits: DevicePointer, found: Buffer, result: Buffer, count: int) -> None:
    """result = {index of the largest logit, the step's stamp} of each sequence.

    `found`: room for ARGMAX_BLOCKS * FOUND_NBYTES bytes for each.
    """
    blocks, rows = argmax_blocks(count), flow.sequences
    flow.kernels.launch(("argmax_blocks", "", "any"), (blocks, rows), logits, found, count)
    flow.kernels.launch(("argmax", "", "any"), (1, rows), found, flow.step, result, blocks)


def _blocks(count: int, per_block: int) -> int:
    return -(-count // per_block)


def _require(op: str, argument: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{op}: {argument} has {got} elements a row, expected {expected}")
