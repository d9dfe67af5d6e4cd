"""How a model's layers are cut into layer groups, so that any page of one pool serves any group.

Takes a `KVSpec`, gives groups of equally many *positions*, and refuses to know tensors. A page holds one block of
tokens for all layers of one group. The memory behind it is one buffer per position, shared by that position's layer
of every group, so a buffer is as large as the largest of these layers needs; where a group has fewer layers than there
are positions, its last ones are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.allocator import FullAttention, SlidingWindow

if TYPE_CHECKING:
    from pagedkv.spec import KVSpec, LayerKV


@dataclass(frozen=True)
class GroupCut:
    """A model's layer groups.

    Attributes:
        groups: what the allocator is told, one per group.
        layers: per group the layer at each position, or None for padding.
        place: for each layer its (group, position); None for a layer that stores nothing.
        position_widths: per position the K and V elements of one token that its buffer must hold.
    """

    groups: tuple[FullAttention | SlidingWindow, ...]
    layers: tuple[tuple[int | None, ...], ...]
    place: tuple[tuple[int, int] | None, ...]
    position_widths: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Positions that every group has."""
        return len(self.position_widths)

    @property
    def num_padded(self) -> int:
        """Positions without a layer, over all groups."""
        return sum(layer is None for group in self.layers for layer in group)


def cut_groups(spec: KVSpec, *, page_size: int, itemsize: int = 2) -> GroupCut:
    """Return the cut with the fewest bytes for one more token of a long text.

    Such a token takes a slot in every full-attention group, padding included, and in every group's tables: a block id
    with its mirror for the operator, and the slot number of each step. Windows have slots for a bounded number of
    tokens only (where there is no full attention, the longest windows are counted instead); among equal cuts, the one
    that pads less wins. Windows as long as the model's context never give anything back: they are full attention.

    Args:
        spec: the layers.
        page_size: token slots in a page.
        itemsize: bytes of a stored element.

    Raises:
        ValueError: no layer stores anything.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.num_kv_heads:
            window = None if layer.window is None or layer.window >= spec.max_len else layer.window
            kinds.setdefault(window, []).append(index)
    if not kinds:
        raise ValueError("spec must have a layer that stores K and V, has none")
    longest = None if None in kinds else max(window for window in kinds if window is not None)
    table_bytes = 8 + 2 * 4 / page_size

    def cost(positions: int) -> tuple[float, int]:
        cut = _cut(spec.layers, kinds, positions)
        width = sum(cut.position_widths)
        growing = -(-len(kinds[longest]) // positions) * width * itemsize
        return growing + len(cut.groups) * table_bytes, len(cut.groups) * width

    best = min(range(1, max(map(len, kinds.values())) + 1), key=cost)
    return _cut(spec.layers, kinds, best)


def _width(layer: LayerKV) -> int:
    return layer.num_kv_heads * (layer.k_dim + layer.v_dim)


def _cut(layers: tuple[LayerKV, ...], kinds: dict[int | None, list[int]], positions: int) -> GroupCut:
    """Deal each kind's layers out, widest first, position by position: neighbours in the model share a position."""
    groups: list[FullAttention | SlidingWindow] = []
    table: list[list[int | None]] = []
    place: list[tuple[int, int] | None] = [None] * len(layers)
    widths = [0] * positions
    for window, members in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        count = -(-len(members) // positions)
        first = len(groups)
        groups += [FullAttention() if window is None else SlidingWindow(window)] * count
        table += [[None] * positions for _ in range(count)]
        for at, index in enumerate(sorted(members, key=lambda index: (-_width(layers[index]), index))):
            position, group = at // count, first + at % count
            table[group][position] = index
            place[index] = (group, position)
            widths[position] = max(widths[position], _width(layers[index]))
    return GroupCut(tuple(groups), tuple(map(tuple, table)), tuple(place), tuple(widths))
