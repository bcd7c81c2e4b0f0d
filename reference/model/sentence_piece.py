"""SentencePiece BPE (tokenizer.ggml.model "llama") on top of the `sentencepiece` library.

A GGUF file has the pieces, scores and types but no SentencePiece model, so one is put together here
(format: sentencepiece_model.proto). Text is taken as it is: no normalisation, no dummy prefix.
"""

from collections.abc import Sequence
from typing import Any

import sentencepiece
from gguf.constants import TokenType
from sentencepiece import sentencepiece_model_pb2

from reference.model.errors import InputError

SPACE = "▁"
_protocol: Any = sentencepiece_model_pb2  # its messages are made at import, unseen by type checkers


class SentencePieceBPE:
    """Encodes text that holds no special tokens."""

    def __init__(
        self, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown_id: int
    ) -> None:
        """All three in id order. Raises InputError where the library refuses them."""
        proto = _protocol.ModelProto()
        has_bytes = sum(kind == TokenType.BYTE for kind in types) == 256
        proto.trainer_spec.model_type = _protocol.TrainerSpec.BPE
        proto.trainer_spec.byte_fallback = has_bytes
        proto.trainer_spec.vocab_size = len(tokens)
        proto.trainer_spec.unk_id = unknown_id
        proto.trainer_spec.unk_piece = tokens[unknown_id]
        proto.normalizer_spec.name = "identity"
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.normalizer_spec.escape_whitespaces = True
        add = proto.pieces.add
        for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
            # The library wants exactly one unknown piece; others can only be parsed as specials.
            if index == unknown_id:
                kind = TokenType.UNKNOWN
            elif kind == TokenType.UNKNOWN:
                kind = TokenType.CONTROL
            add(piece=token, score=score, type=kind)
        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(proto.SerializeToString())
        except (RuntimeError, UnicodeError, ValueError) as error:
            raise InputError(f"tokenizer: SentencePiece refuses the vocabulary: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._library.EncodeAsIds(text)
        return ids


def piece_bytes(token: str, is_byte: bool) -> bytes:
    """The bytes of a piece: <0xXX> is one byte, U+2581 stands for a space."""
    if is_byte:
        try:
            return bytes([int(token[1:-1], 16)])
        except ValueError:
            raise InputError(
                f"tokenizer: byte token is {token!r}, expected the form <0x41>"
            ) from None
    return token.replace(SPACE, " ").encode("utf-8", "surrogateescape")
