"""Text from tokens: the pieces are the whole, and stop strings cut exactly, however it is split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atom.model_engine.detokenizer import Detokenizer, IncrementalDecoder, StopStrings

_TEXT = "the cat sat on the mat. größer als 猫猫 und 🙂🙃 ça ira, il était une fois\n" * 4


class ByteLevel:
    """A small byte-level BPE with an end-of-text token."""

    def __init__(self) -> None:
        self.bpe = Tokenizer(models.BPE())
        self.bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        self.bpe.train_from_iterator([_TEXT], trainer)
        self.special_ids = {0}
        self.size = self.bpe.get_vocab_size()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.bpe.decode(list(token_ids), skip_special_tokens=True)


class Words:
    """A word-piece of the sentence kind, whose first space is dropped, with byte fallback."""

    def __init__(self) -> None:
        pieces = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁"]
        self.bpe = Tokenizer(
            models.BPE(
                {piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True
            )
        )
        self.bpe.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self.special_ids = {0}
        self.size = len(pieces)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.bpe.decode([t for t in token_ids if t not in self.special_ids])

    def bytes_of(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode()]


@cache
def byte_level() -> ByteLevel:
    return ByteLevel()


@cache
def words() -> Words:
    return Words()


_IDS = st.lists(st.integers(0, byte_level().size - 1), max_size=60)
_TEXTS = st.text(st.sampled_from("abc 猫🙂é"), max_size=30)


def stream(decoder: IncrementalDecoder, token_ids: Sequence[int]) -> str:
    return "".join([decoder.push(token) for token in token_ids]) + decoder.finish()


@given(_IDS)
@example([95, 95, 95, 95, 304])
def test_pieces_are_the_whole_for_any_tokens(token_ids: list[int]) -> None:
    # random ids are mostly not UTF-8: cut characters, lone bytes, end-of-text in between
    assert stream(IncrementalDecoder(byte_level()), token_ids) == byte_level().decode(token_ids)


@given(_TEXTS)
def test_no_replacement_character_is_shown_for_good_text(text: str) -> None:
    decoder = IncrementalDecoder(byte_level())
    pieces = [decoder.push(token) for token in byte_level().bpe.encode(text).ids]
    assert "".join(pieces) == text
    assert not decoder.finish()


@given(st.lists(st.one_of(_TEXTS, st.integers(257, 260), st.just(0)), max_size=12))
def test_pieces_are_the_whole_where_spaces_depend_on_context(parts: list[str | int]) -> None:
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else words().bytes_of(part)
    assert stream(IncrementalDecoder(words()), token_ids) == words().decode(token_ids)


def test_a_decoder_that_cuts_characters_would_be_seen() -> None:
    token_ids = byte_level().bpe.encode("🦜").ids
    assert len(token_ids) > 1
    naive = "".join(byte_level().decode([token]) for token in token_ids)
    assert naive != byte_level().decode(token_ids)


def test_endless_bytes_that_are_no_text_stay_cheap() -> None:
    longest = 0

    class Watched(ByteLevel):
        def decode(self, token_ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    watched = Watched()
    stray = next(t for t in range(1, watched.size) if watched.decode([t]) == "\ufffd")
    assert stream(IncrementalDecoder(watched), [stray] * 300) == "\ufffd" * 300
    assert longest <= 10


def whole_cut(text: str, stops: Sequence[str]) -> str:
    """The law as a loop over characters: the first end of a stop string counts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


_STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.text("ab\n", max_size=40), _STOPS, st.data())
def test_stop_strings_cut_exactly_for_any_split(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True) if b > a]
    stop_strings = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += stop_strings.push(piece)
        # nothing is shown that a later piece would take back
        assert whole_cut(text, stops).startswith(shown)
    if stop_strings.matched is None:
        shown += stop_strings.finish()
    assert shown == whole_cut(text, stops)
    assert (stop_strings.matched is not None) == any(stop in text for stop in stops)


@given(_TEXTS, st.lists(st.text("ab猫🙂 ", min_size=1, max_size=3), max_size=3), st.data())
def test_tokens_to_text_with_stops(text: str, stops: list[str], data: st.DataObject) -> None:
    token_ids = byte_level().bpe.encode(text).ids
    detokenizer = Detokenizer(byte_level(), stops)
    shown, taken, rest = "", 0, token_ids
    while rest and not detokenizer.stopped:
        count = data.draw(st.integers(1, 4))
        piece, used = detokenizer.push(rest[:count])
        shown, taken, rest = shown + piece, taken + used, rest[count:]
    shown += detokenizer.finish()
    assert shown == whole_cut(text, stops)
    if detokenizer.stopped:
        # the tokens that were taken hold the stop string, and one fewer do not
        assert any(stop in byte_level().decode(token_ids[:taken]) for stop in stops)
        assert not any(stop in byte_level().decode(token_ids[: taken - 1]) for stop in stops)
    else:
        assert taken == len(token_ids)


def test_a_stop_string_is_found_though_the_next_character_has_begun() -> None:
    # a byte-level token may end one character and begin another
    first, second = "🙂".encode()[:3], "🙂".encode()[3:] + "é".encode()[:1]

    class Halves:
        special_ids = ()

        def decode(self, token_ids: Sequence[int]) -> str:
            return b"".join((first, second)[token] for token in token_ids).decode(errors="replace")

    detokenizer = Detokenizer(Halves(), ["🙂"])
    assert detokenizer.push([0]) == ("", 1)
    assert detokenizer.push([1, 0, 0]) == ("", 1)
    assert detokenizer.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
