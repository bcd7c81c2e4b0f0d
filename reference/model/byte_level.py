"""Byte-level BPE (tokenizer.ggml.model "gpt2") on top of the `tokenizers` library.

`tokenizer.ggml.pre` names how text is cut into words before merging. The table below has the
patterns of llama.cpp (src/llama-vocab.cpp, llm_tokenizer_bpe), applied in order, each inside the
pieces of the one before. Which characters are letters or numbers comes from the library's Unicode
tables: characters that only the newest Unicode versions define may be cut otherwise than there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from reference.model.errors import InputError, Unsupported


@dataclass(frozen=True)
class PreTokenizer:
    """`whole_words`: a word that is in the vocabulary is taken without merging (ignore_merges)."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Spelled out: with (?i:...) a long s, U+017F, would count as an s.
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)

_FAMILIES: Mapping[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "jais", "trillion"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
    ),
    PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer((_LLAMA3,), whole_words=True): ("glm4",),
    PreTokenizer((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"),
    PreTokenizer((_QWEN35,)): ("qwen35",),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: pre for pre, names in _FAMILIES.items() for name in names}
)


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of `tokenizer.ggml.pre`; Unsupported, listing the known ones, for another."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise Unsupported(
            f"tokenizer: tokenizer.ggml.pre is {name!r}, expected one of "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return found


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


_BYTE_OF_SYMBOL = {symbol: bytes([byte]) for byte, symbol in enumerate(byte_symbols())}


def piece_bytes(token: str) -> bytes:
    """The bytes of a token in stand-in spelling; other characters count as their UTF-8."""
    return b"".join(
        _BYTE_OF_SYMBOL.get(symbol) or symbol.encode("utf-8", "surrogateescape") for symbol in token
    )


class ByteLevelBPE:
    """Encodes text that holds no special tokens."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> None:
        """`tokens` in id order, `merges` ("left right") by rank. InputError where they clash."""
        pairs = [merge_pair(merge) for merge in merges]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        try:
            model = models.BPE(vocabulary, pairs, ignore_merges=pre.whole_words)
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                f"tokenizer: tokenizer.ggml.merges do not fit the tokens: {error}"
            ) from None
        self._library = Library(model)
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in pre.patterns]
        to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._library.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_symbols])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def merge_pair(merge: str) -> tuple[str, str]:
    """The first space after the first character parts the pair: a token may start with a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise InputError(
            f"tokenizer: merge {merge!r} has no space, expected two tokens parted by one"
        )
    return merge[:cut], merge[cut + 1 :]
