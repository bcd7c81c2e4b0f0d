"""Text to token ids and back, from the metadata of a GGUF file.

Follows llama.cpp (src/llama-vocab.cpp): special tokens written out in a text are recognised (its
parse_special = true), the stretches between them go to one of three encoders.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gguf.constants import TokenType

from reference.model import byte_level, piece_bpe, sentence_piece
from reference.model.errors import InputError, Unsupported
from reference.model.tokenizer_keys import TokenizerKeys

# Byte-level BPE, SentencePiece, and BPE over pieces with the space mark.
KINDS = ("gpt2", "llama", "gemma4")

# llama.cpp goes by these spellings, whatever the file's metadata say about the end of generation.
END_OF_GENERATION = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
    # fill-in-the-middle marks at which a file or repository ends
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes; ids are indices into the file's token list.

    `bos_id` and `eos_id` are None where the file has none; `eog_ids` end generation.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        encoder: _Encoder,
        *,
        sentence_pieces: bool,
        space_prefix: bool,
        bos_id: int | None,
        eos_id: int | None,
        ends: Iterable[int],
        adds: tuple[bool, bool],
    ) -> None:
        """`adds`: whether the file asks for BOS in front and EOS at the end."""
        self._tokens = tokens
        self._encoder = encoder
        self._sentence_pieces = sentence_pieces
        self._space_prefix = space_prefix
        self._adds_bos, self._adds_eos = adds
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eog_ids = end_ids(tokens, ends)
        types = self._types = _settled_types(tokens, types, self.eog_ids)
        specials = [
            index for index, kind in enumerate(types) if kind in _SPECIAL or index in self.eog_ids
        ]
        # Longest first, as llama.cpp looks for them: the order decides between overlapping ones.
        self._specials = sorted(
            ((tokens[index], index) for index in specials),
            key=lambda pair: -len(pair[0].encode("utf-8", "surrogateescape")),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds from `tokenizer.ggml.*`.

        Raises Unsupported for a model or pre-tokenizer that is not implemented, by name, and
        InputError where keys are missing or contradict each other.
        """
        keys = TokenizerKeys(metadata)
        kind = keys.text("model", "")
        if kind not in KINDS:
            raise Unsupported(
                f"tokenizer: tokenizer.ggml.model is {kind!r}, expected one of {', '.join(KINDS)}"
            )
        tokens = keys.tokens()
        types = keys.types(len(tokens))
        encoder: _Encoder
        default_ids: tuple[int | None, int | None] = (None, None)
        if kind == "llama":
            unknown = keys.id("unknown", len(tokens), 0) or 0
            encoder = sentence_piece.SentencePieceBPE(
                tokens, keys.scores(len(tokens)), types, unknown
            )
            default_bos, default_ids = True, (1, 2)
        elif kind == "gemma4":
            encoder = piece_bpe.PieceBPE(tokens, keys.strings("merges"))
            default_bos = True
        else:
            pre = byte_level.pre_tokenizer(keys.text("pre", "default"))
            encoder = byte_level.ByteLevelBPE(tokens, keys.strings("merges"), pre)
            default_bos = pre.adds_bos
        if kind != "gpt2" and (name := keys.text("pre", "default")) not in ("default", kind):
            raise Unsupported(
                f"tokenizer: tokenizer.ggml.pre is {name!r}, expected default or {kind} because "
                f"tokenizer.ggml.model is {kind}"
            )
        # llama.cpp adds BOS under gemma4 whatever the file says: early files say false.
        adds_bos = keys.flag("add_bos_token", default_bos) or kind == "gemma4"
        adds = adds_bos, keys.flag("add_eos_token", False)
        bos_id = keys.id("bos", len(tokens), default_ids[0])
        eos_id = keys.id("eos", len(tokens), default_ids[1])
        ends = (keys.id(name, len(tokens), None) for name in _END_KEYS)
        return cls(
            tokens,
            types,
            encoder,
            sentence_pieces=kind != "gpt2",
            # The other kinds never put one, whatever the key says.
            space_prefix=keys.flag("add_space_prefix", True) and kind == "llama",
            bos_id=bos_id,
            eos_id=eos_id,
            ends=[index for index in (eos_id, *ends) if index is not None],
            adds=adds,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        `add_bos` None: BOS and EOS are added as the file says; True or False: BOS as told, no EOS.
        Raises InputError for text that is not Unicode (lone surrogates) or holds bytes that the
        vocabulary cannot spell, and where BOS is wanted but the file has none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"encode: text has a lone surrogate at character {error.start}, expected Unicode"
            ) from None
        ids: list[int] = []
        if self._adds_bos if add_bos is None else add_bos:
            ids.append(_required(self.bos_id, "bos"))
        after_special = True
        for part in self._split_specials(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part, self._space_prefix and after_special)
            after_special = isinstance(part, int)
        if add_bos is None and self._adds_eos:
            ids.append(_required(self.eos_id, "eos"))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        content = b"".join(map(self.piece_bytes, ids))
        if self._sentence_pieces and self._space_prefix:
            content = content.removeprefix(b" ")
        return content.decode("utf-8", "replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text that each id completes; a character cut across tokens comes whole.

        One string for each id (it may be empty) and one at the end, for bytes left over. Their
        concatenation is decode(ids), but for the space that decode drops in front.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for index in ids:
            yield decoder.decode(self.piece_bytes(index))
        yield decoder.decode(b"", final=True)

    def piece(self, index: int) -> str:
        """Text of one token; bytes that are not UTF-8 on their own become U+FFFD."""
        return self.piece_bytes(index).decode("utf-8", "replace")

    def piece_bytes(self, index: int) -> bytes:
        """Bytes of one token. Raises InputError for an id outside the vocabulary."""
        if not 0 <= index < len(self._tokens):
            raise InputError(f"piece: token id is {index}, expected 0 to {len(self._tokens) - 1}")
        token, kind = self._tokens[index], self._types[index]
        if kind in _SPECIAL:
            return token.encode("utf-8", "surrogateescape")
        if self._sentence_pieces:
            return sentence_piece.piece_bytes(token, kind == TokenType.BYTE)
        return byte_level.piece_bytes(token)

    def _split_specials(self, text: str) -> list[str | int]:
        """Text parted at special tokens; a str is plain and not empty, an int is a special's id."""
        parts: list[str | int] = [text] if text else []
        for special, index in self._specials:
            if special not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for place, piece in enumerate(part.split(special)):
                    cut += ([index] if place else []) + ([piece] if piece else [])
            parts = cut
        return parts

    def _encode_plain(self, text: str, space_prefix: bool) -> list[int]:
        """Encodes a stretch without specials and proves that nothing of it was lost."""
        text = " " + text if space_prefix else text
        ids = self._encoder.encode(text)
        wanted = text.replace(sentence_piece.SPACE, " ") if self._sentence_pieces else text
        if b"".join(map(self.piece_bytes, ids)) != wanted.encode():
            raise InputError(
                f"encode: {text[:40]!r} cannot be spelled with this vocabulary, expected one that "
                "has a token for every byte"
            )
        return ids


def _required(index: int | None, name: str) -> int:
    if index is None:
        raise InputError(
            f"encode: {name.upper()} is wanted, but tokenizer.ggml.{name}_token_id is missing"
        )
    return index


def end_ids(tokens: Sequence[str], ends: Iterable[int]) -> frozenset[int]:
    """Ids that end generation: `ends`, what the file names, and the spellings above.

    As in llama.cpp, two spellings do not count beside others that show what they mean there.
    """
    named = (index for index, token in enumerate(tokens) if token in END_OF_GENERATION)
    found = {tokens[index]: index for index in (*ends, *named)}
    if "<|tool_response>" in found:  # Gemma 4, where </s> is ordinary text
        found.pop("</s>", None)
    calls = {"<|call|>", "<|calls|>"} & found.keys()
    if calls and {"<|return|>", "<|flush|>"} & found.keys():  # harmony: <|end|> ends a message
        found.pop("<|end|>", None)
    return frozenset(found.values())


def _settled_types(tokens: Sequence[str], types: Sequence[int], ends: frozenset[int]) -> list[int]:
    """`types`, with a </s> that ends nothing made ordinary text, and <|end|> still a special."""
    settled = [int(kind) for kind in types]
    for spelling, kind in (("</s>", TokenType.NORMAL), ("<|end|>", TokenType.USER_DEFINED)):
        if spelling in tokens and (index := list(tokens).index(spelling)) not in ends:
            settled[index] = kind
    return settled
