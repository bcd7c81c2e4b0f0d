"""The one table of kernels: (op, variant, path) -> what to compile and launch.

The gate (`requirements` looked up before anything runs) and the dispatcher (dispatch.py) both read
it, so that what is accepted and what exists can't differ. A path is a named bundle of kernels:

    kparallel   lanes stripe K; bit-equal for every number of columns. The default.
    serial      one thread walks all of K per row in the batched products; bounded, not bit-equal.
    any         ops that are the same on every path.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from reference.model.errors import InputError, Unsupported
from reference.model.quant import FORMATS
from reference.model.spec import ModelSpec
from reference.model.weights import Weights

PATHS = ("kparallel", "serial")
KV_TYPES: Mapping[str, int] = {"f32": 0, "f16": 1}  # codes of kernels/kv_type.h
MAX_COLS_LIMIT = 64
WAVE = 32
LARGEST_BLOCK = 256  # threads, simt.h

Key = tuple[str, str, str]


@dataclass(frozen=True)
class KernelRow:
    """One kernel variant.

    `signature`: see launch_arguments.py. `block`: threads per block, 0 for one per element of the
    sized define. `parameters` names defines that the engine supplies; `sized` names the one whose
    value stands in the key, as in "f16,f16@128", because layers differ in it. `roundings`: what
    the kernel rounds beyond float32 arithmetic; the tolerance table reads it.
    """

    op: str
    variant: str
    path: str
    file: str
    entry: str
    signature: str
    block: int
    defines: tuple[tuple[str, int], ...] = ()
    parameters: tuple[str, ...] = ()
    sized: str = ""
    roundings: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.op, self.variant, self.path)


def _weight_defines(name: str) -> tuple[tuple[str, int], ...]:
    block_format = FORMATS[name]
    return (
        ("WEIGHT_FORMAT", block_format.ggml_type),
        ("BLOCK_BYTES", block_format.block_nbytes),
        ("BLOCK_ELEMENTS", block_format.block_elements),
    )


# gguf types whose rows kernels/formats.h can decode.
_MATRIX_FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0"),
    *("Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
)


# Entries of kernels/arithmetic.hip and their signatures.
_ARITHMETIC = {
    "add": "PPPi",
    "add_bias": "PPii",
    "add_scaled": "PPPfi",
    "scale": "Pfi",
    "soft_cap": "Pfi",
    "sigmoid_gated": "PPi",
    "sigmoid_gated_rows": "PPii",
    "split_gate": "PPPii",
}


def _rows() -> Iterable[KernelRow]:
    for name in _MATRIX_FORMATS:
        defines = _weight_defines(name)
        yield KernelRow("embed", name, "any", "embed.hip", "embed", "PPPif", 64, defines)
        yield KernelRow(
            "matvec", name, "kparallel", "matvec.hip", "matvec", "PPPii", 4 * WAVE, defines
        )
        yield KernelRow(
            *("matvec_batched", name, "kparallel", "matvec_batched.hip", "matvec_batched"),
            *("PPPiii", 4 * WAVE, defines),
            parameters=("MAX_COLS",),
        )
        yield KernelRow(
            *("matvec_batched", name, "serial", "matvec_serial.hip", "matvec_serial"),
            *("PPPiii", 64, defines),
            parameters=("MAX_COLS",),
        )
        for entry, signature in (("matvec_expert", "PPPPiii"), ("matvec_experts", "PPPPPiii")):
            yield KernelRow(
                *(entry, name, "kparallel", "matvec_experts.hip", entry, signature, 4 * WAVE),
                defines,
                parameters=("MAX_COLS",),
            )
    yield KernelRow("rms_norm", "", "any", "rms_norm.hip", "rms_norm", "PPPif", 128)
    yield KernelRow("add_rms_norm", "", "any", "rms_norm.hip", "add_rms_norm", "PPPPPif", 128)
    for pairing, code in (("norm", 0), ("neox", 1)):
        yield KernelRow(
            "rope", pairing, "any", "rope.hip", "rope", "PPPPii", WAVE, (("ROPE_NEOX", code),)
        )
    for type_k, code_k in KV_TYPES.items():
        for type_v, code_v in KV_TYPES.items():
            variant = f"{type_k},{type_v}"
            types = (("K_TYPE", code_k), ("V_TYPE", code_v))
            rounded = tuple(f"{side} stored as {t}" for side, t in (("K", type_k), ("V", type_v)))
            yield KernelRow(
                *("kv_write", variant, "any", "kv_write.hip", "kv_write", "PPPPPi", 64, types),
                roundings=rounded,
            )
            yield KernelRow(
                *("attention", variant, "any", "attention.hip", "attention", "PPPPPiif", WAVE),
                types,
                sized="HEAD_SIZE",
                roundings=rounded,
            )
    for activation, code in (("silu", 0), ("gelu_tanh", 1)):
        defines = (("ACTIVATION", code),)
        yield KernelRow(
            *("gated", activation, "any", "elementwise.hip", "gated", "PPPi", 128, defines)
        )
        yield KernelRow(
            *("gated_strided", activation, "any", "elementwise.hip", "gated_strided"),
            *("PPPiii", 128, defines),
        )
    for entry, signature in _ARITHMETIC.items():
        yield KernelRow(entry, "", "any", "arithmetic.hip", entry, signature, 128)
    yield KernelRow("route", "", "any", "route.hip", "route", "PPPi", WAVE, sized="EXPERTS")
    yield KernelRow(
        *("group_by_expert", "", "any", "route.hip", "group_by_expert", "PPPi", WAVE),
        sized="EXPERTS",
    )
    yield KernelRow(
        *("combine_experts", "", "any", "combine_experts.hip", "combine_experts", "PPPPPii", 64)
    )
    yield KernelRow(
        *("delta_rule", "", "any", "delta_net.hip", "delta_rule", "PPPPPPPiii", 0),
        sized="STATE_SIZE",
    )
    for entry, signature, block in (
        ("convolve", "PPPPiii", 64),
        ("unit_heads", "PPiiff", WAVE),
        ("delta_gates", "PPPPPii", 64),
    ):
        yield KernelRow(entry, "", "any", "delta_inputs.hip", entry, signature, block)
    yield KernelRow("argmax", "", "any", "argmax.hip", "argmax", "PPPi", 256)


class Registry:
    """An exact-match table without fallback."""

    def __init__(self, rows: Iterable[KernelRow]) -> None:
        self._rows: dict[Key, KernelRow] = {}
        for row in rows:
            if row.key in self._rows:
                raise ValueError(f"registry: row {row.key} appears twice")
            self._rows[row.key] = row

    def __iter__(self) -> Iterator[KernelRow]:
        return iter(self._rows.values())

    def find(self, op: str, variant: str, path: str) -> KernelRow:
        """The row, or Unsupported with the variants that this op has on this path.

        A size after "@" in the variant chooses no row: it becomes the row's sized define.
        """
        variant = variant.partition("@")[0]
        row = self._rows.get((op, variant, path))
        if row is None:
            there = [key[1] for key in self._rows if key[0] == op and key[2] == path]
            raise Unsupported(
                f"registry: no kernel for {op} with {variant or 'no variant'} on path {path}; "
                f"supported: {', '.join(there) or 'nothing'}"
            )
        return row

    def without(self, op: str, variant: str) -> "Registry":
        """A copy that lacks all rows of one op and variant, for tests of the gate."""
        return Registry(row for key, row in self._rows.items() if key[:2] != (op, variant))


REGISTRY = Registry(_rows())


def requirements(
    spec: ModelSpec, weights: Weights, path: str, kv_type_k: str, kv_type_v: str
) -> list[Key]:
    """Every row that a model needs on a path, each once. Raises InputError for an unknown name."""
    if path not in PATHS:
        raise InputError(f"engine: path is {path}, expected one of {', '.join(PATHS)}")
    kv = f"{kv_type_k},{kv_type_v}"
    keys: list[Key] = [("embed", weights.top["token_embd"].format.name, "any")]
    ops = ["rms_norm", "add_rms_norm", "add", "argmax"]
    for layer in spec.layers:
        if layer.delta_net is None:
            keys.append(("rope", layer.rope.pairing, "any"))
            keys.append(("kv_write", kv, "any"))
            keys.append(("attention", f"{kv}@{layer.head_size}", "any"))
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
                keys += [("matvec", "F32", "kparallel"), ("matvec_batched", "F32", path)]
        if layer.output_scale:
            ops.append("scale")
    keys.append(("gated", spec.activation, "any"))
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
        keys.append(("matvec", tensor.format.name, "kparallel"))
        keys.append(("matvec_batched", tensor.format.name, path))
    for tensor in weights.expert_matrices():
        keys.append(("matvec_expert", tensor.format.name, "kparallel"))
        keys.append(("matvec_experts", tensor.format.name, "kparallel"))
    return list(dict.fromkeys(keys))
