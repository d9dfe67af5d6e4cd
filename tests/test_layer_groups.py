"""How layers are cut into groups: fewest bytes for one more token, padding and tables counted."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import AutoConfig

from pagedkv.allocator import FullAttention, SlidingWindow
from pagedkv.layer_groups import GroupCut, cut_groups
from pagedkv.spec import KVSpec, LayerKV


def spec_of(*layers: tuple[int, LayerKV]) -> KVSpec:
    """Return a spec of so many layers of each kind, one kind after the other."""
    return KVSpec(tuple(layer for count, layer in layers for _ in range(count)), max_len=131072, vocab_size=9)


def shape(cut: GroupCut) -> tuple[int, int, int]:
    """Return groups, positions and padding."""
    return len(cut.groups), cut.num_positions, cut.num_padded


FULL, NARROW = LayerKV(8, 128, 128), LayerKV(8, 128, 128, window=1024)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec_of((52, NARROW), (10, FULL)), (7, 10, 8)),
        (spec_of((15, NARROW), (3, FULL)), (6, 3, 0)),
        (spec_of((22, NARROW), (4, FULL)), (7, 4, 2)),
        (spec_of((32, FULL)), (1, 32, 0)),
        (spec_of((32, NARROW)), (1, 32, 0)),
        (spec_of((3, NARROW), (1, FULL)), (4, 1, 0)),
        (spec_of((6, FULL), (4, NARROW)), (2, 6, 2)),
        (spec_of((4, LayerKV(8, 128, 128, window=512)), (4, NARROW)), (2, 4, 0)),
    ],
)
def test_cuts(spec: KVSpec, expected: tuple[int, int, int]) -> None:
    """Groups, positions and padded positions of known mixtures."""
    assert expected == shape(cut_groups(spec, page_size=16))


def test_every_layer_has_one_place() -> None:
    """Each layer that stores something stands at one position of a group of its own window; others nowhere."""
    layers = (*(FULL if index % 6 == 5 else NARROW for index in range(18)), LayerKV(0, 8, 8))
    cut = cut_groups(KVSpec(layers, max_len=131072, vocab_size=9), page_size=16)
    assert Counter(range(18)) == Counter(layer for group in cut.layers for layer in group if layer is not None)
    for index, place in enumerate(cut.place[:18]):
        assert place is not None
        group, position = place
        assert index == cut.layers[group][position]
        assert (FullAttention() if index % 6 == 5 else SlidingWindow(1024)) == cut.groups[group]
    assert cut.place[18] is None


def test_positions_are_as_wide_as_their_widest_layer() -> None:
    """Where layers differ in width, wide ones share positions."""
    wide = LayerKV(4, 512, 512)
    cut = cut_groups(spec_of((25, LayerKV(4, 256, 256, window=512)), (5, wide)), page_size=16)
    assert (6, 5, 0) == shape(cut)
    assert (4096,) * 5 == cut.position_widths
    mixed = cut_groups(spec_of((2, FULL), (2, LayerKV(1, 128, 128))), page_size=16)
    assert (2048, 2048, 256, 256) == mixed.position_widths


def test_a_window_as_long_as_the_context_is_full_attention() -> None:
    """Pages that can never leave are not kept apart."""
    cut = cut_groups(KVSpec((FULL, NARROW), max_len=1024, vocab_size=9), page_size=16)
    assert (FullAttention(),) == cut.groups


@pytest.mark.parametrize(
    ("model_type", "expected"), [("gemma2", (2, 13, 0)), ("gpt_oss", (2, 18, 0)), ("gemma3", (7, 4, 2))]
)
def test_library_defaults(model_type: str, expected: tuple[int, int, int]) -> None:
    """Real configs cut as they should."""
    assert expected == shape(cut_groups(KVSpec.from_config(AutoConfig.for_model(model_type)), page_size=16))


def test_nothing_to_cut_is_refused() -> None:
    """A spec without K and V has no groups."""
    with pytest.raises(ValueError, match="spec must have a layer that stores K and V"):
        cut_groups(spec_of((2, LayerKV(0, 8, 8))), page_size=16)
