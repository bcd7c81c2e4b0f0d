"""The float32 reference against Hugging Face transformers on the published models.

    pytest --benchmark suites/benchmark/test_reference_speed.py

Both get the same GGUF file (transformers through its own reader), the same number of threads and
the same tokens, keep a float32 KV cache and compute the last token's logits only. Rounds are taken
in turn in one process. Their logits are compared before and after; speed decides no test.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from fixtures.registry import resolve_model
from reference.forward import DenseCache, Reference
from reference.model import Model
from reports.reference_speed import ReferenceSpeed
from suites.parity.oracle import require
from suites.parity.tolerances import against

torch = require("torch")
transformers = require("transformers")
require("accelerate")  # transformers' GGUF reader asks for it
threadpoolctl = require("threadpoolctl")

# The timer is the host's: nothing here runs on a device.
pytestmark = [
    pytest.mark.models,
    pytest.mark.benchmark(timer=time.perf_counter),
    pytest.mark.filterwarnings("ignore::Warning:torch", "ignore::Warning:transformers"),
]

WARMUP_ROUNDS = 1


@dataclass(frozen=True)
class ReferenceCase:
    """`tokens` at once, or with `after` a prompt of that many, one after another."""

    model: str
    tokens: int
    after: int = 0
    seed: int = 2025

    @property
    def id(self) -> str:
        task = f"decode{self.tokens}-after{self.after}" if self.after else f"prefill{self.tokens}"
        return f"{self.model}-{task}"

    @property
    def task(self) -> str:
        return "decode" if self.after else "prefill"

    def draw(self, vocab_size: int) -> tuple[list[int], list[int]]:
        """Prompt and timed tokens."""
        rng = np.random.default_rng(self.seed)
        tokens = [int(token) for token in rng.integers(0, vocab_size, self.after + self.tokens)]
        return tokens[: self.after], tokens[self.after :]


CASES = [
    ReferenceCase(model, tokens, after)
    for model in ("smollm2", "gemma3-270m")
    for tokens, after in ((105, 0), (512, 0), (16, 105), (16, 512))
]


class Peer:
    """transformers' model of one file, fed like the reference."""

    def __init__(self, path: Any) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.reset()

    def reset(self) -> None:
        self._cache: Any = None

    def feed(self, tokens: list[int]) -> Any:
        """Logits of the last token, (V,)."""
        with torch.inference_mode():
            result = self._model(
                input_ids=torch.tensor([tokens]),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache = result.cache
        return result.logits[0, -1].numpy()


class Ours:
    """The reference, fed the same way."""

    def __init__(self, model: Model, dense: DenseCache) -> None:
        self._reference = Reference(model, kv_type_k="f32", kv_type_v="f32", dense=dense)

    def reset(self) -> None:
        self._reference.reset()

    def feed(self, tokens: list[int]) -> Any:
        return self._reference.prefill(tokens)[-1]


@pytest.fixture(scope="module")
def peer_of() -> Callable[[str], Peer]:
    return cache(lambda name: Peer(resolve_model(name)))


@pytest.fixture(scope="module")
def dense_of() -> Callable[[str], DenseCache]:
    return cache(lambda name: {})


@pytest.fixture(scope="module")
def threads() -> Any:
    """torch gets as many threads as NumPy's BLAS has."""
    found = [
        pool for pool in threadpoolctl.threadpool_info() if "numpy" in pool["filepath"].lower()
    ]
    assert len(found) == 1, f"NumPy's BLAS is not among {threadpoolctl.threadpool_info()}"
    before = torch.get_num_threads()
    torch.set_num_threads(found[0]["num_threads"])
    yield found[0]
    torch.set_num_threads(before)


def _run(side: Peer | Ours, case: ReferenceCase, tokens: list[int]) -> Any:
    if case.task == "prefill":
        return side.feed(tokens)
    for token in tokens:
        last = side.feed([token])
    return last


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_reference_speed(
    case: ReferenceCase,
    benchmark: Any,
    load: Callable[[str], Model],
    peer_of: Callable[[str], Peer],
    dense_of: Callable[[str], DenseCache],
    threads: Any,
    request: pytest.FixtureRequest,
) -> None:
    model = load(case.model)
    sides: tuple[Ours, Peer] = Ours(model, dense_of(case.model)), peer_of(case.model)
    ours, peer = sides
    prompt, tokens = case.draw(model.spec.vocab_size)
    peer_seconds: list[float] = []
    results: list[Any] = []
    wanted: list[Any] = []

    def start() -> None:
        for side in sides:
            side.reset()
            if prompt:
                side.feed(prompt)

    def prepare() -> None:
        start()
        began = time.perf_counter()
        wanted.append(_run(peer, case, tokens))
        peer_seconds.append(time.perf_counter() - began)

    benchmark.pedantic(
        lambda: results.append(_run(ours, case, tokens)),
        setup=prepare,
        rounds=request.config.getoption("benchmark_min_rounds"),
        warmup_rounds=WARMUP_ROUNDS,
    )
    assert len(results) == len(wanted) > 0
    worst = against(results, wanted, "model_float32", share_of="range")
    assert worst.ok, f"{case.id}: {worst.reason()}; {worst.worst_difference}"
    if not benchmark.enabled:
        return
    seconds = benchmark.stats.stats.data
    assert worst.max_abs_diff is not None
    assert worst.worst_difference is not None
    record = ReferenceSpeed(
        model=case.model,
        task=case.task,
        tokens=case.tokens,
        after=case.after,
        threads=threads["num_threads"],
        seconds=tuple(seconds),
        peer_seconds=tuple(peer_seconds[-len(seconds) :]),
        max_abs_diff=worst.max_abs_diff,
        limit=worst.worst_difference.limit,
        programs=_programs(threads),
        verdict="ok",
    )
    benchmark.extra_info.update(record.stored())
    print(f"{case.id}: {record.ratio:.2f} times as fast as transformers")


def _programs(pool: Any) -> str:
    forced = os.environ.get("OPENBLAS_CORETYPE")
    choice = f"set by OPENBLAS_CORETYPE={forced}" if forced else "its own choice"
    return (
        f"NumPy {np.__version__} with OpenBLAS {pool['version']} ({pool['architecture']}, "
        f"{choice}); torch {torch.__version__}, transformers {transformers.__version__}."
    )
