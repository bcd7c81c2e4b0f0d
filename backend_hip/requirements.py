"""The gate: which rows of the registry a model needs, before anything is compiled or allocated."""

from collections.abc import Sequence

from backend_hip.attention_shape import LARGEST_HEAD
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import (
    LARGEST_BLOCK,
    PACKED_FORMATS,
    PATHS,
    Key,
    few_columns,
    one_column_path,
    tiles_of,
)
from backend_hip.tuning import decode_path
from backend_hip.wave import WAVE
from reference.model.errors import InputError, Unsupported
from reference.model.spec import LayerSpec, ModelSpec
from reference.model.weights import Weights


def _batched_product(form: str, path: str, few_kernels: Sequence[int]) -> list[Key]:
    """What products of any number of columns above one need with weights of a format."""
    few: list[Key] = [("matvec_few", f"{form}@{columns}", "kparallel") for columns in few_kernels]
    if path == "matrix":
        blocks = [("matvec_batched", f"{form}/{tile}", path) for tile in tiles_of(form)]
        if form in PACKED_FORMATS:
            blocks.insert(0, ("matvec_batched_packed", f"{form},{form}", path))
        return [("weights_to_half", form, "any"), *blocks, *few]
    return [("matvec_batched", form, path), *few]


def head_sizes(layer: LayerSpec) -> str:
    """Head size and group of a layer, as they stand in the keys of attention's kernels."""
    return f"{layer.head_size}x{layer.head_count // layer.head_count_kv}"


def _attention(layer: LayerSpec, kv_type_k: str, kv_type_v: str) -> list[Key]:
    """What an attention layer needs. Raises Unsupported for a head that no kernel can hold."""
    size, kv = layer.head_size, f"{kv_type_k},{kv_type_v}"
    if size % 2 or size > LARGEST_HEAD:
        raise Unsupported(
            f"registry: layer {layer.index} has heads of {size}; supported: even sizes up to "
            f"{LARGEST_HEAD}, because a wave's lanes lie over one head with 16 elements each"
        )
    for argument, name in (("kv-type-k", kv_type_k), ("kv-type-v", kv_type_v)):
        elements = KV_TYPES[name].block_elements
        if size % elements:
            raise Unsupported(
                f"registry: {argument} is {name}, but layer {layer.index} has heads of {size}; "
                f"supported: heads of a multiple of {elements}, or another KV type"
            )
    return [
        ("kv_write", kv, "any"),
        *((op, f"{kv}@{head_sizes(layer)}", "any") for op in ("attention", "attention_split")),
        ("attention_merge", f"@{head_sizes(layer)}", "any"),
    ]


def requirements(
    spec: ModelSpec,
    weights: Weights,
    path: str,
    kv_type_k: str,
    kv_type_v: str,
    sequences: int = 1,
    architecture: str = "cpu",
) -> list[Key]:
    """Every row that a model needs on a path, each once, with decode steps of up to `sequences`.

    `architecture` says which of those steps run other products than the path's (tuning.py).
    Raises InputError for an unknown path.
    """
    if path not in PATHS:
        raise InputError(f"engine: path is {path}, expected one of {', '.join(PATHS)}")
    batches = range(2, sequences + 1)
    paths = ((decode_path(path, batch, architecture), batch) for batch in batches)
    few_kernels = sorted({few_columns(*step) for step in paths} - {0})
    keys: list[Key] = [("embed", weights.top["token_embd"].format.name, "any")]
    ops = ["rms_norm", "add_rms_norm", "add", "argmax_blocks", "argmax"]
    for layer in spec.layers:
        if layer.delta_net is None:
            keys.append(("rope", layer.rope.pairing, "any"))
            keys += _attention(layer, kv_type_k, kv_type_v)
        else:
            size = layer.delta_net.state_size
            if size % WAVE or not WAVE <= size <= LARGEST_BLOCK:
                raise Unsupported(
                    f"registry: delta net state size is {size}; supported: multiples of {WAVE} up "
                    f"to {LARGEST_BLOCK}, because a block has a thread per value column"
                )
            keys.append(("delta_rule", f"@{size}", "any"))
            ops += ["convolve", "unit_heads", "delta_gates"]
            keys.append(("gated", "silu", "any"))
        if layer.experts is not None:
            keys += [(op, f"@{layer.experts.count}", "any") for op in ("route", "group_by_expert")]
            ops += ["combine_experts", "sigmoid_gated_rows"]
            if layer.experts.shared_length is not None:
                # The shared expert's gate is a vector, read as a matrix of one row.
                keys += [("matvec", "F32", "kparallel")]
                keys += _batched_product("F32", path, few_kernels)
        if layer.output_scale:
            ops.append("scale")
    keys.append(("gated", spec.activation, "any"))
    if path == "matrix":
        ops += ["to_half", "to_packed", "sum_parts"]
    if spec.qkv_bias:
        ops.append("add_bias")
    if spec.gated_attention:
        ops += ["split_gate", "sigmoid_gated"]
    if spec.logit_softcap is not None:
        ops.append("soft_cap")
    if spec.per_layer_length:
        table = weights.top["per_layer_token_embd"].format.name
        keys += [("embed", table, "any"), ("gated_strided", "gelu_tanh", "any")]
        ops += ["scale", "add_scaled"]
    keys += [(op, "", "any") for op in ops]
    for tensor in weights.matrices():
        form = tensor.format.name
        keys.append(("matvec", form, one_column_path(path, form)))
        keys += _batched_product(form, path, few_kernels)
    for tensor in weights.expert_matrices():
        keys.append(("matvec_expert", tensor.format.name, "kparallel"))
        keys.append(("matvec_experts", tensor.format.name, "kparallel"))
    return list(dict.fromkeys(keys))
