"""Stop strings and the text around them: cut before them, never shown too early, the same however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.stops import StopStrings
from tests.engine.scripted import make_core
from tests.engine.test_engine import scripted_engine


def shown(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """Return what each piece lets out, with the tail, and whether the text was ended."""
    ends = StopStrings(stops)
    out = []
    for piece in pieces:
        text, stopped = ends.push(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, ends.finish()], False


def test_a_stop_string_across_pieces() -> None:
    """What may begin a stop string waits; what turns out not to comes out, and the text ends before the real one."""
    assert shown(["ab", "<e", "n", "x<", "end", ">z"], ["<end>"]) == (["ab", "", "", "<enx", "", ""], True)
    assert shown(["a<en"], ["<end>"]) == (["a", "<en"], False)
    assert shown(["aab"], ["ab"]) == (["a"], True)
    assert shown(["a", "a", "b"], ["ab"]) == (["", "a", ""], True)


def test_the_one_complete_first_ends_the_text() -> None:
    """Of several the one that ends first counts, of those the longest; so the order of the list means nothing."""
    for stops in (["bcd", "cd", "abcde"], ["abcde", "cd", "bcd"]):
        assert shown(["xabcdef"], stops) == (["xa"], True)


@given(st.text("ab.", max_size=24), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=200)
def test_any_cut_gives_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut into pieces: the text up to the stop string that is complete first, and all of it."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    out, stopped = shown(pieces, stops)

    assert ("".join(out), stopped) == (expected, bool(ends))


@pytest.mark.parametrize("stop", ["two", ["nowhere", "two"], "e.t"])
def test_an_answer_ends_at_a_stop_string(stop: Any) -> None:
    """Reason stop, the text cut before it, the tokens up to the one that completed it, pages freed."""
    engine = scripted_engine(b"one.two.three", 1)
    (completion,) = engine.generate(["a"], SamplingParams(stop=stop))
    word = "e.t" if stop == "e.t" else "two"
    whole = b"one.two.three"

    assert completion.text == "one.two.three"[: whole.index(word.encode())]
    assert completion.finish_reason == "stop"
    assert bytes(completion.token_ids) == whole[: whole.index(word.encode()) + len(word)]
    assert engine.backend.usage().in_use == 0


def test_nothing_of_a_stop_string_is_streamed() -> None:
    """The pieces of a stream hold nothing that a stop string takes back, and join to the completion's text."""
    params = SamplingParams(stop=["STOP"], max_new_tokens=30)
    pieces = [output.text for output in scripted_engine(b"aSTbSTOPc", 1).stream("a", params)]

    assert pieces == ["a", "", "", "STb", "", "", "", ""]


def test_a_stop_string_with_wide_characters() -> None:
    """A stop string of characters that are several tokens each."""
    engine = scripted_engine("xé🦊y".encode(), 1)

    assert engine.generate(["a"], SamplingParams(stop="🦊"))[0].text == "xé"


def test_what_was_held_back_comes_at_the_end() -> None:
    """A text that ends by length inside what might have been a stop string shows it."""
    engine = scripted_engine(b"abSTOxyz", 1)

    assert engine.generate(["a"], SamplingParams(stop="STOP", max_new_tokens=5))[0].text == "abSTO"


def test_minimum_tokens_put_every_end_off() -> None:
    """Before min_new_tokens neither a stop string, nor a stop token, nor EOS ends the answer; afterwards each does."""
    engine = scripted_engine(b"a.a.a.", 1)
    (late,) = engine.generate(["a"], SamplingParams(stop=".", min_new_tokens=3))
    (last,) = engine.generate(["a"], SamplingParams(min_new_tokens=8, max_new_tokens=9))
    (token,) = engine.generate(["a"], SamplingParams(stop_token_ids=[ord(".")], min_new_tokens=2))

    assert (late.text, late.finish_reason) == ("a.a", "stop")
    assert len(last.token_ids) == 9
    assert 256 not in last.token_ids[:7]
    assert (token.token_ids[1] != ord("."), token.finish_reason) == (True, "stop")


def test_stop_strings_need_text() -> None:
    """An engine of token ids refuses them by name."""
    core, _, _ = make_core()
    with pytest.raises(ValueError, match="stop must be empty for an engine without a tokenizer, was"):
        Engine.from_core(core).add_request("a", [1], SamplingParams(stop="x"))
    assert not core.has_unfinished
