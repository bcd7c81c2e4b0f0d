"""One catalogued fault before the judge: which look caught it, and what was named first.

A look is one engine configuration, prompt and schedule, judged by `validate` as any user's run is.
The looks of a tier come in order and the first that is not ok ends the search. Nothing about the
fault is known to the judge; `where` of the catalogue is only compared with what it said.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend_hip.device import open_device
from backend_hip.engine import Engine
from backend_hip.requirements import requirements
from backend_hip.runtimes.checking import Checking, recover, set_checking
from fixtures.faults import TIERS, Fault, find_fault
from reference.model import Model
from reference.model.errors import AssayError, DeviceError, InputError, Unsupported
from suites.harness.batch_plans import sequences_of
from suites.harness.fault_models import fault_model, seeded_prompt
from suites.harness.patched import PatchedEngine, patched_engine
from suites.harness.validate import Options, validate
from suites.harness.verdict import State, Verdict

CONTEXT = 160  # positions; the longest look fills them
UNCHECKED = Checking()
INSTALLED = PatchedEngine(open_device, Engine, ())


@dataclass(frozen=True)
class Look:
    """One way to run the engine. Lengths are not multiples of chunk, MAX_COLS or a wave."""

    name: str
    tier: str
    length: int = 19
    n_decode: int = 3
    max_cols: int = 8
    chunk: int | None = None
    path: str = "kparallel"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    checking: Checking = UNCHECKED
    sequences: int = 0  # 0: as many as `assay validate` has
    seed: int = 11


LOOKS: tuple[Look, ...] = (
    # Flows of 12 and 7 tokens, products of 8, 4 and 7 columns.
    Look("plain", "fast", chunk=12),
    # Both KV types, another partial chunk, deferred streams and a shuffled schedule at once.
    Look(
        "checked",
        "fast",
        length=13,
        max_cols=5,
        kv_type_v="f32",
        checking=Checking(shuffle=1, sanitize=True),
        seed=12,
    ),
    # Keys in two splits of 128, the first of them outside a window of 16 for the last tokens; both
    # caches in float32; a chunk of more than max_cols, so that a group of columns has a successor
    # in its flow. Only what the two looks before missed comes here.
    Look(
        "tiles",
        "fast",
        length=149,
        n_decode=1,
        max_cols=16,
        chunk=24,
        kv_type_k="f32",
        kv_type_v="f32",
        seed=17,
    ),
    # Both caches in blocks with scales.
    Look("blocks", "fast", length=21, n_decode=2, kv_type_k="q8_0", kv_type_v="q8_0", seed=21),
    # The matrix unit: few columns, packed ones of K formats, in two tiles and in one; then many,
    # whose weights become halves first.
    Look("matrix-narrow", "fast", length=29, n_decode=1, chunk=17, path="matrix", seed=22),
    Look("matrix", "fast", length=92, n_decode=1, chunk=67, path="matrix", seed=21),
    # The default MAX_COLS, a group of one column behind a full one, and every position of the
    # context: longer than a split of keys and than a block of 128 threads.
    Look("long", "full", length=CONTEXT - 5, n_decode=5, max_cols=40, chunk=41, seed=13),
    Look("serial", "full", length=45, max_cols=40, path="serial", kv_type_k="f32", seed=14),
    Look("short", "full", length=1, n_decode=6, kv_type_k="f32", kv_type_v="f32", seed=15),
    Look("wide", "full", length=70, max_cols=64, kv_type_k="f32", kv_type_v="f32", seed=18),
    Look("narrow", "full", length=14, max_cols=1, chunk=2, seed=19),
    Look("groups", "full", length=43, max_cols=2, chunk=40, seed=20),
    # Steps of 16 and of 8 rows, each with kernels of its own.
    Look("rows", "full", length=9, max_cols=40, n_decode=1, sequences=16, seed=23),
    Look(
        "checked-again",
        "full",
        length=41,
        max_cols=33,
        checking=Checking(shuffle=2, sanitize=True),
        seed=16,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    `tier` is that of the look that saw it, "" where none did. `state` is the verdict's, or "error"
    for a device error or a refusal, which is no wrong ok either. `red` holds the names of all
    checks that were not ok. `dead` says why a fault proves nothing: it does not apply, it can't
    be compiled.
    """

    fault: str
    category: str
    wanted_tier: str
    tier: str = ""
    look: str = ""
    state: str = ""
    link: str = ""
    localised: bool = False
    red: tuple[str, ...] = ()
    of_limit: float | None = None
    dead: str = ""
    elapsed_s: float = 0.0

    @property
    def caught(self) -> bool:
        return not self.dead and bool(self.tier)

    def caught_by(self, tier: str) -> bool:
        """True where a look of `tier` or of a cheaper one saw it."""
        return self.caught and TIERS.index(self.tier) <= TIERS.index(tier)


def looks_of(tier: str) -> tuple[Look, ...]:
    """The looks of a tier and of all cheaper ones."""
    return tuple(look for look in LOOKS if TIERS.index(look.tier) <= TIERS.index(tier))


def run_fault(fault: Fault, tier: str) -> Outcome:
    """Plants one fault in a copy of the engine and looks until it is seen."""
    begin = time.perf_counter()
    blank = Outcome(fault.id, fault.category, fault.tier)
    try:
        with patched_engine(fault.changes) as engine:
            found = _search(fault, engine, looks_of(tier), blank)
    except (InputError, SyntaxError, ImportError, NameError, AttributeError) as error:
        found = replace(blank, dead=_line(error))
    return replace(found, elapsed_s=time.perf_counter() - begin)


def _search(fault: Fault, engine: PatchedEngine, looks: Sequence[Look], blank: Outcome) -> Outcome:
    model = fault_model(fault.model, fault.edit)
    for look in looks:
        if not is_supported(model, look):
            continue
        try:
            verdict = judge(model, look, engine)
        except DeviceError as error:
            text = _line(error)
            if is_environment(text):
                return replace(blank, dead=text)
            named = {"state": "error", "link": text, "red": ("device error",)}
            return _judged(fault, blank, look, named)
        except (AssayError, ValueError, TypeError, RuntimeError) as error:
            # The launch's own checks refuse some faults before anything runs.
            named = {"state": "error", "link": _line(error), "red": ("refusal",)}
            outcome = _judged(fault, blank, look, named)
            return outcome if outcome.localised else replace(blank, dead=_line(error))
        if verdict.state is not State.OK:
            return _judged(fault, blank, look, _facts(verdict))
    return blank


def is_supported(model: Model, look: Look) -> bool:
    """False where the engine has no kernel for a look, as for a KV type and a head size."""
    options = (look.path, look.kv_type_k, look.kv_type_v)
    try:
        requirements(model.spec, model.weights, *options)
    except Unsupported:
        return False
    return True


def is_environment(text: str) -> bool:
    """True for device errors before any kernel ran: a compiler, a disk or a memory that failed.

    They say nothing about what was planted.
    """
    return text.startswith(("compile:", "hipModuleLoad", "hipMalloc", "hipHostMalloc", "hiprtc"))


def _judged(fault: Fault, blank: Outcome, look: Look, facts: dict[str, Any]) -> Outcome:
    localised = re.search(fault.where, facts["link"]) is not None
    return replace(blank, tier=look.tier, look=look.name, localised=localised, **facts)


def _facts(verdict: Verdict) -> dict[str, Any]:
    broken = verdict.first_broken
    return {
        "state": verdict.state.value,
        "link": verdict.summary(),
        "red": tuple(check.name for check in verdict.checks if check.state is not State.OK),
        "of_limit": None if broken is None else broken.of_limit,
    }


def judge(model: Model, look: Look, engine: PatchedEngine = INSTALLED) -> Verdict:
    """`validate` as the look says, on an engine copy or on the installed engine."""
    device = open_device("cpu")  # checking is set for the process's runtime, not for a copy's
    set_checking(look.checking)
    try:
        if engine is not INSTALLED:
            device = engine.open_device("cpu")
        options = Options(
            n_decode=look.n_decode,
            path=look.path,
            kv_type_k=look.kv_type_k,
            kv_type_v=look.kv_type_v,
        )
        context = min(CONTEXT, model.spec.context_length)

        def open_engine() -> Any:
            return engine.engine(
                model,
                device,
                max_cols=look.max_cols,
                chunk=look.chunk,
                path=look.path,
                kv_type_k=look.kv_type_k,
                kv_type_v=look.kv_type_v,
                context_length=context,
                sequences=look.sequences or sequences_of(look.path, 0),
            )

        tokens = seeded_prompt(model, look.length, look.seed)
        return validate(model, open_engine, tokens, options, context_length=context)
    finally:
        recover()  # an engine that failed leaves work queued, or the device lost
        set_checking(UNCHECKED)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- what a process of fault_pool.py runs --------------------------------------------------------


def run_named(name: str, tier: str) -> Outcome:
    """`run_fault` by id."""
    return run_fault(find_fault(name), tier)


def outcome_of(name: str, value: Outcome | None, error: str) -> Outcome:
    """The outcome of a process; one that ended without a word proves nothing."""
    if value is not None:
        return value
    fault = find_fault(name)
    return Outcome(fault.id, fault.category, fault.tier, dead=error)
