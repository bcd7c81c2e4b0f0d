"""Weights by role: which tensors a spec expects, checked for presence, shape and format.

Matrices are (rows = outputs, columns = inputs), stored row after row: y = x . W^T. A tensor that no
role names is refused, because ignoring it would compute some other model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.model.architectures import ARCHITECTURES
from reference.model.errors import InputError, Unsupported
from reference.model.gguf import GGUFFile
from reference.model.quant import BlockFormat
from reference.model.spec import DeltaNetSpec, LayerSpec, ModelSpec

Kind = Literal["matrix", "vector"]


@dataclass(frozen=True)
class Slot:
    """One expected tensor. `layer` is None for the tensors that exist once."""

    role: str
    layer: int | None
    shape: tuple[int, ...]
    kind: Kind
    optional: bool = False

    @property
    def tensor_name(self) -> str:
        prefix = "" if self.layer is None else f"blk.{self.layer}."
        # `ssm_a`, biases and scales are stored without the usual ending.
        bare = self.role == "ssm_a" or self.role.endswith((".bias", ".scale"))
        return f"{prefix}{self.role}" if bare else f"{prefix}{self.role}.weight"


@dataclass(frozen=True)
class Tensor:
    """A checked tensor of the file; `raw` is a read-only uint8 view (rows..., row bytes)."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    def vector(self) -> NDArray[np.float32]:
        """The float32 values of a norm weight or RoPE factor table, (length,)."""
        return self.raw.view(np.float32).reshape(self.shape)


@dataclass(frozen=True)
class Weights:
    """`top[role]` for tensors that exist once, `layers[i][role]` for those of block i.

    Optional roles that the file lacks are absent from the mappings; `output` is then tied.
    """

    top: Mapping[str, Tensor]
    layers: tuple[Mapping[str, Tensor], ...]

    @property
    def lm_head(self) -> Tensor:
        """The output projection (V, E): `output`, or the tied `token_embd`."""
        return self.top.get("output", self.top["token_embd"])

    def matrices(self) -> list[Tensor]:
        """Every tensor that a plain matrix product reads, each once, in forward order."""
        products = [
            tensor
            for layer in self.layers
            for role, tensor in layer.items()
            if role in _PRODUCTS and len(tensor.shape) == 2
        ]
        extra = [self.top[role] for role in ("per_layer_model_proj",) if role in self.top]
        return [*extra, *products, self.lm_head]

    def expert_matrices(self) -> list[Tensor]:
        """Every stack of routed experts' matrices, each once, in forward order."""
        return [
            tensor
            for layer in self.layers
            for role, tensor in layer.items()
            if role.endswith("_exps")
        ]


_PRODUCTS = {
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    *("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out"),
    *("ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "inp_gate", "proj"),
}


def expected_tensors(spec: ModelSpec) -> list[Slot]:
    """All tensors of the architecture, in forward order."""
    width, vocab = spec.embedding_length, spec.vocab_size
    rules = ARCHITECTURES[spec.architecture]
    slots = [
        Slot("token_embd", None, (vocab, width), "matrix"),
        Slot("output_norm", None, (width,), "vector"),
        Slot("output", None, (vocab, width), "matrix", optional=True),
    ]
    if rules.qkv_bias:
        slots.append(Slot("output.bias", None, (vocab,), "vector", optional=True))
    if rules.rope_factors:
        full = next((layer for layer in spec.layers if layer.window is None), spec.layers[0])
        pairs = full.rope.dimensions // 2
        slots.append(Slot("rope_freqs", None, (pairs,), "vector", optional=True))
    if spec.per_layer_length:
        total = spec.per_layer_length * spec.layer_count
        slots += [
            Slot("per_layer_token_embd", None, (vocab, total), "matrix"),
            Slot("per_layer_model_proj", None, (total, width), "matrix"),
            Slot("per_layer_proj_norm", None, (spec.per_layer_length,), "vector"),
        ]
    for layer in spec.layers:
        slots.append(Slot("attn_norm", layer.index, (width,), "vector"))
        if layer.delta_net is None:
            slots += _attention_slots(spec, layer)
        else:
            slots += _delta_net_slots(layer.index, layer.delta_net, width)
        if spec.post_norms:
            slots.append(Slot("post_attention_norm", layer.index, (width,), "vector"))
        slots.append(Slot(rules.pre_ffn_norm, layer.index, (width,), "vector"))
        slots += _feed_forward_slots(spec, layer)
        if spec.per_layer_length:
            slots += [
                Slot("inp_gate", layer.index, (spec.per_layer_length, width), "matrix"),
                Slot("proj", layer.index, (width, spec.per_layer_length), "matrix"),
                Slot("post_norm", layer.index, (width,), "vector"),
            ]
        if layer.output_scale:
            slots.append(Slot("layer_output_scale", layer.index, (1,), "vector"))
    return slots


def _attention_slots(spec: ModelSpec, layer: LayerSpec) -> list[Slot]:
    i, width = layer.index, spec.embedding_length
    queries = layer.head_count * layer.head_size
    keys = layer.head_count_kv * layer.head_size
    gated = 2 if spec.gated_attention else 1
    slots = [Slot("attn_q", i, (gated * queries, width), "matrix")]
    if layer.owns_kv:
        slots.append(Slot("attn_k", i, (keys, width), "matrix"))
        if layer.value_source == "projection":
            slots.append(Slot("attn_v", i, (keys, width), "matrix"))
    if spec.qkv_bias:
        sizes = (("attn_q.bias", queries), ("attn_k.bias", keys), ("attn_v.bias", keys))
        slots += [Slot(role, i, (size,), "vector") for role, size in sizes]
    if spec.qk_norm:
        slots.append(Slot("attn_q_norm", i, (layer.head_size,), "vector"))
        if layer.owns_kv:
            slots.append(Slot("attn_k_norm", i, (layer.head_size,), "vector"))
    return [*slots, Slot("attn_output", i, (width, queries), "matrix")]


def _delta_net_slots(i: int, net: DeltaNetSpec, width: int) -> list[Slot]:
    return [
        Slot("attn_qkv", i, (net.channels, width), "matrix"),
        Slot("attn_gate", i, (net.value_length, width), "matrix"),
        Slot("ssm_conv1d", i, (net.channels, net.conv_kernel), "vector"),
        Slot("ssm_beta", i, (net.value_heads, width), "matrix"),
        Slot("ssm_alpha", i, (net.value_heads, width), "matrix"),
        Slot("ssm_dt.bias", i, (net.value_heads,), "vector"),
        Slot("ssm_a", i, (net.value_heads,), "vector"),
        Slot("ssm_norm", i, (net.state_size,), "vector"),
        Slot("ssm_out", i, (width, net.value_length), "matrix"),
    ]


def _feed_forward_slots(spec: ModelSpec, layer: LayerSpec) -> list[Slot]:
    i, width, experts = layer.index, spec.embedding_length, layer.experts
    slots = []
    if layer.feed_forward_length:
        slots += _gated_block(i, "", layer.feed_forward_length, width)
    if experts is not None:
        count, inner = experts.count, experts.feed_forward_length
        slots += [
            Slot("ffn_gate_inp", i, (count, width), "matrix"),
            Slot("ffn_gate_exps", i, (count, inner, width), "matrix"),
            Slot("ffn_up_exps", i, (count, inner, width), "matrix"),
            Slot("ffn_down_exps", i, (count, width, inner), "matrix"),
        ]
        if experts.router == "scaled":
            slots += [
                Slot("ffn_gate_inp.scale", i, (width,), "vector"),
                Slot("ffn_down_exps.scale", i, (count,), "vector", optional=True),
                Slot("pre_ffw_norm_2", i, (width,), "vector"),
                Slot("post_ffw_norm_1", i, (width,), "vector"),
                Slot("post_ffw_norm_2", i, (width,), "vector"),
            ]
        if experts.shared_length is not None:
            slots.append(Slot("ffn_gate_inp_shexp", i, (width,), "vector"))
            slots += _gated_block(i, "_shexp", experts.shared_length, width)
    if spec.post_norms:
        slots.append(Slot("post_ffw_norm", i, (width,), "vector"))
    return slots


def _gated_block(i: int, suffix: str, inner: int, width: int) -> list[Slot]:
    return [
        Slot(f"ffn_gate{suffix}", i, (inner, width), "matrix"),
        Slot(f"ffn_up{suffix}", i, (inner, width), "matrix"),
        Slot(f"ffn_down{suffix}", i, (width, inner), "matrix"),
    ]


# A fused tensor holds the rows of several roles one after another (per expert, for the experts).
_FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv.weight": ("attn_q", "attn_k", "attn_v"),
    "attn_qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "ffn_gate_up_exps.weight": ("ffn_gate_exps", "ffn_up_exps"),
}


def load_weights(file: GGUFFile, spec: ModelSpec) -> Weights:
    """Binds the file's tensors to roles; copies no tensor data.

    Raises InputError for a missing tensor or a wrong shape, Unsupported for a tensor that the
    architecture does not use or a vector that is not F32.
    """
    found = _unfused(file, spec)
    skipped = tuple(f"blk.{spec.layer_count + block}." for block in range(spec.skipped_blocks))
    top: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in spec.layers]
    for slot in expected_tensors(spec):
        tensor = found.pop(slot.tensor_name, None)
        if tensor is None:
            if slot.optional:
                continue
            raise InputError(
                f"model: tensor {slot.tensor_name} is missing, expected shape {slot.shape} "
                f"because architecture {spec.architecture} uses it"
            )
        if tensor.shape != slot.shape:
            raise InputError(
                f"model: tensor {slot.tensor_name} has shape {tensor.shape}, expected {slot.shape} "
                "because the metadata says so"
            )
        if slot.kind == "vector" and tensor.format.name != "F32":
            raise Unsupported(
                f"model: tensor {slot.tensor_name} is {tensor.format.name}; "
                "supported for norm weights, biases, scales and tables: F32"
            )
        if slot.kind == "vector":
            _require_finite(tensor, positive=slot.role == "rope_freqs")
        (top if slot.layer is None else layers[slot.layer])[slot.role] = tensor
    unused = sorted(name for name in found if not name.startswith(skipped))
    if unused:
        raise Unsupported(
            f"model: tensor {unused[0]} is not used by architecture {spec.architecture} "
            f"as built here ({len(unused)} such); leaving it out would compute another model"
        )
    return Weights(top, tuple(layers))


def _require_finite(tensor: Tensor, *, positive: bool) -> None:
    """Norms, biases, scales and tables must be numbers; RoPE factors divide and must be above 0."""
    values = tensor.vector()
    good = np.isfinite(values) & (values > 0) if positive else np.isfinite(values)
    if not good.all():
        place = int(np.flatnonzero(~good.ravel())[0])
        raise InputError(
            f"model: tensor {tensor.name} holds {values.ravel()[place]} at place {place}, expected "
            f"{'a positive number' if positive else 'a finite number'}"
        )


def _unfused(file: GGUFFile, spec: ModelSpec) -> dict[str, Tensor]:
    """The file's tensors by name, fused ones as row views under the names of their parts."""
    shapes = {slot.tensor_name: slot.shape for slot in expected_tensors(spec)}
    found: dict[str, Tensor] = {}
    for name, info in file.tensors.items():
        prefix, _, rest = name.rpartition("blk.")[2].partition(".")
        parts = [
            Slot(role, int(prefix), (), "matrix").tensor_name
            for role in _FUSED.get(rest, ())
            if prefix.isdigit()
        ]
        raw = file.raw(name)
        if name in shapes or not parts or not all(part in shapes for part in parts):
            found[name] = Tensor(name, info.format, info.shape, raw)
            continue
        twice = [part for part in parts if part in file.tensors]
        if twice:
            raise InputError(
                f"model: tensor {name} holds the rows of {twice[0]}, which is there too; expected "
                "one of them"
            )
        axis = len(info.shape) - 2 if len(info.shape) > 1 else 0
        sizes = [shapes[part][axis] for part in parts]
        if sum(sizes) != info.shape[axis]:
            raise InputError(
                f"model: tensor {name} has shape {info.shape}, expected {sum(sizes)} rows = "
                f"{' + '.join(map(str, sizes))}"
            )
        if info.format.block_elements > 1 and len(info.shape) == 1:
            raise Unsupported(f"model: tensor {name} is {info.format.name}; supported: F32")
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            where = (slice(None),) * axis + (slice(start, start + size),)
            shape = (*info.shape[:axis], size, *info.shape[axis + 1 :])
            view = raw[where] if len(info.shape) > 1 else raw[start * 4 : (start + size) * 4]
            found[part] = Tensor(part, info.format, shape, view)
            start += size
    return found
