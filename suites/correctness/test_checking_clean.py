"""What is right stays silent under both checks and leaves the bits that it leaves without them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_hip import matrix, packed
from backend_hip.device import Buffer, Device
from backend_hip.engine import Engine
from backend_hip.half_columns import SUPERBLOCK
from backend_hip.kv_types import KV_TYPES
from backend_hip.registry import PACKED_TILE, REGISTRY, Key
from backend_hip.requirements import requirements
from backend_hip.runtimes.checking import Checking, checking_of, set_checking
from backend_hip.weights import DeviceTensor
from fixtures.registry import resolve_model
from reference.model import Model, load_model
from suites.correctness.checks import checked
from suites.correctness.fused import (
    FusedLaunch,
    gated_parts,
    norm_gate_up,
    norm_pack,
    norm_qkv,
    product,
    rope_store,
)
from suites.correctness.lab import Lab
from suites.correctness.tiers import formats_in_ci

SEEDS = (0, 5, 11)
TOKENS = (3, 1, 4, 1, 5, 9, 2)
CONTEXT = 64


@dataclass(frozen=True)
class EngineCase:
    model: str
    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"

    @property
    def id(self) -> str:
        return f"{self.model}-{self.path}-{self.kv_type_k}-{self.kv_type_v}"


ENGINES = (
    EngineCase("tiny-llama"),
    EngineCase("tiny-qwen3"),
    EngineCase("oracle-gemma4moe"),
    EngineCase("oracle-qwen35moe"),
    EngineCase("tiny-qwen3", path="matrix"),
    *(
        EngineCase("tiny-qwen3", kv_type_k=kind_k, kv_type_v=kind_v)
        for kind_k, kind_v in itertools.product(KV_TYPES, repeat=2)
        if "q8_0" in (kind_k, kind_v)
    ),
    # The rest of the registry, with as few models as have it.
    EngineCase("tiny-qwen35moe", kv_type_k="f32", kv_type_v="f32"),
    EngineCase("tiny-gemma4e", path="serial", kv_type_v="f32"),
    EngineCase("tiny-qwen3moe-q6_k", kv_type_k="f32"),
    EngineCase("tiny-qwen3-q5_1"),
    EngineCase("tiny-qwen2-q8_0"),
    EngineCase("tiny-llama-q5_k", path="serial"),
    EngineCase("tiny-llama-q5_k", path="matrix"),
    *(EngineCase(f"tiny-llama-{name}", path="serial") for name in ("f16", "bf16", "q4_0", "q4_1")),
    *(EngineCase(f"tiny-llama-{name}") for name in ("bf16", "q4_0", "q4_1")),
)


def run(engine: Engine) -> list[NDArray[np.float32]]:
    """Logits of both prefill modes and of decode steps after each."""
    result = []
    for prefill in (engine.prefill_batched, engine.prefill_per_token):
        engine.reset()
        result.append(prefill(TOKENS, logits="all").logits)
        token = int(result[-1][-1].argmax())
        for _ in range(2):
            step = engine.decode(token)
            result.append(step.tail.logits)
            token = step.token
        result.append(np.asarray([engine.step(token)], dtype=np.float32))
    return result


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.id)
def test_the_engine_gives_the_same_bits(
    case: EngineCase, device: Device, load: Callable[[str], Model]
) -> None:
    with (
        checked(device, Checking()),
        Engine(
            load(case.model),
            device,
            max_cols=4,
            path=case.path,
            kv_type_k=case.kv_type_k,
            kv_type_v=case.kv_type_v,
            context_length=CONTEXT,
        ) as engine,
    ):
        plain = run(engine)
        for seed in SEEDS:
            device.stream.synchronise()
            set_checking(Checking(shuffle=seed, sanitize=True))
            for got, expected in zip(run(engine), plain, strict=True):
                np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
        device.stream.synchronise()
        assert checking_of() == Checking(shuffle=SEEDS[-1], sanitize=True)
        set_checking(Checking())


# --- rows of the registry that no model above has ------------------------------------------------

EXPERT_FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q5_K")
DIRECT: tuple[Key, ...] = (
    ("embed", "Q4_1", "any"),
    ("embed", "Q5_1", "any"),
    ("gated_strided", "silu", "any"),
    *(("matvec_expert", name, "kparallel") for name in EXPERT_FORMATS),
    *(("matvec_experts", name, "kparallel") for name in EXPERT_FORMATS),
)
# Fused rows and those of decode batches, in every format.
OTHERS: tuple[Key, ...] = tuple(
    row.key
    for row in REGISTRY
    if row.op
    in {"matvec_add", "matvec_few", "norm_qkv", "norm_gate_up"}
    | {"norm_pack", "rope_store", "gated_parts"}
)
# A short prompt has few columns: each block shape of the matrix unit by itself, in every format.
BLOCKS: tuple[Key, ...] = tuple(
    row.key for row in REGISTRY if row.path == "matrix" and row.op == "matvec_batched"
)
PACKED: tuple[Key, ...] = tuple(row.key for row in REGISTRY if row.op == "matvec_batched_packed")


def test_every_row_of_the_registry_has_a_case() -> None:
    covered = {*DIRECT, *BLOCKS, *PACKED, *OTHERS}
    # A block of many columns reads weights that this has made halves.
    covered |= {("weights_to_half", form.partition("/")[0], "any") for _, form, _ in BLOCKS}
    for case in ENGINES:
        model = load_model(resolve_model(case.model))
        keys = requirements(model.spec, model.weights, case.path, case.kv_type_k, case.kv_type_v)
        covered |= {(op, variant.partition("@")[0], path) for op, variant, path in keys}
    assert {row.key for row in REGISTRY} == covered


def _weight(lab: Lab, form: str, rows: int, columns: int) -> Buffer:
    values = np.random.default_rng([rows, columns]).standard_normal((rows, columns))
    return lab.weight(form, values.astype(np.float32)).buffer


@pytest.mark.parametrize("key", DIRECT, ids=lambda key: " ".join(key))
def test_a_kernel_that_no_model_needs_is_clean(key: Key, device: Device) -> None:
    op, form, _ = key
    rows, columns, count, tokens = 9, 256, 3, 4
    x = np.random.default_rng(7).standard_normal((tokens, columns)).astype(np.float32)
    with checked(device, Checking()), Lab(device) as lab:
        flow = lab.flow([key], {"MAX_COLS": 4}, tokens=range(tokens))
        given, y = lab.buffer(x), lab.output(tokens, columns if op == "embed" else rows)
        arguments: tuple[Any, ...]
        if op == "gated_strided":
            y = lab.output(tokens, columns)
            grid = (-(-tokens * columns // flow.kernels.block(key)), 1)
            arguments = (given, given, y.pointer, tokens * columns, columns, columns)
        elif op == "embed":
            grid = (1, tokens)
            arguments = (_weight(lab, form, rows, columns), flow.step, y.pointer, columns, 2.0)
        else:
            weight = _weight(lab, form, count * rows, columns)
            chosen = np.asarray([2, 0, 1, 2], dtype=np.int32)
            routing, last = [chosen], tokens
            if op == "matvec_experts":
                routing, last = [np.asarray([0, 1, 2, 4]), np.asarray([1, 2, 0, 3])], count
            routes = [lab.buffer(array.astype(np.int32)) for array in routing]
            grid = (3, last)
            arguments = (weight, given, y.pointer, *routes, rows, columns, 1)
        flow.kernels.launch(key, grid, *arguments)
        plain = lab.read(y)
        for seed in SEEDS:
            set_checking(Checking(shuffle=seed, sanitize=True))
            flow.kernels.launch(key, grid, *arguments)
            np.testing.assert_array_equal(lab.read(y), plain)
            set_checking(Checking())


def _launch(lab: Lab, key: Key) -> FusedLaunch:
    """A launch of one of OTHERS."""
    op, variant, path = key
    rows, columns = 6, 256
    if op == "norm_pack":
        return norm_pack(lab, 2 * columns)
    if op == "rope_store":
        return rope_store(lab, key, 2, 64)
    if op == "gated_parts":
        return gated_parts(lab, key, columns)
    if op == "norm_qkv":
        return norm_qkv(lab, key, rows, 2, columns)
    if op == "norm_gate_up":
        return norm_gate_up(lab, key, rows, columns)
    if op == "matvec_few":
        return product(lab, (op, f"{variant}@4", path), rows, columns, 3)
    return product(lab, key, rows, columns)


@pytest.mark.parametrize("key", formats_in_ci(OTHERS))
def test_a_fused_kernel_is_clean(key: Key, device: Device) -> None:
    with checked(device, Checking()), Lab(device) as lab:
        launch = _launch(lab, key)
        flow, result = lab.flow([launch.key], {}), launch.result
        arguments = [flow.step if given == "step" else given for given in launch.arguments]
        before = result.download((result.nbytes,), np.uint8)
        found = []
        for checking in (Checking(), *(Checking(shuffle=seed, sanitize=True) for seed in SEEDS)):
            result.upload(before)
            set_checking(checking)
            flow.kernels.launch(launch.key, launch.grid, *arguments)
            found.append(result.download((result.nbytes,), np.uint8).tobytes())
            set_checking(Checking())
        assert found[0] != before.tobytes()
        assert found[1:] == found[:1] * len(SEEDS)


@pytest.mark.parametrize("key", formats_in_ci(BLOCKS))
def test_a_block_of_the_matrix_unit_is_clean(key: Key, device: Device) -> None:
    form, _, shape = key[1].partition("/")
    rows, columns, tile = 9, 256, int(shape)
    x = np.random.default_rng(tile).standard_normal((tile + 1, columns)).astype(np.float32)
    with checked(device, Checking()), Lab(device) as lab:
        keys = [("to_half", "", "any"), ("weights_to_half", form, "any"), key]
        flow = lab.flow(keys, {}, tokens=range(tile + 1), longest=columns)
        values, y, held = lab.values(x), lab.output(tile + 1, rows), flow.halves
        weight = DeviceTensor(
            "test weight", form, (rows, columns), _weight(lab, form, rows, columns)
        )
        assert held is not None
        results = []
        for checking in (Checking(), *(Checking(shuffle=seed, sanitize=True) for seed in SEEDS)):
            set_checking(checking)
            y.buffer.poison()
            matrix.multiply(flow.kernels, held, values.pointer, weight, y.pointer, tile + 1, tile)
            results.append(lab.read(y))
            set_checking(Checking())
        for got in results[1:]:
            np.testing.assert_array_equal(got.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("key", formats_in_ci(PACKED))
def test_a_packed_product_is_clean(key: Key, device: Device) -> None:
    """Three matrices in a launch, in parts of K, the last of them in another format."""
    first, last = key[1].split(",")
    columns, count = 3 * SUPERBLOCK, PACKED_TILE + 1
    x = np.random.default_rng(3).standard_normal((count, columns)).astype(np.float32)
    with checked(device, Checking()), Lab(device) as lab:
        keys: list[Key] = [("to_packed", "", "any"), key]
        flow = lab.flow(keys, {}, tokens=range(count), longest=columns)
        values, held = lab.values(x), flow.halves
        assert held is not None
        weights = [
            lab.weight(form, np.random.default_rng(i).standard_normal((rows, columns)).astype("f4"))
            for i, (form, rows) in enumerate(((first, 17), (first, 1), (last, 9)))
        ]
        results = []
        for checking in (Checking(), *(Checking(shuffle=seed, sanitize=True) for seed in SEEDS)):
            set_checking(checking)
            held.parts.poison()
            packed.pack(flow.kernels, held, values.pointer, count, columns)
            parts = packed.multiply(flow.kernels, held, weights, count)
            results.append(held.parts.download((parts, count, 27), np.float32))
            set_checking(Checking())
        assert np.isfinite(results[0]).all()
        for got in results[1:]:
            np.testing.assert_array_equal(got.view(np.uint32), results[0].view(np.uint32))
