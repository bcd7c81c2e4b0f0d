"""What the catalogue proves about the judge: rows of the tolerances and checks that see faults.

Of the whole catalogue, so with `-m full`. A row that no fault exceeds is a limit that nothing is
known to break; which kinds of check need a plant in the judge itself is in
suites/meta/test_check_kinds.py.
"""

import pytest

from backend_hip.registry import PATHS
from fixtures.faults import load_faults
from fixtures.golden import TINY_GATES
from reference.model.trace import Trace
from suites.faults.conftest import FaultRun
from suites.harness.check_kinds import kinds_seen
from suites.harness.fake_engine import FakeEngine
from suites.harness.fault_models import fault_model
from suites.harness.fault_run import Outcome
from suites.harness.local import LocalRules, judge_trace
from suites.harness.row_power import Used, blind_rows, power_of_rows, power_table
from suites.harness.tolerances import TABLE

LENGTH = 9
# What the catalogue must turn red by itself; other kinds are of runs that it does not make.
_MUST_BE_SEEN = (
    *("support", "kv-write", "recurrent-memory", "local", "local-second-mode", "local-decoded"),
    *("logits", "routes", "pair-logits", "pair-kv", "eager", "kernels", "generations"),
    *("tail-prefill", "tail-decode", "tail-probes", "replay-logits", "replay-kv"),
    "batched-decode",
)


@pytest.fixture(scope="module")
def used() -> Used:
    """Which ops consult which rows, over clean runs on every path: of every golden model, and of
    one whose weights come in super-blocks.
    """
    found = Used()
    for name in (*(f"oracle-{gate}" for gate in TINY_GATES), "tiny-llama"):
        model = fault_model(name)
        tokens = [int(token) % model.spec.vocab_size for token in range(3, 3 + LENGTH)]
        for path in PATHS:
            trace = Trace()
            FakeEngine(model, path=path).prefill_batched(tokens, trace=trace)
            found.add(judge_trace(model, trace, LocalRules(path)))
    return found


def _all_of(run: FaultRun) -> list[Outcome]:
    outcomes = [run.outcome(name) for name in run.names]
    if len(outcomes) != len(load_faults()):
        pytest.skip("a part of the catalogue proves nothing about what it leaves out")
    return outcomes


@pytest.mark.full
def test_every_row_sees_a_fault(full_run: FaultRun, used: Used) -> None:
    powers = power_of_rows(used, _all_of(full_run))
    assert len(powers) > len(TABLE)
    rows, heads = power_table(powers)
    full_run.tables.append(("rows of the tolerances", heads, rows))
    assert blind_rows(powers) == []


@pytest.mark.full
def test_the_catalogue_turns_every_kind_of_check_red_that_it_can(full_run: FaultRun) -> None:
    seen = kinds_seen(_all_of(full_run))
    rows = [[kind, str(len(faults)), ", ".join(faults[:3])] for kind, faults in seen.items()]
    full_run.tables.append(("checks, full tier", ["kind", "faults", "such as"], rows))
    assert [kind for kind in _MUST_BE_SEEN if not seen[kind]] == []
