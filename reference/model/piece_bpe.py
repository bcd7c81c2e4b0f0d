"""BPE over pieces (tokenizer.ggml.model "gemma4") on top of the `tokenizers` library.

Follows llama.cpp (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_GEMMA4): every space becomes U+2581,
text is cut only between runs of newlines and the rest, a run of newlines that is a token is taken
whole, and merges join characters, not bytes. A character that is no token becomes its bytes,
<0x00> to <0xFF>.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Library
from tokenizers import models

from reference.model.byte_level import merge_pair
from reference.model.errors import InputError
from reference.model.sentence_piece import SPACE

_NEWLINES = re.compile(r"(\n+)")


class PieceBPE:
    """Encodes text that holds no special tokens."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        """`tokens` in id order, `merges` ("left right") by rank. InputError where they clash."""
        self._ids = {token: index for index, token in enumerate(tokens)}
        pairs = [merge_pair(merge) for merge in merges]
        try:
            model = models.BPE(self._ids, pairs, byte_fallback=True)
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                f"tokenizer: tokenizer.ggml.merges do not fit the tokens: {error}"
            ) from None
        self._library = Library(model)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a character without token and bytes is left out."""
        ids: list[int] = []
        for place, run in enumerate(_NEWLINES.split(text.replace(" ", SPACE))):
            if place % 2 and run in self._ids:
                ids.append(self._ids[run])
            elif run:
                ids += self._library.encode(run, add_special_tokens=False).ids
        return ids
