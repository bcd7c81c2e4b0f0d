"""Which op makes a trace point, from which recorded points, and how it is evaluated in float64.

The rules follow reference/forward.py from top to bottom; rules_attention.py, rules_delta_net.py and
rules_feed_forward.py hold those of a layer's blocks. Differences between architectures come from
ModelSpec.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reference.model import Model
from reference.model.architectures import ARCHITECTURES
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.trace import LOGITS
from reference.model.weights import Tensor
from suites.harness import bounds
from suites.harness.bounds import Bounded
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import Array


@dataclass(frozen=True)
class LocalRules:
    """What ran: the path of the kernels that multiplied (order of summation), KV storage types.

    `path` is that of the traced prefill mode (kernels.path_of), not what the engine was built for.
    """

    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"


@dataclass(frozen=True)
class Op:
    """An op's name, the points it reads, and how to evaluate it on their recorded values.

    `matrix` is the weight of a plain product: input times matrix transposed. `note_of` looks at
    the recorded values of `note_inputs` for what is worth saying and judges nothing.
    """

    name: str
    inputs: tuple[str, ...]
    evaluate: Callable[..., Bounded]
    note_inputs: tuple[str, ...] = ()
    note_of: Callable[..., str] | None = None
    matrix: Tensor | None = None


@dataclass(frozen=True)
class LayerOps:
    """Builds the ops of one layer. `recurrent` receives the delta rule's result, by layer."""

    model: Model
    layer: LayerSpec
    rules: LocalRules
    tokens: int
    recurrent: dict[int, DeltaRule] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def path(self) -> str:
        return self.rules.path

    @property
    def before(self) -> str:
        """The residual stream that enters the layer."""
        return "inp_embd" if self.layer.index == 0 else f"l_out-{self.layer.index - 1}"

    @property
    def pre_ffn_norm(self) -> str:
        return ARCHITECTURES[self.spec.architecture].pre_ffn_norm

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.tokens, dtype=np.int64)

    def at(self, stem: str, layer: int | None = None) -> str:
        """The point's name in this layer, or in another."""
        return f"{stem}-{self.layer.index if layer is None else layer}"

    def tensor(self, role: str) -> Tensor:
        return self.model.weights.layers[self.layer.index][role]

    def vector(self, role: str) -> NDArray[np.float32]:
        return self.tensor(role).vector()

    def optional(self, role: str) -> NDArray[np.float32] | None:
        present = role in self.model.weights.layers[self.layer.index]
        return self.vector(role) if present else None

    def norm(self, role: str, source: str) -> Op:
        evaluate = partial(bounds.rms_norm, weight=self.vector(role), epsilon=self.spec.rms_epsilon)
        return Op("rms_norm", (source,), evaluate)

    def head_norm(self, role: str | None, source: str, heads: int) -> Op:
        """Per head; `role` None: without weight."""
        weight = None if role is None else self.vector(role)
        size, epsilon = self.layer.head_size, self.spec.rms_epsilon

        def evaluate(x: Array) -> Bounded:
            return bounds.rms_norm(x.reshape(len(x), heads, size), weight, epsilon)

        return Op("rms_norm", (source,), evaluate)

    def project(self, role: str, source: str, rows: NDArray[np.int64] | None = None) -> Op:
        """`rows` of the matrix (None: all), with the role's bias where the file has one."""
        tensor, bias = self.tensor(role), self.optional(f"{role}.bias")
        if rows is not None:
            tensor = replace(tensor, shape=(len(rows), *tensor.shape[1:]), raw=tensor.raw[rows])
            bias = None if bias is None else bias[rows]
        return Op(
            "linear",
            (source,),
            lambda x: bounds.linear(x, tensor, self.path, bias=bias),
            matrix=tensor,
        )

    def activation(self, gate: str, up: str) -> Op:
        evaluate = partial(bounds.gated, activation=self.spec.activation)
        return Op("activation", (gate, up), evaluate)

    def add(self, a: str, b: str) -> Op:
        return Op("add", (a, b), bounds.add)

    def copy(self, source: str) -> Op:
        return Op("copy", (source,), bounds.copy)


def top_op(model: Model, stem: str, rules: LocalRules, tokens: tuple[int, ...], rows: int) -> Op:
    """A point outside the layers; `rows` of result_norm were recorded."""
    spec, top = model.spec, model.weights.top
    match stem:
        case "inp_embd":
            table, scale = top["token_embd"], spec.embedding_scale
            return Op("embed", (), lambda: bounds.embed(table, tokens, scale))
        case "inp_per_layer":
            return Op(
                "per_layer_inputs",
                ("inp_embd",),
                lambda x: bounds.per_layer_inputs(
                    x,
                    tokens,
                    top["per_layer_model_proj"],
                    top["per_layer_proj_norm"].vector(),
                    top["per_layer_token_embd"],
                    spec.rms_epsilon,
                    rules.path,
                ),
            )
        case "result_norm":
            weight = top["output_norm"].vector()
            return Op(
                "rms_norm",
                (f"l_out-{spec.layer_count - 1}",),
                lambda x: bounds.rms_norm(x[len(x) - rows :], weight, spec.rms_epsilon),
            )
        case _ if stem == LOGITS:
            name = "linear" if spec.logit_softcap is None else "soft_cap"
            matrix = model.weights.lm_head if spec.logit_softcap is None else None
            return Op(
                name, ("result_norm",), lambda x: _logits(model, x, rules.path), matrix=matrix
            )
    raise no_rule(stem)


def _logits(model: Model, x: Array, path: str) -> Bounded:
    """The output projection with its bias and soft cap, where the model has them."""
    top, cap = model.weights.top, model.spec.logit_softcap
    bias = top["output.bias"].vector() if "output.bias" in top else None
    logits = bounds.linear(x, model.weights.lm_head, path, bias=bias)
    return logits if cap is None else bounds.soft_cap(logits, cap)


def no_rule(stem: str) -> ValueError:
    return ValueError(f"local: trace point {stem} has no rule; every point of trace.py needs one")
