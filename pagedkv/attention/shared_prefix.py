"""Sequences whose tables begin with the same pages: which they are, and whether reading those once pays.

Takes block tables and lengths on the host, gives groups of rows with the length that each group shares; reads no K or V
and launches nothing. A backend that can read a shared beginning once for all of its sequences (*cascade*) finds the
groups on the `AttentionBatch`; other backends ignore them, and the answers agree within rounding either way.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from .transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .batch import AttentionBatch

Mode: TypeAlias = Literal["auto", "always", "never"]
KEY = "shared prefixes"
"""Where the groups hang on `AttentionBatch.prepared`."""
ALIGNMENT = 128
"""A shared length is a multiple of this many tokens, and of the page size: kernels cut it into whole tiles."""


class Group(NamedTuple):
    """Rows of the batch whose first ``length`` tokens lie in the same pages."""

    rows: tuple[int, ...]
    length: int


class SharedPrefixes(NamedTuple):
    """The disjoint groups of a step, and each row's shared length (0 without a group), int32 ``[num_sequences]``."""

    groups: tuple[Group, ...]
    lengths: torch.Tensor
    mode: Mode


class Costs(NamedTuple):
    """What a GPU takes, for the estimate only: bytes a second from memory and from its L2 cache, and sizes.

    The defaults are of the H200 class: 4.8 TB/s by the data sheet, a cache twice as fast of which half holds K and V,
    132 multiprocessors, and 6 microseconds for one launch more. They decide what is read when, never what comes out.
    """

    memory: float = 4.8e12
    cache: float = 9.6e12
    cache_bytes: float = 25e6
    processors: int = 132
    launch: float = 6e-6


H200 = Costs()


def share_prefixes(
    batch: AttentionBatch,
    page_size: int,
    *,
    tables: NDArray[np.int32] | None = None,
    kv_lens: NDArray[np.int64] | None = None,
    q_lens: NDArray[np.int64] | None = None,
    mode: Mode = "auto",
) -> SharedPrefixes | None:
    """Find the rows of ``batch`` that share their first pages, and let backends read those once; never waits.

    Only rows of one query take part. The batch keeps what was found: call it before the step's first layer.

    Args:
        batch: the step; what was found hangs on it.
        page_size: token slots per page, a power of two.
        tables: ``[num_sequences, width]`` on the host; by default the batch's own, which must then be on a CPU.
        kv_lens: ``[num_sequences]`` on the host, likewise.
        q_lens: ``[num_sequences]`` on the host, likewise.
        mode: "auto" leaves it to `pays`, layer by layer; "always" cascades every group; "never" none.

    Returns:
        What was found, or None where nothing is shared.

    Raises:
        ValueError: if ``mode`` is another, or host tables are wanted for a batch on a device and not given.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
    if tables is None or kv_lens is None or q_lens is None:
        if batch.block_tables.device.type != "cpu":
            raise ValueError("tables, kv_lens and q_lens must be given for a batch on a device, got None")
        tables, kv_lens = batch.block_tables.numpy(), batch.kv_lens.numpy()
        q_lens = np.diff(batch.cu_q_lens.numpy())
    groups = () if mode == "never" else find_groups(tables, kv_lens, q_lens, page_size)
    if not groups:
        batch.prepared.pop(KEY, None)
        return None
    lengths = [0] * batch.num_sequences
    for group in groups:
        for row in group.rows:
            lengths[row] = group.length
    found = SharedPrefixes(groups, to_device(lengths, torch.int32, batch.block_tables.device), mode)
    batch.prepared[KEY] = found
    return found


def find_when_asked(
    batch: AttentionBatch,
    page_size: int,
    *,
    tables: NDArray[np.int32],
    kv_lens: NDArray[np.int64],
    q_lens: NDArray[np.int64],
    mode: Mode,
) -> None:
    """Let `shared_of` find what `share_prefixes` would find now; the arrays must stay as they are for the step."""
    # Without the batch itself: a cycle would keep the step's scratch memory until the collector comes by.
    batch.prepared[KEY] = partial(
        share_prefixes, page_size=page_size, tables=tables, kv_lens=kv_lens, q_lens=q_lens, mode=mode
    )


def shared_of(batch: AttentionBatch) -> SharedPrefixes | None:
    """Return what is shared in the step, looked for once; None where nothing is, or nobody allowed it."""
    found: SharedPrefixes | partial[SharedPrefixes | None] | None = batch.prepared.get(KEY)
    return found(batch) if isinstance(found, partial) else found


def find_groups(
    tables: NDArray[np.int32], kv_lens: NDArray[np.int64], q_lens: NDArray[np.int64], page_size: int
) -> tuple[Group, ...]:
    """Return the disjoint groups that save the most reading: ``(members - 1) * length`` tokens, summed.

    Rows are sorted by their tables, so that sharers are neighbours; a run of rows is either one group, of the length
    that all share, or is cut where neighbours share least. O(n log n) comparisons of rows; where no two rows begin with
    the same page, one look at the first column.
    """
    unit = max(page_size, ALIGNMENT)
    # The newest token is never shared: it is this row's own query.
    usable = np.where(q_lens == 1, (np.asarray(kv_lens) - 1) // unit, 0)
    rows = np.flatnonzero(usable > 0)
    if rows.size < 2 or np.unique(tables[rows, 0]).size == rows.size:
        return ()
    pages = unit // page_size
    ordered = tables.astype(">i4")  # big-endian, so that bytes sort as the numbers do
    order = sorted(rows.tolist(), key=lambda row: ordered[row, : usable[row] * pages].tobytes())
    shared = [_common(tables[a], tables[b], int(min(usable[a], usable[b])), pages) for a, b in pairwise(order)]
    return tuple(
        Group(tuple(sorted(order[first:last])), length * unit)
        for first, last, length in _best_runs(shared, 0, len(order))[1]
    )


def _common(a: NDArray[np.int32], b: NDArray[np.int32], most: int, pages: int) -> int:
    """Return how many units of ``pages`` table entries two rows share from the start, at most ``most``.

    The null page is nobody's, so it is not shared: pages given back show as it.
    """
    different = np.flatnonzero((a[: most * pages] != b[: most * pages]) | (a[: most * pages] == 0))
    return most if different.size == 0 else int(different[0]) // pages


def _best_runs(shared: Sequence[int], first: int, last: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the units saved by the best groups of rows ``first`` to ``last - 1``, and these as (first, last, length).

    ``shared[i]`` is what rows ``i`` and ``i + 1`` have in common. Runs still to be cut wait on a list, so that no depth
    of nesting can exhaust the stack; their results are added up in reverse.
    """
    runs, waiting = [], [(first, last)]
    while waiting:
        begin, end = waiting.pop()
        if end - begin < 2:
            continue
        low = min(shared[begin : end - 1])
        cuts = [i + 1 for i in range(begin, end - 1) if shared[i] == low]
        parts = list(zip([begin, *cuts], [*cuts, end], strict=True))
        runs.append((begin, end, low, parts))
        waiting += parts
    best: dict[tuple[int, int], tuple[int, list[tuple[int, int, int]]]] = {}
    for begin, end, low, parts in reversed(runs):
        own = low * (end - begin - 1)
        below = [best.get(part, (0, [])) for part in parts]
        saved = sum(value for value, _ in below)
        if own >= saved:
            best[begin, end] = own, [(begin, end, low)] if low else []
        else:
            best[begin, end] = saved, [run for _, found in below for run in found]
    return best.get((first, last), (0, []))


def seconds(
    groups: Sequence[Group], token_bytes: int, partial_bytes: int, num_kv_heads: int, costs: Costs
) -> tuple[float, float]:
    """Return the estimated time to read the shared beginnings (row by row, once for all).

    Row by row, the first reader takes them from memory; the others hit the cache as far as it holds them. Once for all
    costs a launch, the partial results of every row (``partial_bytes`` each, written and read), and a device that is
    not full where groups are few and short.

    Args:
        groups: rows and lengths.
        token_bytes: a token's K and V in the layer.
        partial_bytes: a row's partial result of one split.
        num_kv_heads: programs per split.
        costs: the device.
    """
    once = sum(group.length for group in groups) * token_bytes
    again = sum((len(group.rows) - 1) * group.length for group in groups) * token_bytes
    cached = min(1.0, costs.cache_bytes / once) if once else 1.0
    by_row = once / costs.memory + again * (cached / costs.cache + (1 - cached) / costs.memory)
    splits = [-(-group.length // 512) for group in groups]
    partial = sum(2 * len(group.rows) * count for group, count in zip(groups, splits, strict=True)) * partial_bytes
    full = min(1.0, sum(splits) * num_kv_heads / costs.processors)
    return by_row, costs.launch + once / (costs.memory * max(full, 1e-9)) + partial / costs.memory


def pays(shared: SharedPrefixes, token_bytes: int, partial_bytes: int, num_kv_heads: int, costs: Costs = H200) -> bool:
    """Return whether a layer should cascade: forced, or estimated to be quicker."""
    if shared.mode == "always":
        return True
    by_row, at_once = seconds(shared.groups, token_bytes, partial_bytes, num_kv_heads, costs)
    return at_once < by_row
