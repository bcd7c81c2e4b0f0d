"""What bisect says of planted faults, and of verdicts and damage that no engine is needed for."""

import json
from pathlib import Path

import numpy as np
import pytest

from suites import cli
from suites.harness import bisect_cache, bisect_forward, bisect_words
from suites.harness.bisect_cache import WrongCache
from suites.harness.bisect_forward import Told
from suites.harness.bisect_kernels import kernels_text, launched, readable
from suites.harness.damage import Damage, Layout, describe
from suites.harness.rerun import LaunchTrace
from suites.harness.verdict import Check, State, Verdict

BOTH = ("per-token", "batched")


@pytest.fixture(autouse=True)
def _switch_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_BATCHED_PREFILL", raising=False)


@pytest.mark.parametrize(
    ("model", "fault", "said", "unsaid"),
    [
        (
            "tiny-qwen3",
            "attention-scale-off",
            [
                "Layer 0 breaks first, in both prefill modes (what follows is of the batched "
                "prefill of 15 tokens): the op attention makes kqv_out-0, and its kernel attention "
                "(f16,f16, head size 64, 4 a KV head) does not give what it should from ",
                "above their limit: at all tokens but the first, in every head;",
                "1 later point of the same run adds more than its limit too (op attention).",
                "Checked and right: the KV write, ",
            ],
            ["every chunk", "kv_write f16", "every op of"],
        ),
        (
            "tiny-qwen3",
            "norm-last-element-lost",
            ["the op rms_norm makes ffn_norm-0, and its kernel add_rms_norm does not give"],
            [],
        ),
        (
            "tiny-qwen3",
            "position-not-reset",
            [
                "After a reset and 15 tokens the position must be 15",
                "It shows in an op as well.",
                "The position that it read is suspect, not rope (kernel rope (neox)).",
            ],
            ["its kernel rope"],
        ),
        (
            "oracle-qwen35",
            "state-not-reset",
            [
                "Only the first 3 tokens are damaged, which read the state of before token 0: that "
                "state is suspect (it must be zero after a reset), before the kernel is."
            ],
            [],
        ),
        (
            "tiny-qwen3",
            "decode-product-off",
            [
                "in the per-token prefill of 15 tokens: the op linear",
                "kernel matvec (Q4_K, path kparallel) does not give",
                "Checked and right: every op of the batched prefill, every op of the replay of the "
                "decoded tokens, the KV write",
            ],
            ["both prefill modes ("],
        ),
    ],
)
def test_what_is_said_of_a_planted_fault(
    tmp_path: Path, model: str, fault: str, said: list[str], unsaid: list[str]
) -> None:
    path = tmp_path / "j.json"
    options = ["--device", "cpu", "--plant", fault, "--json", str(path)]
    assert cli.main(["bisect", model, *options]) in (1, 3)
    paragraph = json.loads(path.read_text())["paragraph"]
    for text in said:
        assert text in paragraph
    for text in unsaid:
        assert text not in paragraph


def test_wrong_positions_of_one_mode_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    options = ["--device", "cpu", "--prefill", "batched", "--json", str(path)]
    assert cli.main(["bisect", "tiny-qwen3", "--plant", "position-not-reset", *options]) == 1
    paragraph = json.loads(path.read_text())["paragraph"]
    assert paragraph.startswith("After a reset and 15 tokens the position must be 15: ")
    assert "The position that it read is suspect, not rope" in paragraph


# --- kernels ------------------------------------------------------------------------------------


def test_registry_rows_as_people_read_them() -> None:
    text = "attention (f16,f16, head size 64, 4 a KV head)"
    assert readable("attention f16,f16@64x4 any") == text
    assert readable("delta_rule @128 any") == "delta_rule (state size 128)"
    assert readable("matvec Q4_K serial") == "matvec (Q4_K, path serial)"
    assert readable("argmax any") == "argmax"
    assert kernels_text([]) == ""
    assert kernels_text(["argmax any"]) == "kernel argmax"
    assert kernels_text(["a any", "rope neox any", "c any"]) == "kernels a, rope (neox) and c"


def test_kernels_of_a_point_are_those_of_its_op() -> None:
    trace = LaunchTrace()
    trace.launched = {
        "kqv_out-1": {("kv_write", "f16,f16", "any"): 1, ("attention", "f16,f16@64x4", "any"): 1},
        "ffn_inp-1": {("add_rms_norm", "", "any"): 1},
        "ffn_norm-1": {},
        "beta-2": {("delta_gates", "", "any"): 1},
        "inp_embd": {("argmax", "", "any"): 1, ("embed", "F16", "any"): 1},
    }
    assert launched(trace, "kqv_out-1") == ("attention f16,f16@64x4 any",)
    assert launched(trace, "ffn_norm-1") == ("add_rms_norm any",)
    assert launched(trace, "log_decay-2") == ("delta_gates any",)
    assert launched(trace, "inp_embd") == ("embed F16 any",)
    assert launched(trace, "ffn_out-1") == ()


# --- verdicts -----------------------------------------------------------------------------------


def _op(head: str, op: str, state: State = State.DIVERGED, point: str = "Qcur-0") -> Check:
    return Check(f"{head}: {op}", state, 1, link=f"{point} ({op})")


def test_both_modes_are_named_where_one_point_breaks_in_both() -> None:
    first = _op("local", "linear")

    def both(other: Check) -> bool:
        return bisect_words.both_modes(Verdict((first, other)), BOTH, first)

    assert both(_op("local, per-token", "linear"))
    assert not both(_op("local, per-token", "linear", State.OK))
    assert not both(_op("local, per-token", "linear", point="Qcur-1"))
    assert not both(_op("local, per-token", "rope"))
    assert not both(_op("local, decoded positions", "linear"))


def test_the_mode_whose_ops_are_right_is_listed() -> None:
    checks = (
        _op("local", "linear"),
        _op("local, per-token", "linear", State.OK),
        _op("local, per-token", "kv_write"),
    )
    assert bisect_words.ruled_out(Verdict(checks), BOTH) == (
        "Checked and right: every op of the per-token prefill."
    )
    more = Verdict((*checks, _op("local, per-token", "rope")))
    assert bisect_words.ruled_out(more, BOTH) == ""


def test_a_place_is_not_told_twice() -> None:
    link, place = "KV write: V of layer 0", "V of layer 0 [0,1] got 1 want 2"
    check = Check("local: kv_write", State.DIVERGED, 4, where=place, detail="1 bad", link=link)
    (first, _) = bisect_words.state(check)
    assert first == (
        "What the sequence leaves behind is wrong: KV write: V of layer 0; at [0,1] got 1 want 2; "
        "1 bad."
    )


def test_wrong_positions_are_read_from_checks_that_are_not_ok() -> None:
    name = "sampler tail: batched prefill"
    text = "the prefill of 15 tokens says that it fed 15 and is at position 69"
    assert bisect_words.wrong_positions(Verdict((Check(name, State.DIVERGED, 1, detail=text),)))
    assert not bisect_words.wrong_positions(Verdict((Check(name, State.OK, 1, detail=text),)))
    assert not bisect_words.wrong_positions(Verdict((Check(name, State.DIVERGED, 1),)))


# --- damage -------------------------------------------------------------------------------------


def _damage(tokens: slice, count: int = 12) -> Damage:
    want = np.ones((count, 4))
    got = want.astype(np.float32)
    got[tokens] = 3
    return describe(got, want, np.zeros_like(want), Layout(count, chunk=8, columns=8))


@pytest.mark.parametrize(
    ("op", "tokens", "suspect"),
    [
        ("convolution", slice(0, 3), True),
        ("convolution", slice(0, 4), False),
        ("convolution", slice(1, 4), False),
        ("convolution", slice(0, 12), False),
        ("delta_rule", slice(0, 5), True),
        ("delta_rule", slice(0, 9), False),
        ("delta_rule", slice(2, 5), False),
        ("rope", slice(0, 3), False),
    ],
)
def test_the_state_before_the_first_token(op: str, tokens: slice, suspect: bool) -> None:
    told = Told("batched prefill", taps=4, chunk=8)
    lines = bisect_forward.suspect_state(op, _damage(tokens), told)
    assert bool(lines) is suspect
    assert all("must be zero after a reset" in line for line in lines)


def test_which_caches_are_right_too() -> None:
    wrong, right = (("V", 0), ("K", 1), ("V", 1)), (("K", 0), ("K", 2), ("V", 2))
    lines = bisect_cache.sentences(WrongCache("V", 0, "Vcur-0", _damage(slice(0, 1)), wrong, right))
    assert lines[1:] == [
        "Wrong too: K of layer 1; V of layer 1.",
        "Right: K of layers 0 and 2; V of layer 2.",
    ]
    lines = bisect_cache.sentences(WrongCache("V", 0, "Vcur-0", _damage(slice(0, 1)), wrong[:1]))
    assert len(lines) == 1
