"""Memory as people write it: what is read, what is refused, and how many pages it makes."""

from __future__ import annotations

import pytest
import torch

from pagedkv.sizing import default_num_pages, free_memory, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("2GiB", 2**31), ("0.5 GB", 500_000_000), ("3 kib", 3072), (" 1MB ", 10**6)],
)
def test_memory_is_read_as_written(text: int | str, size: int) -> None:
    """A number of bytes, or a number with a decimal or binary unit, in any case."""
    assert size == parse_memory(text)


@pytest.mark.parametrize("text", ["", "GiB", "2 gallons", "-1GB", "1e3", 0, -5, "0 MB"])
def test_unreadable_memory_is_refused_by_name(text: int | str) -> None:
    """What cannot be read, or is nothing, is refused with what it was."""
    with pytest.raises(ValueError, match="memory must") as error:
        parse_memory(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("value", [True, 1.5, None])
def test_memory_of_another_type_is_refused(value: object) -> None:
    """Only a number of bytes or text says how much."""
    with pytest.raises(TypeError, match="memory must be"):
        parse_memory(value)  # type: ignore[arg-type]


def test_default_pool_is_32_contexts_within_a_quarter_of_memory() -> None:
    """Small models get room for 32 sequences of their context; large ones a quarter of what is free."""
    cpu = torch.device("cpu")

    assert 32 * 4 + 1 == default_num_pages(4, 1024, cpu)
    assert default_num_pages(10**6, 2**30, cpu) <= free_memory(cpu) // 4 // 2**30 + 2
    assert default_num_pages(10**6, 2**60, cpu) == 2
