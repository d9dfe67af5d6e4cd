"""PagedCache and masks: only real tokens take slots, and any pattern of padding gives the stock tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.transformers.columns import Columns
from tests.tiny_models import tiny
from tests.transformers.generating import both, generate, left_padded, paged, prompts

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("llama", "gemma3")


def test_padding_takes_no_slot() -> None:
    """Of a left-padded batch only real tokens are stored; columns still count padding."""
    inputs = left_padded()
    with paged(tiny("llama")) as cache:
        generate(tiny("llama"), inputs, past_key_values=cache, max_new_tokens=5)

        assert (inputs["attention_mask"].sum(1) + 4).tolist() == cache.row_lengths
        assert 14 + 4 == cache.get_seq_length()
        assert sum(cache.row_lengths) == cache.usage().tokens_stored


@pytest.mark.parametrize("name", KINDS)
def test_right_padding(name: str) -> None:
    """Padding on the right, a hole once generation goes on, gives the stock tokens, through windows too."""
    ids = prompts(2)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0

    expected, got = both(tiny(name), {"input_ids": ids, "attention_mask": mask})

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_holes(name: str) -> None:
    """Tokens masked out in the middle take no slot and give the stock tokens, through windows too."""
    ids = prompts(2)
    mask = torch.ones_like(ids)
    mask[0, 6:9] = 0
    mask[1, :2] = mask[1, 10] = 0

    expected, got = both(tiny(name), {"input_ids": ids, "attention_mask": mask})

    assert expected.tolist() == got.tolist()


@given(data=st.data())
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", KINDS)
def test_any_pattern(name: str, data: st.DataObject) -> None:
    """Any 2-D mask, fed in two forwards of a loop of one's own, gives the stock logits of every real column."""
    model, columns, first = tiny(name), 10, data.draw(st.integers(1, 9))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns)
    mask = torch.tensor(data.draw(st.lists(row, min_size=2, max_size=2)))
    mask[:, -1] = True
    expected = two_forwards(model, None, mask, first)
    with paged(model) as cache:
        got = two_forwards(model, cache, mask, first)
        cache.store.allocator.check()

        assert mask.sum(1).tolist() == cache.row_lengths

    torch.testing.assert_close(got[mask], expected[mask], atol=1e-3, rtol=1e-3)


def two_forwards(model: Any, cache: Any, mask: torch.Tensor, first: int) -> torch.Tensor:
    """Return logits ``[rows, columns, vocab]`` of a text fed as its first columns, then the rest."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if cache is None else cache
    ids, logits = prompts(*mask.shape), []
    for start, stop in ((0, first), (first, mask.shape[1])):
        with torch.no_grad():
            output = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop].long(),
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(output.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("style", ["whole text", "new tokens", "padding between"])
def test_continued_chat(name: str, style: str) -> None:
    """A second turn on the same cache gives the stock tokens: whole text again, only the new part, or padded."""
    model, inputs = tiny(name), left_padded()

    with paged(model) as cache:
        assert two_turns(model, inputs, None, style) == two_turns(model, inputs, cache, style)
        cache.store.allocator.check()


def two_turns(model: Any, inputs: dict[str, torch.Tensor], cache: Any, style: str) -> list[list[int]]:
    """Generate, add a user's turn, and generate again on the same cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if cache is None else cache
    first = generate(model, inputs, past_key_values=cache, max_new_tokens=6)
    turn = prompts(len(first), 5, seed=1)
    turn_mask = torch.ones_like(turn)
    if style == "padding between":
        turn_mask[0, :3] = 0
    text = torch.cat([first, turn], 1)
    seen = torch.ones(len(first), 6, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], seen, turn_mask], 1)
    if style == "new tokens":
        text = text[:, cache.get_seq_length() :]
    second = generate(model, {"input_ids": text, "attention_mask": mask}, past_key_values=cache, max_new_tokens=6)
    tokens: list[list[int]] = second[:, -6:].tolist()
    return [*first.tolist(), *tokens]


def test_position_ids(stock_cache: Callable[[Any], Any]) -> None:
    """Positions of the caller's own reach the rotary embedding as they are."""
    model, ids = tiny("llama"), prompts(2)
    positions = torch.arange(14).expand(2, -1) * 3 + torch.tensor([[0], [7]])

    def logits(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            first = model(ids[:, :9], position_ids=positions[:, :9], past_key_values=cache)
            second = model(ids[:, 9:], position_ids=positions[:, 9:], past_key_values=cache)
        return torch.cat([first.logits, second.logits], 1)

    with paged(model) as cache:
        torch.testing.assert_close(logits(cache), logits(stock_cache(model)), atol=1e-4, rtol=1e-4)


def test_custom_4d_mask(stock_cache: Callable[[Any], Any]) -> None:
    """A 4-D mask of the caller's own is obeyed by the model's own attention on gathered K and V."""
    model, ids = tiny("llama"), prompts(1, 8)
    mask = torch.zeros(1, 1, 3, 8)
    mask[..., [1, 2]] = torch.finfo(torch.float32).min
    mask[0, 0, :, 5:] = torch.finfo(torch.float32).min * torch.ones(3, 3).triu(1)

    def logits(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(ids[:, :5], past_key_values=cache)
            output: torch.Tensor = model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
        return output

    with paged(model) as cache:
        torch.testing.assert_close(logits(cache), logits(stock_cache(model)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], "row 0, column 2 is a stored token, the mask now says 0"),
        (
            [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
            "row 1, column 1 is padding, which has no slot, the mask now says 1",
        ),
        ([[1, 1, 1, 1, 1, 1]], "attention_mask must have 2 rows"),
        (None, "attention_mask must hide the padding"),
    ],
)
def test_a_changed_mask_is_refused(later: list[list[int]] | None, message: str) -> None:
    """A token masked after it was stored, and padding shown later, are refused, and the cache stays as it was."""
    model, ids = tiny("llama"), prompts(2, 6)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with paged(model) as cache, torch.no_grad():
        model(ids[:, :4], attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            model(
                ids[:, 4:],
                attention_mask=None if later is None else torch.tensor(later),
                past_key_values=cache,
            )
        cache.store.allocator.check()

        assert (4, [4, 2]) == (cache.get_seq_length(), cache.row_lengths)


class TestColumns:
    """The translation between columns and positions, alone."""

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_against_a_plain_tensor(self, data: st.DataObject) -> None:
        """After any appends, crops and selections it says what a plain bool tensor says."""
        columns, plain = Columns(3), torch.zeros(3, 0, dtype=torch.bool)
        for verb in data.draw(st.lists(st.sampled_from(["append", "crop", "select"]), max_size=8)):
            if verb == "append":
                count = data.draw(st.integers(1, 5))
                bits = data.draw(st.lists(st.booleans(), min_size=3 * count, max_size=3 * count))
                new = torch.tensor(bits).view(3, count)
                read = columns.read(torch.cat([plain, new], 1).long(), count)
                columns.append(read, count)
                plain = torch.cat([plain, new], 1)
            elif verb == "crop":
                count = data.draw(st.integers(0, plain.shape[1]))
                assert plain[:, plain.shape[1] - count :].sum(1).tolist() == columns.crop(count)
                plain = plain[:, : plain.shape[1] - count]
            else:
                indices = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
                columns.select(indices)
                plain = plain[indices]
            holes = [
                column
                for column in range(plain.shape[1])
                if any(bool(row[:column].any()) and not bool(row[column]) for row in plain)
            ]

            assert plain.shape[1] == columns.count
            assert plain.tolist() == columns.real.tolist()
            assert plain.sum(1).tolist() == columns.lengths()
            assert bool((~plain).any()) == columns.padded
            assert max(holes, default=-1) == columns.last_hole
