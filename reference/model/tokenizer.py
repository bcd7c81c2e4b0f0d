"""Text to token ids and back, from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

from reference.model.errors import Unsupported


class Tokenizer:
    """Encodes and decodes; built from `tokenizer.*` metadata."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Raises Unsupported for a tokenizer that is not implemented."""
        raise Unsupported("from_metadata: tokenizers are not implemented, expected token ids")
