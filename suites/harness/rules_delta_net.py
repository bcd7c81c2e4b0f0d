"""Rules of the gated delta net's trace points (see rules.py).

Every rule starts from a zero state, because a judged trace starts at position 0: the prompt that
was recorded is all that the state can hold.
"""

from functools import partial

import numpy as np

from reference.model.spec import DeltaNetSpec
from suites.harness import bounds_delta_net as bounds
from suites.harness.bounds import Bounded
from suites.harness.compare import Array
from suites.harness.rules import LayerOps, Op


def delta_net_op(ops: LayerOps, stem: str) -> Op | None:
    """The op of a point that only delta net layers have; None for another stem."""
    net = ops.layer.delta_net
    if net is None:
        return None
    normed, epsilon, mixed = ops.at("attn_norm"), ops.spec.rms_epsilon, ops.at("conv_output_silu")
    keys = net.key_length
    match stem:
        case "linear_attn_qkv":
            return ops.project("attn_qkv", normed)
        case "z":
            return ops.project("attn_gate", normed)
        case "beta":
            weight = ops.tensor("ssm_beta")
            return Op("beta", (normed,), partial(bounds.beta, tensor=weight, path=ops.path))
        case "alpha":
            return ops.project("ssm_alpha", normed)
        case "log_decay":
            bias, a = ops.vector("ssm_dt.bias"), ops.vector("ssm_a")
            return Op("log_decay", (ops.at("alpha"),), partial(bounds.log_decay, bias=bias, a=a))
        case "conv_output_silu":
            kernel = ops.vector("ssm_conv1d")
            evaluate = partial(bounds.convolve, kernel=kernel, net=net)
            return Op("convolution", (ops.at("linear_attn_qkv"),), evaluate)
        case "q_conv":
            return _unit(net, mixed, slice(0, keys), epsilon, float(np.sqrt(net.state_size)))
        case "k_conv":
            return _unit(net, mixed, slice(keys, 2 * keys), epsilon, 1.0)
        case "delta_out":
            inputs = tuple(ops.at(name) for name in ("q_conv", "k_conv"))
            inputs += (mixed, ops.at("log_decay"), ops.at("beta"))
            return Op("delta_rule", inputs, partial(_delta_rule, ops, net))
        case "delta_gated":
            weight_vector = ops.vector("ssm_norm")
            evaluate = partial(_gated, net, weight_vector, epsilon)
            return Op("delta_gate", (ops.at("delta_out"), ops.at("z")), evaluate)
        case "attn_out":
            return ops.project("ssm_out", ops.at("delta_gated"))
    return None


def _unit(net: DeltaNetSpec, source: str, part: slice, epsilon: float, divisor: float) -> Op:
    def evaluate(mixed: Array) -> Bounded:
        heads = mixed[:, part].reshape(len(mixed), net.key_heads, net.state_size)
        return bounds.unit_heads(heads, epsilon, divisor)

    return Op("unit_heads", (source,), evaluate)


def _delta_rule(
    ops: LayerOps, net: DeltaNetSpec, q: Array, k: Array, mixed: Array, decay: Array, beta: Array
) -> Bounded:
    keys = (len(q), net.key_heads, net.state_size)
    values = mixed[:, 2 * net.key_length :].reshape(len(q), net.value_heads, net.state_size)
    result = bounds.delta_rule(q.reshape(keys), k.reshape(keys), values, decay, beta, net)
    ops.recurrent[ops.layer.index] = result
    return result.out


def _gated(net: DeltaNetSpec, weight: Array, epsilon: float, out: Array, z: Array) -> Bounded:
    heads = out.reshape(len(out), net.value_heads, net.state_size)
    return bounds.delta_gated(heads, z, weight, epsilon)
