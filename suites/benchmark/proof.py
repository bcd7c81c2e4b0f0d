"""What must hold before a case is timed, and again after it.

The verdict is the harness's own: both prefill modes of one engine on one prompt, `kparallel`
bit-equal and `serial` bounded, sampler tails and planted faults included, and per-token logits
within the end-to-end limit of the NumPy reference. Here the routes are added: only kernels of the
named path may have run.
"""

from dataclasses import dataclass, replace

import numpy as np

from backend_hip import Engine
from backend_hip.results import PrefillPair, PrefillResult
from reference.model import Model
from suites.benchmark.cases import SpeedCase
from suites.harness.compare import compare, same_bits
from suites.harness.endtoend import Expected, References
from suites.harness.kernels import path_check
from suites.harness.pair import pair_limit, prefill_judge
from suites.harness.verdict import State, Verdict, check_of


@dataclass(frozen=True)
class Proof:
    """A case's verified result. `max_abs_diff` and `limit`: batched against per-token logits, or
    per-token against the reference.
    """

    result: PrefillResult
    max_abs_diff: float
    limit: float


def reference_of(model: Model, case: SpeedCase) -> Expected:
    """Last-token logits of the prompt by the NumPy reference, with their limit."""
    references = References(model, case.kv_type_k, case.kv_type_v, path=case.path)
    return references.feed(case.tokens(model.spec.vocab_size))


def prove(engine: Engine, case: SpeedCase, expected: Expected | None) -> Proof:
    """Runs both modes on the engine and judges the case. AssertionError where it is not right.

    `expected` None: a model that is too large for the reference. Then only bit-equality with
    per-token prefill is judged, so the path must be one that promises it.
    """
    assert expected is not None or case.path == "kparallel", f"{case.id} needs the reference"
    tokens = case.tokens(engine.model.spec.vocab_size)
    per_token = run(engine, "per-token", tokens)
    assert np.isfinite(per_token.logits).all(), f"{case.id}: per-token logits are not finite"
    end_to_end = 0.0 if expected is None else float(expected.limits[-1])
    one_column = 0.0 if expected is None else float(expected.one_column_limits[-1])
    from_reference = 0.0
    if expected is not None:
        found = compare(per_token.logits[-1:], expected.logits[-1:], one_column)
        _require(Verdict((check_of("per-token logits against the reference", found),)))
        assert found.max_abs_diff is not None
        from_reference = found.max_abs_diff
    require_route(per_token, "per-token", "kparallel", engine.model.spec.layer_count)
    if case.prefill == "per-token":
        return Proof(per_token, from_reference, one_column)
    keys = _kv_bytes(engine)
    batched = run(engine, "batched", tokens)
    pair = PrefillPair(per_token, batched, keys == _kv_bytes(engine))
    _require(prefill_judge(pair, end_to_end))
    require_route(batched, "batched", case.path, engine.model.spec.layer_count)
    limit = pair_limit(case.path, end_to_end)
    assert limit > 0 or pair.kv_bits_equal, f"{case.id}: KV contents of the two modes differ"
    difference = compare(batched.logits[-1:], per_token.logits[-1:], limit).max_abs_diff
    assert difference is not None
    return Proof(batched, difference, limit)


def run(engine: Engine, prefill: str, tokens: tuple[int, ...]) -> PrefillResult:
    """One prefill from an empty cache."""
    engine.reset()
    if prefill == "batched":
        return engine.prefill_batched(tokens)
    return engine.prefill_per_token(tokens)


def require_route(result: PrefillResult, mode: str, path: str, layers: int) -> None:
    """Every matrix product that ran is of this mode and path, in every layer."""
    assert result.mode == mode, f"{mode} {path} ran as {result.mode} prefill"
    check = path_check(f"{mode} {path}", replace(result, path=path))
    assert check.state is State.OK, f"{check.name} {check.detail}"
    flows = result.chunks if result.mode == "batched" else result.n_tokens
    assert check.elements >= flows * layers, (
        f"{check.name} launched {check.elements} products, expected at least {flows * layers} "
        f"because {flows} flows pass {layers} layers"
    )


def require_same(proof: Proof, timed: PrefillResult, case: SpeedCase) -> None:
    """A timed round gave what was verified, by the same route."""
    assert same_bits(timed.logits, proof.result.logits), f"{case.id}: a timed round differs"
    assert timed.tail.staged_token == proof.result.tail.staged_token, f"{case.id}: token differs"
    assert timed.tail.staged_stamp == timed.tail.expected_stamp, f"{case.id}: staging is stale"
    assert timed.logits_poisoned == 0, f"{case.id}: logits were left unwritten"
    assert dict(timed.routes) == dict(proof.result.routes), f"{case.id}: another route was timed"
    assert np.isfinite(timed.logits).all(), f"{case.id}: a timed round is not finite"


def _kv_bytes(engine: Engine) -> list[bytes]:
    layers = range(engine.model.spec.layer_count)
    return [part.tobytes() for layer in layers for part in engine.kv_contents(layer)]


def _require(verdict: Verdict) -> None:
    assert verdict.state is State.OK, verdict.summary()
