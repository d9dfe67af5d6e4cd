"""Generated requests of the shape of public traces, for where no trace file is given.

Takes a number of requests and a seed, gives `Request` objects, and claims no more than the shape: lengths, and for
conversations how often a prompt begins like an earlier one.
"""

from __future__ import annotations

import numpy as np

from pagedkv.allocator.traces import Request, Runs

BLOCK = 512
OUTPUT_IDS = 2**31


def conversations(count: int, seed: int = 0) -> list[Request]:
    """Return requests like Mooncake's conversation trace: 13,900 + 360 tokens, one first block, some of them grown."""
    draw = np.random.default_rng(seed)
    requests: list[Request] = []
    threads: list[list[int]] = []
    next_block, next_output = 1, OUTPUT_IDS
    for index in range(count):
        length = int(np.clip(draw.lognormal(9.2, 0.8), 900, 120_000))
        new = int(np.clip(draw.lognormal(5.6, 0.8), 1, 2000))
        blocks = [0]
        if threads and draw.random() < 0.06:
            blocks = list(threads[int(draw.integers(len(threads)))])
            length = max(length, len(blocks) * BLOCK)
        fresh = -(-length // BLOCK) - len(blocks)
        blocks += range(next_block, next_block + fresh)
        next_block += fresh
        threads.append(blocks[: length // BLOCK] or [0])
        firsts = [block * BLOCK for block in blocks]
        requests.append(Request(float(index), Runs(firsts, BLOCK, length), Runs([next_output], new, new)))
        next_output += new
    return requests


def chats(count: int, seed: int = 0) -> list[Request]:
    """Return requests like Azure's conversation trace: about 1,150 + 210 tokens, all distinct."""
    draw = np.random.default_rng(seed)
    requests: list[Request] = []
    next_prompt, next_output = 0, OUTPUT_IDS
    for index in range(count):
        length = int(np.clip(draw.lognormal(6.6, 0.95), 2, 13_000))
        new = int(np.clip(draw.lognormal(5.1, 0.7), 7, 1000))
        requests.append(Request(float(index), Runs([next_prompt], length, length), Runs([next_output], new, new)))
        next_prompt += length
        next_output += new
    return requests
