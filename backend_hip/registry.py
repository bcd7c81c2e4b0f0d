"""The one table of kernels: (op, variant, path) -> what to compile and launch.

The gate (requirements.py, looked up before anything runs) and the dispatcher (dispatch.py) both
read it, so that what is accepted and what exists can't differ. A path is a named bundle of kernels:

    kparallel   lanes stripe K; bit-equal for every number of columns. The default.
    serial      one thread walks all of K per row in the batched products; bounded, not bit-equal.
    matrix      batched products on the matrix unit, with weights and activations as halves;
                bounded. One column of K formats runs the kernels of digits, of other formats and
                of routed experts those of kparallel.
    digits      one column as signed digits in base 256, by products of four bytes; bounded. Not
                asked for by name.
    any         ops that are the same on every path.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backend_hip.kv_types import KV_TYPES
from backend_hip.layout import layout_of
from backend_hip.wave import WAVE
from reference.model.errors import Unsupported
from reference.model.quant import FORMATS

PATHS = ("kparallel", "serial", "matrix")
MATRIX_TILES = (16, 32, 64, 96, 128)  # columns of a block on path matrix
HALVES_TILES = MATRIX_TILES[2:]  # of blocks that read weights as halves, of any format
PACKED_FORMATS = ("Q4_K", "Q5_K", "Q6_K")
DIGIT_FORMATS = PACKED_FORMATS  # whose runs are bytes with a factor and an offset in common
PACKED_MOST = 32  # columns up to which they run matvec_packed.hip, in tiles of PACKED_TILE
PACKED_TILE = 16

MAX_COLS_LIMIT = 64
LARGEST_BLOCK = 256  # threads, simt.h

Key = tuple[str, str, str]


@dataclass(frozen=True)
class KernelRow:
    """One kernel variant.

    `signature`: see launch_arguments.py. `block`: threads per block, 0 for one per element of the
    sized define. `parameters` names defines that the engine supplies; `sized` names the one whose
    value stands in the key, as in "f16,f16@128", because layers differ in it. `grouped` rows have
    the query heads per KV head there too, as in "f16,f16@128x4", and are cut as attention_shape.py
    says. `shape` names defines that the architecture chooses (tuning.py).
    `claims` names instructions that its speed rests on, which the build for gfx1201 must contain:
    "wmma", "wide_loads" (16 bytes a lane), "dot4". The path `matrix` claims "wmma" by itself.
    `waves`: the wave sizes that the kernel is written for.
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
    grouped: bool = False
    shape: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    waves: tuple[int, ...] = (32, 64)

    @property
    def key(self) -> Key:
        return (self.op, self.variant, self.path)


def _weight_defines(name: str) -> tuple[tuple[str, int], ...]:
    block_format = FORMATS[name]
    return (
        ("WEIGHT_FORMAT", block_format.ggml_type),
        ("BLOCK_BYTES", layout_of(block_format).device_nbytes),
        ("BLOCK_ELEMENTS", block_format.block_elements),
    )


def _wide_loads(name: str) -> tuple[str, ...]:
    """The claim of formats whose units are read 16 bytes at a time."""
    return ("wide_loads",) if FORMATS[name].block_elements == 256 else ()


# gguf types whose rows kernels/formats.h can decode.
_MATRIX_FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0"),
    *("Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
)


# Formats that llama.cpp's mixes give to V where Q and K have another (llama-quant.cpp).
_V_FORMATS: Mapping[str, tuple[str, ...]] = {
    "Q4_K": ("Q5_K", "Q6_K", "Q8_0"),
    "Q5_K": ("Q6_K",),
    "Q4_0": ("Q5_0", "Q8_0"),
    "Q4_1": ("Q5_1",),
    "Q5_0": ("Q8_0",),
}
ACTIVATIONS: Mapping[str, int] = {"silu": 0, "gelu_tanh": 1}  # codes of the kernels' ACTIVATION
PAIRINGS: Mapping[str, int] = {"norm": 0, "neox": 1}  # of their ROPE_NEOX

_COLUMNS_SHAPE = ("ROWS_PER_WAVE", "STAGE_COLUMNS", "LEAN")  # what matvec_batched.hip asks for
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
    "sum_parts": "PPii",
}


def tiles_of(form: str) -> tuple[int, ...]:
    """Columns of a block for weights of a format, ascending: more than packed products take."""
    return tuple(tile for tile in MATRIX_TILES if form not in PACKED_FORMATS or tile > PACKED_MOST)


def runs_packed(form: str, count: int) -> bool:
    """Whether products of `count` columns run on activations as kernels/packed.h has them."""
    return form in PACKED_FORMATS and count <= PACKED_MOST


def _row(op: str, file: str, signature: str, block: int, **rest: Any) -> KernelRow:
    """A row with variant "", path "any" and the op's name as entry, unless `rest` says others."""
    return KernelRow(
        **{"op": op, "variant": "", "path": "any", "entry": op}  # type: ignore[arg-type]
        | {"file": file, "signature": signature, "block": block}
        | rest
    )


def _one_column(name: str, row: dict[str, Any]) -> Iterable[KernelRow]:
    """Products of one column, and fused with what comes before and behind."""
    yield _row("matvec", "matvec.hip", "PPPii", 8 * WAVE, **row)
    yield _row("matvec_add", "matvec.hip", "PPPii", 8 * WAVE, **row)
    yield from _fused_projections(name, row)


def _fused_projections(name: str, row: dict[str, Any]) -> Iterable[KernelRow]:
    """Projections of a normed column: Q, K and V with V in a format of its own; gate and up."""
    v_names = (v for v in _V_FORMATS.get(name, ()) if row["path"] != "digits" or v in DIGIT_FORMATS)
    for v_name in dict.fromkeys((name, *v_names)):
        v_format = ("V_FORMAT", FORMATS[v_name].ggml_type)
        pair = {"variant": f"{name},{v_name}", "defines": (*row["defines"], v_format)}
        yield _row("norm_qkv", "norm_qkv.hip", "PPPPPPPPiiif", 8 * WAVE, **row | pair)
    for activation, code in ACTIVATIONS.items():
        defines = (*row["defines"], ("ACTIVATION", code))
        pair = {"variant": f"{activation},{name}", "defines": defines}
        yield _row("norm_gate_up", "norm_gate_up.hip", "PPPPPiif", 8 * WAVE, **row | pair)


def _packed_products(name: str, row: dict[str, Any]) -> Iterable[KernelRow]:
    """Products of the same activations, the last with weights in a format of its own."""
    for last in dict.fromkeys((name, *_V_FORMATS.get(name, ()))):
        if last in PACKED_FORMATS:
            shared = {"path": "matrix", "entry": "matvec_packed", "variant": f"{name},{last}"}
            chosen = {"shape": ("STAGED_SUPERBLOCKS",), "claims": ("wide_loads",), "waves": (32,)}
            chosen["defines"] = (*row["defines"], ("LAST_FORMAT", FORMATS[last].ggml_type))
            op, file = "matvec_batched_packed", "matvec_packed.hip"
            yield _row(op, file, "PPPPPPiiiiii", 256, **shared, **chosen)


def _matrix_blocks(name: str, form: dict[str, Any]) -> Iterable[KernelRow]:
    """The blocks of the matrix unit. Entries of one file are in one code object, and those that
    read halves in one for all formats."""
    yield _row("weights_to_half", "weights_to_half.hip", "PPiiii", 256, **form, waves=(32,))
    for tile in tiles_of(name):
        file, signature, block = "matvec_batched_matrix.hip", "PPPPiiii", 256
        entry, row = f"matvec_batched_{tile}", form
        if tile in HALVES_TILES:
            file, entry, block, row = "matvec_halves.hip", f"matvec_halves_{tile}", 128, {}
        row = row | {"path": "matrix", "variant": f"{name}/{tile}", "entry": entry}
        yield _row("matvec_batched", file, signature, block, **row, waves=(32,))


def _rows() -> Iterable[KernelRow]:
    for name in _MATRIX_FORMATS:
        form = {"variant": name, "defines": _weight_defines(name)}
        product = form | {"path": "kparallel"}
        columns = {"parameters": ("MAX_COLS",)}
        yield _row("embed", "embed.hip", "PPPif", 64, **form)
        one = product | {"shape": ("ROWS_PER_WAVE", "STAGE"), "claims": _wide_loads(name)}
        yield from _one_column(name, one)
        if name in DIGIT_FORMATS:
            as_digits = {
                "path": "digits",
                "defines": (*form["defines"], ("DIGITS", 1)),
                "shape": (*one["shape"], "BLOCKS_PER_UNIT", "AHEAD"),
                "claims": (*one["claims"], "dot4"),
            }
            yield from _one_column(name, one | as_digits)
        many: dict[str, Any] = product | {"entry": "matvec_batched", "shape": _COLUMNS_SHAPE}
        file, signature = "matvec_batched.hip", "PPPiii"
        yield _row("matvec_batched", file, signature, 8 * WAVE, **many, **columns)
        yield _row("matvec_few", file, signature, 8 * WAVE, **many, sized="MAX_COLS")
        serial = form | columns | {"path": "serial", "entry": "matvec_serial"}
        yield _row("matvec_batched", "matvec_serial.hip", "PPPiii", 64, **serial)
        if name in PACKED_FORMATS:
            yield from _packed_products(name, form)
        yield from _matrix_blocks(name, form)
        experts: dict[str, Any] = product | columns | {"shape": ("LEAN",)}
        yield _row("matvec_expert", "matvec_experts.hip", "PPPPiii", 4 * WAVE, **experts)
        yield _row("matvec_experts", "matvec_experts.hip", "PPPPPiii", 4 * WAVE, **experts)

    yield _row("to_half", "to_half.hip", "PPPii", 256)
    yield _row("to_packed", "to_packed.hip", "PPPi", 256, waves=(32,))
    yield _row("norm_pack", "norm_pack.hip", "PPPPPiiif", 256, waves=(32,))
    yield _row("rms_norm", "rms_norm.hip", "PPPif", 128)
    yield _row("add_rms_norm", "rms_norm.hip", "PPPPPif", 128)
    for pairing, code in PAIRINGS.items():
        defines = (("ROPE_NEOX", code),)
        yield _row("rope", "rope.hip", "PPPPii", WAVE, variant=pairing, defines=defines)
    for (type_k, kind_k), (type_v, kind_v) in itertools.product(KV_TYPES.items(), repeat=2):
        types = {
            "variant": f"{type_k},{type_v}",
            "defines": (("K_TYPE", kind_k.code), ("V_TYPE", kind_v.code)),
        }
        yield _row("kv_write", "kv_write.hip", "PPPPPiii", 64, **types)
        for pairing, normed in itertools.product(PAIRINGS, (0, 1)):
            turned = (("ROPE_NEOX", PAIRINGS[pairing]), ("NORMED", normed))
            name = f"{pairing}{',normed' * normed},{types['variant']}"
            row = types | {"variant": name, "defines": (*types["defines"], *turned)}
            yield _row("rope_store", "rope_store.hip", "PPPPPPPPPiiiiiif", 128, **row)
        heads = types | {"sized": "HEAD_SIZE", "grouped": True}
        if "q8_0" in (type_k, type_v):  # by the matrix unit's products of bytes
            heads |= {"waves": (32,), "claims": ("wmma",)}
        rows = heads | {"entry": "attention_rows"}
        yield _row("attention", "attention.hip", "PPPPPiiiif", 4 * WAVE, **rows)
        yield _row("attention_split", "attention.hip", "PPPPPPiiiif", 4 * WAVE, **heads)
    yield _row(
        "attention_merge", "attention_merge.hip", "PPPii", 4 * WAVE, sized="HEAD_SIZE", grouped=True
    )
    for activation, code in ACTIVATIONS.items():
        kind = {"variant": activation, "defines": (("ACTIVATION", code),)}
        yield _row("gated_parts", "elementwise.hip", "PPii", 128, **kind)
        yield _row("gated", "elementwise.hip", "PPPi", 128, **kind)
        yield _row("gated_strided", "elementwise.hip", "PPPiii", 128, **kind)
    for op, signature in _ARITHMETIC.items():
        yield _row(op, "arithmetic.hip", signature, 128)

    yield _row("route", "route.hip", "PPPi", WAVE, sized="EXPERTS")
    yield _row("group_by_expert", "route.hip", "PPPi", WAVE, sized="EXPERTS")
    yield _row("combine_experts", "combine_experts.hip", "PPPPPii", 64)

    yield _row("convolve", "delta_inputs.hip", "PPPPPiii", 64)
    yield _row("unit_heads", "delta_inputs.hip", "PPiiff", WAVE)
    yield _row("delta_gates", "delta_inputs.hip", "PPPPPii", 64)
    yield _row("delta_rule", "delta_net.hip", "PPPPPPPPiii", 0, sized="STATE_SIZE")

    yield _row("argmax_blocks", "argmax.hip", "PPi", 256)
    yield _row("argmax", "argmax.hip", "PPPi", 256)


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


FEW_COLUMNS = (4, 8, 16)
"""Columns of kernels for a decode step of several sequences; more take the batched kernel."""


def one_column_path(path: str, form: str) -> str:
    """The path whose kernels multiply one column by weights of a format, in an engine of `path`."""
    digits = path in ("matrix", "digits") and form in DIGIT_FORMATS
    return "digits" if digits else "kparallel"


def few_columns(path: str, sequences: int) -> int:
    """The fewest columns of a kernel for a decode step; 0 where the batched kernel runs."""
    fitting = [columns for columns in FEW_COLUMNS if columns >= sequences]
    return fitting[0] if path == "kparallel" and fitting and sequences > 1 else 0
