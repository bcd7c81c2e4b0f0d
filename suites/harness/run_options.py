"""What a verdict is about: how the judged engine was built, and what is run on it."""

from dataclasses import dataclass

from reference.model import Model
from reference.model.errors import InputError
from suites.harness.kernels import require_path
from suites.harness.protocol import PREFILL_MODES


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
        require_path(self.path, self.modes)


@dataclass(frozen=True)
class Asked:
    """A verdict's model, prompt and options. `room`: positions that a sequence has."""

    model: Model
    tokens: tuple[int, ...]
    options: Options
    room: int
