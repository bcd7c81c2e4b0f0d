"""Runs everything that a verdict needs for one model and one prompt, in the order of the data flow.

    support -> trace point by point and what the sequence left behind, of each prefill mode ->
    eager against graph -> last-token logits -> batched against per-token -> kernels that ran ->
    sampler tail of each prefill -> sampler tail and logits of each decode step -> routing ->
    few columns on path matrix -> what production calls, and a second turn -> common steps ->
    faults planted in copies of this run's own data -> a kernel patched in a copy of the engine

A device error on the way is raised, not judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from reference.forward import DenseCache
from reference.model import Model, check_tokens
from reference.model.errors import Unsupported
from reference.model.trace import Trace
from suites.harness import pair as pairs
from suites.harness import protocol, steps
from suites.harness.batch_decode import batch_decode
from suites.harness.compare import compare_logits
from suites.harness.endtoend import DistanceTrace, Expected, References, apart
from suites.harness.entry_points import Judged, entry_points
from suites.harness.generations import Generations
from suites.harness.kernels import kernel_checks
from suites.harness.left_behind import LeftBehind
from suites.harness.local import LocalRules
from suites.harness.narrow_flow import narrow_flow, prompt_of
from suites.harness.patched_kernel import OpenCopy, with_self_test
from suites.harness.plants import bits_plants, decode_plants
from suites.harness.protocol import JudgedEngine, Prefilled, Progress
from suites.harness.rerun import other_prompt
from suites.harness.routing import Choices, choices_of
from suites.harness.run_options import Asked
from suites.harness.run_options import Options as Options
from suites.harness.selftest import Plant, planted_faults
from suites.harness.tail import broken_prefill, tail_check
from suites.harness.tail_probe import noise, probe_check, told_apart
from suites.harness.traced import PER_TOKEN_TRACED, TracedRun, judge_again, judge_run
from suites.harness.verdict import Check, State, Verdict, behind, check_of


def validate(
    model: Model,
    open_engine: Callable[[], JudgedEngine],
    tokens: Sequence[int],
    options: Options | None = None,
    *,
    context_length: int | None = None,
    dense: DenseCache | None = None,
    progress: Progress | None = None,
    open_copy: OpenCopy | None = None,
) -> Verdict:
    """Judges a fresh engine of `open_engine` on a prompt of token ids; closes the engine.

    Raises InputError for bad tokens before anything runs. Unsupported from `open_engine` becomes
    the state unsupported. `dense` shares dequantised weights with other References. With
    `open_copy` a kernel is patched in a copy of the engine afterwards, and must be seen.
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
        positions = context_length or model.spec.context_length
        verdict = _Run(model, engine, tuple(tokens), options, positions, dense, say).verdict()
    finally:
        engine.close()
    if open_copy is None:
        return verdict
    declared = LocalRules(options.path, options.kv_type_k, options.kv_type_v)
    return with_self_test(verdict, model, open_copy, tokens, options.modes[-1], declared, say)


class _Run:
    def __init__(
        self,
        model: Model,
        engine: JudgedEngine,
        tokens: tuple[int, ...],
        options: Options,
        room: int,
        dense: DenseCache | None,
        say: Progress,
    ) -> None:
        self._model = model
        self._room = room
        self._engine = engine
        self._tokens = tokens
        self._options = options
        self._say = say
        self._replayed_choices: Choices = {}
        self._references = References(
            model, options.kv_type_k, options.kv_type_v, path=options.path, dense=dense
        )
        self._generations = Generations()
        self._replayed: Prefilled | None = None
        self._checks: list[Check] = []
        self._plants: list[Plant] = []
        self._notes: list[str] = []
        self._run: dict[str, Any] = {"tokens": list(tokens), **asdict(options)}
        self._run["sequences"] = len(engine.positions)

    def verdict(self) -> Verdict:
        traced = [self._trace(self._options.modes[-1])]
        if len(self._options.modes) == 2:
            traced.append(self._trace(self._options.modes[0], traced[0]))
        self._run["traced"] = {run.mode: len(run.recorded.tokens) for run in traced}
        results, snapshots = {}, {}
        for mode in self._options.modes:
            self._other_prompt(mode)
            results[mode] = self._prefill(mode)
            snapshots[mode] = LeftBehind.of(self._engine, self._model.spec)
        decoded = steps.decode(
            self._engine,
            results[self._options.modes[-1]],
            self._options.n_decode,
            self._model.spec.vocab_size,
            self._say,
        )
        for index, step in enumerate(decoded.steps):
            self._generations.add(f"decode step {index}", step.tail)
        local, replayed = self._replay(decoded)
        expected = self._reference_of_prompt(traced[0].recorded)
        of_modes = self._references.of_modes(expected, {r.mode: r.recorded for r in traced})
        logits = [self._logits(result, of_modes[mode]) for mode, result in results.items()]
        limit = float(expected.limits[-1]) + apart([e.logits[-1] for e in of_modes.values()]) / 2
        broken = next((check.link for check in logits if check.state is not State.OK), "")
        eager = self._eager(traced, results, snapshots, self._broken() or broken)
        # A traced run that holds no NaN clears everything up to what tracing and replay differ in.
        finite = all(np.isfinite(run.result.logits).all() for run in traced)
        self._checks += [*eager, *logits] if finite else [*logits, *eager]
        self._checks.append(told_apart(expected.logits[-1]))
        first = len(self._checks)
        parted = traced[-1].parted_at
        exact = self._pair(results, snapshots, limit, parted) if len(results) == 2 else ""
        if len(results) == 1:
            (alone,) = results.values()
            self._checks.append(pairs.poison_check(alone, self._broken()))
        ran, since = self._kernels(traced, results, decoded), self._broken()
        self._checks += [behind(check, since) for check in ran]
        for mode, result in results.items():
            name = f"sampler tail: {mode} prefill"
            self._checks.append(
                tail_check(name, [broken_prefill(result, self._tokens)], exact_logits=exact)
            )
        if len(results) == 2:
            pair = pairs.PairOfRun(results["per-token"], results["batched"])
            judged = Verdict(tuple(self._checks[first:]))
            self._run["validate_line"] = pairs.validate_line(pair, judged, limit)
        self._checks += local
        self._decode(decoded)
        self._routing()
        self._checks += replayed
        asked = Asked(self._model, self._tokens, self._options, self._room)
        if self._options.path == "matrix":
            self._run["narrow_flow"] = list(prompt_of(asked))
        rest = (self._generations, self._broken(), self._say)
        self._add(narrow_flow(self._engine, asked, traced, *rest))
        self._entry_points(results, decoded, limit)
        rest = (self._generations, self._broken(), self._say)
        self._add(batch_decode(self._engine, asked, *rest))
        self._say("chosen logits through the sampler tail")
        probes = probe_check(self._engine, self._model.spec.vocab_size, self._generations)
        self._checks += [probes, self._generations.check()]
        proofs = pairs.proofs if len(results) == 2 else None
        per_token, batched = results.get("per-token"), results.get("batched")
        self._say("planting faults in copies")
        self._run["planted"] = [str(plant) for plant in self._plants]
        self._checks.append(planted_faults(per_token, batched, limit, proofs, self._plants))
        return Verdict(tuple(self._checks), run=self._run, notes=tuple(self._notes))

    def _prefill(
        self, mode: str, trace: Trace | None = None, tokens: tuple[int, ...] = ()
    ) -> Prefilled:
        self._say(f"engine {mode} prefill" + (" with every trace point" if trace else ""))
        self._engine.reset()
        result = protocol.prefill_of(self._engine, mode)(tokens or self._tokens, trace=trace)
        self._generations.add(f"{mode} prefill", result.tail, np.asarray(result.logits))
        return result

    def _other_prompt(self, mode: str) -> None:
        vocabulary = self._model.spec.vocab_size
        self._prefill(mode, tokens=other_prompt(self._tokens, vocabulary))
        # Where the logits are no longer written, these are read, and no run's before.
        (tail,) = self._engine.run_tail(noise(vocabulary)[None])
        self._generations.add("chosen logits", tail)

    def _replay(self, decoded: steps.Decoded) -> tuple[list[Check], list[Check]]:
        """Decoding must leave what a prefill of the same tokens leaves: logits and KV, bit for bit.

        A promise of exact paths only. The prompt's last prefill mode is the one that replays, and
        is traced: the first list judges its points alone, the second holds decoding to it.
        """
        if not decoded.steps or not pairs.is_exact(self._options.path):
            return [], []
        held, mode = LeftBehind.of(self._engine, self._model.spec), self._options.modes[-1]
        # What each operation made of the decoded positions, and which experts their tokens went to,
        # shows only here: decoding is not traced.
        trace = Trace(meta={"mode": mode})
        result = self._replayed = self._prefill(mode, trace, (*self._tokens, *decoded.fed))
        if any(layer.experts is not None for layer in self._model.spec.layers):
            self._replayed_choices = choices_of(trace, self._model.spec)
        options = self._options
        declared = LocalRules(options.path, options.kv_type_k, options.kv_type_v)
        known = ("decoded positions", "replay of the decoded tokens")
        local = judge_again(self._model, trace, declared, *known, self._say)
        name = f"decode equals {mode} prefill of the same tokens"
        link = (
            f"logits after {len(decoded.fed)} decode steps differ from a prefill of the same tokens"
        )
        last = np.asarray(decoded.steps[-1].tail.logits)
        again_logits = np.asarray(result.logits)[-1]
        logits = pairs.bits_check(name, last, again_logits, link, self._broken())
        self._plants += bits_plants(name, last, logits)
        again = LeftBehind.of(self._engine, self._model.spec)
        length = len(self._tokens) + len(decoded.fed)
        where = "{} after decoding against a prefill"
        return local, [logits, *held.checks_against(again, length, name, where)]

    def _broken(self) -> str:
        """What an earlier check found to be broken; empty where nothing was."""
        return next((c.link for c in self._checks if c.state is State.DIVERGED), "")

    def _trace(self, mode: str, first: TracedRun | None = None) -> TracedRun:
        """Runs eagerly with every point recorded and judges each point alone.

        With a run traced already, only the prompt's start is traced token by token.
        """
        spec, options = self._model.spec, self._options
        self._other_prompt(mode)
        tokens = self._tokens if first is None else self._tokens[:PER_TOKEN_TRACED]
        recorded = Trace(meta={"mode": mode})
        result = self._prefill(mode, recorded, tokens)
        if recorded.tokens != tokens:
            if recorded.tokens:
                detail = "not the prompt's tokens"
                self._checks.append(Check("trace: tokens", State.INVALID, 0, detail=detail))
            recorded.tokens = tokens
        declared = LocalRules(options.path, options.kv_type_k, options.kv_type_v)
        held = LeftBehind.of(self._engine, spec)
        run = judge_run(self._model, result, recorded, held, declared, first, self._say)
        self._checks += run.checks
        self._plants += run.plants
        self._notes += [note for note in run.notes if note not in self._notes]
        if not run.whole:
            self._notes.append(
                f"{mode}: the first {len(tokens)} of {len(self._tokens)} tokens were traced"
            )
        if first is None:
            self._notes += held.notes()
            self._references.choices.update(choices_of(recorded, spec))
            self._run["first_broken_point"] = run.broken_point
            self._run["traced_mode"] = mode
        elif self._run["first_broken_point"] is None and run.broken_point is not None:
            self._run["first_broken_point"] = f"{run.broken_point}, {mode}"
        return run

    def _reference_of_prompt(self, recorded: Trace) -> Expected:
        distances = DistanceTrace(recorded)
        expected = self._references.feed(self._tokens, trace=distances, progress=self._say)
        self._run["trace_distance"] = distances.to_json()
        return expected

    def _logits(self, result: Prefilled, expected: Expected) -> Check:
        limit = float(expected.limits_of(result.mode)[-1])
        got, want = np.asarray(result.logits)[-1], expected.logits[-1]
        found = compare_logits(got, want, limit)
        detail = (
            f"float32 reference is off by {float(expected.float32_distance[-1]):.3g}; "
            f"KL {found.kl_divergence:.3g}, top-1 {found.top1_got}/{found.top1_want}, "
            f"top-{found.top_k} overlap {found.top_k_overlap}, margin {found.margin:.4g}"
        )
        if found.near_tie:
            detail += ", near-tie"
        return check_of(
            f"logits: {result.mode} prefill against reference",
            found.comparison,
            detail=detail,
            link=f"last-token logits of the {result.mode} prefill against the reference",
        )

    def _pair(
        self,
        results: dict[str, Prefilled],
        snapshots: dict[str, LeftBehind],
        end_to_end: float,
        parted_at: str,
    ) -> str:
        per_token, batched = results["per-token"], results["batched"]
        limit = pairs.pair_limit(self._options.path, end_to_end)
        self._checks += pairs.proofs(per_token, batched, self._broken())
        logits = pairs.logits_check(per_token, batched, limit, broken_since=self._broken())
        if logits.state is State.DIVERGED and parted_at and pairs.is_exact(self._options.path):
            # Each point may be within its own limit: only the bits of the traces tell which op.
            logits = replace(logits, link=f"{logits.link}: other bits since {parted_at}")
        self._checks.append(logits)
        if pairs.is_exact(self._options.path):
            self._checks += snapshots["batched"].checks_against(
                snapshots["per-token"],
                len(self._tokens),
                "prefill pair",
                "batched against per-token {}",
            )
        else:
            self._notes.append(
                f"path {self._options.path} bounds logits between prefill modes; KV contents of "
                "each mode are judged against its trace only, decoding by its logits"
            )
        return pairs.exact_logits_text(pairs.compare_last(per_token, batched, limit))

    def _eager(
        self,
        traced: Sequence[TracedRun],
        results: dict[str, Prefilled],
        snapshots: dict[str, LeftBehind],
        broken_since: str,
    ) -> list[Check]:
        """Tracing must not change what is computed.

        Nor what is left behind, which the pair of prefill modes shows where it must be equal.
        """
        pair = len(results) == 2 and pairs.is_exact(self._options.path)
        link = "untraced logits differ from the traced run's"
        checks = []
        for run in traced:
            if run.whole:
                name = f"eager {run.mode} with trace equals untraced"
                got, want = np.asarray(results[run.mode].logits), np.asarray(run.result.logits)
                checks.append(pairs.bits_check(name, got, want, link, broken_since))
            if run.whole and not pair:
                where = "untraced {} against the traced run's"
                left = snapshots[run.mode]
                checks += left.checks_against(run.held, len(self._tokens), name, where)
        return checks

    def _kernels(
        self, traced: Sequence[TracedRun], results: dict[str, Prefilled], decoded: steps.Decoded
    ) -> list[Check]:
        types = (self._options.kv_type_k, self._options.kv_type_v)
        ran = [("", result) for result in results.values()]
        ran += [(", traced", run.result) for run in traced]
        ran += [(", decoded tokens", self._replayed)] if self._replayed is not None else []
        return kernel_checks(self._model, self._options.path, types, ran, decoded.steps)

    def _entry_points(
        self, results: dict[str, Prefilled], decoded: steps.Decoded, limit: float
    ) -> None:
        vocabulary, path = self._model.spec.vocab_size, self._options.path
        mixed = not self._references.may_route_apart
        judged = Judged(self._tokens, results, decoded, path, limit, vocabulary, mixed)
        since = self._broken()
        check, notes = entry_points(self._engine, judged, self._generations, since, self._say)
        self._checks.append(check)
        self._notes += notes

    def _add(self, found: tuple[list[Check], list[str]]) -> None:
        checks, notes = found
        self._checks += checks
        self._notes += notes

    def _routing(self) -> None:
        """Of the prompt, and of the decoded tokens where the replay recorded them."""
        if not any(layer.experts is not None for layer in self._model.spec.layers):
            return
        judge = self._references.routing
        self._checks.append(behind(judge.check(), self._broken()))
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
        expected = replace(expected, limits=expected.limits_of(self._options.modes[-1]))
        check, notes = steps.continuation(decoded, expected)
        self._checks.append(check)
        self._plants += decode_plants(decoded, expected, check)
        self._notes += notes
