"""How a model's layers are cut into layer groups, so that any page of one pool serves any group.

Takes a `KVSpec`, gives groups of equally many *positions*, and refuses to know tensors. A page holds one block of
tokens for all layers of one group. The memory behind it is one buffer per position, shared by that position's layer
of every group, so a buffer is as large as the largest of these layers needs; where a group has fewer layers than there
are positions, its last ones are padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.allocator import FullAttention, SlidingWindow

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pagedkv.spec import KVSpec, LayerKV


LayerGroup = FullAttention | SlidingWindow
_Kinds = dict[LayerGroup, dict["Hashable", list[int]]]  # layers by what their group keeps, and by device


@dataclass(frozen=True)
class GroupCut:
    """A model's layer groups.

    Attributes:
        groups: what the allocator is told, one per group.
        layers: per group the layer at each position, or None for padding.
        place: for each layer its (group, position); None for a layer that stores nothing.
        position_widths: per position the K and V elements of one token that its buffer must hold.
        position_heads: per position the most KV heads of its layers, each of which may have scales.
    """

    groups: tuple[LayerGroup, ...]
    layers: tuple[tuple[int | None, ...], ...]
    place: tuple[tuple[int, int] | None, ...]
    position_widths: tuple[int, ...]
    position_heads: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Positions that every group has."""
        return len(self.position_widths)

    @property
    def num_padded(self) -> int:
        """Positions without a layer, over all groups."""
        return sum(layer is None for group in self.layers for layer in group)

    def layers_at(self, position: int) -> list[int]:
        """Return the layers that share a position's buffer; at least one."""
        return [layer for group in self.layers if (layer := group[position]) is not None]


def cut_groups(
    spec: KVSpec, *, page_size: int, itemsize: int = 2, devices: Sequence[Hashable] | None = None
) -> GroupCut:
    """Return the cut with the fewest bytes for one more token of a long text.

    Such a token takes a slot in every full-attention group, padding included, and in every group's tables: a block id
    with its mirror for the operator, and the slot number of each step. Windows have slots for a bounded number of
    tokens only (where there is no full attention, the longest windows are counted instead); among equal cuts, the one
    that pads less wins. Windows as long as the model's context never give anything back: they are full attention.

    Args:
        spec: the layers.
        page_size: token slots in a page.
        itemsize: bytes of a stored element.
        devices: where each layer lives: layers at one position share a device. None: all on one.

    Raises:
        ValueError: no layer stores anything.
    """
    at = [None] * spec.num_layers if devices is None else devices
    kinds: _Kinds = {}
    for index, layer in enumerate(spec.layers):
        if layer.num_kv_heads:
            kinds.setdefault(_group_of(layer, spec.max_len), {}).setdefault(at[index], []).append(index)
    if not kinds:
        raise ValueError("spec must have a layer that stores K and V, has none")
    longest = max(kinds, key=_reach)
    table_bytes = 8 + 2 * 4 / page_size

    def cost(positions: dict[Hashable, int]) -> tuple[float, int]:
        cut = _cut(spec.layers, kinds, positions)
        width = sum(cut.position_widths)
        growing = cut.groups.count(longest) * width * itemsize
        return growing + len(cut.groups) * table_bytes, len(cut.groups) * width

    return _cut(spec.layers, kinds, min(_candidates(kinds), key=cost))


def _group_of(layer: LayerKV, max_len: int) -> LayerGroup:
    if layer.window is None or layer.window >= max_len:
        return FullAttention()
    return SlidingWindow(layer.window, layer.num_sink_tokens)


def _reach(group: LayerGroup) -> tuple[float, int]:
    return (math.inf, 0) if isinstance(group, FullAttention) else (group.window, group.num_sink_tokens)


def _width(layer: LayerKV) -> int:
    return layer.num_kv_heads * (layer.k_dim + layer.v_dim)


def _candidates(kinds: _Kinds) -> list[dict[Hashable, int]]:
    """Return how many positions each device may have: as many as make some kind fill its groups, fewest first."""
    devices = dict.fromkeys(device for places in kinds.values() for device in places)
    counts = [
        {device: max(-(-len(places.get(device, ())) // groups), 1) for device in devices}
        for places in kinds.values()
        for groups in range(1, max(map(len, places.values())) + 1)
    ]
    return sorted(counts, key=lambda positions: sum(positions.values()))


def _cut(layers: tuple[LayerKV, ...], kinds: _Kinds, positions: dict[Hashable, int]) -> GroupCut:
    """Deal each kind's layers out, widest first, position by position: neighbours in the model share a position."""
    groups: list[LayerGroup] = []
    table: list[list[int | None]] = []
    place: list[tuple[int, int] | None] = [None] * len(layers)
    total = sum(positions.values())
    widths, heads = [0] * total, [0] * total
    for kind, places in sorted(
        kinds.items(), key=lambda item: (not isinstance(item[0], FullAttention), _reach(item[0]))
    ):
        count = max(-(-len(members) // positions[device]) for device, members in places.items())
        first = len(groups)
        groups += [kind] * count
        table += [[None] * total for _ in range(count)]
        begin = 0
        for device, available in positions.items():
            members = sorted(places.get(device, ()), key=lambda index: (-_width(layers[index]), index))
            for at, index in enumerate(members):
                position, group = begin + at // count, first + at % count
                table[group][position] = index
                place[index] = (group, position)
                widths[position] = max(widths[position], _width(layers[index]))
                heads[position] = max(heads[position], layers[index].num_kv_heads)
            begin += available
    return GroupCut(tuple(groups), tuple(map(tuple, table)), tuple(place), tuple(widths), tuple(heads))
