"""A bench for single kernels: builds registry rows, moves arrays, launches through the ops."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.device import Buffer, Device
from backend_hip.dispatch import Kernels
from backend_hip.half_columns import HalfColumns
from backend_hip.layout import on_device
from backend_hip.ops import Flow, Splits, Values
from backend_hip.registry import REGISTRY, Key
from backend_hip.state import FlowRow, StepInput
from backend_hip.weights import DeviceTensor
from reference.model.quant import FORMATS
from reference.quantise import quantise

GUARD = 64  # poisoned elements after each output, which must still be poison afterwards


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    """Standard normal values that `seed` decides."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Lab:
    """Owns what one test allocates; use as a context manager."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._owned: list[Any] = []

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *error: object) -> None:
        self.device.stream.synchronise()
        for owner in reversed(self._owned):
            (owner.unload if isinstance(owner, Kernels) else owner.free)()

    def flow(
        self,
        keys: Sequence[Key],
        parameters: Mapping[str, int],
        *,
        tokens: Sequence[int] = (0,),
        position: int = 0,
        stamp: int = 1,
        batched: bool = False,
        path: str = "kparallel",
        max_cols: int = 40,
        rows: Sequence[FlowRow] | None = None,
        splits: Splits | None = None,
        longest: int = 0,
        widest: int = 0,
    ) -> Flow:
        """A flow over `tokens` from `position`, or over `rows`, with the kernels of `keys`;
        for path matrix `longest`: elements of a row of halves, and `widest`: rows of all weights
        that share a launch."""
        if rows is None:
            rows = [FlowRow(token, position + i) for i, token in enumerate(tokens)]
        kernels = Kernels(self.device, REGISTRY, keys, parameters)
        step = StepInput(self.device, len(rows))
        self._owned += [kernels, step]
        step.write(stamp, rows)
        step.queue_copy(len(rows))
        self.device.stream.synchronise()
        halves = HalfColumns(self.device, len(rows), longest, widest) if longest else None
        if halves is not None:
            self._owned.append(halves)
        return Flow(
            *(kernels, step.buffer, len(rows), batched, path, max_cols),
            splits=splits,
            halves=halves,
        )

    def buffer(self, array: NDArray[Any]) -> Buffer:
        array = np.ascontiguousarray(array)
        buffer = Buffer(self.device, array.nbytes, "test array")
        self._owned.append(buffer)
        buffer.upload(array)
        return buffer

    def values(self, array: NDArray[np.float32]) -> Values:
        """Rows on the device; the last axis is the row."""
        return Values(self.buffer(array), array.shape[-1], array.size // array.shape[-1])

    def output(self, rows: int, width: int) -> Values:
        """Poisoned rows with poisoned guard elements behind them."""
        buffer = Buffer(self.device, (rows * width + GUARD) * 4, "test output")
        self._owned.append(buffer)
        buffer.poison()
        return Values(buffer, width, rows)

    def read(self, values: Values) -> NDArray[np.float32]:
        """The rows, once every element was written and no guard element was."""
        count = values.rows * values.width
        raw = values.buffer.download((count + GUARD,), np.uint32)
        assert (raw[count:] == 0xFFFFFFFF).all(), "the kernel wrote past its output"
        assert not (raw[:count] == 0xFFFFFFFF).any(), "the kernel left output unwritten"
        return raw[:count].view(np.float32).reshape(values.rows, values.width)

    def weight(self, form: str, values: NDArray[np.float32]) -> DeviceTensor:
        """A matrix quantised to `form`."""
        return self.matrix(form, values.shape, quantise(FORMATS[form], values))

    def matrix(self, form: str, shape: tuple[int, ...], raw: NDArray[np.uint8]) -> DeviceTensor:
        """A tensor of given blocks, as in a file."""
        return DeviceTensor(f"{form} test weight", form, shape, self.buffer(on_device(form, raw)))

    def vector(self, values: NDArray[np.float32]) -> DeviceTensor:
        return DeviceTensor("test vector", "F32", values.shape, self.buffer(values))
