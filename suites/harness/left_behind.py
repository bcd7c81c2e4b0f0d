"""What a sequence leaves behind in an engine: KV contents and recurrent states, judged together.

A model may lack either. What is not there is not compared, is said in a note, and never counts as
passed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reference.model.spec import ModelSpec
from reference.model.trace import Trace
from suites.harness import kv, recurrent
from suites.harness.bounds_delta_net import DeltaRule
from suites.harness.kv import KVSnapshot
from suites.harness.protocol import JudgedEngine
from suites.harness.recurrent import StateSnapshot
from suites.harness.verdict import Check


@dataclass(frozen=True)
class LeftBehind:
    """Copies, by layer."""

    kv: KVSnapshot
    states: StateSnapshot

    @staticmethod
    def of(engine: JudgedEngine, spec: ModelSpec, sequence: int = 0) -> "LeftBehind":
        held = recurrent.snapshot(engine, spec, sequence)
        return LeftBehind(kv.snapshot(engine, spec, sequence), held)

    def notes(self) -> list[str]:
        """What there is none of."""
        notes = [] if self.kv else ["no layer keeps keys and values: there were none to compare"]
        return notes if self.states else [*notes, recurrent.NOTHING]

    def checks_of(
        self,
        trace: Trace,
        stored: tuple[str, str],
        states: Mapping[int, DeltaRule],
        spec: ModelSpec,
        broken_since: str,
    ) -> list[Check]:
        """Against what was recorded of the same run.

        `states` is what the recurrence must give; `broken_since` the first broken point, if any.
        """
        checks = []
        if self.kv:
            checks.append(kv.written_check(trace, self.kv, stored, value_norm=spec.value_norm))
        if self.states:
            checks.append(recurrent.held_check(trace, spec, states, self.states, broken_since))
        return checks

    def checks_against(
        self, want: "LeftBehind", n_tokens: int, name: str, link: str
    ) -> list[Check]:
        """Bit for bit against another run of the same `n_tokens` tokens.

        `link` has a place for what is compared: "{} after decoding against a prefill".
        """
        checks = []
        if self.kv or want.kv:
            checks.append(
                kv.pair_check(
                    want.kv,
                    self.kv,
                    n_tokens,
                    name=f"{name}: KV contents",
                    link=link.format("KV cache"),
                )
            )
        if self.states or want.states:
            checks.append(
                recurrent.pair_check(
                    want.states,
                    self.states,
                    name=f"{name}: recurrent state",
                    link=link.format("recurrent state"),
                )
            )
        return checks
