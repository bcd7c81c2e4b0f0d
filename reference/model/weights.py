"""Weights by role: which tensors a spec expects, checked for presence, shape and format.

Matrices are (rows = outputs, columns = inputs), stored row after row: y = x . W^T. A tensor that no
role names is refused, because ignoring it would compute some other model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.model.errors import InputError, Unsupported
from reference.model.gguf import GGUFFile
from reference.model.quant import BlockFormat
from reference.model.spec import ARCHITECTURES, ModelSpec

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
        return f"{prefix}{self.role}.weight"


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
        """Every tensor that a matrix product reads, each once, in forward order."""
        roles = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        products = [layer[role] for layer in self.layers for role in roles]
        return [*products, self.lm_head]


def expected_tensors(spec: ModelSpec) -> list[Slot]:
    """All tensors of the architecture, in file-independent order."""
    width, vocab = spec.embedding_length, spec.vocab_size
    slots = [
        Slot("token_embd", None, (vocab, width), "matrix"),
        Slot("output_norm", None, (width,), "vector"),
        Slot("output", None, (vocab, width), "matrix", optional=True),
    ]
    if ARCHITECTURES[spec.architecture].rope_factors:
        pairs = spec.layers[0].rope.dimensions // 2
        slots.append(Slot("rope_freqs", None, (pairs,), "vector", optional=True))
    for layer in spec.layers:
        i = layer.index
        queries = layer.head_count * layer.head_size
        keys = layer.head_count_kv * layer.head_size
        inner = layer.feed_forward_length
        slots += [
            Slot("attn_norm", i, (width,), "vector"),
            Slot("attn_q", i, (queries, width), "matrix"),
            Slot("attn_k", i, (keys, width), "matrix"),
            Slot("attn_v", i, (keys, width), "matrix"),
            Slot("attn_output", i, (width, queries), "matrix"),
            Slot("ffn_norm", i, (width,), "vector"),
            Slot("ffn_gate", i, (inner, width), "matrix"),
            Slot("ffn_up", i, (inner, width), "matrix"),
            Slot("ffn_down", i, (width, inner), "matrix"),
        ]
        if spec.qk_norm:
            slots += [
                Slot("attn_q_norm", i, (layer.head_size,), "vector"),
                Slot("attn_k_norm", i, (layer.head_size,), "vector"),
            ]
        if spec.post_norms:
            slots += [
                Slot("post_attention_norm", i, (width,), "vector"),
                Slot("post_ffw_norm", i, (width,), "vector"),
            ]
    return slots


def load_weights(file: GGUFFile, spec: ModelSpec) -> Weights:
    """Binds the file's tensors to roles; copies no tensor data.

    Raises InputError for a missing tensor or a wrong shape, Unsupported for a tensor that the
    architecture does not use or a vector that is not F32.
    """
    top: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in spec.layers]
    unused = dict(file.tensors)
    for slot in expected_tensors(spec):
        info = unused.pop(slot.tensor_name, None)
        if info is None:
            if slot.optional:
                continue
            raise InputError(
                f"model: tensor {slot.tensor_name} is missing, expected shape {slot.shape} "
                f"because architecture {spec.architecture} uses it"
            )
        if info.shape != slot.shape:
            raise InputError(
                f"model: tensor {slot.tensor_name} has shape {info.shape}, expected {slot.shape} "
                "because the metadata says so"
            )
        if slot.kind == "vector" and info.format.name != "F32":
            raise Unsupported(
                f"model: tensor {slot.tensor_name} is {info.format.name}; "
                "supported for norm weights and RoPE factors: F32"
            )
        tensor = Tensor(slot.tensor_name, info.format, info.shape, file.raw(slot.tensor_name))
        (top if slot.layer is None else layers[slot.layer])[slot.role] = tensor
    if unused:
        raise Unsupported(
            f"model: tensor {sorted(unused)[0]} is not used by architecture {spec.architecture} "
            f"as built here ({len(unused)} such); leaving it out would compute another model"
        )
    return Weights(top, tuple(layers))
