"""K and V out of the pages, as a padded batch: ``[rows, heads, columns, width]``.

Takes sequences and which of their columns are real, gives tensors for a model's own attention, and knows no model.
Padding, and what a sliding window has given back, is exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.attention.quantise import dequantise

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence as PagedSequence
    from pagedkv.cache import PagedKVCache


def column_slots(sequences: list[PagedSequence], real: torch.Tensor, group: int) -> torch.Tensor:
    """Return the slot of each column, int64 ``[rows, columns]``; slots of the null page for what is not held.

    Args:
        sequences: one per row.
        real: bool ``[rows, columns]``: which columns are tokens of their sequence, from its first on; those of a step
            in flight may be among them.
        group: the layer group whose tables are read.
    """
    slots = np.zeros(real.shape, np.int64)
    for row, (sequence, kept) in enumerate(zip(sequences, real.numpy(), strict=True)):
        slots[row, kept] = sequence.slots(0, int(kept.sum()), group)
    return torch.from_numpy(slots)


def group_of(store: PagedKVCache, layer: int) -> int:
    """Return the layer group whose tables say where a layer's K and V are."""
    place = store.layout.cut.place[layer]
    if place is None:
        raise ValueError(f"layer must store K and V of its own, layer {layer} stores none")
    return place[0]


def gather_columns(
    store: PagedKVCache, layer: int, slots: torch.Tensor, k_heads: int, v_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K ``[rows, k_heads, columns, k_width]`` and V of ``layer`` at ``slots``; quantised ones as float32."""
    k_pages, v_pages = store.k_pages[layer], store.v_pages[layer]
    scales = store.kv_scales[layer]
    slots = slots.to(k_pages.device)
    pages, offsets = slots // store.page_size, slots % store.page_size
    sides = []
    for i, (source, heads) in enumerate(((k_pages, k_heads), (v_pages, v_heads))):
        states = source[pages, :, offsets]
        if scales is not None:
            states = dequantise(states, scales[i][pages, :, offsets])
        states.masked_fill_((pages == 0)[:, :, None, None], 0)
        # Contiguous like the stock cache's, which some models see as other shapes.
        sides.append(states.reshape(*slots.shape, heads, -1).transpose(1, 2).contiguous())
    return sides[0], sides[1]
