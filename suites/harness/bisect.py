"""Where and how it broke: validate, then the search that fits the first broken link.

    an op, logits, routing         the forward pass: bisect_forward
    sampler tail                   bisect_tail
    bits between two runs          bisect_pair
    KV, recurrent state, proofs    the facts of the verdict

Every search opens an engine of its own and runs the case again; a fault that does not come again is
said to be so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.forward import DenseCache
from reference.model import Model
from reference.model.errors import DeviceError
from suites.harness import bisect_cache, bisect_forward, bisect_pair, bisect_tail, bisect_words
from suites.harness.batch_decode import NAME as BATCH_DECODE
from suites.harness.bisect_forward import Flows, ForwardFinding, Told
from suites.harness.bisect_tail import TailFinding
from suites.harness.bundle import INPUT
from suites.harness.entry_points import NAME as ENTRY_POINTS
from suites.harness.protocol import JudgedEngine, Progress
from suites.harness.rerun import Case
from suites.harness.validate import Options, validate
from suites.harness.verdict import Check, State, Verdict, device_failed

STATES = ("kv_write", "recurrent state")
BITS = ("prefill pair: ", "decode equals", "eager ")


@dataclass(frozen=True)
class Finding:
    """`paragraph` is what to read; `forward` or `tail` are there where that search ran.

    `kernels` are the registry rows of the broken op, `identities` what they were made of.
    """

    verdict: Verdict
    paragraph: str
    case: Case
    forward: ForwardFinding | None = None
    tail: TailFinding | None = None
    identities: Sequence[Mapping[str, str]] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    @property
    def device_failed(self) -> bool:
        """True where a device error ended the run: nothing was recorded."""
        return [check.name for check in self.verdict.checks] == ["device"]

    @property
    def kind(self) -> str:
        """Of the bundle that holds this."""
        if self.tail is not None:
            return "tail"
        return "point" if self.forward is not None and self.forward.arrays is not None else "run"

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What a bundle keeps of it."""
        if self.kind == "tail" and self.tail is not None:
            return {"logits": np.asarray(self.tail.tail.logits)}
        if self.forward is None or self.forward.arrays is None:
            return {}
        found = self.forward.arrays
        inputs = {f"{INPUT}{name}": value for name, value in found.inputs.items()}
        return {**inputs, "got": found.got, "want": found.want, "limit": found.limit}


def bisect(
    model: Model,
    open_engine: Callable[[], JudgedEngine],
    tokens: Sequence[int],
    options: Options,
    flows: Flows,
    *,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> Finding:
    """Validates, and looks into what is broken. Errors are those of validate."""
    say = progress or (lambda text: None)
    dense: DenseCache = {}
    verdict = validate(
        model,
        open_engine,
        tokens,
        options,
        context_length=context_length,
        dense=dense,
        progress=say,
    )
    case = _plain_case(tokens, options)
    if verdict.state is State.OK:
        return Finding(verdict, bisect_words.nothing(verdict), case)
    broken = verdict.first_broken
    if verdict.state is State.UNSUPPORTED or broken is None:
        return Finding(verdict, bisect_words.unsupported(verdict), case)
    search = _Search(model, open_engine, verdict, options, flows, case, dense, say)
    return search.finding(broken)


def device_ended(
    error: DeviceError,
    tokens: Sequence[int],
    options: Options,
    stage: str,
    *,
    asked_bundle: bool = False,
) -> Finding:
    """What can be said of a run that a device error ended in `stage`."""
    verdict = Verdict((device_failed(error),), run={"tokens": list(tokens), **asdict(options)})
    case = _plain_case(tokens, options)
    lines = bisect_words.device(str(error), stage)
    lines += ["There is no bundle, because nothing was recorded."] if asked_bundle else []
    return Finding(verdict, " ".join(lines), case)


def _plain_case(tokens: Sequence[int], options: Options) -> Case:
    return Case(
        tuple(tokens), options.modes[-1], options.path, options.kv_type_k, options.kv_type_v
    )


@dataclass(frozen=True)
class _Search:
    model: Model
    open_engine: Callable[[], JudgedEngine]
    verdict: Verdict
    options: Options
    flows: Flows
    case: Case
    dense: DenseCache
    say: Progress

    def finding(self, broken: Check) -> Finding:
        wrong_op = next((check for check in self.verdict.checks if _is_op(check)), None)
        if broken.state is State.INVALID:
            lines = bisect_words.proves_nothing(broken, self.verdict)
            if wrong_op is None:
                return self._said(lines)
            follows = "Apart from that an op is wrong."
            if wrong_op.name.endswith(": rope") and bisect_words.wrong_positions(self.verdict):
                follows = "It shows in an op as well."
            return self._forward(wrong_op, [*lines, follows])
        if broken.name.startswith("sampler tail"):
            return self._tail(broken)
        if _is_op(broken):
            moved = broken.name.endswith(": rope") and bisect_words.wrong_positions(self.verdict)
            return self._forward(broken, [bisect_words.right_position(self.verdict)] * moved)
        if broken.name.endswith(": kv_write"):
            return self._cache(broken)
        if broken.name.endswith(": recurrent state"):
            return self._said(bisect_words.state(broken))
        if broken.name == ENTRY_POINTS:
            return self._said(bisect_words.entry(broken))
        if broken.name == BATCH_DECODE:
            return self._said(bisect_words.batch(broken))
        if broken.name.startswith(BITS):
            return self._bits(broken)
        return self._forward(broken, bisect_words.logits(broken))

    def _said(self, lines: Sequence[str]) -> Finding:
        return Finding(self.verdict, self._paragraph(lines), self.case)

    def _paragraph(self, lines: Sequence[str]) -> str:
        return " ".join([*lines, bisect_words.ruled_out(self.verdict, self.options.modes)]).strip()

    def _forward(self, broken: Check, before: Sequence[str]) -> Finding:
        case = _case_of(self.verdict, broken, self.case)
        engine = self.open_engine()
        try:
            found = bisect_forward.localise(
                self.model, engine, case, self.flows, self.dense, self.say
            )
            identities = identities_of(engine, found.kernels)
        finally:
            engine.close()
        lines = [*before, *bisect_forward.sentences(found, self._told(broken, found))]
        sound = found.broken is None and not found.logits_wrong and not found.untraced_wrong
        if broken.name.startswith("decode") and sound:
            lines += bisect_words.decode_alone(self.verdict)
        return Finding(
            self.verdict, self._paragraph(lines), case, forward=found, identities=identities
        )

    def _told(self, broken: Check, found: ForwardFinding) -> Told:
        case, point = found.case, None if found.broken is None else found.broken.point
        layer = None if point is None else point.layer
        again = point is not None and broken.link.partition(" ")[0] == point.name
        spec = None if layer is None else self.model.spec.layers[layer].delta_net
        count = len(case.tokens)
        of_its_own = list(case.tokens) == self.verdict.run.get("narrow_flow")
        return Told(
            bisect_words.how(case.mode, count, count if of_its_own else len(self.case.tokens)),
            again and bisect_words.both_modes(self.verdict, self.options.modes, broken),
            bisect_words.wrong_positions(self.verdict),
            0 if spec is None else spec.conv_kernel,
            self.flows.chunk if case.mode == "batched" else len(case.tokens),
        )

    def _tail(self, broken: Check) -> Finding:
        vocabulary = self.model.spec.vocab_size
        engine = self.open_engine()
        try:
            modes, tokens = self.options.modes, self.case.tokens
            found = bisect_tail.rerun_tails(
                engine, tokens, modes, self.options.n_decode, vocabulary, self.say
            )
            if found is None:
                found = bisect_tail.rerun_probes(engine, vocabulary, self.say)
            identities = identities_of(engine, ("argmax any",))
        finally:
            engine.close()
        if found is None:
            return self._said(bisect_words.gone(broken))
        lines = [*bisect_tail.sentences(found), bisect_words.AGAIN]
        return Finding(
            self.verdict, self._paragraph(lines), self.case, tail=found, identities=identities
        )

    def _cache(self, broken: Check) -> Finding:
        case = _case_of(self.verdict, broken, self.case)
        engine = self.open_engine()
        try:
            found = bisect_cache.first_wrong(self.model, engine, case, self.flows, self.say)
        finally:
            engine.close()
        lines = bisect_words.state(broken, again=found is not None)
        return self._said([*lines, *bisect_cache.sentences(found)])

    def _bits(self, broken: Check) -> Finding:
        lines = bisect_words.bits(broken)
        if len(self.options.modes) < 2 or broken.name.startswith("eager"):
            return self._said(lines)
        case = _case_of(self.verdict, broken, self.case)
        engine = self.open_engine()
        try:
            parting = bisect_pair.first_parting(self.model, engine, case, self.flows, self.say)
        finally:
            engine.close()
        return self._said([*lines, *bisect_pair.sentences(parting)])


def identities_of(engine: JudgedEngine, rows: Sequence[str]) -> tuple[Mapping[str, str], ...]:
    """What the kernels of these registry rows were made of, where the engine knows."""
    kernels = getattr(engine, "kernels", None)
    known = {} if kernels is None else kernels.identities()
    return tuple({"row": row, **asdict(known[row])} for row in rows if row in known)


def _is_op(check: Check) -> bool:
    """A check of an op on its own inputs that failed."""
    head, _, op = check.name.partition(": ")
    return head.startswith("local") and op not in STATES and check.state is State.DIVERGED


def _case_of(verdict: Verdict, broken: Check, case: Case) -> Case:
    """The traced run that a check speaks of: its mode, and its tokens."""
    run, head = verdict.run, broken.name.partition(":")[0]
    generated = tuple(run.get("generated", ()))
    longer = (*case.tokens, *generated[:-1])
    if head.startswith(("local, decoded positions", "decode")):
        return Case(longer, case.mode, case.path, case.kv_type_k, case.kv_type_v)
    if "narrow flow" in broken.name:
        narrow = tuple(run["narrow_flow"])
        return Case(narrow, "batched", case.path, case.kv_type_k, case.kv_type_v)
    mode = head.removeprefix("local, ") if head.startswith("local, ") else case.mode
    if broken.name.startswith("logits: per-token"):
        mode = "per-token"
    count = run.get("traced", {}).get(mode, len(case.tokens)) if head.startswith("local") else None
    return Case(case.tokens[:count], mode, case.path, case.kv_type_k, case.kv_type_v)
