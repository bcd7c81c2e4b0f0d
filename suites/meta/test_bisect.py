"""`assay bisect`, with faults planted in the real engine on the CPU runtime."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backend_hip import ops, sampler
from backend_hip.device import Device, open_device
from backend_hip.engine import Engine
from suites.harness.bisect import Finding, bisect
from suites.harness.bisect_forward import Flows
from suites.harness.bisect_words import AGAIN
from suites.harness.validate import Options
from suites.harness.verdict import State
from suites.meta.engine_faults import kernel
from suites.meta.models import LLAMA, QWEN3, oracle_model, prompt, tiny_model

STEPS = 2
CONTEXT = 64
FLOWS = Flows(chunk=8, max_cols=8)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("cpu") as opened:
        yield opened


def _bisect(
    device: Device, name: str = LLAMA, engine: type[Engine] = Engine, **options: Any
) -> Finding:
    model = tiny_model(name) if name.startswith("tiny-") else oracle_model(name)

    def open_engine() -> Engine:
        return engine(
            model, device, max_cols=FLOWS.max_cols, chunk=FLOWS.chunk, context_length=CONTEXT
        )

    chosen = Options(**{"n_decode": STEPS, **options})
    return bisect(model, open_engine, prompt(model), chosen, FLOWS, context_length=CONTEXT)


def plant_column_shift(monkeypatch: pytest.MonkeyPatch, weight: str) -> None:
    """One layer's batched product gives column c the result of column c - 1."""
    linear = ops.linear

    def broken(flow: Any, x: Any, tensor: Any, y: Any, **rest: Any) -> None:
        linear(flow, x, tensor, y, **rest)
        if tensor.name == weight and flow.tokens > 1:
            linear(replace(flow, tokens=flow.tokens - 1), x, tensor, y.from_row(1))

    monkeypatch.setattr(ops, "linear", broken)


@pytest.mark.parametrize("name", [LLAMA, QWEN3])
def test_a_sound_engine_has_nothing_to_bisect(device: Device, name: str) -> None:
    found = _bisect(device, name)
    assert (found.exit_code, found.kind, found.forward) == (0, "run", None)
    assert found.paragraph.startswith("There is nothing to bisect: all ")


@pytest.mark.parametrize("name", ["qwen3", "gemma4e", "qwen35moe"])
def test_a_fault_in_a_middle_layer_is_named_by_the_table_and_by_both_hybrids(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """gemma4e reads earlier layers' keys and values, qwen35moe keeps recurrent states."""
    layers = oracle_model(name).spec.layer_count
    layer = layers // 2
    role = "ffn_down_shexp" if name == "qwen35moe" else "ffn_down"
    plant_column_shift(monkeypatch, oracle_model(name).weights.layers[layer][role].name)
    found = _bisect(device, name)
    point = f"ffn_shexp-{layer}" if name == "qwen35moe" else f"ffn_out-{layer}"
    assert found.verdict.summary() == f"diverged: {point} (linear)"
    forward = found.forward
    assert forward is not None
    assert forward.broken is not None
    assert forward.damage is not None
    assert forward.broken.point.name == point
    assert [error.point.name for error in forward.errors if error.broken] == [point]
    assert forward.hybrids.agreed == f"layer {layer}"
    assert forward.damage.values == "they are the values of the token before (column c - 1)"
    for text in (
        f"Layer {layer} breaks first, in the batched prefill of 21 tokens: the op linear",
        "at columns 1 to 7 of every product of up to 8 columns",
        f"Fed the reference's values, {point} still adds ",
        "every other point adds less than its own limit.",
        f"Both hybrids name layer {layer}: ",
        "Checked and right: ",
    ):
        assert text in found.paragraph
    assert any(row.startswith("matvec_batched") for row in forward.kernels)
    assert {identity["row"] for identity in found.identities} == set(forward.kernels)


def test_a_kernel_that_breaks_every_layer_spans_them(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(
        "elementwise.hip",
        ("y[i] = numeric::silu(gate[i]) * up[i]", "y[i] = 1.5f * numeric::silu(gate[i]) * up[i]"),
    )(monkeypatch)
    found = _bisect(device, "qwen3")
    assert found.forward is not None
    hybrids = found.forward.hybrids
    assert hybrids.agreed is None
    assert hybrids.span == ("layer 0", "layer 3")
    assert found.paragraph.count("ffn_act-0") == 2
    assert "3 later points of the same run add more than theirs too (op activation)" in (
        found.paragraph
    )
    assert "The hybrids span layer 0 to layer 3: " in found.paragraph


def test_a_fault_of_decode_kernels_is_searched_token_by_token(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel("matvec.hip", (": sums[r][0];", ": sums[r][0] * 1.5f;"))(monkeypatch)
    found = _bisect(device, QWEN3)
    assert found.case.mode == "per-token"
    assert found.verdict.summary() == "diverged: Qcur-0 (linear), per-token prefill"
    assert found.forward is not None
    assert found.forward.damage is not None
    assert found.forward.damage.values == "got is want x 1.5"
    assert "Layer 0 breaks first, in the per-token prefill of 21 tokens" in found.paragraph


def test_a_fault_too_small_for_the_logits_is_named_all_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "= x[row + i] * scale * weight[i];"
    kernel("rms_norm.hip", (old, f"{old} y[row + i] *= 1.000002f;"))(monkeypatch)
    found = _bisect(device, QWEN3)
    assert found.exit_code == 1
    assert found.forward is not None
    assert not found.forward.logits_wrong
    assert "The hybrids name nothing: the damage moves the last token's logits by less" in (
        found.paragraph
    )


def test_a_fault_that_starts_after_the_prompt(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(prompt(tiny_model(LLAMA)))
    old = "values[first] = a * c - b * s;"
    kernel("rope.hip", (old, f"{old} if (position >= {length}) values[first] *= 1.01f;"))(
        monkeypatch
    )
    found = _bisect(device)
    assert len(found.case.tokens) == length + STEPS
    assert found.forward is not None
    assert found.forward.damage is not None
    assert "from token 21 to the last, 22" in found.forward.damage.tokens
    for text in (
        "in the replay of 21 prompt and 2 decoded tokens as one batched prefill (23 tokens): the ",
        "Checked and right: every op of the per-token prefill, every op of the batched prefill, ",
    ):
        assert text in found.paragraph
    assert found.forward.damage.values == "got is want x 1.01"


# --- behind the forward pass --------------------------------------------------------------------


def plant_stale_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argmax does not run in the batched flow; the copy to staging does."""
    argmax = ops.argmax

    def only_per_token(flow: ops.Flow, *arguments: Any) -> None:
        if not flow.batched:
            argmax(flow, *arguments)

    monkeypatch.setattr(ops, "argmax", only_per_token)


def test_a_stale_argmax_is_told_in_words(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_stale_argmax(monkeypatch)
    found = _bisect(device)
    assert (found.exit_code, found.kind) == (1, "tail")
    assert found.tail is not None
    tail = found.tail.tail
    assert tail.staged_stamp < tail.expected_stamp
    for text in (
        "The forward pass is right: the last token's logits of both prefills agree bit for bit",
        "In the batched prefill the first broken link is the device argmax.",
        f"its stamp is old, {tail.device_stamp}, expected {tail.expected_stamp}",
        "the staging stamp is old too",
        f"token {tail.staged_token} with stamp {tail.staged_stamp}, a stale argmax. {AGAIN}",
        "every op of the forward pass on the inputs that it read",
    ):
        assert text in found.paragraph


def test_a_copy_that_was_skipped(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_argmax(self: Any, flow: ops.Flow, logits: Any, count: int) -> None:
        ops.argmax(flow, logits, self._found, self._result, count)

    monkeypatch.setattr(sampler.SamplerTail, "queue", only_argmax)
    found = _bisect(device)
    assert "the first broken link is the staging copy." in found.paragraph
    assert "Staging still holds the poison -1 that was put there before the step" in found.paragraph


def test_staging_that_is_not_armed_and_not_written(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale staging as the field saw it: a token of an earlier step, with that step's stamp."""
    queue = sampler.SamplerTail.queue

    def never_batched(self: Any, flow: ops.Flow, logits: Any, count: int) -> None:
        if flow.batched:
            ops.argmax(flow, logits, self._found, self._result, count)
        else:
            queue(self, flow, logits, count)

    monkeypatch.setattr(sampler.SamplerTail, "queue", never_batched)
    monkeypatch.setattr(sampler.SamplerTail, "arm", lambda self: None)
    found = _bisect(device)
    assert found.tail is not None
    tail = found.tail.tail
    assert (
        f"The staging stamp is old: staging holds token {tail.staged_token} with stamp "
        f"{tail.staged_stamp}, expected stamp {tail.expected_stamp}"
    ) in found.paragraph
    assert "agree bit for bit" in found.paragraph
    assert "The device's argmax is right: token " in found.paragraph


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("b.index < a.index", "b.index > a.index"), "of a tie whose lowest index is "),
        (
            ("best.value == best.value ? best.index : NAN_TOKEN", "best.index"),
            "although a logit is NaN",
        ),
    ],
)
def test_an_argmax_that_only_chosen_logits_catch(
    device: Device, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], text: str
) -> None:
    kernel("argmax.hip", change)(monkeypatch)
    found = _bisect(device, QWEN3)
    assert found.kind == "tail"
    assert "In a row of chosen logits (" in found.paragraph
    assert text in found.paragraph


class _StillPerToken(Engine):
    """The switch says batched, the callers still run per-token."""

    def prefill_batched(self, *arguments: Any, **options: Any) -> Any:
        return self.prefill_per_token(*arguments, **options)


def test_batched_that_runs_per_token(device: Device) -> None:
    found = _bisect(device, engine=_StillPerToken)
    assert (found.exit_code, found.kind) == (3, "run")
    for text in (
        "The run proves nothing: both sides took the same route",
        "No kernel is to blame: look at what chooses the prefill mode",
        "the sampler tail of the prefills",
    ):
        assert text in found.paragraph
    assert "that both modes took routes of their own" not in found.paragraph


class _ForgetsTheLast(Engine):
    """The cache that is read back lacks what the last write wrote in layer 1."""

    def kv_contents(self, layer: int, sequence: int = 0) -> Any:
        keys, values = super().kv_contents(layer, sequence)
        if layer == 1 and len(keys):
            keys[-1] = 0
        return keys, values


def test_a_wrong_cache_behind_right_keys(device: Device) -> None:
    found = _bisect(device, engine=_ForgetsTheLast)
    assert found.exit_code == 1
    assert "What the sequence leaves behind is wrong: " in found.paragraph
    assert "K of layer 1" in found.paragraph
    assert "Every op up to the keys and values is right" in found.paragraph
    assert "is wrong: KV write: K of layer 1. Every op" in found.paragraph
    assert "Right: K of layer 0; V of layers 0, 1. Checked" in found.paragraph
    assert (
        "Of K in layer 1, against Kcur_pos-1: 64 of 1,344 elements have other bits: at token 20 "
        "only, the last, in every head; they are 0;"
    ) in found.paragraph


class _OldPosition(Engine):
    """Decoding replays its graph at the position before."""

    def _advance(self, tokens: Any, sequences: Any) -> Any:
        self._sequences.advance(0, -1)
        chosen = super()._advance(tokens, sequences)
        self._sequences.advance(0, 1)
        return chosen


def test_what_only_decoding_gets_wrong(device: Device) -> None:
    found = _bisect(device, engine=_OldPosition)
    assert found.exit_code == 1
    for text in (
        "the replay of 21 prompt and 2 decoded tokens as one batched prefill (23 tokens) is right: "
        "every op is within its own limit",
        "A run without a trace is right as well",
        "So it is decoding alone that is wrong: its graph is replayed once a token",
        "Logits after 2 decode steps differ from a prefill of the same tokens",
    ):
        assert text in found.paragraph


class _StepReturnsItsInput(Engine):
    def step(self, token: int, *, sequence: int = 0) -> int:
        super().step(token, sequence=sequence)
        return token


def test_a_wrong_entry_is_named_and_no_op_blamed(device: Device) -> None:
    found = _bisect(device, engine=_StepReturnsItsInput)
    assert (found.exit_code, found.forward) == (1, None)
    assert "What generation calls differs from what was judged: production step " in found.paragraph
    assert "look at the entry itself first" in found.paragraph


class _TracedIsBetter(Engine):
    """Untraced, the prompt is fed backwards."""

    def prefill_per_token(self, tokens: Any, *, trace: Any = None, **options: Any) -> Any:
        order = tokens if trace is not None else (*tokens[-2::-1], tokens[-1])
        return super().prefill_per_token(order, trace=trace, **options)


def test_a_run_that_is_right_only_with_a_trace(device: Device) -> None:
    found = _bisect(device, engine=_TracedIsBetter, modes=("per-token",))
    assert found.exit_code == 1
    assert "but untraced logits differ from the traced run's" in found.paragraph
    assert "it replays one captured graph" in found.paragraph


def test_bits_that_differ_within_limits_are_traced_to_where_they_part(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit in the last place in the batched product: every limit holds, equal bits do not."""
    kernel("matvec_batched.hip", ("= sums[r][c];", "= sums[r][c] * (1.0f + 1.2e-7f);"))(monkeypatch)
    found = _bisect(device, QWEN3)
    assert found.verdict.state is State.DIVERGED
    assert "The two prefill modes part at Qcur-0: " in found.paragraph
    assert "have other bits" in found.paragraph


def test_a_fault_that_does_not_come_again_is_said_to_be_so(device: Device) -> None:
    found_once: list[bool] = []

    class Once(Engine):
        """The first engine of the process loses its staging copy; a second one does not."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.broken = not found_once
            found_once.append(True)

        def prefill_batched(self, *arguments: Any, **options: Any) -> Any:
            result = super().prefill_batched(*arguments, **options)
            if not self.broken:
                return result
            return replace(result, tail=replace(result.tail, staged_token=-1))

    found = _bisect(device, engine=Once)
    assert found.exit_code == 1
    assert "it did not come again in a second run" in found.paragraph
