"""The Mooncake traces: a JSON object a line, with one id per 512-token block of the prompt.

Takes those lines, gives requests whose prompts begin alike exactly where the ids do, and makes the tokens up: an id
stands for 512 ids of its own, and every output token is one that occurs nowhere else. The last block is cut to
``input_length``. Source: kvcache-ai/Mooncake; Qin et al., "Mooncake", FAST 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lines import count_in, counts_in, field_of, json_object, number_in
from .request import OUTPUT_IDS, NewIds, Request, Runs, Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BLOCK = 512
_MOST_BLOCKS = OUTPUT_IDS // BLOCK


def read_mooncake(path: Path, lines: Iterable[tuple[int, str]], limit: int | None) -> Trace:
    """Return the trace; see `read_trace`."""
    outputs = NewIds(OUTPUT_IDS, 2 * OUTPUT_IDS)
    place_of: dict[int, int] = {}
    requests: list[Request] = []
    for number, text in lines:
        if len(requests) == limit:
            break
        try:
            record = json_object(text)
            length = count_in(field_of(record, "input_length"), "input_length", least=1)
            new = count_in(field_of(record, "output_length"), "output_length")
            ids = counts_in(field_of(record, "hash_ids"), "hash_ids", most=2**64 - 1)
            if len(ids) != -(-length // BLOCK):
                raise ValueError(f"hash_ids must have one id per {BLOCK} of {length} tokens, had {len(ids)}")
            firsts = [BLOCK * place_of.setdefault(block, len(place_of)) for block in ids]
            if len(place_of) > _MOST_BLOCKS:
                raise ValueError(f"the trace has more than {_MOST_BLOCKS:,} different blocks; read it with a limit")
            arrival = number_in(field_of(record, "timestamp"), "timestamp") / 1000
            requests.append(Request(arrival, Runs(firsts, BLOCK, length), outputs.take(new)))
        except ValueError as error:
            raise TraceError(path, number, str(error)) from error
    return Trace(str(path), "mooncake", requests, hits_known=True, outputs_known=False)
