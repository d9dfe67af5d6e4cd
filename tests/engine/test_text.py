"""Text as it comes: no half characters, the same joined as whole, no prompt in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence


class ByteTokenizer:
    """256 byte tokens, decoded as UTF-8 with one mark per invalid part; 256 and up are special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of the bytes."""
        assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class RunTokenizer(ByteTokenizer):
    """A byte-fallback tokenizer: a run of byte tokens decodes as a whole, or to one mark per byte; 300 is " word".

    As SentencePiece models do it, the space before the first word of what is decoded is stripped.
    """

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text run by run."""
        pieces: list[str] = []
        run: list[int] = []
        for token in [*token_ids, 300]:
            if token < 256:
                run.append(token)
                continue
            try:
                pieces.append(bytes(run).decode())
            except UnicodeDecodeError:
                pieces.append("\ufffd" * len(run))
            run = []
            pieces.append(" word")
        return "".join(pieces[:-1]).removeprefix(" ")


def real_tokenizers() -> list[Any]:
    """Return a byte-level and a byte-fallback tokenizer of the real library, with vocabularies of 256 bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    level = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    level.decoder = tokenizers.decoders.ByteLevel()
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581word": 256, "<unk>": 257}
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocabulary, "merges": []},
    }
    fallback = tokenizers.Tokenizer.from_str(json.dumps(described))
    return [PreTrainedTokenizerFast(tokenizer_object=raw) for raw in (level, fallback)]


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the piece that each token brings, and the tail."""
    stream = TextStream(tokenizer)
    return [*(stream.push([token]) for token in tokens), stream.finish()]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), RunTokenizer()])
def test_a_character_comes_whole(tokenizer: Any) -> None:
    """Four byte tokens of one character: nothing, nothing, nothing, then the character (vllm#48853)."""
    assert pieces_of(tokenizer, list("🦊".encode())) == ["", "", "", "🦊", ""]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), RunTokenizer()])
def test_characters_after_each_other(tokenizer: Any) -> None:
    """Characters of all widths, each out with its last byte and never a mark midway."""
    assert pieces_of(tokenizer, list("aé好🦊b".encode())) == [
        "a", "", "é", "", "", "好", "", "", "", "🦊", "b", "",
    ]  # fmt: skip


def test_an_incomplete_tail_comes_at_the_end() -> None:
    """Cut off after 3 of 4 bytes, the text ends with what the tokenizer makes of them (mlx-vlm#1778)."""
    tail = [ord("x"), *"🦊".encode()[:3]]

    assert pieces_of(ByteTokenizer(), tail) == ["x", "", "", "", "\ufffd"]
    assert pieces_of(RunTokenizer(), tail) == ["x", "", "", "", "\ufffd\ufffd\ufffd"]


def test_a_real_replacement_character_gets_through() -> None:
    """U+FFFD that the text truly contains comes out as soon as it can no longer be half a character."""
    tokens = list("a\ufffdb\ufffd".encode())

    assert "".join(pieces_of(ByteTokenizer(), tokens)) == "a\ufffdb\ufffd"
    assert pieces_of(ByteTokenizer(), tokens)[4] == "\ufffdb"


def test_invalid_bytes_are_not_held_for_ever() -> None:
    """A model that only makes invalid bytes still streams: never more than three marks are held back."""
    pieces = pieces_of(ByteTokenizer(), [0xFF] * 40)

    assert pieces == ["", "", "", *["\ufffd"] * 37, "\ufffd" * 3]


def test_the_space_before_a_word_stays() -> None:
    """Decoded alone each word would lose its space; in the stream only the text's first does."""
    assert "".join(pieces_of(RunTokenizer(), [300] * 100)) == " ".join(["word"] * 100)


def test_several_tokens_in_one_push() -> None:
    """Tokens pushed together bring what they bring one by one."""
    tokens = list("aé好🦊b".encode())
    stream = TextStream(RunTokenizer())

    assert stream.push(tokens) + stream.finish() == "aé好🦊b"


TEXTS = st.lists(
    st.one_of(
        st.text(st.sampled_from("aé好🦊\ufffd "), min_size=1, max_size=12).map(lambda text: list(text.encode())),
        st.lists(st.integers(0, 255), min_size=1, max_size=5),
        # A special token never stands inside a character: the letter before it ends what is incomplete.
        st.lists(st.just(300), min_size=1, max_size=20).map(lambda special: [ord("z"), *special]),
    ),
    max_size=10,
).map(lambda parts: [token for part in parts for token in part])


@given(TEXTS)
@settings(max_examples=300)
def test_the_pieces_are_the_whole_text(tokens: list[int]) -> None:
    """Any bytes, valid or not, and special tokens between characters: the pieces joined are the text of all."""
    tokenizer = ByteTokenizer()

    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@given(st.text(st.sampled_from("aé好🦊 "), max_size=60), st.sampled_from([0, 1]))
@settings(max_examples=60)
def test_the_pieces_are_the_whole_text_on_the_real_library(text: str, kind: int) -> None:
    """The same with transformers' own byte-level and byte-fallback decoders, and no mark in any piece."""
    tokenizer = real_tokenizers()[kind]
    tokens = list(text.encode()) if kind else tokenizer.convert_tokens_to_ids(_byte_level(text))
    pieces = pieces_of(tokenizer, tokens)

    assert "".join(pieces) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert not any("\ufffd" in piece for piece in pieces)


def _byte_level(text: str) -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [char for piece, _ in split for char in piece]
