"""Which tile sizes a layer gets on which device: functions of the layer and the device alone, never of the batch.

Takes head counts, dims, dtypes and the target; gives the constants that a kernel is compiled with. A row's bits follow
from these, so nothing here may look at who else is in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from ..calls import AttendCall

LARGEST_DIM = 256
PAGE_SIZES = tuple(1 << power for power in range(9))
SPLIT_TOKENS = 512
"""Tokens in a split of decode. A split's partial result is 4 bytes a channel and query row, under 2 % of its K and V
for eight query heads per KV head; at 32k tokens the splits begin to grow instead of becoming more."""
_MANY_SPLITS, _MORE_SPLITS = 64, 128


class Target(NamedTuple):
    """What a device can do: ``kind`` "cuda", "hip" or "interpreter", and for cuda its compute capability."""

    kind: str
    capability: int = 0

    @property
    def has_fp8(self) -> bool:
        """Whether the hardware converts float8_e4m3fn."""
        return self.kind == "cuda" and self.capability >= 89


class Layer(NamedTuple):
    """What decides a layer's tiles. ``quant`` is "none", "int8", "fp8" or "fp8_bits" (bytes decoded by hand)."""

    num_kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    page_size: int
    dtype: torch.dtype
    quant: str


class Tiles(NamedTuple):
    """Constants of a layer's kernels: rows and positions of a tile, its padded dims, warps and pipeline stages."""

    block_m: int
    block_n: int
    k_pad: int
    v_pad: int
    num_warps: int
    num_stages: int


def target_of(device: torch.device) -> Target:
    """Return the target that kernels for tensors on ``device`` are compiled for."""
    if device.type != "cuda":
        return Target("interpreter")
    if torch.version.hip is not None:
        return Target("hip")
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


def layer_of(call: AttendCall, target: Target) -> Layer:
    """Return the layer of a call."""
    pages = call.k_pages
    return Layer(
        num_kv_heads=pages.shape[1],
        group=call.q.shape[1] // pages.shape[1],
        k_dim=pages.shape[3],
        v_dim=call.v_pages.shape[3],
        page_size=pages.shape[2],
        dtype=call.q.dtype,
        quant=quant_of(pages.dtype, target),
    )


def quant_of(dtype: torch.dtype, target: Target) -> str:
    """Return how pages of ``dtype`` are read on ``target``."""
    if dtype == torch.int8:
        return "int8"
    if dtype == torch.float8_e4m3fn:
        return "fp8" if target.has_fp8 else "fp8_bits"
    return "none"


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def decode_tiles(layer: Layer, target: Target) -> Tiles:
    """Return decode's tiles: as few rows as hold the group (16 is the least a matrix product takes)."""
    k_pad, v_pad = _padded(layer)
    wide = layer.dtype == torch.float32
    block_m = max(16, power_of_two(layer.group))
    block_n = min(max((2048 if wide else 8192) // max(k_pad, v_pad), 16 if wide else 32), 128)
    return Tiles(block_m, block_n, k_pad, v_pad, 8 if block_m >= 64 else 4, _stages(layer, target))


def prefill_tiles(layer: Layer, target: Target) -> Tiles:
    """Return prefill's tiles: many rows, so that each tile of K and V feeds much arithmetic."""
    k_pad, v_pad = _padded(layer)
    widest = max(k_pad, v_pad)
    hopper = target.kind == "cuda" and target.capability >= 90
    if layer.dtype == torch.float32:
        rows, block_n, warps = 32, 32 if widest <= 64 else 16, 4 if widest <= 64 else 8
    else:
        rows = 128 if widest <= 128 or hopper else 64
        block_n = 64 if widest <= 64 or (widest <= 128 and hopper) else 32
        warps = 4 if target.kind == "hip" else 8
    return Tiles(max(rows, power_of_two(layer.group)), block_n, k_pad, v_pad, warps, _stages(layer, target))


def _stages(layer: Layer, target: Target) -> int:
    """Return the pipeline's depth. K and V hang on page ids, which are loaded too: half the stages go to those.

    Five stages keep two tiles of K and V in flight; three would keep one, fetched when it is waited for.
    """
    if target.kind != "cuda":
        return 2
    return 3 if layer.dtype == torch.float32 else 5


def max_splits(layer: Layer) -> int:
    """Return the most splits of one sequence: more where few KV heads leave the device idle."""
    return _MANY_SPLITS if layer.num_kv_heads >= 4 else _MORE_SPLITS


def _padded(layer: Layer) -> tuple[int, int]:
    """Return K's and V's dims as the kernels hold them: powers of two from 16."""
    return max(16, power_of_two(layer.k_dim)), max(16, power_of_two(layer.v_dim))
