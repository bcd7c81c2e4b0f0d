"""The gated delta net on the device. Names as in reference/delta_net.py."""

import math
from copy import copy

import numpy as np

from backend_hip.device import Buffer, Device
from backend_hip.launch_arguments import DevicePointer
from backend_hip.ops import Flow, Values
from backend_hip.weights import DeviceTensor
from reference.model.spec import DeltaNetSpec


class RecurrentState:
    """What one layer carries from token to token, in device memory; zero at the start.

    One state per sequence, one after another in each buffer. `memory` (NV, DS, DS) and `tail`
    (conv_kernel - 1, channels) are read back as host copies, of sequence 0 unless `of` says other.
    """

    def __init__(self, net: DeltaNetSpec, device: Device, layer: int, sequences: int = 1) -> None:
        self._sequence = 0
        self._shapes = (
            (net.value_heads, net.state_size, net.state_size),
            (net.conv_kernel - 1, net.channels),
        )
        # A convolution of one tap has no history; its buffer then holds one unused element.
        self.buffers = tuple(
            Buffer(device, 4 * max(1, sequences * math.prod(shape)), f"{name} of layer {layer}")
            for name, shape in zip(("delta net state", "conv tail"), self._shapes, strict=True)
        )
        for buffer in self.buffers:
            buffer.clear()

    @property
    def memory(self) -> np.ndarray:
        return self.buffers[0].download(self._shapes[0], np.float32, self._offset_nbytes(0))

    @property
    def tail(self) -> np.ndarray:
        return self.buffers[1].download(self._shapes[1], np.float32, self._offset_nbytes(1))

    def of(self, sequence: int) -> "RecurrentState":
        """A view of another sequence's state; it owns nothing."""
        view = copy(self)
        view._sequence = sequence
        return view

    def reset(self) -> None:
        for which, buffer in enumerate(self.buffers):
            buffer.clear(self._offset_nbytes(which), 4 * math.prod(self._shapes[which]))

    def restore(self, memory: np.ndarray, tail: np.ndarray) -> None:
        """Puts back what `memory` and `tail` gave."""
        self.buffers[0].upload(memory, self._offset_nbytes(0))
        self.buffers[1].upload(tail, self._offset_nbytes(1))

    def free(self) -> None:
        for buffer in self.buffers:
            buffer.free()

    def _offset_nbytes(self, which: int) -> int:
        return self._sequence * math.prod(self._shapes[which]) * 4


def convolve(flow: Flow, x: Values, kernel: DeviceTensor, state: RecurrentState, y: Values) -> None:
    """y = silu(causal depthwise convolution of x); advances the tail."""
    channels, taps = kernel.shape
    key = ("convolve", "", "any")
    flow.kernels.launch(
        key,
        (-(-channels // flow.kernels.block(key)), flow.sequences),
        *(x.pointer, kernel.buffer, state.buffers[1], y.pointer, flow.step),
        *(channels, flow.tokens // flow.sequences, taps),
    )


def unit_heads(
    flow: Flow, mixed: Values, first: int, y: Values, size: int, epsilon: float, divisor: float
) -> None:
    """y = unit heads of the channels of `mixed` from `first` on, divided by `divisor`."""
    flow.kernels.launch(
        ("unit_heads", "", "any"),
        (y.width // size, flow.tokens),
        *(channel(mixed, first), y.pointer, size, mixed.width, epsilon, divisor),
    )


def gates(
    flow: Flow, alpha: Values, bias: DeviceTensor, a: DeviceTensor, beta: Values, decay: Values
) -> None:
    """beta = sigmoid(beta); decay = softplus(alpha + bias) * a, the logarithm of the decay."""
    key = ("delta_gates", "", "any")
    count = flow.tokens * alpha.width
    flow.kernels.launch(
        key,
        (-(-count // flow.kernels.block(key)), 1),
        *(alpha.pointer, bias.buffer, a.buffer, beta.pointer, decay.pointer, count, alpha.width),
    )


def delta_rule(
    flow: Flow,
    net: DeltaNetSpec,
    q: Values,
    k: Values,
    mixed: Values,
    decay: Values,
    beta: Values,
    state: RecurrentState,
    out: Values,
) -> None:
    """Walks the flow's tokens; v is what follows q and k among the channels of `mixed`."""
    flow.kernels.launch(
        ("delta_rule", f"@{net.state_size}", "any"),
        (net.value_heads, flow.sequences),
        *(q.pointer, k.pointer, channel(mixed, 2 * net.key_length)),
        *(decay.pointer, beta.pointer, state.buffers[0], out.pointer, flow.step),
        *(net.key_heads, mixed.width, flow.tokens // flow.sequences),
    )


def channel(values: Values, first: int) -> DevicePointer:
    """The address of column `first` of the first row."""
    return values.buffer.at((values.first * values.width + first) * 4)
