"""Page tensors: the memory behind a cache's pages, and each layer's view of it.

Takes a model's layers and their cut into groups, gives tensors, and refuses to know sequences and tokens. There is one
buffer per *position* of the cut, shared by that position's layer of every group, so that any page serves any group;
each layer sees its own K and V of it (docs/memory-layout.md). Memory is not cleared: no slot is read before it was
written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from pagedkv.allocator import FullAttention
from pagedkv.attention import copy_pages
from pagedkv.attention.quantise import KV_QUANTS, dequantise, is_quantised
from pagedkv.layer_groups import GroupCut, cut_groups
from pagedkv.sizing import default_num_pages, pages_within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pagedkv.spec import KVSpec


@dataclass(frozen=True)
class PageLayout:
    """What a page of a model holds, and where: known before any memory is taken.

    Attributes:
        spec: the model's layers.
        cut: their groups and positions.
        page_size: token slots in a page.
        dtype: of the pages.
        devices: per layer; the same for all layers of a position.
    """

    spec: KVSpec
    cut: GroupCut
    page_size: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @classmethod
    def of(
        cls,
        spec: KVSpec,
        *,
        page_size: int,
        max_len: int,
        dtype: torch.dtype,
        kv_dtype: str | None,
        device: torch.device | str,
        device_map: Mapping[int, torch.device | str] | None,
    ) -> Self:
        """Cut a model's layers, whose texts have at most ``max_len`` tokens; arguments as in `PagedKVCache`.

        Raises:
            TypeError, ValueError: an argument is not what it must be; ``device_map`` lacks a layer or names one that
                there is not.
        """
        if isinstance(page_size, bool) or not isinstance(page_size, int):
            raise TypeError(f"page_size must be an int, was {page_size!r}")
        if not 1 <= page_size <= 256 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 1 to 256, was {page_size}")
        if kv_dtype is not None and kv_dtype not in KV_QUANTS:
            raise ValueError(f"kv_dtype must be None or one of {sorted(KV_QUANTS)}, was {kv_dtype!r}")
        stored = dtype if kv_dtype is None else KV_QUANTS[kv_dtype]
        if device_map is not None and set(device_map) != set(range(spec.num_layers)):
            raise ValueError(
                f"device_map must name the layers 0 to {spec.num_layers - 1}, named {sorted(device_map, key=repr)}"
            )
        devices = tuple(
            _resolved(device if device_map is None else device_map[layer]) for layer in range(spec.num_layers)
        )
        cut = cut_groups(replace(spec, max_len=max_len), page_size=page_size, itemsize=stored.itemsize, devices=devices)
        return cls(spec, cut, page_size, stored, devices)

    def homes(self) -> list[tuple[int, torch.device] | None]:
        """Return each layer's group and device; None for a layer that stores nothing."""
        return [
            None if place is None else (place[0], device)
            for place, device in zip(self.cut.place, self.devices, strict=True)
        ]

    def pages_per_text(self, num_tokens: int, step_tokens: int = 1024) -> int:
        """Return the pages of a text of so many tokens, all groups together, stored ``step_tokens`` at a time."""
        blocks = -(-num_tokens // self.page_size)
        pages = 0
        for group in self.cut.groups:
            if isinstance(group, FullAttention):
                pages += blocks
            else:
                widest = -(-(group.window - 1 + step_tokens) // self.page_size) + 1
                pages += min(blocks, widest + -(-group.num_sink_tokens // self.page_size))
        return pages

    def pages_within(self, memory: int | str | None, max_len: int) -> int:
        """Return how many pages ``memory`` holds, the null page among them; None: see `sizing.default_num_pages`."""
        sizes = self.page_bytes()
        if memory is not None:
            return pages_within(memory, self.page_size, sum(sizes.values()))
        text = self.pages_per_text(max_len)
        return min(default_num_pages(text, size, device) for device, size in sizes.items())

    def page_bytes(self) -> dict[torch.device, int]:
        """Return the bytes of one page on each device, quantisation scales included."""
        scale_bytes = 8 if is_quantised(self.dtype) else 0  # a float32 for K and one for V
        sizes: dict[torch.device, int] = {}
        for position, (width, heads) in enumerate(zip(self.cut.position_widths, self.cut.position_heads, strict=True)):
            device = self.devices[self.cut.layers_at(position)[0]]
            slot = width * self.dtype.itemsize + heads * scale_bytes
            sizes[device] = sizes.get(device, 0) + slot * self.page_size
        return sizes


def _resolved(device: torch.device | str) -> torch.device:
    """Return the device with its index, so that "cuda" and "cuda:0" are the same one."""
    return torch.empty(0, device=device).device


class PageTensors:
    """K and V of every layer in pages.

    Attributes:
        k_pages: per layer ``[num_pages, num_kv_heads, page_size, k_dim]``, a view; without heads where the layer
            stores nothing.
        v_pages: per layer ``[num_pages, num_kv_heads, page_size, v_dim]``, likewise.
        kv_scales: per layer the float32 scales of K and V, each ``[num_pages, num_kv_heads, page_size]``, or None.
        buffers: every tensor that owns memory, ``[num_pages, …]``: what a page copy moves.
    """

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        """Allocate ``num_pages`` pages."""
        self.page_size = layout.page_size
        self._spec = layout.spec
        self._num_pages = num_pages
        self._dtype = layout.dtype
        self.k_pages: list[torch.Tensor] = []
        self.v_pages: list[torch.Tensor] = []
        for layer, device in zip(layout.spec.layers, layout.devices, strict=True):
            nothing = torch.empty((num_pages, 0, self.page_size, layer.k_dim), dtype=self._dtype, device=device)
            self.k_pages.append(nothing)
            self.v_pages.append(nothing.new_empty(num_pages, 0, self.page_size, layer.v_dim))
        self.kv_scales: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layout.spec.num_layers
        self._by_device: dict[torch.device, list[torch.Tensor]] = {}
        for position, heads in enumerate(layout.cut.position_heads):
            members = layout.cut.layers_at(position)
            device = layout.devices[members[0]]
            self._place(members, device)
            if is_quantised(self._dtype):
                self._place_scales(members, heads, device)

    @property
    def devices(self) -> list[torch.device]:
        """The devices that have memory here."""
        return list(self._by_device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """See the class."""
        return [tensor for tensors in self._by_device.values() for tensor in tensors]

    def _buffer(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = torch.empty((self._num_pages, *shape), dtype=dtype, device=device)
        self._by_device.setdefault(device, []).append(buffer)
        return buffer

    def _place(self, members: list[int], device: torch.device) -> None:
        """Make a position's buffer, and the views of its layers, ``members``.

        Where all of them store as many elements of K, and of V, each is contiguous. Else a page has K and then V of
        whichever layer, as long as they are, in one row of the longest.
        """
        size, layers = self.page_size, [self._spec.layers[index] for index in members]
        k_sizes = [layer.num_kv_heads * layer.k_dim * size for layer in layers]
        v_sizes = [layer.num_kv_heads * layer.v_dim * size for layer in layers]
        if len(set(k_sizes)) == len(set(v_sizes)) == 1:
            k_rows = self._buffer(k_sizes[0], dtype=self._dtype, device=device)
            v_rows = self._buffer(v_sizes[0], dtype=self._dtype, device=device)
            parts = [(k_rows, v_rows)] * len(members)
        else:
            widest = max(k + v for k, v in zip(k_sizes, v_sizes, strict=True))
            rows = self._buffer(widest, dtype=self._dtype, device=device)
            parts = [(rows[:, :k], rows[:, k : k + v]) for k, v in zip(k_sizes, v_sizes, strict=True)]
        for index, layer, (k_part, v_part) in zip(members, layers, parts, strict=True):
            self.k_pages[index] = k_part.view(-1, layer.num_kv_heads, size, layer.k_dim)
            self.v_pages[index] = v_part.view(-1, layer.num_kv_heads, size, layer.v_dim)

    def _place_scales(self, members: list[int], heads: int, device: torch.device) -> None:
        k_scales, v_scales = (self._buffer(heads, self.page_size, dtype=torch.float32, device=device) for _ in range(2))
        for index in members:
            mine = self._spec.layers[index].num_kv_heads
            self.kv_scales[index] = k_scales[:, :mine], v_scales[:, :mine]

    def clear(self, pages: NDArray[np.int32]) -> None:
        """Fill whole pages, int32 ``[n]``, with zeros."""
        for device, tensors in self._by_device.items():
            index = torch.from_numpy(pages.astype(np.int64)).to(device)
            for tensor in tensors:
                tensor[index] = 0

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy whole pages of every layer, int32 ``[n, 2]`` (source, destination)."""
        for device, tensors in self._by_device.items():
            copy_pages(tensors, torch.from_numpy(copies).to(device))

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's K and V at ``slots``, int64 ``[n]``: ``[n, num_kv_heads, dim]`` each.

        Quantised ones come as float32.
        """
        pages, offsets = slots // self.page_size, slots % self.page_size
        k, v = self.k_pages[layer][pages, :, offsets], self.v_pages[layer][pages, :, offsets]
        scales = self.kv_scales[layer]
        if scales is None:
            return k, v
        return dequantise(k, scales[0][pages, :, offsets]), dequantise(v, scales[1][pages, :, offsets])
