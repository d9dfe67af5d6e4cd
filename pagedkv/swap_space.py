"""SwapSpace: host memory for pages of sequences that had to leave the device, each under a checksum.

Takes a `PagedKVCache` and sequences at rest; moves their pages out and in by the allocator's swap plans; refuses to
choose who leaves. A page's checksum (CRC-32 over every layer's bytes, K, V and scales) is taken when it arrives and
proved before it goes back: a damaged page is never read by a model.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

import torch

from pagedkv.allocator.host_pool import HostPool
from pagedkv.sizing import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from pagedkv.allocator import Sequence
    from pagedkv.cache import PagedKVCache


class DamagedPage(RuntimeError):  # noqa: N818  (named for the situation)
    """A page in host memory is not what was put there; its sequence lies there still, and has to be computed again."""


class SwapSpace:
    """A host pool of ``memory`` for one cache; every call is done with its copies when it returns.

    Args:
        cache: whose pages it takes.
        memory: bytes, or text such as "4GiB"; as with any tensor, the system commits it at first use.
        clock: seconds, for the measured rate.

    Attributes:
        pages: uint8 ``[num_pages, page_bytes]``: a page's bytes over all buffers of ``cache.page_tensors``, one after
            the other.
        host_pool: which of them are held, and by whom.
        bytes_moved, seconds: of all moves so far.
    """

    def __init__(
        self, cache: PagedKVCache, memory: int | str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Take the memory.

        Raises:
            ValueError, TypeError: as `parse_memory`; or not one page fits.
        """
        self.page_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in cache.page_tensors)
        num_pages = parse_memory(memory) // self.page_bytes
        if num_pages < 1:
            raise ValueError(f"memory must hold at least one page of {self.page_bytes} bytes, was {memory!r}")
        self.host_pool = HostPool(num_pages)
        pinned = any(tensor.device.type == "cuda" for tensor in cache.page_tensors)
        self.pages = torch.empty((num_pages, self.page_bytes), dtype=torch.uint8, pin_memory=pinned)
        self.bytes_moved = 0
        self.seconds = 0.0
        self._cache = cache
        self._clock = clock
        self._checksums: dict[int, int] = {}

    def bytes_of(self, sequence: Sequence) -> int:
        """Return the bytes that a sequence on the device takes with it."""
        tables = (sequence.block_table(group) for group in range(len(self._cache.allocator.groups)))
        return sum(int((table != 0).sum()) for table in tables) * self.page_bytes

    def swap_out(self, sequence: Sequence) -> None:
        """Move a sequence's pages here and give them back to the device.

        Raises:
            OutOfPages: there are too few host pages; the sequence is where it was.
            CopiesPending, ReservationOpen: it is not at rest.
        """
        started = self._clock()
        with self._cache.allocator.swap_out(sequence, self.host_pool) as plan:
            device, host = _columns(plan.copies)
            first = 0
            for tensor in self._cache.page_tensors:
                rows = _as_bytes(tensor)[device.to(tensor.device)]
                self.pages[host, first : first + rows.shape[1]] = rows.to("cpu")
                first += rows.shape[1]
            for page in host.tolist():
                self._checksums[page] = self._checksum(page)
        self._count(len(host), started)

    def swap_in(self, sequence: Sequence) -> int:
        """Bring a sequence's pages back and return how many bytes moved; what can be found on the device does not.

        Raises:
            DamagedPage: a page's checksum is wrong; nothing has moved, and closing the sequence is all that is left.
            OutOfPages: the device has too few pages; the sequence lies here as before.
        """
        started = self._clock()
        with self._cache.allocator.swap_in(sequence) as plan:
            device, host = _columns(plan.copies)
            for page in host.tolist():
                if self._checksum(page) != self._checksums[page]:
                    raise DamagedPage(f"host page {page} of {sequence!r} must have its checksum, has another one")
            self._cache.run_copies()  # a scrub clears whole pages, so before they are filled
            first = 0
            for tensor in self._cache.page_tensors:
                target = _as_bytes(tensor)
                rows = self.pages[host, first : first + target.shape[1]]
                target[device.to(tensor.device)] = rows.to(tensor.device)
                first += target.shape[1]
        self._count(len(host), started)
        return len(host) * self.page_bytes

    def _checksum(self, page: int) -> int:
        return zlib.crc32(self.pages[page].numpy().data)

    def _count(self, num_pages: int, started: float) -> None:
        self.bytes_moved += num_pages * self.page_bytes
        self.seconds += self._clock() - started


def _columns(copies: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the device pages and the host pages of a plan, int64 ``[n]`` each."""
    pairs = torch.from_numpy(copies.astype("int64"))
    return pairs[:, 0], pairs[:, 1]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a page tensor as uint8 ``[num_pages, bytes]``, a view."""
    return tensor.view(len(tensor), -1).view(torch.uint8)
