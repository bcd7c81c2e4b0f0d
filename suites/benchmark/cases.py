"""What is swept: frozen cases with ids, made from the options and the runtime.

    mode       per-token; batched serial; batched kparallel     x prompt length, at MAX_COLS 40
    max-cols   batched kparallel at every MAX_COLS              x prompt length

105 tokens leave remainders that confound MAX_COLS (35 divides 105; 40 and 48 both make 3 chunks),
so the second sweep also runs 120 and 128, on a GPU 313 and 658 too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backend_hip.engine import DEFAULT_MAX_COLS

if TYPE_CHECKING:  # `assay bench` reads this file where pytest is not installed
    from suites.options import Selection

MODE_KINDS = (("per-token", "kparallel"), ("batched", "serial"), ("batched", "kparallel"))
MAX_COLS = (16, 32, 35, 40, 44, 48, 64)
MAX_COLS_PROMPTS = {"cpu": (105, 120, 128), "gpu": (105, 120, 128, 313, 658)}
# Long prompts show the difference between the modes, but emulation can't afford them.
MODE_PROMPTS = {"cpu": (17, 105), "gpu": (17, 105, 313, 658)}
MODELS = {"cpu": ("tiny-llama",), "gpu": ("smollm2",)}
DEFAULT_KV_TYPE = "f16"
SEED = 2025


@dataclass(frozen=True)
class SpeedCase:
    """One row of a table. `prompt_tokens` random token ids are drawn from `seed`."""

    sweep: str
    model: str
    prefill: str
    path: str
    prompt_tokens: int
    max_cols: int
    kv_type_k: str = DEFAULT_KV_TYPE
    kv_type_v: str = DEFAULT_KV_TYPE
    seed: int = SEED

    @property
    def id(self) -> str:
        """Readable, and selectable with -k."""
        parts = (self.model, self.prefill, self.path, f"p{self.prompt_tokens}")
        return "-".join((*parts, f"c{self.max_cols}", self.kv_type_k, self.kv_type_v))

    def tokens(self, vocab_size: int) -> tuple[int, ...]:
        """The prompt's token ids."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed)))
        return tuple(int(token) for token in rng.integers(0, vocab_size, self.prompt_tokens))


def cases(sweep: str, selection: "Selection", device_kind: str | None) -> list[SpeedCase]:
    """The cases of a sweep ("mode", "max-cols"): options replace its lists of values.

    `device_kind` is the runtime's. Modes and paths that options leave out are deselected by the
    root conftest.
    """
    size = "cpu" if device_kind in ("cpu", None) else "gpu"
    columns = selection.max_cols or ((DEFAULT_MAX_COLS,) if sweep == "mode" else MAX_COLS)
    kinds = MODE_KINDS if sweep == "mode" else (("batched", "kparallel"),)
    prompts = MODE_PROMPTS[size] if sweep == "mode" else MAX_COLS_PROMPTS[size]
    (kv_type_k,) = selection.kv_type_k or (DEFAULT_KV_TYPE,)
    (kv_type_v,) = selection.kv_type_v or (DEFAULT_KV_TYPE,)
    return [
        SpeedCase(sweep, model, prefill, path, prompt, count, kv_type_k, kv_type_v)
        for model in selection.model or MODELS[size]
        for prompt in prompts
        for prefill, path in kinds
        # MAX_COLS means nothing to per-token prefill: one case stands for all.
        for count in (columns[:1] if prefill == "per-token" else columns)
    ]
