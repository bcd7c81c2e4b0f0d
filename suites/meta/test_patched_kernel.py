"""The self-test of validate: what it accepts as proof, and each way in which it must refuse."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backend_hip.device import open_device
from backend_hip.packed import product_key
from backend_hip.registry import PATHS, REGISTRY, Key
from fixtures.faults import Change
from reference.model import Model
from suites.harness import local
from suites.harness.compare import compare
from suites.harness.fake_engine import CLEAN, FakeEngine, Fault
from suites.harness.kernels import path_of
from suites.harness.local import LocalRules
from suites.harness.patched import ROOT, patched_engine
from suites.harness.patched_kernel import NAME, PATCHES, self_test, with_self_test
from suites.harness.protocol import PREFILL_MODES
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State
from suites.meta import broken
from suites.meta.models import LLAMA, prompt, tiny_model

PRODUCT: Key = ("matvec_batched", "F32", "kparallel")
NORM: Key = ("rms_norm", "", "any")
LOST_COLUMNS = Fault(broken.lost_tail(2))


@dataclass
class _Kernels:
    code_hashes: dict[Key, str]
    routes: dict[Key, int] = field(default_factory=lambda: {PRODUCT: 3, NORM: 2})


class _Copy(FakeEngine):
    def __init__(self, model: Model, fault: Fault, code_hashes: dict[Key, str]) -> None:
        super().__init__(model, fault)
        self.kernels = _Kernels(code_hashes)


def _copies(
    model: Model, changed: Fault = LOST_COLUMNS, sound: Fault = CLEAN, code: str = "changed"
) -> Callable[[Sequence[Change]], Any]:
    """`changed` is what a copy with a patch does, `code` the hash of its product."""

    @contextmanager
    def open_copy(changes: Sequence[Change]) -> Iterator[_Copy]:
        hashes = {PRODUCT: code if changes else "as it is", NORM: "as it is"}
        yield _Copy(model, changed if changes else sound, hashes)

    return open_copy


def _check(open_copy: Any, patches: Any = PATCHES) -> Check:
    model = tiny_model(LLAMA)
    return self_test(
        model, open_copy, prompt(model, 4), "batched", LocalRules(), lambda text: None, patches
    )


def test_a_patch_that_is_seen_at_its_op_proves_the_judge() -> None:
    check = _check(_copies(tiny_model(LLAMA)))
    assert (check.name, check.state, check.unit) == (NAME, State.OK, "faults")
    assert "found at Qcur-0 (linear), 1 code objects differ" in check.detail


REFUSED: dict[str, tuple[Any, str]] = {
    "not-seen": ({"changed": CLEAN}, "the judge did not see that accumulators"),
    "same-code": ({"code": "as it is"}, "did not change the code of matvec_batched F32 kparallel"),
    "another-op": ({"changed": Fault(broken.ROPE_POSITION)}, "the judge called Qcur_pos-0 (rope)"),
    "sound-copy-broken": ({"sound": LOST_COLUMNS}, "a copy without a patch is not ok either"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_proves_nothing_is_invalid(case: str) -> None:
    changes, words = REFUSED[case]
    check = _check(_copies(tiny_model(LLAMA), **changes))
    assert check.state is State.INVALID
    assert check.link.startswith("self-test: ")
    assert words in check.link


@pytest.mark.parametrize("text", ["no such text", "float"], ids=["nowhere", "many-times"])
def test_a_patch_must_match_exactly_once(text: str) -> None:
    (patch,) = [patch for patch in PATCHES if patch.id == "accumulator"]
    patch = replace(patch, change=replace(patch.change, old=text))
    check = _check(_copies(tiny_model(LLAMA)), [patch])
    assert check.state is State.INVALID
    assert "times in backend_hip/kernels/dot.h, expected once" in check.link


def test_a_patch_of_a_kernel_that_did_not_run_is_not_taken() -> None:
    (serial,) = [patch for patch in PATCHES if patch.id == "serial-accumulator"]
    check = _check(_copies(tiny_model(LLAMA)), [serial])
    assert check.link == "self-test: no kernel that ran has a patch in the list"
    assert check.state is State.INVALID


def test_a_blind_judge_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "compare", lambda got, want, limit: compare(want, want, limit))
    check = _check(_copies(tiny_model(LLAMA)))
    assert check.state is State.INVALID
    assert "the judge did not see" in check.link


def test_a_run_that_is_not_ok_is_not_patched() -> None:
    model = tiny_model(LLAMA)
    verdict = validate(
        model, lambda: FakeEngine(model, LOST_COLUMNS), prompt(model), Options(n_decode=0)
    )

    def never(changes: Sequence[Change]) -> Any:
        raise AssertionError("a copy was opened")

    after = with_self_test(
        verdict, model, never, prompt(model), "batched", LocalRules(), lambda text: None
    )
    assert after.checks == verdict.checks
    assert "not ok as it is" in after.notes[-1]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_every_patch_fits_the_sources(patch: Any) -> None:
    patch.change.apply((ROOT / patch.change.file).read_text())
    assert set(patch.kernels) <= {row.file for row in REGISTRY}


_PATCH_OF = {"serial": "serial-accumulator", "matrix": "packed-result"}
_ON_PATH = {"serial-accumulator": "serial", "packed-result": "matrix", "matrix-result": "matrix"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", PREFILL_MODES)
def test_the_kernels_of_the_path_are_what_is_patched(path: str, mode: str) -> None:
    op = "matvec_batched" if mode == "batched" else "matvec"
    of_mode, form = path_of(mode, path), "Q4_K"
    key = product_key([form]) if of_mode == "matrix" else (op, form, of_mode)
    file = REGISTRY.find(*key).file
    first = next(patch for patch in PATCHES if file in patch.kernels)
    assert first.id == _PATCH_OF.get(of_mode, "accumulator")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_judge_sees_every_patch_in_the_real_engine(patch: Any) -> None:
    model = tiny_model(LLAMA)
    path = _ON_PATH.get(patch.id, "kparallel")

    @contextmanager
    def open_copy(changes: Sequence[Change]) -> Iterator[Any]:
        open_device("cpu")
        with (
            patched_engine(changes) as copied,
            copied.open_device("cpu") as device,
            copied.engine(model, device, path=path, context_length=16) as engine,
        ):
            yield engine

    rules = LocalRules(path)
    check = self_test(
        model, open_copy, prompt(model, 3), "batched", rules, lambda text: None, [patch]
    )
    assert (check.state, check.link) == (State.OK, NAME)
