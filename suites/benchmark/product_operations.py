"""Products of a model to be timed by format, shape and number of columns, alone and together."""

from collections.abc import Callable
from typing import NamedTuple

from backend_hip import ops
from backend_hip.device import Buffer
from backend_hip.ops import Values
from backend_hip.weights import DeviceTensor, DeviceWeights
from reference.model import Model
from reports.operations import Operation
from suites.benchmark.bench import Subject
from suites.benchmark.engine_runs import Runner
from suites.benchmark.operation_job import Job, fill, record_of

PRODUCT = "Products"
ALL = "all, with the head"
# Products that read what the one before them read: path matrix converts it once.
_SAME_INPUT = ("attn_k", "attn_v", "ffn_up", "attn_gate", "ssm_beta", "ssm_alpha")
FEW = 16  # columns up to which they are taken as a step of so many sequences, above as a prompt


class Product(NamedTuple):
    """One plain product's weights."""

    role: str
    weight: DeviceTensor


class Products:
    """Jobs of a model's plain products on one path. Routed experts are not among them."""

    def __init__(self, subject: Subject, runner: Runner, path: str, most: int) -> None:
        self._subject, self._engine, self._path = subject, runner.engine, path
        self._groups = product_groups(subject.model, runner)
        every = [one.weight for products in self._groups.values() for one in products]
        self._x, self._y = (
            Values(Buffer(subject.device, most * width * 4, "products"), width, most)
            for width in (max(one.shape[side] for one in every) for side in (1, 0))
        )
        fill(self._x)

    def free(self) -> None:
        self._x.buffer.free()
        self._y.buffer.free()

    def jobs(self, columns: int) -> list[Job]:
        """Each group alone, all of them, and for one column the fused ones."""
        jobs = [
            self._job(what, products, columns, shared=True)
            for what, products in self._groups.items()
        ]
        ordered = in_order(self._subject.model, self._engine.weights)
        jobs.append(self._job(ALL, ordered, columns, shared=False))
        if columns == 1 and self._engine.fusion.one == "on":
            jobs += self._fused(ordered)
        return jobs

    def _job(self, what: str, products: list[Product], columns: int, *, shared: bool) -> Job:
        few = columns if columns <= FEW else 1
        flow = self._engine._flow(columns, batched=columns > 1, sequences=few)

        def queue() -> None:
            for index, (role, weight) in enumerate(products):
                same = index > 0 if shared else role in _SAME_INPUT
                x, y = self._x.of_width(weight.shape[1]), self._y.of_width(weight.shape[0])
                ops.linear(flow, x, weight, y, same_input=same)

        last = self._y.of_width(products[-1].weight.shape[0])
        note = "input converted once a graph" if shared and self._path == "matrix" else ""
        record = self._cost(what, [one.weight for one in products], columns, note)
        return Job(record, queue, results=last)

    def _cost(self, what: str, weights: list[DeviceTensor], columns: int, note: str) -> Operation:
        nbytes = float(sum(weight.buffer.nbytes for weight in weights))
        elements = sum(weight.shape[0] * weight.shape[1] for weight in weights)
        figures = (columns, len(weights), nbytes, 2.0 * elements * columns)
        digits = columns == 1 and self._path == "matrix"
        path = "digits" if digits else self._path
        return record_of(self._subject, PRODUCT, what, path, *figures, note="" if digits else note)

    def _fused(self, ordered: list[Product]) -> list[Job]:
        """The one-column kernels of the decode graph: norm, products, activation, residual sum."""
        engine, spec = self._engine, self._subject.model.spec
        flow, fused, s = engine._flow(1, batched=False), engine._fused, engine._scratch
        for values in (s.x, s.mixed, s.gate, s.normed):
            fill(values)
        layers = [(layer, engine.weights.layers[layer.index]) for layer in spec.layers]

        def qkv() -> None:
            for layer, w in layers:
                fused._norm_qkv(flow, layer, w)

        def output() -> None:
            for layer, w in layers:
                mixed = s.mixed.of_width(layer.head_count * layer.head_size)
                fused._linear_add(flow, mixed, w["attn_output"])

        def gate_up() -> None:
            for layer, w in layers:
                fused._norm_gate_up(flow, w, s.gate.of_width(layer.feed_forward_length))

        def down() -> None:
            for layer, w in layers:
                inner = s.gate.of_width(layer.feed_forward_length)
                fused._linear_add(flow, inner, w["ffn_down"])

        last = spec.layers[-1]
        inner = s.gate.of_width(last.feed_forward_length)
        parts: dict[str, tuple[tuple[str, ...], Callable[[], None], Values]] = {
            "fused norm, Q, K, V": (("attn_q", "attn_k", "attn_v"), qkv, s.heads),
            "fused attn_output and sum": (("attn_output",), output, s.x),
            "fused norm, gate, up": (("ffn_gate", "ffn_up"), gate_up, inner),
            "fused ffn_down and sum": (("ffn_down",), down, s.x),
        }
        jobs = []
        for what, (roles, queue, values) in parts.items():
            weights = [w[role] for _, w in layers for role in roles]
            jobs.append(Job(self._cost(what, weights, 1, ""), queue, results=values))

        def everything() -> None:
            for _, queue, _ in parts.values():
                queue()
            ops.linear(flow, s.normed, engine.weights.lm_head, s.logits)

        weights = [one.weight for one in ordered]
        record = self._cost(f"fused {ALL}", weights, 1, "")
        jobs.append(Job(record, everything, results=s.logits))
        return jobs


def in_order(model: Model, held: DeviceWeights) -> list[Product]:
    """Every plain product, in forward order."""
    plain = {id(tensor) for tensor in model.weights.matrices()}
    found = [
        Product(role, held.layers[index][role])
        for index, layer in enumerate(model.weights.layers)
        for role, tensor in layer.items()
        if id(tensor) in plain
    ]
    return [*found, Product("output", held.lm_head)]


def product_groups(model: Model, runner: Runner) -> dict[str, list[Product]]:
    """Products that have role, format and shape in common, by these."""
    groups: dict[str, list[Product]] = {}
    for product in in_order(model, runner.engine.weights):
        rows, columns = product.weight.shape
        what = f"{product.role} {product.weight.format} {rows:,} x {columns:,}"
        groups.setdefault(what, []).append(product)
    return groups
