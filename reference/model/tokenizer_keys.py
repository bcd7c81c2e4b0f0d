"""Typed access to the metadata keys `tokenizer.ggml.*`."""

from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from reference.model.errors import InputError


class TokenizerKeys:
    """Every mismatch is an InputError that names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _get(self, name: str, default: Any, kind: type, wanted: str) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not kind and value is not default:
            raise InputError(
                f"tokenizer: tokenizer.ggml.{name} is {str(value)[:40]!r}, expected {wanted}"
            )
        return value

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, default, str, "a string"))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, default, bool, "true or false"))

    def strings(self, name: str) -> list[str]:
        values: list[str] | None = self._get(name, None, list, "a list of strings")
        if values is None:
            raise InputError(f"tokenizer: tokenizer.ggml.{name} is missing")
        return values

    def id(self, name: str, vocab_size: int, default: int | None) -> int | None:
        """A token id; `default` where the key is missing and the vocabulary has it."""
        key = f"{name}_token_id"
        value: int | None = self._get(key, None, int, "a token id")
        if value is None:
            return default if default is not None and default < vocab_size else None
        if not 0 <= value < vocab_size:
            raise InputError(
                f"tokenizer: tokenizer.ggml.{key} is {value}, expected 0 to {vocab_size - 1}"
            )
        return value

    def tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        if not tokens:
            raise InputError("tokenizer: tokenizer.ggml.tokens is empty, expected a vocabulary")
        named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        if len(set(named)) != len(named):
            seen: set[str] = set()
            twice = next(token for token in named if token in seen or seen.add(token))  # type: ignore[func-returns-value]
            raise InputError(f"tokenizer: token {twice!r} appears twice, expected each once")
        return named

    def types(self, count: int) -> list[int]:
        return [int(kind) for kind in self._numbers("token_type", count, TokenType.NORMAL)]

    def scores(self, count: int) -> list[float]:
        return [float(score) for score in self._numbers("scores", count, 0.0)]

    def _numbers(self, name: str, count: int, default: float) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return [default] * count
        length = len(values) if hasattr(values, "tolist") else "no list of numbers"
        if length != count:
            raise InputError(
                f"tokenizer: tokenizer.ggml.{name} has {length} entries, expected {count}, one "
                "for each token"
            )
        numbers: list[Any] = values.tolist()
        return numbers
