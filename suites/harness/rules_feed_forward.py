"""Rules of the feed-forward block's, the residual stream's and the per-layer input's trace points.

See rules.py.
"""

from dataclasses import replace
from functools import partial

from reference.model.spec import ExpertsSpec
from reference.model.weights import Tensor
from suites.harness import bounds
from suites.harness import bounds_experts as experts_bounds
from suites.harness.bounds import Bounded
from suites.harness.compare import Array
from suites.harness.kernels import EXPERTS
from suites.harness.rules import LayerOps, Op

SHOWN_TIES = 3


def stream_op(ops: LayerOps, stem: str) -> Op | None:
    """The points that every kind of layer has; None for another stem."""
    post = ops.spec.post_norms
    match stem:
        case "attn_norm":
            return ops.norm("attn_norm", ops.before)
        case "attn_post_norm":
            return ops.norm("post_attention_norm", ops.at("attn_out"))
        case "ffn_inp":
            return ops.add(ops.before, ops.at("attn_post_norm" if post else "attn_out"))
        case "ffn_norm":
            return ops.norm(ops.pre_ffn_norm, ops.at("ffn_inp"))
        case "ffn_gate" | "ffn_up":
            return ops.project(stem, ops.at("ffn_norm"))
        case "ffn_act":
            return ops.activation(ops.at("ffn_gate"), ops.at("ffn_up"))
        case "ffn_out" if ops.layer.experts is None:
            return ops.project("ffn_down", ops.at("ffn_act"))
        case "ffn_post_norm":
            return ops.norm("post_ffw_norm", ops.at("ffn_out"))
        case "ffn_sum":
            return ops.add(ops.at("ffn_inp"), ops.at("ffn_post_norm" if post else "ffn_out"))
        case "l_out":
            return _layer_output(ops)
    return None


def _layer_output(ops: LayerOps) -> Op:
    last = "ffn_post_norm" if ops.spec.post_norms else "ffn_out"
    pair = (ops.at("ffn_inp"), ops.at(last))
    if ops.spec.per_layer_length:
        pair = (ops.at("ffn_sum"), ops.at("per_layer_out"))
    if not ops.layer.output_scale:
        return ops.add(*pair)
    scale = float(ops.vector("layer_output_scale")[0])
    return Op("add_scaled", pair, partial(bounds.add_scaled, scale=scale))


def per_layer_op(ops: LayerOps, stem: str) -> Op | None:
    """The points of Gemma's per-layer input; None for another stem."""
    match stem:
        case "per_layer_gate":
            return ops.project("inp_gate", ops.at("ffn_sum"))
        case "per_layer_act":
            index, width = ops.layer.index, ops.spec.per_layer_length

            def evaluate(gate: Array, inputs: Array) -> Bounded:
                mine = inputs.reshape(len(inputs), -1, width)[:, index]
                return bounds.gated(gate, mine, "gelu_tanh")

            return Op("activation", (ops.at("per_layer_gate"), "inp_per_layer"), evaluate)
        case "per_layer_proj":
            return ops.project("proj", ops.at("per_layer_act"))
        case "per_layer_out":
            return ops.norm("post_norm", ops.at("per_layer_proj"))
    return None


def experts_op(ops: LayerOps, stem: str) -> Op | None:
    """The points that only layers with routed experts have; None for another stem."""
    experts = ops.layer.experts
    if experts is None:
        return None
    scaled = experts.router == "scaled"
    router = ops.at("ffn_moe_router" if scaled else "ffn_norm")
    logits, chosen = ops.at("ffn_moe_logits"), ops.at("ffn_moe_topk")
    match stem:
        case "ffn_mlp":
            return ops.project("ffn_down", ops.at("ffn_act"))
        case "ffn_mlp_normed":
            return ops.norm("post_ffw_norm_1", ops.at("ffn_mlp"))
        case "ffn_moe_router":
            scale = ops.vector("ffn_gate_inp.scale")
            evaluate = partial(
                experts_bounds.router_input, scale=scale, epsilon=ops.spec.rms_epsilon
            )
            return Op("router", (ops.at("ffn_inp"),), evaluate)
        case "ffn_norm_2":
            return ops.norm("pre_ffw_norm_2", ops.at("ffn_inp"))
        case "ffn_moe_logits":
            return ops.project("ffn_gate_inp", router)
        case "ffn_moe_topk":
            return Op(
                "routing",
                (logits,),
                partial(experts_bounds.chosen_experts, used=experts.used),
                (logits, router),
                partial(_near_ties, ops, experts),
            )
        case "ffn_moe_weights":
            return Op("routing_weights", (logits, chosen), experts_bounds.routing_weights)
        case "ffn_moe_out":
            source = ops.at("ffn_norm_2" if scaled else "ffn_norm")
            inputs = (source, chosen, ops.at("ffn_moe_weights"))
            return Op("experts", inputs, partial(_routed_sum, ops))
        case "ffn_moe_normed":
            return ops.norm("post_ffw_norm_2", ops.at("ffn_moe_out"))
        case "ffn_gate_shexp" | "ffn_up_shexp":
            return ops.project(stem, ops.at("ffn_norm"))
        case "ffn_act_shexp":
            return ops.activation(ops.at("ffn_gate_shexp"), ops.at("ffn_up_shexp"))
        case "ffn_shexp":
            return ops.project("ffn_down_shexp", ops.at("ffn_act_shexp"))
        case "ffn_shexp_gated":
            gate = ops.tensor("ffn_gate_inp_shexp")
            shared = partial(experts_bounds.shared_gated, gate=gate, path=ops.path)
            return Op("shared_gate", (ops.at("ffn_shexp"), ops.at("ffn_norm")), shared)
        case "ffn_out" if scaled:
            return ops.add(ops.at("ffn_mlp_normed"), ops.at("ffn_moe_normed"))
        case "ffn_out" if experts.shared_length is not None:
            return ops.add(ops.at("ffn_moe_out"), ops.at("ffn_shexp_gated"))
        case "ffn_out":
            return ops.copy(ops.at("ffn_moe_out"))
    return None


def _routed_sum(ops: LayerOps, x: Array, chosen: Array, weights: Array) -> Bounded:
    def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (
            _one_expert(ops.tensor(f"ffn_{part}_exps"), expert) for part in ("gate", "up", "down")
        )
        return gate, up, down

    return experts_bounds.routed_sum(
        x,
        chosen,
        weights,
        matrices,
        ops.spec.activation,
        ops.optional("ffn_down_exps.scale"),
        EXPERTS,
    )


def _one_expert(stack: Tensor, expert: int) -> Tensor:
    name = f"{stack.name}[{expert}]"
    return replace(stack, name=name, shape=stack.shape[1:], raw=stack.raw[expert])


def _near_ties(ops: LayerOps, experts: ExpertsSpec, logits: Array, router: Array) -> str:
    """Words on tokens whose routing rests on less than the logits' own error; empty for none."""
    _, limit = bounds.linear(router, ops.tensor("ffn_gate_inp"), ops.path)
    found = experts_bounds.near_ties(logits, limit, experts.used)
    if not found:
        return ""
    shown = "; ".join(f"token {t}: gap {gap:.3g} within {known:.3g}" for t, gap, known in found[:3])
    more = f" and {len(found) - SHOWN_TIES} more" if len(found) > SHOWN_TIES else ""
    return f"{len(found)} near-ties in routing: {shown}{more}"
