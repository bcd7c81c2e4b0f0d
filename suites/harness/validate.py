"""Runs everything that a verdict needs for one model and one prompt, in the order of the data flow.

    support -> trace point by point -> what the sequence left behind -> last-token logits ->
    routing -> batched against per-token -> eager against graph -> sampler tail of each prefill ->
    sampler tail and logits of each decode step -> faults planted in copies of this run's own data

A device error on the way is raised, not judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from reference.forward import DenseCache
from reference.model import Model, check_tokens
from reference.model.errors import InputError, Unsupported
from reference.model.trace import Trace
from suites.harness import pair as pairs
from suites.harness import recurrent, steps
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.compare import compare, compare_logits
from suites.harness.endtoend import DistanceTrace, Expected, References
from suites.harness.left_behind import LeftBehind
from suites.harness.local import LocalRules, first_broken, judge_trace, summarise
from suites.harness.protocol import PREFILL_MODES, JudgedEngine, Prefilled, Progress
from suites.harness.routing import Choices, RoutingTrace, choices_of
from suites.harness.selftest import planted_faults
from suites.harness.tail import broken_prefill, tail_check
from suites.harness.verdict import Check, State, Verdict, check_of, json_number

PROMPT_BEFORE = 8
"""Tokens of another prompt that a model with recurrent states sees before the traced run."""


@dataclass(frozen=True)
class Options:
    """What the engine was built with and what to run. `n_decode` steps follow the prompt."""

    modes: tuple[str, ...] = PREFILL_MODES
    n_decode: int = 16
    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in PREFILL_MODES]
        if unknown or not self.modes or len(set(self.modes)) != len(self.modes):
            raise InputError(
                f"validate: prefill is {','.join(self.modes) or 'empty'}, expected one or both of "
                f"{','.join(PREFILL_MODES)}"
            )
        if self.n_decode < 0:
            raise InputError(f"validate: decode steps are {self.n_decode}, expected 0 or more")


def validate(
    model: Model,
    open_engine: Callable[[], JudgedEngine],
    tokens: Sequence[int],
    options: Options | None = None,
    *,
    context_length: int | None = None,
    dense: DenseCache | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judges a fresh engine of `open_engine` on a prompt of token ids; closes the engine.

    Raises InputError for bad tokens before anything runs. Unsupported from `open_engine` becomes
    the state unsupported. `dense` shares dequantised weights with other References.
    """
    options = options or Options()
    room = (context_length or model.spec.context_length) - options.n_decode
    check_tokens(list(tokens), model.spec, max(room, 0))
    say = progress or (lambda text: None)
    try:
        engine = open_engine()
    except Unsupported as error:
        check = Check("support", State.UNSUPPORTED, 0, detail=str(error), link=str(error))
        return Verdict((check,), run={"tokens": list(tokens)})
    try:
        return _Run(model, engine, tuple(tokens), options, dense, say).verdict()
    finally:
        engine.close()


@dataclass(frozen=True)
class _Pair:
    """Both prefills of the run. KV contents are compared array by array beside it."""

    per_token: Prefilled
    batched: Prefilled
    kv_bits_equal: bool = True


class _Run:
    def __init__(
        self,
        model: Model,
        engine: JudgedEngine,
        tokens: tuple[int, ...],
        options: Options,
        dense: DenseCache | None,
        say: Progress,
    ) -> None:
        self._model = model
        self._engine = engine
        self._tokens = tokens
        self._options = options
        self._say = say
        self._replayed_choices: Choices = {}
        self._references = References(model, options.kv_type_k, options.kv_type_v, dense=dense)
        self._checks: list[Check] = []
        self._notes: list[str] = []
        self._run: dict[str, Any] = {"tokens": list(tokens), **asdict(options)}

    def verdict(self) -> Verdict:
        traced = self._trace(self._options.modes[-1])
        results, snapshots = {}, {}
        for mode in self._options.modes:
            results[mode] = self._prefill(mode)
            snapshots[mode] = LeftBehind.of(self._engine, self._model.spec)
        decoded = steps.decode(
            self._engine,
            results[self._options.modes[-1]],
            self._options.n_decode,
            self._model.spec.vocab_size,
            self._say,
        )
        replayed = self._replay(decoded)
        expected = self._reference_of_prompt()
        limit = float(expected.limits[-1])
        for result in results.values():
            self._logits(result, expected)
        first = len(self._checks)
        exact = self._pair(results, snapshots, limit) if len(results) == 2 else ""
        self._eager(traced, results[traced.mode])
        for mode, result in results.items():
            name = f"sampler tail: {mode} prefill"
            self._checks.append(
                tail_check(name, [broken_prefill(result, self._tokens[-1])], exact_logits=exact)
            )
        if len(results) == 2:
            pair = _Pair(results["per-token"], results["batched"])
            judged = Verdict(tuple(self._checks[first:]))
            self._run["validate_line"] = pairs.validate_line(pair, judged, limit)
        self._decode(decoded)
        self._routing()
        self._checks += replayed
        proofs = pairs.proofs if len(results) == 2 else None
        per_token, batched = results.get("per-token"), results.get("batched")
        self._say("planting faults in copies")
        self._checks.append(planted_faults(per_token, batched, limit, proofs))
        return Verdict(tuple(self._checks), run=self._run, notes=tuple(self._notes))

    def _prefill(
        self, mode: str, trace: Trace | None = None, tokens: tuple[int, ...] = ()
    ) -> Prefilled:
        self._say(f"engine {mode} prefill" + (" with every trace point" if trace else ""))
        self._engine.reset()
        if mode == "batched":
            return self._engine.prefill_batched(tokens or self._tokens, trace=trace)
        return self._engine.prefill_per_token(tokens or self._tokens, trace=trace)

    def _replay(self, decoded: steps.Decoded) -> list[Check]:
        """Decoding must leave what a prefill of the same tokens leaves: logits and KV, bit for bit.

        A promise of exact paths only. The prompt's last prefill mode is the one that replays.
        """
        if not decoded.steps or not pairs.is_exact(self._options.path):
            return []
        held, mode = LeftBehind.of(self._engine, self._model.spec), self._options.modes[-1]
        # Which experts the decoded tokens went to shows only here: decoding is not traced.
        routed = any(layer.experts is not None for layer in self._model.spec.layers)
        trace = RoutingTrace() if routed else None
        result = self._prefill(mode, trace, (*self._tokens, *decoded.fed))
        if trace is not None:
            self._replayed_choices = choices_of(trace, self._model.spec)
        name = f"decode equals {mode} prefill of the same tokens"
        link = (
            f"logits after {len(decoded.fed)} decode steps differ from a prefill of the same tokens"
        )
        last = np.asarray(decoded.steps[-1].tail.logits)
        logits = self._same_bits(name, last, np.asarray(result.logits)[-1], link)
        again = LeftBehind.of(self._engine, self._model.spec)
        length = len(self._tokens) + len(decoded.fed)
        where = "{} after decoding against a prefill"
        return [logits, *held.checks_against(again, length, name, where)]

    def _same_bits(self, name: str, got: Any, want: Any, link: str) -> Check:
        """Equal bits; NaN on both sides counts as diverged where something broke before."""
        comparison = compare(got, want, 0.0)
        check = check_of(name, comparison, link=link)
        if check.state is State.OK and not comparison.bit_equal:
            return replace(check, state=State.DIVERGED, detail="equal numbers, other bits")
        if check.state is State.INVALID and comparison.nan_got and self._broken():
            detail = f"not finite since {self._broken()}"
            return replace(check, state=State.DIVERGED, detail=detail)
        return check

    def _broken(self) -> str:
        """What an earlier check found to be broken; empty where nothing was."""
        return next((c.link for c in self._checks if c.state is State.DIVERGED), "")

    def _trace(self, mode: str) -> Prefilled:
        """Runs eagerly with every point recorded and judges each point alone.

        Another prompt goes before it where layers keep a state: what it leaves must not show.
        """
        spec = self._model.spec
        if recurrent.recurrent_layers(spec):
            self._prefill(mode, tokens=self._tokens[::-1][:PROMPT_BEFORE])
        self._recorded = Trace(meta={"mode": mode})
        result = self._prefill(mode, self._recorded)
        recorded = self._recorded
        if recorded.tokens != self._tokens:
            if recorded.tokens:
                self._checks.append(
                    Check("trace: tokens", State.INVALID, 0, detail="not the prompt's tokens")
                )
            recorded.tokens = self._tokens
        rules = LocalRules(self._options.path, self._options.kv_type_k, self._options.kv_type_v)
        states: dict[int, DeltaRule] = {}
        points = list(
            judge_trace(self._model, recorded, rules, recurrent=states, progress=self._say)
        )
        self._checks += summarise(points)
        self._notes += [f"{point.point.name}: {point.note}" for point in points if point.note]
        broken = first_broken(points)
        since = None if broken is None else broken.point.name
        stored = (self._options.kv_type_k, self._options.kv_type_v)
        held = LeftBehind.of(self._engine, spec)
        self._checks += held.checks_of(recorded, stored, states, spec, since or "")
        self._notes += held.notes()
        self._references.choices.update(choices_of(recorded, spec))
        self._run["first_broken_point"] = since
        self._run["traced_mode"] = mode
        return result

    def _reference_of_prompt(self) -> Expected:
        distances = DistanceTrace(self._recorded)
        expected = self._references.feed(self._tokens, trace=distances, progress=self._say)
        self._run["trace_distance"] = [
            {
                "point": entry.point,
                "max_abs_diff": json_number(entry.max_abs_diff),
                "reference_max": json_number(entry.reference_max),
            }
            for entry in distances.distances
        ]
        del self._recorded
        return expected

    def _logits(self, result: Prefilled, expected: Expected) -> None:
        limit = float(expected.limits[-1])
        got, want = np.asarray(result.logits)[-1], expected.logits[-1]
        found = compare_logits(got, want, limit)
        detail = (
            f"float32 reference is off by {float(expected.float32_distance[-1]):.3g}; "
            f"KL {found.kl_divergence:.3g}, top-1 {found.top1_got}/{found.top1_want}, "
            f"top-{found.top_k} overlap {found.top_k_overlap}, margin {found.margin:.4g}"
        )
        if found.near_tie:
            detail += ", near-tie"
        check = check_of(
            f"logits: {result.mode} prefill against reference",
            found.comparison,
            detail=detail,
            link=f"last-token logits of the {result.mode} prefill against the reference",
        )
        self._checks.append(check)

    def _pair(
        self,
        results: dict[str, Prefilled],
        snapshots: dict[str, LeftBehind],
        end_to_end: float,
    ) -> str:
        per_token, batched = results["per-token"], results["batched"]
        limit = pairs.pair_limit(self._options.path, end_to_end)
        self._checks += pairs.proofs(per_token, batched, self._broken())
        self._checks.append(
            pairs.logits_check(per_token, batched, limit, broken_since=self._broken())
        )
        if pairs.is_exact(self._options.path):
            self._checks += snapshots["batched"].checks_against(
                snapshots["per-token"],
                len(self._tokens),
                "prefill pair",
                "batched against per-token {}",
            )
        else:
            self._notes.append(
                f"path {self._options.path} bounds logits between prefill modes; KV contents are "
                "judged against the traced mode only"
            )
        return pairs.exact_logits_text(pairs.compare_last(per_token, batched, limit))

    def _eager(self, traced: Prefilled, untraced: Prefilled) -> None:
        """Tracing must not change what is computed."""
        name = "eager with trace equals untraced"
        link = "untraced logits differ from the traced run's"
        got, want = np.asarray(untraced.logits), np.asarray(traced.logits)
        self._checks.append(self._same_bits(name, got, want, link))

    def _routing(self) -> None:
        """Of the prompt, and of the decoded tokens where the replay recorded them."""
        if not any(layer.experts is not None for layer in self._model.spec.layers):
            return
        judge = self._references.routing
        self._checks.append(judge.check())
        self._notes += [f"near-tie in routing: {turn}" for turn in judge.near_ties]
        if self._options.n_decode and not self._replayed_choices:
            self._notes.append(
                "where decoded tokens were routed was not recorded: a near-tie there can move the "
                "logits of a right engine"
            )

    def _decode(self, decoded: steps.Decoded) -> None:
        self._run["generated"] = list(decoded.generated)
        if decoded.stopped:
            self._notes.append(decoded.stopped)
        if not self._options.n_decode:
            self._notes.append("no decode steps were asked for: decoding was not judged")
            return
        self._checks.append(tail_check("sampler tail: decode", decoded.tails))
        if not decoded.fed:
            return
        self._references.choices.update(self._replayed_choices)
        expected = self._references.feed(decoded.fed, all_rows=True, progress=self._say)
        check, notes = steps.continuation(decoded, expected)
        self._checks.append(check)
        self._notes += notes
