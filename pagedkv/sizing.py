"""How much memory a KV cache may take, as people write it: "2GiB", "0.5 GB", or a number of bytes.

Takes text and machine facts, gives bytes and pages, and refuses to allocate anything.
"""

from __future__ import annotations

import os
import re

import torch

from pagedkv.allocator.tokens import count_of

DEFAULT_SEQUENCES = 32
DEFAULT_SHARE = 4  # at most a quarter of what is free

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def require_count(name: str, value: int) -> int:
    """Return ``value`` if it is a whole number of at least 1; else raise TypeError or ValueError that names it."""
    return count_of(value, name, 1)


def require_float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if K and V can be of it: a floating point torch.dtype; else raise TypeError."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point torch.dtype, was {dtype!r}")
    return dtype


def parse_memory(memory: int | str) -> int:
    """Return ``memory`` in bytes; text is a number with a unit: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Raises:
        ValueError: if it cannot be read, or is not positive.
        TypeError: if it is neither an int nor a str.
    """
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise TypeError(f"memory must be a number of bytes or text such as '2GiB', was {memory!r}")
    if isinstance(memory, int):
        size = memory
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", memory)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"memory must be a number of bytes or text such as '2GiB' or '500 MB', was {memory!r}")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"memory must be more than zero bytes, was {memory!r}")
    return size


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on ``device`` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def pages_within(memory: int | str, page_size: int, page_bytes: int) -> int:
    """Return how many pages of ``page_bytes`` fit into ``memory``, the null page among them.

    Raises:
        ValueError, TypeError: as `parse_memory`; or no usable page fits.
    """
    size = parse_memory(memory)
    if size < 2 * page_bytes:
        raise ValueError(
            f"memory must hold the null page and one more, {2 * page_bytes} bytes at page_size {page_size}, "
            f"was {size} bytes"
        )
    return size // page_bytes


def default_num_pages(pages_per_text: int, page_bytes: int, device: torch.device) -> int:
    """Return room for 32 sequences of the model's context, at most a quarter of the free memory.

    ``pages_per_text`` are the pages of one such sequence, all layer groups together. On a CPU the system commits memory
    at first touch and low page ids are reused first, so what is resident follows use, not this number.
    """
    wanted = DEFAULT_SEQUENCES * pages_per_text + 1
    affordable = free_memory(device) // DEFAULT_SHARE // page_bytes
    return max(2, min(wanted, affordable))
