"""What the FILE says: container, block formats, spec, weights by role, tokenizer, trace names.

No arithmetic on activations lives here; this is the only part of `reference` that the engine may
import.

    gguf.py -> GGUFFile   spec_reader.py -> ModelSpec   weights.py -> Weights   load_model -> Model
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from reference.model.errors import InputError
from reference.model.gguf import GGUFFile, read_gguf
from reference.model.spec import ModelSpec
from reference.model.spec_reader import read_spec
from reference.model.tokenizer import Tokenizer
from reference.model.weights import Weights, load_weights

__all__ = ["Model", "check_tokens", "load_model"]


@dataclass(frozen=True)
class Model:
    """One GGUF file, understood. Tensor data stays in the memory map until used."""

    file: GGUFFile
    spec: ModelSpec
    weights: Weights

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built on first use, because a quarter of a million strings take a while."""
        return Tokenizer.from_metadata(self.file.metadata)


def load_model(path: str | Path) -> Model:
    """Reads a GGUF file's structure; raises InputError or Unsupported when anything is off."""
    file = read_gguf(Path(path))
    spec = read_spec(file)
    return Model(file, spec, load_weights(file, spec))


def check_tokens(tokens: list[int] | tuple[int, ...], spec: ModelSpec, room: int) -> None:
    """Refuses an empty prompt, ids outside the vocabulary and more tokens than `room` positions."""
    if not tokens:
        raise InputError("tokens: the prompt is empty, expected at least one token")
    for place, token in enumerate(tokens):
        if not 0 <= token < spec.vocab_size:
            raise InputError(
                f"tokens: id {token} at place {place} is out of range, "
                f"expected 0 to {spec.vocab_size - 1}"
            )
    if len(tokens) > room:
        raise InputError(
            f"tokens: {len(tokens)} tokens do not fit, expected at most {room} because the "
            f"context has that many free positions"
        )
